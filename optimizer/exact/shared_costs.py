"""Times of both sides of every shared part on all processors: the tables of the co-execution optimum.

Operators' seconds and copied bytes do not depend on corrections; they are computed once for each first operator.
Corrections, copies and pairs of processors are then a few steps over whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.graph import Graph
from search_spaces.rewrites.locality import axis_of
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_chains import TILES

Ints = NDArray[np.int64]
_Rows = tuple[Any, ...]  # the arrays of Shared


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The parts that begin with one operator and are shared in one way: R of them, on any of L processors.

    Attributes:
        lasts, cuts: shape ``(R,)``: as in :class:`~search_spaces.spaces.shared_parts.Part`; ``lasts`` ascend.
        seconds: shape ``(R, 2, L)``: of each side's operators.
        sliced_nbytes: shape ``(R, 2)``: sliced by each side, where slicing copies.
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
        rows: _Rows = self.lasts, self.cuts, self.seconds, self.sliced_nbytes, self.joined_nbytes, self.given_nbytes
        return Shared(self.first, self.how, *(each[a:b] for each in rows))


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
        processors = len(self._costs.overhead_s)
        none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        empty: _Rows = (*none, np.zeros((0, 2, processors)), np.zeros((0, 2)), np.zeros(0), np.zeros(0))
        found: list[list[_Rows]] = [[empty] for _ in range(count)]
        for last in range(1, count + 1):
            chains = self._space.chains(last, axis)
            longest = chains.rows.shape[2]
            if not longest:
                continue
            # Infinite where a processor cannot run a side; entries beyond a cut's longest chain are not read.
            own = self._costs.operator_s[:, last - longest : last].T[::-1]
            with np.errstate(invalid="ignore"):
                seconds = np.cumsum(work_shares(self._space.graph, last, axis, chains.rows)[..., None] * own, axis=2)
            for d in range(longest):
                ok = chains.lengths > d
                size = int(ok.sum())
                found[last - 1 - d].append(
                    (
                        np.full(size, last),
                        chains.cuts[ok],
                        seconds[ok, :, d],
                        chains.sliced_nbytes[ok, :, d].astype(np.float64),
                        np.full(size, float(chains.joined_nbytes[d])),
                        np.full(size, float(chains.given_nbytes[d])),
                    )
                )
        return {
            first: Shared(first, axis, *(np.concatenate(each) for each in zip(*rows, strict=True)))
            for first, rows in enumerate(found)
        }


def work_shares(graph: Graph, last: int, axis: Axis, rows: Ints) -> Seconds:
    """Return the shares of operators' work that sides do, in whole tiles, of the shape of ``rows``.

    Args:
        rows: along the axis, of the operators before ``last``, the last one first, in the last dimension.
    """
    whole = np.array([_computed(graph, last - 1 - d, axis) for d in range(rows.shape[-1])])
    found: Seconds = _tiled(rows, axis) / _tiled(whole, axis)
    return found


def _tiled(rows: Ints, axis: Axis) -> Ints:
    return -(-rows // TILES[axis]) * TILES[axis]


def _computed(graph: Graph, index: int, axis: Axis) -> int:
    """Return the size of an operator's output along an axis; of a mean over rows, the size of its input."""
    operator = graph.operators[index]
    mean = axis == "height" and operator.kind == "MEAN"
    shape = graph.tensors[(operator.inputs if mean else operator.outputs)[0]].shape
    return shape[axis_of(shape, axis) or 0]
