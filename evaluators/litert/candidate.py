"""A plan bound to its workers and to shared memory, ready to run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Batch, Candidate
from evaluators.litert import tensors
from evaluators.litert.pipeline import Pipeline
from evaluators.litert.program import LOG_NBYTES, Binding, Schedule, copies, layout, schedule
from evaluators.litert.settings import CPU, accelerators_of
from evaluators.litert.stages import TakenStages
from evaluators.litert.worker.shared_memory import Semaphores
from evaluators.litert.workers import SLACK_S, Arena, Request, WorkerError, Workers, bind_program, notify
from evaluators.schedule import TERMS, Timeline, timeline
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import operator_range

_NEVER = np.iinfo(np.int64).max
# A worker may make no progress for SLACK_S and so many times the latency; before one is known, the platform's limit.
_LIMIT_FACTOR = 50.0
# After so many inferences with an accelerator, one more runs that waits for the end of each stage.
_SYNCHRONISE_EVERY = 16


class LitertCandidate(Candidate):
    """A plan whose stages a session or a runner has compiled.

    Args:
        number: identifies this program to the workers.
        stages: the plan's compiled stages.
        reference: returns the whole model's outputs; None for the candidate that computes them.
        tolerance: the relative error up to which outputs are accepted; 0 where they must be identical.
        first_outputs: for models with state: returns the outputs of a first run of the plan, since later runs compute
            something else.
        explain: returns the error that names the operator, given the processor whose worker failed and its message.
        on_close: called once when the candidate is closed.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        platform: Platform,
        stages: TakenStages,
        *,
        workers: Workers,
        arena: Arena,
        number: int,
        explain: Callable[[str, str], UnavailableError],
        reference: Callable[[], Sequence[NDArray[np.generic]]] | None = None,
        tolerance: float = 0.0,
        first_outputs: Callable[[], Sequence[NDArray[np.generic]]] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._graph, self._platform = graph, platform
        self._workers, self._arena, self._number = workers, arena, number
        self._reference, self._tolerance, self._first_outputs = reference, tolerance, first_outputs
        self._explain, self._on_close = explain, on_close
        self._schedule = schedule(graph, plan, platform)
        self._layout = layout(graph, plan, self._schedule.before, {i: out for i, (_, out) in stages.ports.items()})
        self._names = list(self._schedule.stages)
        self._known_s: float | None = None
        self._closed = self._ran = False
        self._since = 0
        self._own: tuple[NDArray[np.float64], Timeline] | None = None
        accelerators = {p.name for p in platform.processors if accelerators_of(p) != CPU}
        self._accelerated = not accelerators.isdisjoint(self._names)
        self._throttled = () if graph.stateful else throttled_adapters(platform[name] for name in self._names)
        copied = copies(graph, plan, accelerators)
        self._queued = any(not copied[i].downloads for i, s in enumerate(plan.stages) if s.processor in accelerators)
        self._bound = Binding(graph, stages.compiled, stages.ports, copied, self._layout)
        self._pipeline: Pipeline | None = None
        arena.introduce(workers, self._names)
        self._ends = workers.ends_of(self._names)
        programs = self._schedule.programs(self._bound)
        with closing(Semaphores(self._schedule.semaphores)) as semaphores:
            bind_program(workers, number, arena, semaphores, programs)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences; fewer where one takes longer than ``stop_above_s``.

        Calls of an accelerator queue a stage and return before it has run. Latencies are those of queued inferences,
        from the start until the result can be read. Where a stage leaves its result on the accelerator, stage times and
        the timeline come from a separate inference that waits for the end of each stage. In a session, an adapter that
        was idle is warmed up first.
        """
        if self._reference is not None:
            self.wake()
        capacity = (LOG_NBYTES // 8 - 1) // (2 * len(self.plan.stages))
        latencies, stage_times, last = [], [], None
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
            last = self._timeline(begun[-1], {}) if self._ran else None
            left = 0 if latency.max() > stop_above_s else left - count
        self._known_s = float(np.median(latencies[-1]))
        stage_s = np.concatenate(stage_times)
        if self._accelerated:
            own_s, last = self._synchronised(len(stage_s))
            if self._queued:
                stage_s = np.tile(own_s, (len(stage_s), 1))
            were_busy(self._throttled)
        return Batch(np.concatenate(latencies), stage_s, last)

    def pipeline(self) -> Pipeline:
        """Return the plan bound for a stream of inferences; made by the first call, closed with the candidate."""
        if self._pipeline is None:
            made = self._workers, self._number, self._bound, self._limit_s()
            self._pipeline = Pipeline(self.plan, self._platform, *made)
        return self._pipeline

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline."""
        return self.pipeline().periods(n, [self._view(tensor) for tensor in self._graph.inputs])

    def after_pause(self, pause_s: float) -> float:
        """Return the latency (s) of one inference after a pause: clocks are low, and adapters asleep."""
        time.sleep(pause_s)
        return self._one_s()

    def wake(self) -> None:
        """Warm up an adapter that was idle: run, without recording, until it has its full clock (:func:`wake`)."""
        if self._throttled:
            wake(self._throttled, self._one_s)

    def _one_s(self) -> float:
        log, _ = self._run_batch(1, math.inf)
        return float(log[0].max() - log[0].min()) * 1e-9

    def _synchronised(self, n: int) -> tuple[NDArray[np.float64], Timeline]:
        """Return the stages' own times (s) and timeline, measured again from time to time; ``n`` inferences are new."""
        self._since += n
        if self._own is None or self._since >= _SYNCHRONISE_EVERY:
            log, terms_s = self._run_batch(1, math.inf, synchronised=True)
            stage_s = np.asarray((log[0, :, 1] - log[0, :, 0]) * 1e-9, np.float64)
            self._own = stage_s, self._timeline(log[0], terms_s)
            self._since = 0
        return self._own

    def _limit_s(self) -> float:
        """Return how long a worker may make no progress (s), without the slack."""
        return self._platform.limits.run_s if self._known_s is None else _LIMIT_FACTOR * self._known_s

    def _run_batch(
        self, n: int, stop_above_s: float, *, synchronised: bool = False
    ) -> tuple[NDArray[np.int64], dict[int, dict[str, float]]]:
        """Return start and end (ns) of each stage, ``(n, stages, 2)``, and the terms (s) of stages in the last run."""
        self._workers.check(self._ends)
        stages = len(self.plan.stages)
        log = np.frombuffer(self._arena.map, np.int64, 1 + 2 * stages * n, self._layout.log)
        log[:] = 0
        log[0] = n
        request = Request(
            {
                "op": "run",
                "id": self._number,
                "arena": self._arena.number,
                "log": self._layout.log,
                "n": n,
                "stages": stages,
                "stop_above_ns": max(1, int(stop_above_s * 1e9)) if math.isfinite(stop_above_s) else 0,
                "synchronised": synchronised,
                "break_off": not self._accelerated,
                # Until a run has ended, each stage is recorded at its end, so that an error can name one that fails.
                "apart": self._known_s is None,
            }
        )
        # The leader is asked last: by then the others wait for its post.
        requests = dict.fromkeys([*self._names[1:], self._names[0]], request)
        times = log[1:].reshape(n, stages, 2)
        try:
            # Until a run has ended, no raised priority: the processes that could stop a hanging one must get a core.
            with self._workers.measuring(requests, first=self._known_s is not None):
                limit_s = SLACK_S + self._limit_s()
                answers = self._workers.ask_all(requests, limit_s, lambda: int(np.count_nonzero(times)))
        except WorkerError as error:
            what = blamed(error, times, self.plan, self._schedule, apart=self._known_s is None)
            raise (self._explain(error.worker, what) if error.reported else UnavailableError(what)) from error
        known = (entry for answer in answers.values() for entry in answer.get("terms", ()))
        return times, {stage: {t: ns * 1e-9 for t, ns in zip(TERMS, each, strict=True)} for stage, *each in known}

    def _timeline(self, times: NDArray[np.int64], terms_s: Mapping[int, Mapping[str, float]]) -> Timeline:
        spans = ((times - times.min()) * 1e-9).tolist()
        return timeline(spans, [stage.processor for stage in self.plan.stages], terms_s)

    def set_inputs(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Copy one array per input of the model into shared memory; shapes and types must be the model's."""
        tensors.fill(self._graph, self._view, arrays)
        self._ran = False

    def _view(self, tensor: int) -> NDArray[np.generic]:
        return tensors.view(self._arena.map, self._layout.offsets[tensor], self._graph.tensors[tensor])

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the model's outputs as the last run left them."""
        return [self._view(tensor).copy() for tensor in self._graph.outputs]

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; run once if there was none.

        Processors that compute alike must agree bit for bit.

        Outputs cannot be those of an earlier plan, because :meth:`set_inputs` overwrites them. A model with state is
        compiled again, and its first run is compared.
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
        """Release what only this candidate holds; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._pipeline is not None:
            self._pipeline.close()
        notify(self._workers, self._ends, {"op": "drop", "id": self._number})
        self._on_close()


def blamed(error: WorkerError, times: NDArray[np.int64], plan: Plan, order: Schedule, *, apart: bool = True) -> str:
    """Return the reason of a failure, with the stage that was running on the processor whose worker failed.

    The log shows which worker waits for which, but not whether a worker that was stopped after a stage had announced
    its end; so workers that the system reports as stopped are suspected first. Unless stages are recorded ``apart``, a
    later stage of the same run may have failed, and the text gives a range.
    """
    if error.reported:
        return error.what
    suspects = error.stopped or error.silent
    unfinished = (times[:, :, 1] == 0).any(axis=1)
    done = times[int(np.argmax(unfinished)), :, 1] > 0 if unfinished.any() else np.ones(len(plan.stages), bool)
    for processor, stages in order.stages.items():
        if processor not in suspects:
            continue
        left = [s for s in stages if not done[s]]
        stage = left[0] if left else stages[-1]
        ready = all(done[s] for s in range(stage) if order.before[stage] >> s & 1)
        if len(suspects) == 1 or (left and ready):
            last = stage if apart else stages[-1]
            where = f"stage {stage}" if last == stage else f"one of its stages {stage} to {last}"
            where += f" ({operator_range(plan.stages[stage].operators[0], plan.stages[last].operators[-1])})"
            return f"processor {processor!r} {error.reason} in {where}"
    return error.what


# Graphics adapters lower their clocks when idle, so a plan is measured once its adapter is at full clock. An NVIDIA
# H200 that was idle for about a second is three times slower (ResNet50 11.0 ms instead of 3.4). It needs 0.25 to 0.5 s
# of load to reach its full clock, more under a light load; compiling a stage, which can take seconds, is no load.
IDLE_S = 0.1
"""An adapter that was idle for so long has lowered its clock: an H100 that worked 70 % of the time ran at 1,400 to
1,600 MHz instead of 1,980."""
STEADY_S = 0.4
"""An adapter is at full clock once it has not become faster for so long."""
MOST_S = 3.0
_WINDOW_S = 0.05
_FASTER = 0.97  # a smaller difference is noise

_busy_until_s: dict[str, float] = {}


def throttled_adapters(processors: Iterable[Processor]) -> tuple[str, ...]:
    """Return the adapters of some processors that lower their clocks; software adapters compute on the CPU."""
    gpus = (p for p in processors if p.kind == "gpu" and not p.options.get("software"))
    return tuple(dict.fromkeys(str(p.options["adapter"]) for p in gpus))


def wake(adapters: Iterable[str], run: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> int:
    """Run until all of some adapters are at full clock; return the number of runs, 0 if all were busy.

    Args:
        run: runs once and returns the latency (s).
    """
    begin = clock()
    if all(begin - _busy_until_s.get(name, -IDLE_S) < IDLE_S for name in adapters):
        return 0
    count, best_s, best_at = 0, float("inf"), begin
    now = begin
    while now - best_at < STEADY_S and now - begin < MOST_S:
        window: list[float] = []
        until = now + _WINDOW_S
        while not window or now < until:
            window.append(run())
            now = clock()
        count += len(window)
        median_s = statistics.median(window)
        if median_s < _FASTER * best_s:
            best_s, best_at = median_s, now
    return count


def were_busy(adapters: Iterable[str], clock: Callable[[], float] = time.perf_counter) -> None:
    """Record that some adapters have just finished work."""
    now = clock()
    _busy_until_s.update(dict.fromkeys(adapters, now))
