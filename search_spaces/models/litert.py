"""Read a ``.tflite`` file as a :class:`~search_spaces.graph.Graph`, leaving its weights where they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.errors import ModelError, shown
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.models.atoms import Traits, arrange
from search_spaces.models.checks import check_blocks, check_references, check_sparsity
from search_spaces.models.dtypes import DTYPES, element_bits, enumerators, has_fixed_size, tensor_nbytes
from search_spaces.models.flatbuffer import unpack
from search_spaces.models.operator_checks import check_operator
from search_spaces.models.options import plain_options
from search_spaces.models.signatures import select_signature
from search_spaces.models.source import Extent, ModelSource
from search_spaces.models.subgraphs import called, check_calls, operator_states

VERSION = 3  # of the schema; the runtime admits no other
MAX_RANK = 64
_KIND_CHARACTERS = 100
MAX_TENSOR_NBYTES = 1 << 40

_KINDS = enumerators(schema.BuiltinOperator)
_NAMES = frozenset(_KINDS.values())
_NEWER = "install a newer ai-edge-litert"


def read_model(path: Path, name: str | None = None, signature: str | None = None) -> Graph:
    """Read the main subgraph of a ``.tflite`` file; time and memory do not depend on the size of its weights.

    Args:
        path: the file. It may be anything: nothing in it is trusted before it has been checked.
        name: what to call the model; the file's stem where left out.
        signature: key of the signature whose subgraph is read; the first subgraph where left out.

    Raises:
        ModelError: the file is missing, unreadable, not a model, truncated, damaged, or needs a newer schema.
    """
    model, extents, nbytes = unpack(path)
    try:
        source = ModelSource(path, nbytes, model, extents)
        return graph_of(source if signature is None else select_signature(source, signature), name or path.stem)
    except ValueError as error:
        raise ModelError(
            f"{path}: the model cannot be used: {error}", "get the file again, or convert it again"
        ) from None
    except ModelError as error:
        raise ModelError(f"{path}: {error.what}", error.hint) from None


def graph_of(source: ModelSource, name: str) -> Graph:
    """Return the graph of a model whose structure has been read.

    Raises:
        ModelError, ValueError: the structure cannot be.
    """
    model = source.schema
    if model.version != VERSION:
        raise ValueError(f"its schema has version {model.version}, not {VERSION}")
    if not model.subgraphs:
        raise ValueError("it has no subgraph")
    if model.externalBuffers or any(t.externalBuffer for s in model.subgraphs for t in s.tensors or ()):
        raise ModelError("the model keeps weights in other files", "convert it again with its weights in one file")
    check_references(source)
    source = with_computed_outputs(source)
    model = source.schema
    kinds = [_kind(code) for code in model.operatorCodes or ()]
    order = check_calls(model)
    digests: dict[int, str] = {}
    for number in order:
        if number:
            try:
                digests[number] = _part(source, f"{name}/{number}", number, kinds, digests).digest
            except (ModelError, ValueError) as error:
                raise type(error)(f"subgraph {number}: {error}") from None
    raw = _part(source, name, 0, kinds, digests)
    if not raw.operators:
        raise ModelError("the model has no operators", "there is nothing to partition")
    states = operator_states(model, order)
    builtin = [o.kind in _NAMES for o in raw.operators]
    return arrange(raw, [Traits(*pair) for pair in zip(states, builtin, strict=True)], source)


def with_computed_outputs(source: ModelSource) -> ModelSource:
    """Return a model in which operators write the outputs that are constants in the file: a SQUEEZE copies each."""
    model = source.schema
    main = model.subgraphs[0]
    count = len(main.tensors or ())
    computed = {*_indices(main.inputs), *(i for o in main.operators or () for i in _indices(o.outputs))}
    known = [
        t
        for t in dict.fromkeys(_indices(main.outputs))
        if 0 <= t < count and t not in computed and not main.tensors[t].isVariable and main.tensors[t].buffer > 0
    ]
    if not known:
        return source
    model, main = copy.copy(model), copy.copy(main)
    model.subgraphs = [main, *model.subgraphs[1:]]
    main.tensors, main.operators = list(main.tensors), list(main.operators or ())
    squeeze = schema.BuiltinOperator.SQUEEZE
    code = schema.OperatorCodeT(deprecatedBuiltinCode=squeeze, builtinCode=squeeze, version=1)
    model.operatorCodes = [*(model.operatorCodes or ()), code]
    for index in known:
        constant = main.tensors[index]
        value, main.tensors[index] = copy.copy(constant), copy.copy(constant)
        value.shape, value.shapeSignature = np.array([1, *_indices(value.shape)], np.int32), None
        main.tensors[index].buffer = 0
        main.tensors.append(value)
        main.operators = [_reading(o, index, len(main.tensors)) for o in main.operators]
        main.tensors.append(constant)
        options = schema.SqueezeOptionsT(squeezeDims=np.array([0], np.int32))
        main.operators.append(
            schema.OperatorT(
                opcodeIndex=len(model.operatorCodes) - 1,
                inputs=np.array([len(main.tensors) - 2], np.int32),
                outputs=np.array([index], np.int32),
                builtinOptionsType=schema.BuiltinOptions.SqueezeOptions,
                builtinOptions=options,
            )
        )
    return replace(source, schema=model, fixed=True)


def _reading(operator: Any, tensor: int, instead: int) -> Any:
    """Return an operator that reads another tensor in the place of one."""
    if tensor not in _indices(operator.inputs):
        return operator
    moved = copy.copy(operator)
    moved.inputs = np.array([instead if t == tensor else t for t in _indices(operator.inputs)], np.int32)
    return moved


def _part(source: ModelSource, name: str, number: int, kinds: list[str], digests: Mapping[int, str]) -> Graph:
    """Return a subgraph as it stands in the file.

    Args:
        kinds: of the operator codes.
        digests: of the subgraphs that it calls; a graph's digest is to tell its whole structure.
    """
    subgraph = source.schema.subgraphs[number]
    inputs, outputs = _indices(subgraph.inputs), _indices(subgraph.outputs)
    operators = tuple(_operator(o, i, kinds, digests) for i, o in enumerate(subgraph.operators or ()))
    computed = {*inputs, *(i for operator in operators for i in operator.outputs)}
    count = len(subgraph.tensors or ())
    for index, entry in enumerate(subgraph.operators or ()):
        wrong = next((i for i in _indices(entry.intermediates) if not -1 <= i < count), None)
        if wrong is not None:
            raise ValueError(f"operator {index} keeps a result in tensor {wrong} of {count}")
    tensors = tuple(_tensor(t, i, i in computed, source) for i, t in enumerate(subgraph.tensors or ()))
    sizes = {number: extent.nbytes for number, extent in source.extents.items()}
    for index in range(count):
        check_blocks(subgraph, index, sizes)
    for index, operator in enumerate(operators):
        try:
            # An index out of range is told by the graph.
            if all(-1 <= t < count for t in (*operator.inputs, *operator.outputs)):
                check_operator(operator, tensors)
        except ValueError as error:
            raise ValueError(f"operator {index} ({operator.kind}) {error}") from None
    if number:  # the result of a branch may be a constant; the outputs of the model must be computed
        for i in outputs:
            if not 0 <= i < len(tensors):
                raise ValueError(f"its output refers to tensor {i} of {len(tensors)}")
            if i not in computed and not tensors[i].constant and not tensors[i].variable:
                raise ValueError(f"no operator writes output tensor {i}")
        outputs = tuple(i for i in outputs if i in computed)
    return Graph(name, tensors, operators, inputs, outputs, source)


def _indices(vector: Any) -> tuple[int, ...]:
    return () if vector is None else tuple(vector.tolist())


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _kind(code: Any) -> str:
    """Return the name of an operator code; the older field holds the codes that fit into a byte."""
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    if number == schema.BuiltinOperator.CUSTOM:
        custom = "".join(c if c.isprintable() else "?" for c in _text(code.customCode)[:_KIND_CHARACTERS]) or "CUSTOM"
        return f"CUSTOM {custom}" if custom in _NAMES else custom
    if number not in _KINDS:
        raise ModelError(f"operator code {number} is not known to the installed schema", _NEWER)
    return _KINDS[number]


def _operator(operator: Any, index: int, kinds: list[str], digests: Mapping[int, str]) -> Operator:
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
    calls = called(operator)
    if calls:
        options["calls"] = tuple(digests[n] for n in calls)
    return Operator(kind, _indices(operator.inputs), _indices(operator.outputs), options)


def _tensor(tensor: Any, index: int, computed: bool, source: ModelSource) -> Tensor:
    """Return a tensor; ``computed`` tells whether an operator or the caller writes it."""
    name = _text(tensor.name)
    what = f"tensor {index} ({shown(name)})"
    shape, signature = _indices(tensor.shape), _indices(tensor.shapeSignature)
    dtype = DTYPES.get(tensor.type)
    if dtype is None:
        raise ModelError(f"{what} has type {tensor.type}, unknown to the installed schema", _NEWER)
    if not 0 <= tensor.buffer < max(1, len(source.schema.buffers)):
        raise ValueError(f"{what} has buffer {tensor.buffer} of {len(source.schema.buffers)}")
    if len(shape) > MAX_RANK or min(shape, default=0) < -1 or min(signature, default=0) < -1:
        raise ValueError(f"{what} has an impossible shape")
    nbytes = tensor_nbytes(shape, dtype)
    if nbytes > MAX_TENSOR_NBYTES:
        raise ValueError(f"{what} has the shape {shape}, more than any machine holds")
    extent = source.extents.get(tensor.buffer)
    if extent is None and source.fixed and source.schema.buffers[tensor.buffer].data is not None:
        extent = Extent(0, len(source.schema.buffers[tensor.buffer].data))
    # A list of no elements (the shape of a scalar) has no data and yet a value.
    if extent is not None and (computed or tensor.isVariable):
        raise ValueError(f"{what} is computed and yet has data")
    constant = not tensor.isVariable and not computed and (extent is not None or 0 in shape)
    if constant and extent is not None and not has_fixed_size(dtype):
        nbytes = extent.nbytes
    if constant and extent is not None and extent.nbytes < nbytes and tensor.sparsity is None:
        raise ValueError(f"{what} needs {nbytes} bytes and has {extent.nbytes}")
    if tensor.sparsity is not None:
        try:
            check_sparsity(tensor.sparsity, shape, element_bits(dtype), extent.nbytes if extent is not None else 0)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from None
    if len(signature) == len(shape):
        shape = signature
    return Tensor(name, shape, dtype, nbytes, constant, bool(tensor.isVariable), tensor.buffer if constant else 0)
