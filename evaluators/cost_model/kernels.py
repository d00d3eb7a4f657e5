"""What a kernel costs as a sum of analytic terms, each with a fitted price that is not negative.

A term is a quantity that follows from the operator's shape: multiply-accumulates rounded up to whole tiles (the
analytical, non-linear part of seed 002's predictor), bytes moved (seed 004), a launch. A kernel's time is
``sum(price * term)``. Prices are not negative and terms grow with work and traffic, hence so does the prediction; and
since the sum is linear in the prices, a processor can be fitted from operators, from whole models, or from both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from evaluators.cost_model.columns import Array, Columns
from evaluators.cost_model.correction import Correction
from evaluators.cost_model.process import Process


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel cuts its work: what is left over in the last tile is computed all the same.

    Attributes:
        pixels: output pixels of one tile.
        channels: output channels of one tile.
        depth: input channels that are multiplied at once.
    """

    pixels: int = 1
    channels: int = 1
    depth: int = 1


def _up(values: Array, step: int) -> Array:
    return np.ceil(values / step) * step if step > 1 else values


def _tiled_macs(c: Columns, tile: Tile) -> Array:
    channels = c.channels / np.maximum(c.groups, 1.0)  # each group has tiles of its own
    whole = np.maximum(c.pixels * channels * c.channels_in, 1.0)
    padded = _up(c.pixels, tile.pixels) * _up(channels, tile.channels) * _up(c.channels_in, tile.depth)
    result: Array = c.macs * np.maximum(padded, whole) / whole
    return result


_PLAIN: Mapping[str, Callable[[Columns], Array]] = MappingProxyType(
    {
        "launch": lambda c: np.ones_like(c.macs),
        "read": lambda c: c.read,
        "weight": lambda c: c.weight,
        "written": lambda c: c.written,
        "far": lambda c: c.read - c.resident,
        "patches": lambda c: c.pixels * c.taps * c.channels_in,  # elements that are multiplied, one filter
        "inputs": lambda c: c.inputs,
    }
)
_TILED: Mapping[str, Callable[[Columns, Tile], Array]] = MappingProxyType({"macs": _tiled_macs})

TERMS = (*_TILED, *_PLAIN)
_MOST_CORRECTED = 2.5  # in either direction, as a logarithm


def term(name: str, rows: Columns, tile: Tile) -> Array:
    """Return a term of :data:`TERMS` for each operator, shape ``(n,)``."""
    return _TILED[name](rows, tile) if name in _TILED else _PLAIN[name](rows)


@dataclass(frozen=True, slots=True)
class KernelModel:
    """How long one kind of kernel takes on one processor.

    Attributes:
        prices: name of a term (:data:`TERMS`) → seconds per unit of it, not negative.
        tile: see there.
        sigma: relative standard deviation where it is well supported (of the logarithm of measured over predicted).
        ranges: name of a column (:class:`Columns`) → least and greatest value in the fit.
        samples: operators in the fit; of a fit from whole models, operators in all of them.
        correction: of the sum of terms; None where there was none to learn from.
    """

    prices: Mapping[str, float]
    tile: Tile = Tile()
    sigma: float = 0.3
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples: int = 0
    correction: Correction | Process | None = None

    def base_s(self, rows: Columns) -> Array:
        """Return the sum of terms for each operator, in seconds, shape ``(n,)``; it grows with work and bytes."""
        total = np.zeros_like(rows.macs)
        for name, price in self.prices.items():
            total += price * term(name, rows, self.tile)
        return total

    def predict(self, rows: Columns) -> tuple[Array, Array]:
        """Return the time of each operator in seconds and its relative standard deviation, shape ``(n,)``."""
        base = self.base_s(rows)
        if self.correction is None or not len(base):
            return base, np.full_like(base, self.sigma)
        exponent, support = self.correction.apply(rows)
        doubt = self.correction.spread * np.sqrt(np.maximum(0.0, 1.0 - support**2))
        return base * np.exp(np.clip(exponent, -_MOST_CORRECTED, _MOST_CORRECTED)), np.hypot(self.sigma, doubt)

    def outside(self, rows: Columns) -> Array:
        """Return how far each operator lies outside the fitted range: 1 inside, else the greatest ratio beyond it."""
        factor = np.ones_like(rows.macs)
        for name, (low, high) in self.ranges.items():
            values: Array = getattr(rows, name)
            factor = np.maximum(factor, np.maximum(values, 1.0) / max(high, 1.0))
            factor = np.maximum(factor, max(low, 1.0) / np.maximum(values, 1.0))
        return factor
