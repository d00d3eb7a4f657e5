"""The desk of a workload in memory that lanes share: whoever ends a job goes through the queue himself, under a lock.

So no process in the middle has to be woken between two jobs. Each lane has a bell, a semaphore on which it sleeps while
it has nothing to do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from dataclasses import asdict
from typing import Any, Self

from evaluators.litert.edges import SLOT_NBYTES, Edge, memory_of_edges, tell
from evaluators.workload.desk import Desk, Seat
from evaluators.workload.setting import Setting
from search_spaces.errors import UnavailableError
from search_spaces.plan import Dispatch

_LOCK, _READY, _BELLS = 0, 1, 2
_LOCK_SPIN_NS, _BELL_SPIN_NS = 50_000, 20_000
_NOBODY = 0
_NUMBER_NBYTES = 8

_taken = ctypes.PyDLL(None).sem_trywait
_taken.argtypes = [c_void_p]


class Board:
    """A desk in shared memory, as one process sees it.

    Args:
        told: what :func:`board_head` returned.
        store, bells: addresses of the two memories.
    """

    def __init__(self, told: dict[str, Any], store: int, bells: int) -> None:
        seats = [_seat(entry) for entry in told["seats"]]
        self._numbers = (ctypes.c_int64 * (told["size"] + 1)).from_address(store)
        self.desk = Desk(seats, told["excluded"], told["dispatch"], self._numbers)
        self._holder = told["size"]
        self._lanes = len(told["excluded"])
        self._bells = bells

    def _place(self, slot: int) -> c_void_p:
        return c_void_p(self._bells + slot * SLOT_NBYTES)

    def bell(self, lane: int) -> Edge:
        """Return what a lane waits on."""
        return Edge(self._place(_BELLS + lane), _BELL_SPIN_NS)

    def ring(self, lanes: Iterable[int]) -> None:
        """Wake lanes."""
        for lane in lanes:
            tell(self._place(_BELLS + lane))

    @property
    def ready(self) -> Edge:
        """What each lane tells once it listens."""
        return Edge(self._place(_READY), 0)

    @contextmanager
    def held(self, lane: int = -1) -> Iterator[None]:
        """Hold the lock; lanes tell who they are, so that one that dies with it does not keep it."""
        Edge(self._place(_LOCK), _LOCK_SPIN_NS).wait()
        self._numbers[self._holder] = lane + 2
        try:
            yield
        finally:
            self._numbers[self._holder] = _NOBODY
            tell(self._place(_LOCK))

    def release(self, lane: int) -> None:
        """Give the lock back for a lane that died, if it held it."""
        if self._numbers[self._holder] == lane + 2:
            self._numbers[self._holder] = _NOBODY
            tell(self._place(_LOCK))

    def listens(self) -> bool:
        """Return whether one more lane has told that it listens."""
        return not _taken(self._place(_READY))

    def open(self) -> None:
        """Let the lock be taken; it is closed in new memory."""
        tell(self._place(_LOCK))

    def step(self, now_ns: int) -> Sequence[int]:
        """Go through the queue; the lock must be held. Return the lanes to be woken: all where everything is over."""
        self.desk.arrive(now_ns)
        started = [lane for _, lane in self.desk.start(now_ns)]
        return range(self._lanes) if self.desk.over else started


def board_head(found: Setting, dispatch: Dispatch) -> dict[str, Any]:
    """Return what lanes are told of a desk, as plain values."""
    size = Desk(found.seats, found.excluded, dispatch).size
    seats = [asdict(seat) for seat in found.seats]
    return {"seats": seats, "excluded": list(found.excluded), "dispatch": dispatch, "size": size}


def _seat(entry: dict[str, Any]) -> Seat:
    lanes = tuple(tuple(lanes) for lanes in entry["lanes"])
    return Seat(**{**entry, "lanes": lanes, "releases_ns": tuple(entry["releases_ns"]), "after": tuple(entry["after"])})


class SharedBoard:
    """The memories of a board, and the parent's view; used in a ``with``.

    Raises:
        UnavailableError: the system refuses memory.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.head = told
        self.lanes = len(told["excluded"])
        nbytes = (told["size"] + 1) * _NUMBER_NBYTES
        self.store_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bells_fd, self.bells_nbytes = memory_of_edges(_BELLS + self.lanes)
        self.store_fd = os.memfd_create("desk", os.MFD_CLOEXEC)
        self._maps: list[mmap.mmap] = []
        try:
            os.ftruncate(self.store_fd, self.store_nbytes)
            self._maps = [mmap.mmap(self.store_fd, self.store_nbytes), mmap.mmap(self.bells_fd, self.bells_nbytes)]
        except (OSError, ValueError) as error:
            self.close()
            raise UnavailableError(f"cannot get {self.store_nbytes} bytes of shared memory: {error}") from error
        store, bells = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps)
        self.board = Board(told, store, bells)
        self.board.desk.begin(time.perf_counter_ns())
        self.board.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; lanes that still have it mapped keep it as long as they do."""
        for memory in self._maps:
            memory.close()
        self._maps.clear()
        os.close(self.store_fd)
        os.close(self.bells_fd)
