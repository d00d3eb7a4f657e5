"""Splits of operator chains in two, and the work of each side, for all chains that end at one operator at once.

A chain that begins one operator earlier is the shorter chain with one operator in front, at the same cut. So each
operator is computed once for all chains, and where a chain cannot be split, no longer one can.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.errors import RewriteError
from search_spaces.core.graph import Graph
from search_spaces.rewrites.splits import Axis, GrowingSplit, extent

GRID = 16
"""Number of equal steps of a share."""

LONGEST = 40
"""The most operators of a chain that is split.

Each operator more adds halo rows that both sides compute, and saves at most one meeting. The longest chain in a model's
optimum that was seen is one of 38, in DenseNet121 on a Pixel 4 where handing over takes 0.1 ms; SqueezeNet's have 18,
MobileNet's 13, VGG16's 6. Models all of whose operators are local along height would otherwise have chains of any two.
"""

_TILE: Mapping[Axis, int] = {"height": 1, "channels": 8}  # of a kernel: channels are computed in blocks

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChainCuts:
    """The splits of the chains that end at one operator along one axis, and the work of their sides.

    There are K cuts, and the longest chain has D operators. Entry ``d`` of an axis D is about the operator ``d`` before
    the last one, or about the chain that begins there; it is 0 beyond a cut's longest chain.

    Attributes:
        steps: shape ``(K,)``, ascending: of :data:`GRID`.
        cuts: shape ``(K,)``: see :class:`~search_spaces.rewrites.splits.Split`.
        lengths: shape ``(K,)``: how many operators the longest chain has that can be split there.
        rows: shape ``(K, 2, D)``: how many indices along the axis each side computes of the operator.
        sliced_nbytes: shape ``(K, 2, D)``: what each side slices of what the chain reads.
        joined_nbytes: shape ``(D,)``: what leaves the chain.
        given_nbytes: shape ``(D,)``: what of that the caller gets.
    """

    steps: Counts
    cuts: Counts
    lengths: Counts
    rows: Counts
    sliced_nbytes: Counts
    joined_nbytes: Counts
    given_nbytes: Counts

    def of(self, length: int) -> dict[int, int]:
        """Return the steps at which the chain of so many operators can be split, and the cuts there."""
        return {
            int(s): int(c) for s, c, most in zip(self.steps, self.cuts, self.lengths, strict=True) if most >= length
        }


def chain_cuts(graph: Graph, last: int, axis: Axis) -> ChainCuts:
    """Return where the chains before operator ``last`` can be split, at the steps of :data:`GRID`.

    Cuts along channels lie between two tiles of the kernels, where there are enough channels.
    """
    try:
        length = extent(graph, last - 1, last, axis)
    except RewriteError:
        length = 0
    tile = _TILE[axis] if length >= 2 * _TILE[axis] else 1
    steps = {step: round(step * length / GRID / tile) * tile for step in range(1, GRID)}
    # Of steps that are the same cut, the middle one counts, or else the first one.
    step_of = {cut: step for step, cut in (*reversed(steps.items()), (GRID // 2, steps[GRID // 2])) if 0 < cut < length}
    grown = [(step, cut, *_grown(graph, last, axis, (0, cut, length))) for cut, step in step_of.items()]
    found = sorted(g for g in grown if g[2])
    longest = max((len(g[2]) for g in found), default=0)
    rows, sliced = (np.zeros((len(found), 2, longest), dtype=np.int64) for _ in range(2))
    for k, (_, _, each, nbytes) in enumerate(found):
        rows[k, :, : len(each)] = np.array(each).T
        sliced[k, :, : len(each)] = np.array(nbytes).T
    joined, given = _leaving(graph, last, longest)
    about = np.array([(step, cut, len(each)) for step, cut, each, _ in found], dtype=np.int64).reshape(-1, 3)
    return ChainCuts(about[:, 0], about[:, 1], about[:, 2], rows, sliced, joined, given)


def _grown(
    graph: Graph, last: int, axis: Axis, borders: tuple[int, int, int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return what both sides compute of each operator, and slice for each chain, as it grows to its longest."""
    rows: list[tuple[int, ...]] = []
    sliced: list[tuple[int, ...]] = []
    split = GrowingSplit(graph, last, axis, borders)
    with suppress(RewriteError):
        for _ in range(min(LONGEST, last)):
            rows.append(tuple(p.rows[1] - p.rows[0] for p in split.grow()))
            sliced.append(tuple(split.sliced_nbytes))
    return rows, sliced


def _leaving(graph: Graph, last: int, longest: int) -> tuple[Counts, Counts]:
    """Return the bytes that leave each chain, and those of them that the caller gets."""
    found = np.zeros((2, longest), dtype=np.int64)
    for d in range(longest):
        for tensor in graph.operators[last - 1 - d].outputs:
            given = tensor in graph.outputs
            leaves = given or any(c >= last for c in graph.consumers.get(tensor, ()))
            found[:, d] += np.array((leaves, given)) * graph.tensors[tensor].nbytes
    joined, given_nbytes = found.cumsum(axis=1)
    return joined, given_nbytes
