"""Cut points of the topological order, the tensors that cross them, and the cut criteria of seed 000.

A cut at position ``p`` separates operators ``0 … p-1`` from ``p … n-1``. Every criterion returns the positions in
ascending order, as arguments of :func:`search_spaces.spaces.chain.chain_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CONVOLUTIONS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "CONV_3D", "CONV_3D_TRANSPOSE"})


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A cut point and the tensors that cross it.

    Attributes:
        position: the operator before which the cut lies, 1 … n-1.
        tensors: activations that exist before the cut and are read after it, ascending: graph inputs, outputs of
            earlier operators that skip ahead, and graph outputs only if they are read again.
        nbytes: their size together.
    """

    position: int
    tensors: tuple[int, ...]
    nbytes: int


def cut_points(graph: Graph) -> tuple[CutPoint, ...]:
    """Return the cut points in ascending order, in time linear in operators, tensors and what crosses."""
    starts: dict[int, list[int]] = {}
    for tensor in graph.activation_tensors:
        starts.setdefault(graph.producer.get(tensor, -1) + 1, []).append(tensor)
    crossing: dict[int, None] = {}
    points = []
    for position in range(len(graph.operators)):
        for tensor in starts.get(position, ()):
            if graph.consumers.get(tensor, (-1,))[-1] >= position:
                crossing[tensor] = None
        if position:
            tensors = tuple(sorted(crossing))
            points.append(CutPoint(position, tensors, sum(graph.tensors[t].nbytes for t in tensors)))
        for tensor in graph.operators[position].inputs:
            if tensor in crossing and graph.consumers[tensor][-1] == position:
                del crossing[tensor]
    return tuple(points)


def layer_length(graph: Graph, parts: int) -> tuple[int, ...]:
    """Cut into stages of equal numbers of operators; sizes differ by at most 1 (seed 000, "layer length").

    Raises:
        UsageError: there are fewer operators than stages, or fewer than 1 stage.
    """
    count = _check_parts(graph, parts)
    return tuple(count * i // parts for i in range(1, parts))


def weighted_layer_length(graph: Graph, parts: int) -> tuple[int, ...]:
    """Cut into stages of equal numbers of operators with weights; the result is empty where there are fewer."""
    layers = [i for i, cost in enumerate(operator_costs(graph)) if cost.parameters]
    return tuple(layers[len(layers) * i // parts] for i in range(1, parts)) if len(layers) >= parts else ()


def layer_type(graph: Graph) -> tuple[int, ...]:
    """Cut where the network's type changes: convolutions | fully connected (seed 000, "layer type").

    The cut lies right before the first fully connected operator after the last convolution; the result is empty
    where a model has no convolution, or no such operator.
    """
    kinds = [o.kind for o in graph.operators]
    last = max((i for i, kind in enumerate(kinds) if kind in _CONVOLUTIONS), default=len(kinds))
    return tuple(i for i, kind in enumerate(kinds) if kind == "FULLY_CONNECTED" and i > last)[:1]


def parameter_count(graph: Graph, parts: int) -> tuple[int, ...]:
    """Cut into stages of parameters as equal as can be (seed 000, "parameter count").

    Minimises the squared deviation from equal stages, then the bytes that cross the cuts. A weight shared by two
    operators counts for both.

    Raises:
        UsageError: there are fewer operators than stages, or fewer than 1 stage.
    """
    import numpy as np

    count = _check_parts(graph, parts)
    weights = [cost.parameters for cost in operator_costs(graph)]
    shift = max(0, sum(weights).bit_length() - 31)  # squares must fit into 64 bits; 2^-31 of a model is negligible
    before = np.concatenate(([0], np.cumsum(weights, dtype=np.int64))) >> shift
    crossing = np.array([0, *(point.nbytes for point in cut_points(graph))], dtype=np.int64)
    # squares[e], nbytes[e]: the best way to put operators 0 … e-1 into the stages made so far. Since the sum of all
    # stages is fixed, the least sum of squares is the least deviation.
    squares = before**2
    nbytes = np.zeros(count + 1, dtype=np.int64)
    choices: list[NDArray[np.intp]] = []
    for part in range(2, parts + 1):
        squares, nbytes, choice = _add_part(part, before, crossing, squares, nbytes)
        choices.append(choice)
    cuts = [count]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


def every_layer(graph: Graph) -> tuple[int, ...]:
    """Cut before every operator but the first (seed 000, Table 2)."""
    return tuple(range(1, len(graph.operators)))


def _add_part(
    part: int,
    before: NDArray[np.int64],
    crossing: NDArray[np.int64],
    squares: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.intp]]:
    """Return the tables with one more stage, and for each end the position where that stage begins."""
    import numpy as np

    count = len(before) - 1
    new_squares, new_nbytes = np.zeros_like(squares), np.zeros_like(nbytes)
    choice = np.zeros(count + 1, dtype=np.intp)
    for end in range(part, count + 1):
        first = slice(part - 1, end)  # the earlier stages hold at least one operator each
        total = squares[first] + (before[end] - before[first]) ** 2
        moved = nbytes[first] + crossing[first]
        tied = np.flatnonzero(total == total.min())
        best = tied[np.argmin(moved[tied])]
        new_squares[end], new_nbytes[end], choice[end] = total[best], moved[best], best + part - 1
    return new_squares, new_nbytes, choice


def _check_parts(graph: Graph, parts: int) -> int:
    count = len(graph.operators)
    if not 1 <= parts <= count:
        raise UsageError(f"{parts} stages: {graph.name!r} has {count} operators", f"give 1 to {count}")
    return count
