"""Convolutions as three smaller ones: Tucker-2 on the channel axes (seed 001; Kim et al. 2016, arXiv:1511.06530).

A filter of ``h·w·I·O`` weights becomes ``1·1·I·R``, ``h·w·R·S`` and ``1·1·S·O``. The middle one has the stride, the
padding and the dilation; the last one has the bias and the activation. The first one adds nothing to zeros, so that
padding commutes with it. A grouped convolution becomes three grouped ones, each group decomposed by itself. All other
weights stay where they are in the model's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.errors import ModelError, RewriteError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.models.dtypes import tensor_nbytes
from search_spaces.models.litert import graph_of
from search_spaces.models.source import ModelSource
from search_spaces.rewrites.structure import Structure
from search_spaces.rewrites.tucker_factors import factor
from search_spaces.rewrites.tucker_layers import Layer, Ranks, read_filters, tucker_layers

Weights = NDArray[np.float32]

_VALID, _NO_ACTIVATION = 1, 0  # schema.Padding, schema.ActivationFunctionType
_POINTWISE = {"padding": _VALID, "strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}
_PLAIN_POINTWISE: Mapping[str, Any] = {
    "padding": "VALID",
    "stride_w": 1,
    "stride_h": 1,
    "dilation_w_factor": 1,
    "dilation_h_factor": 1,
}


@dataclass(frozen=True)
class TuckerGraph:
    """A decomposed model.

    Attributes:
        origins: for each of its operators the number that it has in the model before, alike for the three of a triple.
        triples: operator of the model before → what factors its filter, once.
    """

    graph: Graph
    origins: tuple[int, ...]
    triples: Mapping[int, Callable[[], Triple]]

    @cached_property
    def errors(self) -> dict[int, float]:
        """Operator of the model before → how far its filter is from the one that its triple stands for.

        The norm of the difference over the norm of the filter; asking for it factors what nobody has factored yet.
        """
        return {operator: triple().error for operator, triple in self.triples.items()}


@dataclass(frozen=True, slots=True)
class Triple:
    """The filters of the three convolutions, each ``(outputs, height, width, inputs of a group)``.

    Attributes:
        error: the norm of the difference to the filter that they take the place of, over its norm.
    """

    first: Weights
    core: Weights
    last: Weights
    error: float


def decompose(
    graph: Graph, ranks: Mapping[int, Ranks], known: MutableMapping[tuple[int, Ranks], Triple] | None = None
) -> TuckerGraph:
    """Return the model with convolutions decomposed by HOSVD and HOOI; inputs and outputs stay the same.

    The filters are factored when somebody reads the weights, or asks for the errors.

    Args:
        ranks: operator → the ranks of its triple; all others stay as they are.
        known: triples of this model that were made before, by operator and ranks; new ones are added.

    Raises:
        RewriteError: an operator is no convolution larger than 1 by 1, or a rank is 0 or above the channels.
        ModelError: the model has no file, or its file cannot be read.
    """
    if graph.source is None:
        raise ModelError(f"model {graph.name!r} has no file to take weights from")
    layers = _checked(graph, ranks)
    source, file_operators = graph.source, graph.source.schema.subgraphs[0].operators
    made = Structure(graph, source)
    recipes = sorted(set(source.recipes.values()))
    made.operators += [file_operators[i] for i in recipes]
    origins = [-1] * len(recipes)
    triples: dict[int, Callable[[], Triple]] = {}
    kept = {} if known is None else known

    def triple(layer: Layer) -> Triple:
        key = layer.operator, ranks[layer.operator]
        if key not in kept:
            kept[key] = factored(graph, layer, ranks[layer.operator])
        return kept[key]

    for index in range(len(graph.operators)):
        places = source.file_operators([index])
        if index in layers:
            triples[index] = partial(triple, layers[index])
            _write(made, graph, file_operators[places[0]], layers[index], ranks[index], triples[index])
        else:
            made.operators += [file_operators[place] for place in places]
        origins += [index] * (len(made.operators) - len(origins))
    found = _read(made.finished("tucker " + "; ".join(f"{i} {ranks[i]}" for i in sorted(ranks))), graph.name)
    atoms = found.source.operators if found.source is not None else ()
    first = [atom[0] for atom in atoms] if atoms else range(len(found.operators))
    return TuckerGraph(found, tuple(origins[i] for i in first), triples)


def outline(graph: Graph, ranks: Mapping[int, Ranks]) -> Graph:
    """Return the decomposed model's structure without any weights, for what counts and prices operators.

    Raises:
        RewriteError: see :func:`decompose`.
    """
    layers = _checked(graph, ranks)
    tensors, operators = list(graph.tensors), []
    for index, operator in enumerate(graph.operators):
        if index not in layers:
            operators.append(operator)
            continue
        operators += _outlined(tensors, operator, layers[index], ranks[index])
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators), source=None)


def factored(graph: Graph, layer: Layer, ranks: Ranks) -> Triple:
    """Return the filters of a layer's triple.

    Raises:
        RewriteError: the weights are not there as plain numbers.
        ModelError: the model's file cannot be read.
    """
    filters = read_filters(graph, layer)
    groups = [factor(each, ranks.inputs, ranks.outputs) for each in filters]
    lost = sum(float(((each - f.whole()) ** 2).sum()) for each, f in zip(filters, groups, strict=True))
    norm = float((filters**2).sum())
    first = np.concatenate([f.first for f in groups])
    last = np.concatenate([f.last for f in groups])
    return Triple(
        first[:, None, None, :].astype(np.float32),
        np.concatenate([f.core for f in groups]).astype(np.float32),
        last[:, None, None, :].astype(np.float32),
        (lost / norm) ** 0.5 if norm else 0.0,
    )


def _checked(graph: Graph, ranks: Mapping[int, Ranks]) -> dict[int, Layer]:
    layers = {layer.operator: layer for layer in tucker_layers(graph)}
    for index, wanted in ranks.items():
        if index not in layers:
            raise RewriteError(f"operator {index} of {graph.name!r} is not a convolution larger than 1x1")
        layers[index].check(wanted)
    return {index: layers[index] for index in ranks}


def _write(
    made: Structure, graph: Graph, original: Any, layer: Layer, ranks: Ranks, triple: Callable[[], Triple]
) -> None:
    """Add the three operators of a layer."""
    operator = graph.operators[layer.operator]
    data, output = operator.inputs[0], operator.outputs[0]
    name = layer.name.encode()
    count, filters = layer.groups * ranks.inputs, layer.groups * ranks.outputs
    kernels = [
        made.weights((count, 1, 1, layer.inputs), lambda: triple().first, name + b"/first/kernel"),
        made.weights((filters, *layer.kernel, ranks.inputs), lambda: triple().core, name + b"/core/kernel"),
        made.weights(
            (layer.groups * layer.outputs, 1, 1, ranks.outputs), lambda: triple().last, name + b"/last/kernel"
        ),
    ]
    # The runtime's fast kernels want a bias, and each layer its own, so that it can be quantised.
    biases = [
        made.weights((length,), partial(_zeros, length), name + b"/" + part + b"/bias")
        for part, length in ((b"first", count), (b"core", filters))
    ]
    between = [
        made.tensor(output, (*graph.tensors[data].shape[:3], count), "first"),
        made.tensor(output, (*graph.tensors[output].shape[:3], filters), "core"),
    ]
    linear = {"fusedActivationFunction": _NO_ACTIVATION}
    made.copied(original, [data, kernels[0], biases[0]], between[0], _POINTWISE | linear)
    made.copied(original, [between[0], kernels[1], biases[1]], between[1], linear)
    made.copied(original, [between[1], kernels[2], *operator.inputs[2:]], output, _POINTWISE)


def _zeros(length: int) -> Weights:
    return np.zeros(length, np.float32)


def _outlined(tensors: list[Tensor], operator: Operator, layer: Layer, ranks: Ranks) -> list[Operator]:
    """Add the tensors that a layer's triple needs, and return its three operators."""
    data, output = operator.inputs[0], operator.outputs[0]
    count, filters = layer.groups * ranks.inputs, layer.groups * ranks.outputs

    def add(part: str, *shape: int, constant: bool = True) -> int:
        nbytes = tensor_nbytes(shape, "float32")
        tensors.append(Tensor(f"{layer.name}/{part}", shape, "float32", nbytes, constant))
        return len(tensors) - 1

    first = [add("first/kernel", count, 1, 1, layer.inputs), add("first/bias", count)]
    core = [add("core/kernel", filters, *layer.kernel, ranks.inputs), add("core/bias", filters)]
    last = add("last/kernel", layer.groups * layer.outputs, 1, 1, ranks.outputs)
    narrow = add("first", *tensors[data].shape[:3], count, constant=False)
    between = add("core", *tensors[output].shape[:3], filters, constant=False)
    linear = {"fused_activation": "NONE"}
    return [
        Operator("CONV_2D", (data, *first), (narrow,), {**operator.options, **_PLAIN_POINTWISE, **linear}),
        Operator("CONV_2D", (narrow, *core), (between,), {**operator.options, **linear}),
        Operator("CONV_2D", (between, last, *operator.inputs[2:]), (output,), {**operator.options, **_PLAIN_POINTWISE}),
    ]


def _read(source: ModelSource, name: str) -> Graph:
    try:
        return graph_of(source, name)
    except ValueError as error:
        raise ModelError(f"{name!r} cannot be decomposed like that: {error}") from None
