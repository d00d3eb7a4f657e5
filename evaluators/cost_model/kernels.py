"""What a kernel costs as a sum of analytic terms, each with a fitted price that is not negative.

A term is a quantity that follows from the operator's shape: multiply-accumulates rounded up to whole tiles (the
analytical, non-linear part of seed 002's predictor), bytes moved (seed 004), a launch. A kernel's time is
``sum(price * term)``. Prices are not negative and terms grow with work and traffic, hence so does the prediction; and
since the sum is linear in the prices, a processor can be fitted from operators, from whole models, or from both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from evaluators.cost_model.features import OperatorFeatures

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Features of n operators as arrays of shape ``(n,)``, float64; names as in :class:`OperatorFeatures`."""

    macs: Array
    read: Array
    weight: Array
    written: Array
    resident: Array
    pixels: Array  # of the output
    pixels_in: Array
    channels: Array  # of the output
    channels_in: Array
    taps: Array  # filter height times width
    groups: Array
    inputs: Array

    def __getitem__(self, rows: npt.NDArray[np.intp] | slice) -> Columns:
        return Columns(*(getattr(self, name)[rows] for name in self.__slots__))


def columns(features: Sequence[OperatorFeatures]) -> Columns:
    """Return the features as arrays, one row an operator."""
    rows = [
        (
            f.macs,
            f.read_bytes,
            f.weight_bytes,
            f.written_bytes,
            f.resident_bytes,
            f.output[0] * f.output[1],
            f.input[0] * f.input[1],
            f.output[2],
            f.input[2],
            f.filter[0] * f.filter[1],
            f.groups,
            f.inputs,
        )
        for f in features
    ]
    return Columns(*np.asarray(rows, dtype=np.float64).reshape(len(rows), 12).T)


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
    whole = np.maximum(c.pixels * c.channels * c.channels_in, 1.0)
    padded = _up(c.pixels, tile.pixels) * _up(c.channels, tile.channels) * _up(c.channels_in, tile.depth)
    result: Array = c.macs * np.maximum(padded, whole) / whole
    return result


_PLAIN: Mapping[str, Callable[[Columns], Array]] = MappingProxyType(
    {
        "launch": lambda c: np.ones_like(c.macs),
        "read": lambda c: c.read,
        "weight": lambda c: c.weight,
        "written": lambda c: c.written,
        "far": lambda c: c.read - c.resident,
        "patches": lambda c: c.pixels * c.taps * c.channels_in,
    }
)
_TILED: Mapping[str, Callable[[Columns, Tile], Array]] = MappingProxyType({"macs": _tiled_macs})

TERMS = (*_TILED, *_PLAIN)


def term(name: str, rows: Columns, tile: Tile) -> Array:
    """Return a term of :data:`TERMS` for each operator, shape ``(n,)``."""
    return _TILED[name](rows, tile) if name in _TILED else _PLAIN[name](rows)


@dataclass(frozen=True, slots=True)
class KernelModel:
    """How long one kind of kernel takes on one processor.

    Attributes:
        prices: name of a term (:data:`TERMS`) → seconds per unit of it, not negative.
        tile: see there.
        sigma: relative standard deviation of what is left (of the logarithm of measured over predicted time).
        ranges: name of a column (:class:`Columns`) → least and greatest value in the fit.
        samples: operators in the fit.
    """

    prices: Mapping[str, float]
    tile: Tile = Tile()
    sigma: float = 0.3
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples: int = 0

    def seconds(self, rows: Columns) -> Array:
        """Return the time of each operator, in seconds, shape ``(n,)``."""
        total = np.zeros_like(rows.macs)
        for name, price in self.prices.items():
            total += price * term(name, rows, self.tile)
        return total

    def outside(self, rows: Columns) -> Array:
        """Return how far each operator lies outside the fitted range: 1 inside, else the greatest ratio beyond it."""
        factor = np.ones_like(rows.macs)
        for name, (low, high) in self.ranges.items():
            values: Array = getattr(rows, name)
            factor = np.maximum(factor, np.maximum(values, 1.0) / max(high, 1.0))
            factor = np.maximum(factor, max(low, 1.0) / np.maximum(values, 1.0))
        return factor
