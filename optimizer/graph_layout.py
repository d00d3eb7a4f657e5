"""Where the operators and wires of a graph's picture go, in rows, columns and tracks; no pixels.

Each operator has a row of its own, in topological order, so that every cut point is a straight line between two rows
and the wires that cross this line are the tensors that cross the cut. The branches of a group stand side by side in
columns. A wire runs down the middle of a column where no operator is in its way, else down a track beside the column.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.branches import BranchGroup, walk
from search_spaces.graph import Graph

CALLER = -1  # the row, and the origin of wires, of the model's inputs


@dataclass(frozen=True, slots=True)
class Wire:
    """What one operator hands to another.

    Attributes:
        origin: row of the operator that writes, or :data:`CALLER`.
        target: row of the operator that reads.
        column, track: where the wire runs down; track 0 is the middle of the column, the others are to its left.
    """

    origin: int
    target: int
    column: int
    track: int


@dataclass(frozen=True, slots=True)
class Box:
    """The extent of a branch group: half-open rows and columns."""

    group: BranchGroup
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture's geometry.

    Attributes:
        columns: of each operator; its row is its index.
        tracks: how many each column has to its left; one at least for each column that is in use.
        wires: by origin, then longest first.
        boxes: outer ones first.
    """

    columns: tuple[int, ...]
    tracks: tuple[int, ...]
    wires: tuple[Wire, ...]
    boxes: tuple[Box, ...]


def lay_out(graph: Graph, groups: Sequence[BranchGroup]) -> Layout:
    """Place operators and wires.

    Args:
        groups: the outermost ones, as :func:`~search_spaces.branches.branch_groups` returns them.
    """
    columns = [0] * len(graph.operators)
    boxes = _place(groups, columns)
    wires = _route(graph, columns)
    tracks = [0] * (max(columns, default=0) + 1)
    for wire in wires:
        tracks[wire.column] = max(tracks[wire.column], wire.track)
    return Layout(tuple(columns), tuple(tracks), tuple(wires), tuple(boxes))


def _place(groups: Sequence[BranchGroup], columns: list[int]) -> list[Box]:
    """Give the operators of all branches their columns; return the extent of each group, outer ones first."""
    listed = list(walk(groups))
    widths: dict[int, list[int]] = {}  # of a group's branches
    rows: dict[int, tuple[int, int]] = {}
    for group in reversed(listed):  # inner groups first
        widths[id(group)] = [max((sum(widths[id(g)]) for g in b.groups), default=1) for b in group.branches]
        inner = [rows[id(g)] for b in group.branches for g in b.groups]
        first = min(*(b.operators[0] for b in group.branches), *(r[0] for r in inner))
        end = max(*(b.operators[-1] + 1 for b in group.branches), *(r[1] for r in inner))
        rows[id(group)] = (first, end)
    left = {id(group): 0 for group in groups}
    boxes = []
    for group in listed:
        start = column = left[id(group)]
        for branch, width in zip(group.branches, widths[id(group)], strict=True):
            for operator in branch.operators:
                columns[operator] = column
            left |= {id(inner): column for inner in branch.groups}
            column += width
        boxes.append(Box(group, rows[id(group)], (start, column)))
    return boxes


def _route(graph: Graph, columns: Sequence[int]) -> list[Wire]:
    occupied: dict[int, list[int]] = {}  # column → rows of its operators, ascending
    for row, column in enumerate(columns):
        occupied.setdefault(column, []).append(row)
    given = set(graph.inputs)
    ends = {
        (graph.producer.get(tensor, CALLER), row)
        for row, operator in enumerate(graph.operators)
        for tensor in operator.inputs
        if tensor in graph.producer or tensor in given
    }
    used: dict[tuple[int, int], tuple[int, int]] = {}  # column and track → origin and target of the wire seen last
    wires = []
    for origin, target in sorted(ends, key=lambda wire: (wire[0], -wire[1])):
        here, there = columns[origin] if origin != CALLER else columns[target], columns[target]
        middles = [(there, 0), (here, 0)]
        open_middles = [lane for lane in middles if not _any_between(occupied[lane[0]], origin, target)]
        lane = next((lane for lane in open_middles if _is_free(used, lane, origin)), None)
        if lane is None:
            lane = _track(used, max(here, there), origin)
        before = used.get(lane)
        used[lane] = (origin, max(target, before[1]) if before and before[0] == origin else target)
        wires.append(Wire(origin, target, *lane))
    return wires


def _any_between(rows: Sequence[int], first: int, last: int) -> bool:
    """Tell whether one of the ascending rows lies between two, both excluded."""
    index = bisect_right(rows, first)
    return index < len(rows) and rows[index] < last


def _is_free(used: dict[tuple[int, int], tuple[int, int]], lane: tuple[int, int], origin: int) -> bool:
    """Tell whether a wire from ``origin`` may enter a lane; wires of one origin share it, others follow it below."""
    before = used.get(lane)
    return before is None or before[0] == origin or before[1] <= origin


def _track(used: dict[tuple[int, int], tuple[int, int]], column: int, origin: int) -> tuple[int, int]:
    """Return the track beside a column that has this origin already, or the nearest that is free."""
    track, free = 1, 0
    while (before := used.get((column, track))) is not None:
        if before[0] == origin:
            return column, track
        if not free and before[1] <= origin:
            free = track
        track += 1
    return column, free or track
