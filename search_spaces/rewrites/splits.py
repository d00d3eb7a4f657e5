"""What a split is, and what each side computes and reads.

An operator is local along an axis if a run of its output's indices there follows from a run of its input's, with a few
more for windows (the halo). A chain of local operators can be split as a whole: each side computes all of it from its
slice of what the chain reads, halos again and again, and the sides meet once, at the end. A convolution reads all
channels, so along channels it can only begin a chain. What has one index only along the axis (the factors of a
normalisation) and is read within the chain alone, each side computes for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from search_spaces.errors import RewriteError
from search_spaces.graph import Graph
from search_spaces.rewrites.locality import MEETS_IN_A_SUM, Axis, Need, Part, axis_of, needs, what
from search_spaces.rewrites.windows import Range

__all__ = ["Axis", "GrowingSplit", "Piece", "Sides", "Split", "divide", "is_flat"]


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
    growing = GrowingSplit(graph, split.last, split.axis, borders)
    pieces = [growing.grow() for _ in range(split.first, split.last)]
    sides = tuple(zip(*reversed(pieces), strict=True))
    return Sides(split, sides, dict(reversed(growing.shares.items())))


class GrowingSplit:
    """A split that grows by one operator at a time, from the last one to the first.

    What one operator reads, those before it must compute; so a chain that begins earlier is all of this one, and what
    cannot be split does not become so by beginning earlier.

    Attributes:
        first: of the operators so far.
        shares: see :class:`Sides`; the last one first.
        sliced_nbytes: for each side, what it slices of what the operators so far read.
    """

    def __init__(self, graph: Graph, last: int, axis: Axis, borders: Sequence[int]) -> None:
        self.first = last
        self.shares: dict[int, tuple[Range, ...]] = {}
        self.sliced_nbytes = [0] * (len(borders) - 1)
        self._graph, self._last, self._axis, self._borders = graph, last, axis, tuple(borders)
        self._wanted: list[dict[int, Range]] = [{} for _ in self.sliced_nbytes]
        self._slices: list[dict[int, dict[Range, int]]] = [{} for _ in self.sliced_nbytes]
        self._entire: dict[int, int] = {}  # tensor of which more than a part is needed → by which operator

    def grow(self) -> tuple[Piece, ...]:
        """Take in the operator before those so far, and return what each side computes of it.

        Raises:
            RewriteError: it cannot be; the text says which operator is in the way, and why. The split cannot grow on.
        """
        graph, index = self._graph, self.first - 1
        tensor = _only_output(graph, index)
        if (reader := self._entire.get(tensor)) is not None:
            raise RewriteError(
                f"{self._told(index)}: {what(graph, reader)} needs all that operator {index} "
                f"({graph.operators[index].kind}) computes, not a part of it",
                f"let the chain end before operator {reader}",
            )
        own = self._own(index, tensor)
        if own is not None:
            self.shares[tensor] = own
            for wanted, rows in zip(self._wanted, own, strict=True):
                _widen(wanted, tensor, rows)
        if tensor not in self._wanted[0]:
            raise RewriteError(f"nobody reads what {what(graph, index)} computes", "leave it out of the split")
        pieces = tuple(self._piece(index, tensor, side) for side in range(len(self._wanted)))
        self.first = index
        return pieces

    def _told(self, first: int) -> str:
        return str(Split(first, self._last, self._axis, self._borders[1:-1]))

    def _own(self, index: int, tensor: int) -> tuple[Range, ...] | None:
        """Return what each side contributes to what an operator writes, if that leaves the chain."""
        graph = self._graph
        if not self._leaves(tensor):
            return None
        here = _length(graph, _measured(graph, index, self._axis), self._axis, index)
        cuts = [_scaled(b, here, self._borders[-1]) for b in self._borders]
        if any(a >= b for a, b in pairwise(cuts)):
            raise RewriteError(f"{self._told(index)}: {what(graph, index)} has only {here} along {self._axis}")
        return tuple(pairwise(cuts))

    def _leaves(self, tensor: int) -> bool:
        graph = self._graph
        return tensor in graph.outputs or any(c >= self._last for c in graph.consumers.get(tensor, ()))

    def _piece(self, index: int, tensor: int, side: int) -> Piece:
        graph = self._graph
        rows = self._wanted[side].pop(tensor)
        self.sliced_nbytes[side] -= sum(self._slices[side].pop(tensor, {}).values())
        found = needs(graph, index, self._axis, rows)
        for read, need in zip(graph.operators[index].inputs, found, strict=True):
            if read == -1 or graph.tensors[read].constant:
                continue
            if need is not None:
                self._slice(read, need, side)
            maker = graph.producer.get(read)
            if maker is None:
                continue
            flat = need is None and is_flat(graph, read, self._axis) and not self._leaves(read)
            inner = Part(0, 0, 1) if flat else need
            if inner is None or (self._axis == "height" and graph.operators[maker].kind in MEETS_IN_A_SUM):
                self._entire.setdefault(read, index)
            else:
                _widen(self._wanted[side], read, (inner.first, inner.last))
        return Piece(index, rows, found)

    def _slice(self, tensor: int, need: Part, side: int) -> None:
        held = self._graph.tensors[tensor]
        rows, whole = (need.first, need.last), held.shape[need.dimension]
        known = self._slices[side].setdefault(tensor, {})
        if rows[1] - rows[0] < whole and rows not in known:
            known[rows] = held.nbytes * (rows[1] - rows[0]) // whole
            self.sliced_nbytes[side] += known[rows]


def _widen(wanted: dict[int, Range], tensor: int, rows: Range) -> None:
    """Make what is wanted of a tensor as wide as it must be for rows, too."""
    before = wanted.get(tensor, rows)
    wanted[tensor] = min(before[0], rows[0]), max(before[1], rows[1])


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
            f"{what(graph, index)} has the shape {shape}, which is not fixed", "give sizes with --input-shape"
        )
    place = axis_of(shape, axis)
    if place is None:
        raise RewriteError(f"{what(graph, index)} has the shape {shape}, which has no {axis}")
    return shape[place]
