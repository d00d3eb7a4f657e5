"""What this machine offers: all its cores together, and each core as a lane of its own."""

from __future__ import annotations

import os
import platform as host
import sys
from pathlib import Path

from search_spaces.errors import UnavailableError
from search_spaces.platform import Platform, Processor

_CPU = Path("/sys/devices/system/cpu")


def local_platform() -> Platform:
    """Return the lanes of this machine, from the cores that this process may use.

    ``cpu`` runs a stage on all cores with one thread each; ``cpu0``, ``cpu1`` … are single cores. Cores are alike when
    the kernel reports the same capacity and the same highest clock for them.

    Raises:
        UnavailableError: the operating system cannot pin a process to cores.
    """
    if sys.platform != "linux":
        raise UnavailableError(
            f"measuring needs Linux (lanes are pinned to cores), this is {sys.platform}",
            "use an evaluator that predicts: optimize plugins",
        )
    cores = sorted(os.sched_getaffinity(0))
    singles = tuple(
        Processor(
            name=f"cpu{core}",
            kind="cpu",
            resources={f"core{core}": 1.0},
            like=f"core:{_speed(core)}",
            options={"cores": (core,), "threads": 1},
        )
        for core in cores
    )
    if len(cores) == 1:
        return Platform(host.node() or "local", singles)
    together = Processor(
        name="cpu",
        kind="cpu",
        resources={f"core{core}": 1.0 for core in cores},
        like="cores",
        options={"cores": tuple(cores), "threads": len(cores)},
    )
    return Platform(host.node() or "local", (together, *singles))


def _speed(core: int) -> str:
    """Return what tells a big core from a little one, as far as the kernel says."""
    found = []
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        try:
            found.append((_CPU / f"cpu{core}" / name).read_text().strip())
        except OSError:
            found.append("?")
    return "/".join(found)
