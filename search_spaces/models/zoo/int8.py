"""The ``:int8`` variant: post-training full integer quantisation, as the runtime specifies it.

Weights are int8, symmetric, one scale per output channel; biases int32; activations int8 with one scale and zero
point per tensor, from the ranges seen on seeded inputs. Inputs and outputs are int8 too, as the converter makes them
when it may use integers only. Only the runtime is needed.

Scheme: Jacob et al. 2018, arXiv:1712.05877, and LiteRT's 8-bit specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from networkx.utils import UnionFind

from search_spaces.models.changes import KINDS, changed, with_main
from search_spaces.models.flatbuffer import write_model
from search_spaces.models.zoo.builder import Array, Draft
from search_spaces.models.zoo.calibration import Range, calibrated

# Operators with weights: positions of data, weights and bias among the inputs, and the weights' output axis.
_WEIGHTED: Mapping[str, tuple[int, int, int, int]] = {
    "CONV_2D": (0, 1, 2, 0),
    "DEPTHWISE_CONV_2D": (0, 1, 2, 3),
    "FULLY_CONNECTED": (0, 1, 2, 0),
    "TRANSPOSE_CONV": (2, 1, 3, 0),
}
# Operators whose inputs and outputs must have one scale.
_SAME_SCALE = frozenset(
    """AVERAGE_POOL_2D CONCATENATION GATHER MAX_POOL_2D PAD RESHAPE RESIZE_NEAREST_NEIGHBOR SLICE SPACE_TO_DEPTH
    TRANSPOSE""".split()  # noqa: SIM905 - a list that is read as words
)
# Operators whose output has a scale and zero point fixed by the specification.
_FIXED: Mapping[str, tuple[float, int]] = {
    "LOGISTIC": (1 / 256, -128),
    "SOFTMAX": (1 / 256, -128),
    "TANH": (1 / 128, 0),
}


def write_int8(drafted: Draft, path: Path) -> None:
    """Calibrate a float model, quantise it and write it; the float model is written beside it for a while.

    Raises:
        UnavailableError: the runtime does not run the model here.
        UsageError: the folder cannot be written, or the disk is full.
    """
    with TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, "float32.tflite")
        drafted.write(whole)
        ranges = calibrated(whole, drafted.graph())
    quantiser = _Quantiser(drafted, ranges)
    quantiser.run()
    write_model(quantiser.model, quantiser.blobs, path)


@dataclass(slots=True)
class _Quantiser:
    """Quantises one model; ``model`` and ``blobs`` are its result."""

    drafted: Draft
    ranges: Mapping[int, Range]
    model: Any = None
    blobs: dict[int, Array] = field(default_factory=dict)
    _tied: UnionFind[int] = field(default_factory=UnionFind)  # tensors of one scale have one leader
    _shared: dict[int, Range] = field(default_factory=dict)  # leader → range

    def run(self) -> None:
        drafted = self.drafted.schema
        self.model = with_main(drafted, tensors=[changed(tensor) for tensor in drafted.subgraphs[0].tensors])
        graph = self.model.subgraphs[0]
        operators = [(self._kind(operator), operator) for operator in graph.operators]
        self._tie(operators)
        fixed = {operator.outputs[0]: _FIXED[kind] for kind, operator in operators if kind in _FIXED}
        for index, tensor in enumerate(graph.tensors):
            if tensor.type == schema.TensorType.FLOAT32 and not tensor.buffer:
                _mark(tensor, *(fixed.get(index) or _scale(self._shared[self._tied[index]])))
        for kind, operator in operators:
            if kind in _WEIGHTED:
                self._quantise_weights(operator, *_WEIGHTED[kind])
        for index, tensor in enumerate(graph.tensors):
            if tensor.type == schema.TensorType.FLOAT32:
                values = self._values(tensor.buffer)
                scale, zero = _scale(self._shared.get(self._tied[index], _range(values)))
                _mark(tensor, scale, zero)
                quantised = np.clip(np.rint(values / scale) + zero, -128, 127).astype(np.int8)
                self._keep(tensor.buffer, quantised)

    def _kind(self, operator: Any) -> str:
        return KINDS[self.drafted.schema.operatorCodes[operator.opcodeIndex].builtinCode]

    def _values(self, buffer: int) -> Array:
        weight = self.drafted.weights.get(buffer)
        if weight is not None:
            return weight.make(self.drafted.name)
        return self.drafted.schema.buffers[buffer].data.view(np.float32)  # type: ignore[no-any-return]

    def _keep(self, buffer: int, values: Array) -> None:
        self.blobs[buffer] = np.ascontiguousarray(values)

    def _tie(self, operators: list[tuple[str, Any]]) -> None:
        """Unite tensors that must have one scale, and their ranges."""
        graph = self.model.subgraphs[0]
        for kind, operator in operators:
            if kind in _SAME_SCALE:
                for index in operator.inputs:
                    if graph.tensors[index].type == schema.TensorType.FLOAT32:
                        self._tied.union(operator.outputs[0], index)
        for index, tensor in enumerate(graph.tensors):
            if index in self.ranges:
                self._widen(index, self.ranges[index])
            elif index in self._tied.parents and tensor.buffer:
                self._widen(index, _range(self._values(tensor.buffer)))

    def _widen(self, index: int, seen: Range) -> None:
        leader = self._tied[index]
        low, high = self._shared.get(leader, (0.0, 0.0))
        self._shared[leader] = min(low, seen[0]), max(high, seen[1])

    def _quantise_weights(self, operator: Any, data: int, weights: int, bias: int, axis: int) -> None:
        tensors = self.model.subgraphs[0].tensors
        kernel, offset = tensors[operator.inputs[weights]], tensors[operator.inputs[bias]]
        values = self._values(kernel.buffer)
        others = tuple(a for a in range(values.ndim) if a != axis)
        scales = np.maximum(np.abs(values).max(axis=others, keepdims=True) / np.float32(127), np.float32(1e-12))
        values /= scales
        self._keep(kernel.buffer, np.rint(values, out=values).astype(np.int8))
        kernel.type = schema.TensorType.INT8
        kernel.quantization = _parameters(scales.ravel(), np.zeros(scales.size, np.int64), axis)
        steps = scales.ravel() * np.float32(tensors[operator.inputs[data]].quantization.scale[0])
        rounded = np.rint(self._values(offset.buffer).astype(np.float64) / steps)
        self._keep(offset.buffer, np.clip(rounded, -(2**31) + 1, 2**31 - 1).astype(np.int32))
        offset.type = schema.TensorType.INT32
        offset.quantization = _parameters(steps, np.zeros(steps.size, np.int64), 0)


def _range(values: Array) -> Range:
    return float(values.min()), float(values.max())


def _scale(seen: Range) -> tuple[float, int]:
    """Return scale and zero point of a range, widened to hold 0 exactly."""
    low, high = min(seen[0], 0.0), max(seen[1], 0.0)
    scale = max((high - low) / 255, 1e-8)
    return scale, int(np.clip(round(-128 - low / scale), -128, 127))


def _mark(tensor: Any, scale: float, zero: int) -> None:
    tensor.type = schema.TensorType.INT8
    tensor.quantization = _parameters(np.array([scale], np.float32), np.array([zero], np.int64), 0)


def _parameters(scales: Array, zeros: Array, axis: int) -> Any:
    return schema.QuantizationParametersT(
        scale=scales.astype(np.float32), zeroPoint=zeros.astype(np.int64), quantizedDimension=axis
    )
