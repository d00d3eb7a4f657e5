"""The cores belong to what is measured, as far as the system permits: priority over others, turns between studies.

A compiler on one of two cores takes half of that core, and an inference of 4 ms on both takes 6. The processes that
measure therefore run before others while they do (nice -20, alone and as a group, which is what Linux shares cores
between where it groups by session). That needs the right to raise priorities, as root has it; without it, and in a
study that was itself started with ``nice``, all stays as it is, and counters show which runs waited. What everything
else on these cores gets meanwhile is little and late, this process included: a plan that has never run, and models
whose requests this process lets in, have the usual priority.

Two studies of one person that use the same cores or adapter measure in turns.
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
_PATIENCE_S, _IMPATIENT_S = 10.0, 60.0  # a study that was stopped in its turn gives nothing back
_SYS_ADMIN, _SYS_NICE = 21, 23  # linux/capability.h


def may_run_first() -> bool:
    """Return whether this process may raise priorities, and was not itself started with a low one."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        granted = int(status.partition("CapEff:")[2].split()[0], 16)
        switch = Path("/proc/sys/kernel/sched_autogroup_enabled")  # which not every kernel has
        grouped = switch.exists() and switch.read_text(encoding="ascii").strip() != "0"
    except (OSError, ValueError, IndexError):
        return False
    # Who is no administrator may change the priority of a group ten times a second, which is too seldom.
    needed = 1 << _SYS_NICE | (1 << _SYS_ADMIN if grouped else 0)
    return os.getpriority(os.PRIO_PROCESS, 0) == 0 and granted & needed == needed


class Foreground:
    """Runs processes before others while they measure, in turns with other studies.

    Args:
        leaders: returns the processes that lead the sessions of those that measure.
        folder: where studies on this machine find each other; by default one of this user's in the system's folder for
            temporary files.

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
        """Measure on some cores and adapters, by their names, once no other study does.

        Args:
            first: run before other processes; False where this one must not be late meanwhile.
        """
        with self._one_thread, ExitStack() as undo:
            if not self._measures:  # else what is measured holds them already
                undo.callback(setattr, self, "_measures", False)
                self._measures = True
                files = (file for name in sorted(set(resources)) if (file := self._file(name)) is not None)
                self._wait(files, undo)
                if first and self.preferred:
                    undo.callback(self._prefer, 0)
                    self._prefer(FIRST)
            yield

    def close(self) -> None:
        """Close the files by which studies find each other."""
        self._closed = True
        for file in self._files.values():
            if file is not None:
                os.close(file)
        self._files.clear()

    def _prefer(self, value: int) -> None:
        """Set the priority of all threads of the sessions."""
        for leader in self._leaders():
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PGRP, leader, value)
            with suppress(OSError):  # the kernel does not group
                Path(f"/proc/{leader}/autogroup").write_text(str(value), encoding="ascii")

    def _wait(self, files: Iterable[int], undo: ExitStack) -> None:
        """Lock files one after the other, in the order that all studies keep; what another keeps for too long is left.

        After that a study does not wait for a while, but takes what is free.
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
        """Return the open file of a core or an adapter; None where there can be none."""
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
