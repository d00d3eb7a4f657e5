"""Input regions that an operator reads for a part of its output, along height or channels.

The window of output row ``r`` begins at input row ``r * stride - before``. Rows outside the input are padding. All
ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from search_spaces.core.errors import RewriteError
from search_spaces.core.graph import Graph, Operator
from search_spaces.models.dtypes import integers

Range = tuple[int, int]


class Rows(NamedTuple):
    """The input rows that some rows of the output need.

    Attributes:
        read: rows of the input.
        before, after: rows of padding above and below them.
    """

    read: Range
    before: int
    after: int


class Slice(NamedTuple):
    """Rows of the input from which an operator computes the wanted rows of its output, and maybe others.

    Attributes:
        read: rows of the input.
        skip: unwanted rows at the beginning of what it computes.
        rows: how many rows it computes.
    """

    read: Range
    skip: int
    rows: int


def padding(size: int, stride: int, rows_in: int, rows_out: int) -> Range:
    """Return how many rows SAME padding adds above and below; ``size`` includes the gaps of dilation."""
    total = max((rows_out - 1) * stride + size - rows_in, 0)
    return total // 2, total - total // 2


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides over one axis.

    Attributes:
        size: rows that it spans, the gaps of a dilated one included.
        stride: rows from one position to the next.
        rows_in, rows_out: of the whole operator.
        same: whether it pads (SAME).
    """

    size: int
    stride: int
    rows_in: int
    rows_out: int
    same: bool

    @property
    def before(self) -> int:
        """Rows of padding above the whole input."""
        return padding(self.size, self.stride, self.rows_in, self.rows_out)[0] if self.same else 0

    def needs(self, rows: Range) -> Rows:
        """Return the input rows that rows of the output need, and the padding around them."""
        first = rows[0] * self.stride - self.before
        last = (rows[1] - 1) * self.stride - self.before + self.size
        return Rows((max(first, 0), min(last, self.rows_in)), max(0, -first), max(0, last - self.rows_in))

    def pads_alike(self, rows: Range) -> bool:
        """Return whether SAME, applied to just the needed input rows, pads them as the whole operator does."""
        found = self.needs(rows)
        count = found.read[1] - found.read[0]
        made = -(-count // self.stride)
        wanted = found.before, found.after
        return self.same and made == rows[1] - rows[0] and padding(self.size, self.stride, count, made) == wanted

    def same_slice(self, rows: Range) -> Slice:
        """Return the fewest rows of the input from which SAME computes the wanted rows.

        Padding must not replace existing rows of the input, so further rows may have to be computed.
        """
        read = self.needs(rows).read
        reach = 2 * (self.size + self.stride)
        for extra in range(2 * reach + 1):
            for above in range(max(0, extra - reach), min(extra, reach) + 1):
                found = self._try(read[0] - above, read[1] + extra - above, rows)
                if found is not None:
                    return found
        return Slice((0, self.rows_in), rows[0], self.rows_out)

    def _try(self, first: int, last: int, rows: Range) -> Slice | None:
        if first < 0 or last > self.rows_in:
            return None
        made = -(-(last - first) // self.stride)
        start = first - padding(self.size, self.stride, last - first, made)[0]
        shift = rows[0] * self.stride - self.before - start
        skip = shift // self.stride
        wanted = rows[1] - rows[0]
        if shift % self.stride or skip < 0 or skip + wanted > made:
            return None
        begin = rows[0] * self.stride - self.before
        end = (rows[1] - 1) * self.stride - self.before + self.size
        if (first > 0 and begin < first) or (last < self.rows_in and end > last):
            return None
        return Slice((first, last), skip, made)


def transposed(size: int, stride: int, rows_in: int, rows_out: int, rows: Range, *, same: bool) -> Slice:
    """Return the rows of the input from which a transposed convolution computes ``rows`` of its output, among others.

    Its padding is that of the convolution from its output to its input.
    """
    before = padding(size, stride, rows_out, -(-rows_out // stride))[0] if same else 0
    first = min(max(0, -(-(rows[0] + before - size + 1) // stride)), rows[0] // stride, rows_in - 1)
    last = max(first + 1, min(rows_in, (rows[1] - 1 + before) // stride + 1))
    short = rows_in * stride - rows_out  # negative where windows reach beyond the last stride
    while last < rows_in and last * stride - short < rows[1]:
        last += 1
    return Slice((first, last), rows[0] - first * stride, (last - first) * stride - short)


Axis = Literal["height", "channels"]


class Part(NamedTuple):
    """Indices ``first`` … ``last - 1`` of a tensor along its dimension ``dimension``."""

    dimension: int
    first: int
    last: int


Need = Part | None
"""A part of a tensor, or all of it."""

MEETS_IN_A_SUM = frozenset({"MEAN"})
"""Operators whose sides along height are combined by a weighted sum, not by concatenation."""

CONVOLUTIONS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D"})
POOLS = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D"})
ELEMENTWISE = frozenset(
    """ABS ADD CEIL COS DEQUANTIZE DIV ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGISTIC MAXIMUM MINIMUM MUL NEG
    POW PRELU QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIN SQRT SQUARE SQUARED_DIFFERENCE SUB
    TANH""".split()  # noqa: SIM905 - a list that is read as words
)
_PACKED = frozenset({"int2", "int4", "uint4"})  # several elements in a byte


def what(graph: Graph, index: int) -> str:
    """Return the name of an operator for errors."""
    return f"operator {index} ({graph.operators[index].kind})"


def axis_of(shape: tuple[int, ...], axis: Axis) -> int | None:
    """Return which dimension of a tensor is the axis: height is the second of four, channels are the last."""
    if axis == "height":
        return 1 if len(shape) == 4 else None
    return len(shape) - 1 if len(shape) > 1 else None


def needs(graph: Graph, index: int, axis: Axis, rows: Range) -> tuple[Need, ...]:
    """Return, for each input of an operator, what it reads for ``rows`` of its output along the axis.

    For operators of :data:`MEETS_IN_A_SUM`, ``rows`` are those of the input.

    Raises:
        RewriteError: it cannot be split along that axis, or not there.
    """
    operator = graph.operators[index]
    rule = _RULES[axis].get(operator.kind)
    if rule is None:
        raise RewriteError(f"{what(graph, index)} cannot be split along {axis}", "split the operators around it")
    try:
        found = rule(graph, operator, rows)
    except ValueError as error:
        raise RewriteError(f"{what(graph, index)} cannot be split along {axis}: {error}") from None
    for read, need in zip(operator.inputs, found, strict=True):
        if need is not None and graph.tensors[read].constant:
            _check_constant(graph, index, read)
    return found


def _check_constant(graph: Graph, index: int, tensor: int) -> None:
    """Check that a part of a constant can be sliced.

    Raises:
        RewriteError: it is computed, sparse, or packed.
    """
    held = graph.tensors[tensor]
    source = graph.source
    if source is not None and tensor in source.recipes:
        raise RewriteError(
            f"{what(graph, index)}: its weights {held.name!r} are computed (float16, say), so no part of them lies "
            f"in the file",
            "split it along height",
        )
    sparse = source is not None and source.schema.subgraphs[0].tensors[tensor].sparsity is not None
    if sparse or held.dtype in _PACKED:
        kind = "sparse" if sparse else f"packed ({held.dtype})"
        raise RewriteError(f"{what(graph, index)}: its weights {held.name!r} are {kind}", "split it along height")


def window(graph: Graph, operator: Operator, dimension: int = 1) -> Window:
    """Return the window of a convolution or a pooling along height (1) or width (2)."""
    side = "h" if dimension == 1 else "w"
    options = operator.options
    if operator.kind in POOLS:
        size = int(options["filter_height" if dimension == 1 else "filter_width"])
    else:
        size = graph.tensors[operator.inputs[1]].shape[dimension]
        size = (size - 1) * int(options.get(f"dilation_{side}_factor", 1)) + 1
    return Window(
        size,
        int(options[f"stride_{side}"]),
        graph.tensors[operator.inputs[0]].shape[dimension],
        graph.tensors[operator.outputs[0]].shape[dimension],
        options.get("padding") == "SAME",
    )


def pool_slice(graph: Graph, operator: Operator, rows: Range) -> tuple[Slice, bool]:
    """Return what a pooling reads for rows of its output, and whether it pads, which zeros cannot replace."""
    high, wide = window(graph, operator), window(graph, operator, 2)
    found = high.needs(rows)
    if sum(padding(wide.size, wide.stride, wide.rows_in, wide.rows_out)) * wide.same == 0 == found.before + found.after:
        return Slice(found.read, 0, rows[1] - rows[0]), False
    return high.same_slice(rows), True


def transposed_slice(graph: Graph, operator: Operator, rows: Range) -> Slice:
    """Return what a transposed convolution reads for rows of its output."""
    size = graph.tensors[operator.inputs[1]].shape[1]
    rows_in, rows_out = graph.tensors[operator.inputs[2]].shape[1], graph.tensors[operator.outputs[0]].shape[1]
    same = operator.options.get("padding") == "SAME"
    return transposed(size, int(operator.options["stride_h"]), rows_in, rows_out, rows, same=same)


def padded_rows(graph: Graph, operator: Operator, rows: Range) -> tuple[Range, int, int]:
    """Return the rows of its input that a PAD reads for rows of its output, and what it adds above and below.

    Raises:
        ValueError: it would read nothing.
    """
    above = _paddings(graph, operator)[2]
    height = graph.tensors[operator.inputs[0]].shape[1]
    read = max(0, rows[0] - above), min(height, rows[1] - above)
    if read[0] >= read[1]:
        raise ValueError(f"rows {rows[0]} to {rows[1] - 1} are nothing but padding")
    return read, max(0, above - rows[0]), max(0, rows[1] - above - height)


def _paddings(graph: Graph, operator: Operator) -> list[int]:
    found = integers(graph, operator.inputs[1])
    if found is None or len(found) != 8:
        raise ValueError("its padding is not known, or not that of four dimensions")
    return found


def _only(operator: Operator, place: int, part: Part) -> tuple[Need, ...]:
    """Return the needs of an operator that reads a part of one input, and all others whole."""
    return tuple(part if i == place else None for i in range(len(operator.inputs)))


def _bias(tensors: Sequence[int], rows: Range) -> list[Need]:
    return [Part(0, *rows) if t != -1 else None for t in tensors]


def _mean_rows(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    axes = integers(graph, operator.inputs[1])
    if axes is None or 1 not in [a % 4 for a in axes]:
        raise ValueError("it is a mean over other axes")
    if graph.tensors[operator.outputs[0]].dtype != "float32":
        raise ValueError("the sum of two rounded means is not the mean")
    return (Part(1, *rows), None)


def _elementwise(graph: Graph, operator: Operator, rows: Range, dimension: int) -> tuple[Need, ...]:
    """Return what broadcasting reads: dimensions are aligned at the last one, and size 1 is broadcast."""
    shape = graph.tensors[operator.outputs[0]].shape
    dimension %= len(shape)
    found: list[Need] = []
    for index in operator.inputs:
        tensor = graph.tensors[index]
        place = dimension - len(shape) + len(tensor.shape)
        if place < 0 or tensor.shape[place] == 1 != shape[dimension]:
            found.append(None)
        elif operator.kind in {"DEQUANTIZE", "QUANTIZE"} and _per_channel(graph, index, operator.outputs[0]):
            raise ValueError("it is quantised per channel")
        else:
            found.append(Part(place, *rows))
    return tuple(found)


def _per_channel(graph: Graph, *tensors: int) -> bool:
    if graph.source is None:
        return False
    held = [graph.source.schema.subgraphs[0].tensors[t].quantization for t in tensors]
    return any(q is not None and q.scale is not None and len(q.scale) > 1 for q in held)


def _concatenation(graph: Graph, operator: Operator, rows: Range, dimension: int) -> tuple[Need, ...]:
    rank = len(graph.tensors[operator.outputs[0]].shape)
    if int(operator.options.get("axis", 0)) % rank == dimension % rank:
        raise ValueError("it joins along this very axis")
    return tuple(Part(dimension % rank, *rows) for _ in operator.inputs)


def _convolution_channels(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    weights = graph.tensors[operator.inputs[1]].shape
    groups = graph.tensors[operator.inputs[0]].shape[3] // max(1, weights[3])
    bias = _bias(operator.inputs[2:], rows)
    if groups == 1:
        return (None, Part(0, *rows), *bias)
    each = weights[0] // groups
    if rows[0] % each or rows[1] % each:
        raise ValueError(f"a cut must lie between two of its {groups} groups, at a multiple of {each}")
    read = Part(3, rows[0] // each * weights[3], rows[1] // each * weights[3])
    return (read, Part(0, *rows), *bias)


def _depthwise_channels(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    times = graph.tensors[operator.outputs[0]].shape[3] // graph.tensors[operator.inputs[0]].shape[3]
    if rows[0] % times or rows[1] % times:
        raise ValueError(f"a cut must lie at a multiple of its {times} filters for each channel")
    bias = _bias(operator.inputs[2:], rows)
    return (Part(3, rows[0] // times, rows[1] // times), Part(3, *rows), *bias)


def _dense_channels(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    if not graph.tensors[operator.inputs[1]].constant:
        raise ValueError("its weights are computed")
    return (None, Part(0, *rows), *_bias(operator.inputs[2:], rows))


def _pad_channels(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    if any(_paddings(graph, operator)[6:]):
        raise ValueError("it adds channels")
    return _only(operator, 0, Part(3, *rows))


def _mean_channels(graph: Graph, operator: Operator, rows: Range) -> tuple[Need, ...]:
    axes = integers(graph, operator.inputs[1])
    rank = len(graph.tensors[operator.inputs[0]].shape)
    if axes is None or rank - 1 in [a % rank for a in axes]:
        raise ValueError("it is a mean over channels, or over axes that are not known")
    return (Part(rank - 1, *rows), None)


_Rule = Callable[[Graph, Operator, Range], tuple[Need, ...]]

_RULES: Mapping[Axis, Mapping[str, _Rule]] = {
    "height": {
        **dict.fromkeys(ELEMENTWISE, partial(_elementwise, dimension=1)),
        **dict.fromkeys(CONVOLUTIONS, lambda g, o, rows: _only(o, 0, Part(1, *window(g, o).needs(rows).read))),
        **dict.fromkeys(POOLS, lambda g, o, rows: _only(o, 0, Part(1, *pool_slice(g, o, rows)[0].read))),
        "CONCATENATION": partial(_concatenation, dimension=1),
        "MEAN": _mean_rows,
        "PAD": lambda g, o, rows: _only(o, 0, Part(1, *padded_rows(g, o, rows)[0])),
        "TRANSPOSE_CONV": lambda g, o, rows: _only(o, 2, Part(1, *transposed_slice(g, o, rows).read)),
    },
    "channels": {
        **dict.fromkeys(ELEMENTWISE, partial(_elementwise, dimension=-1)),
        **dict.fromkeys(POOLS, lambda _, o, rows: _only(o, 0, Part(3, *rows))),
        "CONCATENATION": partial(_concatenation, dimension=-1),
        "CONV_2D": _convolution_channels,
        "DEPTHWISE_CONV_2D": _depthwise_channels,
        "FULLY_CONNECTED": _dense_channels,
        "MEAN": _mean_channels,
        "PAD": _pad_channels,
        "TRANSPOSE_CONV": lambda _, o, rows: (None, Part(0, *rows), None, *_bias(o.inputs[3:], rows)),
    },
}
