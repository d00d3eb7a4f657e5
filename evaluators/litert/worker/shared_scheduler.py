"""The job scheduler of a workload in memory that worker processes share.

The processor that ends a job schedules the next ones itself, under a lock, so that no other process has to be woken
between two jobs. Each processor has a semaphore on which it sleeps while it has nothing to do.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from dataclasses import asdict
from typing import Any

from evaluators.litert.worker.shared_memory import SLOT_NBYTES, Semaphore, Semaphores, SharedMemory, post, try_wait
from evaluators.workload.scheduler import QueueClient, Scheduler
from search_spaces.core.plan import Dispatch

_LOCK, _READY, _WAKE_UPS = 0, 1, 2
_LOCK_SPIN_NS, _WAKE_UP_SPIN_NS = 50_000, 20_000
_NOBODY = 0
_NUMBER_NBYTES = 8


class SchedulerState:
    """A scheduler in shared memory, as one process sees it.

    Args:
        head: returned by :func:`scheduler_head`.
        numbers, semaphores: addresses of the two memories.

    Attributes:
        ready: the semaphore to which each processor posts once it waits for jobs.
    """

    def __init__(self, head: dict[str, Any], numbers: int, semaphores: int) -> None:
        clients = [QueueClient.from_json(entry) for entry in head["clients"]]
        self._numbers = (ctypes.c_int64 * (head["size"] + 1)).from_address(numbers)
        self.scheduler = Scheduler(clients, head["excluded"], head["dispatch"], self._numbers)
        self._holder = head["size"]
        self._processors = range(len(head["excluded"]))
        self._semaphores = semaphores
        self._lock, self.ready = self._place(_LOCK), self._place(_READY)

    def _place(self, slot: int) -> c_void_p:
        return c_void_p(self._semaphores + slot * SLOT_NBYTES)

    def wake_up(self, processor: int) -> Semaphore:
        """Return the semaphore that a processor waits on."""
        return Semaphore(self._place(_WAKE_UPS + processor), _WAKE_UP_SPIN_NS)

    def wake(self, processors: Iterable[int]) -> None:
        """Wake processors."""
        for processor in processors:
            post(self._place(_WAKE_UPS + processor))

    @contextmanager
    def held(self, processor: int = -1) -> Iterator[None]:
        """Hold the lock, under the processor's number, so that it can be released if the processor dies."""
        Semaphore(self._lock, _LOCK_SPIN_NS).wait()
        self._numbers[self._holder] = processor + 2
        try:
            yield
        finally:
            self._numbers[self._holder] = _NOBODY
            post(self._lock)

    def release(self, processor: int) -> None:
        """Release the lock for a processor whose process died, if it held the lock."""
        if self._numbers[self._holder] == processor + 2:
            self._numbers[self._holder] = _NOBODY
            post(self._lock)

    def one_more_is_ready(self) -> bool:
        """Return whether another processor has begun to wait for jobs."""
        return not try_wait(self.ready)

    def step(self, now_ns: int) -> Sequence[int]:
        """Admit and start jobs; the lock must be held. Return the processors to wake: all at the end of the run."""
        self.scheduler.arrive(now_ns)
        started = [processor for _, processor in self.scheduler.start(now_ns)]
        return self._processors if self.scheduler.over else started


def scheduler_head(clients: Sequence[QueueClient], excluded: Sequence[int], dispatch: Dispatch) -> dict[str, Any]:
    """Return the description of a scheduler that workers receive, as plain values."""
    size = Scheduler(clients, excluded, dispatch).size
    return {"clients": [asdict(s) for s in clients], "excluded": list(excluded), "dispatch": dispatch, "size": size}


class SharedScheduler(SchedulerState):
    """The parent's view of a scheduler, which owns the shared memories; close it.

    Raises:
        UnavailableError: the system refuses memory.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        numbers = SharedMemory("scheduler", (head["size"] + 1) * _NUMBER_NBYTES)
        semaphores = Semaphores(_WAKE_UPS + len(head["excluded"]))
        self.memories = numbers, semaphores
        super().__init__(head, numbers.address, semaphores.address)
        self.scheduler.begin(time.perf_counter_ns())
        post(self._lock)  # a new semaphore has no token: the lock is taken

    def close(self) -> None:
        """Close the memories; workers keep theirs mapped as long as they need."""
        for memory in self.memories:
            memory.close()
