"""The convolutions of a model that a Tucker decomposition is for: their shapes, their names, their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search_spaces.errors import ModelError, RewriteError, shown
from search_spaces.graph import Graph, Tensor
from search_spaces.models.source import ModelSource
from search_spaces.plan import Plan

Filter = NDArray[np.float64]

_WIDTHS: Mapping[str, str] = {"float32": "<f4", "float16": "<f2"}


class Ranks(NamedTuple):
    """The channels between the three convolutions of a triple, of each group: after the first, and before the last."""

    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs}x{self.outputs}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution larger than 1 by 1.

    Attributes:
        operator: its number in the graph.
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
        """The ranks at which nothing is lost."""
        return Ranks(self.inputs, self.outputs)

    def macs(self, ranks: Ranks | None = None) -> int:
        """Return its multiply-accumulates, or those of the three convolutions that take its place."""
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
                    f"operator {self.operator} ({shown(self.name)}): rank {rank} cannot be had of {of}",
                    f"give 1 to {channels}",
                )
        return ranks


def ranks_of(plan: Plan) -> dict[int, Ranks]:
    """Return operator → ranks of a plan's triples."""
    return {operator: Ranks(*both) for operator, *both in plan.ranks}


def tucker_layers(graph: Graph) -> tuple[Layer, ...]:
    """Return the convolutions larger than 1 by 1; depthwise ones are none, whichever operator they are written as.

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
                "decompose the float32 model; a model of ours then becomes int8 where MODEL ends in :int8",
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
    """Return the layer that a person means by an operator's number or the name of its output.

    Raises:
        RewriteError: there is none, or several have this name.
    """
    named = [x for x in layers if x.name == word] or [x for x in layers if str(x.operator) == word]
    if len(named) == 1:
        return named[0]
    if named:
        numbers = ", ".join(str(x.operator) for x in named)
        raise RewriteError(f"several layers are called {shown(word)}", f"give one by its number: {numbers}")
    near = get_close_matches(word, [x.name for x in layers], n=1)
    raise RewriteError(
        f"there is no convolution larger than 1x1 called {shown(word)}",
        f"did you mean {near[0]}?" if near else f"the first is {shown(layers[0].name)}, operator {layers[0].operator}",
    )


def read_filters(graph: Graph, layer: Layer) -> Filter:
    """Return the weights of a layer, shape ``(groups, outputs, height, width, inputs)``.

    Raises:
        RewriteError: they are sparse, or computed by something else than a change from float16.
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
    values = np.frombuffer(_bytes(source, int(main.tensors[held].buffer)), dtype, prod(shape))
    if not np.isfinite(values).all():
        raise RewriteError(f"operator {layer.operator} ({shown(layer.name)}): a weight is not finite")
    return values.reshape(shape).astype(np.float64)


def _bytes(source: ModelSource, buffer: int) -> bytes:
    extent = source.extents.get(buffer)
    if extent is None:
        return bytes(np.asarray(source.schema.buffers[buffer].data, np.uint8))
    try:
        with source.path.open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.nbytes)
    except OSError as error:
        raise ModelError(f"{source.path}: {error.strerror}") from error


def _pixels(tensor: Tensor) -> int:
    return prod(max(1, size) for size in tensor.shape[:3])
