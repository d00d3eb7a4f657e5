"""The loop of a worker that shares its study: claim, measure, write down, and take up what the others found."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.baselines import Baseline
from optimizer.history import UNSEEN, WARM, Trial, constraint_attributes
from optimizer.loop import Loop, in_space
from optimizer.samplers import make_proposer, make_sampler
from optimizer.samplers.auto import Proposer
from optimizer.shared import SharedStudy
from search_spaces.plan import Plan

_POLL_S = 0.2
_ASKED = 8


@dataclass(frozen=True, slots=True)
class SharedLoop(Loop):
    """See :class:`~optimizer.loop.Loop`; the budget is that of all workers together.

    What is proposed depends on who was faster, so that a study of several workers cannot be repeated to the letter.

    Attributes:
        shared: the study.
        worker: a number of this worker, so that it draws otherwise than the others.
    """

    shared: SharedStudy = field(kw_only=True)
    worker: int = field(kw_only=True)

    def run_outside(self, plans: Iterable[Baseline]) -> None:
        """Measure baselines that the space does not hold and nobody has measured yet; wait for the others' results."""
        waiting = {baseline.plan.digest: baseline for baseline in plans}
        while True:
            self._take_up(None)
            waiting = {digest: b for digest, b in waiting.items() if digest not in self.history.known}
            free = next((b for digest, b in waiting.items() if digest not in self.shared.pending), None)
            if free is not None:
                self._claimed(Trial(-1, free.plan, free.name, {}), "baseline", race=False)
            elif waiting:
                time.sleep(_POLL_S)
            else:
                return

    def run(self) -> bool:
        """Run trials until all workers together have spent the budget; return whether the space is exhausted.

        Raises:
            UnavailableError: the first plans all failed, so the device itself does not work.
        """
        cardinality, known = self.space.cardinality(), 0
        proposer = self.proposer
        if proposer is None and self.problem is not None:
            fits = self.problem.fits
            free = replace(self.problem, fits=lambda plan: plan.digest not in self.shared.pending and fits(plan))
            # An order of its own for each worker: in one and the same they would all want the same plan each time.
            seed = int(np.random.SeedSequence([self.seed, self.worker]).generate_state(1)[0])
            proposer = make_proposer(self.sampler, seed, free)
        if proposer is not None:
            for trial in (*self.history.outside, *self.history.trials):
                proposer.observe(trial.plan, trial.measurement, trial.speed)
        while True:
            if self._take_up(proposer) or not known:
                known = sum(t.origin == WARM and in_space(self.space, t.plan) for t in self.history.outside)
            most = min(self.budget, cardinality - known)
            if self.history.measured >= most or self.proven or time.monotonic() >= self.end_s:
                return self.history.measured + known >= cardinality
            if self.history.measured + len(self.shared.pending) >= most:
                time.sleep(_POLL_S)  # the last plans are with others, who may yet die
                continue
            origin, plan = self._free(cardinality, proposer)
            if plan is not None:
                trial = Trial(-1, plan, origin, self.space.encode(plan))
                self._claimed(trial, "trial", race=self._proposed(origin))

    def _claimed(self, trial: Trial, kind: str, *, race: bool) -> None:
        """Claim a trial's plan, measure it and write down what came of it; somebody else may have been faster."""
        distributions = self.history.distributions if kind == "trial" else {}
        room = self.budget if kind == "trial" else None
        claim = self.shared.claim(trial.plan.digest, kind, trial.params, distributions, room)
        if claim is None:
            return
        try:
            number = claim.number if kind == "trial" else trial.number
            found = self._try(replace(trial, number=number), race=race)
        except BaseException:
            self.shared.give_up(claim)
            raise
        if kind == "trial":
            found = replace(found, attributes=constraint_attributes(self.violations(trial.plan)))
        self.shared.finish(claim, {**found.to_json(), "values": self.history.value_of(found)})

    def _take_up(self, proposer: Proposer | None) -> bool:
        """Take up what anybody has finished since the last look, own trials included; tell whether there was any."""
        found = self.shared.look()
        for kind, record in found:
            trial = self.history.trial_of(record)
            if trial.plan.digest in self.history.known:
                continue  # it was in our log, or a race was lost by a hair
            self.log.append(kind, record)
            if kind == "baseline":
                self.history.add_outside(trial)
            else:
                self.history.tell(trial)
                self.history.add(trial)
                self._give_up_if_all_fail()
            if proposer is not None:
                proposer.observe(trial.plan, trial.measurement, trial.speed)
            self.notify(trial)
        return bool(found)

    def _free(self, cardinality: int, proposer: Proposer | None) -> tuple[str, Plan | None]:
        """Return a plan that nobody has measured or measures now."""
        taken = {*self.history.known, *self.shared.pending}
        for origin, plan in self.queue:
            if plan.digest not in taken:
                return origin, plan
        if proposer is not None:
            proposal = proposer.propose()
            if proposal is not None and proposal.digest not in taken:
                return self.sampler, proposal
        elif (asked := self._asked(taken)) is not None:
            return self.sampler, asked
        unseen = self._unseen(cardinality)
        return UNSEEN, unseen if unseen.digest not in taken else None

    def _asked(self, taken: set[str]) -> Plan | None:
        """Ask the sampler for parameters, a few times where it proposes what is known."""
        from optuna.trial import TrialState

        history = self.history
        for attempt in range(_ASKED):
            number = (self.worker << 32) + (history.next_number << 4) + attempt
            history.study.sampler = make_sampler(self.sampler, self.seed, number, self.problem)
            asked = history.study.ask(history.distributions)
            history.study.tell(asked, state=TrialState.FAIL)  # its result comes as a trial of the shared study
            plan = self.space.decode(asked.params)
            if plan.digest not in taken:
                return plan
        return None
