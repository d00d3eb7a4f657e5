"""Features that decide an operator's time: its kernel, work, traffic, shape, and what ran before it.

Seed 004: work (MACs) and traffic (bytes) together explain latency, neither alone. Seed 002: the rest depends on how the
shape is divided into the kernel's tiles, so the shape is part of the features.

After matrix products a core runs other kernels differently for milliseconds. On the machine where this was found, a 3
by 3 convolution takes 1.9 ms among convolutions, and 2.1 to 2.25 ms within about 4 ms of a matrix product, such as a
pointwise convolution; matrix products are slower where none ran before them. The cause is not known; other operators
neither cause nor undo it. It is modelled by the share of matrix products in the time before, weighted towards the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.intensity import Cost, operator_costs

KERNELS = (
    "conv",  # a convolution that none of the next four describes
    "winograd",  # 3 by 3, stride 1, dense, deep and large enough to run by the Winograd transform
    "pointwise",  # 1 by 1, dense
    "depthwise",
    "grouped",
    "fully_connected",  # also a pointwise convolution of one pixel
    "transpose_conv",
    "matmul",  # of two activations
    "pool",
    "mean",  # over height and width
    "elementwise",
    "concat",
    "softmax",
    "copy",  # slices, paddings, transpositions
    "other",  # all other kinds; predicted from bytes alone
)

MERGED = frozenset({"PAD"})
"""Kinds that runtimes fuse with the operator that reads them, if it is in the same stage."""

_FINE = frozenset({"elementwise", "pool", "mean", "copy", "softmax", "other"})

Plane = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class OperatorFeatures:
    """Work, traffic and shape of one operator in one inference, at batch 1.

    Attributes:
        kernel: kind of kernel that runs it, one of :data:`KERNELS`.
        kind: the schema's name (``CONV_2D``).
        macs: multiply-accumulates.
        read_bytes: activations read.
        weight_bytes: constants read.
        written_bytes: activations written.
        input, output: height, width, channels of the (first) activation read and written.
        filter, stride: height and width; (1, 1) where there is none.
        groups: of a grouped convolution, else 1.
        inputs: number of activations read.
        activation: fused into it (``RELU``), or "".
        repeats: how the smaller operand of an elementwise operator is broadcast: "channels" where it has one value for
            each pixel, "pixels" where it has one row of channels, "" where nothing or a single value is broadcast.
        dtype: of the activations.
        free: whether no kernel runs: it only changes a shape, or the runtime fuses it with a neighbour.
        fusable: whether a runtime that fuses elementwise operators runs it in the kernel of an operator before it.
        interval_s: time from one inference to the next (s), which decides how much of its weights the caches still
            hold; 0 where unknown.
        matrix_share: share of matrix products in the time just before (:func:`with_matrix_shares`), from 0 to 1.
        resident_bytes: the part of ``read_bytes`` that the previous operator wrote: it may still be in cache.
    """

    kernel: str
    kind: str
    macs: int
    read_bytes: int
    weight_bytes: int
    written_bytes: int
    input: Plane = (1, 1, 1)
    output: Plane = (1, 1, 1)
    filter: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    groups: int = 1
    inputs: int = 1
    activation: str = ""
    repeats: str = ""
    dtype: str = "float32"
    free: bool = False
    fusable: bool = False
    resident_bytes: int = 0
    interval_s: float = 0.0
    matrix_share: float = 0.0

    @property
    def key(self) -> str:
        """Key of its kernel model: the kernel, and the element type where that is not floating point."""
        return self.kernel if self.dtype.startswith("float") else f"{self.kernel}:{self.dtype}"

    @property
    def fine(self) -> str:
        """Key of its finer kernel model, where there is one.

        Elementwise kernels differ by kind and by how an operand is broadcast, depthwise ones are written for one filter
        size each, a strided pointwise convolution is not a plain matrix product, and a product with one vector is bound
        by reading its weights.
        """
        if self.kernel == "depthwise":
            return f"{self.key}/{self.filter[0] * self.filter[1]}"
        if self.kernel == "pointwise" and self.stride != (1, 1):
            return f"{self.key}/strided"
        if self.kernel == "fully_connected":
            return f"{self.key}/vector" if self.output[0] * self.output[1] == 1 else f"{self.key}/rows"
        if self.kernel not in _FINE:
            return self.key
        clamped = "+clamp" if self.activation and self.kernel == "elementwise" else ""
        return f"{self.key}/{self.kind}{clamped}" + (f"+{self.repeats}" if self.repeats else "")

    @property
    def fine_once(self) -> str:
        """:attr:`fine` without how an operand is broadcast, as in profiles made before it was included."""
        return self.fine.removesuffix(f"+{self.repeats}")

    @property
    def moved_bytes(self) -> int:
        """All bytes read and written, each once."""
        return self.read_bytes + self.weight_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in MACs per byte moved; 0 where nothing moves."""
        return self.macs / self.moved_bytes if self.moved_bytes else 0.0


def operator_features(graph: Graph) -> tuple[OperatorFeatures, ...]:
    """Return the features of each operator of a graph, in its order.

    ``resident_bytes`` assumes that the whole graph runs on one processor in this order.
    """
    before = [frozenset[int](), *(frozenset(operator.outputs) for operator in graph.operators)]
    each = zip(graph.operators, operator_costs(graph), before, fusions(graph), strict=False)
    return tuple(
        replace(_described(graph, operator, cost, written), fusable=bool(needs))
        for operator, cost, written, needs in each
    )


def fused(features: Sequence[OperatorFeatures]) -> tuple[OperatorFeatures, ...]:
    """Return features as they are on a runtime that fuses elementwise operators, as OpenVINO does."""
    return tuple(replace(f, free=True) if f.fusable else f for f in features)


def fusions(graph: Graph) -> list[tuple[int, ...]]:
    """Return for each operator those that a stage must hold for it to run in the kernel of one of them.

    Empty where it always has a kernel of its own. What OpenVINO fuses, by its profiler: into convolutions functions of
    one tensor, constants, and sums with a second tensor that the stage computes before; into fully connected layers
    functions and constants; any elementwise operator into another one that has a kernel. The fused operator is the only
    reader of what the other one writes, and keeps its shape; only ``x * sigmoid(x)`` reads a convolution twice.
    """
    found: list[tuple[int, ...]] = []
    kernels: list[str] = []  # in which each runs
    for index, operator in enumerate(graph.operators):
        maps = _KERNEL_OF.get(operator.kind) == "elementwise" and len(operator.outputs) == 1
        host, needs = _fused(graph, index, kernels) if maps else (-1, ())
        own = "conv" if operator.kind in _FILTERED else _KERNEL_OF.get(operator.kind, "other")
        kernels.append(kernels[host] if needs else own)
        found.append(needs)
    return found


def _fused(graph: Graph, index: int, kernels: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """Return the operator in whose kernel an elementwise operator runs, and those that its stage must hold."""
    operator = graph.operators[index]
    reads = {t for t in operator.inputs if t != -1 and not graph.tensors[t].constant}
    # Inputs have no writer, and variables one that may come later.
    writers = {t: graph.producer[t] for t in reads if graph.producer.get(t, index) < index}
    if (gated := _gated(graph, index)) is not None:
        return gated, (gated,)
    once = len(reads) == 1 and sum(t in reads for t in operator.inputs) == 1
    for tensor, writer in sorted(writers.items(), key=lambda pair: -pair[1]):  # a stage with any holds the last
        alone = graph.consumers[tensor] == (index,) and tensor not in graph.outputs
        if not alone or graph.tensors[tensor].shape != graph.tensors[operator.outputs[0]].shape:
            continue
        if kernels[writer] == "elementwise" or (once and kernels[writer] in {"conv", "fully_connected"}):
            return writer, (writer,)
        if kernels[writer] == "conv" and operator.kind == "ADD" and len(writers) == len(reads) > 1:
            return writer, tuple(sorted(set(writers.values())))
    return -1, ()


def _gated(graph: Graph, index: int) -> int | None:
    """Return the convolution whose result a LOGISTIC and a MUL multiply by its own sigmoid; None where they do not."""
    operator = graph.operators[index]
    for tensor in operator.inputs if operator.kind in {"LOGISTIC", "MUL"} else ():
        readers, writer = graph.consumers.get(tensor, ()), graph.producer.get(tensor, index)
        if writer >= index or len(readers) != 2 or index not in readers or tensor in graph.outputs:
            continue
        function, product = (graph.operators[reader] for reader in readers)
        if (function.kind, product.kind) != ("LOGISTIC", "MUL") or graph.operators[writer].kind not in _FILTERED:
            continue
        gate = next(iter(function.outputs), -1)
        if set(product.inputs) == {tensor, gate} and graph.consumers.get(gate) == readers[1:]:
            return writer if gate not in graph.outputs else None
    return None


def _in_consumer(graph: Graph, operator: Operator) -> bool:
    """Return whether an operator is a padding that runtimes fuse with the convolution behind it."""
    if operator.kind not in MERGED or len(operator.outputs) != 1 or operator.outputs[0] in graph.outputs:
        return False
    shape = graph.tensors[operator.inputs[0]].shape
    padded = graph.tensors[operator.outputs[0]].shape
    readers = [graph.operators[c] for c in graph.consumers.get(operator.outputs[0], ())]
    return (
        len(readers) == 1
        and readers[0].kind in {"CONV_2D", "DEPTHWISE_CONV_2D"}
        and readers[0].options.get("padding") == "VALID"
        and len(shape) == len(padded) == 4
        and (shape[0], shape[3]) == (padded[0], padded[3])
    )


def _described(graph: Graph, operator: Operator, cost: Cost, just_written: frozenset[int]) -> OperatorFeatures:
    tensors, options = graph.tensors, operator.options
    inputs = set(operator.inputs) - {-1}
    reads = [tensors[i] for i in operator.inputs if i != -1 and not tensors[i].constant]
    writes = [tensors[i] for i in operator.outputs]
    constants = min(sum(tensors[i].nbytes for i in inputs if tensors[i].constant), cost.read_bytes)
    source, target = _plane(reads), _plane(writes)
    filters, groups = (1, 1), 1
    index = operator.inputs[1] if len(operator.inputs) > 1 else -1
    weights = tensors[index] if index != -1 else None
    if operator.kind in _FILTERED and weights is not None and len(weights.shape) == 4:
        filters = (max(1, weights.shape[1]), max(1, weights.shape[2]))
        groups = max(1, source[2] // max(1, weights.shape[3])) if operator.kind == "CONV_2D" else 1
    elif "filter_height" in options:
        filters = (max(1, int(options["filter_height"])), max(1, int(options["filter_width"])))
    stride = (max(1, int(options.get("stride_h", 1))), max(1, int(options.get("stride_w", 1))))
    activation = str(options.get("fused_activation", ""))
    kernel = _KERNEL_OF.get(operator.kind, "other")
    if operator.kind == "CONV_2D":
        kernel = convolution_kernel(filters, stride, groups, source, target)
    return OperatorFeatures(
        kernel=kernel,
        kind=operator.kind,
        macs=cost.macs,
        read_bytes=cost.read_bytes - constants,
        weight_bytes=constants,
        written_bytes=cost.written_bytes,
        input=source,
        output=target,
        filter=filters,
        stride=stride,
        groups=groups,
        inputs=max(1, len(reads)),
        activation="" if activation == "NONE" else activation,
        repeats=_repeats(operator, graph) if kernel == "elementwise" else "",
        dtype=(writes or reads)[0].dtype if writes or reads else "float32",
        free=operator.kind in _FREE or _in_consumer(graph, operator),
        resident_bytes=min(cost.read_bytes - constants, sum(tensors[i].nbytes for i in inputs & just_written)),
    )


def _repeats(operator: Operator, graph: Graph) -> str:
    """Return how the smallest operand is broadcast (:class:`OperatorFeatures`)."""
    if not operator.outputs:
        return ""
    operands = [graph.tensors[i].shape for i in operator.inputs if i != -1]
    target = graph.tensors[operator.outputs[0]].shape
    least = min(operands, key=prod, default=())
    if not least or prod(least) <= 1 or prod(least) >= prod(target):
        return ""
    return "channels" if least[-1] == 1 < target[-1] else "pixels"


def convolution_kernel(
    filters: tuple[int, int], stride: tuple[int, int], groups: int, source: Plane, target: Plane
) -> str:
    """Return the kind of kernel that runs a convolution from ``source`` to ``target``.

    GPU runtimes use a Winograd transform (4 by 4 outputs from 6 by 6 inputs) where depth and size make it worthwhile.
    """
    if groups > 1:
        return "depthwise" if groups == source[2] else "grouped"
    if filters == (1, 1):
        return "fully_connected" if target[:2] == (1, 1) else "pointwise"
    tiles = -(-target[0] // 4) * -(-target[1] // 4)
    deep = min(-(-source[2] // 4), -(-target[2] // 4)) >= _WINOGRAD_LEAST_DEPTH
    if filters == (3, 3) and stride == (1, 1) and deep and tiles >= _WINOGRAD_LEAST_TILES:
        return "winograd"
    return "conv"


def _plane(tensors: list[Tensor]) -> Plane:
    """Return height, width and channels of the first tensor: the last axis holds channels, the two before it pixels."""
    shape = tuple(max(1, size) for size in tensors[0].shape) if tensors else ()
    height, width, channels = (1, 1, 1, *shape)[-3:]
    if len(shape) > 4:
        height *= prod(shape[1:-3])
    return (height, width, channels)


_WINOGRAD_LEAST_DEPTH = 16  # slices of four channels
_WINOGRAD_LEAST_TILES = 32

_FILTERED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"})

_FREE = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "BITCAST"})

_KINDS: dict[str, str] = {
    "depthwise": "DEPTHWISE_CONV_2D",
    "fully_connected": "FULLY_CONNECTED",
    "transpose_conv": "TRANSPOSE_CONV",
    "matmul": "BATCH_MATMUL",
    "concat": "CONCATENATION",
    "pool": "AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D",
    "mean": "MEAN",
    "softmax": "SOFTMAX LOG_SOFTMAX",
    "elementwise": """ABS ADD ADD_N CAST CEIL CLAMP COS DEQUANTIZE DIV ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG
        LOGISTIC MAXIMUM MINIMUM MUL NEG POW PRELU QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIN SQRT
        SQUARE SQUARED_DIFFERENCE SUB TANH""",
    "copy": """BATCH_TO_SPACE_ND DEPTH_TO_SPACE GATHER MIRROR_PAD PACK PAD PADV2 SLICE SPACE_TO_BATCH_ND SPACE_TO_DEPTH
        SPLIT SPLIT_V STRIDED_SLICE TILE TRANSPOSE UNPACK""",
}
_KERNEL_OF = {kind: kernel for kernel, kinds in _KINDS.items() for kind in kinds.split()}


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Features of n operators as arrays of shape ``(n,)``, float64; names as in :class:`OperatorFeatures`."""

    macs: Array
    read: Array
    weight: Array
    written: Array
    resident: Array
    groups: Array
    inputs: Array
    interval: Array  # time between two uses of the same weights (s); 0 where unknown
    matrix_share: Array  # share of matrix products in the time just before
    pixels: Array  # of the output
    pixels_in: Array
    channels: Array  # of the output
    channels_in: Array
    taps: Array  # filter height times width

    def __getitem__(self, rows: npt.NDArray[np.intp] | slice) -> Columns:
        return Columns(*(getattr(self, name)[rows] for name in self.__slots__))


_OWN = attrgetter(
    *("macs", "read_bytes", "weight_bytes", "written_bytes", "resident_bytes", "groups"),
    *("inputs", "interval_s", "matrix_share"),
)


def columns(features: Sequence[OperatorFeatures]) -> Columns:
    """Return the features as arrays, one row an operator."""
    rows = []
    for f in features:
        (high, wide, channels), (high_in, wide_in, channels_in), (tall, broad) = f.output, f.input, f.filter
        rows.append((*_OWN(f), high * wide, high_in * wide_in, channels, channels_in, tall * broad))
    return Columns(*np.asarray(rows, dtype=np.float64).reshape(len(rows), 14).T)


MEMORY_S = 4e-3
"""Time constant of the history: after it, what ran counts less by a factor of e."""
_LEAST_SHARE = 0.03


def multiplies_matrices(feature: OperatorFeatures) -> bool:
    """Return whether an operator runs as a product of two matrices, both of more than one row."""
    if feature.kernel == "fully_connected":
        return feature.output[0] * feature.output[1] > 1
    return feature.kernel == "matmul" or (feature.kernel == "pointwise" and feature.stride == (1, 1))


def history_effect(matrix_share: Array) -> Array:
    """Return the effect of matrix products that ran before, from 0 to about 1; it rises steeply from a share of 0."""
    result: Array = 1.0 + np.log(np.maximum(matrix_share, 0.0) + _LEAST_SHARE) / np.log(1.0 / _LEAST_SHARE)
    return result


def with_matrix_shares(features: Sequence[OperatorFeatures], seconds: Array) -> list[OperatorFeatures]:
    """Return the features of a model that runs again and again, each with its ``matrix_share``.

    Args:
        seconds: time of each operator, shape ``(n,)``; unknown ones count as 0.
    """
    shares = matrix_shares(products(features), seconds)
    return [replace(f, matrix_share=float(share)) for f, share in zip(features, shares, strict=True)]


def products(features: Sequence[OperatorFeatures]) -> Array:
    """Return 1 for each operator that runs as a product of matrices, else 0; shape ``(n,)``."""
    return np.array([float(not f.free and multiplies_matrices(f)) for f in features])


def matrix_shares(products: Array, seconds: Array) -> Array:
    """Return the ``matrix_share`` of each operator of a model that runs again and again, shape ``(n,)``.

    Args:
        products: 1 for each operator that runs as a product of matrices, else 0.
        seconds: time of each operator, shape ``(n,)``; unknown ones count as 0.
    """
    took = np.maximum(np.nan_to_num(seconds, nan=0.0, posinf=0.0), 0.0) / MEMORY_S
    fades = np.exp(-took)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(took > 1e-9, (1.0 - fades) / took, 1.0)  # mean weight, while it runs, of what ran before
    each = list(zip(products.tolist(), fades.tolist(), strict=True))
    share, before = 0.0, []
    for busy, fade in each:
        share = share * fade + busy * (1.0 - fade)
    share /= max(1e-9, 1.0 - float(fades.prod()))  # the steady state over many inferences
    for busy, fade in each:
        before.append(share)
        share = busy + (share - busy) * fade
    found: Array = products + (np.array(before) - products) * weights
    return found
