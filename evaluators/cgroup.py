"""What a container or a service manager leaves to this process: memory and cores, by Linux' control groups.

Both versions are read. A group's limit holds for all below it, so every group from this process's own up to the root
counts. Inside a container the path that the kernel tells may not be there; then the root of what is mounted is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 has no word for "no limit", but a number near 2 ** 63


def memory_left_nbytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that may still be used before the kernel ends somebody; None where there is no limit.

    Files that could be dropped from memory count as free.
    """
    left = []
    for group, names in _groups("memory", mount, membership):
        limit_name, usage_name, idle_name = (
            ("memory.max", "memory.current", "inactive_file")
            if names == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        left.append(max(0, limit - usage + _entry(group / "memory.stat", idle_name)))
    return min(left, default=None)


def core_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' worth of time this process may have on average (1.5); None where there is no limit."""
    found = []
    for group, names in _groups("cpu", mount, membership):
        if names == 2:
            words = _text(group / "cpu.max").split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "")
        else:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def throttled_s(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float:
    """Return for how many seconds the quota of this process's groups has stopped it so far; 0 without a quota."""
    found = 0.0
    for group, names in _groups("cpu", mount, membership):
        if names == 2:
            found = max(found, _entry(group / "cpu.stat", "throttled_usec") * 1e-6)
        else:
            found = max(found, _entry(group / "cpu.stat", "throttled_time") * 1e-9)
    return found


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that this process is in, its own first, and the version of its files' names."""
    for line in _text(membership).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, version = mount, 2
            if not (mount / "cgroup.controllers").exists():  # both versions are in use
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


def _entry(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
