"""Memory and semaphores that the parent and its worker processes share.

A semaphore counts the finished stages that one worker has announced to another. Posting, and taking a token that is
there, take no system call unless a process sleeps; one file holds all semaphores of a plan, however many there are.
POSIX semaphores also order memory between the processes, on every architecture.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int, c_long, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from search_spaces.core.errors import UnavailableError
from search_spaces.models.files import in_pages

SLOT_NBYTES = 64  # a cache line each; sem_t has 32 bytes at most in glibc and musl
_FEW = range(8)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python names the first only from 3.13 on


class _Until(ctypes.Structure):
    # struct timespec: a point in time of the system's clock.
    _fields_ = (("seconds", c_long), ("ns", c_long))


def _function(library: ctypes.CDLL, name: str, *types: type, result: Any = c_int) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes, function.restype = types, result
    found: Callable[..., Any] = function
    return found


# Calls that return at once keep the GIL (PyDLL): releasing and taking it again would take longer.
_QUICK, _SLOW = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
_init = _function(_QUICK, "sem_init", c_void_p, c_int, c_uint)
_sleep = _function(_SLOW, "sem_wait", c_void_p)
_sleep_until = _function(_SLOW, "sem_timedwait", c_void_p, ctypes.POINTER(_Until))
_mmap = _function(_SLOW, "mmap", c_void_p, c_size_t, c_int, c_int, c_int, c_long, result=c_void_p)
_munmap = _function(_SLOW, "munmap", c_void_p, c_size_t)
try_wait = _function(_QUICK, "sem_trywait", c_void_p)
"""Takes a token of the semaphore at an address; returns 0 if there was one."""
post = _function(_QUICK, "sem_post", c_void_p)
"""Adds a token to the semaphore at an address."""


def _wait_for(address: c_void_p, limit_s: float) -> bool:
    """Sleep until there is a token, at most ``limit_s``; return whether one was taken."""
    until_s, part = divmod(time.time() + limit_s, 1.0)
    return not _sleep_until(address, _Until(int(until_s), int(part * 1e9)))


@dataclass(slots=True)
class Semaphore:
    """A semaphore that this process waits on.

    A process that sleeps is woken late, by tens of microseconds; one that polls occupies a core. Inferences of a plan
    are alike: a wait that last exceeded ``spin_ns`` sleeps for most of that time and polls for the rest.

    Attributes:
        address: in this process.
        spin_ns: how long to poll before going to sleep.
        regular: whether waits take about as long every time.
        usual_ns: how long the last wait took, where that was long; only for regular ones.
    """

    address: c_void_p
    spin_ns: int
    regular: bool = False
    usual_ns: int = 0

    def passed(self) -> bool:
        """Take a token if there is one, and return whether there was; do not wait."""
        return not try_wait(self.address)

    def wait(self) -> None:
        """Wait for a token and take it."""
        address = self.address
        if not try_wait(address):
            return
        clock = time.perf_counter_ns
        begin = clock()
        deadline = begin + self.spin_ns
        if self.usual_ns > self.spin_ns:
            nap_ns = self.usual_ns - self.spin_ns // 2
            if _wait_for(address, nap_ns * 1e-9):
                self.usual_ns = clock() - begin
                return
            deadline += nap_ns
        while clock() < deadline:
            for _ in _FEW:  # reading the clock takes as long as trying the semaphore
                if not try_wait(address):
                    if self.usual_ns:
                        self.usual_ns = clock() - begin
                    return
        while _sleep(address):  # interrupted by a signal
            pass
        if self.regular:
            self.usual_ns = clock() - begin


class SharedMemory:
    """A file in memory, mapped here as ``map``; other processes receive ``fd`` and map it, too.

    Args:
        nbytes: least size; rounded up to whole pages.

    Raises:
        UnavailableError: there is not enough memory.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.map = mmap.mmap(self.fd, self.nbytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise UnavailableError(f"cannot get {self.nbytes} bytes of shared memory: {error}") from error

    @property
    def address(self) -> int:
        """Address of the mapping, for as long as this object lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def close(self) -> None:
        """Close the file; the memory is freed once no process has it mapped."""
        os.close(self.fd)


class Semaphores(SharedMemory):
    """Memory with ``count`` semaphores, ``SLOT_NBYTES`` apart, each with 0 tokens."""

    def __init__(self, count: int) -> None:
        super().__init__("semaphores", count * SLOT_NBYTES)
        self.reset([0] * count)

    def place(self, index: int) -> c_void_p:
        """Return the address of a semaphore."""
        return c_void_p(self.address + index * SLOT_NBYTES)

    def reset(self, tokens: Sequence[int]) -> None:
        """Set every semaphore to a number of tokens; no process may be waiting.

        Raises:
            UnavailableError: the system has no semaphores for several processes.
        """
        if any(_init(self.place(index), 1, count) for index, count in enumerate(tokens)):
            raise UnavailableError("the system refuses semaphores that processes share")

    def post(self, index: int) -> None:
        """Add a token."""
        post(self.place(index))

    def wait(self, index: int, limit_s: float) -> bool:
        """Take a token; return False where there was none within ``limit_s``."""
        place = self.place(index)
        return not try_wait(place) or _wait_for(place, limit_s)


def map_file(fd: int, nbytes: int, *, address: int | None = None, write: bool = False) -> int:
    """Map a file, or new memory where ``fd`` is -1; return the address.

    Args:
        address: where to map it; an existing mapping there is replaced.
        write: allow writes, shared with other processes that map the file.

    Raises:
        UnavailableError: the system refuses.
    """
    flags = (mmap.MAP_SHARED if write else mmap.MAP_PRIVATE) | (_MAP_FIXED if address is not None else 0)
    if fd < 0:
        flags |= mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write or fd < 0 else 0)
    found = _mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == c_void_p(-1).value:
        raise UnavailableError(f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)


def map_joined(header: bytes, fds: Sequence[int]) -> tuple[int, int]:
    """Map a header and files one behind the other, each from a page boundary on; return address and size.

    The header's offsets point into the files, so no weight is copied.

    Raises:
        UnavailableError: the system refuses.
    """
    sizes = [os.fstat(fd).st_size for fd in fds]
    total = len(header) + sum(in_pages(size) for size in sizes)
    base = map_file(-1, total)
    try:
        ctypes.memmove(base, header, len(header))
        place = base + len(header)
        for fd, size in zip(fds, sizes, strict=True):
            map_file(fd, size, address=place)
            place += in_pages(size)
    except UnavailableError:
        unmap(base, total)
        raise
    return base, total


def unmap(address: int, nbytes: int) -> None:
    """Unmap what :func:`map_file` or :func:`map_joined` mapped."""
    _munmap(address, nbytes)
