"""Ranks of a Tucker decomposition: a share of the channels, or derived from the weights.

::

    ratio:0.4      at most this share of the channels on both sides of every layer; ratio:0.38,0.49 for in and out
    energy:0.9     as few as keep this share of the squared singular values of each unfolding (seed 001)
    vbmf           as many as are more than noise (Nakajima et al. 2013; Kim et al. 2016, arXiv:1511.06530)
    given          only the layers whose ranks are given one by one

A grouped convolution gets the ranks of the group that needs most. Ranks of a share are rounded down to the multiples
that kernels work on, those that follow from weights are rounded up.

Seed 001 reports the MACs that its ranks saved, but not the ranks. :data:`SEED_001` is one rule for all layers of its
four networks, fitted to save as much in each within 0.7 percentage points.

``vbmf`` is empirical variational Bayes matrix factorisation, which has no parameter. Nakajima, Sugiyama, Babacan,
Tomioka: "Global Analytic Solution of Fully-observed Variational Bayesian Matrix Factorization", Journal of Machine
Learning Research 14 (2013); the equations below are theirs. A matrix is modelled as a product of two factors plus
normal noise; the variances of the priors and of the noise are estimated from the matrix itself.

In a search (:class:`RankChoices`), a layer larger than 1 by 1 may stay as it is, or become the triple of some share of
its channels, unless that saves no multiply-accumulates. The error of the outputs is estimated from the filters: the
relative loss of their unfoldings at these ranks, and for several layers the root of the sum of squares, as if losses
were independent and reached the outputs undiminished. Only a run measures the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.rewrites.tucker import INPUTS, OUTPUTS, Layer, Ranks, ranks_of, read_filters, spectrum, tucker_layers

Array = NDArray[np.float64]

_GRID = 400
_REFINEMENTS = 3
_NOISELESS = 1e-12  # of the largest squared singular value: smaller ones are rounding errors of zero


def evbmf_rank(squared: Array, shape: tuple[int, int]) -> int:
    """Return how many components of a matrix are above the noise; 0 where all is noise.

    Args:
        squared: its squared singular values, descending, ``min(shape)`` of them.
        shape: rows and columns.
    """
    rows, columns = min(shape), max(shape)
    if len(squared) != rows:
        raise ValueError(f"a matrix of {shape[0]} by {shape[1]} has {rows} singular values, not {len(squared)}")
    largest = float(squared[0]) if rows else 0.0
    if largest <= 0:
        return 0
    known = np.maximum(squared, largest * _NOISELESS)
    least = _least_component(rows / columns)
    noise = _noise_variance(known, rows, columns, least)
    return int(np.count_nonzero(known > columns * noise * least))


@cache
def _least_component(alpha: float) -> float:
    """Return how large a squared singular value, over columns times noise variance, must be to count (theorem 2)."""

    def phi(z: float) -> float:
        return math.log1p(z) / z - 0.5

    from scipy.optimize import brentq

    tau = float(brentq(lambda t: phi(t) + phi(t / alpha), 1e-9, 10.0))
    return (1 + tau) * (1 + alpha / tau)


def _noise_variance(squared: Array, rows: int, columns: int, least: float) -> float:
    """Return the most likely noise variance: the minimum of the free energy (theorem 3).

    The function of one variable may have several minima, so a grid is searched, then finer ones around its best point.
    """
    alpha = rows / columns
    most = max(0, math.ceil(rows / (1 + alpha)) - 1)  # maximum number of components
    upper = float(squared.sum()) / (rows * columns)
    lower = max(float(squared[most]) / (columns * least), float(squared[most:].mean()) / columns)
    low, high = math.log(min(lower, upper)), math.log(upper)
    best = low
    for _ in range(_REFINEMENTS):
        grid = np.linspace(low, high, _GRID)
        energies = _free_energy(squared[None, :] / (columns * np.exp(grid)[:, None]), alpha, least)
        at = int(energies.argmin())
        best, low, high = float(grid[at]), float(grid[max(0, at - 1)]), float(grid[min(_GRID - 1, at + 1)])
    return math.exp(best)


def _free_energy(x: Array, alpha: float, least: float) -> Array:
    """Return the free energy for each row of normalised squared singular values, up to a constant."""
    signal = x > least
    inside = np.where(signal, x, least) - (1 + alpha)
    tau = 0.5 * (inside + np.sqrt(np.maximum(inside**2 - 4 * alpha, 0.0)))
    gain = np.log1p(tau) + alpha * np.log1p(tau / alpha) - tau
    energies: Array = (x - np.log(x) + np.where(signal, gain, 0.0)).sum(axis=1)
    return energies


Spectrum = NDArray[np.float64]
Spectra = Callable[[], Iterator[tuple[Spectrum, Spectrum]]]
"""Yields, for each group, the squared singular values of the unfoldings along input and output channels."""

MULTIPLE = 8
"""Default multiple that ranks are rounded to: kernels work on 4, 8 or 16 channels at a time."""

_FEWEST = 8  # kernels run smaller ranks no faster
_HAIR = 1e-9

RULES = "ratio:SHARE or ratio:IN,OUT, energy:SHARE, vbmf, given"


@dataclass(frozen=True, slots=True)
class Rule:
    """Chooses the ranks of a layer.

    Attributes:
        text: as the user writes it.
        ranks: returns the ranks of a layer, before rounding; None to leave it as it is.
        least: whether the ranks are minima, which are rounded up; maxima are rounded down.
        looks: whether it reads the weights.
        why_not: reason why a layer without ranks stays as it is.
    """

    text: str
    ranks: Callable[[Layer, Spectra], Ranks | None]
    least: bool = True
    looks: bool = True
    why_not: str = "no ranks are given"

    def __str__(self) -> str:
        return self.text


def ratio(inputs: float, outputs: float) -> Rule:
    """Return the rule of the same share of the channels in all layers; it does not read weights."""
    text = f"ratio:{inputs:g}" + (f",{outputs:g}" if inputs != outputs else "")

    def ranks(layer: Layer, _: Spectra) -> Ranks:
        return Ranks(floor(inputs * layer.inputs + _HAIR), floor(outputs * layer.outputs + _HAIR))

    return Rule(text, ranks, least=False, looks=False)


def energy(share: float) -> Rule:
    """Return the rule of the smallest ranks that keep a share of the energy of each unfolding."""

    def ranks(_: Layer, spectra: Spectra) -> Ranks:
        found = [[energy_rank(squared, share) for squared in pair] for pair in spectra()]
        return Ranks(*np.max(found, axis=0).tolist())

    return Rule(f"energy:{share:g}", ranks)


def _above_noise(layer: Layer, spectra: Spectra) -> Ranks | None:
    area = layer.kernel[0] * layer.kernel[1]
    shapes = (layer.inputs, layer.outputs * area), (layer.outputs, layer.inputs * area)
    found = [[evbmf_rank(s[: min(x)], x) for s, x in zip(pair, shapes, strict=True)] for pair in spectra()]
    inputs, outputs = np.max(found, axis=0).tolist()
    return Ranks(inputs, outputs) if inputs and outputs else None


VBMF = Rule("vbmf", _above_noise, why_not="its weights are nothing but noise")
"""As many ranks as variational Bayes finds above the noise; a layer of nothing but noise stays as it is."""
GIVEN = Rule("given", lambda _, __: None)
"""No ranks but those given layer by layer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one layer.

    Attributes:
        ranks: of its triple; None where it stays as it is.
        why: why it stays, or "".
    """

    layer: Layer
    ranks: Ranks | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Choosing:
    """How ranks are chosen.

    Attributes:
        rule: for all layers that are not in ``given``.
        given: operator → its ranks, which are used as they are.
        multiple: the rule's ranks are rounded to multiples of it, at least to the smaller of it and 8.
        most: upper limit of the rule's ranks besides the channels; None for no limit.
        even_larger: whether triples are also made where they save no multiply-accumulates.
    """

    rule: Rule
    given: Mapping[int, Ranks] = field(default_factory=dict)
    multiple: int = MULTIPLE
    most: int | None = None
    even_larger: bool = False


SEED_001 = Choosing(ratio(0.38, 0.49), multiple=16, most=112)
"""MACs of VGG16 −81.7 %, ResNet152 −38.8 %, Inception v3 −62.2 %, RegNetY-32GF −35.2 %; seed 001 has −81, −38.6,
−62.8, −35.8 %."""


def parse_rule(text: str) -> Rule:
    """Return the rule of a text such as ``ratio:0.4``.

    Raises:
        UsageError: there is no such rule, or its share is not above 0 and at most 1.
    """
    name, colon, value = text.partition(":")
    if not colon and name in ("vbmf", "given"):
        return VBMF if name == "vbmf" else GIVEN
    if name not in ("ratio", "energy"):
        raise UsageError(f"--tucker {text}: there is no such rule", f"give one of: {RULES}")
    try:
        shares = [float(share) for share in value.split(",")]
    except ValueError:
        shares = []
    if not all(0 < share <= 1 for share in shares) or len(shares) not in ((1, 2) if name == "ratio" else (1,)):
        raise UsageError(f"--tucker {text}: the share must be above 0 and at most 1", f"write for example {name}:0.5")
    return ratio(shares[0], shares[-1]) if name == "ratio" else energy(shares[0])


def choose_ranks(graph: Graph, how: Choosing) -> tuple[Choice, ...]:
    """Return the choice for each convolution larger than 1 by 1.

    Raises:
        RewriteError: a rank is 0 or above the channels, there is nothing to decompose, or the model is quantised.
        ModelError: the rule reads the weights and they cannot be read.
    """
    return tuple(_choice(graph, layer, how) for layer in tucker_layers(graph))


def energy_rank(squared: Spectrum, share: float) -> int:
    """Return how many of the largest squared singular values hold a share of their sum; at least 1."""
    held = np.cumsum(squared)
    if not len(held) or held[-1] <= 0:
        return 1
    return int(min(np.searchsorted(held, share * held[-1] * (1 - 1e-12)) + 1, len(held)))


def _choice(graph: Graph, layer: Layer, how: Choosing) -> Choice:
    if layer.operator in how.given:
        return Choice(layer, layer.check(how.given[layer.operator]))

    def spectra() -> Iterator[tuple[Spectrum, Spectrum]]:
        return ((spectrum(group, INPUTS), spectrum(group, OUTPUTS)) for group in read_filters(graph, layer))

    found = how.rule.ranks(layer, spectra)
    if found is None:
        return Choice(layer, None, how.rule.why_not)
    ranks = Ranks(*(_rounded(rank, channels, how) for rank, channels in zip(found, layer.full, strict=True)))
    if layer.macs(ranks) >= layer.macs() and not how.even_larger:
        return Choice(layer, None, f"ranks {ranks} save no multiply-accumulates")
    return Choice(layer, ranks)


def _rounded(rank: int, channels: int, how: Choosing) -> int:
    if rank < channels:
        steps = -(-rank // how.multiple) if how.rule.least else rank // how.multiple
        rank = max(steps * how.multiple, min(how.multiple, _FEWEST))
    return min(rank, channels, channels if how.most is None else how.most)


SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Offered shares of the channels, the same on both sides of a layer."""


class RankChoices:
    """The triples offered for each layer of a model, and their estimated errors.

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
        """Operator and ranks → consecutive number of the triple."""
        return {key: i for i, key in enumerate((o, r) for o, found in self.options.items() for r in found)}

    def loss(self, operator: int, ranks: Ranks) -> float:
        """Return an upper bound of the square of a filter's relative error: the loss of both its unfoldings.

        Raises:
            RewriteError: the weights are not plain numbers in the file.
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
        """Return the estimated relative error of the outputs of a plan.

        Raises:
            RewriteError, ModelError: as of :meth:`loss`.
        """
        return float(sum(self.loss(operator, ranks) for operator, ranks in ranks_of(plan).items()) ** 0.5)

    def with_ranks(self, plan: Plan, ranks: Mapping[int, Ranks]) -> Plan:
        """Return a plan with these ranks instead of its own."""
        return replace(plan, ranks=tuple(LayerRanks(o, *ranks[o]) for o in sorted(ranks)))


def _offered(layer: Layer) -> tuple[Ranks, ...]:
    """Return the ranks that a layer may get, ascending: those of fewer multiply-accumulates."""
    found = dict.fromkeys(Ranks(*(_share_of(share, channels) for channels in layer.full)) for share in SHARES)
    return tuple(ranks for ranks in found if layer.macs(ranks) < layer.macs())


def _share_of(share: float, channels: int) -> int:
    return min(channels, max(MULTIPLE, int(share * channels) // MULTIPLE * MULTIPLE))
