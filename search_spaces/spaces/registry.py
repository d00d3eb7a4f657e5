"""Makes search spaces from the names of freedoms, or from plug-ins."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, cast

from search_spaces.core.errors import UnavailableError, UsageError, shown
from search_spaces.core.plugins import entries, find_entry, foreign, load_entry, origin
from search_spaces.spaces.space import EnumerableSpace, NeighbourlySpace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from search_spaces.core.decoded_plan import RankSet
    from search_spaces.core.graph import Graph
    from search_spaces.core.joined_graph import JoinedGraph
    from search_spaces.core.platform import Platform
    from search_spaces.core.workload import Workload
    from search_spaces.spaces.workload_space import WorkloadSpace

FREEDOMS = ("cuts", "branches", "splits", "ranks")
"""Freedoms of plans: cut into stages, run branches side by side, split operators, decompose convolutions."""

EXACT = "exact"
"""All freedoms that leave the results unchanged and that the model and the platform support."""

_METHODS = ("distributions", "decode", "encode", "cardinality", "plan_at")


def parse_freedoms(text: str) -> str:
    """Return ``cuts,branches,…`` in the order of :data:`FREEDOMS`, or the name of a plug-in's space as it is.

    ``exact`` and ``exact,ranks`` stay as they are; :func:`offered` resolves them.

    Raises:
        UsageError: a word is not a freedom or is repeated, and no installed space has that name.
    """
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in (*FREEDOMS, EXACT)]
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise UsageError(f"--allow {shown(text)}: names {shown(twice)} twice", "name each freedom once")
    if not unknown and EXACT in words:
        return f"{EXACT},ranks" if "ranks" in words else EXACT
    if not unknown:
        return ",".join(f for f in FREEDOMS if f == "cuts" or f in words)
    if len(words) == 1 and any(entry.name == text for entry in entries("space")):
        return text
    raise UsageError(
        f"--allow {shown(text)}: there is no freedom {shown(unknown[0])}",
        f"use some of {', '.join(FREEDOMS)}, or {EXACT}",
    )


_NO_BRANCHES = "leave branches out of --allow"


def offered(allow: str, graphs: Iterable[Graph], platform: Platform) -> str:
    """Return the freedoms by name, with :data:`EXACT` replaced by those that models and processors support.

    Branches and splits need processors that run at once; branches also need a model that has some.

    Args:
        allow: as :func:`parse_freedoms` returns it.
    """
    words = allow.split(",")
    if EXACT not in words:
        return allow
    found = {"cuts", *words}
    if not all(a.excludes(b) for a, b in combinations(platform.processors, 2)):
        from search_spaces.spaces.segment_space import SegmentSpace

        for graph in graphs:
            found.update(SegmentSpace(graph, platform).offers)
    return ",".join(f for f in FREEDOMS if f in found)


def freedoms_of(allow: str) -> frozenset[str]:
    """Return the freedoms of what :func:`parse_freedoms` returned; none of a plug-in's space."""
    return frozenset(allow.split(",")) & frozenset(FREEDOMS)


def freedoms_in(space: object) -> tuple[str, ...]:
    """Return the freedoms of a space; () for a plug-in's space that does not declare them."""
    return tuple(getattr(space, "freedoms", ()))


def needs_any_stages(allow: str) -> bool:
    """Return whether the number of stages is unlimited, unless the user limits it.

    Raises:
        UsageError, UnavailableError: as of :func:`make_space`.
    """
    if freedoms_of(allow):
        return bool(freedoms_of(allow) & {"branches", "splits"})
    return bool(getattr(load_entry("space", find_entry("space", allow)), "any_stages", False))


def make_space(allow: str, graph: Graph, platform: Platform, max_stages: int) -> EnumerableSpace:
    """Return the space of some freedoms for a model on a platform.

    Args:
        allow: as :func:`parse_freedoms` returns it.
        max_stages: maximum number of stages of a plan; not used with branches or splits.

    Raises:
        UsageError: the model does not allow this space or number of stages.
        UnavailableError: a plug-in's space cannot be loaded or made; the text names the distribution and the cause.
    """
    freedoms = freedoms_of(allow)
    if not freedoms:
        return _of_plugin(allow, graph, platform, max_stages)
    from search_spaces.spaces.chain import ChainSpace
    from search_spaces.spaces.rank_space import RankSpace
    from search_spaces.spaces.segment_space import SegmentSpace

    found: NeighbourlySpace
    if freedoms & {"branches", "splits"}:
        found = SegmentSpace(graph, platform, splits="splits" in freedoms, branches="branches" in freedoms)
        if "splits" not in freedoms and not found.branching:
            raise UsageError(f"{graph.name!r} has no parallel branches", _NO_BRANCHES)
    else:
        found = ChainSpace(graph, platform, max_stages)
    return RankSpace(graph, found) if "ranks" in freedoms else found


def make_workload_space(
    allow: str,
    workload: Workload,
    joined: JoinedGraph,
    platform: Platform,
    max_stages: int,
    rank_sets: Sequence[Sequence[RankSet]] = (),
) -> WorkloadSpace:
    """Return the space of some freedoms for several models.

    Args:
        allow: as :func:`parse_freedoms` returns it.
        platform: processors and pools.
        max_stages: maximum number of stages of each model; not used with branches or splits.
        rank_sets: the rank sets that the instances of each client may get.

    Raises:
        UsageError: the models do not allow this space or number of stages, or it comes from a plug-in.
    """
    from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
    from search_spaces.spaces.workload_space import WorkloadSpace

    freedoms = freedoms_of(allow)
    if not freedoms:
        raise UsageError(f"--allow {allow}: a plug-in's space is of one model", f"give some of {', '.join(FREEDOMS)}")
    splits, branches = "splits" in freedoms, "branches" in freedoms
    if splits or branches:
        found = SharedWorkloadSpace(workload, joined, platform, rank_sets, splits=splits, branches=branches)
        if not splits and not any(space.branching for space in found.models):
            raise UsageError("none of the models has parallel branches", _NO_BRANCHES)
        return found
    return WorkloadSpace(workload, joined, platform, max_stages, rank_sets)


def _of_plugin(name: str, graph: Graph, platform: Platform, max_stages: int) -> EnumerableSpace:
    entry = find_entry("space", name)
    kind = load_entry("space", entry)
    what = f"space {name!r} of {origin(entry)}"
    with foreign(f"{what} cannot be made"):
        space = kind(graph, platform, max_stages)
    missing = [method for method in _METHODS if not callable(getattr(space, method, None))]
    if missing:
        raise UnavailableError(f"{what} has no method {missing[0]!r}", "see search_spaces.spaces.space")
    return cast("EnumerableSpace", space)
