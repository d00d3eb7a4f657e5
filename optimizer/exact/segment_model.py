"""The best plan of a space of segments under a cost model, by dynamic programming over block borders.

The time of a part that two processors share follows CoDL (seed 002): T = transform + map + sync + max(sides). A side's
operators take their time in proportion to its rows or channels, halos included, in whole tiles of the kernel; slicing
and joining are priced by bytes; a join is a transfer. A chain pays these once for all of its operators.
Branches side by side (seed 003) take until the last one has ended and its outputs have been transferred. The cheapest
way to run the operators from one on is a block from there and the cheapest way from its end on; the state is the
processor on which the last block ends.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from evaluators.simulated import COPY_S_PER_BYTE
from optimizer.exact.blocks import Search, block_of
from optimizer.exact.chain_costs import NEVER_S, ChainCosts, Seconds
from optimizer.exact.shared_costs import SharedTables, work_shares
from optimizer.exact.shared_ways import PartEstimates, Ways, by_first, pairs_of
from optimizer.exact.side_by_side import Timed, placed_s, run_s
from search_spaces.core.plan import Plan
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import AXES, EACH, Block, SegmentSpace, Way
from search_spaces.spaces.segments import Segment
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import Part


@dataclass(frozen=True, slots=True)
class Costed:
    """Blocks, their parts, and their seconds under the model."""

    blocks: tuple[Block, ...]
    parts: tuple[Part, ...]
    cost_s: float


@dataclass(eq=False)
class SegmentModel:
    """Times of parts.

    Attributes:
        costs: of operators, parts and transfers on the processors of the platform; in seconds.
        corrections: first, last, split (or ``whole``) and processor → (seconds of the model, measured / model) of
            measured sides, ascending; linear between them.
        usual: split (or ``whole``) → measured / model, for parts that are not among the corrections.
        copy_s_per_byte: seconds to slice, and to join.
        join_s_per_byte: seconds to join, if measured.
    """

    space: SegmentSpace
    costs: ChainCosts
    corrections: dict[tuple[int, int, str, str], list[tuple[float, float]]] = field(default_factory=dict)
    usual: dict[str, float] = field(default_factory=dict)
    copy_s_per_byte: float = COPY_S_PER_BYTE
    join_s_per_byte: float | None = None
    _known: dict[tuple[int, int, Axis, int], tuple[tuple[Sequence[float], int], ...]] = field(default_factory=dict)
    _run_s: dict[int, Seconds] = field(default_factory=dict)  # of the runs of a segment, before corrections

    def __post_init__(self) -> None:
        self._processor = {p.name: i for i, p in enumerate(self.space.platform.processors)}
        self._rows: list[list[float]] = self.costs.operator_s.tolist()
        platform, pairs = self.space.platform, self.space.pairs
        self.alone, self.pairs = (
            pairs_of(platform, zip(*[self.space.processors] * 2, strict=True)),
            pairs_of(platform, pairs),
        )
        self.tables = SharedTables(self.space, self.costs)

    def _factor(self, first: int, last: int, how: str, processor: str, model_s: float) -> float:
        known = self.corrections.get((first, last, how, processor))
        if known is None:
            return self.usual.get(how, 1.0)
        after = bisect(known, (model_s, math.inf))
        if after in (0, len(known)):
            return known[min(after, len(known) - 1)][1]
        (low_s, low), (high_s, high) = known[after - 1], known[after]
        return low + (high - low) * (model_s - low_s) / (high_s - low_s)

    def whole_s(self, first: int, last: int, processor: str) -> float:
        """Return the seconds of operators on one processor as a part."""
        i = self._processor[processor]
        seconds, overhead_s = sum(self._rows[i][first:last]), float(self.costs.overhead_s[i])
        return seconds * self._factor(first, last, "whole", processor, seconds + overhead_s) + overhead_s

    def sides_s(self, part: Part) -> tuple[float, float]:
        """Return the seconds of the two sides of a split part, without the join."""
        if part.axis is None:
            return self.whole_s(part.first, part.last, part.on[0]), 0.0
        if part.axis == "branches" or self.space.step(part) is None:
            return math.inf, math.inf
        first, second = self._work(part, part.axis)
        return self._side_s(part, 0, first), self._side_s(part, 1, second)

    def _side_s(self, part: Part, side: int, work: tuple[Sequence[float], int]) -> float:
        processor, (shares, sliced_nbytes) = self._processor[part.on[side]], work
        own_s = reversed(self._rows[processor][part.first : part.last])
        seconds = sum(own * share for own, share in zip(own_s, shares, strict=True))
        copied = sliced_nbytes * self._copy_s_per_byte(part)
        overhead_s = float(self.costs.overhead_s[processor])
        model_s = seconds + copied + overhead_s
        factor = self._factor(part.first, part.last, str(part.axis), part.on[side], model_s)
        return (seconds + copied) * factor + overhead_s

    def _work(self, part: Part, axis: Axis) -> tuple[tuple[Sequence[float], int], ...]:
        """Return for each side its shares of the operators' work, the last operator first, and the bytes it slices."""
        key = part.first, part.last, axis, part.cut
        if key not in self._known:
            chains, length = self.space.chains(part.last, axis), part.last - part.first
            at = chains.cuts.tolist().index(part.cut)
            shares = work_shares(self.space.graph, part.last, axis, chains.rows[at, :, :length])
            sliced = chains.sliced_nbytes[at, :, length - 1]
            self._known[key] = tuple(zip(shares.tolist(), sliced.tolist(), strict=True))
        return self._known[key]

    def join_s(self, part: Part) -> float:
        """Return the seconds to join the sides: a transfer, and copies of what is not in place."""
        if part.axis is None or part.axis == "branches":
            return 0.0
        if self.space.step(part) is None:
            return math.inf
        a, b = (self._processor[processor] for processor in part.on)
        return float(self.costs.transfer_s[part.last - 1, b, a]) + self.joined_nbytes(part) * self._join_s_per_byte

    @property
    def _join_s_per_byte(self) -> float:
        return self.copy_s_per_byte if self.join_s_per_byte is None else self.join_s_per_byte

    def joined_nbytes(self, part: Part) -> int:
        """Return the bytes to copy when the sides of a part are joined."""
        if part.axis is None or part.axis == "branches" or self.space.step(part) is None:
            return 0
        chains = self.space.chains(part.last, part.axis)
        # Outputs of the model are always joined into one buffer.
        nbytes = chains.given_nbytes if self._copy_s_per_byte(part) == 0.0 else chains.joined_nbytes
        return int(nbytes[part.last - part.first - 1])

    def _copy_s_per_byte(self, part: Part) -> float:
        """Return the seconds to move a byte: 0 where rows lie in place, in memory that both processors share.

        :mod:`search_spaces.rewrites.views` has the condition.
        """
        shared = all(self.space.platform[processor].kind == "cpu" for processor in part.on)
        return 0.0 if shared and part.axis == "height" else self.copy_s_per_byte

    def part_s(self, part: Part, before: str | None = None, after: str | None = None) -> float:
        """Return the seconds of a part after one that ended on a given processor.

        Args:
            after: the processor of the next part, on which branches are joined.
        """
        if part.axis == "branches":
            return self._branches_s(part, before, after)
        first_s, second_s = self.sides_s(part)
        begin_s = first_s + self._transfer_s(part.first, before, part.on[0])
        if part.axis is None:
            return begin_s
        other_s = self._transfer_s(part.first, before or part.on[0], part.on[1])
        return max(begin_s, second_s + other_s) + self.join_s(part)

    def _branches_s(self, part: Part, before: str | None, after: str | None) -> float:
        segment = self.space.segment(part.first)
        timed = self.timed(segment, self.transfers_s, np.zeros(1 if after is None else len(self._rows)))
        entered = None if before is None else self._processor[before]
        left = None if after is None else self._processor[after]
        return placed_s(segment, [self._processor[name] for name in part.on], timed, entered, left)

    def timed(self, segment: Segment, transfer_s: Seconds, behind_s: Seconds) -> Timed:
        """Return the seconds of a segment's runs, corrected by measurements."""
        if segment.first not in self._run_s:
            self._run_s[segment.first] = run_s(segment, self.costs)
        own = self._run_s[segment.first].copy()
        for processor, i in self._processor.items():
            whole_s = float(own[i].sum()) + float(self.costs.overhead_s[i])
            own[i] *= self._factor(segment.first, segment.joint, "branches", processor, whole_s)
        return Timed(np.minimum(own, NEVER_S), self.costs.overhead_s, transfer_s, behind_s)

    def branch_s(self, part: Part) -> dict[str, float]:
        """Return the seconds of each processor of a part of branches, without joins."""
        segment = self.space.segment(part.first)
        timed = self.timed(segment, self.transfers_s, np.zeros(1))
        found: dict[str, float] = {}
        for stage in segment.stages(part.on):
            name = part.on[stage[0]]
            processor = self._processor[name]
            own_s = float(timed.run_s[processor, list(stage)].sum()) + float(self.costs.overhead_s[processor])
            found[name] = found.get(name, 0.0) + own_s
        return found

    @cached_property
    def transfers_s(self) -> Seconds:
        """Seconds of transfers, shape ``(n, L, L)``; 0 within one processor."""
        found = np.array(self.costs.transfer_s)
        found[:, np.arange(len(self._rows)), np.arange(len(self._rows))] = 0.0
        return found

    def _transfer_s(self, operator: int, before: str | None, processor: str) -> float:
        own = self._processor
        return 0.0 if before is None else float(self.transfers_s[operator, own[before], own[processor]])

    def processor(self, name: str) -> int:
        """Return the index of a processor in the platform."""
        return self._processor[name]

    def cost_s(self, parts: Sequence[Part], before: str | None = None) -> float:
        """Return the seconds of consecutive parts after one that ended on a given processor."""
        total = 0.0
        for number, part in enumerate(parts):
            after = parts[number + 1].on[0] if number + 1 < len(parts) else None
            total += self.part_s(part, before, after)
            before = after if part.axis == "branches" else part.on[0]
        return total

    def price(self, plan: Plan) -> float:
        """Return the seconds of a plan of the space."""
        return self.cost_s(self.space.parts(plan))

    def best(
        self, *, chains: bool = True, splits: bool = True, branches: bool = True, axis: Axis | None = None
    ) -> Costed:
        """Return the cheapest blocks of the space.

        Args:
            chains: whether a split part may have more than one operator.
            splits: whether there may be split parts at all.
            branches: whether branches may run side by side.
            axis: the only one along which to split, except operators of a module that cannot be; None for all.
        """
        return self._costed(Search(self, chains=chains, splits=splits, branches=branches, axis=axis).blocks())

    def _costed(self, blocks: Sequence[Block]) -> Costed:
        parts = self.space.expand(blocks)
        return Costed(tuple(blocks), parts, self.cost_s(parts))

    def estimates(self) -> PartEstimates:
        """Return the estimates of parts as arrays."""
        corrections, copy_s = by_first(self.corrections), self.copy_s_per_byte
        return PartEstimates(self.costs, self.transfers_s, corrections, self.usual, copy_s, self._join_s_per_byte)

    def greedy(self) -> Costed:
        """Return CoDL's plan: each operator its best split, then chains that grow as long as that saves time.

        A segment of several operators, in which only one block can begin, is one block.
        """
        count = len(self.space.graph.operators)
        blocks: list[Block] = []
        before: str | None = None
        first = 0
        while first < count:
            block = self._single(first, self.space.segment(first).last, before)
            while block.way in AXES and block.last < count:
                after = self.space.segment(block.last).last
                longer = self._single(first, after, before, block.way)
                alone = self._single(block.last, after, block.on)
                apart_s = self.block_s(block, before) + self.block_s(alone, block.on)
                if longer.way == "whole" or self.block_s(longer, before) >= apart_s:
                    break
                block = longer
            if blocks and block.way == "whole" and blocks[-1].way == "whole" and blocks[-1].on == block.on:
                blocks[-1] = replace(blocks[-1], last=block.last)
            else:
                blocks.append(block)
            before, first = block.on, block.last
        return self._costed(blocks)

    def block_s(self, block: Block, before: str | None) -> float:
        """Return the seconds of a block after one that ended on a given processor."""
        return self.cost_s(self.space.parts_of(block), before)

    def splits_s(self, first: int, last: int, before: str | None) -> dict[Block, float]:
        """Return the seconds of every way to split some operators as one block, after a given processor."""
        estimates = self.estimates()
        place, found = None if before is None else self._processor[before], dict[Block, float]()
        for axis in self.space.axes:
            steps = {cut: step for step, cut in self.space.cuts(first, last, axis).items()}
            if not steps:
                continue
            ways = self._chained(first, last, axis, estimates)
            rows = ways.total_s(self.transfers_s[first], place).tolist()
            for cut, row in zip(ways.cuts.tolist(), rows, strict=True):
                for (on, other), seconds in zip(self.pairs.names, row, strict=True):
                    found[Block(first, last, axis, on, other, steps[cut])] = seconds
        return found

    def each_s(self, first: int, last: int, before: str | None) -> dict[Block, float]:
        """Return the seconds of every way to run operators as one block that splits each by itself."""
        alone, main = self.space.split_alone(first, last), self.pairs.first
        if not alone:
            return {}
        estimates, place = self.estimates(), None if before is None else self._processor[before]
        total_s: Seconds = np.zeros((len(EACH), GRID - 1, len(main)))
        if place is not None and alone[0] != first:
            total_s += self.transfers_s[first, place, main]
        whole = first
        for operator in (*alone, last):
            if whole < operator:
                total_s += np.array([self.whole_s(whole, operator, name) for name in self._processor])[main]
            if operator < last:
                ways = self.ways_alone(operator, estimates)
                total_s += self.by_share(operator, ways, place if operator == first else None)
            whole = operator + 1
        found = dict[Block, float]()
        for way, rows in zip(EACH, total_s.tolist(), strict=True):
            for share, row in enumerate(rows, 1):
                for (on, other), seconds in zip(self.pairs.names, row, strict=True):
                    found[Block(first, last, way, on, other, share)] = seconds
        return found

    def ways_alone(self, operator: int, estimates: PartEstimates) -> tuple[Ways, ...]:
        """Return the ways to split an operator by itself, along each axis."""
        return tuple(self._chained(operator, operator + 1, axis, estimates) for axis in self.space.axes)

    def _chained(self, first: int, last: int, axis: Axis, estimates: PartEstimates) -> Ways:
        """Return the ways to split operators as one chain, without the rest of the plan."""
        chains = self.tables.split(first, axis).between(last, last)
        return estimates.shared(chains, self.pairs, np.zeros((last + 1, len(self._rows))))

    def by_share(self, operator: int, ways: Sequence[Ways], before: int | None) -> Seconds:
        """Return the seconds of ways to split an operator by itself, shape ``(2, shares, pairs)``, in each of two ways.

        Args:
            before: the processor on which the part before it ended.
        """
        space, transfer_s, rows = self.space, self.transfers_s[operator], []
        taken_s = dict(zip(space.axes, (each.total_s(transfer_s, before) for each in ways), strict=True))
        cuts = {axis: list(space.cuts(operator, operator + 1, axis).values()) for axis in space.axes}
        for way in EACH:
            for share in range(1, GRID):
                axis, cut = space.alone(operator, way, share) or ("height", 0)
                rows.append(taken_s[axis][cuts[axis].index(cut)])
        return np.array(rows).reshape(len(EACH), GRID - 1, -1)

    def _single(self, first: int, last: int, before: str | None, axis: Way | None = None) -> Block:
        """Return the cheapest way to run a block, split or whole; split along ``axis`` if that is possible."""
        estimates, place = self.estimates(), None if before is None else self._processor[before]
        whole = estimates.whole(first, np.array([last]), self.alone, np.zeros((last + 1, len(self._rows))))
        split = (self._chained(first, last, each, estimates) for each in self.space.axes)
        found = [ways for ways in (whole, *split) if ways.first_s.size]
        if axis is not None:
            found = [ways for ways in found if ways.how == axis] or found
        transfer_s = self.transfers_s[first]
        (_, at), ways = min(((ways.least(transfer_s, place), ways) for ways in found), key=lambda pair: pair[0][0])
        return block_of(self.space, ways, at)
