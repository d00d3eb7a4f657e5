"""Cost of a kernel as a sum of analytic terms, each with a fitted price that is not negative.

A term is a quantity that follows from the operator's shape: multiply-accumulates rounded up to whole tiles (the
analytical, non-linear part of seed 002's predictor), bytes moved (seed 004), a launch. A kernel's time is
``sum(price * term)``. Prices are not negative and terms grow with work and traffic, so predictions do, too. The sum is
linear in the prices, so a processor can be fitted from operators, from whole models, or from both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from evaluators.cost_model.correction import Correction, Process
from evaluators.cost_model.features import Array, Columns, history_effect

# Larger numbers in a file overflow, or are no times of a device.
Price = Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)]
"""Seconds."""

Logarithm = Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**18)]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel cuts its work into tiles, which are computed whole, and which data stay in near caches.

    Attributes:
        pixels: output pixels of one tile.
        channels: output channels of one tile.
        depth: input channels that are multiplied at once.
        narrow: output channels of the tiles of another kernel, which runs where there are fewer than ``channels``; 0
            where there is none.
        near_s: weights and code that are used again within about this time come from a near cache; 0: none do.
        cache_bytes: activations beyond this do not stay in the cache that writes go to; 0: all do.
    """

    pixels: Count = 1
    channels: Count = 1
    depth: Count = 1
    narrow: Count = 0
    near_s: Price = 0.0
    cache_bytes: Number = 0.0


def _up(values: Array, step: int) -> Array:
    return np.ceil(values / step) * step if step > 1 else values


def _is_narrow(c: Columns, tile: Tile) -> npt.NDArray[np.bool_]:
    result: npt.NDArray[np.bool_] = c.channels / np.maximum(c.groups, 1.0) < (tile.channels if tile.narrow else 0)
    return result


def _covered(c: Columns, tile: Tile) -> Array:
    """Return the number of output elements in whole tiles; each group has tiles of its own."""
    groups = np.maximum(c.groups, 1.0)
    channels = c.channels / groups
    wide = _up(channels, tile.channels)
    if tile.narrow:
        wide = np.where(_is_narrow(c, tile), _up(channels, tile.narrow), wide)
    return _up(c.pixels, tile.pixels) * wide * groups


def _all_macs(c: Columns, tile: Tile) -> Array:
    whole = np.maximum(c.pixels * c.channels * c.channels_in, 1.0)
    padded = _covered(c, tile) * _up(c.channels_in, tile.depth)
    result: Array = c.macs * np.maximum(padded, whole) / whole
    return result


def _macs(c: Columns, tile: Tile, *, narrow: bool) -> Array:
    """Return the multiply-accumulates of whole tiles, for operators with narrow tiles or for the others; else 0."""
    return np.where(_is_narrow(c, tile) == narrow, _all_macs(c, tile), 0.0)


def _near(c: Columns, tile: Tile) -> Array:
    """Return the share of what was used in the last inference that a near cache still holds."""
    if not tile.near_s:
        return np.zeros_like(c.macs)
    result: Array = 1.0 / (1.0 + (c.interval / tile.near_s) ** _STEEP)
    return result


def _beyond(values: Array, tile: Tile) -> Array:
    return np.maximum(0.0, values - tile.cache_bytes) if tile.cache_bytes else np.zeros_like(values)


def _pointers(c: Columns) -> Array:
    """Return the number of input rows that a convolution finds by pointers; it reads pointers like weights."""
    return c.pixels * c.taps


_PLAIN: Mapping[str, Callable[[Columns], Array]] = {
    "launch": lambda c: np.ones_like(c.macs),
    "read": lambda c: c.read,
    "weight": lambda c: c.weight,
    "written": lambda c: c.written,
    "far": lambda c: c.read - c.resident,
    "patches": lambda c: c.pixels * c.taps * c.channels_in,  # elements of the im2col matrix
    "inputs": lambda c: c.inputs,
    "rows": lambda c: c.pixels * c.inputs,  # of channels; each is copied or mapped by a loop of its own
    "ragged": lambda c: np.where(c.channels % _VECTOR > 0, c.pixels * c.channels, 0.0),  # rows end within a vector
}
_TILED: Mapping[str, Callable[[Columns, Tile], Array]] = {
    "macs": partial(_macs, narrow=False),
    "narrow": partial(_macs, narrow=True),
    "far_launch": lambda c, tile: 1.0 - _near(c, tile),  # of a kernel whose code and state caches no longer hold
    "steps": lambda c, tile: _covered(c, tile) * c.taps,  # each tap of a filter is a loop of its own
    "far_weight": lambda c, tile: c.weight * (1.0 - _near(c, tile)),
    "near_weight": lambda c, tile: c.weight * _near(c, tile),
    "far_pointers": lambda c, tile: _pointers(c) * (1.0 - _near(c, tile)),
    "near_pointers": lambda c, tile: _pointers(c) * _near(c, tile),
    "read_beyond": lambda c, tile: _beyond(c.read, tile),
    "written_beyond": lambda c, tile: _beyond(c.written, tile),
}

TERMS = (*_TILED, *_PLAIN)
_STEEP = 2  # how sharply a near cache's share falls around near_s
_VECTOR = 16
_MOST_CORRECTED = 2.5  # limit of the correction, as a logarithm


def term(name: str, rows: Columns, tile: Tile) -> Array:
    """Return a term of :data:`TERMS` for each operator, shape ``(n,)``."""
    return _TILED[name](rows, tile) if name in _TILED else _PLAIN[name](rows)


@dataclass(frozen=True, slots=True)
class KernelModel:
    """Time of one kind of kernel on one processor.

    Attributes:
        prices: name of a term (:data:`TERMS`) → seconds per unit of it, not negative.
        tile: its tiles and caches.
        sigma: relative standard deviation where it is well supported (of the logarithm of measured over predicted).
        ranges: name of a column (:class:`Columns`) → least and greatest value in the fit.
        samples: operators in the fit; of a fit from whole models, operators in all of them.
        correction: of the sum of terms; None where there were too few samples.
        history: logarithm of the slowdown where only matrix products ran just before.
    """

    prices: Mapping[str, Price]
    tile: Tile = Tile()
    sigma: Logarithm = 0.3
    ranges: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    samples: Count = 0
    correction: Correction | Process | None = None
    history: Logarithm = 0.0

    @property
    def remembers(self) -> bool:
        """Whether the prediction depends on what ran before an operator, or on when it ran last."""
        return bool(self.tile.near_s or self.history or isinstance(self.correction, Process))

    def base_s(self, rows: Columns) -> Array:
        """Return the sum of terms for each operator, in seconds, shape ``(n,)``; it grows with work and bytes."""
        total = np.zeros_like(rows.macs)
        for name, price in self.prices.items():
            total += price * term(name, rows, self.tile)
        return total * np.exp(self.history * history_effect(rows.matrix_share)) if self.history else total

    def predict(self, rows: Columns) -> tuple[Array, Array]:
        """Return the time of each operator in seconds and its relative standard deviation, shape ``(n,)``."""
        base = self.base_s(rows)
        if self.correction is None or not len(base):
            return base, np.full_like(base, self.sigma)
        exponent, support = self.correction.apply(rows)
        spread = self.correction.spread * np.sqrt(np.maximum(0.0, 1.0 - support**2))
        return base * np.exp(np.clip(exponent, -_MOST_CORRECTED, _MOST_CORRECTED)), np.hypot(self.sigma, spread)

    def outside(self, rows: Columns) -> Array:
        """Return how far each operator lies outside the fitted range: 1 inside, else the greatest ratio to a bound."""
        factor = np.ones_like(rows.macs)
        for name, (low, high) in self.ranges.items():
            values: Array = getattr(rows, name)
            factor = np.maximum(factor, np.maximum(values, 1.0) / max(high, 1.0))
            factor = np.maximum(factor, max(low, 1.0) / np.maximum(values, 1.0))
        return factor
