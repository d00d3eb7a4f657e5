"""Work and traffic of an operator: multiplications, parameters, bytes, arithmetic intensity.

Counted from shapes alone. For square convolutions with M channels in and out, D by D maps and K by K filters this is
the table of seed 004 (a FLOP there is one multiply-accumulate here, and memory is counted in elements there):

==============  ==========  ==================
convolution     MACs        elements moved
==============  ==========  ==================
normal          D²·M²·K²    D²·2M + K²·M²
depthwise       D²·M·K²     D²·2M + K²·M
pointwise       D²·M²       D²·2M + M²
==============  ==========  ==================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isqrt, prod

from search_spaces.core.graph import Graph, Operator, Tensor


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operator does in one inference; open dimensions count as 1.

    Attributes:
        macs: multiply-accumulates; 0 for operators that only move or map elements.
        parameters: weights read, in elements.
        read_bytes: inputs and weights, each tensor once; only the elements taken by an operator such as ``GATHER``.
        written_bytes: outputs.
        known: whether the operator's arithmetic is counted; unknown operators count as memory traffic alone.
    """

    macs: int
    parameters: int
    read_bytes: int
    written_bytes: int
    known: bool = True

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in MACs per byte moved; 0 where nothing moves."""
        moved = self.read_bytes + self.written_bytes
        return self.macs / moved if moved else 0.0


def operator_costs(graph: Graph) -> tuple[Cost, ...]:
    """Return the cost of each operator; a weight that several share counts for each of them."""
    return tuple(_cost(graph, operator) for operator in graph.operators)


def parameter_total(graph: Graph, operators: Iterable[int] | None = None) -> int:
    """Return the weights that some operators (all by default) read, in elements; shared ones count once."""
    chosen = range(len(graph.operators)) if operators is None else operators
    return sum(_weights(graph, (part for o in chosen for part in graph.operators[o].flat())).values())


def unknown_kinds(graph: Graph) -> dict[str, int]:
    """Return the kinds of operators whose arithmetic is not counted, and how many there are of each."""
    parts = (part for operator in graph.operators for part in operator.flat())
    return Counter(part.kind for part in parts if not _is_known(part.kind))


def _cost(graph: Graph, operator: Operator) -> Cost:
    if operator.parts:
        parts = [_cost(graph, part) for part in operator.parts]
        return Cost(
            macs=sum(c.macs for c in parts),
            parameters=sum(_weights(graph, operator.parts).values()),
            read_bytes=sum(c.read_bytes for c in parts),
            written_bytes=sum(c.written_bytes for c in parts),
            known=all(c.known for c in parts),
        )
    inputs = [graph.tensors[i] if i != -1 else None for i in operator.inputs]
    outputs = [graph.tensors[i] for i in operator.outputs]
    written = sum(t.nbytes for t in outputs)
    reads = [graph.tensors[i].nbytes for i in set(operator.inputs) if i != -1]
    if operator.kind in _READS_SHAPE:
        reads = []
    elif operator.kind in _READS_PART:
        reads = [min(nbytes, written) for nbytes in reads]
    count = _MACS.get(operator.kind)
    return Cost(
        macs=count(inputs, outputs) if count is not None else 0,
        parameters=sum(_weights(graph, [operator]).values()),
        read_bytes=sum(reads),
        written_bytes=written,
        known=_is_known(operator.kind),
    )


def _weights(graph: Graph, operators: Iterable[Operator]) -> dict[tuple[str, int], int]:
    """Return the elements of each weight read; tensors that lie in one buffer of the file are one weight."""
    found: dict[tuple[str, int], int] = {}
    for operator in operators:
        for index in operator.inputs:
            if index == -1 or not _is_weight(graph.tensors[index], operator.kind):
                continue
            tensor = graph.tensors[index]
            key = ("buffer", tensor.buffer) if tensor.buffer else ("tensor", index)
            found[key] = max(found.get(key, 0), _elements(tensor.shape))
    return found


def _is_weight(tensor: Tensor, kind: str) -> bool:
    """Tell weights from shapes, axes and paddings, which are integers that enter no multiplication."""
    return tensor.constant and (tensor.dtype not in _INDEX_TYPES or kind in _MACS)


def _is_known(kind: str) -> bool:
    return kind in _MACS or kind in _MOVES


def _elements(shape: Iterable[int]) -> int:
    return prod(max(1, size) if size < 0 else size for size in shape)


# Each counter takes an operator's inputs (None where left out) and outputs. A damaged model may give it tensors of
# the wrong rank: every counter then returns 0 rather than fail, since a cost is a statement about a valid operator.
_Tensors = list[Tensor | None]
_Counter = Callable[[_Tensors, list[Tensor]], int]


def _shape(tensors: _Tensors, index: int, rank: int = 0) -> tuple[int, ...]:
    """Return a shape with open dimensions as 1, or () where the tensor is missing or has fewer than ``rank``."""
    tensor = tensors[index] if index < len(tensors) else None
    if tensor is None or len(tensor.shape) < rank:
        return ()
    return tuple(max(1, size) if size < 0 else size for size in tensor.shape)


def _of_output(filter_axes: slice, rank: int) -> _Counter:
    """Count the filter's ``filter_axes`` (of ``rank``) once for each output element."""

    def count(inputs: _Tensors, outputs: list[Tensor]) -> int:
        weights = _shape(inputs, 1, rank)
        return _elements(outputs[0].shape) * prod(weights[filter_axes]) if weights and outputs else 0

    return count


def _of_input(filter_axes: slice, rank: int) -> _Counter:
    """Count the filter's ``filter_axes`` (of ``rank``) once for each element of input 2, which is scattered."""

    def count(inputs: _Tensors, outputs: list[Tensor]) -> int:  # noqa: ARG001 - as every counter
        weights, data = _shape(inputs, 1, rank), _shape(inputs, 2, 1)
        return prod(data) * prod(weights[filter_axes]) if weights and data else 0

    return count


def _matmul(inputs: _Tensors, outputs: list[Tensor]) -> int:
    """Count ``m·k·n`` per matrix of the batch; k follows from the sizes, whichever side is transposed."""
    left, right = _shape(inputs, 0, 2), _shape(inputs, 1, 2)
    result = _shape(list(outputs), 0, 2)
    if not (left and right and result) or not prod(result):
        return 0
    squared = prod(left[-2:]) * prod(right[-2:]) // prod(result[-2:])  # (m·k)(k·n) / (m·n)
    return prod(result) * isqrt(squared)


def _recurrent(inputs: _Tensors, outputs: list[Tensor]) -> int:  # noqa: ARG001 - as every counter
    """Count every weight matrix once for each step of each sequence; input 0 is ``(…, features)``."""
    data = _shape(inputs, 0, 1)
    matrices = [t for t in inputs[1:] if t is not None and len(t.shape) == 2 and not t.variable]
    return prod(data[:-1]) * sum(_elements(t.shape) for t in matrices) if data else 0


def _lstm(inputs: _Tensors, outputs: list[Tensor]) -> int:
    """Count like :func:`_recurrent`; the basic kernel's five inputs are data, output, weights, bias and state."""
    return _recurrent([inputs[0], inputs[2]] if len(inputs) == 5 else inputs, outputs)


_MACS: dict[str, _Counter] = {
    "CONV_2D": _of_output(slice(1, 4), 4),  # O, H, W, I / groups
    "DEPTHWISE_CONV_2D": _of_output(slice(1, 3), 4),  # 1, H, W, O
    "CONV_3D": _of_output(slice(0, 4), 5),  # D, H, W, I, O
    "FULLY_CONNECTED": _of_output(slice(1, 2), 2),  # O, I
    "TRANSPOSE_CONV": _of_input(slice(0, 3), 4),  # O, H, W, I
    "CONV_3D_TRANSPOSE": _of_input(slice(0, 4), 5),  # D, H, W, O, I
    "BATCH_MATMUL": _matmul,
    "LSTM": _lstm,
    "RNN": _recurrent,
    "SVDF": _recurrent,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _recurrent,
    "UNIDIRECTIONAL_SEQUENCE_RNN": _recurrent,
    "BIDIRECTIONAL_SEQUENCE_LSTM": _recurrent,
    "BIDIRECTIONAL_SEQUENCE_RNN": _recurrent,
}

_INDEX_TYPES = frozenset({"bool", "int32", "int64", "uint32", "uint64", "string"})

_READS_SHAPE = frozenset({"RANK", "SHAPE", "ZEROS_LIKE"})

_READS_PART = frozenset({"EMBEDDING_LOOKUP", "GATHER", "GATHER_ND", "SLICE", "STRIDED_SLICE"})

# Builtin operators that cost what they move: pooling, reductions, element by element, copies.
_MOVES = frozenset(
    """
    ABS ADD ADD_N ARG_MAX ARG_MIN ATAN2 AVERAGE_POOL_2D BATCH_TO_SPACE_ND BITCAST BITWISE_XOR BROADCAST_ARGS
    BROADCAST_TO BUCKETIZE CAST CEIL COMPLEX_ABS CONCATENATION COS CUMSUM DENSIFY DEPTH_TO_SPACE DEQUANTIZE DILATE
    DIV DYNAMIC_UPDATE_SLICE ELU EMBEDDING_LOOKUP EQUAL EXP EXPAND_DIMS FAKE_QUANT FILL FLOOR FLOOR_DIV FLOOR_MOD
    GATHER GATHER_ND GELU GREATER GREATER_EQUAL HARD_SWISH IMAG L2_NORMALIZATION L2_POOL_2D LEAKY_RELU LESS
    LESS_EQUAL LOCAL_RESPONSE_NORMALIZATION LOG LOG_SOFTMAX LOGICAL_AND LOGICAL_NOT LOGICAL_OR LOGISTIC MATRIX_DIAG
    MATRIX_SET_DIAG MAX_POOL_2D MAXIMUM MEAN MINIMUM MIRROR_PAD MUL NEG NOT_EQUAL ONE_HOT PACK PAD PADV2 POW PRELU
    QUANTIZE RANGE RANK REAL REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD RELU RELU6 RELU_0_TO_1
    RELU_N1_TO_1 RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_SEQUENCE REVERSE_V2 RIGHT_SHIFT ROUND RSQRT
    SCATTER_ND SEGMENT_SUM SELECT SELECT_V2 SHAPE SIGN SIN SLICE SOFTMAX SPACE_TO_BATCH_ND SPACE_TO_DEPTH
    SPARSE_TO_DENSE SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE SQUEEZE STRIDED_SLICE SUB SUM TANH TILE TRANSPOSE
    TOPK_V2 UNPACK UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM WHERE
    ZEROS_LIKE ASSIGN_VARIABLE READ_VARIABLE VAR_HANDLE

    STABLEHLO_ABS STABLEHLO_ADD STABLEHLO_AND STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CBRT STABLEHLO_CLAMP
    STABLEHLO_COMPARE STABLEHLO_CONCATENATE STABLEHLO_CONVERT STABLEHLO_COSINE STABLEHLO_DIVIDE
    STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_GATHER
    STABLEHLO_IOTA STABLEHLO_LOG STABLEHLO_LOGISTIC STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY
    STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_PAD STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RESHAPE STABLEHLO_RSQRT
    STABLEHLO_SELECT STABLEHLO_SHIFT_LEFT STABLEHLO_SLICE STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_TRANSPOSE
    """.split()  # noqa: SIM905 - a list of 130 quoted names is harder to read
)
