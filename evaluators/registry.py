"""Evaluators by name: built-ins and plug-ins come in through the same entry-point group."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from evaluators.base import Evaluator
from search_spaces.errors import UnavailableError, UsageError

GROUP = "partition_optimizer.evaluators"


def evaluator_names() -> list[str]:
    """Return the names of all installed evaluators."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def make_evaluator(name: str) -> Evaluator:
    """Return a new evaluator.

    Raises:
        UsageError: there is none of this name.
        UnavailableError: it is installed but cannot be loaded; the text names the distribution and the cause.
    """
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        names = evaluator_names()
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"installed are: {', '.join(names)}"
        raise UsageError(f"there is no evaluator {name!r}", hint)
    try:
        return cast("Evaluator", found[0].load()())
    except Exception as error:
        raise UnavailableError(
            f"evaluator {name!r} of {_origin(found[0])} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
