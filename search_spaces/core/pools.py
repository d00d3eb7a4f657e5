"""Lanes that serve one queue together: a job goes to whichever of them is free (seed 001's thread pool)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from search_spaces.core.platform import Platform, Processor

_MEMBERS = "members"
_SHOWN = 3


def with_pools(platform: Platform) -> Platform:
    """Return a platform with a pool for each kind of lane of which several can run at once.

    A plan names a pool as it names a lane; a pool has no resources, since its members have them.
    """
    found = list(platform.processors)
    for like, lanes in platform.classes().items():
        if len(lanes) > 1 and not any(a.excludes(b) for a, b in combinations(lanes, 2)):
            names = tuple(lane.name for lane in lanes)
            called = names if len(names) <= _SHOWN else (names[0], "…", names[-1])
            options = {_MEMBERS: names}
            found.append(Processor("|".join(called), lanes[0].kind, {}, f"pool of {like}", options, len(names)))
    return replace(platform, processors=tuple(found))


def members(processor: Processor) -> tuple[str, ...]:
    """Return the lanes that take what a plan gives to a processor: those of a pool, or itself."""
    return tuple(processor.options.get(_MEMBERS, (processor.name,)))


def lanes_of(platform: Platform) -> tuple[Processor, ...]:
    """Return the processors that are no pools."""
    return tuple(p for p in platform.processors if _MEMBERS not in p.options)
