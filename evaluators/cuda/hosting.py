"""The host's loop: the desk says which job goes to which stream, the streams say which job has ended (seed 001).

One thread does both. It starts a job by replaying its graph and looks at the events of the busy lanes in turns, so a
stream never waits for more than a few microseconds of Python; launching kernel by kernel from a thread for each model
loses to the interpreter's lock instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from evaluators.cuda.streams import Streams
from evaluators.workload.scheduler import NEVER_NS, Scheduler
from search_spaces.errors import UnavailableError

_NEAR_NS = 2_000_000
_NAP_S = 1e-3


def attend(
    desk: Scheduler,
    work: Sequence[Sequence[Any]],
    streams: Streams,
    limit_s: float,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Run what comes to a desk until all of it is done.

    Args:
        desk: whose run is not begun.
        work: of each seat, of each of its jobs: what streams start.
        limit_s: a job that takes longer has failed.

    Raises:
        UnavailableError: a job failed, or took too long.
    """
    lanes = sorted({lane for seat in desk.clients for lanes in seat.lanes for lane in lanes})
    busy: dict[int, int] = {}  # lane → when its job began
    limit_ns = int(limit_s * 1e9)
    desk.begin(clock())
    look = True
    while True:
        if look or desk.next_arrival_ns() <= clock():
            desk.arrive(clock())
            for number, lane in desk.start(clock()):
                seat, job = desk.whose(number)
                streams.start(lane, work[seat][job])
                busy[lane] = clock()
            if desk.over:
                return
        look = False
        for lane in lanes:
            if lane in busy and _ended(streams, lane):
                del busy[lane]
                desk.finish(lane, clock())
                look = True
                break  # what became ready is started before any other lane is looked at
        if look:
            continue
        now_ns = clock()
        for lane, began_ns in busy.items():
            if now_ns - began_ns > limit_ns:
                raise UnavailableError(f"a job on stream {lane} took longer than {limit_s:g} s")
        _pause(desk, streams, now_ns, waits=not busy)


def _ended(streams: Streams, lane: int) -> bool:
    try:
        return streams.finished(lane)
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(f"a job on stream {lane} failed: {lines[0]}") from error


def _pause(desk: Scheduler, streams: Streams, now_ns: int, *, waits: bool) -> None:
    if not waits:
        streams.idle()
        return
    next_ns = desk.next_arrival_ns()
    if next_ns == NEVER_NS:
        raise UnavailableError("the jobs of the workload wait for each other for ever")
    if next_ns - now_ns > _NEAR_NS:
        time.sleep(min((next_ns - now_ns - _NEAR_NS) * 1e-9, _NAP_S))
