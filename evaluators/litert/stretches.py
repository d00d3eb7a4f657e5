"""The stages that a lane runs one behind the other, without a word to other lanes in between.

A stage leaves the caches full of its weights, so every line of ours that runs before the next one is slow: what can be
looked up is looked up beforehand, and times are written down when the stretch is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

from evaluators.litert.capi import Compiled
from evaluators.litert.device import Copy, Device
from evaluators.litert.edges import Edge, tell
from search_spaces.errors import UnavailableError

NO_LIMIT_NS = 1 << 62

Log = Any
"""A ctypes array of int64: first the last inference that is to run; then start and end of each stage (ns), 0 before."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stage on this lane: what it waits for, the call, and whom it tells."""

    stage: int
    compiled: Compiled
    signature: int
    inputs: Any  # a ctypes array of LiteRtTensorBuffer
    outputs: Any
    waits: tuple[Edge, ...]
    signals: tuple[c_void_p, ...]
    uploads: tuple[Copy, ...] = ()  # on an accelerator: what comes from, and goes to, the shared memory
    downloads: tuple[Copy, ...] = ()

    def call(self) -> Callable[[], int]:
        """Return what runs the stage and returns a status; 0 is good."""
        into, out = self.inputs, self.outputs
        return partial(self.compiled.run, self.compiled.handle, self.signature, len(into), into, len(out), out)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps between two meetings.

    Attributes:
        waits: what the first step waits for.
        run: given where the inference's times begin in the log, and how long (ns) the inference may take, runs the
            steps, and returns whether none has ended too late; after one that has, the others are left out.
        signals: whom the last step tells.
    """

    waits: tuple[Edge, ...]
    run: Callable[[int, int], bool]
    signals: tuple[c_void_p, ...]


def stretches(
    steps: Sequence[Step],
    prepare: Callable[[Sequence[Step]], Callable[[int, int], bool]],
    *,
    apart: bool,
) -> list[Stretch]:
    """Return a lane's steps as stretches.

    Args:
        prepare: returns what runs the steps of a stretch.
        apart: make each step a stretch, so that its times are there as soon as it is over.
    """
    found: list[list[Step]] = []
    for step in steps:
        if apart or not found or step.waits or found[-1][-1].signals:
            found.append([])
        found[-1].append(step)
    return [Stretch(part[0].waits, prepare(part), part[-1].signals) for part in found]


def by_parts(parts: Sequence[Stretch], log: Log, limit_ns: int) -> Callable[[int, int], None]:
    """Return what runs a lane's share of an inference, given its number and where its times begin in the log.

    An inference that goes over the limit ends there, on every lane: what is left is passed over, but told of.
    """

    def infer(inference: int, at: int) -> None:
        for part in parts:
            for edge in part.waits:
                edge.wait()
            if log[0] > inference and not part.run(at, limit_ns):
                log[0] = inference
            for told in part.signals:
                tell(told)

    return infer


def straight_on_cpu(steps: Sequence[Step], log: Log) -> Callable[[int, int], None]:
    """Return what runs a lane's share of an inference that has no limit, given its number and its place in the log.

    Between two calls there is next to nothing, not even where lanes meet: times are written down when the lane has to
    wait anyhow, and at the end.
    """
    clock = time.perf_counter_ns
    moves = [(step.waits, step.call(), step.signals) for step in steps]
    places = [2 * step.stage + side for step in steps for side in (0, 1)]

    def infer(_: int, at: int) -> None:
        times: list[int] = []
        written = 0
        stamp = times.append
        for waits, call, signals in moves:
            for edge in waits:
                if not edge.passed():
                    for place, found in zip(places[written:], times[written:], strict=False):
                        log[at + place] = found
                    written = len(times)
                    edge.wait()
            begin = clock()
            status = call()
            end = clock()
            if status:
                raise UnavailableError(f"the runtime failed in stage {steps[len(times) // 2].stage}: status {status}")
            for told in signals:
                tell(told)
            stamp(begin)
            stamp(end)
        for place, found in zip(places[written:], times[written:], strict=True):
            log[at + place] = found

    return infer


def on_cpu(steps: Sequence[Step], log: Log) -> Callable[[int, int], bool]:
    """Return what runs steps whose calls return when they are done; see :class:`Stretch`.

    From the word of another lane to the first call there is nothing but a look at the clock.
    """
    if len(steps) == 1:
        return _one_on_cpu(steps[0], log)
    clock = time.perf_counter_ns
    calls = [step.call() for step in steps]
    places = [2 * step.stage + side for step in steps for side in (0, 1)]

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
                failed = steps[len(times) // 2 - 1].stage
                raise UnavailableError(f"the runtime failed in stage {failed}: status {status}")
            deadline = deadline or (log[at] or times[0]) + limit_ns
            if end > deadline:
                break
            begin = clock()
        for place, found in zip(places, times, strict=False):
            log[at + place] = found
        return end <= deadline

    return run_all


def _one_on_cpu(step: Step, log: Log) -> Callable[[int, int], bool]:
    clock = time.perf_counter_ns
    call, place = step.call(), 2 * step.stage

    def run_one(at: int, limit_ns: int) -> bool:
        begin = clock()
        status = call()
        end = clock()
        if status:
            raise UnavailableError(f"the runtime failed in stage {step.stage}: status {status}")
        log[at + place], log[at + place + 1] = begin, end
        return end - (log[at] or begin) <= limit_ns

    return run_one


def on_device(
    steps: Sequence[Step],
    log: Log,
    device: Device,
    idle_wait_ns: int | None,
    copies: dict[int, tuple[int, int]],
) -> Callable[[int, int], bool]:
    """Return what runs steps on an accelerator; see :class:`Stretch`.

    Args:
        idle_wait_ns: what waiting for nothing takes, in a run in which each stage is waited for, else None.
        copies: takes, for each stage, how long (ns) it copied in and out the last time.
    """
    calls = [(2 * step.stage, _device_call(device, step, idle_wait_ns, copies)) for step in steps]

    def run_all(at: int, limit_ns: int) -> bool:
        for place, call in calls:
            begin, end = call()
            log[at + place] = begin
            log[at + place + 1] = end
            if log[at] and end - log[at] > limit_ns:
                return False
        return True

    return run_all


def _device_call(
    device: Device,
    step: Step,
    idle_wait_ns: int | None,
    copies: dict[int, tuple[int, int]],
) -> Callable[[], tuple[int, int]]:
    """Return the call of a stage on an accelerator; the clock stops when what others read is in shared memory."""
    clock = time.perf_counter_ns
    run = step.call()
    # Whoever is told that the stage is over, and reads nothing of it, needs what it used up (cores, say).
    must_wait = idle_wait_ns is not None or (bool(step.signals) and not step.downloads)

    def call() -> tuple[int, int]:
        begin = clock()
        for copy in step.uploads:
            device.upload(copy)
        copied_in = clock()
        status = run()
        if status:
            raise UnavailableError(f"the runtime failed in stage {step.stage}: status {status}")
        if must_wait:
            device.wait()
        ran = clock()
        for copy in step.downloads:
            device.download(copy)
        end = clock()
        copies[step.stage] = (copied_in - begin, end - ran)
        return begin, max(begin + 1, end - (idle_wait_ns or 0))

    return call
