"""What a model is made of, as numbers; :mod:`optimizer.inspect_text` and the pictures show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.branches import BranchGroup, branch_groups, walk
from search_spaces.cuts import CutPoint, cut_points
from search_spaces.graph import Graph
from search_spaces.intensity import Cost, operator_costs, parameter_total, unknown_kinds

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All operators of one kind.

    Attributes:
        kind: as in :class:`~search_spaces.graph.Operator`.
        count: how many there are.
        cost: of all of them together; a weight that several share counts once.
    """

    kind: str
    count: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model's operators, cut points and parallel branches.

    Attributes:
        graph: the model.
        file_nbytes: size of its file, or None where it was not read from one.
        costs: of each operator.
        total: of all operators; a weight that several share counts once.
        kinds: of operators, by MACs and then bytes moved, most first.
        cuts: one for each position between two operators, ascending.
        groups: the outermost parallel-branch groups.
        unknown: kinds of operators that are counted as memory traffic alone → how many there are.
    """

    graph: Graph
    file_nbytes: int | None
    costs: tuple[Cost, ...]
    total: Cost
    kinds: tuple[KindSummary, ...]
    cuts: tuple[CutPoint, ...]
    groups: tuple[BranchGroup, ...]
    unknown: Mapping[str, int]

    def cheapest(self, count: int) -> tuple[CutPoint, ...]:
        """Return the cut points that the fewest bytes cross, fewest first; among equals, the earlier one."""
        return tuple(sorted(self.cuts, key=lambda cut: (cut.nbytes, cut.position))[:count])

    def largest(self, count: int) -> tuple[CutPoint, ...]:
        """Return the cut points that the most bytes cross, most first; among equals, the earlier one."""
        return tuple(sorted(self.cuts, key=lambda cut: (-cut.nbytes, cut.position))[:count])


def inspect_graph(graph: Graph) -> Inspection:
    """Count what a model is made of, in time near linear in its operators and what crosses its cut points."""
    costs = operator_costs(graph)
    members: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        members.setdefault(operator.kind, []).append(index)
    kinds = [KindSummary(kind, len(found), _together(graph, costs, found)) for kind, found in members.items()]
    return Inspection(
        graph=graph,
        file_nbytes=graph.source.nbytes if graph.source is not None else None,
        costs=costs,
        total=_together(graph, costs, range(len(costs))),
        kinds=tuple(sorted(kinds, key=lambda k: (-k.cost.macs, -k.cost.moved_bytes, k.kind))),
        cuts=cut_points(graph),
        groups=branch_groups(graph),
        unknown=unknown_kinds(graph),
    )


