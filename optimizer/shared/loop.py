"""The loop of a worker that shares its study: claim, measure, record, and take over the others' results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from optimizer.model.baselines import Baseline
from optimizer.samplers import seed_of
from optimizer.samplers.study import ExhaustedError
from optimizer.shared.study import SharedStudy
from optimizer.study.history import Trial, constraint_attributes
from optimizer.study.loop import Loop, Origin

if TYPE_CHECKING:
    from optimizer.samplers.study import StudySampler

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SharedLoop(Loop):
    """The loop of one of several workers; the budget is that of all of them together.

    Proposals depend on which worker was faster, so a study of several workers cannot be repeated exactly.

    Attributes:
        shared: the study.
        worker: a number of this worker, which seeds its sampler.
    """

    shared: SharedStudy = field(kw_only=True)
    worker: int = field(kw_only=True)

    def run_outside(self, plans: Iterable[Baseline]) -> None:
        """Measure baselines outside the space that no worker has measured yet; wait for the others' results."""
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
            UnavailableError: the device does not work: this worker's first plans all failed and no other worker has
                measured any, or a plan that worked fails now.
        """
        cardinality, known, problem = self.space.cardinality(), 0, self.search.problem
        if problem is not None:
            fits = problem.fits
            problem = replace(problem, fits=lambda plan: plan.digest not in self.shared.pending and fits(plan))
        # With one seed for all, the workers would propose the same plans at the same time.
        sampler, end_s = self._sampler(problem, seed_of(self.seed, self.worker)), time.monotonic() + self.limit_s
        while True:
            if self._take_up(sampler) or not known:
                known = self.beside
            most = min(self.budget, cardinality - known)
            if self.history.measured >= most or self.proven or (waiting := self._waiting(end_s)) is None:
                return self.history.measured + known >= cardinality
            queue = [(origin, plan) for origin, plan in waiting if plan.digest not in self.shared.pending]
            awaited = not queue and time.monotonic() >= end_s  # plans that were asked for, by others
            if awaited or self.history.measured + len(self.shared.pending) >= most:
                time.sleep(_POLL_S)  # others measure the last plans, and may die
                continue
            try:
                self._propose(sampler, queue)
            except ExhaustedError:  # fewer plans than points of the space
                if not self.shared.pending:
                    return True
                time.sleep(_POLL_S)

    def _propose(self, sampler: StudySampler, queue: Sequence[Origin]) -> None:
        """Ask this worker's own study, which knows all finished and pending trials, for a plan, and try to claim it."""
        history, taken = self.history, {*self.history.known, *self.shared.pending}
        history.settle(self.shared.pending)
        number = len(history.study.get_trials(deepcopy=False))
        asked, trial = self._asked(sampler, (self.worker << 32) + number, queue)
        if trial.plan.digest in taken:
            before = history.known.get(trial.plan.digest)
            sampler.update(replace(trial, repeat_of=before.number if before is not None else trial.number))
            history.tell(replace(trial, repeat_of=trial.number), asked)
            return
        history.running[trial.plan.digest] = asked
        self._claimed(replace(trial, number=-1), "trial", race=self._proposed(trial.origin))

    def _claimed(self, trial: Trial, kind: str, *, race: bool) -> None:
        """Claim a trial's plan, measure it and record the result; nothing if another worker claimed it first."""
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
            found = replace(found, attributes=constraint_attributes(self.search.breaks(trial.plan)))
        self.shared.finish(claim, {**found.to_json(), "values": self.history.value_of(found)})
        if found.failure:
            self.held.append((kind, found))
            self._give_up_if_none_works()

    def _take_up(self, sampler: StudySampler | None) -> bool:
        """Add all trials that finished since the last call, own ones included; return whether there were any."""
        found = self.shared.look()
        for kind, record in found:
            trial = self.history.trial_of(record)
            if trial.plan.digest in self.history.known:
                continue  # it was in our log, or two workers measured it
            self.log.append(kind, record)
            if kind == "baseline":
                self.history.add_outside(trial)
            else:
                self.history.tell(trial)
                self.history.add(trial)
            if sampler is not None and self._teaches(trial):
                sampler.update(trial)
            self.notify(trial)
        return bool(found)
