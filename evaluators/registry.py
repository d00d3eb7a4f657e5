"""Evaluators by name: built-ins and plug-ins use the same entry-point group."""

from __future__ import annotations

from typing import cast

from evaluators.base import Evaluator
from search_spaces.core.plugins import entries, find_entry, foreign, is_ours, load_entry, origin, time_limit

MAKE_S = 30.0


def evaluator_names() -> list[str]:
    """Return the names of all installed evaluators."""
    return sorted({entry.name for entry in entries("evaluator")})


def make_evaluator(name: str) -> Evaluator:
    """Return a new evaluator; one of a plug-in is guarded (:mod:`evaluators.guard`).

    Raises:
        UsageError: there is none of this name, or two.
        UnavailableError: it is installed but cannot be loaded; the text names the distribution and the cause.
    """
    entry = find_entry("evaluator", name)
    kind = load_entry("evaluator", entry)
    if is_ours(entry):
        return cast("Evaluator", kind())
    from evaluators.guard import guarded

    what = f"evaluator {name!r} of {origin(entry)}"
    with foreign(f"{what} cannot be made"), time_limit(MAKE_S, f"{what}: making it"):
        made = kind()
    return guarded(made, what)
