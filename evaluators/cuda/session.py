"""Measure plans on the streams of an NVIDIA GPU: the evaluator ``cuda``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Batch, Candidate, Capabilities, Evaluator, EvaluatorCapabilities, Session
from evaluators.cuda.client import Bench, Client, Loaded
from evaluators.cuda.devices import (
    EXTRA,
    KERNELS,
    MAX_INSTANCES,
    THREADS,
    check_streams,
    find_gpu,
    parse_stream,
    platform_of,
    runs_apart,
    tolerance,
)
from evaluators.cuda.lowering import refused
from evaluators.cuda.traffic import counts_here
from evaluators.forwarding import LoweredCandidate
from evaluators.litert import tensors
from evaluators.schedule import Timeline, needs_of, rounds, timeline
from evaluators.workload.host import worst
from evaluators.workload.scheduler import QueueClient, Scheduler
from evaluators.workload.setting import NumberedProcessors, Setting
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, needs
from search_spaces.core.platform import Platform, Processor, memory_limit_nbytes
from search_spaces.core.pools import single_processors
from search_spaces.rewrites.lower import lowering
from search_spaces.spaces.chain import chain_plan

if TYPE_CHECKING:
    from evaluators.cuda.workload import CudaWorkload
    from evaluators.workload.apart import Apart
    from evaluators.workload.outcome import Objective
    from search_spaces.core.joined_graph import JoinedGraph
    from search_spaces.core.workload import Workload

Outputs = list[NDArray[np.generic]]


def fed(graph: Graph) -> tuple[str, int]:
    """Return the key of a model's inputs: its structure, and the arrays that the user gave, which rewrites keep."""
    return graph.digest, id(graph.source.given if graph.source is not None else ())


class References:
    """Outputs of whole models for the inputs that sessions measure with; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[object, Outputs] = {}

    def outputs(self, graph: Graph) -> Outputs:
        """Return a model's outputs.

        Raises:
            UnavailableError: LiteRT cannot run here.
        """
        from evaluators.litert.processors import make_processor, usable_cores
        from evaluators.litert.session import LitertEvaluator

        key = fed(graph), graph.source.content_digest() if graph.source is not None else ""
        if key not in self._known:
            core = make_processor(f"cpu{usable_cores()[0]}")
            with LitertEvaluator().prepare(Platform("reference", (core,))) as session:
                loaded: Any = session.load(graph, chain_plan(graph, (), [core.name]))
                with closing(loaded) as candidate:
                    candidate.run(1)
                    self._known[key] = [np.array(each) for each in candidate.outputs()]
        return self._known[key]


INPUT_SEED = 0
_RANKED_TOLERANCE = 1.0  # relative; beyond it outputs approximate nothing, below it --max-error decides
_AT_ONCE = 1000  # inferences requested in one message
# An observation of the period is the mean over at least so many inferences of each instance, and at least so long.
_LEAST_BLOCK, _BLOCK_S = 4, 0.1
_BUSY = 4  # streams that compute at once while kernels are timed for several models
_CPU = "cpu"


class CudaEvaluator(Evaluator):
    """Measures plans on an NVIDIA GPU.

    Args:
        device: ``cpu``, for tests, uses threads instead of streams, and PyTorch on the CPU.
    """

    name = EXTRA
    capabilities = EvaluatorCapabilities(names=True, workloads=True, apart=True)
    _chosen: ClassVar[dict[str, dict[str, str]]] = {}
    """GPU → chosen variants of its kernels, for all sessions of this process."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._name = ""

    def platform(self) -> Platform:
        """Return the processors that this evaluator finds by itself.

        They are eight streams in TF32, and for several models eight with priority; :meth:`processor` makes others.
        """
        return platform_of(self._gpu())

    def processor(self, name: str) -> Processor:
        """Return the processor of a name; ``stream0``, ``stream1:f32``, …."""
        return parse_stream(name, self._gpu())

    def apart(self, platform: Platform, count: int) -> list[Apart]:
        """Return the ways to run models in processes or threads of their own, for baselines."""
        return runs_apart(platform, count)

    def _gpu(self) -> str:
        if not self._name:
            self._name = _CPU if self._device == _CPU else find_gpu()
        return self._name

    def _bench(self, platform: Platform, busy: int, scratch: Path | None, apart: str = "") -> Bench:
        check_streams(platform)
        plain = self._device == _CPU or apart in {KERNELS, THREADS}
        chosen = None if plain else self._chosen.setdefault(self._gpu(), {})
        log = scratch / "runtime.log" if scratch else None
        room_nbytes = memory_limit_nbytes(platform.processors)
        return Bench(Client(self._device, busy, chosen, apart, log, room_nbytes), platform)

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[CudaSession]:
        """Open a session on a platform; leaving the context ends its process.

        PyTorch's own messages go to ``scratch/runtime.log``.
        """
        with closing(self._bench(platform, 1, scratch)) as bench:
            yield CudaSession(platform, bench)

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[CudaWorkload]:
        """Open a session for one workload, as :meth:`prepare` does for single models.

        PyTorch's own messages go to ``scratch/runtime.log``.
        """
        from evaluators.cuda.workload import CudaWorkload
        from evaluators.workload.lowered import Lowerings

        if len(workload.instances) > MAX_INSTANCES:
            raise UnavailableError(
                f"the evaluator cuda runs at most {MAX_INSTANCES} instances at once, {workload.name!r} has "
                f"{len(workload.instances)}",
                "take fewer",
            )
        processors = replace(platform, processors=single_processors(platform))
        busy = min(_BUSY, len(workload.instances))
        another = partial(self._bench, processors, busy, scratch)
        with closing(CudaWorkload(Lowerings(workload, joined, platform), objective, another)) as session:
            yield session


class CudaSession(Session):
    """A session on one GPU.

    Each stage of a plan is one captured graph on its processor's stream. A stream of inferences runs as several
    instances of the plan that share its weights, each in a closed loop.
    """

    capabilities = Capabilities(rewrites=True, unsupported=True, outputs=True, stream=True)

    def __init__(self, platform: Platform, bench: Bench) -> None:
        self.capabilities = replace(self.capabilities, traffic=counts_here())
        self._platform, self._bench = platform, bench
        self._references = References()
        self._numbers = count(1)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {"evaluator": EXTRA, "platform": self._platform.to_json(), "runtime": self._bench.facts()["facts"]}

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a stream does not support, ascending (:class:`~evaluators.base.Session`)."""
        self._platform[processor]
        return sorted(refused(graph))

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; with ``fresh``, share nothing with what is loaded already (a rebuilt instance).

        A rebuilt instance is captured again, with memory of its own.
        """
        plan.validate(graph, self._platform)
        lowered = lowering(graph).lower(plan)
        allowed = tolerance([self._platform[s.processor] for s in plan.stages])
        allowed = _RANKED_TOLERANCE if lowered.keeps == "approximation" else allowed
        jobs = [(s.operators, self._platform[s.processor]) for s in lowered.plan.stages]
        inputs = tensors.model_inputs(graph, INPUT_SEED)
        weights = f"fresh {next(self._numbers)}" if fresh else ""

        def take(owner: str) -> Loaded:
            return self._bench.take(lowered.graph, jobs, owner, weights, inputs, needs(lowered.plan, lowered.graph))

        def compare(loaded: Loaded) -> Agreement:
            return tensors.agreement(graph, self._bench.outputs(loaded), self._references.outputs(graph), allowed)

        frames = rounds(lowered.plan, self._platform, needs_of(lowered.graph, lowered.plan)).frames
        at_once = min(frames, MAX_INSTANCES // len(lowered.plan.by_processor()))
        # Consecutive new owners are captured on different streams.
        streamed = [partial(take, f"{weights} frame {number}") for number in range(at_once)]
        candidate = CudaCandidate(self._bench, take(weights), streamed, lowered.plan, self._platform, compare)
        return LoweredCandidate(candidate, len(plan.stages), lowered.stage_of) if lowered.rewritten else candidate


class CudaCandidate(Candidate):
    """A plan whose stages are CUDA graphs.

    Args:
        streamed: functions that load the instances of a stream, called at the first :meth:`stream`.
        compare: compares the outputs of an instance that has run with the whole model's.
    """

    def __init__(
        self,
        bench: Bench,
        loaded: Loaded,
        streamed: Sequence[Callable[[], Loaded]],
        plan: Plan,
        platform: Platform,
        compare: Callable[[Loaded], Agreement],
    ) -> None:
        self._bench, self._loaded, self._plan, self._compare = bench, loaded, plan, compare
        self._streamed, self._frames = streamed, list[Loaded]()
        self._law = NumberedProcessors.of(platform)
        self._ran, self._last = -1, [loaded]  # the process of the last run (its generation), and the instances that ran
        self._block = 0  # inferences of each instance in an observation of the period

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; fewer where one takes longer than ``stop_above_s``.

        An inference is over when its outputs are in the host's memory.
        """
        schedulers: list[Scheduler] = []
        while len(schedulers) < n:
            wanted = min(_AT_ONCE, n - len(schedulers))
            found = self._bench.run(self._setting([self._loaded], 1), "fifo", [self._loaded], wanted, stop_above_s)
            schedulers += found
            if len(found) < wanted:
                break
        self._ran, self._last = self._bench.client.generation, [self._loaded]
        rows = [scheduler.runs(0)[0] for scheduler in schedulers]
        took = [scheduler.requests(0)[0] for scheduler in schedulers]
        return Batch(
            np.array([(ended - came) * 1e-9 for came, ended in took]),
            np.array([[(end - start) * 1e-9 for start, end, _ in row] for row in rows]),
            self._timeline(schedulers[-1]),
        )

    def _timeline(self, scheduler: Scheduler) -> Timeline:
        begin = scheduler.store[0]
        spans = [((start - begin) * 1e-9, (end - begin) * 1e-9) for start, end, _ in scheduler.runs(0)[0]]
        return timeline(spans, [stage.processor for stage in self._plan.stages])

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline.

        The first and the last inference of each instance are left out, since not all instances are busy then.
        """
        if not self._frames:
            self._frames = self._load_frames()
        frames = len(self._frames)
        if not self._block:
            took_s = float(self._periods(1, _LEAST_BLOCK).latency_s[0]) * frames
            self._block = max(_LEAST_BLOCK, math.ceil(_BLOCK_S / max(took_s, 1e-9)))
        return self._periods(n, self._block)

    def _load_frames(self) -> list[Loaded]:
        """Load the instances of a stream, all or none."""
        loaded: list[Loaded] = []
        try:
            loaded.extend(load() for load in self._streamed)  # keeps those before one that fails
        except UnavailableError:
            with suppress(UnavailableError):  # why an instance could not be loaded is what counts
                self._give_back(loaded)
            raise
        return loaded

    def _periods(self, n: int, block: int) -> Batch:
        """Return periods, each the mean over ``block`` inferences of every instance."""
        frames, jobs = len(self._frames), len(self._plan.stages)
        (scheduler,) = self._bench.run(self._setting(self._frames, n * block + 2), "fifo", self._frames)
        self._ran, self._last = self._bench.client.generation, self._frames
        ends_ns = sorted(end for k in range(frames) for _, end in scheduler.requests(k))
        marks = np.array(ends_ns[frames - 1 : -frames : block * frames]) * 1e-9
        runs = np.array([run for k in range(frames) for row in scheduler.runs(k)[1:-1] for run in row], np.int64)
        runs = runs.reshape(-1, jobs, 3)
        runs = runs[np.argsort(runs[:, :, 1].max(axis=1))].reshape(n, -1, jobs, 3)
        stage_s = (runs[..., 1] - runs[..., 0]).mean(axis=1) * 1e-9
        return Batch(np.diff(marks) / (block * frames), stage_s)

    def _setting(self, instances: Sequence[Loaded], requests: int) -> Setting:
        """Return a setting in which instances of the plan run requests in closed loops."""
        processors = tuple(self._law.members[s.processor] for s in self._plan.stages)
        client = QueueClient(processors, (0,), requests, closed=True, after=self._loaded.after)
        number, stages = len(instances), tuple(range(len(processors)))
        return Setting((client,) * number, (0,) * number, (stages,) * number, self._law.names, self._law.excluded)

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's on LiteRT's CPU; run once if there was none.

        After a stream, the outputs of every instance are compared.
        """
        if self._ran != self._bench.client.generation:
            _ = self._periods(1, 1) if self._frames else self.run(1)
        return worst(map(self._compare, self._last))

    def traffic(self) -> dict[str, float]:
        """Return the megabytes that an inference moves, as the GPU counts them."""
        return self._bench.traffic(self._loaded)

    def close(self) -> None:
        """Release what only this candidate holds; a second call does nothing."""
        self._give_back((self._loaded, *self._frames))

    def _give_back(self, instances: Iterable[Loaded]) -> None:
        with ExitStack() as stack:  # release all, even where one fails
            for each in instances:
                stack.callback(self._bench.give_back, each)
