"""The ``:f16`` variant: float16 weights that DEQUANTIZE operators turn into float32, as the converter does it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.operators import made_operator
from search_spaces.models.zoo.builder import Draft


def with_float16_weights(drafted: Draft) -> Draft:
    """Return the model with float16 weights, each with a DEQUANTIZE before the first operator that reads it.

    A runtime that computes in float32 folds these operators away when it loads the model; one that computes in
    float16 leaves them out.
    """
    model = copy.copy(drafted.schema)
    graph = copy.copy(model.subgraphs[0])
    model.subgraphs = [graph]
    graph.tensors = list(graph.tensors)
    codes = model.operatorCodes = list(model.operatorCodes)
    restored = _halve(graph, drafted.weights)
    operators = []
    ready: set[int] = set()
    for operator in graph.operators:
        for index in operator.inputs:
            if index in restored and index not in ready:
                ready.add(index)
                options = schema.DequantizeOptionsT()
                operators.append(made_operator(codes, "DEQUANTIZE", [index], [restored[index]], options, version=3))
        changed = copy.copy(operator)
        changed.inputs = [restored.get(index, index) for index in operator.inputs]
        operators.append(changed)
    graph.operators = operators
    return Draft(drafted.name, model, {b: replace(w, half=True) for b, w in drafted.weights.items()})


def _halve(graph: Any, weights: Mapping[int, Any]) -> dict[int, int]:
    """Make the weights' tensors float16, and return for each the added float32 tensor of its restored value."""
    restored = {}
    for index, tensor in enumerate(list(graph.tensors)):
        if tensor.buffer not in weights:
            continue
        half, whole = copy.copy(tensor), copy.copy(tensor)
        half.type = schema.TensorType.FLOAT16
        whole.name, whole.buffer = f"{tensor.name}_dequantize", 0
        graph.tensors[index] = half
        graph.tensors.append(whole)
        restored[index] = len(graph.tensors) - 1
    return restored
