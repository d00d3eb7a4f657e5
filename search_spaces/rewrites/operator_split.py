"""Split chains of operators into sides that can run at the same time (CoDL, seed 002).

The new graph holds, in place of a chain, one chain for each side between slices of what it reads and a concatenation
of what it computes. Weights stay where they are in the model's file: along height the sides share them, along channels
each reads its part of them. Where a convolution pads, a side pads what lies at the model's border and nothing where it
meets the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from search_spaces.errors import ModelError, RewriteError
from search_spaces.graph import Graph, Operator
from search_spaces.models.constants import integers
from search_spaces.models.litert import graph_of
from search_spaces.models.source import ModelSource
from search_spaces.rewrites import locality
from search_spaces.rewrites.locality import MEETS_IN_A_SUM, Part, axis_of
from search_spaces.rewrites.splits import Piece, Sides, Split, divide
from search_spaces.rewrites.structure import Structure
from search_spaces.rewrites.windows import Range, padding

_VALID = 1  # schema.Padding


@dataclass(frozen=True, slots=True)
class Role:
    """What an operator of a rewritten graph is there for.

    Attributes:
        what: ``kept`` as it was; computes on a ``side``; brings the sides together at a ``join``.
        operator: its number in the model before; of what is new, the number of the one that it is there for.
        split: which split, in their order; -1 for what was kept.
        side: which side of it; -1 where none.
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
    """Return the model with chains split; inputs, outputs and what is computed stay the same.

    Args:
        splits: of runs that do not overlap, in any order; their numbers are those of ``graph``.

    Raises:
        RewriteError: a chain cannot be split like that, or two overlap.
        ModelError: the model has no file, or its file is gone.
    """
    if graph.source is None:
        raise ModelError(f"model {graph.name!r} has no file to take weights from")
    ordered = sorted(splits, key=lambda s: s.first)
    for one, other in pairwise(ordered):
        if one.last > other.first:
            raise RewriteError(f"{one} and {other} overlap")
    writer = _Writer(graph, graph.source)
    done = 0
    for number, each in enumerate(ordered):
        sides = divide(graph, each)
        writer.keep(range(done, each.first))
        writer.split(sides, number)
        done = each.last
    writer.keep(range(done, len(graph.operators)))
    return writer.finish(ordered)


class _Writer:
    """Writes operators one after another, each with its role."""

    def __init__(self, graph: Graph, source: ModelSource) -> None:
        self._graph = graph
        self._source = source
        self._made = Structure(graph, source)
        self._roles: list[Role] = []
        for index in sorted(set(source.recipes.values())):
            self._made.operators.append(source.schema.subgraphs[0].operators[index])
        self._recipes = len(self._made.operators)

    def keep(self, operators: Sequence[int]) -> None:
        """Write operators as they are."""
        for index in operators:
            for place in self._source.file_operators([index]):
                self._made.operators.append(self._source.schema.subgraphs[0].operators[place])
            self._mark(Role("kept", index))

    def _mark(self, role: Role) -> None:
        """Give the operators that were written since the last time a role."""
        self._roles += [role] * (len(self._made.operators) - self._recipes - len(self._roles))

    def split(self, sides: Sides, number: int) -> None:
        """Write a chain's sides, and how they meet."""
        found = [_Side(self._made, self._graph, self._source, sides.split) for _ in sides.pieces]
        for k, (side, pieces) in enumerate(zip(found, sides.pieces, strict=True)):
            for piece in pieces:
                side.compute(piece)
                self._mark(Role("side", piece.operator, number, k))
            for tensor, shares in sides.shares.items():
                side.crop(tensor, shares[k])
                self._mark(Role("side", self._graph.producer[tensor], number, k))
        for tensor, shares in sides.shares.items():
            index = self._graph.producer[tensor]
            parts = [side.made[tensor][0] for side in found]
            if sides.split.axis == "height" and self._graph.operators[index].kind in MEETS_IN_A_SUM:
                self._sum(tensor, parts, shares)
            else:
                axis = axis_of(self._graph.tensors[tensor].shape, sides.split.axis)
                self._made.operator("CONCATENATION", parts, tensor, axis=axis)
            self._mark(Role("join", index, number))

    def _sum(self, tensor: int, parts: Sequence[int], shares: Sequence[Range]) -> None:
        """Write the mean as the sum of the sides' means, each by its share of the rows."""
        shape = self._graph.tensors[tensor].shape
        rows = shares[-1][1]
        weighted = []
        for k, (part, (first, last)) in enumerate(zip(parts, shares, strict=True)):
            weighted.append(self._made.tensor(tensor, shape, f"weighted_{k}"))
            self._made.operator("MUL", [part, self._made.number((last - first) / rows)], weighted[-1])
        total = weighted[0]
        for k, other in enumerate(weighted[1:], 1):
            target = tensor if k == len(weighted) - 1 else self._made.tensor(tensor, shape, f"sum_{k}")
            self._made.operator("ADD", [total, other], target)
            total = target

    def finish(self, splits: Sequence[Split]) -> SplitGraph:
        """Return what was written as a graph.

        Raises:
            ModelError: the result is no model.
        """
        source = self._made.finished("; ".join(map(str, splits)))
        try:
            graph = graph_of(source, self._graph.name)
        except ValueError as error:
            raise ModelError(f"{self._graph.name!r} cannot be split like that: {error}") from None
        roles = tuple(self._roles)
        if graph.source is not None and graph.source.operators:
            # The graph's operators are atoms of the file's, and recipes are none.
            roles = tuple(roles[atom[0] - self._recipes] for atom in graph.source.operators)
        return SplitGraph(graph, roles)


class _Side:
    """One side of a chain: its operators on its part of the rows or channels.

    Attributes:
        made: tensor of the model → what this side has of it: the number of a tensor, and which part.
    """

    def __init__(self, made: Structure, graph: Graph, source: ModelSource, split: Split) -> None:
        self.made: dict[int, tuple[int, Range]] = {}
        self._structure = made
        self._graph = graph
        self._source = source
        self._axis = split.axis
        self._slices: dict[tuple[int, int, Range], int] = {}

    def crop(self, tensor: int, rows: Range) -> None:
        """Keep only some rows of what was computed."""
        held, all_rows = self.made[tensor]
        if rows == all_rows or self._meets_in_a_sum(tensor):
            return
        axis = axis_of(self._graph.tensors[tensor].shape, self._axis) or 0
        self.made[tensor] = self._slice(held, axis, (rows[0] - all_rows[0], rows[1] - all_rows[0])), rows

    def compute(self, piece: Piece) -> None:
        """Write an operator for the part of its output that is wanted."""
        operator = self._graph.operators[piece.operator]
        (place,) = self._source.file_operators([piece.operator])
        original = self._source.schema.subgraphs[0].operators[place]
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
                made, skip, options = self._pooled(operator, rows)
            elif operator.kind == "TRANSPOSE_CONV":
                found = locality.transposed_slice(self._graph, operator, rows)
                made, skip = found.rows, found.skip
            elif operator.kind == "PAD":
                inputs[1] = self._paddings(operator, rows)
        if not self._meets_in_a_sum(output):
            shape[axis_of(tuple(shape), self._axis) or 0] = made
        if operator.kind == "TRANSPOSE_CONV":
            inputs[0] = self._structure.integers(shape)
        target = self._structure.tensor(output, shape, f"{rows[0]}_{rows[1]}")
        self._structure.copied(original, inputs, target, options)
        if made != count:
            target = self._slice(target, axis_of(tuple(shape), self._axis) or 0, (skip, skip + count))
        self.made[output] = target, rows

    def _meets_in_a_sum(self, tensor: int) -> bool:
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
        """Return what a convolution reads on this side, padded as SAME would not pad it, and its options."""
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

    def _pooled(self, operator: Operator, rows: Range) -> tuple[int, int, dict[str, int]]:
        """Return how many rows a pooling computes on this side, how many of them to skip, and its options."""
        found = locality.pool_slice(self._graph, operator, rows)
        high, wide = locality.window(self._graph, operator), locality.window(self._graph, operator, 2)
        sideways = sum(padding(wide.size, wide.stride, wide.rows_in, wide.rows_out)) if wide.same else 0
        needs = high.needs(rows)
        if high.same and needs.before + needs.after + sideways == 0:
            return found.rows, 0, {"padding": _VALID}
        return found.rows, found.skip, {}

    def _paddings(self, operator: Operator, rows: Range) -> int:
        """Return the amounts that a PAD adds on this side."""
        _, before, after = locality.padded_rows(self._graph, operator, rows)
        amounts = integers(self._graph, operator.inputs[1]) or [0] * 8
        return self._structure.integers([*amounts[:2], before, after, *amounts[4:]], (4, 2))
