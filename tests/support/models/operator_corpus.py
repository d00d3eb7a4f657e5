"""Tiny models of every builtin operator that has a kernel in LiteRT, in each element type that may fit.

A case is written once, with placeholders for what changes from one element type to another: :func:`F` is a tensor of
activations, :func:`W` are weights, :func:`B` is a bias. Whether the runtime takes an operator in an element type is the
question that the corpus asks, so cases that it refuses belong to it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tests.support.models.tflite_models import TYPES, Array, Net

S = schema


@dataclass(frozen=True)
class Slot:
    """A tensor of a case: ``role`` is input, weights, bias, state, or none, which keeps its element type."""

    shape: tuple[int, ...]
    role: str = "input"
    dtype: str = "float32"
    quantization: tuple[float, int] | None = None
    signature: tuple[int, ...] | None = None


def F(*shape: int, q: tuple[float, int] | None = None) -> Slot:  # noqa: N802
    return Slot(shape, quantization=q)


def W(*shape: int) -> Slot:  # noqa: N802
    return Slot(shape, "weights")


def B(*shape: int) -> Slot:  # noqa: N802
    return Slot(shape, "bias")


def V(*shape: int) -> Slot:  # noqa: N802
    """State between two invocations."""
    return Slot(shape, "state")


def K(dtype: str, *shape: int) -> Slot:  # noqa: N802
    """A tensor of one element type, whatever the variant."""
    return Slot(shape, "none", dtype)


def ints(*values: int, dtype: str = "int32") -> Array:
    return np.array(values, dtype)


Item = Slot | Array | None


@dataclass(frozen=True)
class Case:
    """One operator: what it reads (arrays are constants, None is left out), what it writes, its options."""

    kind: str
    inputs: tuple[Item, ...]
    outputs: tuple[Slot, ...]
    options: Any = None
    variant: str = "float32"
    build: Callable[[], Net] | None = None
    label: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.label, self.variant)))

    def net(self) -> Net:
        """Return the model."""
        return self.build() if self.build is not None else _net(self)


_ACTIVATIONS = {"int8": (0.05, 3), "uint8": (0.05, 128), "int16": (0.001, 0)}
_SAME = frozenset({"float32", "int32", "int64", "bool", "float16"})


def _net(case: Case) -> Net:
    net, variant = Net(), case.variant
    activations = variant if variant in _ACTIVATIONS or variant in _SAME else "float32"
    scale_in = next((_quantization(s, activations)[0] for s in case.inputs if isinstance(s, Slot)), 1.0)
    random = np.random.default_rng(zlib.crc32(case.kind.encode()))

    def place(item: Item, *, made: bool = False) -> int:
        if item is None:
            return -1
        if isinstance(item, np.ndarray):
            return net.constant(item)
        if item.role == "weights":
            return _weights(net, item, variant, random)
        if item.role == "bias":
            if variant in _ACTIVATIONS:
                wide = "int64" if variant == "int16" else "int32"
                scales = S.QuantizationParametersT(scale=[scale_in * 0.01], zeroPoint=[0])
                at = net.constant(random.integers(-50, 50, item.shape).astype(wide))
                net.graph.tensors[at].quantization = scales
                return at
            return net.constant(random.uniform(-1, 1, item.shape).astype(np.float32))
        dtype = item.dtype if item.role == "none" else activations
        fields: dict[str, Any] = {}
        if item.role != "none" and dtype in _ACTIVATIONS:
            scale, zero = _quantization(item, dtype)
            fields["quantization"] = S.QuantizationParametersT(scale=[scale], zeroPoint=[zero])
        if item.signature is not None:
            fields["shapeSignature"] = list(item.signature)
        if item.role == "state":
            return net.tensor(item.shape, getattr(TYPES, dtype.upper()), isVariable=True, **fields)
        new = net.tensor if made else net.input
        return new(item.shape, getattr(TYPES, dtype.upper()), **fields)

    inputs = [place(item) for item in case.inputs]
    outputs = [place(slot, made=True) for slot in case.outputs]
    net.op(case.kind, inputs, outputs, case.options)
    return net.outputs(*outputs)


def _quantization(slot: Slot, dtype: str) -> tuple[float, int]:
    if dtype not in _ACTIVATIONS:
        return 1.0, 0
    if slot.quantization is None:
        return _ACTIVATIONS[dtype]
    scale, zero = slot.quantization
    return (scale, zero) if dtype == "int8" else (scale / 256, 0) if dtype == "int16" else (scale, zero + 128)


def _weights(net: Net, slot: Slot, variant: str, random: np.random.Generator) -> int:
    if variant == "int4 weights":
        packed = random.integers(0, 256, (prod(slot.shape) + 1) // 2).astype(np.uint8)
        at = net.constant(packed, TYPES.INT4, slot.shape)
    elif variant in {"int8", "int16", "int8 weights"}:
        at = net.constant(random.integers(-127, 128, slot.shape).astype(np.int8))
    elif variant == "uint8":
        at = net.constant(random.integers(1, 256, slot.shape).astype(np.uint8))
    elif variant == "float16 weights":
        half = net.constant(random.uniform(-1, 1, slot.shape).astype(np.float16))
        return net.op("DEQUANTIZE", [half], net.tensor(slot.shape), S.DequantizeOptionsT())
    else:
        kind = variant if variant in _SAME else "float32"
        values = random.uniform(-1, 1, slot.shape)
        return net.constant((values * (1 if "float" in kind else 9)).astype(kind))
    zero = 128 if variant == "uint8" else 0
    net.graph.tensors[at].quantization = S.QuantizationParametersT(scale=[0.01], zeroPoint=[zero])
    return at


_RNN = S.ActivationFunctionType.TANH
_TABLE = 8


def _cases() -> Iterator[Case]:
    def case(kind: str, inputs: Iterable[Item], outputs: Sequence[Slot], options: Any = None, label: str = "") -> Case:
        return Case(kind, tuple(inputs), tuple(outputs), options, label=label)

    x, image = F(2, 6), F(1, 6, 6, 4)
    boolean, mask = K("bool", 2, 6), K("bool", 2, 6)
    for kind in """ABS CEIL COS ELU EXP FLOOR GELU HARD_SWISH LOG NEG RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT
    SIGN SIN SQRT SQUARE ZEROS_LIKE""".split():  # noqa: SIM905
        yield case(kind, [x], [x])
    yield case("LOGICAL_NOT", [mask], [mask])
    yield case("LEAKY_RELU", [x], [x], S.LeakyReluOptionsT(alpha=0.1))
    yield case("LOGISTIC", [x], [F(2, 6, q=(1 / 256, -128))])
    yield case("TANH", [x], [F(2, 6, q=(1 / 128, 0))])
    yield case("L2_NORMALIZATION", [x], [F(2, 6, q=(1 / 128, 0))], S.L2NormOptionsT())
    yield case("SOFTMAX", [x], [F(2, 6, q=(1 / 256, -128))], S.SoftmaxOptionsT(beta=1.0))
    yield case("LOG_SOFTMAX", [x], [F(2, 6, q=(16 / 256, 127))])
    for kind in "ADD SUB MUL DIV".split():  # noqa: SIM905
        yield case(kind, [x, x], [x], getattr(S, f"{kind.title()}OptionsT")())
    for kind in "MAXIMUM MINIMUM POW SQUARED_DIFFERENCE FLOOR_DIV FLOOR_MOD ATAN2 ADD_N".split():  # noqa: SIM905
        yield case(kind, [x, x], [x])
    for kind in "EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL".split():  # noqa: SIM905
        yield case(kind, [x, x], [boolean])
    for kind in ("LOGICAL_AND", "LOGICAL_OR"):
        yield case(kind, [mask, mask], [mask])
    for kind in ("BITWISE_XOR", "RIGHT_SHIFT", "STABLEHLO_SHIFT_LEFT"):
        yield case(kind, [K("int32", 2, 6), K("int32", 2, 6)], [K("int32", 2, 6)])
    for kind in "ADD MULTIPLY MAXIMUM MINIMUM".split():  # noqa: SIM905
        yield case(f"STABLEHLO_{kind}", [x, x], [x])
    yield case("STABLEHLO_AND", [mask, mask], [mask])
    yield case("PRELU", [image, W(1, 1, 4)], [image])
    # Convolutions, pools, dense layers.
    conv = S.Conv2DOptionsT(strideW=1, strideH=1)
    yield case("CONV_2D", [image, W(4, 3, 3, 4), B(4)], [image], conv)
    depthwise = S.DepthwiseConv2DOptionsT(strideW=1, strideH=1, depthMultiplier=1)
    yield case("DEPTHWISE_CONV_2D", [image, W(1, 3, 3, 4), B(4)], [image], depthwise)
    transposed = S.TransposeConvOptionsT(strideW=1, strideH=1)
    yield case("TRANSPOSE_CONV", [ints(1, 6, 6, 4), W(4, 3, 3, 4), image], [image], transposed)
    volume = F(1, 3, 4, 4, 2)
    conv3d = S.Conv3DOptionsT(strideD=1, strideW=1, strideH=1)
    yield case("CONV_3D", [volume, W(3, 3, 3, 2, 2), B(2)], [volume], conv3d)
    yield case("CONV_3D_TRANSPOSE", [ints(1, 3, 4, 4, 2), W(3, 3, 3, 2, 2), volume], [volume], conv3d)
    pool = S.Pool2DOptionsT(strideW=2, strideH=2, filterWidth=2, filterHeight=2)
    for kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"):
        yield case(kind, [image], [F(1, 3, 3, 4)], pool)
    yield case("FULLY_CONNECTED", [x, W(5, 6), B(5)], [F(2, 5)], S.FullyConnectedOptionsT())
    yield case("BATCH_MATMUL", [F(2, 3, 4), F(2, 4, 5)], [F(2, 3, 5)], S.BatchMatMulOptionsT())
    yield case("BATCH_MATMUL", [F(2, 3, 4), W(2, 4, 5)], [F(2, 3, 5)], S.BatchMatMulOptionsT(), label="weights")
    lrn = S.LocalResponseNormalizationOptionsT(radius=1, bias=1.0, alpha=1.0, beta=0.5)
    yield case("LOCAL_RESPONSE_NORMALIZATION", [image], [image], lrn)
    # Shapes and places.
    yield case("CONCATENATION", [x, x], [F(2, 12)], S.ConcatenationOptionsT(axis=1))
    yield case("RESHAPE", [x, ints(3, 4)], [F(3, 4)], S.ReshapeOptionsT(newShape=[3, 4]))
    yield case("RESHAPE", [x, K("int32", 2)], [F(3, 4)], label="shape at run time")
    yield case("SQUEEZE", [F(1, 6)], [F(6)], S.SqueezeOptionsT(squeezeDims=[0]))
    yield case("EXPAND_DIMS", [x, ints(1)], [F(2, 1, 6)])
    yield case("TRANSPOSE", [x, ints(1, 0)], [F(6, 2)])
    yield case("SPACE_TO_DEPTH", [image], [F(1, 3, 3, 16)], S.SpaceToDepthOptionsT(blockSize=2))
    yield case("DEPTH_TO_SPACE", [image], [F(1, 12, 12, 1)], S.DepthToSpaceOptionsT(blockSize=2))
    zeros = np.zeros((2, 2), np.int32)
    yield case("SPACE_TO_BATCH_ND", [image, ints(2, 2), zeros], [F(4, 3, 3, 4)])
    yield case("BATCH_TO_SPACE_ND", [F(4, 3, 3, 4), ints(2, 2), zeros], [image])
    pads = np.array([[1, 1], [0, 2]], np.int32)
    yield case("PAD", [x, pads], [F(4, 8)])
    yield case("PAD", [x, K("int32", 2, 2)], [F(2, 6)], label="padding at run time")
    yield case("PADV2", [x, pads, F()], [F(4, 8)])
    yield case("MIRROR_PAD", [x, pads], [F(4, 8)], S.MirrorPadOptionsT(mode=0))
    yield case("SLICE", [x, ints(0, 1), ints(2, 3)], [F(2, 3)])
    yield case("SLICE", [x, K("int32", 2), K("int32", 2)], [F(2, 3)], label="place at run time")
    yield case("STRIDED_SLICE", [x, ints(0, 1), ints(2, 5), ints(1, 2)], [F(2, 2)], S.StridedSliceOptionsT())
    yield case("SPLIT", [ints(1)[0:1].reshape(()), x], [F(2, 3), F(2, 3)], S.SplitOptionsT(numSplits=2))
    yield case("SPLIT_V", [x, ints(2, 4), ints(1).reshape(())], [F(2, 2), F(2, 4)], S.SplitVOptionsT(numSplits=2))
    yield case("PACK", [x, x], [F(2, 2, 6)], S.PackOptionsT(valuesCount=2, axis=1))
    yield case("UNPACK", [x], [F(6), F(6)], S.UnpackOptionsT(num=2, axis=0))
    yield case("TILE", [x, ints(1, 2)], [F(2, 12)])
    yield case("TILE", [x, K("int32", 2)], [F(2, 12)], label="multiples at run time")
    yield case("BROADCAST_TO", [x, ints(3, 2, 6)], [F(3, 2, 6)])
    yield case("BROADCAST_ARGS", [K("int32", 2), K("int32", 2)], [K("int32", 2)])
    yield case("FILL", [ints(2, 3), F()], [F(2, 3)])
    yield case("FILL", [K("int32", 2), F()], [F(2, 3)], label="shape at run time")
    yield case("RANGE", [F(), F(), F()], [F(4)], label="limits at run time")
    yield case("RANGE", [K("int32"), ints(6).reshape(()), ints(1).reshape(())], [K("int32", 4)], label="start")
    yield case("SHAPE", [x], [K("int32", 2)], S.ShapeOptionsT(outType=TYPES.INT32))
    yield case("RANK", [x], [K("int32")])
    yield case("RESIZE_BILINEAR", [image, ints(8, 8)], [F(1, 8, 8, 4)], S.ResizeBilinearOptionsT())
    yield case(
        "RESIZE_BILINEAR", [image, K("int32", 2)], [F(1, 8, 8, 4)], S.ResizeBilinearOptionsT(), "size at run time"
    )
    yield case("RESIZE_NEAREST_NEIGHBOR", [image, ints(8, 8)], [F(1, 8, 8, 4)], S.ResizeNearestNeighborOptionsT())
    yield case("REVERSE_V2", [x, ints(1)], [x])
    yield case("REVERSE_SEQUENCE", [x, K("int32", 2)], [x], S.ReverseSequenceOptionsT(seqDim=1, batchDim=0))
    yield case("MATRIX_DIAG", [x], [F(2, 6, 6)])
    yield case("MATRIX_SET_DIAG", [F(2, 3, 3), F(2, 3)], [F(2, 3, 3)])
    yield case("CAST", [x], [K("int32", 2, 6)], S.CastOptionsT())
    yield case("CAST", [K("int32", 2, 6)], [x], S.CastOptionsT(), "from int32")
    yield case("BITCAST", [x], [K("uint32", 2, 6)])
    yield case("SELECT", [mask, x, x], [x])
    yield case("SELECT_V2", [mask, x, F(6)], [x])
    yield case("DYNAMIC_UPDATE_SLICE", [x, F(1, 2), K("int32", 2)], [x])
    # Reductions.
    for kind in "MEAN SUM REDUCE_PROD REDUCE_MAX REDUCE_MIN".split():  # noqa: SIM905
        yield case(kind, [x, ints(1)], [F(2)], S.ReducerOptionsT())
    for kind in ("REDUCE_ANY", "REDUCE_ALL"):
        yield case(kind, [mask, ints(1)], [K("bool", 2)], S.ReducerOptionsT())
    for kind in ("ARG_MAX", "ARG_MIN"):
        options = getattr(S, f"{kind.title().replace('_', '')}OptionsT")(outputType=TYPES.INT32)
        yield case(kind, [x, ints(1)], [K("int32", 2)], options)
    yield case("CUMSUM", [x, ints(1).reshape(())], [x], S.CumsumOptionsT())
    yield case("TOPK_V2", [x, ints(2).reshape(())], [F(2, 2), K("int32", 2, 2)])
    yield case("TOPK_V2", [x, K("int32")], [F(2, 2), K("int32", 2, 2)], label="k at run time")
    yield case("BUCKETIZE", [x], [K("int32", 2, 6)], S.BucketizeOptionsT(boundaries=[0.0, 0.5]))
    # Indices.
    yield case("GATHER", [x, K("int32", 3)], [F(2, 3)], S.GatherOptionsT(axis=1))
    yield case("GATHER_ND", [x, K("int32", 3, 2)], [F(3)])
    yield case("SCATTER_ND", [K("int32", 3, 1), F(3, 6), ints(4, 6)], [F(4, 6)])
    yield case("EMBEDDING_LOOKUP", [K("int32", 3), W(5, 4)], [F(3, 4)])
    sparse: list[Item] = [K("int32", 3), np.array([[0, 0], [0, 1], [1, 0]], np.int32), ints(2, 2), F(3), W(5, 4)]
    yield case("EMBEDDING_LOOKUP_SPARSE", sparse, [F(2, 4)], S.EmbeddingLookupSparseOptionsT())
    yield case("HASHTABLE_LOOKUP", [K("int32", 3), ints(1, 2, 3, 4), W(4, 2)], [F(3, 2), K("uint8", 3)])
    yield case("ONE_HOT", [K("int32", 3), ints(4).reshape(()), F(), F()], [F(3, 4)], S.OneHotOptionsT(axis=-1))
    yield case(
        "ONE_HOT", [K("int32", 3), K("int32"), F(), F()], [F(3, 4)], S.OneHotOptionsT(axis=-1), "depth at run time"
    )
    yield case("SPARSE_TO_DENSE", [K("int32", 3), ints(6), F(3), F()], [F(6)], S.SparseToDenseOptionsT())
    yield case("SEGMENT_SUM", [F(4, 2), ints(0, 0, 1, 2)], [F(3, 2)])
    yield case("SEGMENT_SUM", [F(4, 2), K("int32", 4)], [F(3, 2)], label="segments at run time")
    for word in ("SUM", "PROD", "MAX", "MIN"):
        yield case(f"UNSORTED_SEGMENT_{word}", [F(4, 2), K("int32", 4), ints(3)], [F(3, 2)])
    yield case("WHERE", [mask], [replace(K("int64", 6, 2), signature=(-1, 2))])
    yield case(
        "UNIQUE", [F(6)], [replace(F(6), signature=(-1,)), K("int32", 6)], S.UniqueOptionsT(idxOutType=TYPES.INT32)
    )
    boxes: list[Item] = [F(6, 4), F(6), ints(3).reshape(()), np.array(0.5, np.float32), np.array(0.0, np.float32)]
    yield case("NON_MAX_SUPPRESSION_V4", boxes, [K("int32", 3), K("int32")])
    v5 = [*boxes, np.array(0.5, np.float32)]
    yield case("NON_MAX_SUPPRESSION_V5", v5, [K("int32", 3), K("float32", 3), K("int32")])
    yield case("LSH_PROJECTION", [W(2, 3), K("int32", 5), W(5)], [K("int32", 2)], S.LSHProjectionOptionsT(type=1))
    # Random numbers.
    for kind in ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"):
        yield case(kind, [ints(2, 3)], [F(2, 3)], S.RandomOptionsT(seed=1, seed2=2))
    yield case("MULTINOMIAL", [x, ints(4).reshape(())], [K("int32", 2, 4)], S.RandomOptionsT(seed=1, seed2=2))
    # Signals.
    yield case("RFFT2D", [F(1, 4, 4), ints(4, 4)], [K("complex64", 1, 4, 3)])
    for kind in ("REAL", "IMAG", "COMPLEX_ABS"):
        yield case(kind, [K("complex64", 2, 3)], [K("float32", 2, 3)])
    # Quantisation.
    yield case("FAKE_QUANT", [x], [x], S.FakeQuantOptionsT(min=-1.0, max=1.0, numBits=8))
    # Recurrence; weights of the basic cell are one matrix.
    basic = [x, F(2, 4, q=(1 / 128, 0)), W(16, 10), B(16), F(2, 4, q=(1 / 2048, 0))]
    state = [F(2, 4, q=(1 / 128, 0)), F(2, 4), F(2, 10), F(2, 16)]
    yield case("LSTM", basic, state, S.LSTMOptionsT(kernelType=1, fusedActivationFunction=_RNN), "basic")
    gates = [*(W(4, 6) for _ in range(4)), *(W(4, 4) for _ in range(4)), None, None, None, *(B(4) for _ in range(4))]
    full = [x, *gates, None, None, V(2, 4), V(2, 4)]
    yield case("LSTM", full, [F(2, 4)], S.LSTMOptionsT(fusedActivationFunction=_RNN))
    sequence = [F(2, 3, 6), *gates, None, None, V(2, 4), V(2, 4)]
    options = S.UnidirectionalSequenceLSTMOptionsT(fusedActivationFunction=_RNN)
    yield case("UNIDIRECTIONAL_SEQUENCE_LSTM", sequence, [F(2, 3, 4)], options)
    both = [F(2, 3, 6), *gates, None, None, *gates, None, None, *(V(2, 4) for _ in range(4)), *(None for _ in range(9))]
    options = S.BidirectionalSequenceLSTMOptionsT(fusedActivationFunction=_RNN, timeMajor=False)
    yield case("BIDIRECTIONAL_SEQUENCE_LSTM", both, [F(2, 3, 4), F(2, 3, 4)], options)
    cell = [W(4, 6), W(4, 4), B(4), V(2, 4)]
    yield case("RNN", [x, *cell], [F(2, 4)], S.RNNOptionsT(fusedActivationFunction=_RNN))
    options = S.SequenceRNNOptionsT(fusedActivationFunction=_RNN)
    yield case("UNIDIRECTIONAL_SEQUENCE_RNN", [F(2, 3, 6), *cell], [F(2, 3, 4)], options)
    options = S.BidirectionalSequenceRNNOptionsT(fusedActivationFunction=_RNN)
    two = [F(2, 3, 6), *cell, *cell, None, None, None]
    yield case("BIDIRECTIONAL_SEQUENCE_RNN", two, [F(2, 3, 4), F(2, 3, 4)], options)
    yield case("SVDF", [x, W(4, 6), W(4, 3), B(4), V(2, 12)], [F(2, 4)], S.SVDFOptionsT(rank=1))
    yield from _stablehlo(case)
    yield from _built()


def _stablehlo(case: Callable[..., Case]) -> Iterator[Case]:
    longs = np.array
    gather = S.StablehloGatherOptionsT(
        offsetDims=[1], collapsedSliceDims=[0], startIndexMap=[0], indexVectorDim=1, sliceSizes=[1, 6]
    )
    yield case("STABLEHLO_GATHER", [F(4, 6), K("int32", 3, 1)], [F(3, 6)], gather)
    pad = S.StablehloPadOptionsT(edgePaddingLow=[1, 0], edgePaddingHigh=[0, 1], interiorPadding=[0, 0])
    yield case("STABLEHLO_PAD", [F(2, 6), F()], [F(3, 7)], pad)
    window = [longs([1, 2]), longs([1, 2]), longs([1, 1])]
    yield case("REDUCE_WINDOW", [F(2, 6), F(), *window], [F(2, 3)], S.ReduceWindowOptionsT(reduceFunction=1))
    yield case("DILATE", [F(2, 6), ints(2, 1), F()], [F(3, 6)])
    options = S.StablehloRngBitGeneratorOptionsT(algorithm=1)
    yield case("STABLEHLO_RNG_BIT_GENERATOR", [K("uint64", 2)], [K("uint64", 2), K("uint32", 2, 3)], options)


def _built() -> Iterator[Case]:
    """Cases that are more than one operator between its inputs and outputs."""

    def built(kind: str, build: Callable[[Net], None], label: str = "") -> Case:
        def make() -> Net:
            net = Net()
            build(net)
            return net

        return Case(kind, (), (), build=make, label=label, variant="")

    def quantize(net: Net, dtype: str) -> int:
        scale, zero = _ACTIVATIONS[dtype]
        fields = S.QuantizationParametersT(scale=[scale], zeroPoint=[zero])
        small = net.tensor((2, 6), getattr(TYPES, dtype.upper()), quantization=fields)
        return net.op("QUANTIZE", [net.input((2, 6))], small, S.QuantizeOptionsT())

    def quantized(net: Net, dtype: str) -> None:
        _done(net, quantize(net, dtype))

    def dequantized(net: Net, dtype: str) -> None:
        small = quantize(net, dtype)
        _done(net, net.op("DEQUANTIZE", [small], net.tensor((2, 6)), S.DequantizeOptionsT()))

    for dtype in _ACTIVATIONS:
        yield built("QUANTIZE", partial(quantized, dtype=dtype), dtype)
        yield built("DEQUANTIZE", partial(dequantized, dtype=dtype), dtype)
    yield built("IF", _conditional)
    yield built("WHILE", _loop)
    yield built("CALL_ONCE", _counter)
    for kind in ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"):
        yield built(kind, _counter, "with CALL_ONCE")
    for kind in ("HASHTABLE", "HASHTABLE_FIND", "HASHTABLE_IMPORT", "HASHTABLE_SIZE"):
        yield built(kind, _hashtable)
    yield built("DENSIFY", _densify)
    yield built("UNIDIRECTIONAL_SEQUENCE_LSTM", _lstm_in_integers, "int8 activations, int16 cells")
    yield built("STABLEHLO_COMPOSITE", _composite)
    yield built("STABLEHLO_CASE", _case)
    yield built("STABLEHLO_SCATTER", _scatter)
    yield built("STABLEHLO_REDUCE_WINDOW", _reduce_window)
    yield built("SKIP_GRAM", _skip_gram)
    yield built("CONV_2D", _per_channel, "int8 by channel")
    yield built("FULLY_CONNECTED", _blockwise, "int4 by blocks")
    yield built("RELU", _constant_output, "beside a constant output")
    yield built("TOPK_V2", _open_batch, "open batch")


def _done(net: Net, *outputs: int) -> None:
    net.outputs(*outputs)


def _body(net: Net, kind: str, options: Any, shape: Sequence[int] = (2, 6), reads: int = 2) -> int:
    """Add a subgraph of one operator and return its number; the main one is current again."""
    main = net.graph
    number = net.body(kind)
    inputs = [net.input(shape) for _ in range(reads)]
    net.outputs(net.op(kind, inputs[:2], net.tensor(shape), options))
    net.graph = main
    return number


def _conditional(net: Net) -> None:
    numbers = [_body(net, "ADD", S.AddOptionsT()), _body(net, "MUL", S.MulOptionsT())]
    condition = net.input([], TYPES.BOOL)
    options = S.IfOptionsT(thenSubgraphIndex=numbers[0], elseSubgraphIndex=numbers[1])
    _done(net, net.op("IF", [condition, net.input((2, 6)), net.input((2, 6))], net.tensor((2, 6)), options))


def _loop(net: Net) -> None:
    main = net.graph
    cond = net.body("cond")
    n, _ = net.input([], TYPES.INT32), net.input((2, 6))
    limit = net.constant(np.array(3, np.int32))
    net.outputs(net.op("LESS", [n, limit], net.tensor([], TYPES.BOOL)))
    body = net.body("body")
    n, x = net.input([], TYPES.INT32), net.input((2, 6))
    one = net.constant(np.array(1, np.int32))
    more = net.op("ADD", [n, one], net.tensor([], TYPES.INT32), S.AddOptionsT())
    net.outputs(more, net.op("ADD", [x, x], net.tensor((2, 6)), S.AddOptionsT()))
    net.graph = main
    n, x = net.input([], TYPES.INT32), net.input((2, 6))
    outputs = [net.tensor([], TYPES.INT32), net.tensor((2, 6))]
    net.op("WHILE", [n, x], outputs, S.WhileOptionsT(condSubgraphIndex=cond, bodySubgraphIndex=body))
    _done(net, *outputs)


def _counter(net: Net) -> None:
    main = net.graph
    first = net.body("init")
    options = S.VarHandleOptionsT(container="", sharedName="v")
    handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), options)
    net.op("ASSIGN_VARIABLE", [handle, net.constant(np.zeros((2, 6), np.float32))], [], S.AssignVariableOptionsT())
    net.outputs()
    net.graph = main
    net.op("CALL_ONCE", [], [], S.CallOnceOptionsT(initSubgraphIndex=first))
    handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), options)
    old = net.op("READ_VARIABLE", [handle], net.tensor((2, 6)), S.ReadVariableOptionsT())
    new = net.op("ADD", [old, net.input((2, 6))], net.tensor((2, 6)), S.AddOptionsT())
    net.op("ASSIGN_VARIABLE", [handle, new], [], S.AssignVariableOptionsT())
    _done(net, new)


def _hashtable(net: Net) -> None:
    text = np.frombuffer(b"\x02\0\0\0\x10\0\0\0\x11\0\0\0\x12\0\0\0ab", np.uint8)
    main, options = net.graph, S.HashtableOptionsT(tableId=3, keyDtype=TYPES.STRING, valueDtype=TYPES.INT64)
    first = net.body("init")
    table = net.op("HASHTABLE", [], net.tensor([1], TYPES.RESOURCE), options)
    values = net.constant(np.array([4, 7], np.int64))
    net.op("HASHTABLE_IMPORT", [table, net.constant(text, TYPES.STRING, (2,)), values], [])
    net.outputs()
    net.graph = main
    net.op("CALL_ONCE", [], [], S.CallOnceOptionsT(initSubgraphIndex=first))
    table = net.op("HASHTABLE", [], net.tensor([1], TYPES.RESOURCE), options)
    size = net.op("HASHTABLE_SIZE", [table], net.tensor([1], TYPES.INT64))
    default = net.constant(np.array([-1], np.int64))
    asked = net.constant(text, TYPES.STRING, (2,))
    found = net.op("HASHTABLE_FIND", [table, asked, default], net.tensor([2], TYPES.INT64))
    shift = net.input([1], TYPES.INT64)
    _done(
        net,
        *(
            net.op("ADD", [t, shift], net.tensor(s, TYPES.INT64), S.AddOptionsT())
            for t, s in ((size, [1]), (found, [2]))
        ),
    )


def _densify(net: Net) -> None:
    weights = net.constant(np.array([1.0, 2.0, 3.0], np.float32), shape=(3, 4))
    rows = S.DimensionMetadataT(format=0, denseSize=3)
    columns = S.DimensionMetadataT(format=1)
    columns.arraySegmentsType = columns.arrayIndicesType = S.SparseIndexVector.Int32Vector
    columns.arraySegments = S.Int32VectorT(values=[0, 1, 2, 3])
    columns.arrayIndices = S.Int32VectorT(values=[0, 1, 3])
    net.graph.tensors[weights].sparsity = S.SparsityParametersT(traversalOrder=[0, 1], dimMetadata=[rows, columns])
    dense = net.op("DENSIFY", [weights], net.tensor((3, 4)), S.DensifyOptionsT())
    _done(
        net, net.op("FULLY_CONNECTED", [net.input((2, 4)), dense, -1], net.tensor((2, 3)), S.FullyConnectedOptionsT())
    )


def _lstm_in_integers(net: Net) -> None:
    rng = np.random.default_rng(0)

    def scaled(scale: float) -> Any:
        return S.QuantizationParametersT(scale=[scale], zeroPoint=[0])

    def constant(value: Array, scale: float) -> int:
        number = net.constant(value)
        net.graph.tensors[number].quantization = scaled(scale)
        return number

    def weights(*shape: int) -> int:
        return constant(rng.integers(-100, 100, shape, dtype=np.int8), 1 / 64)

    first = net.input((2, 3, 6), TYPES.INT8, quantization=scaled(1 / 32))
    gates = [*(weights(4, 6) for _ in range(4)), *(weights(4, 4) for _ in range(4)), -1, -1, -1]
    biases = [constant(rng.integers(-500, 500, 4, dtype=np.int32), 1 / 2048) for _ in range(4)]
    output = net.tensor((2, 4), TYPES.INT8, quantization=scaled(1 / 128), isVariable=True)
    cell = net.tensor((2, 4), TYPES.INT16, quantization=scaled(2**-11), isVariable=True)
    between = [net.tensor((2, 4), TYPES.INT16, quantization=scaled(2**-12)) for _ in range(4)]
    between.append(net.tensor((2, 4), TYPES.INT8, quantization=scaled(1 / 128)))
    last = net.tensor((2, 3, 4), TYPES.INT8, quantization=scaled(1 / 128))
    options = S.UnidirectionalSequenceLSTMOptionsT(fusedActivationFunction=_RNN)
    inputs = [first, *gates, *biases, -1, -1, output, cell, -1, -1, -1, -1]
    _done(net, net.op("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, last, options, intermediates=between))


def _with_options2(net: Net, kind: str, inputs: Sequence[int], outputs: Sequence[int], options: Any) -> None:
    net.op(kind, inputs, outputs, options)
    _done(net, *outputs)


def _composite(net: Net) -> None:
    number = _body(net, "ADD", S.AddOptionsT())
    options = S.StableHLOCompositeOptionsT(
        name="odml.sum", decompositionSubgraphIndex=number, compositeAttributes=np.frombuffer(b"\x00\x04\x01", np.uint8)
    )
    _with_options2(net, "STABLEHLO_COMPOSITE", [net.input((2, 6)), net.input((2, 6))], [net.tensor((2, 6))], options)


def _case(net: Net) -> None:
    numbers = [_body(net, "ADD", S.AddOptionsT()), _body(net, "MUL", S.MulOptionsT())]
    inputs = [net.input([], TYPES.INT32), net.input((2, 6)), net.input((2, 6))]
    options = S.StablehloCaseOptionsT(branchSubgraphIndices=numbers)
    _with_options2(net, "STABLEHLO_CASE", inputs, [net.tensor((2, 6))], options)


def _scatter(net: Net) -> None:
    number = _body(net, "STABLEHLO_ADD", None, ())
    inputs = [net.input((4, 6)), net.input((3, 1), TYPES.INT32), net.input((3, 6))]
    options = S.StablehloScatterOptionsT(
        updateWindowDims=[1], insertedWindowDims=[0], scatterDimsToOperandDims=[0], indexVectorDim=1,
        updateComputationSubgraphIndex=number,
    )  # fmt: skip
    _with_options2(net, "STABLEHLO_SCATTER", inputs, [net.tensor((4, 6))], options)


def _reduce_window(net: Net) -> None:
    number = _body(net, "STABLEHLO_ADD", None, ())
    start = net.constant(np.array(0.0, np.float32))
    options = S.StablehloReduceWindowOptionsT(
        windowDimensions=[1, 2], windowStrides=[1, 2], baseDilations=[1, 1], windowDilations=[1, 1],
        padding=[0, 0, 0, 0], bodySubgraphIndex=number,
    )  # fmt: skip
    _with_options2(net, "STABLEHLO_REDUCE_WINDOW", [net.input((2, 6)), start], [net.tensor((2, 3))], options)


def _skip_gram(net: Net) -> None:
    text = np.frombuffer(b"\x01\0\0\0\x0c\0\0\0\x0f\0\0\0a b", np.uint8)
    words = net.constant(text, TYPES.STRING, (1,))
    options = S.SkipGramOptionsT(ngramSize=2, maxSkipSize=1, includeAllNgrams=True)
    grams = net.op("SKIP_GRAM", [words], net.tensor([-1], TYPES.STRING, shapeSignature=[-1]), options)
    shape = net.op("SHAPE", [grams], net.tensor([1], TYPES.INT32), S.ShapeOptionsT(outType=TYPES.INT32))
    _done(net, net.op("ADD", [shape, net.input([1], TYPES.INT32)], net.tensor([1], TYPES.INT32), S.AddOptionsT()))


def _per_channel(net: Net) -> None:
    random = np.random.default_rng(1)
    scales = [0.01, 0.02, 0.03, 0.04]
    fields = S.QuantizationParametersT(scale=[0.05], zeroPoint=[3])
    x = net.input((1, 6, 6, 4), TYPES.INT8, quantization=fields)
    weights = net.constant(random.integers(-127, 128, (4, 3, 3, 4)).astype(np.int8))
    net.graph.tensors[weights].quantization = S.QuantizationParametersT(scale=scales, zeroPoint=[0] * 4)
    bias = net.constant(random.integers(-50, 50, 4).astype(np.int32))
    by_channel = S.QuantizationParametersT(scale=[0.05 * s for s in scales], zeroPoint=[0] * 4)
    net.graph.tensors[bias].quantization = by_channel
    made = net.tensor((1, 6, 6, 4), TYPES.INT8, quantization=fields)
    _done(net, net.op("CONV_2D", [x, weights, bias], made, S.Conv2DOptionsT(strideW=1, strideH=1)))


def _blockwise(net: Net) -> None:
    random = np.random.default_rng(2)
    scales = net.constant(random.uniform(0.01, 0.02, (8, 2)).astype(np.float16))
    packed = random.integers(0, 256, 8 * 64 // 2).astype(np.uint8)
    weights = net.constant(packed, TYPES.INT4, (8, 64))
    details = S.BlockwiseQuantizationT(scales=scales, zeroPoints=-1, blockSize=32)
    net.graph.tensors[weights].quantization = S.QuantizationParametersT(
        detailsType=S.QuantizationDetails.BlockwiseQuantization, details=details
    )
    _done(
        net,
        net.op("FULLY_CONNECTED", [net.input((2, 64)), weights, -1], net.tensor((2, 8)), S.FullyConnectedOptionsT()),
    )


def _constant_output(net: Net) -> None:
    constant = net.constant(np.arange(6, dtype=np.float32))
    _done(net, net.op("RELU", [net.input((2, 6))], net.tensor((2, 6))), constant)


def _open_batch(net: Net) -> None:
    x = net.input((1, 6), shapeSignature=[-1, 6])
    outputs = [net.tensor((1, 2), shapeSignature=[-1, 2]), net.tensor((1, 2), TYPES.INT32, shapeSignature=[-1, 2])]
    net.op("TOPK_V2", [x, net.constant(np.array(2, np.int32))], outputs)
    _done(net, *outputs)


VARIANTS = ("float32", "int8", "int16", "uint8", "int32", "int64", "bool", "float16")
WEIGHTED = ("int8 weights", "int4 weights", "float16 weights")


# LiteRT's kernels read or write outside their tensors: what happens then is chance. BITCAST changes shapes.
_LEFT_OUT = {
    "DEPTHWISE_CONV_2D": ("int8 weights",),
    "MATRIX_DIAG": ("bool", "float16"),
    "MATRIX_SET_DIAG": ("bool", "float16"),
    "BITCAST": ("int8", "int16", "uint8", "int64", "bool", "float16"),
}


def corpus(variants: Sequence[str] = (*VARIANTS, *WEIGHTED)) -> Iterator[Case]:
    """Return every case in each of the ``variants`` in which it differs from the others."""
    for case in _cases():
        if case.build is not None:
            yield case
            continue
        slots = [s for s in (*case.inputs, *case.outputs) if isinstance(s, Slot)]
        roles = {s.role for s in slots}
        for variant in variants:
            differs = roles & ({"weights"} if variant in WEIGHTED else {"input", "weights"})
            if (variant == "float32" or differs) and variant not in _LEFT_OUT.get(case.kind, ()):
                yield replace(case, variant=variant)
