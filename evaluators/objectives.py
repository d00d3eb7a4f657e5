"""Objectives of a study, and how a loaded plan is measured by each.

An objective is one number per run; smaller is better. :class:`PricedSession` wraps a session so that its candidates
return this number instead of the latency, and each stage's share of it. Sampling, racing, comparison and search work
the same for all objectives.

A new objective is one entry of :data:`OBJECTIVES`: its aggregation says how it is measured, predicted and bounded.
"""

from __future__ import annotations

import difflib
import math
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate, Numbers, Session
from evaluators.energy import Meter, powers_w
from evaluators.forwarding import ForwardingCandidate, ForwardingSession
from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.states import State
from search_spaces.rewrites.lower import lowering


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model of a plan as it is run: the lowered graph, and the operators and processor of each stage.

    Attributes:
        weights: models for which this is equal share their weights; None for weights of its own.
    """

    graph: Graph
    plan: Plan
    weights: Hashable = None


def peak_nbytes(graph: Graph, plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the bytes that each processor needs: for weights of its stages, and at most for activations."""
    found = {}
    for processor, indices in plan.by_processor().items():
        stages = [plan.stages[i].operators for i in indices]
        constants = {t for operators in stages for t in graph.boundary(operators).constants}
        weights = sum(graph.tensors[t].nbytes for t in constants)
        found[processor] = weights, max(most_alive_nbytes(graph, operators) for operators in stages)
    return found


def most_alive_nbytes(graph: Graph, operators: Sequence[int]) -> int:
    """Return the peak activation memory in bytes while operators run one after another."""
    border = graph.boundary(operators)
    inside = set(operators)
    size = {t: graph.tensors[t].nbytes for o in operators for t in (*graph.operators[o].outputs, *border.inputs)}
    kept = set(border.outputs)
    last = {t: max((c for c in graph.consumers.get(t, ()) if c in inside), default=-1) for t in size}
    alive = sum(size[t] for t in border.inputs)
    most = alive
    for operator in operators:
        alive += sum(size[t] for t in graph.operators[operator].outputs)
        most = max(most, alive)
        for t in {*graph.operators[operator].inputs, *graph.operators[operator].outputs} & size.keys():
            if t not in kept and last[t] <= operator:
                alive -= size[t]
    return most


def memory_gb(models: Sequence[PlacedModel]) -> float:
    """Return the gigabytes that a plan needs: activations of every model, and weights, once where they are shared."""
    activations = 0
    weights: dict[Hashable, int] = {}
    for index, model in enumerate(models):
        for processor, (own, most) in peak_nbytes(model.graph, model.plan).items():
            activations += most
            key = processor, index if model.weights is None else (model.weights,)
            weights[key] = max(own, weights.get(key, 0))
    return (activations + sum(weights.values())) / 1e9


def least_memory_gb(graph: Graph) -> float:
    """Return gigabytes that every plan of one model needs: those of its operators, one by one."""
    constants = {t for o in range(len(graph.operators)) for t in graph.boundary((o,)).constants}
    most = max(most_alive_nbytes(graph, (o,)) for o in range(len(graph.operators)))
    return (sum(graph.tensors[t].nbytes for t in constants) + most) / 1e9


Aggregation = Literal["path", "busiest", "sum", "plan", "run"]
"""How a plan's value follows: the latency (longest path of stages), the period of a stream (busiest processor), a
weighted sum of the stages' times, the plan alone, or any function of a run's times."""

_ONLY_WITH: Mapping[str, tuple[Aggregation, ...]] = {
    "quantile": ("path",),
    "per_second": ("sum", "run"),
    "of_powers": ("sum", "run"),
    "of_plan": ("plan",),
    "least": ("plan",),
    "of_run": ("run",),
}
_GUIDE = "see “An objective” in optimizer/CODE.md"
_TAIL_RUNS, _TAIL_S = (20, 100), 1.0
_METER_S = 0.2
FIGURE_RUNS = 3

Placed = Callable[[], Sequence[PlacedModel]]
PerSecond = Callable[[Platform, Mapping[str, float]], Mapping[str, float]]
"""Returns the weight of a second of each processor, given the platform and, with ``of_powers``, their watts."""
OfRun = Callable[[float, Numbers, Numbers], float]
"""Returns a value, given the seconds of a run, those of each stage, and the weight of a second of each stage."""


def _time(platform: Platform, _: Mapping[str, float]) -> Mapping[str, float]:
    return {p.name: 1.0 for p in platform.processors}


def _energy(_: Platform, powers: Mapping[str, float]) -> Mapping[str, float]:
    return powers


def _occupancy(platform: Platform, _: Mapping[str, float]) -> Mapping[str, float]:
    return {p.name: sum(p.resources.values()) for p in platform.processors}


@dataclass(frozen=True, slots=True)
class Objective:
    """A number to minimise.

    Attributes:
        name: on the command line.
        title: for the header of a table.
        unit: of the values, which are positive.
        shown_unit: a thousandth of it, in which values are shown.
        aggregation: how a plan's value follows.
        key: in the documents of ``--json`` and in tables: the name and the unit shown, such as ``energy_mj``.
        many_runs: whether an observation takes many runs, so that few observations are made.
        amount: what plans need more or less of, as in "less memory"; "" for times, by which plans are slower or faster.
        quantile: of the latencies of many runs, with ``path``; None for the median.
        per_second: weight of a second of each processor, with ``sum`` and for ``of_run``.
        of_powers: whether these weights depend on the watts of the processors.
        of_plan: its value for the models of a plan, with ``plan``.
        least: of which no plan of a graph has less, with ``plan``; unknown where it is None.
        of_run: its value for a run, with ``run``.
        scales: whether ratios of it mean anything, as those of missed deadlines do not.

    Raises:
        OptimizeError: a field is missing for this aggregation, or belongs to another one.
    """

    name: str
    title: str
    unit: str
    shown_unit: str
    aggregation: Aggregation
    key: str
    many_runs: bool = False
    amount: str = ""
    quantile: float | None = None
    per_second: PerSecond = _time
    of_powers: bool = False
    of_plan: Callable[[Sequence[PlacedModel]], float] | None = None
    least: Callable[[Graph], float] | None = None
    of_run: OfRun | None = None
    scales: bool = True

    def __post_init__(self) -> None:
        kinds, problem = get_args(Aggregation), ""
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        unfit = [name for name in given if self.aggregation not in _ONLY_WITH.get(name, kinds)]
        if self.aggregation not in kinds:
            problem = f"is none of {', '.join(kinds)}"
        elif (needed := {"plan": "of_plan", "run": "of_run"}.get(self.aggregation, "name")) not in given:
            problem = f"requires {needed}"
        elif unfit or not 0.0 < (self.quantile or 0.5) < 1.0:
            problem = f"does not support {unfit[0] if unfit else f'the quantile {self.quantile}'}"
        if problem:
            raise OptimizeError(f"objective {self.name!r}: aggregation {self.aggregation!r} {problem}", _GUIDE)

    @property
    def is_additive(self) -> bool:
        """Whether it follows from times of operators that add up, so that exact methods and bounds hold for it."""
        return self.aggregation not in ("plan", "run")

    @property
    def stage_unit(self) -> str:
        """The unit in which stages are shown: that of their shares of an additive objective, else of their times."""
        return self.shown_unit if self.is_additive else "ms"

    def value_of_plan(self, models: Sequence[PlacedModel]) -> float:
        """Return the value of a plan's models, with ``of_plan``. Raises as :meth:`value_of_run`."""
        with self.named("of_plan"):
            value = float(self.of_plan(models))  # type: ignore[misc]
        return self.positive(value)

    def value_of_run(self, run_s: float, stage_s: Numbers, weights: Numbers) -> float:
        """Return the value of a run, with ``of_run``.

        Raises:
            OptimizeError: the function fails, or its value is not positive.
        """
        with self.named("of_run"):
            value = float(self.of_run(run_s, stage_s, weights))  # type: ignore[misc]
        return self.positive(value)

    def positive(self, value: float) -> float:
        """Return a value.

        Raises:
            OptimizeError: it is not positive and finite.
        """
        if not 0.0 < value < math.inf:
            what = f"objective {self.name!r}: a plan has {value:g} {self.unit}, and values must be positive and finite"
            if OBJECTIVES.get(self.name) is self:
                raise UsageError(what, "give another objective: neither the file nor the watts tell this one")
            raise OptimizeError(what, f"add a constant where they may be 0; {_GUIDE}")
        return value

    def weights(self, platform: Platform, powers: Mapping[str, float]) -> dict[str, float]:
        """Return the weight of a second of each processor: its watts, its share of the device, or 1.

        Args:
            powers: watts of processors, where known.

        Raises:
            OptimizeError: the function fails, or a weight is missing or wrong.
        """
        with self.named("per_second"):
            found = dict(self.per_second(platform, powers))
            names = [p.name for p in platform.processors if powers or not self.of_powers]
            wrong = next((name for name in names if not 0.0 <= found.get(name, math.nan) < math.inf), None)
        if wrong is not None:
            what = f"objective {self.name!r}: per_second returned {found.get(wrong)} for {wrong}"
            raise OptimizeError(what, f"return a weight of at least 0 for each processor; {_GUIDE}")
        return found

    @contextmanager
    def named(self, function: str) -> Iterator[None]:
        """Name the objective, its function and the line in errors."""
        try:
            yield
        except OptimizeError:
            raise
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"objective {self.name!r}: {function} failed: {type(error).__name__}: {error}"
            raise OptimizeError(
                f"{what} ({Path(at.filename).name}, line {at.lineno})", "see more with --debug"
            ) from error

    @property
    def value_key(self) -> str:
        """Its key beside other objectives, in a front: kinds of latency, whose figures share a key, have one each."""
        return f"{self.name}_ms" if self.key == "latency_ms" else self.key

    @property
    def is_time(self) -> bool:
        """Whether plans are faster or slower by it."""
        return not self.amount

    @property
    def smaller(self) -> str:
        """The comparative for a better plan: ``faster``, ``less energy``."""
        return f"less {self.amount}" if self.amount else "faster"

    @property
    def larger(self) -> str:
        """The comparative for a worse plan: ``slower``, ``more energy``."""
        return f"more {self.amount}" if self.amount else "slower"

    @property
    def better(self) -> str:
        """The comparative in "no … plan was found": ``faster``, ``better``."""
        return "better" if self.amount else "faster"


LATENCY = Objective("latency", "latency, median", "s", "ms", "path", "latency_ms")
OBJECTIVES = {
    o.name: o
    for o in (
        LATENCY,
        Objective(
            "latency-p99",
            "latency, 99th percentile",
            "s",
            "ms",
            "path",
            "latency_p99_ms",
            many_runs=True,
            quantile=0.99,
        ),
        Objective("throughput", "period of a stream", "s", "ms", "busiest", "period_ms", many_runs=True),
        Objective(
            "energy",
            "energy of an inference",
            "J",
            "mJ",
            "sum",
            "energy_mj",
            many_runs=True,
            amount="energy",
            per_second=_energy,
            of_powers=True,
        ),
        Objective(
            "memory",
            "memory for weights and activations",
            "GB",
            "MB",
            "plan",
            "memory_mb",
            amount="memory",
            of_plan=memory_gb,
            least=least_memory_gb,
        ),
        Objective(
            "occupancy",
            "processor time of an inference",
            "s",
            "ms",
            "sum",
            "occupancy_ms",
            amount="processor time",
            per_second=_occupancy,
        ),
    )
}


def find_objective(name: str) -> Objective:
    """Return the objective of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        known = f"one of {', '.join(OBJECTIVES)}"
        raise UsageError(f"unknown objective {name!r}", f"did you mean {near[0]}? {known}" if near else known)
    return OBJECTIVES[name]


@dataclass(frozen=True, slots=True)
class Pricing:
    """How an objective of plans is measured on a platform.

    Attributes:
        powers: watts of each processor; for energy without a meter.
        meter: reads the energy that the machine used; None for all other objectives.
    """

    objective: Objective
    platform: Platform
    powers: Mapping[str, float]
    meter: Meter | None = None

    def batch(self, plan: Plan, candidate: Candidate, n: int, stop_above: float, placed: Placed) -> Batch:
        """Run a plan and return the objective of each run, and each stage's share of it.

        Args:
            placed: returns the models of the plan as they are run.
            stop_above: in the objective's unit; runs may end early after one above it.

        Raises:
            UnavailableError: the device failed, or does not report the objective.
        """
        if self.objective == LATENCY:
            return candidate.run(n, stop_above)
        begin_s = time.monotonic()
        found = self._batch(plan, candidate, n, stop_above, placed)
        return replace(found, run_s=(time.monotonic() - begin_s) / max(1, len(found.latency_s)))

    def _batch(self, plan: Plan, candidate: Candidate, n: int, stop_above: float, placed: Placed) -> Batch:
        objective = self.objective
        match objective.aggregation:
            case "path" if objective.quantile is not None:
                return _tails(candidate, objective.quantile, n, stop_above)
            case "path":
                return candidate.run(n, stop_above)
            case "busiest":
                return candidate.stream(n)
            case "plan":
                found, value = candidate.run(1), objective.value_of_plan(placed())
                return Batch(np.full(n, value), np.tile(found.stage_s, (n, 1))[:n], found.timeline)
            case "run":
                found, weights = candidate.run(n), self._weights(plan)
                runs = zip(found.latency_s, found.stage_s, strict=True)
                values = [objective.value_of_run(float(run_s), stage_s, weights) for run_s, stage_s in runs]
                return replace(found, latency_s=np.array(values))
            case "sum" if self.meter is not None:
                return _metered(candidate, n, self.meter)
            case "sum":
                found = candidate.run(n)
                stages = found.stage_s * self._weights(plan)
                values = [objective.positive(float(value)) for value in stages.sum(axis=1)]
                return Batch(np.array(values), stages, found.timeline, found.errors)

    def _weights(self, plan: Plan) -> Numbers:
        """Return the weight of a second of each stage.

        Raises:
            UnavailableError: that of a processor is not known, as where the runtime itself places a network.
        """
        by = self.counts
        if unknown := [stage.processor for stage in plan.stages if stage.processor not in by]:
            raise UnavailableError(f"{self.objective.name} of a stage on {unknown[0]} is not known")
        return np.array([by[stage.processor] for stage in plan.stages])

    @property
    def counts(self) -> dict[str, float]:
        """The weight of a second of each processor."""
        return self.objective.weights(self.platform, self.powers)


def pricing(objective: Objective, platform: Platform, session: Session) -> Pricing:
    """Return how an objective is measured in a session.

    Raises:
        UnavailableError: the objective is the period of a stream, and the session runs no streams.
        UsageError: the objective depends on powers, and there are neither these nor a meter of the energy.
    """
    if objective.aggregation == "busiest" and not session.capabilities.stream:
        raise UnavailableError(
            f"{objective.name} is not supported: this evaluator runs one inference at a time",
            "use --evaluator litert or cost-model",
        )
    return Pricing(objective, platform, *powers_or_meter(objective, platform, session))


def powers_or_meter(
    objective: Objective, platform: Platform, session: Session
) -> tuple[Mapping[str, float], Meter | None]:
    """Return the watts that an objective depends on, or a meter of the energy; neither where none is needed.

    Raises:
        UsageError: they are not known.
    """
    if not objective.of_powers:
        return {}, None
    powers, meter = powers_w(platform, session)
    if meter is not None and objective.name != "energy":
        first = platform.processors[0].name
        raise UsageError(
            f"--objective {objective.name} needs the watts of each processor; a meter tells only their sum",
            f"such as --power {first}=2.5",
        )
    return powers, meter


class Priced(Protocol):
    """A session whose candidates return objectives, on the platform as it is or in all its states."""

    @property
    def how(self) -> tuple[Pricing, ...]:
        """How plans are measured: by the objective, and by further figures."""
        ...

    def only(self, which: int) -> Session:
        """Return a session of the same plans for one of the objectives."""
        ...

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance)."""
        ...


class PricedSession(ForwardingSession):
    """A session whose candidates return an objective instead of latencies.

    Attributes:
        how: the objective, and further figures of plans.
    """

    def __init__(self, inner: Session, how: Sequence[Pricing]) -> None:
        super().__init__(inner)
        self.how = tuple(how)
        # Its candidates do not return latencies.
        self.capabilities = replace(self.capabilities, pause=False, stream=False, figures=True)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return super().fingerprint() | {"objective": [each.objective.name for each in self.how]}

    def in_state(self, state: State) -> PricedSession:
        """Return a session on the platform in that state."""
        return PricedSession(self.inner.in_state(state), self.how)

    def only(self, which: int) -> PricedSession:
        """Return a session of the same plans for one of the objectives."""
        return PricedSession(self.inner, [self.how[which]])

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> PricedCandidate:
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance)."""

        def placed() -> Sequence[PlacedModel]:
            lowered = lowering(graph).lower(plan)
            return (PlacedModel(lowered.graph, lowered.plan),)

        timed = not self.capabilities.computed
        return PricedCandidate(self.inner.load(graph, plan, fresh=fresh), plan, self.how, placed, timed=timed)


class PricedCandidate(ForwardingCandidate):
    """A loaded plan whose runs return an objective.

    Args:
        timed: whether runs take time; what is computed must not depend on a clock.
    """

    def __init__(
        self, inner: Candidate, plan: Plan, how: tuple[Pricing, ...], placed: Placed = tuple, *, timed: bool = True
    ) -> None:
        super().__init__(inner)
        self._plan, self._how, self._placed, self._timed = plan, how, placed, timed

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``.

        All numbers are in the objective's unit.
        """
        found = self._how[0].batch(self._plan, self.inner, n, stop_above_s, self._placed)
        return found if self._timed else replace(found, run_s=None)

    def figures(self) -> dict[str, float]:
        """Run a few more times, and return the medians of the further figures."""
        found = {}
        for how in self._how[1:]:
            once = how.objective.aggregation == "plan" or how.objective.quantile is not None
            runs = 1 if once else FIGURE_RUNS
            batch = how.batch(self._plan, self.inner, runs, math.inf, self._placed)
            found[how.objective.name] = float(np.median(batch.latency_s))
        return found


def _tails(candidate: Candidate, quantile: float, n: int, stop_above_s: float) -> Batch:
    """Return a quantile of each of ``n`` blocks of runs.

    A block has at least 20 runs and, while they take less than a second together, at most 100; with fewer than 100
    runs the 99th percentile lies between the two slowest.
    """
    found: list[float] = []
    stages: list[NDArray[np.float64]] = []
    for _ in range(n):
        runs: list[float] = []
        spent_s = 0.0
        while len(runs) < _TAIL_RUNS[0] or (len(runs) < _TAIL_RUNS[1] and spent_s < _TAIL_S):
            last = candidate.run(_TAIL_RUNS[0])
            runs += [float(s) for s in last.latency_s]
            spent_s += math.fsum(last.latency_s) if last.run_s is None else last.run_s * len(last.latency_s)
        found.append(float(np.quantile(runs, quantile)))
        stages.append(last.stage_s.mean(axis=0))
        if found[-1] > stop_above_s:
            break
    return replace(last, latency_s=np.array(found), stage_s=np.array(stages))


def metered_j(meter: Meter, before_j: float, runs: int) -> float:
    """Return the joules of each of some runs, given those before them.

    Raises:
        UnavailableError: the meter cannot be read, or does not count.
    """
    if (each_j := (meter.joules() - before_j) / runs) > 0.0:
        return each_j
    raise UnavailableError(f"energy: the meter {meter.name} counted {each_j:g} J in an inference", "give --power")


def _metered(candidate: Candidate, n: int, meter: Meter) -> Batch:
    """Return the joules of an inference, read before and after blocks of runs; idle power is included."""
    once = candidate.run(1)
    count = max(1, math.ceil(_METER_S / float(once.latency_s[0])))
    found, stages = [], []
    for _ in range(n):
        before = meter.joules()
        took = candidate.run(count)
        each_j = metered_j(meter, before, len(took.latency_s))
        found.append(each_j)
        share = took.stage_s.mean(axis=0)
        stages.append(each_j * share / max(float(share.sum()), 1e-12))
        once = took
    return Batch(np.array(found), np.array(stages), once.timeline)
