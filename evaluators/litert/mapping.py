"""Files in the memory of a lane, at addresses that other libraries can be told."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import c_int, c_long, c_size_t, c_void_p

from search_spaces.errors import UnavailableError
from search_spaces.models.stages import in_pages

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux; Python names the first only from 3.13 on


class Mapping:
    """Maps and unmaps; addresses are plain numbers."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = c_void_p
        self._libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
        self._libc.munmap.argtypes = [c_void_p, c_size_t]

    def map(self, fd: int, nbytes: int, *, address: int | None = None, write: bool = False) -> int:
        """Return the address of a file in memory, or of new memory where ``fd`` is -1.

        Args:
            address: where to put it; what was mapped there is replaced.
            write: share what is written with others who map the file.

        Raises:
            UnavailableError: the system refuses.
        """
        flags = (mmap.MAP_SHARED if write else mmap.MAP_PRIVATE) | (_MAP_FIXED if address is not None else 0)
        if fd < 0:
            flags |= mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write or fd < 0 else 0)
        found = self._libc.mmap(address, nbytes, protection, flags, fd, 0)
        if found is None or found == c_void_p(-1).value:
            raise UnavailableError(f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        return int(found)

    def lay_out(self, header: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Map a header and files one behind the other, each from a page on; return address and size.

        The header's offsets lead into the files, so no weight is copied.

        Raises:
            UnavailableError: the system refuses.
        """
        sizes = [os.fstat(fd).st_size for fd in fds]
        total = len(header) + sum(in_pages(size) for size in sizes)
        base = self.map(-1, total)
        try:
            ctypes.memmove(base, header, len(header))
            place = base + len(header)
            for fd, size in zip(fds, sizes, strict=True):
                self.map(fd, size, address=place)
                place += in_pages(size)
        except UnavailableError:
            self.unmap(base, total)
            raise
        return base, total

    def unmap(self, address: int, nbytes: int) -> None:
        """Give memory back."""
        self._libc.munmap(address, nbytes)
