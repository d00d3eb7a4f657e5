"""Which ranks a model's convolutions may get, and what is lost with them, as far as the filters tell (seed 001).

A layer larger than 1 by 1 may stay as it is, or become the triple of some share of its channels, rounded down to what
kernels work on at a time. Triples of no fewer multiply-accumulates are not offered. How far the outputs are then off is
told beforehand by the filters: what their unfoldings lose at these ranks, relative, and of several layers the root of
the sum of squares, as if what they lose were independent and passed on undiminished. That is an estimate; only a run
tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from search_spaces.graph import Graph
from search_spaces.plan import LayerRanks, Plan
from search_spaces.rewrites.tucker_factors import INPUTS, OUTPUTS, spectrum
from search_spaces.rewrites.tucker_layers import Layer, Ranks, ranks_of, read_filters, tucker_layers
from search_spaces.rewrites.tucker_ranks import MULTIPLE

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Of the channels, on both sides of a layer."""


class RankChoices:
    """The triples that a model's layers may become; see the module.

    Attributes:
        layers: operator → the convolution.
        options: operator → the ranks that it may get, ascending, where there are any.

    Raises:
        RewriteError: the model has no convolution larger than 1 by 1, or is quantised.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers = {layer.operator: layer for layer in tucker_layers(graph)}
        offered = {operator: _offered(layer) for operator, layer in self.layers.items()}
        self.options: Mapping[int, tuple[Ranks, ...]] = {o: found for o, found in offered.items() if found}
        self._spectra: dict[int, list[tuple[Any, Any]]] = {}
        self._losses: dict[tuple[int, Ranks], float] = {}

    @cached_property
    def places(self) -> Mapping[tuple[int, Ranks], int]:
        """A number for each layer's each triple, counted through."""
        return {key: i for i, key in enumerate((o, r) for o, found in self.options.items() for r in found)}

    def loss(self, operator: int, ranks: Ranks) -> float:
        """Return the square of a filter's relative error at some ranks, at most: what both its unfoldings lose.

        Raises:
            RewriteError: the weights are not there as plain numbers.
            ModelError: the model has no file, or its file cannot be read.
        """
        if (operator, ranks) not in self._losses:
            self._losses[operator, ranks] = self._loss(operator, ranks)
        return self._losses[operator, ranks]

    def _loss(self, operator: int, ranks: Ranks) -> float:
        if operator not in self._spectra:
            filters = read_filters(self.graph, self.layers[operator])
            self._spectra[operator] = [(spectrum(f, INPUTS), spectrum(f, OUTPUTS)) for f in filters]
        pairs = self._spectra[operator]
        energy = sum(float(first.sum()) for first, _ in pairs)
        lost = sum(float(a[ranks.inputs :].sum() + b[ranks.outputs :].sum()) for a, b in pairs)
        return min(lost / energy, 1.0) if energy > 0.0 else 0.0

    def error(self, plan: Plan) -> float:
        """Return by how much the outputs of a plan are expected to be off, relative; see the module.

        Raises:
            RewriteError, ModelError: see :meth:`loss`.
        """
        return float(sum(self.loss(operator, ranks) for operator, ranks in ranks_of(plan).items()) ** 0.5)

    def with_ranks(self, plan: Plan, ranks: Mapping[int, Ranks]) -> Plan:
        """Return a plan with these ranks instead of its own."""
        return replace(plan, ranks=tuple(LayerRanks(o, *ranks[o]) for o in sorted(ranks)))


def _offered(layer: Layer) -> tuple[Ranks, ...]:
    """Return the ranks that a layer may get, ascending: those of fewer multiply-accumulates."""
    found = dict.fromkeys(Ranks(*(_rounded(share, channels) for channels in layer.full)) for share in SHARES)
    return tuple(ranks for ranks in found if layer.macs(ranks) < layer.macs())


def _rounded(share: float, channels: int) -> int:
    return min(channels, max(MULTIPLE, int(share * channels) // MULTIPLE * MULTIPLE))
