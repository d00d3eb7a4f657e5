"""Which ranks a Tucker decomposition takes: the same share of all channels, or what the weights themselves tell.

::

    ratio:0.4      at most this share of the channels on both sides of every layer; ratio:0.38,0.49 for in and out
    energy:0.9     as few as keep this share of the squared singular values of each unfolding (seed 001)
    vbmf           as many as are more than noise (Nakajima et al. 2013; Kim et al. 2016, arXiv:1511.06530)
    given          only the layers whose ranks are given one by one

A grouped convolution has as many ranks as its group that wants most of them. Ranks of a share are rounded down to
multiples of what kernels like, those that weights tell are rounded up.

Seed 001 tells what its ranks saved and not which they were. :data:`SEED_001` is fitted to that: one rule for all layers
of its four networks that saves as much of each within 0.7 percentage points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import floor
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces.errors import UsageError
from search_spaces.graph import Graph
from search_spaces.rewrites.tucker_factors import INPUTS, OUTPUTS, spectrum
from search_spaces.rewrites.tucker_layers import Layer, Ranks, read_filters, tucker_layers
from search_spaces.rewrites.vbmf import evbmf_rank

Spectrum = NDArray[np.float64]
Spectra = Callable[[], Iterator[tuple[Spectrum, Spectrum]]]
"""Gives, group by group, the squared singular values of the unfoldings along input and output channels."""

MULTIPLE = 8
"""What ranks are rounded to, unless another number is asked for: kernels work on 4, 8 or 16 channels at a time."""

_FEWEST = 8  # a rank below it saves nothing that a kernel would notice
_HAIR = 1e-9

RULES = "ratio:SHARE or ratio:IN,OUT, energy:SHARE, vbmf, given"


class Rule(Protocol):
    """Chooses the ranks of a layer; its text is what a person writes for it.

    Attributes:
        least: whether fewer ranks would not do, so that they are rounded up; else more would not, and it is down.
    """

    @property
    def least(self) -> bool:
        """See above."""
        ...

    def ranks(self, layer: Layer, spectra: Spectra) -> Ranks | None:
        """Return the ranks, before rounding; None to leave the layer as it is."""
        ...


@dataclass(frozen=True, slots=True)
class Ratio:
    """The same share of the channels everywhere; weights are not looked at."""

    inputs: float
    outputs: float
    least: ClassVar[bool] = False

    def ranks(self, layer: Layer, _: Spectra) -> Ranks:
        """See :class:`Rule`."""
        return Ranks(floor(self.inputs * layer.inputs + _HAIR), floor(self.outputs * layer.outputs + _HAIR))

    def __str__(self) -> str:
        return f"ratio:{self.inputs:g}" + (f",{self.outputs:g}" if self.inputs != self.outputs else "")


@dataclass(frozen=True, slots=True)
class Energy:
    """As few ranks as keep a share of the energy of each unfolding."""

    share: float
    least: ClassVar[bool] = True

    def ranks(self, _: Layer, spectra: Spectra) -> Ranks:
        """See :class:`Rule`."""
        found = [[energy_rank(squared, self.share) for squared in pair] for pair in spectra()]
        return Ranks(*np.max(found, axis=0).tolist())

    def __str__(self) -> str:
        return f"energy:{self.share:g}"


@dataclass(frozen=True, slots=True)
class Vbmf:
    """As many ranks as variational Bayes finds above the noise; a layer that is nothing but noise is left alone."""

    least: ClassVar[bool] = True

    def ranks(self, layer: Layer, spectra: Spectra) -> Ranks | None:
        """See :class:`Rule`."""
        area = layer.kernel[0] * layer.kernel[1]
        shapes = (layer.inputs, layer.outputs * area), (layer.outputs, layer.inputs * area)
        found = [[evbmf_rank(s[: min(x)], x) for s, x in zip(pair, shapes, strict=True)] for pair in spectra()]
        inputs, outputs = np.max(found, axis=0).tolist()
        return Ranks(inputs, outputs) if inputs and outputs else None

    def __str__(self) -> str:
        return "vbmf"


@dataclass(frozen=True, slots=True)
class Given:
    """None but those that are given layer by layer."""

    least: ClassVar[bool] = True

    def ranks(self, _: Layer, __: Spectra) -> None:
        """See :class:`Rule`."""

    def __str__(self) -> str:
        return "given"


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a layer.

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
        given: operator → its ranks, which are taken as they are.
        multiple: what the rule's ranks are rounded to multiples of; none is below it, or 8 if that is less.
        most: no rank of the rule's is above it; None for the channels alone.
        even_larger: whether triples are also made where they need no fewer multiply-accumulates than the layer.
    """

    rule: Rule
    given: Mapping[int, Ranks] = field(default_factory=dict)
    multiple: int = MULTIPLE
    most: int | None = None
    even_larger: bool = False


SEED_001 = Choosing(Ratio(0.38, 0.49), multiple=16, most=112)
"""MACs of VGG16 −81.7 %, ResNet152 −38.8 %, Inception v3 −62.2 %, RegNetY-32GF −35.2 %; seed 001 has −81, −38.6,
−62.8, −35.8 %."""


def parse_rule(text: str) -> Rule:
    """Return the rule that a text stands for.

    Raises:
        UsageError: there is no such rule, or its share is not above 0 and at most 1.
    """
    name, colon, value = text.partition(":")
    if not colon and name in ("vbmf", "given"):
        return Vbmf() if name == "vbmf" else Given()
    if name not in ("ratio", "energy"):
        raise UsageError(f"--tucker {text}: there is no such rule", f"give one of: {RULES}")
    try:
        shares = [float(share) for share in value.split(",")]
    except ValueError:
        shares = []
    if not all(0 < share <= 1 for share in shares) or len(shares) not in ((1, 2) if name == "ratio" else (1,)):
        raise UsageError(f"--tucker {text}: the share must be above 0 and at most 1", f"as in {name}:0.5")
    return Ratio(shares[0], shares[-1]) if name == "ratio" else Energy(shares[0])


def choose_ranks(graph: Graph, how: Choosing) -> tuple[Choice, ...]:
    """Return what becomes of each convolution larger than 1 by 1.

    Raises:
        RewriteError: a rank is 0 or above the channels, there is nothing to decompose, or the model is quantised.
        ModelError: the rule looks at the weights and they cannot be read.
    """
    layers = tucker_layers(graph)
    return tuple(_choice(graph, layer, how) for layer in layers)


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
        noise = "its weights are nothing but noise" if isinstance(how.rule, Vbmf) else "no ranks are given"
        return Choice(layer, None, noise)
    ranks = Ranks(*(_rounded(rank, channels, how) for rank, channels in zip(found, layer.full, strict=True)))
    if layer.macs(ranks) >= layer.macs() and not how.even_larger:
        return Choice(layer, None, f"{ranks} would take no fewer multiply-accumulates")
    return Choice(layer, ranks)


def _rounded(rank: int, channels: int, how: Choosing) -> int:
    if rank < channels:
        steps = -(-rank // how.multiple) if how.rule.least else rank // how.multiple
        rank = max(steps * how.multiple, min(how.multiple, _FEWEST))
    return min(rank, channels, channels if how.most is None else how.most)
