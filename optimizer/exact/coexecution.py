"""The best co-execution under a model of its cost, exact: a dynamic programme over where parts begin and end.

A part that two processors share takes what CoDL (seed 002) says: T = transform + map + sync + max(sides). A side's
operators take their time on its processor by the share of rows or channels that they compute, halos included, in whole
tiles of the kernel; what is sliced and joined takes its bytes; to meet takes a hand-over. A chain pays once for all of
its operators, so the cheapest way to run operators ``i`` … is the cheapest part from ``i`` on and the cheapest way from
its end on: with the lane that the last part ends on as the state, that is all there is to it. A part that is a group of
branches (seed 003) takes as long as the slower side, to which the second processor's adds its hand-over.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from optimizer.exact.chain_costs import ChainCosts, Seconds
from optimizer.exact.shared_costs import TILES, Ints, SharedTables
from optimizer.exact.shared_ways import Beliefs, Ways, by_first, pairs_of
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.rewrites.locality import axis_of
from search_spaces.rewrites.splits import Axis, Piece, Sides, Split
from search_spaces.spaces.coexecution import CoexecutionSpace, How, Part

COPY_S_PER_BYTE = 1.0 / 8e9
"""What a slice or a concatenation takes on one core, where nobody has measured it."""


@dataclass(frozen=True, slots=True)
class Costed:
    """Parts and what they take by the model, in seconds."""

    parts: tuple[Part, ...]
    cost_s: float


@dataclass(eq=False)
class CoexecutionModel:
    """What parts take.

    Attributes:
        costs: of operators, parts and hand-overs on the lanes of the platform; in seconds.
        corrections: part, how it is split (or ``whole``) and lane → for sides that were measured, ascending, what the
            model said that they take and how many times as long it was; between them it changes evenly.
        usual: how it is split → the same, for parts that are not among the corrections.
        copy_s_per_byte: to slice and to join.
        join_s_per_byte: to join, where that was measured.
    """

    space: CoexecutionSpace
    costs: ChainCosts
    corrections: dict[tuple[int, int, str, str], list[tuple[float, float]]] = field(default_factory=dict)
    usual: dict[str, float] = field(default_factory=dict)
    copy_s_per_byte: float = COPY_S_PER_BYTE
    join_s_per_byte: float | None = None
    _known: dict[Split, tuple[tuple[tuple[int, float], ...], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lane = {p.name: i for i, p in enumerate(self.space.platform.processors)}
        self._rows: list[list[float]] = self.costs.operator_s.tolist()
        platform, pairs = self.space.platform, self.space.pairs
        self._alone, self._pairs = (
            pairs_of(platform, zip(*[self.space.lanes] * 2, strict=True)),
            pairs_of(platform, pairs),
        )
        # Which branches go where is told by a set, so that the other order of a pair is the same once more.
        self._ordered = pairs_of(platform, (p for p in pairs if self._lane[p[0]] < self._lane[p[1]]))
        self._tables = SharedTables(self.space, self.costs)

    def _factor(self, first: int, last: int, how: str, lane: str, believed_s: float) -> float:
        known = self.corrections.get((first, last, how, lane))
        if known is None:
            return self.usual.get(how, 1.0)
        after = bisect(known, (believed_s, math.inf))
        if after in (0, len(known)):
            return known[min(after, len(known) - 1)][1]
        (low_s, low), (high_s, high) = known[after - 1], known[after]
        return low + (high - low) * (believed_s - low_s) / (high_s - low_s)

    def whole_s(self, first: int, last: int, lane: str) -> float:
        """Return what operators take on one lane as a part."""
        i = self._lane[lane]
        seconds, overhead_s = sum(self._rows[i][first:last]), float(self.costs.overhead_s[i])
        return seconds * self._factor(first, last, "whole", lane, seconds + overhead_s) + overhead_s

    def sides_s(self, part: Part) -> tuple[float, float]:
        """Return what the two sides of a part take, without meeting each other."""
        if part.axis is None:
            return self.whole_s(part.first, part.last, part.on[0]), 0.0
        if part.axis == "branches":
            first, second = (tuple((o, 1.0) for o in own) for own in self.space.side_operators(part))
        elif self.space.step(part) is not None:
            first, second = self._work(Split(part.first, part.last, part.axis, (part.cut,)))
        else:
            return math.inf, math.inf
        return self._side_s(part, 0, first), self._side_s(part, 1, second)

    def _side_s(self, part: Part, side: int, work: Sequence[tuple[int, float]]) -> float:
        lane = self._lane[part.on[side]]
        row = self._rows[lane]
        seconds = sum(row[operator] * share for operator, share in work if operator >= 0)
        copied = sum(nbytes for operator, nbytes in work if operator < 0) * self._copy_s_per_byte(part)
        overhead_s = float(self.costs.overhead_s[lane])
        believed_s = seconds + copied + overhead_s
        factor = self._factor(part.first, part.last, str(part.axis), part.on[side], believed_s)
        return (seconds + copied) * factor + overhead_s

    def _work(self, split: Split) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return for each side its operators and the share of their work; -1 stands for bytes that are copied."""
        if split not in self._known:
            sides, graph, axis = self.space.sides(split), self.space.graph, split.axis
            self._known[split] = tuple(
                (*((p.operator, _share(graph, p, axis)) for p in pieces), (-1, float(_sliced(graph, sides, pieces))))
                for pieces in sides.pieces
            )
        return self._known[split]

    def join_s(self, part: Part) -> float:
        """Return what it takes to bring the sides together: to hand over, and to copy what is not where it belongs."""
        if part.axis is None or part.axis == "branches":
            return 0.0
        if self.space.step(part) is None:
            return math.inf
        a, b = (self._lane[lane] for lane in part.on)
        byte_s = self.copy_s_per_byte if self.join_s_per_byte is None else self.join_s_per_byte
        return float(self.costs.hand_over_s[part.last - 1, b, a]) + self.joined_nbytes(part) * byte_s

    def joined_nbytes(self, part: Part) -> int:
        """Return what must be copied to bring the sides of a part together."""
        if part.axis is None or part.axis == "branches" or self.space.step(part) is None:
            return 0
        graph, stays = self.space.graph, self._copy_s_per_byte(part) == 0.0
        shares = self.space.sides(Split(part.first, part.last, part.axis, (part.cut,))).shares
        # What the caller gets is put together for him, wherever it lies.
        return sum(graph.tensors[t].nbytes for t in shares if t in graph.outputs or not stays)

    def _copy_s_per_byte(self, part: Part) -> float:
        """Return what moving a byte takes: nothing where rows lie where they belong, in memory that both lanes share.

        :mod:`search_spaces.rewrites.views` tells when.
        """
        shared = all(self.space.platform[lane].kind == "cpu" for lane in part.on)
        return 0.0 if shared and part.axis == "height" else self.copy_s_per_byte

    def part_s(self, part: Part, before: str | None = None) -> float:
        """Return what a part takes, from the end of the one before it, which ended on that lane."""
        first_s, second_s = self.sides_s(part)
        begin_s = first_s + self._hand_over_s(part.first, before, part.on[0])
        if part.axis is None:
            return begin_s
        other_s = self._hand_over_s(part.first, before or part.on[0], part.on[1])
        if part.axis == "branches":
            other_s += self._hand_over_s(part.last - 1, part.on[1], part.on[0])
        return max(begin_s, second_s + other_s) + self.join_s(part)

    def _hand_over_s(self, operator: int, before: str | None, lane: str) -> float:
        if before is None or before == lane:
            return 0.0
        return float(self.costs.hand_over_s[operator, self._lane[before], self._lane[lane]])

    def cost_s(self, parts: Sequence[Part]) -> float:
        """Return what parts that follow each other take."""
        total, before = 0.0, None
        for part in parts:
            total += self.part_s(part, before)
            before = part.on[0]
        return total

    def price(self, plan: Plan) -> float:
        """Return what a plan of the space takes."""
        return self.cost_s(self.space.parts(plan))

    def best(self, *, chains: bool = True, splits: bool = True, branches: bool = True) -> Costed:
        """Return the parts that take the least, over all of the space.

        Args:
            chains: whether a split part may have more than one operator.
            splits: whether there may be split parts at all.
            branches: whether branches may run side by side.
        """
        count = len(self.space.graph.operators)
        beliefs = self._beliefs()
        ends = sorted({self._lane[lane] for lane in (*self.space.lanes, *(a for a, _ in self.space.pairs))})
        rest_s = np.zeros((count + 1, len(self._rows)))
        chosen: list[dict[int | None, Part]] = [{} for _ in range(count)]
        for first in reversed(range(count)):
            most = (count if chains else first + 1) if splits else 0
            ways = self._ways(beliefs, first, np.arange(first + 1, count + 1), most, rest_s, branches=branches)
            for before in ends if first else [None]:
                taken_s, chosen[first][before] = _least(ways, beliefs.hand_over_s[first], before)
                rest_s[first, before or 0] = taken_s
        parts: list[Part] = []
        before, at = None, 0
        while at < count:
            parts.append(chosen[at][before])
            before, at = self._lane[parts[-1].on[0]], parts[-1].last
        return Costed(tuple(parts), self.cost_s(parts))

    def _beliefs(self) -> Beliefs:
        hand_over_s = np.array(self.costs.hand_over_s)
        hand_over_s[:, np.arange(len(self._rows)), np.arange(len(self._rows))] = 0.0
        join_s = self.copy_s_per_byte if self.join_s_per_byte is None else self.join_s_per_byte
        corrections = by_first(self.corrections)
        return Beliefs(self.costs, hand_over_s, corrections, self.usual, self.copy_s_per_byte, join_s)

    def _ways(
        self,
        beliefs: Beliefs,
        first: int,
        lasts: Ints,
        most: int,
        rest_s: Seconds,
        *,
        branches: bool = False,
    ) -> list[Ways]:
        """Return all ways to run the parts from one operator on; of lanes that are alike the first ones.

        Args:
            lasts: where they may end, ascending.
            most: where chains that are split end at last.
        """
        found = [beliefs.whole(first, lasts, self._alone, rest_s)]
        for axis in self.space.axes if most > first else ():
            chains = self._tables.split(first, axis).between(int(lasts[0]), most)
            found.append(beliefs.shared(chains, self._pairs, rest_s))
        if branches:
            found.append(beliefs.shared(self._tables.branches(first), self._ordered, rest_s))
        return [ways for ways in found if ways.first_s.size]

    def greedy(self) -> Costed:
        """Return CoDL's plan: each operator its best split, then chains that grow as long as that saves time."""
        count = len(self.space.graph.operators)
        parts: list[Part] = []
        before: str | None = None
        first = 0
        while first < count:
            part = self._best_single(first, first + 1, before)
            while part.axis is not None and part.last < count:
                longer = self._best_single(first, part.last + 1, before, axis=part.axis)
                alone = self._best_single(part.last, part.last + 1, part.on[0])
                apart_s = self.part_s(part, before) + self.part_s(alone, part.on[0])
                if longer.axis is None or self.part_s(longer, before) >= apart_s:
                    break
                part = longer
            if parts and part.axis is None and parts[-1].axis is None and parts[-1].on == part.on:
                parts[-1] = Part(parts[-1].first, part.last, part.on)
            else:
                parts.append(part)
            before, first = part.on[0], part.last
        return Costed(tuple(parts), self.cost_s(parts))

    def _best_single(self, first: int, last: int, before: str | None, *, axis: How | None = None) -> Part:
        beliefs = self._beliefs()
        nothing_s = np.zeros((last + 1, len(self._rows)))
        found = self._ways(beliefs, first, np.array([last]), last, nothing_s)
        if axis is not None:
            found = [ways for ways in found if ways.how == axis] or found
        return _least(found, beliefs.hand_over_s[first], None if before is None else self._lane[before])[1]


def _least(found: Sequence[Ways], hand_over_s: Seconds, before: int | None) -> tuple[float, Part]:
    """Return the least that a part takes and what is behind it, and the part."""
    (taken_s, at), ways = min(((ways.least(hand_over_s, before), ways) for ways in found), key=lambda pair: pair[0][0])
    return taken_s, ways.part(at)


def _share(graph: Graph, piece: Piece, axis: Axis) -> float:
    """Return the share of an operator's work that a side does, in whole tiles."""
    operator = graph.operators[piece.operator]
    rows = piece.rows[1] - piece.rows[0]
    tensor = operator.outputs[0]
    if axis == "height" and operator.kind == "MEAN":
        tensor = operator.inputs[0]
    shape = graph.tensors[tensor].shape
    whole = shape[axis_of(shape, axis) or 0]
    tile = TILES[axis]
    return (-(-rows // tile) * tile) / (-(-whole // tile) * tile)


def _sliced(graph: Graph, sides: Sides, pieces: Sequence[Piece]) -> int:
    """Return the bytes that a side slices from what the chain reads."""
    inside = range(sides.split.first, sides.split.last)
    found: dict[tuple[int, int, int], int] = {}
    for piece in pieces:
        for tensor, need in zip(graph.operators[piece.operator].inputs, piece.needs, strict=True):
            if need is None or graph.tensors[tensor].constant or graph.producer.get(tensor, -1) in inside:
                continue
            held = graph.tensors[tensor]
            whole = held.shape[need.dimension]
            if need.last - need.first < whole:
                found[tensor, need.first, need.last] = held.nbytes * (need.last - need.first) // whole
    return sum(found.values())
