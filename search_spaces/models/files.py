"""Atomic writing of files, and digests of their content."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from search_spaces.core.errors import OptimizeError, UsageError, reason_of

_HINTS = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENOENT: "make the folder first",
}


def in_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block ends without an exception.

    The bytes are on disk before the file has its name; after a failure neither ``path`` nor the folder has changed.

    Raises:
        UsageError: ``path`` is no file, the folder cannot be written, or the disk is full.
    """
    if not path.name or (path.exists() and not path.is_file() and not path.is_dir()):
        raise UsageError(f"{path}: cannot be written: is not a regular file", "give the path of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise UsageError(f"{path}: cannot be written: {reason_of(error)}", hint) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def locked(path: Path, otherwise: OptimizeError) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing; the system releases it when the process ends.

    Raises:
        OptimizeError: ``otherwise``, where another process holds it.
        OSError: the file cannot be made.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise otherwise from None
        yield


def sync_folder(folder: Path) -> None:
    """Flush a renamed entry to disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_Stamp = tuple[int, int, int, int, int]

_SETTLED_NS = 100_000_000  # well above the resolution of file times, within which a change is not seen
_known: dict[str, tuple[_Stamp, str]] = {}


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file (about 0.4 s for 553 MB).

    A file is not read again unless its inode, size or times have changed: a study needs the digests of its model, its
    packed weights and its stage files several times.

    Raises:
        OSError: the file cannot be read.
    """
    key = os.path.realpath(path)
    with path.open("rb", buffering=0) as file:
        stamp = _stamp(file.fileno())
        if key in _known and _known[key][0] == stamp:
            return _known[key][1]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _stamp(file.fileno()) == stamp and time.time_ns() - max(stamp[3:]) > _SETTLED_NS:
            _known[key] = (stamp, digest)
    return digest


def _stamp(file: int) -> _Stamp:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
