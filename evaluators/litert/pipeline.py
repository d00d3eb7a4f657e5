"""A plan for a stream of inferences: consecutive ones overlap on the processors, and their outputs come in order.

Every inference in flight has memory of its own, a frame. The parent writes the inputs of inference ``i`` into frame
``i mod frames`` once the inference that used it before has finished, posts to the stages that read them, and waits for
the stages whose outputs no other stage reads. :mod:`evaluators.schedule` says how workers wait for each other.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch
from evaluators.litert import tensors
from evaluators.litert.program import LOG_NBYTES, ONE_FRAME, Binding
from evaluators.litert.worker.shared_memory import Semaphores
from evaluators.litert.workers import SLACK_S, Arena, Request, WorkerError, Workers, bind_program, notify
from evaluators.schedule import arcs, needs_of, rounds
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform

Arrays = Sequence[NDArray[np.generic]]

_NEVER = np.iinfo(np.int64).max
_MOST_KEPT = 4096
# A waiting worker polls this long before it sleeps. One that is not the busiest may sleep: it has time to wake late.
_SPIN_NS = 50_000
_LOOK_S = 0.1
# An observation of the period is the mean over a block of at least so many inferences and at least so long.
_LEAST_BLOCK, _BLOCK_S = 4, 0.1


class Pipeline:
    """A plan whose stages are bound to the frames of a stream; close it.

    Semaphores are numbered in this order: between workers, from the parent to stages (inputs are there), from stages to
    the parent.

    Args:
        number: of the candidate; its negative identifies the pipeline, and its memory, to the workers.
        limit_s: how long a worker may make no progress.

    Raises:
        UnavailableError: there is not enough memory, or the workers are gone.
    """

    def __init__(
        self, plan: Plan, platform: Platform, workers: Workers, number: int, bound: Binding, limit_s: float
    ) -> None:
        graph, layout = bound.graph, bound.layout
        needs = needs_of(graph, plan)
        self.how = rounds(plan, platform, needs)
        self._graph, self._plan, self._workers, self._number = graph, plan, workers, -number
        self._layout, self._limit_s = layout, limit_s
        stages = range(len(plan.stages))
        inputs = set(graph.inputs)
        read = {before for each in needs for before in each}
        self._arcs = arcs(plan, platform, needs, self.how)
        self._into = [
            i for i in stages if not needs[i] or not inputs.isdisjoint(graph.boundary(plan.stages[i].operators).inputs)
        ]
        self._out = [i for i in stages if i not in read]
        names = list(plan.by_processor())
        alone = {a for a, b in permutations(names, 2) if platform[a].excludes(platform[b])}
        self._spin_ns = [0 if stage.processor in alone else _SPIN_NS for stage in plan.stages]
        self._kept = min(_MOST_KEPT, (LOG_NBYTES // 8 - 1) // (2 * len(plan.stages)))
        self._frame_nbytes = -(-layout.nbytes // 4096) * 4096
        self._arena = Arena(self._number, self.how.frames * self._frame_nbytes)
        try:
            self._semaphores = Semaphores(len(self._arcs) + len(self._into) + len(self._out))
        except BaseException:
            self._arena.close()
            raise
        self._log = np.frombuffer(self._arena.map, np.int64, 1 + 2 * len(plan.stages) * self._kept, layout.log)
        self._worker: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._posted: list[int] = []  # for each of the last stages: for how many rounds it has posted
        self._waiting = False
        self._ticks = self._ran = self._block = 0  # the last: inferences in an observation of the period
        try:
            self._arena.introduce(workers, names)
            self._ends = workers.ends_of(names)
            bind_program(workers, self._number, self._arena, self._semaphores, self._programs(bound))
        except BaseException:
            self._give_back()
            raise

    def _programs(self, bound: Binding) -> dict[str, dict[str, object]]:
        edges = [(a.before, a.after) for a in self._arcs]
        edges += [(-1, stage) for stage in self._into] + [(stage, -1) for stage in self._out]

        def step(stage: int) -> dict[str, object]:
            waits = [(i, self._spin_ns[stage]) for i, (_, after) in enumerate(edges) if after == stage]
            return bound.step(stage, waits, [i for i, (before, _) in enumerate(edges) if before == stage])

        frames = {**ONE_FRAME, "frames": self.how.frames, "frame_nbytes": self._frame_nbytes, "regular": False}
        return {name: {**frames, "steps": [step(s) for s in own]} for name, own in self._plan.by_processor().items()}

    def measure(self, n: int, inputs: Arrays) -> NDArray[np.int64]:
        """Run ``n`` inferences back to back; return start and end (ns) of each stage, ``(n, stages, 2)``.

        Args:
            n: at most as many as the log has room for.
            inputs: the same for all of them.
        """
        for frame in range(self.how.frames):
            self._write(frame, inputs)
        with self._workers.measuring(self._plan.by_processor(), first=True):
            self._begin(n, n + self.how.depth)
            self._run()
        self._ran = min(n, self.how.frames)
        return self._times()[:n].copy()

    def periods(self, n: int, inputs: Arrays) -> Batch:
        """Return ``n`` observations of the period of a full pipeline; see :class:`~evaluators.base.Candidate`."""
        depth = self.how.depth
        if not self._block:
            trial = _ends_s(self.measure(2 * depth + _LEAST_BLOCK + 1, inputs))
            each_s = max(float(trial[depth + _LEAST_BLOCK] - trial[depth]) / _LEAST_BLOCK, 1e-9)
            self._block = min(max(_LEAST_BLOCK, math.ceil(_BLOCK_S / each_s)), self._kept - 2 * depth - 1)
        block = self._block
        at_once = max(1, (self._kept - 2 * depth - 1) // block)
        found: list[float] = []
        stages: list[NDArray[np.float64]] = []
        while len(found) < n:
            count = min(at_once, n - len(found))
            # More inferences than are observed, by the pipeline's depth: while it drains, stages run alone.
            times = self.measure(2 * depth + count * block + 1, inputs)
            marks = _ends_s(times)[depth : depth + count * block + 1 : block]
            took = (times[:, :, 1] - times[:, :, 0])[depth : depth + count * block] * 1e-9
            found += [float(s) for s in np.diff(marks) / block]
            stages += list(took.reshape(count, block, -1).mean(axis=1))
        return Batch(np.array(found), np.array(stages))

    def stream(self, inputs: Iterable[Arrays]) -> Iterator[tuple[list[NDArray[np.generic]], NDArray[np.int64]]]:
        """Run an inference for each of the inputs, and yield copies of the outputs in the same order.

        Inputs are taken while a frame is free, so the first outputs come after several inputs have been taken. Start
        and end of the stages come with the outputs (ns), shape ``(stages, 2)``.

        Raises:
            UnavailableError: a worker failed, or made no progress for too long.
        """
        self._begin(_NEVER, 0)
        self._worker = threading.Thread(target=self._guarded, daemon=True)
        self._worker.start()
        fed = out = 0
        try:
            for arrays in inputs:
                self._write(fed % self.how.frames, arrays)
                self._post_inputs(1)
                fed += 1
                while fed - out == self.how.frames or (out < fed and self._is_out(out)):
                    yield self._collect(out)
                    out += 1
            self._log[0] = fed
            self._post_inputs(self.how.depth)
            while out < fed:
                yield self._collect(out)
                out += 1
        finally:
            self.stop()

    def stop(self) -> None:
        """End a stream: inferences in flight are finished or dropped, and the workers are free again."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._log[0] == _NEVER:
            self._log[0] = 0
        self._waiting = True
        count = len(self._arcs) + len(self._into) + len(self._out)
        self._post(range(count), self.how.depth + self.how.frames + 2)
        worker.join()

    def last_outputs(self) -> list[list[NDArray[np.generic]]]:
        """Return the outputs of the last inferences that :meth:`measure` made, one of each frame."""
        return [self._outputs(frame) for frame in range(self._ran)]

    def close(self) -> None:
        """Have the workers forget the pipeline, and release the memory."""
        notify(self._workers, self._ends, {"op": "drop", "id": self._number})
        self._give_back()

    def _give_back(self) -> None:
        self._semaphores.close()
        del self._log
        self._arena.give_back(self._workers)

    def _outputs(self, frame: int) -> list[NDArray[np.generic]]:
        return [self._view(frame, tensor).copy() for tensor in self._graph.outputs]

    def _times(self) -> NDArray[np.int64]:
        return self._log[1:].reshape(self._kept, len(self._plan.stages), 2)

    def _view(self, frame: int, tensor: int) -> NDArray[np.generic]:
        offset = frame * self._frame_nbytes + self._layout.offsets[tensor]
        return tensors.view(self._arena.map, offset, self._graph.tensors[tensor])

    def _write(self, frame: int, arrays: Arrays) -> None:
        for tensor, array in zip(self._graph.inputs, arrays, strict=True):
            self._view(frame, tensor)[...] = array

    def _post_inputs(self, times: int) -> None:
        self._post(range(len(self._arcs), len(self._arcs) + len(self._into)), times)

    def _post(self, semaphores: Iterable[int], times: int) -> None:
        for semaphore in semaphores:
            for _ in range(times):
                self._semaphores.post(semaphore)

    def _collect(self, inference: int) -> tuple[list[NDArray[np.generic]], NDArray[np.int64]]:
        """Wait until an inference has finished; return copies of its outputs, and its stages' times."""
        self._waiting = True
        while not self._is_out(inference, _LOOK_S):
            if self._worker is None or not self._worker.is_alive():
                raise self._failure or UnavailableError("the worker processes ended before the stream did")
        self._waiting = False
        return self._outputs(inference % self.how.frames), self._times()[inference % self._kept].copy()

    def _is_out(self, inference: int, limit_s: float = 0.0) -> bool:
        first = len(self._arcs) + len(self._into)
        for place, stage in enumerate(self._out):
            # A stage posts in every round, also in the rounds before its first inference.
            while self._posted[place] <= self.how.lag[stage] + inference:
                if not self._semaphores.wait(first + place, limit_s):
                    return False
                self._posted[place] += 1
        return True

    def _begin(self, inferences: int, ready: int) -> None:
        """Reset log and semaphores; the inputs of ``ready`` inferences are in place."""
        self._workers.check(self._ends)
        self._log[:] = 0
        self._log[0] = inferences
        self._waiting = inferences != _NEVER
        self._failure = None
        self._posted = [0] * len(self._out)
        into = [self.how.lag[stage] + ready for stage in self._into]
        self._semaphores.reset([*(a.tokens for a in self._arcs), *into, *self._posted])

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - passed to the thread that waits
            self._failure = error

    def _run(self) -> None:
        head = {
            "op": "stream",
            "id": self._number,
            "arena": self._number,
            "log": self._layout.log,
            "stages": len(self._plan.stages),
            "kept": self._kept,
            "depth": self.how.depth,
        }
        requests = {
            name: Request({**head, "lags": [self.how.lag[s] for s in stages]})
            for name, stages in self._plan.by_processor().items()
        }
        try:
            self._workers.ask_all(requests, SLACK_S + self._limit_s, self._progress)
        except WorkerError as error:
            raise UnavailableError(f"{error.what}, in a stream") from error

    def _progress(self) -> int:
        """Return a number that grows while the workers work, and while the parent does not wait for them."""
        if not self._waiting:
            self._ticks = time.perf_counter_ns()
        return max(self._ticks, int(self._log[1:].max()))


def _ends_s(times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return when each inference ended (s), from the start of the first stage."""
    found: NDArray[np.float64] = (times[:, :, 1].max(axis=1) - times[:, :, 0].min()) * 1e-9
    return found
