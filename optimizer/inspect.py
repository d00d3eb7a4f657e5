"""What a model is made of, as numbers; :mod:`optimizer.inspect_text` and the pictures show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        kinds=tuple(sorted(kinds, key=lambda k: (-k.cost.macs, -moved_bytes(k.cost), k.kind))),
        cuts=cut_points(graph),
        groups=branch_groups(graph),
        unknown=unknown_kinds(graph),
    )


def moved_bytes(cost: Cost) -> int:
    """Return the bytes that are read and written together."""
    return cost.read_bytes + cost.written_bytes


def to_json(found: Inspection) -> dict[str, Any]:
    """Return the document that ``optimize inspect --json`` prints.

    Sizes are bytes, ``intensity`` is MACs per byte. Operators, tensors and groups are named by their index. Groups come
    in one flat list: ``within`` is the index in it of the innermost group of whose branches one holds this group.
    """
    graph = found.graph
    return {
        "schema_version": SCHEMA_VERSION,
        "model": graph.name,
        "graph_digest": graph.digest,
        "file_nbytes": found.file_nbytes,
        "totals": {"operators": len(graph.operators), **_cost_json(found.total)},
        "inputs": [_tensor_json(graph, i) for i in graph.inputs],
        "outputs": [_tensor_json(graph, i) for i in graph.outputs],
        "kinds": [{"kind": k.kind, "count": k.count, **_cost_json(k.cost)} for k in found.kinds],
        "operators": [
            {
                "index": index,
                "kind": operator.kind,
                "parts": [part.kind for part in operator.parts],
                "outputs": [_tensor_json(graph, i) for i in operator.outputs],
                **_cost_json(cost),
            }
            for index, (operator, cost) in enumerate(zip(graph.operators, found.costs, strict=True))
        ],
        "cut_points": [
            {"position": c.position, "nbytes": c.nbytes, "tensors": [_tensor_json(graph, i) for i in c.tensors]}
            for c in found.cuts
        ],
        "branch_groups": _groups_json(found.groups),
        "unknown_kinds": dict(found.unknown),
    }


def _together(graph: Graph, costs: tuple[Cost, ...], operators: Iterable[int]) -> Cost:
    chosen = tuple(operators)
    return Cost(
        macs=sum(costs[o].macs for o in chosen),
        parameters=parameter_total(graph, chosen),
        read_bytes=sum(costs[o].read_bytes for o in chosen),
        written_bytes=sum(costs[o].written_bytes for o in chosen),
        known=all(costs[o].known for o in chosen),
    )


def _cost_json(cost: Cost) -> dict[str, Any]:
    return {
        "macs": cost.macs,
        "parameters": cost.parameters,
        "read_bytes": cost.read_bytes,
        "written_bytes": cost.written_bytes,
        "intensity": cost.intensity,
        "known": cost.known,
    }


def _tensor_json(graph: Graph, index: int) -> dict[str, Any]:
    tensor = graph.tensors[index]
    return {
        "index": index,
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "nbytes": tensor.nbytes,
    }


def _groups_json(groups: Iterable[BranchGroup]) -> list[dict[str, Any]]:
    listed = list(walk(groups))
    within = {id(inner): index for index, g in enumerate(listed) for b in g.branches for inner in b.groups}
    return [
        {
            "entry": group.entry,
            "exit": group.exit,
            "within": within.get(id(group)),
            "branches": [list(branch.operators) for branch in group.branches],
        }
        for group in listed
    ]
