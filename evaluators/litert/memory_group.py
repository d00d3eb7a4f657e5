"""A control group that holds the memory of worker processes, as on a device that has less of it than this machine."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from evaluators.machine import MEMBERSHIP, MOUNT, counted, own_groups
from search_spaces.core.errors import UnavailableError
from search_spaces.core.wording import human_bytes

_NAMES = {1: ("memory.limit_in_bytes", "memory.oom_control"), 2: ("memory.max", "memory.events")}
_SWAP = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}
_PREFIX = "partition-optimizer-"
_END_LIMIT_S = 5.0
_HINT = "that needs root, or leave out memory= of the processors"
_number = count()


class MemoryLimitError(UnavailableError):
    """Memory of processes cannot be limited here."""


class MemoryGroup:
    """A control group of processes that together have at most so much memory, page cache included.

    Of what does not fit, the kernel drops pages that files hold, which are read again when they are needed; if that
    does not suffice, it ends a process. Memory that a process had before it joined does not count.

    Raises:
        MemoryLimitError: this process may not make control groups.
    """

    def __init__(self, nbytes: int, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> None:
        own = list(own_groups("memory", mount, membership))
        if not own:
            raise MemoryLimitError(
                "this system has no control groups for memory", "leave out memory= of the processors"
            )
        # Of version 2, a group that has processes has no limited groups below it, except for the root.
        place, version = own[min(1, len(own) - 1) if own[0][1] == 2 else 0]
        limit, self._events = _NAMES[version]
        self._path = place / f"{_PREFIX}{os.getpid()}-{next(_number)}"
        while self._path.exists():  # of a program that was killed, whose number this one has now
            self._path = place / f"{_PREFIX}{os.getpid()}-{next(_number)}"
        try:
            _forget_dead(place)
            if version == 2:
                with suppress(OSError):  # most systems have done so
                    (place / "cgroup.subtree_control").write_text("+memory")
            self._path.mkdir()
            (self._path / limit).write_text(str(nbytes))
        except OSError as error:
            with suppress(OSError):
                self._path.rmdir()
            raise MemoryLimitError(
                f"a control group with {human_bytes(nbytes)} of memory cannot be made: {error.strerror}",
                _HINT,
            ) from error
        name, value = _SWAP[version]
        with suppress(OSError):  # without swap there is no such file
            (self._path / name).write_text(value)

    def add(self, process: int) -> None:
        """Move a process into the group; nothing happens where it has ended.

        Raises:
            UnavailableError: it cannot be moved.
        """
        try:
            (self._path / "cgroup.procs").write_text(str(process))
        except ProcessLookupError:
            pass
        except OSError as error:
            raise UnavailableError(f"a process cannot be moved to a control group: {error.strerror}", _HINT) from error

    @property
    def ended(self) -> int:
        """How many processes the kernel has ended because the memory did not suffice."""
        return counted(self._path / self._events, "oom_kill")

    def close(self) -> None:
        """Remove the group, once its processes have ended."""
        end_s = time.monotonic() + _END_LIMIT_S
        while self._path.is_dir() and time.monotonic() < end_s:
            try:
                self._path.rmdir()
            except OSError:  # a process that was killed is still ending
                time.sleep(0.01)


def _forget_dead(place: Path) -> None:
    """Remove groups whose programs were killed."""
    for path in place.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            with suppress(OSError):
                path.rmdir()


def own_copy(path: Path) -> IO[bytes]:
    """Return an open copy of a file that has no name, so that nobody else has pages of it in memory.

    Raises:
        UnavailableError: it cannot be written.
    """
    with ExitStack() as undo:
        try:
            copy = undo.enter_context(TemporaryFile(dir=path.parent))
            with path.open("rb") as file:
                shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
        except OSError as error:
            raise UnavailableError(f"{path}: cannot be copied for limited memory: {error.strerror}") from error
        undo.pop_all()
    return copy


def forget_pages(*paths: Path) -> None:
    """Have the kernel forget what it keeps of files, so that the memory of whoever reads them next holds them.

    Pages that a process has mapped stay.
    """
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
