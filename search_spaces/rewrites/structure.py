"""A model's structure while it is rewritten: new tensors and operators, weights as views of the file.

A part of a weight along its first dimension is contiguous in the file, so its buffer points there. Other parts
(channels of a depthwise filter) are copied, and so are short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.models.changes import changed, made_operator, with_main
from search_spaces.models.dtypes import tensor_nbytes
from search_spaces.models.litert import graph_of
from search_spaces.models.source import DeferredBytes, Extent
from search_spaces.rewrites.locality import Part

_COPIED_NBYTES = 4096  # shorter parts of weights are copied, which aligns them


class Structure:
    """The main subgraph of a model, to which tensors and operators are added.

    Attributes:
        operators: those of the rewritten subgraph, in order; the first ones compute constants.

    Raises:
        ModelError: the model has no file.
    """

    def __init__(self, graph: Graph) -> None:
        if graph.source is None:
            raise ModelError(f"model {graph.name!r} has no file to take weights from")
        self.graph = graph
        self.source = source = graph.source
        self.main = source.schema.subgraphs[0]
        self.tensors: list[Any] = list(self.main.tensors)
        self.operators: list[Any] = [self.main.operators[i] for i in sorted(set(source.recipes.values()))]
        self._recipes = len(self.operators)
        self._roles: list[Any] = []
        self.shapes = [t.shape for t in graph.tensors]
        self._buffers: list[Any] = list(source.schema.buffers) or [schema.BufferT()]
        self._codes: list[Any] = list(source.schema.operatorCodes)
        self._extents = dict(source.extents)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._floats: dict[float, int] = {}
        self._parts: dict[tuple[int, Part], int] = {}

    def tensor(self, like: int, shape: Sequence[int], name: str) -> int:
        """Add a computed tensor with the type and quantisation of another one, and return its number."""
        full = (self.tensors[like].name or b"") + f"/{name}".encode()
        fixed = {"shape": np.array(shape, np.int32), "shapeSignature": None, "hasRank": True}
        made = changed(self.tensors[like], name=full, buffer=0, isVariable=False, **fixed)
        return self._add(made, tuple(shape))

    def integers(self, values: Sequence[int], shape: Sequence[int] | None = None) -> int:
        """Return a constant of int32 values; equal ones are one tensor."""
        key = (len(shape or (0,)), *values)
        if key not in self._numbers:
            self._numbers[key] = self._constant(np.array(values, np.int32).reshape(shape or (len(values),)))
        return self._numbers[key]

    def number(self, value: float) -> int:
        """Return a float32 scalar constant; equal ones are one tensor."""
        if value not in self._floats:
            self._floats[value] = self._constant(np.array(value, np.float32))
        return self._floats[value]

    def _constant(self, values: NDArray[Any]) -> int:
        data, whole = np.frombuffer(values.tobytes(), np.uint8), values.dtype == np.int32
        return self._made(values.shape, data, f"split/constant_{len(self.tensors)}".encode(), whole=whole)

    def _made(
        self, shape: tuple[int, ...], data: NDArray[np.uint8] | DeferredBytes, name: bytes, *, whole: bool = False
    ) -> int:
        """Add a float32 constant, or one of int32 values (``whole``), and return its number."""
        made = schema.TensorT(
            shape=np.array(shape, np.int32),
            type=schema.TensorType.INT32 if whole else schema.TensorType.FLOAT32,
            buffer=self._data(data),
            name=name,
            hasRank=True,
        )
        return self._add(made, shape)

    def weights(self, shape: tuple[int, ...], values: Callable[[], NDArray[np.float32]], name: bytes) -> int:
        """Add a float32 constant, and return its number; ``values`` is called when the values are read."""

        def compute() -> NDArray[np.uint8]:
            return np.frombuffer(np.ascontiguousarray(values(), np.float32).tobytes(), np.uint8)

        return self._made(shape, DeferredBytes(4 * prod(shape), compute), name)

    def part(self, tensor: int, part: Part) -> int:
        """Return a part of a constant as a constant; equal ones are one tensor."""
        if (tensor, part) not in self._parts:
            shape = list(self.shapes[tensor])
            if (part.first, part.last) == (0, shape[part.dimension]):
                return tensor
            shape[part.dimension] = part.last - part.first
            made = changed(self.tensors[tensor], shape=np.array(shape, np.int32), shapeSignature=None)
            made.buffer = self._part_of_buffer(tensor, part)
            made.quantization = part_of_quantization(made.quantization, part)
            made.name = (made.name or b"") + f"/{part.first}_{part.last}".encode()
            self._parts[tensor, part] = self._add(made, tuple(shape))
        return self._parts[tensor, part]

    def _part_of_buffer(self, tensor: int, part: Part) -> int:
        held = self.graph.tensors[tensor]
        shape, extent = held.shape, self._extents.get(int(self.tensors[tensor].buffer))
        each = tensor_nbytes((1,) * (part.dimension + 1) + shape[part.dimension + 1 :], held.dtype)
        nbytes = each * (part.last - part.first)
        leads = prod(shape[: part.dimension]) == 1
        if extent is not None and leads and nbytes > _COPIED_NBYTES:
            self._extents[len(self._buffers)] = Extent(extent.offset + part.first * each, nbytes, inline=False)
            return self._data(None)
        data = self._buffers[int(self.tensors[tensor].buffer)].data

        def compute() -> NDArray[np.uint8]:
            whole = np.asarray(data, np.uint8) if extent is None else np.frombuffer(self.source.read(extent), np.uint8)
            rows = whole[: prod(shape[: part.dimension]) * shape[part.dimension] * each]
            rows = rows.reshape(-1, shape[part.dimension], each)[:, part.first : part.last]
            return np.ascontiguousarray(rows).reshape(-1)

        return self._data(DeferredBytes(prod(shape[: part.dimension]) * nbytes, compute))

    def _data(self, data: NDArray[np.uint8] | DeferredBytes | None) -> int:
        self._buffers.append(schema.BufferT(data=data))
        return len(self._buffers) - 1

    def _add(self, tensor: Any, shape: tuple[int, ...]) -> int:
        self.tensors.append(tensor)
        self.shapes.append(shape)
        return len(self.tensors) - 1

    def operator(self, kind: str, inputs: Sequence[int], output: int, **options: Any) -> None:
        """Add a builtin operator; options are named as in the schema."""
        version = 1 if self.tensors[output].type == schema.TensorType.FLOAT32 else 2  # the first that supports int8
        made = getattr(schema, f"{kind.capitalize()}OptionsT")(**options)
        read, written = np.array(inputs, np.int32), np.array([output], np.int32)
        self.operators.append(made_operator(self._codes, kind, read, written, made, version))

    def copied(self, operator: Any, inputs: Sequence[int], output: int, options: Mapping[str, Any]) -> None:
        """Add an operator of the file again, with other tensors, and with some of its options changed."""
        read, written = np.array(inputs, np.int32), np.array([output], np.int32)
        how = changed(operator.builtinOptions, **options)
        self.operators.append(changed(operator, inputs=read, outputs=written, builtinOptions=how))

    def keep(self, index: int, role: Any) -> None:
        """Add an operator of the graph as it is."""
        self.operators += [self.main.operators[place] for place in self.source.file_operators([index])]
        self.mark(role)

    def mark(self, role: Any) -> None:
        """Give a role to the operators that were added since the last call."""
        self._roles += [role] * (len(self.operators) - self._recipes - len(self._roles))

    def finished(self, how: str, verb: str) -> tuple[Graph, tuple[Any, ...]]:
        """Return the model as it is now, and the role of each of its operators.

        Args:
            how: a description of the rewrite, different for different rewrites.
            verb: what was done, for errors.

        Raises:
            ModelError: the result is not a valid model.
        """
        how = "; ".join(filter(None, (self.source.rewritten, how)))
        model = with_main(self.source.schema, tensors=self.tensors, operators=self.operators)
        model.buffers, model.operatorCodes = self._buffers, self._codes
        made: dict[str, Any] = {"schema": model, "extents": self._extents, "operators": (), "recipes": {}}
        try:
            graph = graph_of(replace(self.source, **made, fixed=True, rewritten=how), self.graph.name, self.graph)
        except ValueError as error:
            raise ModelError(f"{self.graph.name!r} cannot be {verb} like that: {error}") from None
        atoms = graph.source.operators if graph.source is not None else ()  # recipes are not among them
        return graph, tuple(self._roles[atom[0] - self._recipes] for atom in atoms) if atoms else tuple(self._roles)


def part_of_quantization(found: Any, part: Part) -> Any:
    """Return the schema's quantisation parameters of a part of a tensor."""
    if found is None or found.scale is None or len(found.scale) < 2 or found.quantizedDimension != part.dimension:
        return found
    each = {name: getattr(found, name) for name in ("scale", "zeroPoint", "min", "max")}
    per_row = {name: v for name, v in each.items() if v is not None and len(v) == len(found.scale)}
    return changed(found, **{name: values[part.first : part.last] for name, values in per_row.items()})
