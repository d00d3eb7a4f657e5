"""The protocols of evaluators: the interface between search and measurement.

An :class:`Evaluator` prepares a :class:`Session` on a platform; the session loads a plan as a :class:`Candidate`;
running the candidate returns a :class:`Batch`. Warm-up, repetition, racing and comparison are in
:mod:`evaluators.sampling` and :mod:`evaluators.measurement`, so an evaluator needs no statistics.

The optional methods of a protocol follow the others. A docstring that says "with ``stream``" means that the method is
called only where the object's ``capabilities`` have ``stream``; else a subclass inherits one that raises, and any other
class need not have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer, PlainValidator

from evaluators.measurement.disturbance import Counters
from evaluators.schedule import Events
from evaluators.workload.outcome import Objective, Outcome
from search_spaces.core.bounded import plain
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.states import State

if TYPE_CHECKING:
    from evaluators.workload.apart import Apart
    from evaluators.workload.host import WorkloadSession
    from search_spaces.core.joined_graph import JoinedGraph
    from search_spaces.core.workload import Workload

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PartCosts:
    """Costs of parts (runs of consecutive operators) of a graph of n operators on P processors, in platform order.

    Attributes:
        operator_s: shape ``(P, n)``; infinite where a processor does not support an operator.
        overhead_s: of each part, shape ``(P,)``.
        beyond_s: further seconds of operators ``first … last-1`` as one part, ``[processor, first, last]``, shape
            ``(P, n+1, n+1)``; not negative.
        transfer_s: seconds that a cut before operator ``i`` usually adds between a part on one processor and the next
            on another, ``[i, from, to]``, shape ``(n, P, P)``; row 0 is not read.
        least_transfer_s: lower bound of these seconds for all parts of which the second reads from the first.
        operator_nbytes: what each operator keeps in memory, shape ``(n,)``; None for nothing.
        memory_bytes: of each processor, shape ``(P,)``; None for no limit.
    """

    operator_s: Table
    overhead_s: Table
    beyond_s: Table
    transfer_s: Table
    least_transfer_s: Table
    operator_nbytes: Table | None = None
    memory_bytes: Table | None = None


CONTRACT_VERSION = 1
_NAMED = 3  # outputs named in a sentence at most
Declared = TypeVar("Declared", "Capabilities", "EvaluatorCapabilities")


def _numbers(value: Any) -> NDArray[np.float64]:
    try:
        return np.array(value, np.float64)
    except TypeError as error:
        raise ValueError("input should be numbers") from error


Numbers = Annotated[
    NDArray[np.float64],
    PlainValidator(_numbers),
    PlainSerializer(lambda values: np.asarray(values, float).tolist()),
]
"""An array, which a document holds as lists of numbers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of consecutive runs of a plan.

    Attributes:
        latency_s: seconds of each inference, shape ``(n,)``.
        stage_s: seconds of each stage of the plan in each inference, shape ``(n, stages)``.
        timeline: the last inference, where the evaluator reports it.
        errors: of a prediction, the relative change of the latency by one standard deviation of each uncertain
            quantity of the model; the same quantities in the same order for all plans of a graph in one session. None
            where it was measured.
        outcome: of several models, the outcome of each request in the last run.
        run_s: seconds that a run takes, where its figure is less: of several models, of a percentile, or where each run
            starts a program. Time limits of measurements count these.
    """

    latency_s: Numbers
    stage_s: Numbers
    timeline: Events | None = None
    errors: Numbers | None = None
    outcome: Outcome | None = None
    run_s: float | None = None

    @property
    def relative_sigma(self) -> float | None:
        """The relative standard deviation of a prediction; None of a measurement."""
        return None if self.errors is None else float(np.linalg.norm(self.errors))


Error = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""An error of an output; in documents None stands for one that is not finite."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """Error of an output, relative to the largest absolute value of the reference output.

    Attributes:
        name: of the output.
        largest, mean: of the absolute differences.
    """

    name: str
    largest: Error
    mean: Error

    def __str__(self) -> str:
        return f"{self.name!r} by {self.largest:.1e} at most and {self.mean:.1e} on average"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a plan's outputs compare with those of the whole model on the reference processor.

    Attributes:
        identical: bit for bit.
        max_abs_error: largest absolute difference over all outputs.
        max_rel_error: the same, relative to the largest absolute value of the reference.
        tolerance: the relative error up to which the evaluator accepts this plan; 0 where it must be identical.
        outputs: those that differ, the worst first.
        top1: of a classifier, for how many random inputs the likeliest class changes, and how many were tried; None
            where none was.
    """

    identical: bool
    max_abs_error: Error
    max_rel_error: Error
    tolerance: Error
    outputs: tuple[OutputError, ...] = ()
    top1: tuple[int, int] | None = None

    @property
    def accepted(self) -> bool:
        """Whether the outputs are those of the model, within the tolerance."""
        return self.identical or (math.isfinite(self.max_rel_error) and self.max_rel_error <= self.tolerance)

    def to_json(self) -> dict[str, Any]:
        """Return its fields as plain values; None stands for an error that is not finite."""
        found: dict[str, Any] = plain(Agreement, self)
        return found

    def __str__(self) -> str:
        if self.identical:
            return "bit for bit as the whole model's"
        text = f"off by at most {self.max_rel_error:.1e} of the whole model's largest value"
        if len(self.outputs) == 1:
            text += f"; of output {self.outputs[0].name!r} by {self.outputs[0].mean:.1e} on average"
        elif self.outputs:
            text += f"; of outputs {', '.join(map(str, self.outputs[:_NAMED]))}"
            text += f" and {len(self.outputs) - _NAMED} more" if len(self.outputs) > _NAMED else ""
        if self.top1 is not None:
            text += f"; the likeliest class changes for {self.top1[0]} of {self.top1[1]} inputs"
        return text


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a session and its candidates can do beyond loading and running plans; wrappers forward it.

    Attributes:
        computed: latencies follow from tables or a model, so that runs repeat and take no time; else they are measured.
        conditions: ``session.conditions()`` returns the conditions of measurements (load, clocks, …).
        counters: ``session.counters()`` reads the kernel's counters of the threads that measure.
        deploy: ``session.deploy(folder, graph, plan)`` writes a plan as files that run without the session.
        placements: ``session.placements(graph)`` tells how the runtime itself placed a network.
        unsupported: ``session.unsupported_operators(graph, processor)`` returns the operators that it does not support.
        costs: ``session.part_costs(graph)`` returns the tables that the session computes its latencies from.
        powers: ``session.powers_w()`` returns the power of processors.
        states: ``session.in_state(state)`` returns a session for a state of the platform; it also has ``costs``.
        rewrites: ``session.load(graph, plan)`` takes plans that split or decompose operators; any other session gets
            them lowered, as plans of the rewritten model.
        decompose: ``session.decomposed_error(graph, ranks)`` compares outputs, and plans may have ranks.
        stream: ``candidate.stream(n)`` runs overlapping inferences.
        pause: ``candidate.after_pause(pause_s)`` returns the seconds of one inference after that pause.
        figures: ``candidate.figures()`` returns further objectives.
        traffic: ``candidate.traffic()`` returns the memory traffic of an inference.
        outputs: ``candidate.verify()`` never returns None.
    """

    computed: bool = False
    conditions: bool = False
    counters: bool = False
    deploy: bool = False
    placements: bool = False
    unsupported: bool = False
    costs: bool = False
    powers: bool = False
    states: bool = False
    rewrites: bool = False
    decompose: bool = False
    stream: bool = False
    pause: bool = False
    figures: bool = False
    traffic: bool = False
    outputs: bool = False


@dataclass(frozen=True, slots=True)
class EvaluatorCapabilities:
    """What an evaluator can do beyond preparing sessions; wrappers forward it.

    Attributes:
        names: ``processor(name)`` returns processors beyond those of :meth:`Evaluator.platform`.
        reduced: ``reduced()`` returns processors that compute in less than float32.
        descriptions: ``described(source)`` reads descriptions of devices.
        places: ``own_placements(platform)`` returns processors on which the runtime itself places operators.
        targets: ``at(device)`` selects a device.
        graphs: ``graph_of(source)`` provides the model.
        workloads: ``host(…)`` runs workloads.
        apart: ``apart(platform, count)`` returns processors on which models of a workload run apart, for baselines.
        measures_here: results depend on the load of this machine, so studies do not run in parallel.
        predicts: latencies are predictions without noise; their precision cannot be chosen.
    """

    names: bool = False
    reduced: bool = False
    descriptions: bool = False
    places: bool = False
    targets: bool = False
    graphs: bool = False
    workloads: bool = False
    apart: bool = False
    measures_here: bool = True
    predicts: bool = False


def capabilities_of(found: object, kind: type[Declared]) -> Declared:
    """Return the capabilities that an object of a plug-in declares; the defaults where it declares none.

    Raises:
        TypeError: ``capabilities`` has another type.
    """
    declared = getattr(found, "capabilities", kind())
    if not isinstance(declared, kind):
        raise TypeError(f"its capabilities must be {kind.__name__}, not {type(declared).__name__}")
    return declared


def _unsupported(found: object, method: str) -> UnavailableError:
    return UnavailableError(f"{type(found).__name__} does not support {method}()")


class Candidate(Protocol):
    """A loaded plan, ready to run."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; end early after one that takes longer than ``stop_above_s``.

        That one may be interrupted after ``stop_above_s``; its latency is then the time until the interruption, and
        stages that it did not reach have 0 s.

        Raises:
            UnavailableError: the device failed or did not answer in time.
        """
        ...

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; runs once if none was made.

        None where there are no outputs (a prediction).
        """
        return None

    def close(self) -> None:
        """Release what only this candidate holds."""
        return

    def stream(self, n: int) -> Batch:  # noqa: ARG002
        """Return ``n`` observations of the period of a full pipeline; with ``stream``.

        Inferences follow each other without a pause, and overlap. Each observation is the mean over several of them:
        ``latency_s`` is the time from one result to the next, and ``stage_s`` the times of the stages.

        Raises:
            UnavailableError: the device failed or did not answer in time, or the plan cannot be streamed.
        """
        raise _unsupported(self, "stream")

    def after_pause(self, pause_s: float) -> float:  # noqa: ARG002
        """Return the seconds of one inference that follows a pause; with ``pause``. Raises as :meth:`run`."""
        raise _unsupported(self, "after_pause")

    def figures(self) -> dict[str, float]:
        """Return medians of further objectives, by name; with ``figures``. Raises as :meth:`run`."""
        raise _unsupported(self, "figures")

    def traffic(self) -> dict[str, float]:
        """Return the megabytes that an inference moves, as the device counts them; with ``traffic``.

        ``memory_mb`` between the memory and the last cache, ``second_level_mb`` between that and those before it, and
        the number of ``kernels``. Raises as :meth:`run`.
        """
        raise _unsupported(self, "traffic")


class Session(Protocol):
    """A prepared device; several candidates may be loaded at once.

    Attributes:
        capabilities: constant while the session is open.
    """

    capabilities: Capabilities = Capabilities()

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that may change a result (machine, processors, versions, settings), as plain values."""
        ...

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Raises:
            UnavailableError: the runtime rejects a stage, or there is not enough memory.
        """
        ...

    def conditions(self) -> dict[str, Any]:
        """Return the conditions of the last measurements (governor, load, versions, …); with ``conditions``.

        It is called after every measurement, so it should take well below a millisecond.
        """
        raise _unsupported(self, "conditions")

    def counters(self) -> Counters:
        """Return the kernel's counters of the threads that measure; with ``counters``."""
        raise _unsupported(self, "counters")

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:  # noqa: ARG002
        """Write ``plan.json`` and the stage files to ``folder``, run them, and compare outputs; with ``deploy``.

        Raises:
            UsageError: the folder cannot be written, or the disk is full.
            UnavailableError: the files do not run.
        """
        raise _unsupported(self, "deploy")

    def placements(self, graph: Graph) -> Mapping[str, str]:  # noqa: ARG002
        """Return processor → how the runtime placed a whole network, for processors on which it places operators.

        With ``placements``.
        """
        raise _unsupported(self, "placements")

    def unsupported_operators(self, graph: Graph, processor: str) -> Sequence[int]:  # noqa: ARG002
        """Return the operators that a processor does not support, ascending; with ``unsupported``.

        Raises:
            UnavailableError: the device failed.
        """
        raise _unsupported(self, "unsupported_operators")

    def part_costs(self, graph: Graph) -> PartCosts:  # noqa: ARG002
        """Return the costs that latencies are computed from, on the session's platform; with ``costs``.

        Latencies of such a session do not vary. Where each part reads from the one before it, the latency is at least
        the sum of the parts and the least transfers between them; where parts overlap, it is at least that of the
        longest path through the parts.

        Raises:
            UnavailableError: there are no costs of this graph.
        """
        raise _unsupported(self, "part_costs")

    def powers_w(self) -> Mapping[str, float]:
        """Return the watts of processors while they run, where known; with ``powers``."""
        raise _unsupported(self, "powers_w")

    def in_state(self, state: State) -> Session:  # noqa: ARG002
        """Return a session on the platform in that state; with ``states``."""
        raise _unsupported(self, "in_state")

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:  # noqa: ARG002
        """Return the largest error of a decomposed model's outputs, relative to the largest output; with ``decompose``.

        None where no outputs are computed.

        Raises:
            UnavailableError: the model cannot be run.
            RewriteError, ModelError: it cannot be decomposed.
        """
        raise _unsupported(self, "decomposed_error")


class ClosableSession(Session):
    """A session that loads nothing once it is closed.

    Attributes:
        closed: whether it is.
    """

    closed = False

    def close(self) -> None:
        """Load nothing more."""
        self.closed = True

    def check_open(self) -> None:
        """Check that the session is open.

        Raises:
            UnavailableError: it is closed.
        """
        if self.closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")


def conditions_of(session: Session) -> Callable[[], Mapping[str, Any]]:
    """Return the function that reads the conditions of a session; it returns {} where there are none."""
    return session.conditions if session.capabilities.conditions else dict


def verified(candidate: Candidate) -> Agreement | None:
    """Return how a candidate's outputs compare with the whole model's; None where the evaluator does not compare.

    Raises:
        UnavailableError: the outputs are not accepted.
    """
    agreement = candidate.verify()
    if agreement is not None and not agreement.accepted:
        raise UnavailableError(f"outputs are {agreement}; {agreement.tolerance:.1e} is allowed")
    return agreement


def counters_of(session: Session) -> Callable[[], Counters] | None:
    """Return the function that reads the kernel's counters of a session's threads; None where it has none."""
    return session.counters if session.capabilities.counters else None


def unsupported_operators(session: Session, graph: Graph, processor: str) -> Sequence[int]:
    """Return the operators that a processor does not support; () where the session does not report them."""
    return session.unsupported_operators(graph, processor) if session.capabilities.unsupported else ()


class Evaluator(Protocol):
    """A source of costs of plans: a device, a simulator or a model."""

    name: str
    capabilities: EvaluatorCapabilities = EvaluatorCapabilities()

    def platform(self) -> Platform:
        """Return the platform that this evaluator finds without a description.

        Raises:
            UnavailableError: there is none here.
        """
        ...

    def prepare(self, platform: Platform, scratch: Path | None = None) -> AbstractContextManager[Session]:
        """Open a session on a platform; leaving the context releases everything.

        Args:
            platform: the processors to use.
            scratch: an existing folder for logs; None for no logs.

        Raises:
            UnavailableError: the platform cannot be used here.
        """
        ...

    def own_placements(self, platform: Platform) -> tuple[Processor, ...]:  # noqa: ARG002
        """Return processors on which the runtime itself places a whole network, for baselines; with ``places``."""
        raise _unsupported(self, "own_placements")

    def apart(self, platform: Platform, count: int) -> Sequence[Apart]:  # noqa: ARG002
        """Return the ways to run ``count`` models in processes or threads of their own, for baselines; with ``apart``.

        Args:
            platform: processors, and pools of them.
        """
        raise _unsupported(self, "apart")

    def processor(self, name: str) -> Processor:  # noqa: ARG002
        """Return the processor of a name; with ``names``.

        Raises:
            UsageError: it is not the name of a processor.
            UnavailableError: it cannot be used here.
        """
        raise _unsupported(self, "processor")

    def reduced(self) -> Sequence[Processor]:
        """Return processors below float32, for studies that allow errors and name no processors; with ``reduced``."""
        raise _unsupported(self, "reduced")

    def described(self, source: str | Path) -> Platform | None:  # noqa: ARG002
        """Use the platform that a file or a name describes from now on, and return it; with ``descriptions``.

        None if it is not a description for this evaluator.

        Raises:
            UsageError: it is one, but cannot be read or is damaged.
        """
        raise _unsupported(self, "described")

    def at(self, device: str) -> None:  # noqa: ARG002
        """Measure on the named device from now on, or on any of several identical ones, separated by commas.

        With ``targets``; called before all other methods.

        Raises:
            UsageError: there is no such device.
        """
        raise _unsupported(self, "at")

    def graph_of(self, source: str) -> Graph:  # noqa: ARG002
        """Return the model that the user named; with ``graphs``.

        Raises:
            UsageError: there is none.
        """
        raise _unsupported(self, "graph_of")

    def host(
        self,
        workload: Workload,  # noqa: ARG002
        joined: JoinedGraph,  # noqa: ARG002
        platform: Platform,  # noqa: ARG002
        objective: Objective,  # noqa: ARG002
        scratch: Path | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[WorkloadSession]:
        """Open a session for one workload, as :meth:`prepare` does; with ``workloads``.

        Args:
            platform: processors, pools, and processors that only baselines use.
            objective: the quantity that candidates return as latencies.
        """
        raise _unsupported(self, "host")
