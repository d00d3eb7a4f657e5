"""The trial log: checked records, each on the disk when ``append`` returns, that survive damage to the file.

A damaged log is reported and kept as ``<log>.damaged-<n>``; the whole records continue in a new file. The format of a
line is :mod:`optimizer.study.records`'.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Self

from optimizer.files import disk_errors, write_all, write_atomic
from optimizer.study.records import Damage, LogContents, Record, Scan, decode, encode, header, scan
from search_spaces.core.errors import OptimizeError, RunFolderError
from search_spaces.models.files import sync_folder

__all__ = ["Damage", "LogContents", "Record", "TrialLog", "read_log"]


_DEVICE = "device"  # kind of the record of the machine


class TrialLog:
    """An open log; its lock keeps other processes out until it is closed or its process dies. Not thread-safe."""

    def __init__(self, path: Path, descriptor: int, nbytes: int, following: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = nbytes, following  # one value, so that an interrupt finds both old or both new
        self._unsettled = False
        self.empty = following <= 1
        """Whether it holds no record but that of the device: nothing would have to be measured again."""
        _open_logs.add(self)

    @classmethod
    def open(cls, path: Path) -> tuple[TrialLog, LogContents]:
        """Open or create the log at ``path``, repair it if it is damaged, and return it with its contents.

        Raises:
            RunFolderError: it cannot be read or written, another process has it open, or a newer version wrote it.
        """
        with disk_errors(path):
            descriptor = _open_locked(path)
            try:
                found = scan(path)
                contents = found.contents
                if not found.clean:
                    contents = _mend(path, found)
                    fresh = _open_locked(path)
                    os.close(descriptor)
                    descriptor = fresh
                nbytes = os.fstat(descriptor).st_size
            except BaseException:
                os.close(descriptor)
                raise
        last = contents.records[-1].n if contents.records else 0
        return cls(path, descriptor, nbytes, last + 1), contents

    def append(self, kind: str, data: Mapping[str, Any]) -> Record:
        """Add a record and return it as a reader of the log gets it; when this returns, it is on the disk.

        Raises:
            RunFolderError: it could not be written (the log is as before), or the file was changed by someone else.
            OptimizeError: ``data`` holds what JSON cannot represent (NaN, an object of a class, …), or is too large.
        """
        if self._descriptor < 0:
            raise OptimizeError(f"{self.path}: the log is closed")
        nbytes, n = self._end
        line = encode(n, kind, data)
        record = decode(line[:-1])
        if isinstance(record, str):
            raise OptimizeError(f"{self.path}: record {n} would not be readable: {record}")
        with disk_errors(self.path, f"all {n - 1} records before are safe; make room if need be, and start again"):
            self._settle()
            self._unsettled = True
            try:
                write_all(self._descriptor, line)
                os.fsync(self._descriptor)
            except BaseException:
                # The first error matters; the next append or open cuts the torn record off.
                with contextlib.suppress(OSError, RunFolderError):
                    self._settle()
                raise
            self._end = nbytes + len(line), n + 1
            self._unsettled = False
            self.empty = self.empty and kind == _DEVICE
        return record

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Cut off what an interrupted append left behind."""
        status = os.fstat(self._descriptor)
        nbytes, _ = self._end
        if self._unsettled and status.st_size > nbytes:
            os.ftruncate(self._descriptor, nbytes)
            os.fsync(self._descriptor)
        elif status.st_size != nbytes or status.st_nlink == 0:
            raise RunFolderError(f"{self.path}: the file was changed or removed while it was in use", "start again")
        self._unsettled = False


_open_logs: weakref.WeakSet[TrialLog] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked worker that outlives a killed parent would keep the lock, and nobody could resume.
    for log in list(_open_logs):
        with contextlib.suppress(OSError):
            log.close()


os.register_at_fork(after_in_child=_close_in_child)


def read_log(path: Path) -> LogContents:
    """Read a log without locking or repairing it; its last record may be incomplete.

    Raises:
        RunFolderError: it cannot be read, or a newer version wrote it.
    """
    with disk_errors(path):
        return scan(path).contents


def _mend(path: Path, found: Scan) -> LogContents:
    """Keep a damaged log under another name, then replace it by its whole records; safe if killed in between."""
    original = _keep(path) if found.contents.damage else None
    write_atomic(path, header() + b"".join(line + b"\n" for line in found.lines))
    return LogContents(found.contents.records, found.contents.damage, original)


def _keep(path: Path) -> Path:
    for i in count(1):
        other = path.with_name(f"{path.name}.damaged-{i}")
        try:
            other.hardlink_to(path)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if other.exists():
                continue
            shutil.copyfile(path, other)
        break
    return other


def _open_locked(path: Path) -> int:
    """Return a locked descriptor of the file at ``path``, created if necessary."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                sync_folder(path.parent)
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            who = f"process {holder}" if holder else "another process"
            raise RunFolderError(f"{path}: in use by {who}", "wait for it, or give another --study") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the log was repaired between open and lock: take the new file


def _holder(descriptor: int) -> int | None:
    """Return the process that has the lock, where Linux reports it."""
    status = os.fstat(descriptor)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == name and int(fields[4]) > 0:
                return int(fields[4])
    return None
