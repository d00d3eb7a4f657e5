"""What a lane does for a workload: takes jobs from the desk until the run is over.

A process may be several lanes at once, each a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evaluators.litert.board import Board
from evaluators.litert.device import Device
from evaluators.litert.edges import tell
from evaluators.litert.mapping import Mapping as Memory
from evaluators.litert.stretches import Step

Calls = Mapping[tuple[int, int], Mapping[int, Callable[[], int]]]
"""Lane and seat → what runs those of the seat's jobs that may run there, and returns a status; 0 is good."""


def job_call(step: Step, device: Device | None) -> Callable[[], int]:
    """Return what runs a stage on its lane; on an accelerator it ends when all outputs are in shared memory."""
    run = step.call()
    if device is None:
        return run
    device.idle_wait_ns()  # which makes what is waited for

    def call() -> int:
        for copy in step.uploads:
            device.upload(copy)
        status = run()
        if not status:
            device.wait()
            for copy in step.downloads:
                device.download(copy)
        return status

    return call


def take_jobs(head: dict[str, Any], fds: Sequence[int], memory: Memory, calls: Calls) -> dict[str, Any]:
    """Work for a desk on the lanes ``head["lanes"]``, and return which seats failed, with the runtime's status.

    Args:
        fds: the desk's numbers, and its bells.
    """
    sizes = head["store_nbytes"], head["bells_nbytes"]
    places = [memory.map(fd, nbytes, write=True) for fd, nbytes in zip(fds, sizes, strict=True)]
    board = Board(head["board"], *places)
    failed: list[tuple[int, int]] = []
    try:
        first, *others = head["lanes"]
        threads = [threading.Thread(target=_work, args=(board, lane, calls, failed)) for lane in others]
        for thread in threads:
            thread.start()
        _work(board, first, calls, failed)
        for thread in threads:
            thread.join()
    finally:
        for place, nbytes in zip(places, sizes, strict=True):
            memory.unmap(place, nbytes)
    return {"failed": [list(each) for each in failed]}


def _work(board: Board, lane: int, calls: Calls, failed: list[tuple[int, int]]) -> None:
    clock, desk, bell = time.perf_counter_ns, board.desk, board.bell(lane)
    tell(board.ready.address)
    while True:
        bell.wait()
        while (number := desk.on(lane)) >= 0:
            seat, job = desk.whose(number)
            call = calls[lane, seat][job]
            desk.mark(number, clock())
            status = call()
            now_ns = clock()
            with board.held(lane):
                if status:
                    failed.append((seat, status))
                    desk.fail(seat)
                desk.finish(lane, now_ns)
                woken = board.step(now_ns)
            board.ring(other for other in woken if other != lane)
        if desk.over:
            return
