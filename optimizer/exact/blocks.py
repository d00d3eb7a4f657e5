"""The cheapest blocks under a cost model, by dynamic programming from the last operator to the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optimizer.exact.chain_costs import NEVER_S, Seconds
from optimizer.exact.shared_ways import Ways
from optimizer.exact.side_by_side import side_by_side
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import EACH, Block, SegmentSpace
from search_spaces.spaces.segments import Segment
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import Part

if TYPE_CHECKING:
    from optimizer.exact.segment_model import SegmentModel

_TIE = 1e-13  # relative to the network's latency: above rounding, below any modelled difference


class _Best(NamedTuple):
    """The cheapest block from some operator on, and the cost from its start to the end."""

    cost_s: float
    block: Block


def block_of(space: SegmentSpace, ways: Ways, at: int) -> Block:
    """Return entry ``at`` of some ways as a block."""
    row, pair = divmod(at, len(ways.pairs.names))
    last, (on, other) = int(ways.lasts[row]), ways.pairs.names[pair]
    if ways.how is None:
        return Block(ways.first, last, "whole", on)
    step = space.step(Part(ways.first, last, (on, other), ways.how, int(ways.cuts[row])))
    return Block(ways.first, last, ways.how, on, other, step or 1)


class Search:
    """The dynamic programme over blocks, from the last operator to the first one."""

    def __init__(self, model: SegmentModel, *, chains: bool, splits: bool, branches: bool, axis: Axis | None) -> None:
        self._model, self._space = model, model.space
        self._chains, self._branches = chains, branches
        self._axes = [each for each in model.space.axes if splits and axis in {None, each}]
        self._each_ways = [at for at, (tried, _) in enumerate(EACH.values()) if tried in self._axes]
        self._estimates = model.estimates()
        self._processors = [p.name for p in model.space.platform.processors]
        count = len(model.space.graph.operators)
        # Least cost from an operator on, by the processor before it.
        self._rest_s = np.zeros((count + 1, len(self._processors)))
        self._chosen: list[dict[int | None, Block]] = [{} for _ in range(count)]
        self._whole_s = np.full((count + 1, len(self._processors)), np.inf)  # the same, of a whole block on a processor
        self._whole_last = np.zeros((count + 1, len(self._processors)), dtype=np.int64)
        self._beyond_s, self._beyond_last = np.copy(self._whole_s), np.copy(self._whole_last)  # beyond its segment
        operator_s = model.costs.operator_s
        # Of plans with equal cost the one with the fewest blocks is chosen.
        self._tie_s = _TIE * float(np.where(np.isfinite(operator_s), operator_s, 0.0).max(axis=0).sum())
        self._each_s: dict[int, Seconds] = {}  # from an operator on, each split alone: (2, ways, shares, pairs)
        self._alone_s: dict[int, tuple[Ways, ...]] = {}  # ways to split one operator alone, along each axis

    def blocks(self) -> tuple[Block, ...]:
        """Return the cheapest blocks."""
        count = len(self._chosen)
        every = sorted(
            {self._model.processor(name) for name in (*self._space.processors, *(a for a, _ in self._space.pairs))}
        )
        for first in reversed(range(count)):
            ways = self._ways(first)
            if self._axes and len(self._space.segment(first)) > 1:
                self._split_each(first)
            for before in every if first else [None]:
                found = list(self._from(first, before, ways))
                best = min(found, key=lambda each: each.cost_s)
                self._chosen[first][before] = best.block
                self._rest_s[first, before or 0] = best.cost_s + self._tie_s
        found_blocks: list[Block] = []
        before, at = None, 0
        while at < count:
            found_blocks.append(self._chosen[at][before])
            before, at = self._model.processor(found_blocks[-1].on), found_blocks[-1].last
        return tuple(found_blocks)

    def _ways(self, first: int) -> list[Ways]:
        """Return all ways to run the blocks from an operator on, whole or split as one chain."""
        model, count = self._model, len(self._chosen)
        least = self._space.segment(first).last  # where the next block may begin
        lasts = np.arange(least, count + 1)
        whole = self._estimates.whole(first, lasts, model.alone, self._rest_s)
        rows, processors = whole.first_s.argmin(axis=0), model.alone.first
        self._whole_s[first, processors] = whole.first_s[rows, np.arange(len(processors))]
        self._whole_last[first, processors] = lasts[rows]
        if len(lasts) > 1:
            rows = 1 + whole.first_s[1:].argmin(axis=0)
            self._beyond_s[first, processors] = whole.first_s[rows, np.arange(len(processors))]
            self._beyond_last[first, processors] = lasts[rows]
        found = [whole]
        for axis in self._axes:
            chains = model.tables.split(first, axis).between(least, count if self._chains else first + 1)
            found.append(self._estimates.shared(chains, model.pairs, self._rest_s))
        return [ways for ways in found if ways.first_s.size]

    def _from(self, first: int, before: int | None, ways: Sequence[Ways]) -> Iterator[_Best]:
        """Yield the cheapest block of each kind."""
        transfer_s = self._estimates.transfer_s[first]
        for each in ways:
            cost_s, at = each.least(transfer_s, before)
            yield _Best(cost_s, block_of(self._space, each, at))
        if first in self._alone_s:
            yield self._each(first, before)
        segment = self._space.segment(first)
        if self._branches and segment.runs and first == segment.first:
            yield self._side_by_side(segment, before)
            if segment.joint < segment.last:
                yield self._in_turns(segment, before)

    # Each operator of a segment by itself; the last one and what follows whole

    def _split_each(self, first: int) -> None:
        """Compute the cost of splitting operators one by one, from one on to the end of its segment.

        The block ends with the segment, or (second row) goes on, with its last operator and what follows whole.
        """
        model, space = self._model, self._space
        segment, main = space.segment(first), model.pairs.first
        if first + 1 == segment.last:
            behind_s = self._rest_s[segment.last, main], np.full(len(main), np.inf)
            self._each_s[segment.last] = np.broadcast_to(
                np.stack(behind_s)[:, None, None], (2, len(EACH), GRID - 1, len(main))
            )
        ways = model.ways_alone(first, self._estimates)
        inside = self._each_s[first + 1]
        joins = first + 1 == segment.last and not space.concatenates(first)
        if not joins and any(each.first_s.size for each in ways):
            self._alone_s[first] = ways
            found = model.by_share(first, ways, None) + inside
        else:
            after = next((o for o in range(first + 1, segment.last) if o in self._alone_s), segment.last)
            whole_s = np.array([model.whole_s(first, after, self._processors[processor]) for processor in main])
            found = whole_s + self._each_s[after]
        if not any(o in self._alone_s for o in range(first, segment.last - 1)):
            found[1] = self._beyond_s[first, main]
        self._each_s[first] = found

    def _each(self, first: int, before: int | None) -> _Best:
        total_s = self._model.by_share(first, self._alone_s[first], before) + self._each_s[first + 1]
        total_s = total_s[:, self._each_ways]
        beyond, way, share, pair = np.unravel_index(int(total_s.argmin()), total_s.shape)
        on, other = self._model.pairs.names[pair]
        last = self._space.segment(first).last
        if beyond:
            tail = 1 + max(o for o in range(first, last - 1) if o in self._alone_s)
            last = int(self._beyond_last[tail, self._model.processor(on)])
        cost_s = float(total_s[beyond, way, share, pair])
        return _Best(cost_s, Block(first, last, list(EACH)[self._each_ways[way]], on, other, int(share) + 1))

    # Runs beside each other

    def _in_turns(self, segment: Segment, before: int | None) -> _Best:
        """Return the best block of a segment whose runs are on one processor and whose reader is on another."""
        transfer_s, best = self._estimates.transfer_s, _Best(np.inf, Block(segment.first, segment.last, "whole", ""))
        for processor, name in enumerate(self._processors):
            own_s = self._model.whole_s(segment.first, segment.joint, name)
            begin_s = own_s + (0.0 if before is None else float(transfer_s[segment.first, before, processor]))
            behind_s = transfer_s[segment.joint, processor] + self._whole_s[segment.joint]
            behind_s[processor] = np.inf
            at = int(behind_s.argmin())
            if begin_s + behind_s[at] < best.cost_s:
                on, last = self._processors[at], int(self._whole_last[segment.joint, at])
                code = self._space.code((name,) * len(segment.runs), on, name)
                best = _Best(begin_s + float(behind_s[at]), Block(segment.first, last, "branches", on, name, code))
        return best

    def _side_by_side(self, segment: Segment, before: int | None) -> _Best:
        ends = segment.joint == segment.last
        behind_s = np.zeros(1) if ends else np.minimum(self._whole_s[segment.joint], NEVER_S)
        timed = self._model.timed(segment, self._estimates.transfer_s, behind_s)
        cost_s, placed, at = side_by_side(segment, self._model.costs).least(timed, before)
        on = self._processors[at]
        where = [self._processors[processor] for processor in placed]
        other = next((name for name in where if name != on), None)
        if other is None:
            return _Best(np.inf, Block(segment.first, segment.last, "whole", on))
        last = segment.last if ends else int(self._whole_last[segment.joint, at])
        return _Best(cost_s, Block(segment.first, last, "branches", on, other, self._space.code(where, on, other)))
