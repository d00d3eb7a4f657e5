"""Segments of a graph: the operators between gates, which :mod:`search_spaces.spaces.segments` defines."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.core.graph import Graph
from search_spaces.spaces.segments import gates


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators between two gates.

    Attributes:
        entry: the gate before them, or None at the beginning of the graph.
        operators: the operators of the segment, ascending and without ``entry``.
        exit: the gate at their end, the last of ``operators``; None where the graph ends without one.
    """

    entry: int | None
    operators: tuple[int, ...]
    exit: int | None


def segments(graph: Graph) -> list[Segment]:
    """Return the segments in order; together they hold every operator once."""
    found: list[Segment] = []
    entry: int | None = None
    first = 0
    for gate in gates(graph):
        found.append(Segment(entry, tuple(range(first, gate + 1)), gate))
        entry, first = gate, gate + 1
    if first < len(graph.operators):
        found.append(Segment(entry, tuple(range(first, len(graph.operators))), None))
    return found
