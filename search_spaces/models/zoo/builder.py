"""Build a ``.tflite`` model layer by layer, as a converter would emit it, with seeded weights.

Layers are NHWC float32, batch normalisation is folded into the convolution before it, filters are OHWI. Weights are
He-normal (He et al. 2015, arXiv:1502.01852): standard deviation ``sqrt(2 / fan_in)``. Each tensor has a random stream
of its own, named by model and tensor, so a weight depends neither on the order of layers nor on other tensors; it is
made when it is written, so the peak memory of building is one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.models.litert import VERSION
from search_spaces.models.writer import write_model

Activation = Literal["NONE", "RELU", "RELU6"]
Padding = Literal["SAME", "VALID"]

BIAS_STD = 0.01  # not 0, so that a bias in the wrong place shows in the output


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model being built: its index and its shape (N, H, W, C or fewer dimensions)."""

    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of normally distributed weights: its name, shape and standard deviation."""

    name: str
    shape: tuple[int, ...]
    std: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A model whose weights are not made yet."""

    name: str
    schema: Any
    weights: Mapping[int, Weight]

    @property
    def parameters(self) -> int:
        """Number of weights, biases included."""
        return sum(prod(w.shape) for w in self.weights.values())

    def write(self, path: Path) -> None:
        """Make the weights and write the model; the same bytes each time.

        Raises:
            UsageError: the folder cannot be written, or the disk is full.
        """
        write_model(self.schema, _Weights(self.name, self.weights), path)


class Builder:
    """A model under construction; each layer takes values and returns the value that it computes.

    Layer names become tensor names: the output has the layer's, weights have ``<layer>/kernel`` and ``<layer>/bias``.

    Args:
        name: of the model; also the seed of its weights.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._graph = schema.SubGraphT(name="main", tensors=[], operators=[], inputs=[], outputs=[])
        self._model = schema.ModelT(
            version=VERSION, description=name, operatorCodes=[], subgraphs=[self._graph], buffers=[schema.BufferT()]
        )
        self._codes: dict[int, int] = {}
        self._weights: dict[int, Weight] = {}

    def input(self, shape: Sequence[int], name: str = "input") -> Value:
        """Add an input of the model."""
        value = self._tensor(name, shape)
        self._graph.inputs.append(value.index)
        return value

    def conv(
        self,
        x: Value,
        filters: int,
        kernel: int,
        name: str,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        activation: Activation = "NONE",
    ) -> Value:
        """Add a convolution with bias."""
        channels = x.shape[3]
        weights = self._weighted((filters, kernel, kernel, channels), kernel * kernel * channels, filters, name)
        options = schema.Conv2DOptionsT(
            padding=getattr(schema.Padding, padding),
            strideW=stride,
            strideH=stride,
            fusedActivationFunction=getattr(schema.ActivationFunctionType, activation),
        )
        shape = _window(x, filters, kernel, stride, padding)
        return self._operator(name, "CONV_2D", options, (x, *weights), shape)

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
        """Add a convolution with bias that keeps channels apart; its filter is 1 by kernel by kernel by channels."""
        channels = x.shape[3]
        weights = self._weighted((1, kernel, kernel, channels), kernel * kernel, channels, name)
        options = schema.DepthwiseConv2DOptionsT(
            padding=getattr(schema.Padding, padding),
            strideW=stride,
            strideH=stride,
            depthMultiplier=1,
            fusedActivationFunction=getattr(schema.ActivationFunctionType, activation),
        )
        shape = _window(x, channels, kernel, stride, padding)
        return self._operator(name, "DEPTHWISE_CONV_2D", options, (x, *weights), shape)

    def max_pool(self, x: Value, size: int, stride: int, name: str, padding: Padding = "VALID") -> Value:
        """Add a maximum over square windows."""
        return self._pool("MAX_POOL_2D", x, size=size, stride=stride, name=name, padding=padding)

    def average_pool(self, x: Value, size: int, stride: int, name: str, padding: Padding = "VALID") -> Value:
        """Add a mean over square windows."""
        return self._pool("AVERAGE_POOL_2D", x, size=size, stride=stride, name=name, padding=padding)

    def fully_connected(self, x: Value, units: int, name: str, *, activation: Activation = "NONE") -> Value:
        """Add a matrix product with bias over everything but the first dimension, as a converter folds a flatten."""
        fan_in = prod(x.shape[1:])
        weights = self._weighted((units, fan_in), fan_in, units, name)
        options = schema.FullyConnectedOptionsT(
            fusedActivationFunction=getattr(schema.ActivationFunctionType, activation)
        )
        shape = (x.shape[0], units)
        return self._operator(name, "FULLY_CONNECTED", options, (x, *weights), shape)

    def add(self, x: Value, y: Value, name: str, *, activation: Activation = "NONE") -> Value:
        """Add two values of one shape."""
        options = schema.AddOptionsT(fusedActivationFunction=getattr(schema.ActivationFunctionType, activation))
        return self._operator(name, "ADD", options, (x, y), x.shape)

    def concat(self, values: Sequence[Value], name: str) -> Value:
        """Join values along the channels."""
        first = values[0].shape
        options = schema.ConcatenationOptionsT(axis=len(first) - 1)
        shape = (*first[:-1], sum(v.shape[-1] for v in values))
        return self._operator(name, "CONCATENATION", options, values, shape)

    def mean(self, x: Value, name: str) -> Value:
        """Take the mean over height and width; the result has N and C only."""
        axes = self._constant(f"{name}/axes", np.array([1, 2], np.int32))
        options = schema.ReducerOptionsT(keepDims=False)
        return self._operator(name, "MEAN", options, (x, axes), (x.shape[0], x.shape[3]))

    def reshape(self, x: Value, shape: Sequence[int], name: str) -> Value:
        """Give a value another shape of as many elements."""
        target = np.array(shape, np.int32)
        options = schema.ReshapeOptionsT(newShape=target)
        return self._operator(name, "RESHAPE", options, (x, self._constant(f"{name}/shape", target)), shape)

    def softmax(self, x: Value, name: str = "softmax") -> Value:
        """Add a softmax over the last dimension."""
        return self._operator(name, "SOFTMAX", schema.SoftmaxOptionsT(beta=1.0), (x,), x.shape)

    def finish(self, *outputs: Value) -> Draft:
        """Return the model with these outputs; the builder is not used any more."""
        self._graph.outputs = [v.index for v in outputs]
        signature = schema.SignatureDefT(signatureKey="serving_default", subgraphIndex=0)
        signature.inputs = [self._signature_entry(i) for i in self._graph.inputs]
        signature.outputs = [self._signature_entry(i) for i in self._graph.outputs]
        self._model.signatureDefs = [signature]
        return Draft(self._name, self._model, self._weights)

    def _signature_entry(self, index: int) -> Any:
        return schema.TensorMapT(name=self._graph.tensors[index].name, tensorIndex=index)

    def _pool(self, kind: str, x: Value, *, size: int, stride: int, name: str, padding: Padding) -> Value:
        options = schema.Pool2DOptionsT(
            padding=getattr(schema.Padding, padding),
            strideW=stride,
            strideH=stride,
            filterWidth=size,
            filterHeight=size,
        )
        return self._operator(name, kind, options, (x,), _window(x, x.shape[3], size, stride, padding))

    def _operator(self, name: str, kind: str, options: Any, inputs: Sequence[Value], shape: Sequence[int]) -> Value:
        code = getattr(schema.BuiltinOperator, kind)
        if code not in self._codes:
            self._codes[code] = len(self._model.operatorCodes)
            # Readers from before the wider field look at the deprecated one, which takes codes up to 127.
            self._model.operatorCodes.append(
                schema.OperatorCodeT(deprecatedBuiltinCode=min(code, 127), builtinCode=code, version=1)
            )
        output = self._tensor(name, shape)
        self._graph.operators.append(
            schema.OperatorT(
                opcodeIndex=self._codes[code],
                inputs=[v.index for v in inputs],
                outputs=[output.index],
                builtinOptionsType=getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T")),
                builtinOptions=options,
            )
        )
        return output

    def _tensor(
        self, name: str, shape: Sequence[int], dtype: int = schema.TensorType.FLOAT32, buffer: int = 0
    ) -> Value:
        self._graph.tensors.append(
            schema.TensorT(name=name, shape=list(shape), type=dtype, buffer=buffer, hasRank=True)
        )
        return Value(len(self._graph.tensors) - 1, tuple(shape))

    def _weighted(self, kernel: tuple[int, ...], fan_in: int, units: int, name: str) -> tuple[Value, Value]:
        return (
            self._weight(Weight(f"{name}/kernel", kernel, (2.0 / fan_in) ** 0.5)),
            self._weight(Weight(f"{name}/bias", (units,), BIAS_STD)),
        )

    def _weight(self, weight: Weight) -> Value:
        self._model.buffers.append(schema.BufferT())
        buffer = len(self._model.buffers) - 1
        self._weights[buffer] = weight
        return self._tensor(weight.name, weight.shape, buffer=buffer)

    def _constant(self, name: str, value: NDArray[np.int32]) -> Value:
        self._model.buffers.append(schema.BufferT(data=value.view(np.uint8)))
        return self._tensor(name, value.shape, schema.TensorType.INT32, len(self._model.buffers) - 1)


class _Weights(Mapping[int, NDArray[np.float32]]):
    """Weights by buffer number, made when they are asked for."""

    def __init__(self, model: str, weights: Mapping[int, Weight]) -> None:
        self._model = model
        self._weights = weights

    def __getitem__(self, buffer: int) -> NDArray[np.float32]:
        weight = self._weights[buffer]
        digest = hashlib.sha256(f"{self._model}/{weight.name}".encode()).digest()
        random = np.random.default_rng(np.random.SeedSequence(int.from_bytes(digest, "little")))
        values = random.standard_normal(weight.shape, np.float32)
        values *= np.float32(weight.std)
        return values

    def __iter__(self) -> Iterator[int]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _window(x: Value, channels: int, size: int, stride: int, padding: Padding) -> tuple[int, int, int, int]:
    """Return the shape after a square window has moved over height and width."""
    batch, height, width, _ = x.shape
    lost = 0 if padding == "SAME" else size - 1
    return batch, -(-(height - lost) // stride), -(-(width - lost) // stride), channels
