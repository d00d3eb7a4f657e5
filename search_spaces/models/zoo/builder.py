"""Layer-by-layer builder of ``.tflite`` models with seeded weights, as a converter would emit them.

Layers are NHWC float32, batch normalisation is folded into the convolution before it, filters are OHWI, activations
are fused where the schema can fuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.zoo.assembly import Assembly, Draft, Value, Weight

__all__ = ["Activation", "Builder", "Draft", "Padding", "Value", "Weight"]

Activation = Literal["NONE", "RELU", "RELU6"]
# A number pads both sides equally, as PyTorch does: by SAME where that is equivalent, else by an operator PAD.
# CEIL rounds the size up, as Caffe's pooling does (and PyTorch's with ``ceil_mode``).
Padding = Literal["SAME", "VALID", "CEIL"] | int
Size = int | tuple[int, int]

BIAS_STD = 0.01  # not 0, so that a misplaced bias changes the output


class Builder(Assembly):
    """A model under construction; each method adds a layer and returns its output.

    Layer names become tensor names: the output has the layer's, weights have ``<layer>/kernel`` and ``<layer>/bias``.
    ``gain`` scales a layer's weights: the last layer of a residual branch takes ``branches ** -0.5``, so that the
    sum's variance grows by a constant however deep the network is.
    """

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
        size = _pair(kernel)
        x, scheme = self._padded(x, size, stride, padding, name)
        channels = x.shape[3] // groups
        weights = self._weighted((filters, *size, channels), prod(size) * channels, filters, name, gain)
        options = schema.Conv2DOptionsT(
            padding=getattr(schema.Padding, scheme),
            strideW=stride,
            strideH=stride,
            fusedActivationFunction=_activation(activation),
        )
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
        size = _pair(kernel)
        x, scheme = self._padded(x, size, stride, padding, name)
        channels = x.shape[3]
        kernel_weights = self.weight(f"{name}/kernel", (1, *size, channels), (2.0 / prod(size)) ** 0.5)
        bias = self.weight(f"{name}/bias", (channels,), BIAS_STD)
        options = schema.DepthwiseConv2DOptionsT(
            padding=getattr(schema.Padding, scheme),
            strideW=stride,
            strideH=stride,
            depthMultiplier=1,
            fusedActivationFunction=_activation(activation),
        )
        shape = _window(x, channels, size, stride, scheme)
        return self.operator("DEPTHWISE_CONV_2D", (x, kernel_weights, bias), shape, name, options)

    def transpose_conv(self, x: Value, filters: int, kernel: int, name: str, *, stride: int = 2) -> Value:
        """Add a transposed convolution with bias that multiplies height and width by ``stride``."""
        batch, height, width, channels = x.shape
        shape = (batch, height * stride, width * stride, filters)
        fan_in = kernel * kernel * channels // (stride * stride)
        kernel_weights, bias = self._weighted((filters, kernel, kernel, channels), fan_in, filters, name)
        options = schema.TransposeConvOptionsT(padding=schema.Padding.SAME, strideW=stride, strideH=stride)
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
        pair = _pair(size)
        x, scheme = self._padded(x, pair, stride, padding, name)
        options = schema.Pool2DOptionsT(
            padding=getattr(schema.Padding, scheme),
            strideW=stride,
            strideH=stride,
            filterHeight=pair[0],
            filterWidth=pair[1],
        )
        return self.operator(kind, (x,), _window(x, x.shape[3], pair, stride, scheme), name, options)

    def _padded(
        self, x: Value, size: tuple[int, int], stride: int, padding: Padding, name: str
    ) -> tuple[Value, Literal["SAME", "VALID"]]:
        """Return the value that the window reads, padded if need be, and the schema's padding."""
        if padding in {"SAME", "VALID"}:
            return x, padding
        same = [max(0, (-(-n // stride) - 1) * stride + k - n) for n, k in zip(x.shape[1:3], size, strict=True)]
        if padding == "CEIL":
            # SAME splits two rows or more between both sides; Caffe adds all at the end.
            rest = [-(n - k) % stride for n, k in zip(x.shape[1:3], size, strict=True)]
            if rest == [0, 0]:
                return x, "VALID"
            if rest == same and max(rest) <= 1:
                return x, "SAME"
            return self.pad(x, ((0, 0), (0, rest[0]), (0, rest[1]), (0, 0)), f"{name}/pad"), "VALID"
        amount = int(padding)
        if same == [2 * amount, 2 * amount]:
            return x, "SAME"
        if amount == 0:
            return x, "VALID"
        both = (amount, amount)
        return self.pad(x, ((0, 0), both, both, (0, 0)), f"{name}/pad"), "VALID"

    def _weighted(
        self, kernel: tuple[int, ...], fan_in: int, units: int, name: str, gain: float = 1.0
    ) -> tuple[Value, Value]:
        return (
            self.weight(f"{name}/kernel", kernel, gain * (2.0 / fan_in) ** 0.5, matrix=True),
            self.weight(f"{name}/bias", (units,), BIAS_STD),
        )


def _activation(name: Activation) -> Any:
    return getattr(schema.ActivationFunctionType, name)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _window(
    x: Value, channels: int, size: tuple[int, int], stride: int, padding: Literal["SAME", "VALID"]
) -> tuple[int, int, int, int]:
    """Return the shape after a window has moved over height and width."""
    batch, height, width, _ = x.shape
    lost = (0, 0) if padding == "SAME" else (size[0] - 1, size[1] - 1)
    return batch, -(-(height - lost[0]) // stride), -(-(width - lost[1]) // stride), channels
