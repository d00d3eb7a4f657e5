"""Search spaces by name: built-ins and plug-ins come in through the same entry-point group."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from search_spaces.errors import UnavailableError
from search_spaces.plugins import entries, find_entry, foreign, load_entry, origin
from search_spaces.space import EnumerableSpace

if TYPE_CHECKING:
    from search_spaces.graph import Graph
    from search_spaces.platform import Platform

DEFAULT = "chain"
_METHODS = ("distributions", "decode", "encode", "cardinality", "plan_at")


def space_names() -> list[str]:
    """Return the names of all installed spaces."""
    return sorted({entry.name for entry in entries("space")})


def needs_any_stages(name: str) -> bool:
    """Return whether the plans of a space have as many parts as they need, unless a person limits them.

    Raises:
        UsageError: there is no space of this name.
        UnavailableError: it is installed but cannot be loaded.
    """
    return bool(getattr(load_entry("space", find_entry("space", name)), "any_stages", False))


def make_space(name: str, graph: Graph, platform: Platform, max_stages: int) -> EnumerableSpace:
    """Return the space of that name for a model on a platform.

    Args:
        max_stages: parts of a plan at most.

    Raises:
        UsageError: there is none of this name, or the space cannot be for this model and so many parts.
        UnavailableError: it is installed but cannot be loaded or made; the text names the distribution and the cause.
    """
    entry = find_entry("space", name)
    kind = load_entry("space", entry)
    what = f"space {name!r} of {origin(entry)}"
    with foreign(f"{what} cannot be made"):
        space = kind(graph, platform, max_stages)
    missing = [method for method in _METHODS if not callable(getattr(space, method, None))]
    if missing:
        raise UnavailableError(f"{what} has no method {missing[0]!r}", "see search_spaces.space")
    return cast("EnumerableSpace", space)
