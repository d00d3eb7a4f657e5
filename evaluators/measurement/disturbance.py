"""Disturbances of runs: kernel counters of how long the measuring threads waited for a core.

A run is judged by these counters alone, never by how long it took: rejecting slow runs would make every plan look
faster than it is, and unsteady plans more so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evaluators.machine import major_faults, throttled_s
from search_spaces.core.wording import percent, seconds

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_PER_CORE = ("cpuacct/cpuacct.usage_percpu", "cpu,cpuacct/cpuacct.usage_percpu")  # control groups, version 1
_TOTALS = ("cpu.stat", "unified/cpu.stat")
_WHOLE = 0.05  # relative difference up to which a group counts as the whole machine
_STEAL = 7  # column of a cpu line in /proc/stat
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_SLOW_S = 1e-4  # /proc/stat of many cores takes longer to read, and is then read rarely
_RARELY_S = 0.25

QUIET, CALM = 0.01, 0.03
"""Runs that were without a core for a larger share of their time are repeated: above the first share, or the second for
runs of :data:`LONG_S` or more. System daemons take 2 to 4 ms of a core now and then: in runs of 135 ms, that is within
their usual differences, but with the first limit every second one would be repeated."""
LONG_S = 0.1

_REPEATS = 3
_PAYS = 0.2  # of the last repeats, at least this share must have found a quiet moment
_LOOK_AGAIN = 10  # else every tenth disturbed run is repeated, to see whether the machine is quiet again
_MEMORY = 0.9  # weight of the past in the running share of useful repeats

Result = TypeVar("Result")

TASKS = "other processes held the cores"
STEAL = "the host took the cores"
QUOTA = "the CPU quota of the container was used up"
QUEUE = "another study measured on these cores"


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters; only differences are meaningful.

    Attributes:
        at_s: when they were read (monotonic).
        waited_ns: thread → nanoseconds in which it was ready and had no core (``schedstat``).
        ran_ns: thread → nanoseconds on a core; all threads of this process count as one.
        busy_ns: nanoseconds in which the cores ran anything; None where the kernel does not report it.
        switches: thread → number of involuntary context switches.
        stolen_s: seconds that the hypervisor took from the cores (steal time), summed over them.
        throttled_s: seconds in which the control group had used up its quota.
        queued_s: seconds that measurements waited for those of other studies.
        page_faults: pages for which the processes waited until they were read from the disk.
        resident_nbytes: what they hold in memory now, pages of files included; this alone does not add up.
    """

    at_s: float
    waited_ns: Mapping[int, int] = field(default_factory=dict)
    ran_ns: Mapping[int, int] = field(default_factory=dict)
    busy_ns: int | None = None
    switches: Mapping[int, int] = field(default_factory=dict)
    stolen_s: float = 0.0
    throttled_s: float = 0.0
    queued_s: float = 0.0
    page_faults: int = 0
    resident_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What kept the measuring threads off their cores during a period.

    Attributes:
        lasted_s: length of the period.
        waited_s: seconds lost to other processes, summed over threads.
        switches: number of involuntary context switches.
        stolen_s: seconds lost to the hypervisor.
        throttled_s: seconds lost to the quota of a control group.
        queued_s: seconds spent waiting for another study's measurements, before its own began.
        page_faults: pages that were read from the disk, since they did not stay in memory; the plan's own doing.
    """

    lasted_s: float = 0.0
    waited_s: float = 0.0
    switches: int = 0
    stolen_s: float = 0.0
    throttled_s: float = 0.0
    queued_s: float = 0.0
    page_faults: int = 0

    @property
    def lost_s(self) -> float:
        """Seconds in which measuring threads were ready but had no core, for any reason."""
        return self.waited_s + self.stolen_s + self.throttled_s

    def __add__(self, other: Disturbance) -> Disturbance:
        """Return the disturbance of both periods together."""
        return Disturbance(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def to_json(self) -> dict[str, float]:
        """Return plain values; zeros are left out."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: round(value, 6) for name, value in found.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> Disturbance:
        """Build it from what :meth:`to_json` returned; unknown fields are ignored."""
        return cls(**{name: type(getattr(cls(), name))(data[name]) for name in cls.__slots__ if name in data})


NOTHING = Disturbance()


def between(before: Counters, after: Counters) -> Disturbance:
    """Return the disturbance between two readings; threads that ended meanwhile are left out.

    The processes of one plan also wait for each other, which is not a disturbance. They have waited for others at most
    as long as others ran.
    """
    waited = sum(value - before.waited_ns.get(thread, 0) for thread, value in after.waited_ns.items())
    if before.busy_ns is not None and after.busy_ns is not None:
        ran = sum(value - before.ran_ns.get(thread, 0) for thread, value in after.ran_ns.items())
        waited = min(waited, after.busy_ns - before.busy_ns - ran)
    switches = sum(value - before.switches.get(thread, 0) for thread, value in after.switches.items())
    return Disturbance(
        after.at_s - before.at_s,
        max(0, waited) * 1e-9,
        max(0, switches),
        max(0.0, after.stolen_s - before.stolen_s),
        max(0.0, after.throttled_s - before.throttled_s),
        max(0.0, after.queued_s - before.queued_s),
        max(0, after.page_faults - before.page_faults),
    )


class TaskCounters:
    """Reads :class:`Counters` of some processes; a reading takes about 0.1 ms.

    Args:
        cores: those that measurements run on.
        processes: returns the processes that measure.
        proc, groups: folders of the kernel's files.
        queued_s: returns how long measurements have waited for those of other studies.
    """

    def __init__(
        self,
        cores: Iterable[int],
        processes: Callable[[], Iterable[int]],
        proc: Path = _PROC,
        queued_s: Callable[[], float] = float,
        groups: Path = _GROUPS,
    ) -> None:
        numbers = sorted(set(cores))
        self._cores = {f"cpu{core}" for core in numbers}
        self._processes = processes
        self._proc, self._queued_s = proc, queued_s
        self._busy = _busy(numbers, proc, groups)
        self._stolen = (0.0, -1.0)  # seconds, and when to read it again

    @property
    def works(self) -> bool:
        """Whether the kernel counts how long threads wait."""
        return (self._proc / "self" / "schedstat").exists()

    def read(self) -> Counters:
        """Return the counters now; what the kernel does not report stays 0."""
        waited: dict[int, int] = {}
        ran = {os.getpid(): time.process_time_ns()}  # of all threads of this process, which takes part
        switches: dict[int, int] = {}
        faults = resident_nbytes = 0
        for process in self._processes():
            faults += major_faults(process, self._proc)
            resident_nbytes += _field(_bytes(f"{self._proc}/{process}/statm"), 1) * _PAGE_NBYTES
            folder = f"{self._proc}/{process}/task"
            for thread in _listed(folder):
                fields = _bytes(f"{folder}/{thread}/schedstat").split()
                if len(fields) >= 2:
                    ran[int(thread)], waited[int(thread)] = int(fields[0]), int(fields[1])
                    switches[int(thread)] = _involuntary(_bytes(f"{folder}/{thread}/status"))
        now = time.monotonic()
        lost = self._steal(now), throttled_s(), self._queued_s()
        return Counters(now, waited, ran, self._busy(), switches, *lost, faults, resident_nbytes)

    def _steal(self, now: float) -> float:
        value, next_s = self._stolen
        if now < next_s:
            return value
        found = 0
        for line in _bytes(f"{self._proc}/stat").decode("ascii", "replace").splitlines():
            name, *numbers = line.split()
            if name in self._cores and len(numbers) > _STEAL:
                found += int(numbers[_STEAL])
            elif not name.startswith("cpu"):
                break
        took_s = time.monotonic() - now
        self._stolen = found / _TICKS, now + (_RARELY_S if took_s > _SLOW_S else 0.0)
        return self._stolen[0]


class RunFilter:
    """Makes runs, and repeats those that waited for a core as long as repeats find quiet moments.

    Args:
        counters: reads the kernel's counters of the threads that measure; None where there are none.

    Attributes:
        total: disturbance during all runs.
        repeated: number of repeated runs.
        quiet: whether the last result need not be repeated.
        resident_nbytes: what the processes held in memory after the last result.
    """

    def __init__(self, counters: Callable[[], Counters] | None = None) -> None:
        self._counters = counters
        self.total = Disturbance()
        self.repeated = 0
        self.quiet = True
        self.resident_nbytes = 0
        self._useful = 1.0  # moving average: share of repeats that found a quiet moment
        self._skipped = 0

    def memory(self, page_faults: float, resident_nbytes: int) -> dict[str, float]:
        """Return, as conditions of samples, how a plan's runs used memory; nothing without counters.

        Args:
            page_faults: how often a run waited for the disk, in the mean, since a page did not stay in memory.
            resident_nbytes: what its processes held.
        """
        if self._counters is None:
            return {}
        return {"page_faults": round(page_faults, 2), "resident_nbytes": resident_nbytes}

    def run(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Return the least disturbed result of a few tries, and the share of its time without a core."""
        best, lost = self.once(work)
        quiet = self.quiet
        for _ in range(_REPEATS):
            if quiet or not self._worth_it():
                break
            again, share = self.once(work)
            self.repeated += 1
            self._useful = _MEMORY * self._useful + (1.0 - _MEMORY) * self.quiet
            if share < lost:
                best, lost, quiet = again, share, self.quiet
        self.quiet = quiet
        return best, lost

    def _worth_it(self) -> bool:
        if self._useful >= _PAYS:
            return True
        self._skipped += 1
        return self._skipped % _LOOK_AGAIN == 0

    def once(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Return a result and the share of its time without a core; nothing is repeated."""
        if self._counters is None:
            return work(), 0.0
        before = self._counters()
        result = work()
        after = self._counters()
        happened, self.resident_nbytes = between(before, after), after.resident_nbytes
        self.total += happened
        ran_s = happened.lasted_s - happened.queued_s
        share = happened.lost_s / ran_s if ran_s > 0.0 else 0.0
        self.quiet = share <= (CALM if ran_s >= LONG_S else QUIET)
        return result, share


def in_words(found: Disturbance, rejected: int, cores: int) -> list[str]:
    """Return what disturbed a period, in sentences; causes below 1 % are left out.

    Args:
        rejected: number of runs that were repeated for it.
        cores: number of cores that the measurements use.
    """
    if found.lasted_s <= 0.0:
        return []
    lines = []
    each = max(1, cores)
    lost = ((found.waited_s, TASKS, each), (found.stolen_s, STEAL, each), (found.throttled_s, QUOTA, each))
    for lost_s, cause, count in (*lost, (found.queued_s, QUEUE, 1)):
        share = lost_s / (found.lasted_s * count)
        if share >= 0.01:
            lines.append(f"{cause} for {percent(share)} of {seconds(found.lasted_s)}")
    if rejected and lines:
        lines[-1] += f"; {rejected} disturbed {'run was' if rejected == 1 else 'runs were'} repeated"
    return lines


def _busy(cores: Sequence[int], proc: Path, groups: Path) -> Callable[[], int | None]:
    """Return the function that reads how long some cores, or else all, were busy (ns); it returns None if unknown.

    The counters of control groups are exact, but within a container they may cover its own group only. So one is used
    only if it agrees with ``/proc/stat`` for the whole machine, whose ticks are too coarse for one run.
    """
    ticks = [
        sum(map(int, numbers[:3]))  # user, nice, system
        for name, *numbers in (line.split() for line in _bytes(f"{proc}/stat").decode("ascii", "replace").splitlines())
        if name == "cpu" and all(map(str.isdigit, numbers))
    ]
    whole_ns = 1e9 * sum(ticks) / _TICKS

    def of(path: str, read: Callable[[bytes], list[int]], wanted: Sequence[int] | None) -> Callable[[], int | None]:
        def total() -> int | None:
            found = read(_bytes(path))
            try:
                return sum(found) if wanted is None else sum(found[core] for core in wanted)
            except IndexError:
                return None

        return total

    def one_each(data: bytes) -> list[int]:
        return [int(word) for word in data.split() if word.isdigit()]

    def usage(data: bytes) -> list[int]:
        _, _, rest = data.partition(b"usage_usec ")
        return [1000 * int(word) for word in rest.split()[:1] if word.isdigit()]

    for names, read, wanted in ((_PER_CORE, one_each, cores), (_TOTALS, usage, None)):
        for name in names:
            path = f"{groups}/{name}"
            seen_ns = sum(read(_bytes(path)))
            if whole_ns and abs(seen_ns / whole_ns - 1.0) <= _WHOLE:
                return of(path, read, wanted)
    return lambda: None


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - called between runs
    except OSError:
        return []


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - called between runs
            return file.read(65536) or b""
    except OSError:
        return b""


def _involuntary(status: bytes) -> int:
    _, _, rest = status.rpartition(b"nonvoluntary_ctxt_switches:")
    return int(rest) if rest.strip().isdigit() else 0


def _field(line: bytes, index: int) -> int:
    fields = line.split()
    return int(fields[index]) if len(fields) > index else 0
