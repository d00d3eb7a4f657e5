"""Times of both sides of every shared part on all processors: the tables of the co-execution optimum.

Operators' seconds and copied bytes do not depend on corrections; they are computed once for each first operator.
Corrections, copies and pairs of processors are then a few steps over whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.graph import Graph
from search_spaces.rewrites.locality import axis_of
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import SegmentSpace

TILES: Mapping[Axis, int] = {"height": 1, "channels": 8}
"""Rows or channels in a tile of a kernel."""

Ints = NDArray[np.int64]
_Row = tuple[Ints, Ints, Seconds, Seconds, Seconds, Seconds]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The parts that begin with one operator and are shared in one way: R of them, on any of L processors.

    Attributes:
        lasts, cuts: shape ``(R,)``: as in :class:`~search_spaces.spaces.shared_parts.Part`; ``lasts`` ascend.
        seconds: shape ``(2, R, L)``: of each side's operators.
        sliced_nbytes: shape ``(2, R)``: sliced by each side, where slicing copies.
        joined_nbytes: shape ``(R,)``: copied by the join.
        given_nbytes: shape ``(R,)``: the same, where each side writes in place.
    """

    first: int
    how: Axis
    lasts: Ints
    cuts: Ints
    seconds: Seconds
    sliced_nbytes: Seconds
    joined_nbytes: Seconds
    given_nbytes: Seconds

    def between(self, least: int, most: int) -> Shared:
        """Return the parts that end from ``least`` to ``most``."""
        a, b = np.searchsorted(self.lasts, (least, most + 1))
        return Shared(
            self.first,
            self.how,
            self.lasts[a:b],
            self.cuts[a:b],
            self.seconds[:, a:b],
            self.sliced_nbytes[:, a:b],
            self.joined_nbytes[a:b],
            self.given_nbytes[a:b],
        )


class SharedTables:
    """The shared parts of a space, by the operator that they begin with."""

    def __init__(self, space: SegmentSpace, costs: ChainCosts) -> None:
        self._space, self._costs = space, costs
        self._axes: dict[Axis, dict[int, Shared]] = {}

    def split(self, first: int, axis: Axis) -> Shared:
        """Return the chains from one operator on, split along an axis at all steps of the grid."""
        if axis not in self._axes:
            self._axes[axis] = self._all_split(axis)
        return self._axes[axis][first]

    def _all_split(self, axis: Axis) -> dict[int, Shared]:
        """Return the chains by their first operator; they are known by the last one."""
        count = len(self._space.graph.operators)
        found: list[list[_Row]] = [[] for _ in range(count)]
        for last in range(1, count + 1):
            chains = self._space.chains(last, axis)
            longest = chains.rows.shape[2]
            if not longest:
                continue
            operators = np.arange(last - 1, last - 1 - longest, -1)
            tile = TILES[axis]
            whole = np.array([computed(self._space.graph, int(i), axis) for i in operators])
            share = (-(-chains.rows // tile) * tile) / (-(-whole // tile) * tile)
            # Infinite where a processor cannot run a side; entries beyond a cut's longest chain are not read.
            own = self._costs.operator_s[:, operators].T
            with np.errstate(invalid="ignore"):
                seconds = np.cumsum(share[..., None] * own, axis=2)
            for d in range(longest):
                ok = chains.lengths > d
                size = int(ok.sum())
                found[last - 1 - d].append(
                    (
                        np.full(size, last),
                        chains.cuts[ok],
                        seconds[ok, :, d].swapaxes(0, 1),
                        chains.sliced_nbytes[ok, :, d].T.astype(np.float64),
                        np.full(size, float(chains.joined_nbytes[d])),
                        np.full(size, float(chains.given_nbytes[d])),
                    )
                )
        return {first: self._together(first, axis, rows) for first, rows in enumerate(found)}

    def _together(self, first: int, how: Axis, rows: list[_Row]) -> Shared:
        none = np.zeros(0)
        empty = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        processors = len(self._costs.overhead_s)
        rows = rows or [(*empty, np.zeros((2, 0, processors)), np.zeros((2, 0)), none, none)]
        lasts, cuts, seconds, sliced, joined, given = zip(*rows, strict=True)
        return Shared(
            first,
            how,
            np.concatenate(lasts),
            np.concatenate(cuts),
            np.concatenate(seconds, axis=1),
            np.concatenate(sliced, axis=1),
            np.concatenate(joined),
            np.concatenate(given),
        )


def computed(graph: Graph, index: int, axis: Axis) -> int:
    """Return the size of an operator's output along an axis; of a mean over rows, the size of its input."""
    operator = graph.operators[index]
    mean = axis == "height" and operator.kind == "MEAN"
    shape = graph.tensors[(operator.inputs if mean else operator.outputs)[0]].shape
    return shape[axis_of(shape, axis) or 0]
