"""Read a ``.tflite`` file as a :class:`~search_spaces.graph.Graph`, leaving its weights where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from search_spaces.errors import ModelError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.models.dtypes import DTYPES, enumerators, has_fixed_size, tensor_nbytes
from search_spaces.models.flatbuffer import unpack
from search_spaces.models.options import plain_options
from search_spaces.models.source import ModelSource

VERSION = 3  # of the schema; the runtime admits no other
MAX_RANK = 64
MAX_TENSOR_NBYTES = 1 << 40

_KINDS = enumerators(schema.BuiltinOperator)
_NEWER = "install a newer ai-edge-litert"


def read_model(path: Path, name: str | None = None) -> Graph:
    """Read the main subgraph of a ``.tflite`` file; time and memory do not depend on the size of its weights.

    Args:
        path: the file. It may be anything: nothing in it is trusted before it has been checked.
        name: what to call the model; the file's stem where left out.

    Raises:
        ModelError: the file is missing, unreadable, not a model, truncated, damaged, or needs a newer schema.
    """
    model, extents, nbytes = unpack(path)
    try:
        return _graph(ModelSource(path, nbytes, model, extents), name or path.stem)
    except ValueError as error:
        raise ModelError(
            f"{path}: the model cannot be used: {error}", "get the file again, or convert it anew"
        ) from None
    except ModelError as error:
        raise ModelError(f"{path}: {error.what}", error.hint) from None


def _graph(source: ModelSource, name: str) -> Graph:
    model = source.schema
    if model.version != VERSION:
        raise ValueError(f"its schema has version {model.version}, not {VERSION}")
    if not model.subgraphs:
        raise ValueError("it has no subgraph")
    subgraph = model.subgraphs[0]
    inputs, outputs = _indices(subgraph.inputs), _indices(subgraph.outputs)
    kinds = [_kind(code) for code in model.operatorCodes or ()]
    operators = tuple(_operator(o, i, kinds) for i, o in enumerate(subgraph.operators or ()))
    if not operators:
        raise ModelError("the model has no operators", "there is nothing to partition")
    computed = {*inputs, *(i for operator in operators for i in operator.outputs)}
    tensors = tuple(_tensor(t, i, i in computed, source) for i, t in enumerate(subgraph.tensors or ()))
    return Graph(name, tensors, operators, inputs, outputs, source)


def _indices(vector: Any) -> tuple[int, ...]:
    return () if vector is None else tuple(vector.tolist())


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _kind(code: Any) -> str:
    """Return the name of an operator code; the older field holds the codes that fit into a byte."""
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    if number == schema.BuiltinOperator.CUSTOM:
        return _text(code.customCode) or "CUSTOM"
    if number not in _KINDS:
        raise ModelError(f"operator code {number} is not known to the installed schema", _NEWER)
    return _KINDS[number]


def _operator(operator: Any, index: int, kinds: list[str]) -> Operator:
    if not 0 <= operator.opcodeIndex < len(kinds):
        raise ValueError(f"operator {index} has code {operator.opcodeIndex} of {len(kinds)}")
    kind = kinds[operator.opcodeIndex]
    unknown = (operator.builtinOptionsType and operator.builtinOptions is None) or (
        operator.builtinOptions2Type and operator.builtinOptions2 is None
    )
    if unknown:
        raise ModelError(f"operator {index} ({kind}) has options that the installed schema does not know", _NEWER)
    try:
        options = plain_options(operator)
    except ValueError as error:
        raise ValueError(f"operator {index} ({kind}): {error}") from None
    return Operator(kind, _indices(operator.inputs), _indices(operator.outputs), options)


def _tensor(tensor: Any, index: int, computed: bool, source: ModelSource) -> Tensor:
    """Return a tensor; ``computed`` tells whether an operator or the caller writes it."""
    name = _text(tensor.name)
    shape, signature = _indices(tensor.shape), _indices(tensor.shapeSignature)
    dtype = DTYPES.get(tensor.type)
    if dtype is None:
        raise ModelError(f"tensor {index} ({name!r}) has type {tensor.type}, unknown to the installed schema", _NEWER)
    if not 0 <= tensor.buffer < max(1, len(source.schema.buffers)):
        raise ValueError(f"tensor {index} ({name!r}) has buffer {tensor.buffer} of {len(source.schema.buffers)}")
    if len(shape) > MAX_RANK or min(shape, default=0) < -1 or min(signature, default=0) < -1:
        raise ValueError(f"tensor {index} ({name!r}) has an impossible shape")
    nbytes = tensor_nbytes(shape, dtype)
    if nbytes > MAX_TENSOR_NBYTES:
        raise ValueError(f"tensor {index} ({name!r}) has the shape {shape}, more than any machine holds")
    extent = source.extents.get(tensor.buffer)
    # A list of no elements (the shape of a scalar) has no data and yet a value.
    constant = (
        not tensor.isVariable and not computed and (extent is not None or tensor.externalBuffer != 0 or (0 in shape))
    )
    if constant and extent is not None and not has_fixed_size(dtype):
        nbytes = extent.nbytes
    if constant and extent is not None and extent.nbytes < nbytes and tensor.sparsity is None:
        raise ValueError(f"tensor {index} ({name!r}) needs {nbytes} bytes and has {extent.nbytes}")
    if len(signature) == len(shape):
        shape = signature
    return Tensor(name, shape, dtype, nbytes, constant, bool(tensor.isVariable), tensor.buffer if constant else 0)
