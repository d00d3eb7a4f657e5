"""What a split is, and what each side computes and reads.

An operator is local along an axis if a run of its output's indices there follows from a run of its input's, with a few
more for windows (the halo). A chain of local operators can be split as a whole: each side computes all of it from its
slice of what the chain reads, halos again and again, and the sides meet once, at the end. A convolution reads all
channels, so along channels it can only begin a chain. What has one index only along the axis (the factors of a
normalisation) and is read within the chain alone, each side computes for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from search_spaces.errors import RewriteError
from search_spaces.graph import Graph
from search_spaces.rewrites.locality import MEETS_IN_A_SUM, Axis, Need, Part, axis_of, needs, what
from search_spaces.rewrites.windows import Range

__all__ = ["Axis", "Piece", "Sides", "Split", "divide", "is_flat"]


@dataclass(frozen=True, slots=True)
class Split:
    """A run of operators, computed in several shares.

    Attributes:
        first, last: the run, half-open, by the model's own numbers.
        axis: along which it is split.
        cuts: where, ascending, counted along that axis of what the last operator writes (of what it reads, where it is
            a mean over that axis); one cut makes two sides.
    """

    first: int
    last: int
    axis: Axis
    cuts: tuple[int, ...]

    def __str__(self) -> str:
        return f"operators {self.first} to {self.last - 1} along {self.axis} at {', '.join(map(str, self.cuts))}"


@dataclass(frozen=True, slots=True)
class Piece:
    """One operator on one side.

    Attributes:
        operator: its number in the model.
        rows: what is computed of its output along the axis of the split.
        needs: for each of its inputs the part that it reads.
    """

    operator: int
    rows: Range
    needs: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class Sides:
    """A split worked out.

    Attributes:
        pieces: for each side its operators, in order.
        shares: tensor that leaves the chain → the part that each side contributes.
    """

    split: Split
    pieces: tuple[tuple[Piece, ...], ...]
    shares: Mapping[int, tuple[Range, ...]]


def extent(graph: Graph, first: int, last: int, axis: Axis) -> int:
    """Return along how many indices a chain can be cut: cuts are 1 … one less.

    Raises:
        RewriteError: the chain has no such operators, or its last one no such axis.
    """
    if not 0 <= first < last <= len(graph.operators):
        raise RewriteError(
            f"there are no operators {first} to {last - 1} in {graph.name!r}",
            f"it has the operators 0 to {len(graph.operators) - 1}",
        )
    return _length(graph, _measured(graph, last - 1, axis), axis, last - 1)


def is_flat(graph: Graph, tensor: int, axis: Axis) -> bool:
    """Return whether a tensor has one index only along an axis, so that each side of a split would need all of it."""
    shape = graph.tensors[tensor].shape
    place = axis_of(shape, axis)
    return place is not None and shape[place] == 1


def divide(graph: Graph, split: Split) -> Sides:
    """Return what each side of a split computes.

    Raises:
        RewriteError: it cannot be split like that; the text says which operator is in the way, and why.
    """
    length = extent(graph, split.first, split.last, split.axis)
    borders = (0, *split.cuts, length)
    if len(borders) < 3 or any(a >= b for a, b in pairwise(borders)):
        raise RewriteError(
            f"{split}: every side must get something of the {length} along {split.axis}",
            f"cut between 1 and {length - 1}" if length > 1 else "leave it whole",
        )
    shares: dict[int, tuple[Range, ...]] = {}
    for index in range(split.first, split.last):
        tensor = _only_output(graph, index)
        if tensor in graph.outputs or any(c >= split.last for c in graph.consumers.get(tensor, ())):
            here = _length(graph, _measured(graph, index, split.axis), split.axis, index)
            cuts = [_scaled(b, here, length) for b in borders]
            if any(a >= b for a, b in pairwise(cuts)):
                raise RewriteError(f"{split}: {what(graph, index)} has only {here} along {split.axis}")
            shares[tensor] = tuple(pairwise(cuts))
    sides = tuple(_side(graph, split, {t: s[k] for t, s in shares.items()}) for k in range(len(borders) - 1))
    return Sides(split, sides, shares)


def _scaled(position: int, length: int, of: int) -> int:
    """Return the place of ``position`` of ``of`` among ``length``, rounded half up."""
    return (2 * position * length + of) // (2 * of)


def _only_output(graph: Graph, index: int) -> int:
    outputs = graph.operators[index].outputs
    if len(outputs) != 1:
        raise RewriteError(f"{what(graph, index)} has {len(outputs)} outputs", "split the operators around it")
    return outputs[0]


def _measured(graph: Graph, index: int, axis: Axis) -> int:
    """Return the tensor along which an operator is cut: what it writes, or what it takes a mean of."""
    operator = graph.operators[index]
    if axis == "height" and operator.kind in MEETS_IN_A_SUM:
        return operator.inputs[0]
    return _only_output(graph, index)


def _length(graph: Graph, tensor: int, axis: Axis, index: int) -> int:
    shape = graph.tensors[tensor].shape
    if any(d < 0 for d in shape):
        raise RewriteError(
            f"{what(graph, index)} has the shape {shape}, of which a part is open", "give sizes with --input-shape"
        )
    place = axis_of(shape, axis)
    if place is None:
        raise RewriteError(f"{what(graph, index)} has the shape {shape}, which has no {axis}")
    return shape[place]


def _side(graph: Graph, split: Split, own: Mapping[int, Range]) -> tuple[Piece, ...]:
    """Return the operators of a side, from the last to the first: what one needs, those before it must compute."""
    wanted = dict(own)
    pieces: list[Piece] = []
    for index in reversed(range(split.first, split.last)):
        operator = graph.operators[index]
        tensor = _only_output(graph, index)
        if tensor not in wanted:
            raise RewriteError(f"nobody reads what {what(graph, index)} computes", "leave it out of the split")
        rows = wanted[tensor]
        found = needs(graph, index, split.axis, rows)
        for read, need in zip(operator.inputs, found, strict=True):
            if read == -1 or not split.first <= graph.producer.get(read, -1) < split.last:
                continue
            source = graph.operators[graph.producer[read]]
            inner = Part(0, 0, 1) if need is None and read not in own and is_flat(graph, read, split.axis) else need
            if inner is None or (split.axis == "height" and source.kind in MEETS_IN_A_SUM):
                raise RewriteError(
                    f"{split}: {what(graph, index)} needs all that operator {graph.producer[read]} ({source.kind}) "
                    f"computes, not a part of it",
                    f"let the chain end before operator {index}",
                )
            before = wanted.get(read, (inner.first, inner.last))
            wanted[read] = min(before[0], inner.first), max(before[1], inner.last)
        pieces.append(Piece(index, rows, found))
    return tuple(reversed(pieces))
