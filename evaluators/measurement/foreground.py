"""Priority of the measuring processes over others, as far as the system permits, and turns between studies.

A compiler on one of two cores takes half of that core, and an inference of 4 ms on both takes 6. So the processes that
measure get priority while they do (nice -20, also as a group, since Linux may share cores between groups by session).
That needs the right to raise priorities, which root has; without it, and in a study that was itself started with
``nice``, priorities stay as they are, and counters show which runs waited. Meanwhile all other processes on these cores
are starved, this one included. So the first run of a plan, and models whose requests this process sends, have the usual
priority.

Two studies of one user on the same cores or GPU measure in turns.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FIRST = -20
_LOOK_S = 0.0002
_PATIENCE_S, _IMPATIENT_S = 10.0, 60.0  # a study that is stopped in its turn keeps its locks
_SYS_ADMIN, _SYS_NICE = 21, 23  # linux/capability.h


def may_run_first() -> bool:
    """Return whether this process may raise priorities, and was not itself started with a low one."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        granted = int(status.partition("CapEff:")[2].split()[0], 16)
        switch = Path("/proc/sys/kernel/sched_autogroup_enabled")  # not in every kernel
        grouped = switch.exists() and switch.read_text(encoding="ascii").strip() != "0"
    except (OSError, ValueError, IndexError):
        return False
    # Without CAP_SYS_ADMIN, the priority of a group may change ten times a second, which is too rarely.
    needed = 1 << _SYS_NICE | (1 << _SYS_ADMIN if grouped else 0)
    return os.getpriority(os.PRIO_PROCESS, 0) == 0 and granted & needed == needed


class Foreground:
    """Runs processes before others while they measure, in turns with other studies.

    Args:
        leaders: returns the session leaders of the processes that measure.
        folder: of the lock files that studies on this machine share; by default a folder of this user in the system's
            folder for temporary files.

    Attributes:
        preferred: whether processes run before others while they measure.
        queued_s: how long this study has waited for others.
    """

    def __init__(self, leaders: Callable[[], Iterable[int]], folder: Path | None = None) -> None:
        self._leaders, self._folder = leaders, folder
        self.preferred = may_run_first()
        self._files: dict[str, int | None] = {}
        self._one_thread = threading.RLock()
        self._measures = self._closed = False
        self._waits_from_s = 0.0
        self.queued_s = 0.0

    @contextmanager
    def holding(self, resources: Iterable[str], *, first: bool = True) -> Iterator[None]:
        """Hold the locks of some cores and GPUs, by name, while the block measures.

        Args:
            first: whether to raise priorities; False where this process must not be starved.
        """
        with self._one_thread, ExitStack() as undo:
            if not self._measures:  # else an outer block holds them already
                undo.callback(setattr, self, "_measures", False)
                self._measures = True
                files = (file for name in sorted(set(resources)) if (file := self._file(name)) is not None)
                self._wait(files, undo)
                if first and self.preferred:
                    undo.callback(self._prefer, 0)
                    self._prefer(FIRST)
            yield

    def close(self) -> None:
        """Close the lock files."""
        self._closed = True
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()

    def _prefer(self, value: int) -> None:
        """Set the priority of all threads of the sessions."""
        for leader in self._leaders():
            with suppress(OSError):  # the process has ended
                os.setpriority(os.PRIO_PGRP, leader, value)
            with suppress(OSError):  # the kernel has no autogroups
                Path(f"/proc/{leader}/autogroup").write_text(str(value), encoding="ascii")

    def _wait(self, files: Iterable[int], undo: ExitStack) -> None:
        """Lock files one after another, in one order for all studies, until a lock is held by another for too long.

        After that this study does not wait for a while, and takes only free locks.
        """
        begin_s = time.monotonic()
        patience_s = _PATIENCE_S if begin_s >= self._waits_from_s else 0.0
        try:
            for file in files:
                while (locked := _locked(file)) is False:
                    if time.monotonic() - begin_s >= patience_s:
                        if patience_s:
                            self._waits_from_s = time.monotonic() + _IMPATIENT_S
                        break
                    time.sleep(_LOOK_S)
                if locked:
                    undo.callback(fcntl.flock, file, fcntl.LOCK_UN)
        finally:
            self.queued_s += time.monotonic() - begin_s

    def _file(self, name: str) -> int | None:
        """Return the open lock file of a core or GPU; None where it cannot be opened."""
        if name not in self._files and not self._closed:
            self._files[name] = None
            with suppress(OSError):
                folder = self._folder or Path(tempfile.gettempdir()) / f"measuring-{os.getuid()}"
                folder.mkdir(mode=0o700, exist_ok=True)
                found = folder.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    path = folder / hashlib.sha256(name.encode()).hexdigest()[:16]
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                    self._files[name] = os.open(path, flags, 0o600)
        return self._files.get(name)


def _locked(file: int) -> bool | None:
    """Lock a file; False where another study has it, None where it cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
