"""The models of seed 001's five sets: as published, decomposed by one rule, and decomposed where that is quicker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.models import load
from search_spaces.models.stages import cut_stage
from search_spaces.rewrites.tucker import Layer, Ranks, Triple, TuckerGraph, decompose, tucker_layers
from search_spaces.rewrites.tucker_ranks import SEED_001, choose_ranks

VGG, RES, INC, REG = "vgg16", "resnet152", "inception_v3", "regnet_y_32gf"
SETS: Mapping[str, tuple[tuple[tuple[str, int], ...], float]] = {
    "8 VGG16": (((VGG, 8),), 62.9),
    "8 ResNet152": (((RES, 8),), 56.1),
    "8 Inception v3": (((INC, 8),), 47.9),
    "7 RegNetY-32GF": (((REG, 7),), 75.6),
    "3 VGG16, 1 ResNet152, 2 Inception v3, 2 RegNetY-32GF": (((VGG, 3), (RES, 1), (INC, 2), (REG, 2)), 74.6),
}
"""Models and counts, and by how many percent seed 001 reduces the latency of a model against one process each."""

TOYS = {VGG: "vgg16@0.125/32", RES: "resnet50@0.125/32", INC: "inception_v3@0.125/75", REG: "regnet_y_32gf@0.125/32"}


@dataclass(slots=True)
class Model:
    """One model in its three forms.

    Attributes:
        tucker: every convolution larger than 1 by 1 decomposed by the seed's rule.
        path, tucker_path: files that hold them.
        ranks: of the rule.
        quick: those triples that are quicker than their convolutions, as a model; None where there are none.
        kept: how many they are.
    """

    name: str
    graph: Graph
    tucker: TuckerGraph
    path: Path
    tucker_path: Path
    ranks: Mapping[int, Ranks]
    triples: dict[tuple[int, Ranks], Triple]
    quick: TuckerGraph | None = None
    kept: int = 0
    seconds: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one inference."""
        return sum(c.macs for c in operator_costs(self.graph))

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights that one inference reads."""
        return sum(t.nbytes for t in self.graph.tensors if t.constant)

    def choose(self, precision: str, seconds: Sequence[Mapping[str, float]]) -> None:
        """Keep the triples that are quicker than their convolutions.

        Args:
            seconds: of the operators of :meth:`questions`: those of the model, and those of its triples.
        """
        before, after = ({int(k): s for k, s in each.items()} for each in seconds)
        found = {}
        for layer in self.ranks:
            triple = [i for i, origin in enumerate(self.tucker.origins) if origin == layer]
            if layer in before and all(i in after for i in triple):  # else there was no time to look
                found[layer] = before[layer], sum(after[i] for i in triple)
        self.seconds[precision] = found
        kept = {layer: self.ranks[layer] for layer, (whole, triple) in found.items() if triple < whole}
        self.kept = len(kept)
        self.quick = decompose(self.graph, kept, self.triples) if kept else None

    def questions(self) -> list[tuple[str, list[int]]]:
        """Return which operators are to be timed, of which files."""
        inside = [i for i, origin in enumerate(self.tucker.origins) if origin in self.ranks]
        return [(str(self.path), list(self.ranks)), (str(self.tucker_path), inside)]


def prepared(names: Sequence[str], folder: Path, *, toy: bool) -> dict[str, Model]:
    """Build models, and decompose them with filters at random: how long they take does not depend on what they hold."""
    asked = [TOYS[name] if toy else name for name in names]
    with ProcessPoolExecutor(len(names), get_context("forkserver")) as pool:
        list(pool.map(_built, asked))  # the files, side by side
    return {name: _model(name, load(source), folder) for name, source in zip(names, asked, strict=True)}


def _built(source: str) -> None:
    load(source)


def _model(name: str, graph: Graph, folder: Path) -> Model:
    ranks = {c.layer.operator: c.ranks for c in choose_ranks(graph, SEED_001) if c.ranks is not None}
    layers = {layer.operator: layer for layer in tucker_layers(graph)}
    triples = {(operator, pair): _triple(layers[operator], pair) for operator, pair in ranks.items()}
    made = decompose(graph, ranks, triples)
    if graph.source is None:
        raise SystemExit(f"{graph.name} has no file")
    path = folder / f"{name}_tucker.tflite"
    cut_stage(made.graph, range(len(made.graph.operators))).write(path)
    return Model(name, graph, made, graph.source.path, path, ranks, triples)


def _triple(layer: Layer, ranks: Ranks) -> Triple:
    rng = np.random.default_rng(layer.operator)

    def drawn(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        found: np.ndarray[Any, np.dtype[np.float32]] = rng.standard_normal(shape, np.float32)
        return found * np.float32((2.0 / np.prod(shape[1:])) ** 0.5)

    groups = layer.groups
    first = drawn(groups * ranks.inputs, 1, 1, layer.inputs)
    core = drawn(groups * ranks.outputs, *layer.kernel, ranks.inputs)
    return Triple(first, core, drawn(groups * layer.outputs, 1, 1, ranks.outputs), 1.0)


def cuts_of(graph: Graph, parts: int, origins: Sequence[int] = ()) -> tuple[int, ...]:
    """Return where to cut a model into parts of about equal work; a Tucker triple is never cut (seed 001).

    Args:
        origins: of a decomposed model; operators of one triple have the same.
    """
    weights = [c.macs + (c.read_bytes + c.written_bytes) // 4 for c in operator_costs(graph)]
    done = list(accumulate(weights))
    found = []
    for part in range(1, parts):
        place = next(i for i, total in enumerate(done) if total >= done[-1] * part / parts) + 1
        while origins and 0 < place < len(origins) and origins[place] == origins[place - 1]:
            place += 1
        if 0 < place < len(graph.operators) and place not in found:
            found.append(place)
    return tuple(sorted(found))
