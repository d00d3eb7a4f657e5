"""Energy of an inference: from the platform's powers, or from counters of the machine.

A platform file may give the watts of a processor while it runs (``power_w``), and so may a profile. Otherwise counters
of the machine are read: RAPL and hwmon count microjoules, NVML millijoules; hwmon's power sensors and the rails of a
Jetson (INA3221) report watts, which are integrated over time.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evaluators.base import Session
from evaluators.machine import kernel_text
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.platform import Platform

OPTION = "power_w"
_SYS = Path("/sys")
_EVERY_S = 0.01


def powers_w(platform: Platform, session: Session, sys: Path = _SYS) -> tuple[dict[str, float], Meter | None]:
    """Return the watts of all processors, or else a meter.

    Raises:
        UsageError: there is neither, and the text says what was tried; or interchangeable processors have different
            watts, although plans name them by first use only.
    """
    known = dict(session.powers_w()) if session.capabilities.powers else {}
    known |= {p.name: float(p.options[OPTION]) for p in platform.processors if OPTION in p.options}
    missing = [p.name for p in platform.processors if p.name not in known]
    if not missing:
        for members in platform.classes().values():
            other = next((p for p in members if known[p.name] != known[members[0].name]), None)
            if other is not None:
                raise UsageError(
                    f"{members[0].name} and {other.name} are alike, so they cannot draw {known[members[0].name]:g} W "
                    f"and {known[other.name]:g} W",
                    f"give both the same --power, or leave one out: --processors {other.name}",
                )
        return known, None
    if known:
        raise UsageError(f"the power of {', '.join(map(repr, missing))} is unknown", _hint(missing[0]))
    if session.capabilities.powers:
        raise UsageError(f"the profile of {platform.name!r} has no powers", _hint(platform.processors[0].name))
    return {}, find_meter(sys)


def find_meter(sys: Path = _SYS) -> Meter:
    """Return the energy meter of this machine.

    Raises:
        UsageError: there is none, so the user must give the powers.
    """
    for find in (_rapl, _hwmon_energy, _hwmon_power, _jetson):
        if found := find(sys):
            return found
    if sys == _SYS and (nvml := _nvml()) is not None:
        return nvml
    raise UsageError(
        "this machine does not report its energy: no readable RAPL counter, hwmon energy or power sensor, "
        "Jetson rail or NVML here",
        _hint("cpu0"),
    )


def _hint(processor: str) -> str:
    return f"give the watts of each processor: --power {processor}=2.5, or power_w in the platform's file"


@dataclass(slots=True)
class Counter:
    """Counters of the energy used; each wraps to 0 at its range.

    Attributes:
        counts: a function that reads each, and its range; None where it does not wrap.
        unit: joules of one count.
    """

    name: str
    counts: Sequence[tuple[Callable[[], float], float | None]]
    unit: float = 1e-6
    _last: list[float] | None = None
    _sum: float = 0.0

    def joules(self) -> float:
        """Return the joules since some fixed moment."""
        now = [read() for read, _ in self.counts]
        if self._last is not None:
            for before, after, (_, most) in zip(self._last, now, self.counts, strict=True):
                self._sum += after - before if after >= before or most is None else after - before + most
        self._last = now
        return self._sum * self.unit


class Integrator:
    """Watts that a thread reads repeatedly and integrates, as long as somebody has the meter.

    Args:
        watts: reads them.
    """

    def __init__(self, name: str, watts: Callable[[], float], every_s: float = _EVERY_S) -> None:
        self.name = name
        self._watts = watts
        self._joules, self._at, self._last = 0.0, time.perf_counter(), watts()
        self._lock = threading.Lock()
        threading.Thread(target=_keep_reading, args=(weakref.ref(self), every_s), daemon=True, name=name).start()

    def joules(self) -> float:
        """Return the joules since some fixed moment."""
        with self._lock:
            now, watts = time.perf_counter(), self._watts()
            self._joules += (now - self._at) * (watts + self._last) / 2.0
            self._at, self._last = now, watts
            return self._joules


def _keep_reading(meter: weakref.ref[Integrator], every_s: float) -> None:
    """Read a meter repeatedly until nobody has it any more, or it cannot be read."""
    with suppress(UnavailableError):
        while True:
            time.sleep(every_s)
            if (found := meter()) is None:
                return
            found.joules()
            del found  # while it sleeps, this thread does not keep the meter


Meter = Counter | Integrator
"""What tells the energy used; ``joules()`` raises an UnavailableError where it can no longer be read."""


def _rapl(sys: Path) -> Meter | None:
    found = []
    for domain in sorted(sys.glob("class/powercap/intel-rapl:*")):
        # Domains within a package (intel-rapl:0:0) are part of it.
        if domain.name.count(":") == 1 and _readable(domain / "energy_uj"):
            most = domain / "max_energy_range_uj"
            found.append((partial(_number, domain / "energy_uj"), _number(most) if _readable(most) else None))
    return Counter("RAPL", found) if found else None


def _hwmon_energy(sys: Path) -> Meter | None:
    found = [path for path in sorted(sys.glob("class/hwmon/hwmon*/energy*_input")) if _readable(path)]
    return Counter("hwmon", [(partial(_number, path), None) for path in found]) if found else None


def _hwmon_power(sys: Path) -> Meter | None:
    found = []
    for chip in sorted(sys.glob("class/hwmon/hwmon*")):
        inputs = sorted(chip.glob("power*_input")) or sorted(chip.glob("power*_average"))
        found += [path for path in inputs[:1] if _readable(path)]  # further sensors of a chip are parts of the first
    return Integrator("hwmon", lambda: sum(_number(path) for path in found) * 1e-6) if found else None


def _jetson(sys: Path) -> Meter | None:
    for label in sorted(sys.glob("class/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        volts, amperes = label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input")
        if kernel_text(label) in ("VDD_IN", "POM_5V_IN") and _readable(volts) and _readable(amperes):
            return Integrator("Jetson", partial(_watts, volts, amperes, unit=1e-6))
    for path in sorted(sys.glob("bus/i2c/drivers/ina3221x/*/iio:device*/in_power0_input")):
        if _readable(path):
            return Integrator("Jetson", partial(_watts, path, unit=1e-3))
    return None


def _watts(*paths: Path, unit: float) -> float:
    """Return the product of the numbers in some files, times ``unit`` in watts."""
    return math.prod(map(_number, paths)) * unit


def _nvml() -> Meter | None:
    """Return the energy counters of NVIDIA's GPUs, of those that have one."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None

    def millijoules(device: ctypes.c_void_p) -> float:
        found = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(found)):
            raise UnavailableError("NVML no longer reports the energy of a GPU")
        return found.value

    counts = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if not library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            with suppress(UnavailableError):
                millijoules(device)
                counts.append((partial(millijoules, device), None))
    return Counter("NVML", counts, 1e-3) if counts else None


def _readable(path: Path) -> bool:
    with suppress(UnavailableError):
        _number(path)
        return True
    return False


def _number(path: Path) -> float:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{path}: cannot be read any more: {error}") from error
