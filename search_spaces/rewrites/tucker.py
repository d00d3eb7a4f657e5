"""Convolutions as three smaller ones: Tucker-2 on the channel axes (seed 001; Kim et al. 2016, arXiv:1511.06530).

A filter of ``h·w·I·O`` weights becomes ``1·1·I·R``, ``h·w·R·S`` and ``1·1·S·O``. The middle one has the stride, the
padding and the dilation; the last one has the bias and the activation. The first one has no bias, so zero
padding may follow it. A grouped convolution becomes three grouped ones, each group decomposed by itself. All other
weights stay where they are in the model's file.

De Lathauwer, De Moor, Vandewalle: "A Multilinear Singular Value Decomposition" (HOSVD) and "On the Best Rank-1 and
Rank-(R1, R2, …, RN) Approximation of Higher-Order Tensors" (HOOI), SIAM J. Matrix Anal. Appl. 21 (2000). For
convolutions: Kim et al. 2016, arXiv:1511.06530.

Singular vectors of an unfolding are eigenvectors of its Gram matrix, which has one row per channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.errors import ModelError, RewriteError, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan
from search_spaces.core.wording import did_you_mean
from search_spaces.models.dtypes import tensor_nbytes
from search_spaces.rewrites.structure import Structure

Array = NDArray[np.float64]

OUTPUTS, INPUTS = 0, 3
"""Axes of a filter, which is ``(outputs, height, width, inputs)``."""

_SWEEPS = 8
_GAIN = 1e-5  # of the filter's energy: a sweep that gains less is the last one


@dataclass(frozen=True, slots=True)
class Factors:
    """A filter ``(O, h, w, I)`` as three: ``last · core · first``.

    Attributes:
        first: shape ``(r_in, I)``, rows orthonormal.
        core: shape ``(r_out, h, w, r_in)``.
        last: shape ``(O, r_out)``, columns orthonormal.
    """

    first: Array
    core: Array
    last: Array

    def whole(self) -> Array:
        """Return the filter that is the product of the three."""
        return _times(_times(self.core, self.last.T, OUTPUTS), self.first, INPUTS)


def spectrum(kernel: Array, axis: int) -> Array:
    """Return the squared singular values of a filter's unfolding along a channel axis, descending; one per channel."""
    found: Array = np.maximum(np.linalg.eigvalsh(_gram(kernel, axis))[::-1], 0.0).astype(np.float64)
    return found


def factor(kernel: Array, inputs: int, outputs: int, *, sweeps: int = _SWEEPS) -> Factors:
    """Return a filter's factors of the given ranks: HOSVD, improved by HOOI sweeps while they gain.

    Args:
        kernel: shape ``(O, h, w, I)``.
        inputs, outputs: ranks, from 1 to the channels.
        sweeps: maximum of HOOI; 0 for HOSVD alone.
    """
    first = _leading(_gram(kernel, INPUTS), inputs)
    last = _leading(_gram(kernel, OUTPUTS), outputs)
    core = _times(_times(kernel, first, INPUTS), last, OUTPUTS)
    energy = float((kernel**2).sum())
    held = float((core**2).sum())
    for _ in range(sweeps):
        if held >= energy * (1 - _GAIN):
            break
        last_of = _times(kernel, last, OUTPUTS)
        better_first = _leading(_gram(last_of, INPUTS), inputs)
        first_of = _times(kernel, better_first, INPUTS)
        better_last = _leading(_gram(first_of, OUTPUTS), outputs)
        better = _times(first_of, better_last, OUTPUTS)
        now = float((better**2).sum())
        if now <= held:
            break
        first, last, core, gained, held = better_first, better_last, better, now - held, now
        if gained < energy * _GAIN:
            break
    return Factors(first.T, core, last)


def _gram(kernel: Array, axis: int) -> Array:
    rows = np.moveaxis(kernel, axis, 0).reshape(kernel.shape[axis], -1)
    product: Array = rows @ rows.T
    return product


def _leading(gram: Array, count: int) -> Array:
    """Return the eigenvectors of the largest eigenvalues as columns; of each, the largest entry is positive."""
    vectors: Array = np.linalg.eigh(gram)[1][:, ::-1][:, :count]
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    return vectors * np.where(largest < 0, -1.0, 1.0)


def _times(kernel: Array, matrix: Array, axis: int) -> Array:
    """Multiply an axis of ``n`` entries by a matrix ``(n, m)``, so that it has ``m``."""
    product: Array = np.moveaxis(np.tensordot(kernel, matrix, axes=(axis, 0)), -1, axis)
    return product


Filter = NDArray[np.float64]

_WIDTHS: Mapping[str, str] = {"float32": "<f4", "float16": "<f2"}


class Ranks(NamedTuple):
    """Channels per group between the three convolutions of a triple: before and after the core."""

    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs}x{self.outputs}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution larger than 1 by 1.

    Attributes:
        operator: its index in the graph.
        name: of its output tensor.
        kernel: height and width of its filter.
        groups: 1 unless it is grouped.
        inputs, outputs: channels of one group.
        pixels: how many it reads, and how many it writes, in one inference.
    """

    operator: int
    name: str
    kernel: tuple[int, int]
    groups: int
    inputs: int
    outputs: int
    pixels: tuple[int, int]

    @property
    def full(self) -> Ranks:
        """The ranks of an exact decomposition."""
        return Ranks(self.inputs, self.outputs)

    def macs(self, ranks: Ranks | None = None) -> int:
        """Return its multiply-accumulates, or those of its triple with these ranks."""
        before, after = self.pixels
        if ranks is None:
            return after * self.groups * self.outputs * self.inputs * prod(self.kernel)
        core = ranks.inputs * ranks.outputs * prod(self.kernel)
        return self.groups * (before * self.inputs * ranks.inputs + after * (core + ranks.outputs * self.outputs))

    def check(self, ranks: Ranks) -> Ranks:
        """Return the ranks, which must be from 1 to the channels.

        Raises:
            RewriteError: they are not.
        """
        for rank, channels, what in zip(ranks, self.full, ("input", "output"), strict=True):
            if not 1 <= rank <= channels:
                of = f"{channels} {what} channels" + (" in a group" if self.groups > 1 else "")
                raise RewriteError(
                    f"operator {self.operator} ({shown(self.name)}): rank {rank} is impossible with {of}",
                    f"give 1 to {channels}",
                )
        return ranks


def ranks_of(plan: Plan) -> dict[int, Ranks]:
    """Return operator → ranks of a plan's triples."""
    return {operator: Ranks(*both) for operator, *both in plan.ranks}


def tucker_layers(graph: Graph) -> tuple[Layer, ...]:
    """Return the convolutions larger than 1 by 1; depthwise ones are left out, even where written as CONV_2D.

    Raises:
        RewriteError: there is none, or the model is quantised: its weights would be rounded a second time.
    """
    found = []
    for index, operator in enumerate(graph.operators):
        if operator.kind != "CONV_2D":
            continue
        data, weights = (graph.tensors[t] for t in operator.inputs[:2])
        output = graph.tensors[operator.outputs[0]]
        kernel = weights.shape[1], weights.shape[2]
        if kernel == (1, 1) or not weights.constant:
            continue
        if weights.dtype != "float32":
            raise RewriteError(
                f"{graph.name!r} is quantised: the weights of operator {index} are {weights.dtype}",
                "decompose the float32 model; optimize rewrite NAME:int8 quantises a built-in one afterwards",
            )
        channels = weights.shape[3]
        groups = data.shape[3] // max(1, channels)
        if groups > 1 and channels == 1:
            continue
        pixels = _pixels(data), _pixels(output)
        outputs = weights.shape[0] // max(1, groups)
        found.append(Layer(index, output.name, kernel, groups, channels, outputs, pixels))
    if not found:
        raise RewriteError(f"{graph.name!r} has no convolution larger than 1x1", "there is nothing to decompose")
    return tuple(found)


def find_layer(layers: tuple[Layer, ...], word: str) -> Layer:
    """Return the layer with an operator's number or the name of its output.

    Raises:
        RewriteError: there is none, or several have this name.
    """
    named = [x for x in layers if x.name == word] or [x for x in layers if str(x.operator) == word]
    if len(named) == 1:
        return named[0]
    if named:
        numbers = ", ".join(str(x.operator) for x in named)
        raise RewriteError(f"several layers are called {shown(word)}", f"give one by its number: {numbers}")
    first = f"the first is {shown(layers[0].name)}, operator {layers[0].operator}"
    hint = did_you_mean(word, [x.name for x in layers], first)
    raise RewriteError(f"there is no convolution larger than 1x1 called {shown(word)}", hint)


def read_filters(graph: Graph, layer: Layer) -> Filter:
    """Return the weights of a layer, shape ``(groups, outputs, height, width, inputs)``.

    Raises:
        RewriteError: they are sparse, or computed by anything but a conversion from float16.
        ModelError: the model has no file, or the file cannot be read.
    """
    if graph.source is None:
        raise ModelError(f"model {graph.name!r} has no file to take weights from")
    source, tensor = graph.source, graph.operators[layer.operator].inputs[1]
    main = source.schema.subgraphs[0]
    if tensor in source.recipes:
        recipe = main.operators[source.recipes[tensor]]
        held = int(recipe.inputs[0])
        known = len(recipe.inputs) == 1 and held not in source.recipes
    else:
        held, known = tensor, True
    dtype = _WIDTHS.get(graph.tensors[held].dtype)
    if not known or dtype is None or main.tensors[held].sparsity is not None:
        raise RewriteError(
            f"operator {layer.operator} ({shown(layer.name)}): its weights are computed or sparse",
            "give a model with plain float32 weights",
        )
    shape = (layer.groups, layer.outputs, *layer.kernel, layer.inputs)
    values = np.frombuffer(source.buffer_bytes(int(main.tensors[held].buffer)), dtype, prod(shape))
    if not np.isfinite(values).all():
        raise RewriteError(f"operator {layer.operator} ({shown(layer.name)}): a weight is not finite")
    return values.reshape(shape).astype(np.float64)


def _pixels(tensor: Tensor) -> int:
    return prod(max(1, size) for size in tensor.shape[:3])


Weights = NDArray[np.float32]

_VALID, _NO_ACTIVATION = 1, 0  # schema.Padding, schema.ActivationFunctionType
_POINTWISE = {"padding": _VALID, "strideW": 1, "strideH": 1, "dilationWFactor": 1, "dilationHFactor": 1}
_PLAIN_POINTWISE: Mapping[str, Any] = {re.sub("(?=[A-Z])", "_", k).lower(): v for k, v in _POINTWISE.items()} | {
    "padding": "VALID"
}


@dataclass(frozen=True)
class TuckerGraph:
    """A decomposed model.

    Attributes:
        origins: for each operator its index in the original model, the same one for the three of a triple.
        triples: operator of the original model → function that returns its triple, computed once.
    """

    graph: Graph
    origins: tuple[int, ...]
    triples: Mapping[int, Callable[[], Triple]]

    @cached_property
    def errors(self) -> dict[int, float]:
        """Operator of the original model → error of its triple: norm of the difference over the norm of the filter.

        Reading it factors all filters that are not factored yet.
        """
        return {operator: triple().error for operator, triple in self.triples.items()}


@dataclass(frozen=True, slots=True)
class Triple:
    """The filters of the three convolutions, each ``(outputs, height, width, inputs of a group)``.

    Attributes:
        error: the norm of the difference to the original filter, over the norm of that.
    """

    first: Weights
    core: Weights
    last: Weights
    error: float


Factoring = Callable[[Layer, Ranks], Triple]


def decompose(graph: Graph, ranks: Mapping[int, Ranks], factors: Factoring | None = None) -> TuckerGraph:
    """Return the model with convolutions decomposed by HOSVD and HOOI; inputs and outputs stay the same.

    The filters are factored when the weights or the errors are read.

    Args:
        ranks: operator → the ranks of its triple; all others stay as they are.
        factors: returns the triple of a layer; by default :func:`factored`, once for each.

    Raises:
        RewriteError: an operator is not a convolution larger than 1 by 1, or a rank is 0 or above the channels.
        ModelError: the model has no file, or its file cannot be read.
    """
    made, layers = Structure(graph), _checked(graph, ranks)
    triples: dict[int, Callable[[], Triple]] = {}
    found_by = factors or cache(partial(factored, graph))
    for index in range(len(graph.operators)):
        if index in layers:
            triples[index] = partial(found_by, layers[index], ranks[index])
            _write(made, layers[index], ranks[index], triples[index])
            made.mark(index)
        else:
            made.keep(index, index)
    how = "drawn" if factors is drawn else "tucker"
    found, origins = made.finished(f"{how} " + "; ".join(f"{i} {ranks[i]}" for i in sorted(ranks)), "decomposed")
    return TuckerGraph(found, origins, triples)


def outline(graph: Graph, ranks: Mapping[int, Ranks]) -> Graph:
    """Return the decomposed model's structure without any weights, to count and price operators.

    Raises:
        RewriteError: as of :func:`decompose`.
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
        RewriteError: the weights are not plain numbers in the file.
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


def drawn(layer: Layer, ranks: Ranks) -> Triple:
    """Return a triple of random filters, to time a layer's at once: times do not depend on weights."""
    draw = np.random.default_rng(layer.operator)

    def filters(count: int, *shape: int) -> Weights:
        return (draw.random((count, *shape), np.float32) - 0.5) * np.float32((12 / prod(shape)) ** 0.5)

    first = filters(layer.groups * ranks.inputs, 1, 1, layer.inputs)
    core = filters(layer.groups * ranks.outputs, *layer.kernel, ranks.inputs)
    return Triple(first, core, filters(layer.groups * layer.outputs, 1, 1, ranks.outputs), nan)


def _checked(graph: Graph, ranks: Mapping[int, Ranks]) -> dict[int, Layer]:
    layers = {layer.operator: layer for layer in tucker_layers(graph)}
    for index, wanted in ranks.items():
        if index not in layers:
            raise RewriteError(f"operator {index} of {graph.name!r} is not a convolution larger than 1x1")
        layers[index].check(wanted)
    return {index: layers[index] for index in ranks}


def _write(made: Structure, layer: Layer, ranks: Ranks, triple: Callable[[], Triple]) -> None:
    """Add the three operators of a layer."""
    graph, operator = made.graph, made.graph.operators[layer.operator]
    original = made.main.operators[made.source.file_operators([layer.operator])[0]]
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
    # The runtime's fast kernels need a bias; each layer gets its own, so that it can be quantised.
    biases = [
        made.weights((count,), lambda: np.zeros(count, np.float32), name + b"/first/bias"),
        made.weights((filters,), lambda: np.zeros(filters, np.float32), name + b"/core/bias"),
    ]
    between = [
        made.tensor(output, (*graph.tensors[data].shape[:3], count), "first"),
        made.tensor(output, (*graph.tensors[output].shape[:3], filters), "core"),
    ]
    linear = {"fusedActivationFunction": _NO_ACTIVATION}
    made.copied(original, [data, kernels[0], biases[0]], between[0], _POINTWISE | linear)
    made.copied(original, [between[0], kernels[1], biases[1]], between[1], linear)
    made.copied(original, [between[1], kernels[2], *operator.inputs[2:]], output, _POINTWISE)


def _outlined(tensors: list[Tensor], operator: Operator, layer: Layer, ranks: Ranks) -> list[Operator]:
    """Add the tensors that a layer's triple needs, and return its three operators."""
    data, output = operator.inputs[0], operator.outputs[0]
    count, filters = layer.groups * ranks.inputs, layer.groups * ranks.outputs

    def add(part: str, *shape: int, constant: bool = True) -> int:
        nbytes = tensor_nbytes(shape, "float32")
        tensors.append(Tensor(f"{layer.name}/{part}", shape, "float32", nbytes, constant))
        return len(tensors) - 1

    first = [data, add("first/kernel", count, 1, 1, layer.inputs), add("first/bias", count)]
    core = [add("core/kernel", filters, *layer.kernel, ranks.inputs), add("core/bias", filters)]
    last = [add("last/kernel", layer.groups * layer.outputs, 1, 1, ranks.outputs), *operator.inputs[2:]]
    narrow = add("first", *tensors[data].shape[:3], count, constant=False)
    between = add("core", *tensors[output].shape[:3], filters, constant=False)
    own, linear = operator.options, {"fused_activation": "NONE"}
    return [
        Operator("CONV_2D", tuple(first), (narrow,), {**own, **_PLAIN_POINTWISE, **linear}),
        Operator("CONV_2D", (narrow, *core), (between,), {**own, **linear}),
        Operator("CONV_2D", (between, *last), (output,), {**own, **_PLAIN_POINTWISE}),
    ]
