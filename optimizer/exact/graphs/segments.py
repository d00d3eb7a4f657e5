"""Where a graph falls apart in time: operators through which everything passes.

A *gate* is an operator that needs all operators before it and that all operators after it need, and whose outputs are
all that crosses to them. Nothing after a gate can begin before it has ended, so what lies between two gates is a
problem of its own once their processors are chosen: the best plan of the whole is a shortest path over the processors
of the gates. In a network of modules (GoogLeNet, Inception, ResNet, SqueezeNet) these problems are small.
"""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.core.graph import Graph


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


def gates(graph: Graph) -> list[int]:
    """Return the gates, ascending."""
    count = len(graph.operators)
    readers = [[c for t in o.outputs for c in graph.consumers.get(t, ())] for o in graph.operators]
    after = [bool(graph.predecessors(o)) for o in range(count)]
    # The last position before which every operator from here on reads from some other operator.
    rooted = count
    while rooted > 0 and after[rooted - 1]:
        rooted -= 1
    found, reach = [], -1
    for operator in range(count):
        # All before it are read, and by nobody after it; all after it read something, so they all need it.
        if reach <= operator and operator + 1 >= rooted:
            found.append(operator)
        if not readers[operator]:
            break
        reach = max(reach, *readers[operator])
    return found


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
