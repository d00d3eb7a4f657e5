"""Layer-by-layer builder of ``.tflite`` models with seeded weights, as a converter would emit them.

Layers are NHWC float32, batch normalisation is folded into the convolution before it, filters are OHWI, activations
are fused where the schema can fuse them.

Weights are He-normal (He et al. 2015, arXiv:1502.01852): standard deviation ``sqrt(2 / fan_in)``. Each tensor has its
own random stream, seeded by the names of model and tensor, so a weight depends neither on the order of layers nor on
other tensors. It is made when it is written, so the peak memory of building is one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.models.changes import KINDS, made_operator
from search_spaces.models.dtypes import DTYPES, tensor_nbytes
from search_spaces.models.flatbuffer import ALIGNMENT, Blobs, pack_header, write_model
from search_spaces.models.litert import VERSION, plain_options

Activation = Literal["NONE", "RELU", "RELU6"]
# A number pads both sides equally, as PyTorch does: by SAME where that is equivalent, else by an operator PAD.
# CEIL rounds the size up, as Caffe's pooling does (and PyTorch's with ``ceil_mode``).
Padding = Literal["SAME", "VALID", "CEIL"] | int
Size = int | tuple[int, int]

BIAS_STD = 0.01  # not 0, so that a misplaced bias changes the output
SPECTRUM_RATE = 8.0  # singular values fall as exp(-8 k / n): a quarter of the rank holds 98 % of the energy
SPECTRUM_CHANNELS = 16  # axes with fewer channels keep full rank

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model being built: its index and its shape (N, H, W, C or fewer dimensions)."""

    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of normally distributed weights.

    Attributes:
        name: of the tensor.
        shape: outputs first and inputs last, for those that ``low_rank`` may apply to.
        std: standard deviation.
        mean: of the distribution.
        low_rank: whether singular values along the first and the last axis fall exponentially (``+spectrum``).
        half: whether it is stored as float16.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    low_rank: bool = False
    half: bool = False

    def make(self, model: str) -> Array:
        """Return the weights of this tensor in a model of this name."""
        digest = hashlib.sha256(f"{model}/{self.name}".encode()).digest()
        random = np.random.default_rng(np.random.SeedSequence(int.from_bytes(digest, "little")))
        values: Array = random.standard_normal(self.shape, np.float32)
        if self.low_rank:
            for axis in (0, -1):
                values = _decaying(values, axis, random)
        values *= np.float32(self.std)
        if self.mean:
            values += np.float32(self.mean)
        return values.astype(np.float16) if self.half else values


@dataclass(frozen=True, slots=True)
class Draft:
    """A model with deferred weights.

    Attributes:
        name: the seed of its weights.
        schema: the structure, a ``ModelT``; buffers of weights are empty.
        weights: buffer number → how its weights are drawn.
    """

    name: str
    schema: Any
    weights: Mapping[int, Weight]

    @property
    def nbytes(self) -> int:
        """Size of the file that :meth:`write` makes."""
        size = {b: prod(w.shape) * (2 if w.half else 4) for b, w in self.weights.items()}
        size |= {i: len(b.data) for i, b in enumerate(self.schema.buffers) if b.data is not None}
        end = len(pack_header(self.schema, size)[0])
        for _, nbytes in sorted(size.items()):
            end = -(-(end + 4) // ALIGNMENT) * ALIGNMENT + nbytes
        return end

    def graph(self) -> Graph:
        """Return the graph of the written file, without writing it."""
        sub = self.schema.subgraphs[0]
        kinds = [KINDS[code.builtinCode] for code in self.schema.operatorCodes]
        operators = tuple(
            Operator(kinds[o.opcodeIndex], tuple(o.inputs), tuple(o.outputs), plain_options(o)) for o in sub.operators
        )
        tensors = []
        for tensor in sub.tensors:
            shape, dtype = tuple(tensor.shape), DTYPES[tensor.type]
            nbytes = tensor_nbytes(shape, dtype)
            tensors.append(Tensor(tensor.name, shape, dtype, nbytes, bool(tensor.buffer), buffer=tensor.buffer))
        return Graph(self.name, tuple(tensors), operators, tuple(sub.inputs), tuple(sub.outputs))

    def write(self, path: Path) -> None:
        """Make the weights and write the model; the same bytes each time.

        Raises:
            UsageError: the folder cannot be written, or the disk is full.
        """
        write_model(self.schema, Blobs(self.weights, lambda buffer: self.weights[buffer].make(self.name)), path)


class Builder:
    """A model under construction; each method adds a layer and returns its output.

    Layer names become tensor names: the output has the layer's, weights have ``<layer>/kernel`` and ``<layer>/bias``.
    ``gain`` scales a layer's weights: the last layer of a residual branch takes ``branches ** -0.5``, so that the
    sum's variance grows by a constant however deep the network is.

    Args:
        name: of the model; also the seed of its weights.
        low_rank: whether matrices and filters get a decaying spectrum.
    """

    def __init__(self, name: str, *, low_rank: bool = False) -> None:
        self._name = name
        self._low_rank = low_rank
        self._graph = schema.SubGraphT(name="main", tensors=[], operators=[], inputs=[], outputs=[])
        self._model = schema.ModelT(
            version=VERSION, description=name, operatorCodes=[], subgraphs=[self._graph], buffers=[schema.BufferT()]
        )
        self._weights: dict[int, Weight] = {}

    def input(self, shape: Sequence[int], name: str = "input", dtype: str = "FLOAT32") -> Value:
        """Add an input of the model."""
        value = self._tensor(name, shape, dtype)
        self._graph.inputs.append(value.index)
        return value

    def weight(
        self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, *, matrix: bool = False
    ) -> Value:
        """Add a constant of normally distributed float32; a ``matrix`` may be low-rank (``+spectrum``)."""
        self._model.buffers.append(schema.BufferT())
        buffer = len(self._model.buffers) - 1
        self._weights[buffer] = Weight(name, shape, std, mean, matrix and self._low_rank)
        return self._tensor(name, shape, buffer=buffer)

    def constant(self, name: str, value: Array) -> Value:
        """Add a constant of given int32 or float32 numbers."""
        self._model.buffers.append(schema.BufferT(data=np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return self._tensor(name, value.shape, value.dtype.name.upper(), len(self._model.buffers) - 1)

    def operator(
        self,
        kind: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        name: str,
        options: Any = None,
        dtype: str = "FLOAT32",
    ) -> Value:
        """Add an operator with one output, which gets the operator's name."""
        output = self._tensor(name, shape, dtype)
        read, codes = [v.index for v in inputs], self._model.operatorCodes
        self._graph.operators.append(made_operator(codes, kind, read, [output.index], options))
        return output

    def finish(self, *outputs: Value) -> Draft:
        """Return the model with these outputs; the builder must not be used afterwards."""
        self._graph.outputs = [v.index for v in outputs]
        signature = schema.SignatureDefT(signatureKey="serving_default", subgraphIndex=0)
        signature.inputs = [self._signature_entry(i) for i in self._graph.inputs]
        signature.outputs = [self._signature_entry(i) for i in self._graph.outputs]
        self._model.signatureDefs = [signature]
        return Draft(self._name, self._model, self._weights)

    def _signature_entry(self, index: int) -> Any:
        return schema.TensorMapT(name=self._graph.tensors[index].name, tensorIndex=index)

    def _tensor(self, name: str, shape: Sequence[int], dtype: str = "FLOAT32", buffer: int = 0) -> Value:
        kind = getattr(schema.TensorType, dtype)
        self._graph.tensors.append(schema.TensorT(name=name, shape=list(shape), type=kind, buffer=buffer, hasRank=True))
        return Value(len(self._graph.tensors) - 1, tuple(shape))

    def conv(
        self,
        x: Value,
        filters: int,
        kernel: Size,
        name: str,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        activation: Activation = "NONE",
        groups: int = 1,
        gain: float = 1.0,
    ) -> Value:
        """Add a convolution with bias; each of the ``groups`` reads its share of the channels."""
        x, size, scheme = self._padded(x, kernel, stride, padding, name)
        channels = x.shape[3] // groups
        weights = self._weighted((filters, *size, channels), prod(size) * channels, filters, name, gain)
        options = schema.Conv2DOptionsT(**_moves(stride, scheme), fusedActivationFunction=_activation(activation))
        return self.operator("CONV_2D", (x, *weights), _window(x, filters, size, stride, scheme), name, options)

    def depthwise_conv(
        self,
        x: Value,
        kernel: int,
        name: str,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        activation: Activation = "NONE",
    ) -> Value:
        """Add a depthwise convolution with bias; its filter has the shape (1, kernel, kernel, channels)."""
        x, size, scheme = self._padded(x, kernel, stride, padding, name)
        channels = x.shape[3]
        kernel_weights = self.weight(f"{name}/kernel", (1, *size, channels), (2.0 / prod(size)) ** 0.5)
        bias = self.weight(f"{name}/bias", (channels,), BIAS_STD)
        options = schema.DepthwiseConv2DOptionsT(
            **_moves(stride, scheme), depthMultiplier=1, fusedActivationFunction=_activation(activation)
        )
        shape = _window(x, channels, size, stride, scheme)
        return self.operator("DEPTHWISE_CONV_2D", (x, kernel_weights, bias), shape, name, options)

    def transpose_conv(self, x: Value, filters: int, kernel: int, name: str, *, stride: int = 2) -> Value:
        """Add a transposed convolution with bias that multiplies height and width by ``stride``."""
        batch, height, width, channels = x.shape
        shape = (batch, height * stride, width * stride, filters)
        fan_in = kernel * kernel * channels // (stride * stride)
        kernel_weights, bias = self._weighted((filters, kernel, kernel, channels), fan_in, filters, name)
        options = schema.TransposeConvOptionsT(**_moves(stride, "SAME"))
        target = self.constant(f"{name}/shape", np.array(shape, np.int32))
        return self.operator("TRANSPOSE_CONV", (target, kernel_weights, x, bias), shape, name, options)

    def max_pool(self, x: Value, size: Size, stride: int, name: str, padding: Padding = "VALID") -> Value:
        """Add max pooling; padding by a number adds zeros, which is correct after a ReLU."""
        return self._pool("MAX_POOL_2D", x, size, stride, name, padding)

    def average_pool(self, x: Value, size: Size, stride: int, name: str, padding: Padding = "VALID") -> Value:
        """Add average pooling."""
        return self._pool("AVERAGE_POOL_2D", x, size, stride, name, padding)

    def fully_connected(
        self,
        x: Value,
        units: int,
        name: str,
        *,
        activation: Activation = "NONE",
        keep: bool = False,
        gain: float = 1.0,
    ) -> Value:
        """Add a dense layer with bias over all but the first dimension, as a converter folds a flatten into it.

        With ``keep`` it reads the last dimension only and keeps the others.
        """
        fan_in = x.shape[-1] if keep else prod(x.shape[1:])
        weights = self._weighted((units, fan_in), fan_in, units, name, gain)
        options = schema.FullyConnectedOptionsT(fusedActivationFunction=_activation(activation), keepNumDims=keep)
        shape = (*x.shape[:-1], units) if keep else (x.shape[0], units)
        return self.operator("FULLY_CONNECTED", (x, *weights), shape, name, options)

    def binary(
        self, kind: Literal["ADD", "SUB", "MUL"], x: Value, y: Value, name: str, activation: Activation = "NONE"
    ) -> Value:
        """Combine two values element by element; dimensions are broadcast."""
        options = getattr(schema, f"{kind.capitalize()}OptionsT")(fusedActivationFunction=_activation(activation))
        return self.operator(kind, (x, y), np.broadcast_shapes(x.shape, y.shape), name, options)

    def add(self, x: Value, y: Value, name: str, *, activation: Activation = "NONE") -> Value:
        """Add two values."""
        return self.binary("ADD", x, y, name, activation)

    def squared_difference(self, x: Value, y: Value, name: str) -> Value:
        """Square the difference of two values."""
        shape = np.broadcast_shapes(x.shape, y.shape)
        return self.operator("SQUARED_DIFFERENCE", (x, y), shape, name, schema.SquaredDifferenceOptionsT())

    def resize_nearest(self, x: Value, factor: int, name: str) -> Value:
        """Repeat each pixel ``factor`` times in both directions."""
        batch, height, width, channels = x.shape
        size = self.constant(f"{name}/size", np.array([factor * height, factor * width], np.int32))
        shape = (batch, factor * height, factor * width, channels)
        return self.operator("RESIZE_NEAREST_NEIGHBOR", (x, size), shape, name, schema.ResizeNearestNeighborOptionsT())

    def scalar(self, kind: Literal["ADD", "SUB", "MUL"], x: Value, y: float, name: str) -> Value:
        """Combine a value with a number."""
        return self.binary(kind, x, self.constant(f"{name}/value", np.array(y, np.float32)), name)

    def affine(self, x: Value, name: str, activation: Activation = "NONE") -> Value:
        """Scale and shift each channel: a normalisation that cannot be folded into a convolution."""
        scaled = self.binary("MUL", x, self.weight(f"{name}/gamma", x.shape[-1:], 0.1, 1.0), f"{name}/mul")
        return self.binary("ADD", scaled, self.weight(f"{name}/beta", x.shape[-1:], BIAS_STD), name, activation)

    def normalised(
        self, x: Value, axes: Sequence[int], name: str, epsilon: float, activation: Activation = "NONE"
    ) -> Value:
        """Return ``(x − mean) / sqrt(variance + epsilon) · gamma + beta``, mean and variance taken over ``axes``.

        Layer normalisation takes the last axis, instance normalisation height and width. In the operators that a
        converter writes it is ``x · scale + (beta − mean · scale)`` with ``scale = gamma · rsqrt(variance + epsilon)``.
        """
        gamma = self.weight(f"{name}/gamma", x.shape[-1:], 0.1, 1.0)
        beta = self.weight(f"{name}/beta", x.shape[-1:], BIAS_STD)
        mean = self.mean(x, f"{name}/mean", axes, keep=True)
        squares = self.squared_difference(x, mean, f"{name}/squared_difference")
        variance = self.mean(squares, f"{name}/variance", axes, keep=True)
        inverse = self.unary("RSQRT", self.scalar("ADD", variance, epsilon, f"{name}/epsilon"), f"{name}/rsqrt")
        scale = self.binary("MUL", inverse, gamma, f"{name}/scale")
        scaled = self.binary("MUL", x, scale, f"{name}/scaled")
        shift = self.binary("SUB", beta, self.binary("MUL", mean, scale, f"{name}/scaled_mean"), f"{name}/shift")
        return self.binary("ADD", scaled, shift, name, activation)

    def unary(self, kind: str, x: Value, name: str, options: Any = None) -> Value:
        """Map each element: ``LOGISTIC``, ``HARD_SWISH``, ``TANH``, ``RSQRT``, …."""
        return self.operator(kind, (x,), x.shape, name, options)

    def concat(self, values: Sequence[Value], name: str, axis: int = -1) -> Value:
        """Join values along the channels, or along another axis."""
        shape = list(values[0].shape)
        axis %= len(shape)
        shape[axis] = sum(v.shape[axis] for v in values)
        return self.operator("CONCATENATION", values, shape, name, schema.ConcatenationOptionsT(axis=axis))

    def mean(self, x: Value, name: str, axes: Sequence[int] = (1, 2), *, keep: bool = False) -> Value:
        """Take the mean over height and width, or other axes, which are dropped, or of size 1 with ``keep``."""
        over = {axis % len(x.shape) for axis in axes}
        shape = [1 if i in over else n for i, n in enumerate(x.shape) if keep or i not in over]
        which = self.constant(f"{name}/axes", np.array(sorted(over), np.int32))
        return self.operator("MEAN", (x, which), shape, name, schema.ReducerOptionsT(keepDims=keep))

    def pad(self, x: Value, sides: Sequence[tuple[int, int]], name: str) -> Value:
        """Add zeros before and after each dimension."""
        amounts = self.constant(f"{name}/paddings", np.array(sides, np.int32))
        shape = [n + before + after for n, (before, after) in zip(x.shape, sides, strict=True)]
        return self.operator("PAD", (x, amounts), shape, name, schema.PadOptionsT())

    def reshape(self, x: Value, shape: Sequence[int], name: str) -> Value:
        """Give a value another shape of as many elements."""
        target = np.array(shape, np.int32)
        options = schema.ReshapeOptionsT(newShape=target)
        return self.operator("RESHAPE", (x, self.constant(f"{name}/shape", target)), shape, name, options)

    def transpose(self, x: Value, order: Sequence[int], name: str) -> Value:
        """Put dimensions into another order."""
        which = self.constant(f"{name}/order", np.array(order, np.int32))
        shape = [x.shape[i] for i in order]
        return self.operator("TRANSPOSE", (x, which), shape, name, schema.TransposeOptionsT())

    def part(self, x: Value, begin: Sequence[int], shape: Sequence[int], name: str) -> Value:
        """Cut a block out of a value."""
        start = self.constant(f"{name}/begin", np.array(begin, np.int32))
        size = self.constant(f"{name}/size", np.array(shape, np.int32))
        return self.operator("SLICE", (x, start, size), shape, name, schema.SliceOptionsT())

    def softmax(self, x: Value, name: str = "softmax") -> Value:
        """Add a softmax over the last dimension."""
        return self.unary("SOFTMAX", x, name, schema.SoftmaxOptionsT(beta=1.0))

    def _pool(self, kind: str, x: Value, size: Size, stride: int, name: str, padding: Padding) -> Value:
        x, pair, scheme = self._padded(x, size, stride, padding, name)
        options = schema.Pool2DOptionsT(**_moves(stride, scheme), filterHeight=pair[0], filterWidth=pair[1])
        return self.operator(kind, (x,), _window(x, x.shape[3], pair, stride, scheme), name, options)

    def _padded(
        self, x: Value, kernel: Size, stride: int, padding: Padding, name: str
    ) -> tuple[Value, tuple[int, int], Literal["SAME", "VALID"]]:
        """Return the value that a window reads, padded if need be, the window's size, and the schema's padding."""
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        if padding in {"SAME", "VALID"}:
            return x, size, padding
        same = [max(0, (-(-n // stride) - 1) * stride + k - n) for n, k in zip(x.shape[1:3], size, strict=True)]
        if padding == "CEIL":
            # SAME splits two rows or more between both sides; Caffe adds all at the end.
            rest = [-(n - k) % stride for n, k in zip(x.shape[1:3], size, strict=True)]
            if rest == [0, 0]:
                return x, size, "VALID"
            if rest == same and max(rest) <= 1:
                return x, size, "SAME"
            return self.pad(x, ((0, 0), (0, rest[0]), (0, rest[1]), (0, 0)), f"{name}/pad"), size, "VALID"
        amount = int(padding)
        if same == [2 * amount, 2 * amount]:
            return x, size, "SAME"
        if amount == 0:
            return x, size, "VALID"
        both = (amount, amount)
        return self.pad(x, ((0, 0), both, both, (0, 0)), f"{name}/pad"), size, "VALID"

    def _weighted(
        self, kernel: tuple[int, ...], fan_in: int, units: int, name: str, gain: float = 1.0
    ) -> tuple[Value, Value]:
        return (
            self.weight(f"{name}/kernel", kernel, gain * (2.0 / fan_in) ** 0.5, matrix=True),
            self.weight(f"{name}/bias", (units,), BIAS_STD),
        )


def _activation(name: Activation) -> Any:
    return getattr(schema.ActivationFunctionType, name)


def _moves(stride: int, padding: Literal["SAME", "VALID"]) -> dict[str, int]:
    """Return the options of how a window moves."""
    return {"padding": getattr(schema.Padding, padding), "strideW": stride, "strideH": stride}


def _window(
    x: Value, channels: int, size: tuple[int, int], stride: int, padding: Literal["SAME", "VALID"]
) -> tuple[int, int, int, int]:
    """Return the shape after a window has moved over height and width."""
    batch, height, width, _ = x.shape
    lost = (0, 0) if padding == "SAME" else (size[0] - 1, size[1] - 1)
    return batch, -(-(height - lost[0]) // stride), -(-(width - lost[1]) // stride), channels


def _decaying(values: Array, axis: int, random: np.random.Generator) -> Array:
    """Scale the directions of an axis by ``exp(-rate k / n)``, in a random orthogonal basis; the energy is kept.

    The basis is a cosine transform with random signs: dense, exactly orthogonal, and fast for 25,088 channels.
    """
    from scipy.fft import dct

    count = values.shape[axis]
    if count < SPECTRUM_CHANNELS:
        return values
    along = [1] * values.ndim
    along[axis] = count
    scale = np.exp(-SPECTRUM_RATE * np.arange(count) / count)
    scale /= np.sqrt(np.mean(scale**2))
    values *= scale.astype(np.float32).reshape(along)
    values = dct(values, axis=axis, norm="ortho", overwrite_x=True)
    values *= random.choice(np.array([-1, 1], np.float32), count).reshape(along)
    return values


def whole(channels: float) -> int:
    """Return the nearest whole number of channels, at least 1; halves go up."""
    return max(1, int(channels + 0.5))


def eights(channels: float) -> int:
    """Return the nearest multiple of 8, at least 8 and not more than 10 % below.

    The rule of MobileNet v2 and v3 and of EfficientNet. MobileNet v1 truncates instead, which is the same for
    multiples of 0.25.
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
