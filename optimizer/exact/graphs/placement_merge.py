"""Merges nodes of a placement problem that are on one device in every solution better than a known one.

In every solution that is better than the known value,

- a node whose work on the CPU, with all of its colour, is above the value is on an accelerator;
- such a node pays no transfer that lifts its load above the value, so both ends are on one device;
- every node between two nodes of one accelerator is on it too, since its part is contiguous;
- a source without cost that one node reads, as a weight, is best where that node is, if everything fits into memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
from networkx.utils import UnionFind

from evaluators.table.placement import PlacementProblem


@dataclass(frozen=True, slots=True)
class Clusters:
    """Nodes that are on one device.

    Attributes:
        of: the cluster of each node: the smallest node in it.
        on_accelerator: clusters that the CPU cannot have.
    """

    of: tuple[int, ...]
    on_accelerator: frozenset[int]


def merge(problem: PlacementProblem, known: float, *, parallel_cpu: bool = False) -> Clusters:
    """Return nodes that share a device in each solution better than ``known`` (infinite: none is known).

    Args:
        parallel_cpu: the CPU runs nodes side by side, so that only a single node can be too much for it; then nodes of
            one colour make one cluster only if they are on an accelerator.
    """
    sets = _Sets(range(len(problem.names)))
    _join_weights(problem, sets)
    of_colour: dict[int, list[int]] = {}
    for node, colour in enumerate(problem.colours):
        of_colour.setdefault(colour, []).append(node)
    total = max if parallel_cpu else sum
    dear = {c for c, members in of_colour.items() if total(problem.cpu[v] for v in members) > known}
    dear |= {c for c, members in of_colour.items() if any(math.isinf(problem.cpu[v]) for v in members)}
    for colour, members in of_colour.items():
        if not parallel_cpu or colour in dear:
            sets.join_all(members)
    while True:
        roots = sets.roots()
        load: dict[int, list[float]] = {root: [] for root in roots}
        for node, root in enumerate(roots):
            load[root].append(problem.cpu[node])
        bound = {root for root, cpu in load.items() if total(cpu) > known}
        bound |= {roots[v] for v, colour in enumerate(problem.colours) if colour in dear}
        changed = _join_dear_edges(problem, sets, roots, bound, known)
        if not changed and not _join_circles(problem, sets, roots, bound):
            return Clusters(tuple(roots), frozenset(bound))


def _join_weights(problem: PlacementProblem, sets: _Sets) -> None:
    if sum(problem.nbytes) > problem.memory_bytes:
        return
    count = Counter(problem.colours)
    for node, readers in enumerate(problem.successors):
        free = problem.cpu[node] == problem.accelerator[node] == 0.0 and not problem.predecessors[node]
        if free and len(readers) == 1 and count[problem.colours[node]] == 1:
            sets.join_all((node, readers[0]))


def _join_dear_edges(problem: PlacementProblem, sets: _Sets, roots: list[int], bound: set[int], known: float) -> bool:
    """Join the ends of edges of which one is on an accelerator that cannot afford the transfer."""
    accelerator = dict.fromkeys(roots, 0.0)
    for node, root in enumerate(roots):
        accelerator[root] += problem.accelerator[node]
    changed = False
    for node, readers in enumerate(problem.successors):
        for reader in readers:
            ends = roots[node], roots[reader]
            paid = max((accelerator[e] + problem.transfer[node] for e in ends if e in bound), default=0.0)
            if ends[0] != ends[1] and problem.transfer[node] > 0 and paid > known:
                changed |= sets.join_all(ends)
    return changed


def _join_circles(problem: PlacementProblem, sets: _Sets, roots: list[int], bound: set[int]) -> bool:
    """Join nodes on paths out of an accelerator and back into it; return whether there were any.

    Nodes of one colour that may be on the CPU are not one place: the CPU runs them at different times.
    """
    place = [root if root in bound else node for node, root in enumerate(roots)]
    graph = nx.DiGraph((place[v], place[r]) for v, readers in enumerate(problem.successors) for r in readers)
    circles = [circle for circle in nx.strongly_connected_components(graph) if not bound.isdisjoint(circle)]
    return any(sets.join_all(circle) for circle in circles)


class _Sets(UnionFind):  # type: ignore[type-arg] # not generic when it runs
    """Disjoint sets of nodes."""

    def roots(self) -> list[int]:
        """Return for each node the smallest member of its set."""
        first = {node: min(members) for members in self.to_sets() for node in members}
        return [first[node] for node in range(len(first))]

    def join_all(self, nodes: Iterable[int]) -> bool:
        """Join the sets of nodes; return whether they were several."""
        joined = {self[node] for node in nodes}
        self.union(*joined)
        return len(joined) > 1
