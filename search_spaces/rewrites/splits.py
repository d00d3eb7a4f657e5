"""Splits of operator chains into sides that run at the same time, and the rewritten model (CoDL, seed 002).

An operator is local along an axis if a run of indices of its output there depends only on a run of indices of its
input, which a window widens (the halo). A chain of local operators can be split as a whole: each side computes all of
it from its slice of the chain's inputs, halos on both sides, and the sides join once, at the end. A convolution
reads all channels, so along channels it can only begin a chain. A tensor of size 1 along the axis (the factors of a
normalisation) that is read only within the chain is computed by every side.

The rewritten graph has, in place of a chain, one chain for each side between slices of its inputs and a concatenation
of its outputs. Weights stay where they are in the model's file: along height the sides share them, along channels each
reads its part of them. Where a convolution pads, a side pads at the border of the whole tensor only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from search_spaces.core.errors import RewriteError, UsageError, shown
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.wording import operator_range
from search_spaces.models.dtypes import integers
from search_spaces.rewrites import locality
from search_spaces.rewrites.locality import MEETS_IN_A_SUM, Axis, Need, Part, Range, axis_of, needs, padding, what
from search_spaces.rewrites.structure import Structure

__all__ = ["Axis", "GrowingSplit", "Piece", "Sides", "Split", "divide", "is_flat", "parse_split"]

_SPLIT = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?:(height|channels):(\d*\.?\d+(?:,\d*\.?\d+)*)")
_HINT = "give FIRST-LAST:height:SHARE or FIRST-LAST:channels:SHARE, for example 0-2:height:0.6"
_TILE = 8  # channels that kernels compute together


@dataclass(frozen=True, slots=True)
class Split:
    """A run of operators, computed in several shares.

    Attributes:
        first, last: the operators, half-open.
        axis: along which they are split.
        cuts: ascending indices along that axis of the last operator's output (of its input, where it is a mean over
            that axis); one cut makes two sides.
    """

    first: int
    last: int
    axis: Axis
    cuts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{operator_range(self.first, self.last - 1)} along {self.axis} at {', '.join(map(str, self.cuts))}"


def parse_split(graph: Graph, text: str) -> Split:
    """Return the split of a text such as ``0-2:height:0.6``; its last operator is included.

    Cuts between channels are multiples of 8, the block of the kernels, if there are at least 16 channels.

    Raises:
        UsageError: the text has another form, or there are no such operators.
    """
    found = _SPLIT.fullmatch(text)
    if found is None:
        raise UsageError(f"--split {shown(text)}: is not a split", _HINT)
    first = int(found[1])
    last = int(found[2]) + 1 if found[2] is not None else first + 1
    axis: Axis = "height" if found[3] == "height" else "channels"
    shares = [float(share) for share in found[4].split(",")]
    if not all(0.0 < share < 1.0 for share in shares):
        raise UsageError(f"--split {shown(text)}: a share lies between 0 and 1", "leave the operators whole instead")
    length = extent(graph, first, last, axis)
    tile = _TILE if axis == "channels" and length >= 2 * _TILE else 1
    cuts = tuple(min(max(round(share * length / tile), 1) * tile, max(length - 1, 1)) for share in shares)
    return Split(first, last, axis, cuts)


@dataclass(frozen=True, slots=True)
class Piece:
    """One operator on one side.

    Attributes:
        operator: its index in the model.
        rows: the indices along the split's axis that are computed of its output.
        needs: the part that it reads of each input.
    """

    operator: int
    rows: Range
    needs: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class Sides:
    """What each side of a split computes.

    Attributes:
        pieces: the operators of each side, in order.
        shares: tensor that leaves the chain → the range that each side contributes.
    """

    split: Split
    pieces: tuple[tuple[Piece, ...], ...]
    shares: Mapping[int, tuple[Range, ...]]


def extent(graph: Graph, first: int, last: int, axis: Axis) -> int:
    """Return the size of a chain along an axis: cuts are from 1 to the size less 1.

    Raises:
        RewriteError: the chain has no such operators, or its last one no such axis.
    """
    if not 0 <= first < last <= len(graph.operators):
        raise RewriteError(
            f"{graph.name!r} has no {operator_range(first, last - 1)}",
            f"it has the operators 0 to {len(graph.operators) - 1}",
        )
    return _length(graph, _measured(graph, last - 1, axis), axis, last - 1)


def is_flat(graph: Graph, tensor: int, axis: Axis) -> bool:
    """Return whether a tensor has size 1 along an axis, so that each side of a split needs all of it."""
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
            f"{split}: every share must have at least 1 of the {length} along {split.axis}",
            f"cut between 1 and {length - 1}" if length > 1 else "leave it whole",
        )
    growing = GrowingSplit(graph, split.last, split.axis, borders)
    pieces = [growing.grow() for _ in range(split.first, split.last)]
    sides = tuple(zip(*reversed(pieces), strict=True))
    return Sides(split, sides, dict(reversed(growing.shares.items())))


class GrowingSplit:
    """A split that grows by one operator at a time, from the last one to the first.

    The ranges that an operator computes follow from those after it alone. So a longer chain contains the shorter one
    unchanged, and where a chain cannot be split, no longer one can.

    Attributes:
        first: first operator so far.
        shares: as of :class:`Sides`; the last tensor first.
        sliced_nbytes: for each side, the bytes that it slices from the inputs of the operators so far.
    """

    def __init__(self, graph: Graph, last: int, axis: Axis, borders: Sequence[int]) -> None:
        self.first = last
        self.shares: dict[int, tuple[Range, ...]] = {}
        self.sliced_nbytes = [0] * (len(borders) - 1)
        self._graph, self._last, self._axis, self._borders = graph, last, axis, tuple(borders)
        self._wanted: list[dict[int, Range]] = [{} for _ in self.sliced_nbytes]
        self._slices: list[dict[int, dict[Range, int]]] = [{} for _ in self.sliced_nbytes]
        self._entire: dict[int, int] = {}  # tensor that a side needs whole → the operator that needs it

    def grow(self) -> tuple[Piece, ...]:
        """Add the operator before those so far, and return what each side computes of it.

        Raises:
            RewriteError: it cannot be split, and no longer chain can; the text names the operator and the reason.
        """
        graph, index = self._graph, self.first - 1
        tensor = _only_output(graph, index)
        if (reader := self._entire.get(tensor)) is not None:
            raise RewriteError(
                f"{self._named(index)}: {what(graph, reader)} needs all that operator {index} "
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

    def _named(self, first: int) -> str:
        return str(Split(first, self._last, self._axis, self._borders[1:-1]))

    def _own(self, index: int, tensor: int) -> tuple[Range, ...] | None:
        """Return the range that each side contributes to an operator's output, or None if that stays in the chain."""
        graph = self._graph
        if not self._leaves(tensor):
            return None
        here = _length(graph, _measured(graph, index, self._axis), self._axis, index)
        whole = self._borders[-1]
        cuts = [(2 * border * here + whole) // (2 * whole) for border in self._borders]  # rounded half up
        if any(a >= b for a, b in pairwise(cuts)):
            raise RewriteError(f"{self._named(index)}: {what(graph, index)} has only {here} along {self._axis}")
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
    """Widen the wanted range of a tensor so that it includes rows."""
    before = wanted.get(tensor, rows)
    wanted[tensor] = min(before[0], rows[0]), max(before[1], rows[1])


def _only_output(graph: Graph, index: int) -> int:
    outputs = graph.operators[index].outputs
    if len(outputs) != 1:
        raise RewriteError(f"{what(graph, index)} has {len(outputs)} outputs", "split the operators around it")
    return outputs[0]


def _measured(graph: Graph, index: int, axis: Axis) -> int:
    """Return the tensor in whose indices an operator is cut: its output, or the input of a mean."""
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


_VALID = 1  # schema.Padding


@dataclass(frozen=True, slots=True)
class Role:
    """The purpose of an operator of a rewritten graph.

    Attributes:
        what: ``kept`` as it was; computes a ``side``; combines the sides at a ``join``.
        operator: its index in the original model; of a new operator, the index of the one that it serves.
        split: number of the split, in the order of operators; -1 for a kept operator.
        side: number of the side; -1 for kept operators and joins.
    """

    what: Literal["kept", "side", "join"]
    operator: int
    split: int = -1
    side: int = -1


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A rewritten model, and the role of each of its operators."""

    graph: Graph
    roles: tuple[Role, ...]


def split_operators(graph: Graph, splits: Sequence[Split]) -> SplitGraph:
    """Return the model with chains split; inputs and outputs stay the same, up to rounding.

    Args:
        splits: of runs that do not overlap, in any order, with operator indices of ``graph``.

    Raises:
        RewriteError: a chain cannot be split like that, or two overlap.
        ModelError: the model has no file, or its file is gone.
    """
    made, done = Structure(graph), 0
    ordered = sorted(splits, key=lambda s: s.first)
    for one, other in pairwise(ordered):
        if one.last > other.first:
            raise RewriteError(f"{one} and {other} overlap")
    for number, each in enumerate(ordered):
        sides = divide(graph, each)
        for index in range(done, each.first):
            made.keep(index, Role("kept", index))
        _write(made, sides, number)
        done = each.last
    for index in range(done, len(graph.operators)):
        made.keep(index, Role("kept", index))
    return SplitGraph(*made.finished("; ".join(map(str, ordered)), "split"))


def _write(made: Structure, sides: Sides, number: int) -> None:
    """Write the sides of a chain, and their joins."""
    graph, found = made.graph, [_Side(made, sides.split.axis) for _ in sides.pieces]
    for k, (side, pieces) in enumerate(zip(found, sides.pieces, strict=True)):
        for piece in pieces:
            side.compute(piece)
            made.mark(Role("side", piece.operator, number, k))
        for tensor, shares in sides.shares.items():
            side.crop(tensor, shares[k])
            made.mark(Role("side", graph.producer[tensor], number, k))
    for tensor, shares in sides.shares.items():
        parts = [side.made[tensor][0] for side in found]
        if found[0].meets_in_a_sum(tensor):
            _write_sum(made, tensor, parts, shares)
        else:
            axis = axis_of(graph.tensors[tensor].shape, sides.split.axis)
            made.operator("CONCATENATION", parts, tensor, axis=axis)
        made.mark(Role("join", graph.producer[tensor], number))


def _write_sum(made: Structure, tensor: int, parts: Sequence[int], shares: Sequence[Range]) -> None:
    """Write the mean as the sum of the sides' means, each by its share of the rows."""
    shape, rows = made.graph.tensors[tensor].shape, shares[-1][1]
    weighted = []
    for k, (part, (first, last)) in enumerate(zip(parts, shares, strict=True)):
        weighted.append(made.tensor(tensor, shape, f"weighted_{k}"))
        made.operator("MUL", [part, made.number((last - first) / rows)], weighted[-1])
    total = weighted[0]
    for k, other in enumerate(weighted[1:], 1):
        target = tensor if k == len(weighted) - 1 else made.tensor(tensor, shape, f"sum_{k}")
        made.operator("ADD", [total, other], target)
        total = target


class _Side:
    """One side of a chain: its operators on its part of the rows or channels.

    Attributes:
        made: tensor of the model → the tensor that this side has of it, and its range along the axis.
    """

    def __init__(self, structure: Structure, axis: Axis) -> None:
        self.made: dict[int, tuple[int, Range]] = {}
        self._structure, self._graph, self._axis = structure, structure.graph, axis
        self._slices: dict[tuple[int, int, Range], int] = {}

    def crop(self, tensor: int, rows: Range) -> None:
        """Keep only some rows of what was computed."""
        held, all_rows = self.made[tensor]
        if rows == all_rows or self.meets_in_a_sum(tensor):
            return
        axis = axis_of(self._graph.tensors[tensor].shape, self._axis) or 0
        self.made[tensor] = self._slice(held, axis, (rows[0] - all_rows[0], rows[1] - all_rows[0])), rows

    def compute(self, piece: Piece) -> None:
        """Write an operator that computes the wanted part of its output."""
        operator = self._graph.operators[piece.operator]
        (place,) = self._structure.source.file_operators([piece.operator])
        original = self._structure.main.operators[place]
        inputs = [t if t == -1 else self._input(t, need) for t, need in zip(operator.inputs, piece.needs, strict=True)]
        output = operator.outputs[0]
        shape = list(self._graph.tensors[output].shape)
        rows, skip = piece.rows, 0
        options: dict[str, int] = {}
        count = rows[1] - rows[0]
        made = count
        if self._axis == "height":
            if operator.kind in locality.CONVOLUTIONS:
                inputs[0], options = self._padded(operator, inputs[0], rows)
            elif operator.kind in locality.POOLS:
                found, pads = locality.pool_slice(self._graph, operator, rows)
                made, skip, options = found.rows, found.skip, {} if pads else {"padding": _VALID}
            elif operator.kind == "TRANSPOSE_CONV":
                found = locality.transposed_slice(self._graph, operator, rows)
                made, skip = found.rows, found.skip
            elif operator.kind == "PAD":
                inputs[1] = self._paddings(operator, rows)
        if not self.meets_in_a_sum(output):
            shape[axis_of(tuple(shape), self._axis) or 0] = made
        if operator.kind == "TRANSPOSE_CONV":
            inputs[0] = self._structure.integers(shape)
        target = self._structure.tensor(output, shape, f"{rows[0]}_{rows[1]}")
        self._structure.copied(original, inputs, target, options)
        if made != count:
            target = self._slice(target, axis_of(tuple(shape), self._axis) or 0, (skip, skip + count))
        self.made[output] = target, rows

    def meets_in_a_sum(self, tensor: int) -> bool:
        """Return whether the sides of a tensor are combined by a weighted sum."""
        kind = self._graph.operators[self._graph.producer[tensor]].kind
        return self._axis == "height" and kind in MEETS_IN_A_SUM

    def _input(self, tensor: int, need: Part | None) -> int:
        """Return the part of a tensor that an operator reads."""
        if need is None:
            return self.made[tensor][0] if tensor in self.made else tensor
        if self._graph.tensors[tensor].constant:
            return self._structure.part(tensor, need)
        held, rows = self.made.get(tensor, (tensor, (0, self._graph.tensors[tensor].shape[need.dimension])))
        return self._slice(held, need.dimension, (need.first - rows[0], need.last - rows[0]))

    def _slice(self, tensor: int, axis: int, rows: Range) -> int:
        """Return some rows of a tensor; all of them are the tensor itself."""
        shape = list(self._structure.shapes[tensor])
        if rows == (0, shape[axis]):
            return tensor
        if (tensor, axis, rows) not in self._slices:
            begin = [0] * len(shape)
            begin[axis], shape[axis] = rows[0], rows[1] - rows[0]
            target = self._structure.tensor(tensor, shape, f"slice_{rows[0]}_{rows[1]}")
            ends = [self._structure.integers(begin), self._structure.integers(shape)]
            self._structure.operator("SLICE", [tensor, *ends], target)
            self._slices[tensor, axis, rows] = target
        return self._slices[tensor, axis, rows]

    def _padded(self, operator: Operator, read: int, rows: Range) -> tuple[int, dict[str, int]]:
        """Return the input of a convolution on this side, padded explicitly where SAME would be wrong, and options."""
        high = locality.window(self._graph, operator)
        wide = locality.window(self._graph, operator, 2)
        if not high.same or high.pads_alike(rows):
            return read, {}
        found = high.needs(rows)
        sides = padding(wide.size, wide.stride, wide.rows_in, wide.rows_out)
        if found.before + found.after + sum(sides) == 0:
            return read, {"padding": _VALID}
        shape = list(self._structure.shapes[read])
        shape[1] += found.before + found.after
        shape[2] += sum(sides)
        target = self._structure.tensor(read, shape, f"pad_{found.before}_{found.after}")
        amounts = [0, 0, found.before, found.after, *sides, 0, 0]
        self._structure.operator("PAD", [read, self._structure.integers(amounts, (4, 2))], target)
        return target, {"padding": _VALID}

    def _paddings(self, operator: Operator, rows: Range) -> int:
        """Return the amounts that a PAD adds on this side."""
        _, before, after = locality.padded_rows(self._graph, operator, rows)
        amounts = integers(self._graph, operator.inputs[1]) or [0] * 8
        return self._structure.integers([*amounts[:2], before, after, *amounts[4:]], (4, 2))
