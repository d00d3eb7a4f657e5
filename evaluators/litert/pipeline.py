"""A plan for a stream of inferences: consecutive ones overlap on the lanes, and come out in order.

Every inference in flight has memory of its own, a frame. The parent writes the inputs of inference ``i`` into frame
``i mod frames`` once the inference that had it before is out, tells the stages that read them, and waits for the stages
that nobody waits for. Lanes meet at the edges of :mod:`evaluators.schedule`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch
from evaluators.litert import tensors
from evaluators.litert.arena import LOG_NBYTES, Layout
from evaluators.litert.edges import Meetings, memory_of_edges
from evaluators.litert.lanes import LaneError, Lanes, Request
from evaluators.litert.program import Copies
from evaluators.litert.shared import SETUP_LIMIT_S, SLACK_S, Arena
from evaluators.schedule import Rounds, arcs, needs_of, rounds
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

Arrays = Sequence[NDArray[np.generic]]

_NEVER = np.iinfo(np.int64).max
_MOST_KEPT = 4096
# A lane that waits polls so long before it sleeps. A lane that is not the busiest may sleep: there is room to be late.
_SPIN_NS = 50_000
_LOOK_S = 0.1
# An observation of the period is the mean over a block of inferences, so many and so long at least.
_LEAST_BLOCK, _BLOCK_S = 4, 0.1


@dataclass(frozen=True, slots=True)
class Binding:
    """What a candidate knows of its stages.

    Attributes:
        compiled: stage → what it was compiled as on its lane: a number, and its signature there.
        ports: stage → its input and output tensors in the order of its model.
        copied: stage → what it copies to and from an accelerator.
        layout: of one inference.
    """

    compiled: Mapping[int, tuple[int, int]]
    ports: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    copied: Mapping[int, Copies]
    layout: Layout

    def step(self, graph: Graph, stage: int) -> dict[str, Any]:
        """Return what a lane is told of a stage, its meetings apart."""
        (number, signature), (inputs, outputs) = self.compiled[stage], self.ports[stage]
        copied, offsets = self.copied[stage], self.layout.offsets
        return {
            "stage": stage,
            "compiled": number,
            "signature": signature,
            "Input": [(offsets[t], graph.tensors[t].nbytes, t) for t in inputs],
            "Output": [(offsets[t], graph.tensors[t].nbytes, t) for t in outputs],
            "uploads": [i for i, t in enumerate(inputs) if t in copied.uploads],
            "downloads": [i for i, t in enumerate(outputs) if t in copied.downloads],
        }


@dataclass(frozen=True, slots=True)
class _Edges:
    """All edges of a stream.

    Attributes:
        lane: between lanes: the stage that tells, the one that waits, and the tokens at the start.
        into, out: the stages that the parent tells of inputs, and those that it waits for.
    """

    lane: tuple[tuple[int, int, int], ...]
    into: tuple[int, ...]
    out: tuple[int, ...]

    def tokens(self, how: Rounds, ready: int) -> list[int]:
        """Return the tokens at the start; ``ready`` is for how many inferences the inputs are there."""
        return [*(t for *_, t in self.lane), *(how.lag[s] + ready for s in self.into), *(0 for _ in self.out)]


class Pipeline:
    """A plan whose stages are bound to the frames of a stream; close it.

    Args:
        number: what the lanes call it, and its memory; no other pipeline or program may have it.
        limit_s: how long a lane may do nothing while it is waited for.

    Raises:
        UnavailableError: there is not enough memory, or the lanes are gone.
    """

    def __init__(
        self, graph: Graph, plan: Plan, platform: Platform, lanes: Lanes, number: int, bound: Binding, limit_s: float
    ) -> None:
        needs = needs_of(graph, plan)
        self.how = rounds(plan, platform, needs)
        self._graph, self._plan, self._lanes, self._number = graph, plan, lanes, number
        self._layout, self._limit_s = bound.layout, limit_s
        self._generation = lanes.generation
        stages = range(len(plan.stages))
        read = {before for each in needs for before in each}
        reads = (i for i in stages if not needs[i] or _reads_inputs(graph, plan, i))
        self._edges = _Edges(
            tuple((a.before, a.after, a.tokens) for a in arcs(plan, platform, needs, self.how)),
            tuple(reads),
            tuple(i for i in stages if i not in read),
        )
        self._names = list(plan.by_processor())
        self._alone = {a for a in self._names if any(platform[a].excludes(platform[b]) for b in self._names if a != b)}
        self._kept = min(_MOST_KEPT, (LOG_NBYTES // 8 - 1) // (2 * len(plan.stages)))
        self._frame_nbytes = -(-bound.layout.nbytes // 4096) * 4096
        self._arena = Arena(-number, self.how.frames * self._frame_nbytes)
        try:
            self._meetings = Meetings(*memory_of_edges(len(self._edges.tokens(self.how, 0))))
        except BaseException:
            self._arena.close(None)
            raise
        log = np.frombuffer(self._arena.memory, np.int64, 1 + 2 * len(plan.stages) * self._kept, self._layout.log)
        self._log = log
        self._worker: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._told: list[int] = []  # how often each of the last stages has told of a round
        self._waiting = False
        self._ticks = self._ran = 0
        self.block = 0  # how many inferences make an observation of the period, once that is known
        try:
            self._arena.introduce(lanes, self._names)
            self._send(bound)
        except BaseException:
            self._give_back()
            raise

    def measure(self, n: int, inputs: Arrays) -> NDArray[np.int64]:
        """Run ``n`` inferences as fast as they go, and return start and end (ns) of each stage, ``(n, stages, 2)``.

        Args:
            n: at most :attr:`most`.
            inputs: of all of them.
        """
        for frame in range(self.how.frames):
            self._write(frame, inputs)
        self._begin(n, n + self.how.depth)
        self._run()
        self._ran = min(n, self.how.frames)
        return self._log[1:].reshape(self._kept, len(self._plan.stages), 2)[:n].copy()

    @property
    def most(self) -> int:
        """How many inferences one call of :meth:`measure` can make."""
        return self._kept

    def stream(self, inputs: Iterable[Arrays]) -> Iterator[tuple[list[NDArray[np.generic]], NDArray[np.int64]]]:
        """Run an inference for each of the inputs, and yield copies of the outputs in their order.

        Inputs are taken as long as there is a free frame, so the results of the first few come after some more were
        taken. With the outputs come start and end of the stages (ns), shape ``(stages, 2)``.

        Raises:
            UnavailableError: a lane failed, or did nothing for too long.
        """
        self._begin(_NEVER, 0)
        self._worker = threading.Thread(target=self._guarded, daemon=True)
        self._worker.start()
        fed = out = 0
        try:
            for arrays in inputs:
                self._write(fed % self.how.frames, arrays)
                self._tell_inputs(1)
                fed += 1
                while fed - out == self.how.frames or (out < fed and self._is_out(out)):
                    yield self._collect(out)
                    out += 1
            self._log[0] = fed
            self._tell_inputs(self.how.depth)
            while out < fed:
                yield self._collect(out)
                out += 1
        finally:
            self.stop()

    def stop(self) -> None:
        """End a stream: what is under way is finished or dropped, and the lanes are free again."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._log[0] == _NEVER:
            self._log[0] = 0
        self._waiting = True
        for edge in range(len(self._edges.tokens(self.how, 0))):
            for _ in range(self.how.depth + self.how.frames + 2):
                self._meetings.tell(edge)
        worker.join()

    def last_outputs(self) -> list[list[NDArray[np.generic]]]:
        """Return the outputs of the last inferences that :meth:`measure` made, one of each frame."""
        return [self._outputs(frame) for frame in range(self._ran)]

    def _outputs(self, frame: int) -> list[NDArray[np.generic]]:
        return [self._view(frame, tensor).copy() for tensor in self._graph.outputs]

    def close(self) -> None:
        """Give the memory back, and have the lanes forget the pipeline."""
        if self._generation == self._lanes.generation:
            head = {"op": "dismantle", "id": self._number}
            self._lanes.ask_all({name: Request(head) for name in self._names}, SETUP_LIMIT_S)
        self._give_back()

    def _give_back(self) -> None:
        self._meetings.close()
        del self._log
        self._arena.close(self._lanes if self._generation == self._lanes.generation else None)

    def _view(self, frame: int, tensor: int) -> NDArray[np.generic]:
        offset = frame * self._frame_nbytes + self._layout.offsets[tensor]
        return tensors.view(self._arena.memory, offset, self._graph.tensors[tensor])

    def _write(self, frame: int, arrays: Arrays) -> None:
        for tensor, array in zip(self._graph.inputs, arrays, strict=True):
            self._view(frame, tensor)[...] = array

    def _tell_inputs(self, times: int) -> None:
        for place in range(len(self._edges.into)):
            for _ in range(times):
                self._meetings.tell(len(self._edges.lane) + place)

    def _collect(self, inference: int) -> tuple[list[NDArray[np.generic]], NDArray[np.int64]]:
        """Wait until an inference is out."""
        self._waiting = True
        while not self._is_out(inference, _LOOK_S):
            if self._worker is None or not self._worker.is_alive():
                raise self._failure or UnavailableError("the worker processes ended before the stream did")
        self._waiting = False
        times = self._log[1:].reshape(self._kept, len(self._plan.stages), 2)[inference % self._kept].copy()
        return self._outputs(inference % self.how.frames), times

    def _is_out(self, inference: int, limit_s: float = 0.0) -> bool:
        first = len(self._edges.lane) + len(self._edges.into)
        for place, stage in enumerate(self._edges.out):
            # A stage tells in every round, also in those before its first inference.
            while self._told[place] <= self.how.lag[stage] + inference:
                if not self._meetings.wait(first + place, limit_s):
                    return False
                self._told[place] += 1
        return True

    def _begin(self, inferences: int, ready: int) -> None:
        if self._generation != self._lanes.generation:
            raise UnavailableError("a worker process was restarted since the plan was loaded", "load the plan again")
        self._log[:] = 0
        self._log[0] = inferences
        self._waiting = inferences != _NEVER
        self._failure = None
        self._told = [0] * len(self._edges.out)
        self._meetings.reset(self._edges.tokens(self.how, ready))

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - told to the one who waits
            self._failure = error

    def _run(self) -> None:
        head = {"op": "stream", "id": self._number}
        try:
            self._lanes.ask_all({name: Request(head) for name in self._names}, SLACK_S + self._limit_s, self._progress)
        except LaneError as error:
            raise UnavailableError(f"{error.what}, in a stream") from error

    def _progress(self) -> int:
        """Grow while the lanes work, and while nobody waits for them."""
        if not self._waiting:
            self._ticks = time.perf_counter_ns()
        return max(self._ticks, int(self._log[1:].max()))

    def _send(self, bound: Binding) -> None:
        edges = self._edges
        waits: list[list[list[int]]] = [[] for _ in self._plan.stages]
        signals: list[list[int]] = [[] for _ in self._plan.stages]

        def wait(edge: int, stage: int) -> None:
            waits[stage].append([edge, 0 if self._plan.stages[stage].processor in self._alone else _SPIN_NS])

        for edge, (before, after, _) in enumerate(edges.lane):
            signals[before].append(edge)
            wait(edge, after)
        for place, stage in enumerate(edges.into):
            wait(len(edges.lane) + place, stage)
        for place, stage in enumerate(edges.out):
            signals[stage].append(len(edges.lane) + len(edges.into) + place)
        requests = {}
        for name, stages in self._plan.by_processor().items():
            steps = [
                bound.step(self._graph, index)
                | {"lag": self.how.lag[index], "waits": waits[index], "signals": signals[index]}
                for index in stages
            ]
            head = {
                "op": "pipeline",
                "id": self._number,
                "arena": self._arena.number,
                "edges_nbytes": self._meetings.nbytes,
                "frames": self.how.frames,
                "frame_nbytes": self._frame_nbytes,
                "log": self._layout.log,
                "stages": len(self._plan.stages),
                "kept": self._kept,
                "depth": self.how.depth,
                "steps": steps,
            }
            requests[name] = Request(head, fds=[self._meetings.fd])
        self._lanes.ask_all(requests, SETUP_LIMIT_S)


def periods(pipeline: Pipeline, n: int, inputs: Arrays) -> Batch:
    """Return ``n`` observations of the period of a full pipeline; see :class:`~evaluators.base.Candidate`."""
    depth, block = pipeline.how.depth, pipeline.block
    if not block:
        trial = _ends_s(pipeline.measure(2 * depth + _LEAST_BLOCK + 1, inputs))
        each_s = max(float(trial[depth + _LEAST_BLOCK] - trial[depth]) / _LEAST_BLOCK, 1e-9)
        block = max(_LEAST_BLOCK, math.ceil(_BLOCK_S / each_s))
        block = pipeline.block = min(block, pipeline.most - 2 * depth - 1)
    at_once = max(1, (pipeline.most - 2 * depth - 1) // block)
    found: list[float] = []
    stages: list[NDArray[np.float64]] = []
    while len(found) < n:
        count = min(at_once, n - len(found))
        # As many more as the pipeline is deep: while it drains, lanes are alone.
        times = pipeline.measure(2 * depth + count * block + 1, inputs)
        marks = _ends_s(times)[depth : depth + count * block + 1 : block]
        took = (times[:, :, 1] - times[:, :, 0])[depth : depth + count * block] * 1e-9
        found += [float(s) for s in np.diff(marks) / block]
        stages += list(took.reshape(count, block, -1).mean(axis=1))
    return Batch(np.array(found), np.array(stages))


def _ends_s(times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return when each inference was out, in seconds since the first stage began."""
    found: NDArray[np.float64] = (times[:, :, 1].max(axis=1) - times[:, :, 0].min()) * 1e-9
    return found


def _reads_inputs(graph: Graph, plan: Plan, stage: int) -> bool:
    return bool(set(graph.boundary(plan.stages[stage].operators).inputs) & set(graph.inputs))
