"""The search loop: ask Optuna's study, decode, look up or measure, log, tell; and the machine's drift meanwhile."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evaluators.base import conditions_of, verified
from evaluators.measurement.disturbance import RunFilter
from evaluators.measurement.drift import probe
from evaluators.samples import Measurement, Samples
from evaluators.sampling import measure
from optimizer.model.baselines import Baseline
from optimizer.samplers import resumes, study_sampler
from optimizer.samplers.auto import AutoProposer, Problem
from optimizer.samplers.study import ExhaustedError
from optimizer.study.history import INFEASIBLE, OPTIMUM, UNSEEN, History, Trial, constraint_attributes
from optimizer.study.log import Record, TrialLog
from optimizer.study.subjects import Search
from search_spaces.core.errors import DeviceLostError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.wording import percent
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.space import EnumerableSpace, in_space

if TYPE_CHECKING:
    from optimizer.samplers.study import StudySampler


_PREDICTED_SLOW = 1.3
_SLOW_LOAD_S = 0.05  # shorter loading times are not logged
_LOOK_EVERY = 16  # one proposal in so many always runs twice: an unbiased sample of first runs
_FAILURES_AT_FIRST = 5
_RESUME = "resume with the same --study when the device works"
_TELL = 0.10  # changes of speed that are reported
LOST = "lost"
"""Kind of the records of plans at which the device stopped working."""
_LOGGER = logging.getLogger("partition_optimizer")

Origin = tuple[str, Plan]


@dataclass(frozen=True, slots=True)
class Loop:
    """The search loop and its inputs.

    Attributes:
        queue: plans of the space to be measured first, with their origin: baselines and warm starts.
        proven_s: a plan that takes no longer ends the search, since it is within ``precision`` of the bound.
        budget: distinct plans of the space to try.
        limit_s: seconds of :meth:`run` after which no trial begins, but those of plans that were asked for.
        asked: digests of these plans.
        notify: called after every trial.
        runs: makes runs, and repeats those that waited for a core.
        held: trials that are not in the log yet, since no plan has worked.
        lost: digests of plans at which the device stopped working in an earlier session; again, they count as failed.
    """

    graph: Graph
    space: EnumerableSpace
    search: Search
    history: History
    log: TrialLog
    sampler: str
    seed: int
    budget: int
    queue: Sequence[Origin]
    notify: Callable[[Trial], None] = lambda _: None
    proven_s: float = 0.0
    limit_s: float = math.inf
    asked: Container[str] = frozenset()
    runs: RunFilter = field(default_factory=RunFilter)
    held: list[tuple[str, Trial]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    def run_outside(self, plans: Iterable[Baseline]) -> None:
        """Measure baselines outside of the space, and a person's own plans; they cost no budget."""
        for baseline in plans:
            if baseline.plan.digest not in self.history.known:
                trial = self._try(Trial(-1, baseline.plan, baseline.name, {}), race=False)
                self._write("baseline", trial)
                self.history.add_outside(trial)
                self.notify(trial)

    def run(self) -> bool:
        """Run trials until the budget is spent; return whether the space is exhausted.

        Raises:
            UnavailableError: the device does not work: the first plans all failed, or one that worked fails now.
        """
        cardinality, known = self.space.cardinality(), self.beside
        sampler, end_s = self._sampler(self.search.problem, self.seed), time.monotonic() + self.limit_s
        while self.history.measured < self.budget and not self.proven and (queue := self._waiting(end_s)) is not None:
            if self.history.measured + known >= cardinality:
                break
            try:
                trial = self._next(sampler, queue)
            except ExhaustedError:  # fewer plans than points of the space: several points may mean one plan
                known = cardinality
                break
            self._write("trial", trial)
            self.history.add(trial)
            sampler.update(trial)
            self.notify(trial)
            self._give_up_if_none_works()
        self._give_up_if_none_works(most=1)
        self._write_held()
        return self.history.measured + known >= cardinality

    @property
    def beside(self) -> int:
        """Number of plans of the space that were measured and cost no budget."""
        return sum(in_space(self.space, trial.plan) for trial in self.history.outside)

    def _write(self, kind: str, trial: Trial) -> None:
        """Write a trial to the log; those before the first plan that works only then: the device may be at fault."""
        self.held.append((kind, trial))
        if trial.measurement or self._works:
            self._write_held()

    @property
    def _works(self) -> bool:
        """Whether a plan has been measured."""
        return any(trial.measurement for trial in self.history.known.values())

    def _write_held(self) -> None:
        for kind, trial in self.held:
            self.log.append(kind, trial.to_json())
        self.held.clear()

    def _sampler(self, problem: Problem | None, seed: int) -> StudySampler:
        """Return the sampler, after all known trials."""
        sampler = study_sampler(
            self.sampler,
            seed,
            self.space,
            problem,
            allowed=lambda plan: not self.search.breaks(plan),
            predict=self.search.predict,
        )
        self.history.propose_by(sampler)
        for trial in self._modelled():
            if not resumes(self.sampler):
                self.history.replay(trial, proposed=self._proposed(trial.origin))
            sampler.update(trial)
        return sampler

    def _modelled(self) -> Iterator[Trial]:
        """Yield the trials from which a sampler learns."""
        return filter(self._teaches, (*self.history.outside, *self.history.trials))

    def _teaches(self, trial: Trial) -> bool:
        """Return whether a sampler can learn from a trial.

        It cannot where the runtime itself places the network, or where a person's plan is split or has ranks in a space
        of other plans.
        """
        if self.search.problem is None:
            return True
        plan, known = trial.plan, {p.name for p in self.search.problem.platform.processors}
        here = known.issuperset(stage.processor for stage in plan.stages)
        return here and (not (plan.is_split or plan.ranks) or in_space(self.space, plan))

    def by_estimate(self) -> list[Plan]:
        """Return the measured plans of the space by the estimate from all measurements, the fastest first."""
        of = self.search.problem
        plain = of is not None and of.chains is None and of.guided and of.criteria is None and of.search is None
        if of is None or not plain or not isinstance(of.space, ChainSpace):
            return [trial.plan for trial in self.history.ranking()]  # sides of a split predict other splits poorly
        judge = AutoProposer(of, self.seed)
        for trial in self._modelled():
            if trial.repeat_of is None:
                judge.observe(trial.plan, trial.measurement, trial.speed)
        return [plan for plan, _ in judge.ranking()]

    @property
    def proven(self) -> bool:
        """Whether the queue is measured and the fastest plan is near enough to the bound to end the search."""
        if not self.proven_s:
            return False
        waiting = any(plan.digest not in self.history.known for _, plan in self.queue)
        best = self.history.incumbent
        return not waiting and best is not None and best.median / self.history.speed <= self.proven_s

    def _waiting(self, end_s: float) -> Sequence[Origin] | None:
        """Return the plans of the queue that wait; when the time is over, those that were asked for.

        None where nothing may begin any more.
        """
        waiting = [(origin, plan) for origin, plan in self.queue if plan.digest not in self.history.known]
        if time.monotonic() < end_s:
            return waiting
        return [(origin, plan) for origin, plan in waiting if plan.digest in self.asked] or None

    def _next(self, sampler: StudySampler, queue: Sequence[Origin]) -> Trial:
        """Try the next plan of the queue or a proposal; a known plan has its value already."""
        history = self.history
        number, trial = self._asked(sampler, history.next_number, queue)
        before = history.known.get(trial.plan.digest)
        if before is None:
            trial = replace(trial, attributes=constraint_attributes(self.search.breaks(trial.plan)))
            trial = self._try(trial, race=self._proposed(trial.origin))
        else:
            trial = replace(trial, repeat_of=before.number)
        history.tell(trial, number)
        return trial

    def _asked(self, sampler: StudySampler, number: int, queue: Sequence[Origin]) -> tuple[int, Trial]:
        """Return the parameters of a trial and its number in Optuna's study: the first of a queue, or else proposed.

        Args:
            number: of the trial.
        """
        origin, plan = next(iter(queue), ("", None))
        asked, params = self.history.ask(number, self.space.encode(plan) if plan is not None else None)
        return asked, Trial(number, self.space.decode(params), origin or sampler.origin, dict(params))

    def _proposed(self, origin: str) -> bool:
        return origin in (UNSEEN, OPTIMUM, self.sampler)

    def _try(self, trial: Trial, *, race: bool) -> Trial:
        """Measure the trial's plan; a plan that the device cannot run is a failed trial, and the search goes on.

        Named plans are measured in full, the others race against the incumbent. A plan that violates a constraint is
        not run; the limit of stages does not apply to plans outside of the space, nor other limits to baselines.
        """
        race = race and not self.history.others  # a slower plan may be better in another objective
        allowed = {"stages"} if trial.number < 0 else set()
        allowed |= set() if race else {"s", "J"}
        if broken := [v for v in self.search.breaks(trial.plan) if v.unit not in allowed]:
            return replace(trial, failure=f"{INFEASIBLE}: {'; '.join(map(str, broken))}")
        try:
            single_run = trial.origin != OPTIMUM and trial.number % _LOOK_EVERY > 0
            found = self._measured(trial.plan, race=race, single_run=single_run)
            return replace(trial, measurement=found, speed=self.history.speed)
        except UnavailableError as error:
            self._check_device(trial.plan)
            return replace(trial, failure=str(error))

    def _check_device(self, failed: Plan) -> None:
        """Run the fastest plan once, after another one has failed.

        Raises:
            UnavailableError: it fails, too, so that the device is at fault and not the plan, the first time.
        """
        good = next(iter(self.history.ranking()), None)
        if good is None:
            return
        try:
            with closing(self.search.session.load(self.graph, good.plan)) as candidate:
                candidate.run(1)
        except UnavailableError as error:
            if failed.digest in self.lost:
                return  # this plan takes the device down
            self.lost.add(failed.digest)
            self.log.append(LOST, {"plan": failed.digest})
            what = f"the device no longer runs plans that it ran before: {error.what.rstrip('.')}"
            raise UnavailableError(what, f"measurements are saved; {_RESUME}") from error

    def _measured(self, plan: Plan, *, race: bool, single_run: bool) -> Measurement:
        """Measure a plan; once more, on the next free device, where the device is lost meanwhile."""
        try:
            return measure_plan(self, plan, race=race, single_run=single_run)
        except DeviceLostError as error:
            _LOGGER.warning("%s; the plan is measured again", error)
        return measure_plan(self, plan, race=race, single_run=single_run)

    def _give_up_if_none_works(self, most: int = _FAILURES_AT_FIRST) -> None:
        """Raise where no plan has worked so far, after a few failures of the device."""
        if self._works:
            return
        failures = [t.broke for _, t in self.held if t.broke]
        if len(failures) >= most:
            what = failures[0].rstrip(".")
            raise UnavailableError(f"no plan could be measured; the first one failed with: {what}", _RESUME)


def measure_plan(loop: Loop, plan: Plan, *, race: bool, single_run: bool = False) -> Measurement:
    """Load, measure and check one plan.

    Args:
        race: whether it may be given up as soon as it has lost against the best plan so far.
        single_run: whether a single-run probe may end the race.

    Raises:
        UnavailableError: it cannot be loaded or run, or it computes something else than the whole model.
    """
    begin_s = time.monotonic()
    candidate = loop.search.session.load(loop.graph, plan)
    load_s = time.monotonic() - begin_s
    conditions = conditions_of(loop.search.session)
    try:
        if race:
            incumbent = loop.history.incumbent
            predicted_slow = incumbent is not None and loop.search.predict(plan) > _PREDICTED_SLOW * incumbent.median
            cold = loop.history.cold(plan)
            found = measure(
                candidate,
                loop.search.proposed,
                incumbent,
                conditions,
                cold,
                predicted_slow=predicted_slow,
                single_run=single_run,
                runs=loop.runs,
            )
        else:
            found = measure(candidate, loop.search.named, conditions=conditions, runs=loop.runs)
        # A plan that lost its race may have been stopped early; it is chosen only where the winner violates a limit.
        raced = found.stopped == "raced"
        if raced and loop.search.asks_all:
            candidate.run(1)
        agreement = verified(candidate) if not raced or loop.search.asks_all else None
        figures = candidate.figures() if loop.search.session.capabilities.figures else {}
    finally:
        candidate.close()
    slow_s = load_s if load_s > _SLOW_LOAD_S else 0.0
    return replace(found, agreement=agreement, figures=figures, load_s=slow_s)


@dataclass(slots=True)
class DriftMonitor:
    """Measures the reference plan after trials, for :mod:`evaluators.measurement.drift`.

    Only sessions that report conditions measure on a machine whose speed may drift.

    Attributes:
        progress: called when the speed has changed by more than a tenth.
        scaled: whether figures are in proportion to the machine's slowness; those of missed deadlines are not.
    """

    loop: Loop
    progress: Callable[[str], None] = lambda _: None
    scaled: bool = True
    _plan: Plan | None = None
    _reported: float = 1.0

    def restore(self, records: Sequence[Record]) -> None:
        """Restore the state from a log, so that a resumed study measures the reference plan at the same trials."""
        for record in records:
            if record.kind in {"trial", "baseline"}:
                self._count(Trial.from_json(record.data))
            elif record.kind == "speed":
                data: Any = record.data
                self._plan = Plan.from_json(data["plan"])
                found = Samples.from_json(data["found"])
                self.loop.history.drift.take(found, float(data["spent_s"]), int(data["position"]))

    def after(self, trial: Trial) -> None:
        """Measure the reference plan, if there is time for it, after a trial that is in the history.

        Raises:
            RunFolderError: the log cannot be written.
        """
        self._count(trial)
        drifts = self.scaled and self.loop.search.session.capabilities.conditions
        if not (drifts and self._choose() and self.loop.history.drift.due()):
            return
        try:
            self._probe()
        except UnavailableError:
            return  # the loop finds out whether the device is gone

    def _choose(self) -> bool:
        """Choose the reference plan: the best of the first measured ones."""
        if self._plan is None and self.loop.history.incumbent is not None:
            self._plan = next((t.plan for t in self.loop.history.ranking() if not t.raced), None)
        return self._plan is not None

    def _probe(self) -> None:
        if self._plan is None:
            return
        with closing(self.loop.search.session.load(self.loop.graph, self._plan)) as candidate:
            found, spent_s = probe(candidate, self.loop.runs)
        position, drift = self.loop.history.next_number, self.loop.history.drift
        drift.take(found, spent_s, position)
        self.loop.log.append(
            "speed",
            {
                "plan": self._plan.to_json(),
                "found": replace(found, conditions=conditions_of(self.loop.search.session)()).to_json(),
                "spent_s": spent_s,
                "position": position,
            },
        )
        if abs(drift.speed / self._reported - 1.0) > _TELL:
            self._reported = drift.speed
            speed = drift.speed
            what = f"{percent(speed - 1.0)} slower than" if speed > 1.0 else f"{percent(1.0 / speed - 1.0)} faster than"
            what = "again as fast as" if abs(speed - 1.0) <= _TELL else what
            self.progress(f"the machine runs {what} at the start of the study; measurements are scaled to one state")

    def _count(self, trial: Trial) -> None:
        if trial.measurement is not None and trial.repeat_of is None:
            found = trial.measurement
            self.loop.history.drift.measured_s += sum(found.warmup_s) + sum(found.latency_s.values_s)
