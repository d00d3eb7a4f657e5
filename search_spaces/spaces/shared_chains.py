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
"""Number of equal steps of a share: a share is a multiple of 1/16."""

LONGEST = 40
"""Maximum number of operators of a chain that is split.

Each further operator adds halo rows that both sides compute, and saves at most one join. The longest chain seen in an
optimum has 38 operators, in DenseNet121 on a Pixel 4 where a transfer takes 0.1 ms; SqueezeNet's have 18, MobileNet's
13, VGG16's 6. Without a limit, a model whose operators are all local along height has a chain for every two of them.
"""

TILES: Mapping[Axis, int] = {"height": 1, "channels": 8}
"""Rows or channels in a tile of a kernel: kernels compute channels in blocks of 8."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChainCuts:
    """The splits of the chains that end at one operator along one axis, and the work of their sides.

    There are K cuts, and the longest chain has D operators. Entry ``d`` of an axis D belongs to the operator ``d``
    before the last one, or to the chain that begins there; it is 0 beyond a cut's longest chain.

    Attributes:
        steps: shape ``(K,)``, ascending, in units of 1/:data:`GRID`.
        cuts: shape ``(K,)``: indices along the axis, as of :class:`~search_spaces.rewrites.splits.Split`.
        lengths: shape ``(K,)``: operators of the longest chain that can be split there.
        rows: shape ``(K, 2, D)``: indices along the axis that each side computes of the operator.
        sliced_nbytes: shape ``(K, 2, D)``: bytes that each side slices from the inputs of the chain.
        joined_nbytes: shape ``(D,)``: bytes that leave the chain.
        given_nbytes: shape ``(D,)``: those of them that are outputs of the model.
    """

    steps: Counts
    cuts: Counts
    lengths: Counts
    rows: Counts
    sliced_nbytes: Counts
    joined_nbytes: Counts
    given_nbytes: Counts

    def of(self, length: int) -> dict[int, int]:
        """Return step → cut for each place where the chain of ``length`` operators can be split."""
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
    tile = TILES[axis] if length >= 2 * TILES[axis] else 1
    steps = {step: round(step * length / GRID / tile) * tile for step in range(1, GRID)}
    # Of several steps with one cut, the middle of the grid is kept, or else the first one.
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
    """Return the rows that each side computes of each operator, and the bytes that it slices for each chain."""
    rows: list[tuple[int, ...]] = []
    sliced: list[tuple[int, ...]] = []
    split = GrowingSplit(graph, last, axis, borders)
    with suppress(RewriteError):
        for _ in range(min(LONGEST, last)):
            rows.append(tuple(p.rows[1] - p.rows[0] for p in split.grow()))
            sliced.append(tuple(split.sliced_nbytes))
    return rows, sliced


def _leaving(graph: Graph, last: int, longest: int) -> tuple[Counts, Counts]:
    """Return the bytes that leave each chain, and those of them that are outputs of the model."""
    found = np.zeros((2, longest), dtype=np.int64)
    for d in range(longest):
        for tensor in graph.operators[last - 1 - d].outputs:
            given = tensor in graph.outputs
            leaves = given or any(c >= last for c in graph.consumers.get(tensor, ()))
            found[:, d] += np.array((leaves, given)) * graph.tensors[tensor].nbytes
    joined, given_nbytes = found.cumsum(axis=1)
    return joined, given_nbytes
