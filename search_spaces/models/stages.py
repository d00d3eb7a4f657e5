"""Cut a stage out of a model: a valid ``.tflite`` of its own, as a file or as a view of the model's file.

A stage keeps the numbers of the model's buffers. Unused ones are left empty (a few bytes each), and what is keyed by
buffer number, such as packed weights, serves the stage as it serves the whole model.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from search_spaces.errors import ModelError
from search_spaces.graph import Boundary, Graph
from search_spaces.models.source import ModelSource
from search_spaces.models.writer import pack_header, point_at, write_model


@dataclass(frozen=True, slots=True)
class StageModel:
    """A stage's own structure, without weights.

    Attributes:
        schema: the unpacked ``ModelT`` of the stage; its buffers hold no data.
        source: the model's file, where the weights lie.
        buffers: numbers of the buffers whose weights the stage reads.
        inputs, outputs: tensors of the model's graph, in the order of the stage's subgraph.
    """

    schema: Any
    source: ModelSource
    buffers: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights that the stage reads."""
        return sum(self.source.extents[b].nbytes for b in self.buffers)

    def view(self) -> bytes:
        """Return a header such that header and model file, one behind the other in memory, are the stage's model.

        The header is a whole number of pages long, so the file can be mapped behind it and no weight is copied.
        """
        header, fields = pack_header(self.schema, self.buffers)
        begin = -(-len(header) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        for buffer, field in fields.items():
            point_at(header, field, begin + self.source.extents[buffer].offset - 4)
        return bytes(header).ljust(begin, b"\0")

    def write(self, path: Path) -> str:
        """Write the stage as a stand-alone file and return its SHA-256 (hex).

        Raises:
            ModelError: the model's file is gone or has changed.
            UsageError: the folder cannot be written, or the disk is full.
        """
        with _Mapped(self.source) as weights:
            write_model(self.schema, _Blobs(self, weights), path)
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def cut_stage(graph: Graph, operators: Sequence[int]) -> StageModel:
    """Cut ``operators`` (ascending) out of a graph that was read from a file.

    Raises:
        ModelError: the graph has no file behind it.
    """
    if graph.source is None:
        raise ModelError(f"model {graph.name!r} has no file to cut stages from")
    whole = graph.source.schema
    subgraph = whole.subgraphs[0]
    border = graph.boundary(operators)
    order = _tensor_order(graph, operators, border)
    place = {tensor: i for i, tensor in enumerate(order)}
    codes = sorted({int(subgraph.operators[o].opcodeIndex) for o in operators})

    stage = copy.copy(whole)
    stage.operatorCodes = [whole.operatorCodes[c] for c in codes]
    part = copy.copy(subgraph)
    part.tensors = [subgraph.tensors[t] for t in order]
    part.inputs = np.array([place[t] for t in border.inputs], np.int32)
    part.outputs = np.array([place[t] for t in border.outputs], np.int32)
    part.operators = []
    for index in operators:
        operator = copy.copy(subgraph.operators[index])
        operator.opcodeIndex = codes.index(int(operator.opcodeIndex))
        operator.inputs = np.array([place.get(int(t), -1) for t in operator.inputs], np.int32)
        operator.outputs = np.array([place[int(t)] for t in operator.outputs], np.int32)
        part.operators.append(operator)
    stage.subgraphs = [part]
    stage.signatureDefs = None
    stage.metadata = None
    stage.metadataBuffer = None
    used = {graph.tensors[t].buffer for t in order} & set(graph.source.extents)
    stage.buffers = [_empty(buffer) for buffer in whole.buffers]
    return StageModel(stage, graph.source, tuple(sorted(used)), border.inputs, border.outputs)


def packing_model(graph: Graph) -> StageModel:
    """Return the whole model with every operator that has weights once more, as a subgraph of its own.

    A runtime that packs weights while it compiles may pack those of an operator in one way inside a stage and in
    another at its end (XNNPACK does for convolutions). Compiling this model meets both.

    Raises:
        ModelError: the graph has no file behind it.
    """
    whole = cut_stage(graph, range(len(graph.operators)))
    schema = copy.copy(whole.schema)
    schema.operatorCodes, schema.subgraphs = [], []
    alone = [[i] for i, o in enumerate(graph.operators) if any(t != -1 and graph.tensors[t].constant for t in o.inputs)]
    for operators in (range(len(graph.operators)), *alone):
        part = cut_stage(graph, operators).schema
        for operator in part.subgraphs[0].operators:
            operator.opcodeIndex += len(schema.operatorCodes)
        schema.operatorCodes = [*schema.operatorCodes, *part.operatorCodes]
        schema.subgraphs = [*schema.subgraphs, *part.subgraphs]
    return StageModel(schema, whole.source, whole.buffers, whole.inputs, whole.outputs)


def _tensor_order(graph: Graph, operators: Sequence[int], border: Boundary) -> list[int]:
    order = dict.fromkeys(border.inputs)
    for index in operators:
        operator = graph.operators[index]
        order |= dict.fromkeys(t for t in (*operator.inputs, *operator.outputs) if t != -1)
    return list(order)


def _empty(buffer: Any) -> Any:
    empty = copy.copy(buffer)
    empty.data = None
    empty.offset = 0
    empty.size = 0
    return empty


class _Mapped:
    """The model's file in memory, read-only."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __enter__(self) -> memoryview:
        try:
            with self._source.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._source.path}: {error}") from error
        if len(self._map) != self._source.nbytes:
            raise ModelError(f"{self._source.path}: the file changed while it was in use", "start again")
        self._view = memoryview(self._map)
        return self._view

    def __exit__(self, *_: object) -> None:
        self._view.release()
        self._map.close()


class _Blobs(Mapping[int, memoryview]):
    """The stage's weights by buffer number, sliced when they are asked for."""

    def __init__(self, stage: StageModel, weights: memoryview) -> None:
        self._stage = stage
        self._weights = weights

    def __getitem__(self, buffer: int) -> memoryview:
        if buffer not in self._stage.buffers:
            raise KeyError(buffer)
        extent = self._stage.source.extents[buffer]
        return self._weights[extent.offset : extent.offset + extent.nbytes]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stage.buffers)

    def __len__(self) -> int:
        return len(self._stage.buffers)
