"""The ``:f16`` variant: float16 weights that DEQUANTIZE operators turn into float32, as the converter does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.changes import changed, made_operator, with_main
from search_spaces.models.zoo.builder import Draft


def with_float16_weights(drafted: Draft) -> Draft:
    """Return the model with float16 weights, each with a DEQUANTIZE before the first operator that reads it.

    A runtime that computes in float32 folds these operators away when it loads the model; one that computes in
    float16 leaves them out.
    """
    graph = drafted.schema.subgraphs[0]
    tensors, operators, codes = list(graph.tensors), [], list(drafted.schema.operatorCodes)
    restored = _halve(tensors, drafted.weights)
    ready: set[int] = set()
    for operator in graph.operators:
        for index in operator.inputs:
            if index in restored and index not in ready:
                ready.add(index)
                options = schema.DequantizeOptionsT()
                operators.append(made_operator(codes, "DEQUANTIZE", [index], [restored[index]], options, version=3))
        operators.append(changed(operator, inputs=[restored.get(index, index) for index in operator.inputs]))
    model = changed(with_main(drafted.schema, tensors=tensors, operators=operators), operatorCodes=codes)
    return Draft(drafted.name, model, {b: replace(w, half=True) for b, w in drafted.weights.items()})


def _halve(tensors: list[Any], weights: Mapping[int, Any]) -> dict[int, int]:
    """Make the weights' tensors float16, and return for each the added float32 tensor of its restored value."""
    restored = {}
    for index, tensor in enumerate(list(tensors)):
        if tensor.buffer in weights:
            restored[index] = len(tensors)
            tensors.append(changed(tensor, name=f"{tensor.name}_dequantize", buffer=0))
            tensors[index] = changed(tensor, type=schema.TensorType.FLOAT16)
    return restored
