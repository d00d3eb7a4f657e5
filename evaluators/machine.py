"""The state of the machine that measures: what may change a number without being part of the plan."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")
_THERMAL = Path("/sys/class/thermal")
_HWMON = Path("/sys/class/hwmon")
# Columns of a cpu line in /proc/stat.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


@dataclass(frozen=True, slots=True)
class MachineState:
    """What the kernel tells; None where it does not.

    Attributes:
        governors: of the cores that this process may use, each once.
        clocks_hz: of these cores, now.
        highest_hz: the highest clock that a core can have.
        temperature_c: of the hottest sensor.
        busy: share of the time of these cores that others used, over a short while.
        steal: share of their time that the machine below took for itself.
        memory_free_nbytes: what can be had without swapping.
    """

    governors: tuple[str, ...]
    clocks_hz: tuple[float, ...]
    highest_hz: float | None
    temperature_c: float | None
    busy: float | None
    steal: float | None
    memory_free_nbytes: int | None


def machine_state(cores: Iterable[int], watch_s: float = 0.5) -> MachineState:
    """Return the state of the machine; takes ``watch_s`` to see what others do.

    Args:
        cores: those that measurements run on.
    """
    mine = list(cores)
    before = _times(mine)
    time.sleep(watch_s)
    busy, steal = _shares(before, _times(mine))
    clocks = [f for core in mine if (f := _number(_CPU / f"cpu{core}/cpufreq/scaling_cur_freq")) is not None]
    highest = [f for core in mine if (f := _number(_CPU / f"cpu{core}/cpufreq/cpuinfo_max_freq")) is not None]
    governors = (_text(_CPU / f"cpu{core}/cpufreq/scaling_governor") for core in mine)
    return MachineState(
        governors=tuple(sorted({g for g in governors if g})),
        clocks_hz=tuple(f * 1e3 for f in clocks) or _clocks_of_cpuinfo(mine),
        highest_hz=max(highest) * 1e3 if highest else None,
        temperature_c=_temperature(),
        busy=busy,
        steal=steal,
        memory_free_nbytes=_available(),
    )


def _times(cores: list[int]) -> list[int] | None:
    """Return the kernel's counters of time, summed over some cores."""
    wanted = {f"cpu{core}" for core in cores}
    total: list[int] = []
    text = _text(Path("/proc/stat")) or ""
    for line in text.splitlines():
        name, *numbers = line.split()
        if name in wanted:
            counts = [int(number) for number in numbers]
            total = [a + b for a, b in zip(total, counts, strict=True)] if total else counts
    return total if len(total) > _STEAL else None


def _shares(before: list[int] | None, after: list[int] | None) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    # Guests' time, behind the eighth column, is contained in the users'.
    spent = [b - a for a, b in zip(before[: _STEAL + 1], after[: _STEAL + 1], strict=True)]
    total = sum(spent)
    if total <= 0:
        return None, None
    return (total - spent[_IDLE] - spent[_IOWAIT] - spent[_STEAL]) / total, spent[_STEAL] / total


def _clocks_of_cpuinfo(cores: list[int]) -> tuple[float, ...]:
    found: dict[int, float] = {}
    core = -1
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
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


def _available() -> int | None:
    for line in (_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return None
