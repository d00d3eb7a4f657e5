"""Full integer quantisation of a model that was decomposed: first the ranks, then the bits.

Quantising first would round weights twice, and the decomposition would fit the rounding errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.graph import Graph
from search_spaces.models.stages import cut_stage
from search_spaces.models.zoo.builder import Array, Draft, Weight
from search_spaces.models.zoo.int8 import write_int8


@dataclass(frozen=True, slots=True, eq=False)
class _Held(Weight):
    """Given weights, rather than random ones."""

    values: Array = field(default_factory=lambda: np.empty(0, np.float32))

    def make(self, model: str) -> Array:  # noqa: ARG002 - as every weight
        return self.values.reshape(self.shape).copy()


def quantise(graph: Graph, path: Path) -> None:
    """Write a float32 model as ``:int8`` models of the zoo are written: calibrated by the runtime on seeded inputs.

    Args:
        graph: a model whose operators all occur in the zoo's ``:int8`` models.
        path: of the new file; the float model is written beside it for a while.

    Raises:
        ModelError: the model has no file, or its file cannot be read.
        UnavailableError: the runtime does not run the model here.
        UsageError: the folder cannot be written, or the disk is full.
    """
    with TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, "decomposed.tflite")
        cut_stage(graph, range(len(graph.operators))).write(whole)
        content = whole.read_bytes()
    write_int8(_draft(graph.name, content), path)


def _draft(name: str, content: bytes) -> Draft:
    model: Any = schema.ModelT.InitFromPackedBuf(content, 0)
    weights: dict[int, Weight] = {}
    for tensor in model.subgraphs[0].tensors:
        buffer = model.buffers[tensor.buffer]
        if tensor.type == schema.TensorType.FLOAT32 and buffer.data is not None and len(buffer.data):
            values = np.frombuffer(bytes(buffer.data), np.float32)
            weights[int(tensor.buffer)] = _Held(str(tensor.name), tuple(tensor.shape.tolist()), 1.0, values=values)
    for number in weights:
        model.buffers[number].data = None
    return Draft(name, model, weights)
