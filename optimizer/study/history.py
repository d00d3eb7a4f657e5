"""The history of a study: its trials in order, the measurement of each plan, and Optuna's view of them.

Everything here is rebuilt from the log, so a killed study resumes as if it had not been interrupted.
"""

from __future__ import annotations

import logging
import re
import sys
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from evaluators.measurement.drift import Drift
from evaluators.samples import Measurement, Samples
from evaluators.sampling import ColdStart
from search_spaces.core.bounded import Own, built, plain
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import RunFolderError, shown
from search_spaces.core.plan import Plan

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from optimizer.samplers.study import StudySampler
    from optimizer.study.log import Record

_LOGGER = logging.getLogger("partition_optimizer")
_CONSTRAINT = re.compile(r"constraints:[^\x00-\x1f\x7f]{1,200}")
_MOST_TRIALS = 1 << 53
_SURE_RUNS, _SURE_PLANS = 2, 8
OPTIMUM, UNSEEN, WARM = "model optimum", "random draw", "warm start"


INFEASIBLE = "infeasible"
"""Start of the failure text of a plan that was not run because it violates a constraint."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One proposal and its result.

    Attributes:
        number: position in the study, from 0.
        plan: the canonical plan.
        origin: who proposed it: the name of a baseline, ``model optimum``, the sampler's name, ``random draw`` where
            the sampler only repeats itself; or ``warm start`` for a plan of an earlier study.
        params: the point of the space; empty for a plan outside the space.
        measurement: its measurement; None for a repeat and for a failure.
        failure: why it could not be measured, or "".
        repeat_of: number of the trial that measured the same plan before, or None.
        attributes: for samplers beside the values: the violation of each constraint.
        speed: the machine's slowness then, relative to the start of the study (1.2: 20 % slower).
    """

    number: int
    plan: Annotated[Plan, Own(Plan.from_json)]
    origin: str
    params: Mapping[str, Any]
    measurement: Annotated[Measurement, Own(Measurement.from_json)] | None = None
    failure: str = ""
    repeat_of: int | None = None
    attributes: Mapping[str, Any] | None = None
    speed: float = 1.0

    @property
    def median_s(self) -> float:
        """The median latency in seconds, scaled to the speed at the start; infinite where there is none."""
        return self.measurement.median_s / self.speed if self.measurement else float("inf")

    @property
    def broke(self) -> str:
        """Why the device could not run the plan; "" where it did, or where the plan violates a constraint."""
        return "" if self.failure.startswith(INFEASIBLE) else self.failure

    @property
    def raced(self) -> bool:
        """Whether it was stopped early, clearly slower than the best plan at that time."""
        return self.measurement is not None and self.measurement.stopped == "raced"

    def to_json(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        return {**plain(Trial, self), "digest": self.plan.digest, "attributes": dict(self.attributes or {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """Build a trial from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        found = built(cls, data, "a trial in the log is", RunFolderError)
        return replace(found, attributes=plain_attributes(found.attributes or {}))


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, float]:
    """Return the attributes accepted from a log or a storage: the finite numbers of Optuna's constraints.

    Samplers may write anything into attributes, and some read it back as a pickle.
    """
    found = dict(attributes)
    return {
        name: float(value)
        for name, value in found.items()
        if _CONSTRAINT.fullmatch(name) and type(value) in (int, float) and abs(value) <= sys.float_info.max
    }


def constraint_attributes(broken: Sequence[Violation]) -> dict[str, Any]:
    """Return Optuna's attributes for violated constraints: values above 0."""
    from optuna.trial import TrialState, create_trial

    if not broken:
        return {}
    trial = create_trial(state=TrialState.FAIL)
    for violation in broken:
        if violation.gap < float("inf"):
            trial.set_constraint(violation.statement, violation.gap)
    return dict(trial.system_attrs)


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether a value of a log fits a parameter."""
    try:
        return distribution._contains(distribution.to_internal_repr(value))  # noqa: SLF001 - Optuna has no other way
    except (ArithmeticError, TypeError, ValueError):
        return False


class _Ranked:
    """Figures of the measured plans that every trial needs; plans that lost a race are left out.

    Attributes:
        best, sure: the fastest plan, and the fastest one with two samples or more.
        ratios: first run / median of later runs, ascending; separately for plans on several processors, which each
            pack weights.
    """

    def __init__(self) -> None:
        self.best: Trial | None = None
        self.sure: Trial | None = None
        self.ratios: dict[bool, list[float]] = {False: [], True: []}

    def add(self, trial: Trial) -> None:
        """Add a trial."""
        if trial.measurement is None or trial.raced:
            return
        samples, warmup_s = trial.measurement.latency_s, trial.measurement.warmup_s
        if warmup_s and not trial.measurement.promised:  # chosen for a fast first run, so biased
            insort(self.ratios[_on_several(trial.plan)], warmup_s[0] / samples.median)
        if self.best is None or trial.median_s < self.best.median_s:
            self.best = trial
        if len(samples.values_s) >= _SURE_RUNS and (self.sure is None or trial.median_s < self.sure.median_s):
            self.sure = trial


def _on_several(plan: Plan) -> bool:
    return len(plan.by_processor()) > 1


class History:
    """The trials of a study, and its Optuna study, kept in step.

    Attributes:
        measured: how many trials of the budget are spent: those that tried a plan for the first time.
        others: the objectives beside the first one.
        drift: the machine's speed over the study.
        running: digest of each plan that is being measured → the number of its trial in Optuna's study.
    """

    def __init__(self, distributions: Mapping[str, BaseDistribution], others: Sequence[str] = ()) -> None:
        import optuna

        from optimizer.samplers import quiet_optuna

        quiet_optuna()
        self.distributions = dict(distributions)
        self.others = tuple(others)
        self._study: optuna.Study = optuna.create_study(directions=["minimize"] * (1 + len(self.others)))
        self._unreported: list[tuple[Trial, list[float] | None]] = []
        self._sampler: StudySampler | None = None
        self.trials: list[Trial] = []
        self.outside: list[Trial] = []
        self.known: dict[str, Trial] = {}
        self.running: dict[str, int] = {}
        self.next_number = 0
        self.drift = Drift()
        self.measured = 0
        self._warned = False
        self._ranked = _Ranked()

    @property
    def study(self) -> optuna.Study:
        """Optuna's study; trials that it did not propose are added when it is read."""
        for trial, value in self._unreported:
            self._add(trial.params, value, trial.attributes or {})
        self._unreported.clear()
        return self._study

    def propose_by(self, sampler: StudySampler) -> None:
        """Set the sampler of the trials to come."""
        self._study.sampler = self._sampler = sampler

    def replay(self, trial: Trial, *, proposed: bool) -> None:
        """Repeat the sampler's proposal of a logged trial, so that a sampler with state in the study rebuilds it.

        Args:
            proposed: whether the sampler proposed it; otherwise it was enqueued.
        """
        if not self._unreported or self._unreported[0][0] is not trial or self._sampler is None:
            return
        _, value = self._unreported.pop(0)
        self._sampler.begin(trial.number, trial.params if proposed else None)
        self._finish(self._ask(None if proposed else trial.params)[0], trial, value)

    def ask(self, number: int, params: Mapping[str, Any] | None = None) -> tuple[int, Mapping[str, Any]]:
        """Return a trial's number in Optuna's study and its parameters: the given ones, or a proposal.

        Args:
            number: of the trial, which seeds the sampler.
        """
        _ = self.study  # with all earlier trials
        if self._sampler is not None:
            self._sampler.begin(number)
        return self._ask(params)

    def _ask(self, params: Mapping[str, Any] | None) -> tuple[int, Mapping[str, Any]]:
        if params is not None:
            self._study.enqueue_trial(dict(params))
        asked = self._study.ask(self.distributions)
        return asked.number, asked.params

    def settle(self, pending: Mapping[str, Mapping[str, Any]]) -> None:
        """Update in Optuna's study which plans are being measured by any worker.

        Args:
            pending: digest → parameters, perhaps written by another worker.
        """
        from optuna.trial import TrialState

        for digest in self.running.keys() - pending.keys():
            self._study.tell(self.running.pop(digest), state=TrialState.FAIL)
        for digest in pending.keys() - self.running.keys():
            if self.has(pending[digest]):
                self.running[digest] = self._add(pending[digest], None, {}, running=True)

    def _add(
        self,
        params: Mapping[str, Any],
        value: list[float] | None,
        attributes: Mapping[str, Any],
        *,
        running: bool = False,
    ) -> int:
        from optuna.trial import TrialState, create_trial

        finished = TrialState.COMPLETE if value is not None else TrialState.FAIL
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING if running else finished,
                values=value,
                params=dict(params),
                distributions=self.distributions,
                system_attrs=dict(attributes),
            )
        )
        return len(self._study.get_trials(deepcopy=False)) - 1

    def _finish(self, number: int, trial: Trial, value: list[float] | None) -> None:
        from optuna.trial import TrialState

        trial_id = self._study.get_trials(deepcopy=False)[number]._trial_id  # noqa: SLF001
        for name, gap in (trial.attributes or {}).items():
            self._study._storage.set_trial_system_attr(trial_id, name, gap)  # noqa: SLF001 - the constraints of a plan
        self._study.tell(number, value, state=TrialState.FAIL if value is None else None)

    @property
    def speed(self) -> float:
        """The machine's slowness now, relative to the start of the study."""
        return self.drift.speed

    def uncertainty(self, trial: Trial) -> float:
        """Return the relative uncertainty of a trial's ``speed``."""
        return self.drift.uncertainty(trial.number, trial.speed)

    def has(self, params: Mapping[str, Any]) -> bool:
        """Return whether parameters, perhaps written by another worker, are a point of the space."""
        return params.keys() == self.distributions.keys() and all(
            contains(d, params[name]) for name, d in self.distributions.items()
        )

    def trial_of(self, data: Mapping[str, Any]) -> Trial:
        """Build a trial from a record of a log or a storage; attributes that are left out are reported once.

        Raises:
            RunFolderError: it is not a trial of this space.
        """
        trial = Trial.from_json(data)
        if (trial.number >= 0 and not self.has(trial.params)) or trial.number > _MOST_TRIALS:
            raise RunFolderError(
                f"trial {trial.number} of the log has parameters that are not in this space", "give another --study"
            )
        dropped = sorted(data["attributes"].keys() - (trial.attributes or {}).keys())
        if dropped and not self._warned:
            self._warned = True
            _LOGGER.warning(
                "the attribute %s of %s is ignored: only constraints are read. Further such attributes are ignored "
                "without a message",
                shown(dropped[0]),
                f"trial {trial.number}" if trial.number >= 0 else "a trial outside the search",
            )
        return trial

    def restore(self, records: tuple[Record, ...]) -> None:
        """Add the trials of a log."""
        for record in records:
            if record.kind == "baseline":
                self.add_outside(self.trial_of(record.data))
            if record.kind != "trial":
                continue
            trial = self.trial_of(record.data)
            if trial.number < 0:
                raise RunFolderError(f"a trial of the log has the number {trial.number}", "give another --study")
            self.tell(trial)
            self.add(trial)

    def tell(self, trial: Trial, number: int | None = None) -> None:
        """Add a finished trial to Optuna's study; its values are final.

        Args:
            number: of its trial in Optuna's study; None where Optuna did not propose it.
        """
        value = self.value_of(trial)
        number = self.running.pop(trial.plan.digest, None) if number is None else number
        if number is None:
            self._unreported.append((trial, value))
        else:
            self._finish(number, trial, value)

    def value_of(self, trial: Trial) -> list[float] | None:
        """Return a trial's values for Optuna, a repeat included: a number for each objective; None for a failure."""
        # A repeat whose first trial was lost with a damaged part of the log has no value.
        source = trial if trial.repeat_of is None else self.known.get(trial.plan.digest, trial)
        if source.measurement is None or any(name not in source.measurement.figures for name in self.others):
            return None
        return [source.median_s, *(source.measurement.figures[name] for name in self.others)]

    def add(self, trial: Trial) -> None:
        """Add a trial of the space."""
        self.trials.append(trial)
        self.next_number = trial.number + 1
        self.measured += trial.repeat_of is None
        self._know(trial)

    def add_outside(self, trial: Trial) -> None:
        """Add a plan that costs no budget; one outside of the space becomes an attribute of Optuna's study."""
        self.outside.append(trial)
        self._study.set_user_attr(
            f"{trial.origin} ({trial.plan.digest[:8]})", {"plan": trial.plan.to_json(), "value": self.value_of(trial)}
        )
        self._know(trial)

    def _know(self, trial: Trial) -> None:
        if trial.repeat_of is not None:
            return
        again = trial.plan.digest in self.known
        self.known[trial.plan.digest] = trial
        if again:
            self._ranked = _Ranked()
        for each in self.known.values() if again else (trial,):
            self._ranked.add(each)

    @property
    def repeats(self) -> int:
        """How many trials proposed a known plan."""
        return len(self.trials) - self.measured

    def number(self, plan: Plan) -> int:
        """Return the number of a plan that was tried, from 1: the baselines outside of the space come first."""
        return list(self.known).index(plan.digest) + 1

    def ranking(self) -> list[Trial]:
        """Return all measured plans, the fastest median first."""
        return sorted((t for t in self.known.values() if t.measurement), key=lambda trial: trial.median_s)

    def cold(self, plan: Plan) -> ColdStart:
        """Return the ratio of first runs to later ones, of plans like this one."""
        ratios = self._ranked.ratios[_on_several(plan)]
        if len(ratios) < _SURE_PLANS:
            return ColdStart()
        return ColdStart(ratios[len(ratios) // 2], ratios[len(ratios) * 9 // 10])

    @property
    def incumbent(self) -> Samples | None:
        """The samples of the fastest plan so far, scaled to the machine's present speed.

        Plans with two samples or more come first: a single fast run may be chance.
        """
        best = self._ranked.sure or self._ranked.best
        if best is None or best.measurement is None:
            return None
        samples = best.measurement.latency_s
        if best.speed == self.speed:
            return samples
        return Samples(tuple(value * self.speed / best.speed for value in samples.values_s), samples.conditions)
