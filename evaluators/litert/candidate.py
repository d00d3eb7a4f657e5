"""A plan bound to its lanes and to shared memory, ready to run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Batch, Candidate
from evaluators.litert import tensors
from evaluators.litert.arena import LOG_NBYTES, layout
from evaluators.litert.edges import memory_of_edges
from evaluators.litert.lanes import LaneError, Lanes, Request
from evaluators.litert.pipeline import Binding, Pipeline, periods
from evaluators.litert.program import Schedule, copies, lane_program, schedule
from evaluators.litert.settings import CPU, accelerators_of
from evaluators.litert.shared import SETUP_LIMIT_S, SLACK_S, Arena
from evaluators.litert.waking import sleepers, wake, were_busy
from evaluators.schedule import Event, Timeline
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

_NEVER = np.iinfo(np.int64).max
# How long a lane may do nothing, beside SLACK_S: the time of an inference, after a first result this many times over.
_LIMIT_FACTOR = 50.0
# After so many inferences with an accelerator one more is made in which every stage is waited for.
_SYNCHRONISE_EVERY = 16


class LitertCandidate(Candidate):
    """See :class:`~evaluators.base.Candidate`; made by a session or a runner, which compiled the stages.

    Args:
        number: what the lanes call this program.
        compiled: stage index → what it was compiled as on its lane: a number, and its signature there.
        ports: stage index → the stage's input and output tensors in the order of its model.
        reference: the whole model's outputs, or None if this is the one that makes them.
        tolerance: the relative error up to which outputs are accepted; 0 where they must be identical.
        first_outputs: what the plan computes in a first run, for models with state, whose later runs compute
            something else.
        explain: returns, for a lane that failed and what it said, the error that names the operator.
        on_close: told once when the candidate is closed.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        platform: Platform,
        *,
        lanes: Lanes,
        arena: Arena,
        number: int,
        compiled: Mapping[int, tuple[int, int]],
        ports: Mapping[int, tuple[Sequence[int], Sequence[int]]],
        reference: Callable[[], Sequence[NDArray[np.generic]]] | None = None,
        tolerance: float = 0.0,
        first_outputs: Callable[[], Sequence[NDArray[np.generic]]] | None = None,
        explain: Callable[[str, str], UnavailableError] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._graph = graph
        self._platform = platform
        self._lanes = lanes
        self._generation = lanes.generation
        self._arena = arena
        self._number = number
        self._reference = reference
        self._tolerance = tolerance
        self._first_outputs = first_outputs
        self._explain = explain
        self._on_close = on_close
        self._schedule = schedule(graph, plan, platform)
        self._layout = layout(graph, plan, self._schedule.before, {i: outputs for i, (_, outputs) in ports.items()})
        self._names = [lane.processor for lane in self._schedule.lanes]
        self._limits = platform.limits
        self._known_s: float | None = None
        self._closed = False
        self._ran = False
        self._since = 0
        self._own: tuple[NDArray[np.float64], Timeline] | None = None
        accelerators = {p.name for p in platform.processors if accelerators_of(p) != CPU}
        self._accelerated = not accelerators.isdisjoint(self._names)
        self._sleepers = () if graph.stateful else sleepers(platform[name] for name in self._names)
        copied = copies(graph, plan, accelerators)
        self._queued = any(not copied[i].downloads for i, s in enumerate(plan.stages) if s.processor in accelerators)
        self._bound = Binding(compiled, ports, copied, self._layout)
        self._pipeline: Pipeline | None = None
        arena.introduce(lanes, self._names)
        self._send_programs()

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`.

        An accelerator takes stages into a queue and its calls return before they are done. Latencies are those of
        inferences that use the queue, from the start to the moment when the result can be read. Where a stage leaves
        its result on the accelerator, the times of the stages, and the timeline, come from a separate inference that
        waits for each. Where a session measures, an adapter that idled is woken first.
        """
        if self._reference is not None:
            self.wake()
        stages = len(self.plan.stages)
        capacity = (LOG_NBYTES // 8 - 1) // (2 * stages)
        latencies, stage_times, timeline = [], [], None
        left = n
        while left > 0:
            count = min(left, capacity)
            log, _ = self._run_batch(count, stop_above_s)
            begun = log[log.any(axis=(1, 2))]
            if not len(begun):
                raise UnavailableError("the processors ran nothing")
            first = np.where(begun[:, :, 0] > 0, begun[:, :, 0], _NEVER).min(axis=1)
            latency = (begun[:, :, 1].max(axis=1) - first) * 1e-9
            latencies.append(latency)
            stage_times.append((begun[:, :, 1] - begun[:, :, 0]) * 1e-9)
            self._ran = bool(begun[-1].all())
            timeline = self._timeline(begun[-1], {}) if self._ran else None
            left = 0 if latency.max() > stop_above_s else left - count
        self._known_s = float(np.median(latencies[-1]))
        stage_s = np.concatenate(stage_times)
        if self._accelerated:
            own_s, timeline = self._synchronised(len(stage_s))
            if self._queued:
                stage_s = np.tile(own_s, (len(stage_s), 1))
            were_busy(self._sleepers)
        return Batch(np.concatenate(latencies), stage_s, timeline)

    def pipeline(self) -> Pipeline:
        """Return the plan bound for a stream of inferences; made when first asked for, closed with the candidate."""
        if self._pipeline is None:
            limit_s = self._limits.run_s if self._known_s is None else _LIMIT_FACTOR * self._known_s
            self._pipeline = Pipeline(
                self._graph, self.plan, self._platform, self._lanes, self._number, self._bound, limit_s
            )
        return self._pipeline

    def lane_processes(self) -> list[int]:
        """Return the numbers of the processes that run the plan."""
        return self._lanes.processes()

    def stream(self, n: int) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        return periods(self.pipeline(), n, [self._view(tensor) for tensor in self._graph.inputs])

    def after_pause(self, pause_s: float) -> float:
        """Return the seconds of one inference that follows a pause: clocks are down, and adapters asleep."""
        time.sleep(pause_s)
        log, _ = self._run_batch(1, math.inf)
        return float(log[0].max() - log[0][log[0] > 0].min()) * 1e-9

    def wake(self) -> None:
        """Run, without taking samples, until an adapter that idled is awake; see :mod:`evaluators.litert.waking`."""

        def latency_s() -> float:
            log, _ = self._run_batch(1, math.inf)
            return float(log[0].max() - log[0].min()) * 1e-9

        if self._sleepers:
            wake(self._sleepers, latency_s)

    def _synchronised(self, n: int) -> tuple[NDArray[np.float64], Timeline]:
        """Return the stages' own seconds, measured anew after some inferences; ``n`` were made since the last call."""
        self._since += n
        own = self._own
        if own is None or self._since >= _SYNCHRONISE_EVERY:
            log, copied_s = self._run_batch(1, math.inf, synchronised=True)
            stage_s = np.asarray((log[0, :, 1] - log[0, :, 0]) * 1e-9, np.float64)
            own = self._own = stage_s, self._timeline(log[0], copied_s)
            self._since = 0
        return own

    def _run_batch(
        self, n: int, stop_above_s: float, *, synchronised: bool = False
    ) -> tuple[NDArray[np.int64], dict[int, float]]:
        """Return start and end of each stage in each inference, and the seconds that stages copied in the last one."""
        if self._generation != self._lanes.generation:
            raise UnavailableError("a worker process was restarted since the plan was loaded", "load the plan again")
        stages = len(self.plan.stages)
        log = np.frombuffer(self._arena.memory, np.int64, 1 + 2 * stages * n, self._layout.log)
        log[:] = 0
        log[0] = n
        head = {
            "op": "run",
            "id": self._number,
            "arena": self._arena.number,
            "log": self._layout.log,
            "n": n,
            "stages": stages,
            "stop_above_ns": max(1, int(stop_above_s * 1e9)) if math.isfinite(stop_above_s) else 0,
            "synchronised": synchronised,
            "break_off": not self._accelerated,
            # Until a first result is there, each stage is recorded as it ends, so that one that fails can be named.
            "apart": self._known_s is None,
        }
        each_s = self._limits.run_s if self._known_s is None else _LIMIT_FACTOR * self._known_s
        # The leader is asked last: by then the others wait for its token.
        order = [*self._names[1:], self._names[0]]
        times = log[1:].reshape(n, stages, 2)
        try:
            answers = self._lanes.ask_all(
                {name: Request(head) for name in order}, SLACK_S + each_s, lambda: int(np.count_nonzero(times))
            )
        except LaneError as error:
            what = blamed(error, times, self.plan, self._schedule, apart=self._known_s is None)
            if error.told and self._explain is not None:
                raise self._explain(error.lane, what) from error
            raise UnavailableError(what) from error
        copied = (entry for answer in answers.values() for entry in answer.get("copies", ()))
        return times, {stage: (copied_in + copied_out) * 1e-9 for stage, copied_in, copied_out in copied}

    def _timeline(self, times: NDArray[np.int64], copied_s: Mapping[int, float]) -> Timeline:
        seconds = (times - times.min()) * 1e-9
        events = [
            Event(i, stage.processor, float(seconds[i, 0]), float(seconds[i, 1]), copied_s.get(i, 0.0))
            for i, stage in enumerate(self.plan.stages)
        ]
        return Timeline(tuple(sorted(events, key=lambda e: e.start_s)))

    def set_inputs(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Copy one array per input of the model into shared memory; shapes and types must be the model's.

        What an earlier plan left in the place of the outputs is overwritten, so that it cannot pass for this one's.
        """
        for tensor, array in zip(self._graph.inputs, arrays, strict=True):
            self._view(tensor)[...] = array
        for tensor in self._graph.outputs:
            if tensor not in self._graph.inputs:
                self._view(tensor).reshape(-1).view(np.uint8)[...] = 0xFF
        self._ran = False

    def _view(self, tensor: int) -> NDArray[np.generic]:
        return tensors.view(self._arena.memory, self._layout.offsets[tensor], self._graph.tensors[tensor])

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the model's outputs as the last run left them."""
        return [self._view(tensor).copy() for tensor in self._graph.outputs]

    def verify(self) -> Agreement | None:
        """See :class:`~evaluators.base.Candidate`; lanes that compute alike must agree bit for bit.

        The outputs of the last run serve, since :meth:`set_inputs` has spoilt what was there before; a model with
        state is compiled once more and its first run compared.
        """
        if self._reference is None:
            return None
        reference = self._reference()
        if self._first_outputs is not None:
            return tensors.agreement(self._graph, self._first_outputs(), reference, self._tolerance)
        streamed = self._pipeline.last_outputs() if self._pipeline is not None else []
        for outputs in streamed:
            found = tensors.agreement(self._graph, outputs, reference, self._tolerance)
            if not found.accepted:
                return found
        if not self._ran:
            self.run(1)
        return tensors.agreement(self._graph, self.outputs(), reference, self._tolerance)

    def close(self) -> None:
        """See :class:`~evaluators.base.Candidate`."""
        if self._closed:
            return
        self._closed = True
        if self._pipeline is not None:
            self._pipeline.close()
        if self._generation == self._lanes.generation:
            head = {"op": "drop", "id": self._number}
            self._lanes.ask_all({name: Request(head) for name in self._names}, SETUP_LIMIT_S)
        self._on_close()

    def _send_programs(self) -> None:
        """Tell every lane its share of the plan, with a semaphore for each meeting of two lanes."""
        edges, bound = self._schedule.meetings(), self._bound
        fd, nbytes = memory_of_edges(len(edges))
        try:
            requests = {}
            for lane in self._schedule.lanes:
                steps = {index: bound.step(self._graph, index) for index in lane.stages}
                program, mine = lane_program(self._schedule, lane, edges, steps)
                shared = {"slots": mine, "edges_nbytes": nbytes}
                head = {"op": "program", "id": self._number, "arena": self._arena.number, **program, **shared}
                requests[lane.processor] = Request(head, fds=[fd])
            self._lanes.ask_all(requests, SETUP_LIMIT_S)
        finally:
            os.close(fd)


def blamed(error: LaneError, times: NDArray[np.int64], plan: Plan, order: Schedule, *, apart: bool = True) -> str:
    """Return what went wrong, with the stage that was running on the lane that failed.

    The log tells who waits for whom, but not whether a lane that was stopped after a stage had told the others of
    its end; what the system says of the lane counts first. Unless stages are recorded ``apart``, a later one may be
    meant.
    """
    if error.told:
        return error.what
    suspects = error.stopped or error.silent
    unfinished = (times[:, :, 1] == 0).any(axis=1)
    done = times[int(np.argmax(unfinished)), :, 1] > 0 if unfinished.any() else np.ones(len(plan.stages), bool)
    for lane in order.lanes:
        if lane.processor not in suspects:
            continue
        left = [s for s in lane.stages if not done[s]]
        stage = left[0] if left else lane.stages[-1]
        ready = all(done[s] for s in range(stage) if order.before[stage] >> s & 1)
        if len(suspects) == 1 or (left and ready):
            last = stage if apart else lane.stages[-1]
            where = f"stage {stage}" if last == stage else f"one of its stages {stage} to {last}"
            where += f" (operators {plan.stages[stage].operators[0]} to {plan.stages[last].operators[-1]})"
            return f"processor {lane.processor!r} {error.reason} in {where}"
    return error.what
