"""Say to a graphics adapter what a FULLY_CONNECTED operator over more than two dimensions leaves unsaid.

Converters fold the RESHAPE before a dense layer into the layer, which then reads (1, 7, 7, 512) as a row of 25,088
numbers. LiteRT's kernels for the CPU do so; its accelerator for graphics adapters (WebGPU, LiteRT 2.3.0) takes the
operator and computes something else, without a word: outputs of VGG and AlexNet were off by 98 % of the largest value.
With the RESHAPE spelled out it is right.
"""

from __future__ import annotations

import copy
from math import prod
from typing import Any

from ai_edge_litert import schema_py_generated as schema

_DENSE, _RESHAPE = schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.RESHAPE


def flattened(model: Any) -> Any:
    """Return a model (``ModelT``) in which dense layers that flatten their input read the output of a RESHAPE.

    Inputs, outputs and what is computed stay the same; the model itself is returned where there is nothing to do.
    """
    found = copy.copy(model)
    found.operatorCodes = list(model.operatorCodes)
    found.subgraphs = [_spelled_out(found, subgraph) for subgraph in model.subgraphs]
    changed = any(new is not old for new, old in zip(found.subgraphs, model.subgraphs, strict=True))
    return found if changed else model


def _spelled_out(model: Any, subgraph: Any) -> Any:
    tensors, operators = list(subgraph.tensors or ()), []
    flat: dict[tuple[int, tuple[int, int]], int] = {}
    for operator in subgraph.operators or ():
        shape = _flat_shape(model, subgraph, operator)
        if shape is None:
            operators.append(operator)
            continue
        source = int(operator.inputs[0])
        if (source, shape) not in flat:
            flat[source, shape] = len(tensors)
            tensors.append(_row(tensors[source], shape))
            operators.append(_reshape(model, source, flat[source, shape], shape))
        moved = copy.copy(operator)
        moved.inputs = [flat[source, shape], *(int(t) for t in operator.inputs[1:])]
        operators.append(moved)
    if not flat:
        return subgraph
    found = copy.copy(subgraph)
    found.tensors, found.operators = tensors, operators
    return found


def _flat_shape(model: Any, subgraph: Any, operator: Any) -> tuple[int, int] | None:
    """Return the rows and columns as which a dense layer reads its input, or None where nothing has to be said."""
    if model.operatorCodes[operator.opcodeIndex].builtinCode != _DENSE:
        return None
    if operator.builtinOptions is not None and operator.builtinOptions.keepNumDims:
        return None
    read = subgraph.tensors[int(operator.inputs[0])]
    weights = subgraph.tensors[int(operator.inputs[1])]
    shape = [int(d) for d in (() if read.shape is None else read.shape)]
    columns = int(weights.shape[-1]) if weights.shape is not None and len(weights.shape) == 2 else 0
    known = all(d > 0 for d in shape) and (read.shapeSignature is None or all(d >= 0 for d in read.shapeSignature))
    if len(shape) <= 2 or not known or columns <= 0 or prod(shape) % columns:
        return None
    return prod(shape) // columns, columns


def _row(tensor: Any, shape: tuple[int, int]) -> Any:
    row = copy.copy(tensor)
    row.shape, row.shapeSignature, row.buffer, row.isVariable = list(shape), None, 0, False
    return row


def _reshape(model: Any, source: int, target: int, shape: tuple[int, int]) -> Any:
    numbers = [i for i, code in enumerate(model.operatorCodes) if code.builtinCode == _RESHAPE]
    if not numbers:
        numbers.append(len(model.operatorCodes))
        model.operatorCodes.append(
            schema.OperatorCodeT(deprecatedBuiltinCode=_RESHAPE, builtinCode=_RESHAPE, version=1)
        )
    return schema.OperatorT(
        opcodeIndex=numbers[0],
        inputs=[source],
        outputs=[target],
        builtinOptionsType=schema.BuiltinOptions.ReshapeOptions,
        builtinOptions=schema.ReshapeOptionsT(newShape=list(shape)),
    )
