"""Provenance: versions and machine, as plain values for a manifest."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evaluators.machine import cpu_model

_PRODUCT = "partition-optimizer"
_PACKAGES = ("ai-edge-litert", "flatbuffers", "networkx", "numpy", "openvino", "optuna", "pydantic", "scipy")


def provenance() -> dict[str, Any]:
    """Return the time (UTC), and the versions and the machine in use."""
    return {
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "product": {"name": _PRODUCT, "version": _version(_PRODUCT)},
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Return the properties of this machine; None for unknown ones."""
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "own_cache_bytes": _own_cache_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _own_cache_bytes() -> int | None:
    """Return the largest cache that a core shares with no other core."""
    core = Path("/sys/devices/system/cpu/cpu0")
    found = []
    try:
        threads = (core / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        for cache in (core / "cache").glob("index*"):
            if (cache / "shared_cpu_list").read_text(encoding="ascii") == threads:
                size = (cache / "size").read_text(encoding="ascii").strip()
                found.append(int(size.removesuffix("K")) << 10)
    except (OSError, ValueError):
        return None
    return max(found, default=None)
