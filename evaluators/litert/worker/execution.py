"""Execution of a worker's share of a plan, with as little code as possible between two stages.

A stage fills the caches with its weights, so every line of Python before the next stage is slow: lookups are done
beforehand, and times are written to the log after an uninterrupted run of stages. For a stream of inferences a worker
goes through rounds, as :mod:`evaluators.schedule` describes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

from evaluators.litert.worker.capi import Compiled, Copy, Device
from evaluators.litert.worker.shared_memory import Semaphore, post
from search_spaces.core.errors import UnavailableError

NO_LIMIT_NS = 1 << 62

Log = Any
"""A ctypes array of int64: first the last inference to run; then start and end of each stage (ns), 0 before."""
Run = Callable[[int, int], bool]
"""Runs steps, given where the inference's times begin in the log, and its time limit (ns); returns whether all steps
ended in time. After one that did not, the others are skipped."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage on this worker: the semaphores that it waits for, the call, and the semaphores that it posts to."""

    stage: int
    compiled: Compiled
    signature: int
    inputs: Any  # a ctypes array of LiteRtTensorBuffer
    outputs: Any
    waits: tuple[Semaphore, ...]
    signals: tuple[c_void_p, ...]
    uploads: tuple[Copy, ...] = ()  # on an accelerator: copies from, and to, the shared memory
    downloads: tuple[Copy, ...] = ()

    def call(self) -> Callable[[], int]:
        """Return a function that runs the stage and returns a status; 0 means success."""
        into, out = self.inputs, self.outputs
        return partial(self.compiled.run, self.compiled.handle, self.signature, len(into), into, len(out), out)

    def failure(self, status: int) -> UnavailableError:
        """Return the error of a call that returned a status other than 0."""
        return UnavailableError(f"the runtime failed in stage {self.stage}: status {status}")


@dataclass(frozen=True, slots=True)
class UninterruptedRun:
    """Steps that follow each other without a wait or a post in between: the first may wait, the last may post."""

    waits: tuple[Semaphore, ...]
    run: Run
    signals: tuple[c_void_p, ...]


def uninterrupted_runs(
    steps: Sequence[Step], prepare: Callable[[Sequence[Step]], Run], *, apart: bool
) -> list[UninterruptedRun]:
    """Return a worker's steps as uninterrupted runs.

    Args:
        prepare: returns the function that runs the steps of one.
        apart: make each step a run of its own, so that its times are logged at its end.
    """
    found: list[list[Step]] = []
    for step in steps:
        if apart or not found or step.waits or found[-1][-1].signals:
            found.append([])
        found[-1].append(step)
    return [UninterruptedRun(part[0].waits, prepare(part), part[-1].signals) for part in found]


def with_limit(parts: Sequence[UninterruptedRun], log: Log, limit_ns: int) -> Callable[[int, int], None]:
    """Return a function that runs a worker's share of an inference, given its number and where its times begin.

    An inference that exceeds the limit ends there, on every worker: the remaining stages are skipped, but still post.
    """

    def infer(inference: int, at: int) -> None:
        for part in parts:
            for wait in part.waits:
                wait.wait()
            if log[0] > inference and not part.run(at, limit_ns):
                log[0] = inference
            for signal in part.signals:
                post(signal)

    return infer


def without_limit(steps: Sequence[Step], log: Log) -> Callable[[int, int], None]:
    """Return a function that runs a CPU's share of an inference, given its number and where its times begin.

    It does as little as possible between two calls, even where workers wait for each other: times are written to the
    log when this worker has to wait anyway, and at the end.
    """
    clock = time.perf_counter_ns
    moves = [(step.waits, step.call(), step.signals) for step in steps]
    places = [2 * step.stage + side for step in steps for side in (0, 1)]

    def infer(_: int, at: int) -> None:
        times: list[int] = []
        written = 0
        stamp = times.append
        for waits, call, signals in moves:
            for wait in waits:
                if not wait.passed():
                    for place, found in zip(places[written:], times[written:], strict=False):
                        log[at + place] = found
                    written = len(times)
                    wait.wait()
            begin = clock()
            status = call()
            end = clock()
            if status:
                raise steps[len(times) // 2].failure(status)
            for signal in signals:
                post(signal)
            stamp(begin)
            stamp(end)
        for place, found in zip(places[written:], times[written:], strict=True):
            log[at + place] = found

    return infer


def on_cpu(steps: Sequence[Step], log: Log) -> Run:
    """Return a function that runs steps whose calls return when the work is done.

    Between another worker's post and the first call it only reads the clock.
    """
    clock = time.perf_counter_ns
    calls = [step.call() for step in steps]
    places = [2 * step.stage + side for step in steps for side in (0, 1)]
    (first_call, *_), (place, *_) = calls, places

    def run_one(at: int, limit_ns: int) -> bool:
        begin = clock()
        status = first_call()
        end = clock()
        if status:
            raise steps[0].failure(status)
        log[at + place], log[at + place + 1] = begin, end
        return end - (log[at] or begin) <= limit_ns

    def run_all(at: int, limit_ns: int) -> bool:
        begin = clock()
        times: list[int] = []
        stamp = times.append
        deadline = 0
        for call in calls:
            stamp(begin)
            status = call()
            end = clock()
            stamp(end)
            if status:
                raise steps[len(times) // 2 - 1].failure(status)
            deadline = deadline or (log[at] or times[0]) + limit_ns
            if end > deadline:
                break
            begin = clock()
        for at_place, found in zip(places, times, strict=False):
            log[at + at_place] = found
        return end <= deadline

    return run_one if len(steps) == 1 else run_all


def on_device(
    steps: Sequence[Step], log: Log, device: Device, idle_wait_ns: int | None, terms: dict[int, Sequence[int]]
) -> Run:
    """Return a function that runs steps on an accelerator.

    Args:
        idle_wait_ns: how long waiting takes when nothing is queued, for a run that waits for each stage; else None.
        terms: receives, for each stage of such a run, its terms (ns), in the order of
            :data:`evaluators.schedule.TERMS`.
    """
    calls = [
        (
            2 * step.stage,
            _device_call(device, step) if idle_wait_ns is None else _timed(device, step, idle_wait_ns, terms),
        )
        for step in steps
    ]

    def run_all(at: int, limit_ns: int) -> bool:
        for place, call in calls:
            log[at + place], log[at + place + 1] = call()
            if log[at] and log[at + place + 1] - log[at] > limit_ns:
                return False
        return True

    return run_all


def _device_call(device: Device, step: Step) -> Callable[[], tuple[int, int]]:
    """Return the call of a stage on an accelerator; its time ends when the downloads are in shared memory."""
    clock = time.perf_counter_ns
    run = step.call()
    # A stage that waits for this one without reading from it needs its resources (cores, say), so this one must end.
    must_wait = bool(step.signals) and not step.downloads

    def call() -> tuple[int, int]:
        begin = clock()
        device.upload(*step.uploads)
        status = run()
        if status:
            raise step.failure(status)
        if must_wait:
            device.wait()
        device.download(*step.downloads)
        return begin, max(begin + 1, clock())

    return call


def _timed(
    device: Device, step: Step, idle_wait_ns: int, terms: dict[int, Sequence[int]]
) -> Callable[[], tuple[int, int]]:
    """Return a call that waits for the end of the stage, and records its terms."""
    clock = time.perf_counter_ns
    run = step.call()

    def call() -> tuple[int, int]:
        begin = clock()
        into = device.upload(*step.uploads)
        copied = clock()
        status = run()
        if status:
            raise step.failure(status)
        queued = clock()
        device.wait()
        ran = clock()
        out = device.download(*step.downloads)
        terms[step.stage] = (*into, queued - copied, ran - queued, idle_wait_ns, *out)
        return begin, max(begin + 1, clock() - idle_wait_ns)

    return call


def job_call(step: Step, device: Device | None) -> Callable[[], int]:
    """Return a function that runs a stage; it returns the status once all outputs are in shared memory."""
    run = step.call()
    if device is None:
        return run
    device.idle_wait_ns()  # makes the fence

    def call() -> int:
        device.upload(*step.uploads)
        status = run()
        if not status:
            device.wait()
            device.download(*step.downloads)
        return status

    return call


@dataclass(frozen=True, slots=True)
class StreamStep:
    """A stage in a round of a stream.

    Attributes:
        lag: rounds by which the stage is behind the first.
        frames: for each frame of memory the function that runs the stage there.
    """

    lag: int
    waits: tuple[Semaphore, ...]
    frames: tuple[Run, ...]
    signals: tuple[c_void_p, ...]


def run_rounds(steps: Sequence[StreamStep], log: Log, stages: int, kept: int, depth: int) -> None:
    """Run rounds until the stream is over.

    Every stage waits, runs the inference that is due, and posts, in every round, whether an inference is due or not;
    so waits and posts stay in step at the beginning and at the end of a stream.

    Args:
        log: its first entry is the number of inferences; it may be lowered, or set, while the rounds run.
        kept: number of inferences for which the log has room; later ones overwrite the first.
        depth: rounds from the first stage of an inference to its last.
    """
    number = 0
    while True:
        for step in steps:
            for wait in step.waits:
                wait.wait()
            inference = number - step.lag
            if 0 <= inference < log[0]:
                at = 1 + 2 * stages * (inference % kept)
                step.frames[inference % len(step.frames)](at, NO_LIMIT_NS)
            for signal in step.signals:
                post(signal)
        number += 1
        if number >= log[0] + depth:
            return


@contextmanager
def pinned_pool(cores: Sequence[int], threads: int) -> Iterator[None]:
    """Pin this thread, and those that start meanwhile, to one of the cores each; the caller computes on the first.

    A pool of as many threads as there are cores needs all of them at once, yet the system may put two of its threads on
    one core and leave them there for seconds, during which the worker is half as fast. The more pools a process has
    (one for each compiled model), the sooner this happens: threads of a pool that has just worked poll for a while, and
    the system avoids their cores for the next pool's threads. With fewer threads than cores nothing is pinned, so that
    the system may choose among the cores.
    """
    if threads < 2 or threads != len(cores):
        yield
        return
    os.sched_setaffinity(0, {cores[0]})
    before = _threads()
    yield
    for index, thread in enumerate(sorted(_threads() - before)):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, {cores[1 + index % (threads - 1)]})


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}  # noqa: PTH208 - only names are needed
