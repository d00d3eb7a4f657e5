"""State of the measuring machine (load, clocks, temperature), and limits of this process by Linux control groups.

Both versions of control groups are read. A group's limit holds for all groups below it, so every group from this
process's own up to the root counts. Inside a container the path that the kernel reports may be absent; then the root of
the mount is its group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.core.wording import percent

_CPU = Path("/sys/devices/system/cpu")
_THERMAL = Path("/sys/class/thermal")
_HWMON = Path("/sys/class/hwmon")
# Columns of a cpu line in /proc/stat.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_TICKS = os.sysconf("SC_CLK_TCK")
_RARELY = 500.0
BUSY, STOLEN, HOT_C = 0.05, 0.01, 85.0
"""Above these shares of the cores' time, and from this temperature on, measurements are disturbed."""

EVERY_S = 1.0
"""Conditions are read at most this often; the kernel counts time in hundredths of a second."""
_FIRST_S = 0.3  # until the first value of ``load``


@dataclass(frozen=True, slots=True)
class MachineState:
    """What the kernel reports; None where it does not.

    Attributes:
        governors: of the cores that this process may use, each once.
        clocks_hz: of these cores, now.
        highest_hz: the highest clock that a core can have.
        temperature_c: of the hottest sensor.
        busy: share of the time of these cores that others used, over a short while.
        steal: share of their time that the hypervisor took.
        memory_free_nbytes: memory available without swapping.
    """

    governors: tuple[str, ...]
    clocks_hz: tuple[float, ...]
    highest_hz: float | None
    temperature_c: float | None
    busy: float | None
    steal: float | None
    memory_free_nbytes: int | None


def machine_state(cores: Iterable[int], watch_s: float = 0.5) -> MachineState:
    """Return the state of the machine; takes ``watch_s`` to measure the load.

    Args:
        cores: those that measurements run on.
    """
    mine = list(cores)
    before = _times(mine)
    time.sleep(watch_s)
    busy, steal = _shares(before, _times(mine))
    highest = [f for core in mine if (f := _number(_CPU / f"cpu{core}/cpufreq/cpuinfo_max_freq")) is not None]
    governors = (kernel_text(_CPU / f"cpu{core}/cpufreq/scaling_governor") for core in mine)
    return MachineState(
        governors=tuple(sorted({g for g in governors if g})),
        clocks_hz=_clocks(mine),
        highest_hz=max(highest) * 1e3 if highest else None,
        temperature_c=_temperature(),
        busy=busy,
        steal=steal,
        memory_free_nbytes=available_nbytes(),
    )


def cpu_model() -> str | None:
    """Return the name of this machine's CPU; None where the kernel gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    # Arm's kernel gives no "model name"; its part number is the next best.
    for wanted in ("model name", "Model", "CPU part"):
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    return None


class Conditions:
    """Conditions of measurements, cheap enough to be read after each.

    The kernel is read at most every :data:`EVERY_S` seconds and for at most 1/500 of the time (a reading takes 0.1 ms
    on two cores, 1 ms on many); in between, the last values are returned.

    Args:
        cores: those that measurements run on.
        processes: returns the processes that measure, besides this one; their use of the cores is not counted as load.
        facts: constant values, returned every time.
    """

    def __init__(
        self, cores: Iterable[int], processes: Callable[[], Iterable[int]], facts: Mapping[str, Any] | None = None
    ) -> None:
        self._cores = sorted(cores)
        self._processes = processes
        self._facts = dict(facts or {})
        self._next_s = 0.0
        self._before: tuple[list[int] | None, dict[int, float], float] = (None, {}, 0.0)
        self._found: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Return plain values; what the kernel does not report is left out.

        ``governor`` (of the first core), ``clock_hz`` (of the slowest), ``temperature_c`` (of the hottest sensor),
        ``memory_free_nbytes`` (available without swapping), and since the last reading: ``load``, the share of the
        cores' time that others used, and ``steal``, the share that the hypervisor took.
        """
        begin_s = time.monotonic()
        if begin_s >= self._next_s:
            self._found = {name: value for name, value in self._ask(begin_s).items() if value is not None}
            cost_s = time.monotonic() - begin_s
            every_s = EVERY_S if "load" in self._found else _FIRST_S
            self._next_s = begin_s + max(every_s, _RARELY * cost_s)
        return {**self._facts, **self._found}

    def _ask(self, now_s: float) -> dict[str, Any]:
        times, mine = _times(self._cores), _cpu_seconds([os.getpid(), *self._processes()])
        old_times, old_mine, then_s = self._before
        self._before = times, mine, now_s
        load = None
        busy, steal = _shares(old_times, times)
        if busy is not None:
            ours_s = sum(used - old_mine.get(process, 0.0) for process, used in mine.items())
            load = max(0.0, busy - ours_s / ((now_s - then_s) * len(self._cores)))
        clocks = _clocks(self._cores)
        return {
            **gpu_state(),
            "governor": kernel_text(_CPU / f"cpu{self._cores[0]}/cpufreq/scaling_governor") or None,
            "clock_hz": min(clocks) if clocks else None,
            "temperature_c": _temperature(),
            "load": None if load is None else round(load, 3),
            "steal": None if steal is None else round(steal, 4),
            "memory_free_nbytes": available_nbytes(),
        }


def gpu_state() -> dict[str, Any]:
    """Return clocks and throttle reasons of NVIDIA GPUs: ``gpu_clock_hz`` (of the slowest), ``gpu_throttled``.

    Empty without a GPU, its driver, or the package ``nvidia-ml-py``.
    """
    library = _nvml()
    if library is None:
        return {}
    clocks, reasons = [], set()
    with suppress(library.NVMLError):
        for index in range(library.nvmlDeviceGetCount()):
            device = library.nvmlDeviceGetHandleByIndex(index)
            clocks.append(library.nvmlDeviceGetClockInfo(device, library.NVML_CLOCK_SM) * 1e6)
            mask = library.nvmlDeviceGetCurrentClocksThrottleReasons(device)
            reasons |= {name for name, bit in _throttles(library) if mask & bit}
    if not clocks:
        return {}
    return {"gpu_clock_hz": min(clocks), "gpu_throttled": sorted(reasons) or None}


@cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, no GPU, or a driver of another version
        return None
    return pynvml


def _throttles(library: Any) -> list[tuple[str, int]]:
    """Return reasons for throttling with their NVML bits; idling and clocks set by applications are left out."""
    names = {
        "power": "nvmlClocksThrottleReasonSwPowerCap",
        "hardware": "nvmlClocksThrottleReasonHwSlowdown",
        "heat": "nvmlClocksThrottleReasonSwThermalSlowdown",
        "heat (hardware)": "nvmlClocksThrottleReasonHwThermalSlowdown",
        "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    }
    return [(text, int(getattr(library, name))) for text, name in names.items() if hasattr(library, name)]


def problems(conditions: Mapping[str, Any]) -> list[str]:
    """Return problems with the conditions of a measurement, each to follow "while"."""
    found = []
    governor = conditions.get("governor")
    if isinstance(governor, str) and governor != "performance":
        found.append(f"the clock followed the load (governor {governor})")
    for name, limit, text in (
        ("load", BUSY, "other processes used {} of the cores"),
        ("steal", STOLEN, "the host took {} of the cores' time"),
    ):
        share = conditions.get(name)
        if isinstance(share, int | float) and share > limit:
            found.append(text.format(percent(share)))
    celsius = conditions.get("temperature_c")
    if isinstance(celsius, int | float) and celsius >= HOT_C:
        found.append(f"it was {celsius:.0f} °C hot")
    throttled = conditions.get("gpu_throttled")
    if isinstance(throttled, list) and throttled:
        found.append(f"the GPU was slowed down ({', '.join(map(str, throttled))})")
    return found


def waits_for_disk(conditions: Mapping[str, Any]) -> str:
    """Return how often runs of the recommended plan waited for the disk, in a sentence; "" where they did not."""
    faults = conditions.get("page_faults")
    if not isinstance(faults, int | float) or faults < 1.0:
        return ""
    return f"the recommended plan waited {faults:.0f} times a run for the disk: its weights do not all stay in memory"


def major_faults(process: int, proc: Path = Path("/proc")) -> int:
    """Return how often a process has waited until a page was read from the disk; 0 for one that is gone."""
    # The name, in brackets, may hold anything.
    fields = kernel_text(proc / str(process) / "stat").rpartition(")")[2].split()
    return int(fields[9]) if len(fields) > 9 else 0


def _cpu_seconds(processes: Iterable[int]) -> dict[int, float]:
    """Return the seconds that each process has used of any core; one that is gone is left out."""
    found = {}
    for process in processes:
        # The name, in brackets, may hold anything; utime and stime are the 14th and 15th field.
        fields = kernel_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
        if len(fields) > 12:
            found[process] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def _times(cores: list[int]) -> list[int] | None:
    """Return the kernel's counters of time, summed over some cores."""
    wanted = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in kernel_text(Path("/proc/stat")).splitlines()]
    total = [sum(column) for column in zip(*(map(int, row[1:]) for row in rows if row[0] in wanted), strict=True)]
    return total if len(total) > _STEAL else None


def _shares(before: list[int] | None, after: list[int] | None) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    # Guest time, after the eighth column, is included in user time.
    spent = [b - a for a, b in zip(before[: _STEAL + 1], after[: _STEAL + 1], strict=True)]
    total = sum(spent)
    if total <= 0:
        return None, None
    return (total - spent[_IDLE] - spent[_IOWAIT] - spent[_STEAL]) / total, spent[_STEAL] / total


def _clocks(cores: list[int]) -> tuple[float, ...]:
    """Return the clocks of cores now, in Hz; none where the kernel does not report them."""
    clocks = (_number(_CPU / f"cpu{core}/cpufreq/scaling_cur_freq") for core in cores)
    return tuple(f * 1e3 for f in clocks if f is not None) or _clocks_of_cpuinfo(cores)


def _clocks_of_cpuinfo(cores: list[int]) -> tuple[float, ...]:
    found: dict[int, float] = {}
    core = -1
    for line in kernel_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        with suppress(ValueError):
            if key.strip() == "processor":
                core = int(value)
            elif key.strip() == "cpu MHz":
                found[core] = float(value) * 1e6
    return tuple(found[c] for c in cores if c in found)


def _temperature() -> float | None:
    found = []
    for pattern in (_THERMAL.glob("thermal_zone*/temp"), _HWMON.glob("hwmon*/temp*_input")):
        found += [t / 1e3 for path in pattern if (t := _number(path)) is not None and t > 0]
    return max(found, default=None)


def available_nbytes() -> int | None:
    """Return the bytes available to this process without swapping, or None where the system does not report them."""
    lines = kernel_text(Path("/proc/meminfo")).splitlines()
    machine = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    found = [memory_left_nbytes(), *machine]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _number(path: Path) -> float | None:
    try:
        return float(kernel_text(path))
    except ValueError:
        return None


def kernel_text(path: Path) -> str:
    """Return the text of a small file of the kernel; "" where it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2 ** 63


def memory_left_nbytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that may still be used before the kernel kills a process; None where there is no limit.

    Inactive file cache counts as free.
    """
    left = []
    for group, names in own_groups("memory", mount, membership):
        limit_name, usage_name, idle_name = (
            ("memory.max", "memory.current", "inactive_file")
            if names == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, usage = _count(group / limit_name), _count(group / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        left.append(max(0, limit - usage + counted(group / "memory.stat", idle_name)))
    return min(left, default=None)


def core_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of this process in cores (such as 1.5); None where there is no limit."""
    found = []
    for group, names in own_groups("cpu", mount, membership):
        if names == 2:
            words = kernel_text(group / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "")
        else:
            quota, period = kernel_text(group / "cpu.cfs_quota_us"), kernel_text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def throttled_s(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float:
    """Return the seconds for which CPU quotas have throttled this process's groups so far; 0 without a quota."""
    names = {1: ("throttled_time", 1e-9), 2: ("throttled_usec", 1e-6)}
    found = ((group, *names[version]) for group, version in own_groups("cpu", mount, membership))
    return max((counted(group / "cpu.stat", name) * unit for group, name, unit in found), default=0.0)


def own_groups(controller: str, mount: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that this process is in, its own first, and the version of its files' names."""
    for line in kernel_text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, version = mount, 2
            if not (mount / "cgroup.controllers").exists():  # both versions are mounted
                top = mount / "unified"
        elif controller in controllers.split(","):
            top, version = mount / controller, 1
        else:
            continue
        own = top / path.strip().lstrip("/")
        if ".." in own.parts or not own.is_dir():
            own = top
        yield own, version
        while own != top:
            own = own.parent
            yield own, version


def counted(path: Path, name: str) -> int:
    """Return a number of a file that holds a name and a number in each line; 0 where it is not there."""
    for line in kernel_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _count(path: Path) -> int | None:
    text = kernel_text(path)
    return int(text) if text.isdigit() else None
