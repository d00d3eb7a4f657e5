"""Small convolutional models for what splits operators, drawn or written down."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from hypothesis import strategies as st

from tests.support.models.tflite_models import TYPES, Array, Net

SAME, VALID = 0, 1
RELU = 1


def _windows(n: int, size: int, stride: int, padding: int) -> int:
    return -(-n // stride) if padding == SAME else -(-(n - size + 1) // stride)


class Layers:
    """A model in which each layer reads the last tensor, or one that is named; float32, or int8 throughout."""

    def __init__(self, shape: tuple[int, ...], *, int8: bool = False, seed: int = 0) -> None:
        self.net = Net()
        self.int8 = int8
        self.rng = np.random.default_rng(seed)
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.last = self.net.input(shape, TYPES.INT8 if int8 else TYPES.FLOAT32, quantization=self._scale(0.05))
        self.shapes[self.last] = shape

    def _scale(self, scale: float) -> Any:
        return schema.QuantizationParametersT(scale=[scale], zeroPoint=[3]) if self.int8 else None

    def _tensor(self, shape: tuple[int, ...], scale: float = 0.1) -> int:
        made = self.net.tensor(shape, TYPES.INT8 if self.int8 else TYPES.FLOAT32, quantization=self._scale(scale))
        self.shapes[made] = shape
        return made

    def constant(self, *shape: int) -> int:
        """Add a float constant."""
        made = self.net.constant(self.rng.uniform(-1, 1, shape).astype(np.float32))
        self.shapes[made] = shape
        return made

    def weights(self, shape: tuple[int, ...], channels: int, dimension: int) -> list[int]:
        """Add a filter and a bias, per channel where the model is quantised."""
        if not self.int8:
            return [self.constant(*shape), self.constant(channels)]
        scales = self.rng.uniform(0.001, 0.02, channels)
        values = self.rng.integers(-127, 128, shape).astype(np.int8)
        bias = self.rng.integers(-500, 500, channels).astype(np.int32)
        found = []
        for value, factor, axis in ((values, 1.0, dimension), (bias, 0.05, 0)):
            tensor = self.net.constant(value)
            self.net.graph.tensors[tensor].quantization = schema.QuantizationParametersT(
                scale=list(scales * factor), zeroPoint=[0] * channels, quantizedDimension=axis
            )
            found.append(tensor)
        return found

    def layer(self, kind: str, inputs: list[int], shape: tuple[int, ...], options: Any, scale: float = 0.1) -> int:
        """Add an operator."""
        self.last = self.net.op(kind, inputs, self._tensor(shape, scale), options)
        return self.last

    def conv(
        self,
        channels: int,
        size: int = 3,
        stride: int = 1,
        padding: int = SAME,
        dilation: int = 1,
        groups: int = 1,
    ) -> int:
        """Add a convolution with a RELU in it."""
        n, h, w, c = self.shapes[self.last]
        spans = (size - 1) * dilation + 1
        shape = (n, _windows(h, spans, stride, padding), _windows(w, spans, stride, padding), channels)
        options = schema.Conv2DOptionsT(
            padding=padding,
            strideH=stride,
            strideW=stride,
            dilationHFactor=dilation,
            dilationWFactor=dilation,
            fusedActivationFunction=RELU,
        )
        weights = self.weights((channels, size, size, c // groups), channels, 0)
        return self.layer("CONV_2D", [self.last, *weights], shape, options)

    def depthwise(self, times: int = 1, size: int = 3, stride: int = 1, padding: int = SAME, dilation: int = 1) -> int:
        """Add a depthwise convolution with ``times`` filters for each channel."""
        n, h, w, c = self.shapes[self.last]
        spans = (size - 1) * dilation + 1
        shape = (n, _windows(h, spans, stride, padding), _windows(w, spans, stride, padding), c * times)
        options = schema.DepthwiseConv2DOptionsT(
            padding=padding,
            strideH=stride,
            strideW=stride,
            depthMultiplier=times,
            dilationHFactor=dilation,
            dilationWFactor=dilation,
        )
        weights = self.weights((1, size, size, c * times), c * times, 3)
        return self.layer("DEPTHWISE_CONV_2D", [self.last, *weights], shape, options)

    def pool(self, kind: str, size: int, stride: int, padding: int = SAME) -> int:
        """Add a pooling."""
        n, h, w, c = self.shapes[self.last]
        shape = (n, _windows(h, size, stride, padding), _windows(w, size, stride, padding), c)
        options = schema.Pool2DOptionsT(
            padding=padding, strideH=stride, strideW=stride, filterHeight=size, filterWidth=size
        )
        return self.layer(kind, [self.last], shape, options, self._scale_of(self.last))

    def _scale_of(self, tensor: int) -> float:
        found = self.net.graph.tensors[tensor].quantization
        return float(found.scale[0]) if found is not None else 0.1

    def transposed(self, channels: int, size: int, stride: int, padding: int = SAME) -> int:
        """Add a transposed convolution."""
        n, h, w, c = self.shapes[self.last]
        more = 0 if padding == SAME else size - stride
        shape = (n, h * stride + more, w * stride + more, channels)
        options = schema.TransposeConvOptionsT(padding=padding, strideH=stride, strideW=stride)
        target = self.net.constant(np.array(shape, np.int32))
        weights = self.weights((channels, size, size, c), channels, 0)
        return self.layer("TRANSPOSE_CONV", [target, weights[0], self.last, weights[1]], shape, options)

    def pad(self, above: int, below: int, left: int, right: int) -> int:
        """Add zeros around."""
        n, h, w, c = self.shapes[self.last]
        amounts = self.net.constant(np.array([[0, 0], [above, below], [left, right], [0, 0]], np.int32))
        shape = (n, h + above + below, w + left + right, c)
        return self.layer("PAD", [self.last, amounts], shape, schema.PadOptionsT(), self._scale_of(self.last))

    def mean(self) -> int:
        """Add a mean over height and width."""
        n, _, _, c = self.shapes[self.last]
        axes = self.net.constant(np.array([1, 2], np.int32))
        return self.layer("MEAN", [self.last, axes], (n, 1, 1, c), schema.ReducerOptionsT(keepDims=True))

    def add(self, other: int) -> int:
        """Add another tensor to the last one."""
        return self.layer("ADD", [self.last, other], self.shapes[self.last], schema.AddOptionsT())

    def relu(self) -> int:
        """Add a RELU."""
        return self.layer("RELU", [self.last], self.shapes[self.last], None, self._scale_of(self.last))

    def dense(self, units: int) -> int:
        """Add a dense layer over all that there is."""
        count = prod(self.shapes[self.last])
        weights = self.weights((units, count), units, 0)
        options = schema.FullyConnectedOptionsT(fusedActivationFunction=RELU)
        return self.layer("FULLY_CONNECTED", [self.last, *weights], (1, units), options)

    def done(self, *more: int) -> Net:
        """Return the model; its outputs are the last tensor and any others."""
        return self.net.outputs(*(t for t in more if t != self.last), self.last)

    def value(self) -> Array:
        """Return something to feed it."""
        shape = self.shapes[self.net.graph.inputs[0]]
        if self.int8:
            return self.rng.integers(-128, 128, shape).astype(np.int8)
        return self.rng.uniform(-1, 1, shape).astype(np.float32)


@st.composite
def layers(draw: st.DrawFn, *, int8: bool = False, most: int = 4) -> Layers:
    """Models of one to ``most`` layers, any of which may be an output too."""
    side = st.integers(5, 13)
    found = Layers((1, draw(side), draw(side), draw(st.sampled_from((2, 4)))), int8=int8, seed=draw(st.integers(0, 9)))
    kinds = ["conv", "depthwise", "max", "average", "relu", "residual", "pad"] + (
        [] if int8 else ["scale", "transposed"]
    )
    kept = []
    for _ in range(draw(st.integers(1, most))):
        _, h, w, c = found.shapes[found.last]
        size = draw(st.integers(1, min(4, h, w)))
        stride, padding = draw(st.integers(1, 3)), draw(st.sampled_from((SAME, VALID)))
        dilation = draw(st.integers(1, 2)) if stride == 1 and min(h, w) > 2 * size else 1
        # Behind another layer LiteRT 2.3 computes nothing of a pooling of single values: not even twice the same.
        kind = draw(st.sampled_from([k for k in kinds if size > 1 or k not in ("max", "average")]))
        if kind == "conv":
            groups = draw(st.sampled_from((1, 1, 2))) if not int8 and c % 2 == 0 else 1
            found.conv(draw(st.sampled_from((4, 6))), size, stride, padding, dilation, groups)
        elif kind == "depthwise":
            found.depthwise(draw(st.integers(1, 2)), size, stride, padding, dilation)
        elif kind in ("max", "average"):
            found.pool(f"{kind.upper()}_POOL_2D", size, stride, padding)
        elif kind == "relu":
            found.relu()
        elif kind == "pad":
            found.pad(*(draw(st.integers(0, 2)) for _ in range(4)))
        elif kind == "transposed" and max(h, w) < 14:
            found.transposed(draw(st.integers(1, 3)), size, min(stride, 2), padding)
        elif kind == "scale":
            found.layer("MUL", [found.last, found.constant(c)], (1, h, w, c), schema.MulOptionsT())
        elif kind == "residual":
            before = found.last
            found.conv(c, min(3, h, w))
            found.add(before)
        if draw(st.integers(0, 4)) == 0:
            kept.append(found.last)
    found.done(*dict.fromkeys(kept))
    return found
