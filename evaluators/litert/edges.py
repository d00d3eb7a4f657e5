"""Where lanes meet: semaphores in memory that their processes share.

A semaphore counts the finished stages that one lane has told another of. Telling, and seeing that one was told, take no
system call unless somebody sleeps, and one file holds all edges of a plan, however many there are. POSIX semaphores
also order memory between the processes, on every architecture.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int, c_uint, c_void_p
from dataclasses import dataclass

from search_spaces.errors import UnavailableError

_FEW = range(8)
SLOT_NBYTES = 64  # a cache line each; sem_t has 32 bytes at most in glibc and musl


def _function(library: ctypes.CDLL, name: str, *types: type) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes = types
    function.restype = c_int
    found: Callable[..., int] = function
    return found


class _Until(ctypes.Structure):
    # struct timespec: a time of the system's clock.
    _fields_ = (("seconds", ctypes.c_long), ("ns", ctypes.c_long))


# What returns at once keeps the interpreter's lock: giving it up and taking it again would take longer.
_QUICK, _SLOW = ctypes.PyDLL(None), ctypes.CDLL(None)
_init = _function(_QUICK, "sem_init", c_void_p, c_int, c_uint)
_try = _function(_QUICK, "sem_trywait", c_void_p)
_sleep = _function(_SLOW, "sem_wait", c_void_p)
_sleep_until = _function(_SLOW, "sem_timedwait", c_void_p, ctypes.POINTER(_Until))
tell = _function(_QUICK, "sem_post", c_void_p)
"""Tells the lane that waits on an edge, given as ``Edge.address``, that a stage is over."""


@dataclass(slots=True)
class Edge:
    """One direction of a meeting between two lanes.

    Who sleeps is woken late, by tens of microseconds; who polls wears out a core. Inferences of a plan are alike: a
    wait that was longer than ``spin_ns`` the last time is slept through but for its end.

    Attributes:
        address: of the semaphore in this process.
        spin_ns: how long to poll before going to sleep.
        regular: whether waits take about as long every time.
        usual_ns: what the last wait took, where that was long; only known of regular ones.
    """

    address: c_void_p
    spin_ns: int
    regular: bool = False
    usual_ns: int = 0

    def passed(self) -> bool:
        """Return whether the other lane has told of its stage, and if so take note; do not wait."""
        return not _try(self.address)

    def wait(self) -> None:
        """Wait until the other lane has told of its stage."""
        address = self.address
        if not _try(address):
            return
        clock = time.perf_counter_ns
        begin = clock()
        deadline = begin + self.spin_ns
        if self.usual_ns > self.spin_ns:
            nap_ns = self.usual_ns - self.spin_ns // 2
            if not _nap(address, nap_ns):
                self.usual_ns = clock() - begin
                return
            deadline += nap_ns
        while clock() < deadline:
            for _ in _FEW:  # a look at the clock takes as long as one at the edge
                if not _try(address):
                    if self.usual_ns:
                        self.usual_ns = clock() - begin
                    return
        while _sleep(address):  # a signal came
            pass
        if self.regular:
            self.usual_ns = clock() - begin


def _nap(address: c_void_p, nap_ns: int) -> int:
    """Sleep for a while, or until the edge is told; return 0 if it was."""
    until_s, part = divmod(time.time() + nap_ns * 1e-9, 1.0)
    return _sleep_until(address, _Until(int(until_s), int(part * 1e9)))


class Meetings:
    """The parent's own view of a memory of edges: it takes part in them, and sets them back.

    Args:
        fd, nbytes: as :func:`memory_of_edges` returned them; the descriptor is kept.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._memory = mmap.mmap(fd, nbytes)
        self._first = ctypes.c_char.from_buffer(self._memory)

    def _place(self, edge: int) -> c_void_p:
        return c_void_p(ctypes.addressof(self._first) + edge * SLOT_NBYTES)

    def reset(self, tokens: Sequence[int]) -> None:
        """Set every edge to a number of tokens; nobody may be waiting."""
        for edge, count in enumerate(tokens):
            _init(self._place(edge), 1, count)

    def tell(self, edge: int) -> None:
        """Add a token."""
        tell(self._place(edge))

    def wait(self, edge: int, limit_s: float) -> bool:
        """Take a token; return False where none came in the time."""
        place = self._place(edge)
        if not _try(place):
            return True
        until_s, part = divmod(time.time() + limit_s, 1.0)
        return not _sleep_until(place, _Until(int(until_s), int(part * 1e9)))

    def close(self) -> None:
        """Give the memory back."""
        del self._first  # else the memory could not be unmapped
        self._memory.close()
        os.close(self.fd)


def memory_of_edges(count: int) -> tuple[int, int]:
    """Return a new file in memory (a descriptor) with ``count`` semaphores at 0, ``SLOT_NBYTES`` apart, and its size.

    Raises:
        UnavailableError: the system refuses.
    """
    nbytes = max(1, -(-count * SLOT_NBYTES // mmap.PAGESIZE)) * mmap.PAGESIZE
    fd = os.memfd_create("edges", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            first = ctypes.c_char.from_buffer(memory)
            refused = sum(_init(ctypes.addressof(first) + i * SLOT_NBYTES, 1, 0) != 0 for i in range(count))
            del first  # else the memory could not be unmapped
    except (OSError, ValueError) as error:
        os.close(fd)
        raise UnavailableError(f"cannot get {nbytes} bytes of shared memory: {error}") from error
    if refused:
        os.close(fd)
        raise UnavailableError("the system refuses semaphores that processes share")
    return fd, nbytes
