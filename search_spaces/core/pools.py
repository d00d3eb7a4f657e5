"""Processors that serve one queue together: a job goes to whichever of them is free (seed 001's thread pool)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from search_spaces.core.platform import Platform, Processor

_MEMBERS = "members"
_SHOWN = 3


def with_pools(platform: Platform) -> Platform:
    """Return a platform with a pool for each group of interchangeable processors that can run at once.

    A plan names a pool as it names a processor; a pool has no resources, since its members have them.
    """
    found = list(platform.processors)
    for like, processors in platform.classes().items():
        if len(processors) > 1 and not any(a.excludes(b) for a, b in combinations(processors, 2)):
            names = tuple(processor.name for processor in processors)
            called = names if len(names) <= _SHOWN else (names[0], "…", names[-1])
            options = {_MEMBERS: names}
            found.append(Processor("|".join(called), processors[0].kind, {}, f"pool of {like}", options, len(names)))
    return replace(platform, processors=tuple(found))


def members(processor: Processor) -> tuple[str, ...]:
    """Return the processors that run what a plan places on a processor: the members of a pool, or itself."""
    return tuple(processor.options.get(_MEMBERS, (processor.name,)))


def single_processors(platform: Platform) -> tuple[Processor, ...]:
    """Return the processors that are not pools."""
    return tuple(p for p in platform.processors if _MEMBERS not in p.options)
