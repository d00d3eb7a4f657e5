"""What analytic terms leave over, learnt: a Gaussian process over the shapes of operators.

A sum of prices says how a kernel's time grows; how well a shape suits caches, tiles and prefetchers is left over. The
process interpolates the logarithm of measured over analytic time between the shapes that were measured, falls back to
0 far from them, and says how sure it is (Rasmussen and Williams 2006, algorithm 2.1). The covariance is Matérn 3/2
with a length scale for each feature: shapes next to each other may lie on either side of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from evaluators.cost_model.kernels import Array, Columns

FEATURES = ("pixels", "channels", "channels_in", "taps", "shrink", "groups", "resident", "odd_out", "odd_pixels")
_TILE_CHANNELS, _TILE_PIXELS = 16, 8
_JITTER = 1e-6
_MOST_TUNED = 350


class Normal(NamedTuple):
    """Means and standard deviations of logarithms, shape ``(n,)``."""

    mean: Array
    sigma: Array


@dataclass(frozen=True, slots=True)
class Correction:
    """A fitted process.

    Attributes:
        points: features of the measured shapes (:data:`FEATURES`), one row each.
        weights: what the mean gives to each of them.
        scales: length scale of each feature.
        amplitude: standard deviation of what is learnt.
        noise: standard deviation of one measurement of each shape about it.
    """

    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    scales: tuple[float, ...]
    amplitude: float
    noise: tuple[float, ...]

    def predict(self, rows: Columns) -> Normal:
        """Return the logarithm of the factor on the analytic time."""
        known, factor = _factored(self)
        scales = np.array(self.scales)
        cross = _covariance(shapes(rows) / scales, known, self.amplitude)
        half = solve_triangular(factor, cross.T, lower=True)
        variance = np.maximum(self.amplitude**2 - (half**2).sum(axis=0), 0.0)
        own = float(np.median(self.noise)) ** 2
        return Normal(cross @ np.array(self.weights), np.sqrt(variance + own))


def shapes(rows: Columns) -> Array:
    """Return the features of operators, shape ``(n, 9)``: logarithms to base 2, and what is left over of tiles."""

    def log2(values: Array) -> Array:
        result: Array = np.log2(np.maximum(values, 1.0))
        return result

    return np.stack(
        [
            log2(rows.pixels),
            log2(rows.channels),
            log2(rows.channels_in),
            log2(rows.taps),
            log2(rows.pixels_in / np.maximum(rows.pixels, 1.0)),
            log2(rows.groups),
            rows.resident / np.maximum(rows.read, 1.0),
            _left_over(rows.channels, _TILE_CHANNELS),
            _left_over(rows.pixels, _TILE_PIXELS),
        ],
        axis=1,
    )


def _left_over(values: Array, tile: int) -> Array:
    """Return by how much whole tiles exceed the values: the logarithm to base 2."""
    result: Array = np.log2(np.ceil(values / tile) * tile / np.maximum(values, 1.0))
    return result


def fit_correction(
    rows: Columns, logs: Array, spread: Array | float = 0.02, scales: Sequence[float] | None = None, amplitude: float = 0.0
) -> Correction:
    """Fit a process to the logarithms of measured over analytic times.

    Args:
        logs: shape ``(n,)``.
        spread: standard deviation of each of them as measurements.
        scales, amplitude: of the covariance; found by maximal likelihood where they are not given.
    """
    points = shapes(rows)
    noise = np.broadcast_to(np.asarray(spread, np.float64), logs.shape)
    if scales is None:
        scales, amplitude = _tuned(points, logs, noise)
    covariance = _covariance(points / scales, points / scales, amplitude)
    covariance[np.diag_indices_from(covariance)] += noise**2 + _JITTER
    weights = cho_solve((cholesky(covariance, lower=True), True), logs)
    return Correction(
        tuple(tuple(round(float(v), 4) for v in row) for row in points),
        tuple(float(w) for w in weights),
        tuple(float(s) for s in scales),
        float(amplitude),
        tuple(round(float(v), 5) for v in noise),
    )


def _tuned(points: Array, logs: Array, noise: Array) -> tuple[list[float], float]:
    """Return the length scales and the amplitude under which the measurements are likeliest."""
    if len(points) > _MOST_TUNED:
        chosen = np.random.default_rng(0).choice(len(points), _MOST_TUNED, replace=False)
        points, logs, noise = points[chosen], logs[chosen], noise[chosen]
    varies = points.std(axis=0) > 1e-9
    used = points[:, varies]

    def loss(theta: Array) -> float:
        covariance = _covariance(used / np.exp(theta[:-1]), used / np.exp(theta[:-1]), float(np.exp(theta[-1])))
        covariance[np.diag_indices_from(covariance)] += noise**2 + _JITTER
        factor = cholesky(covariance, lower=True)
        half = solve_triangular(factor, logs, lower=True)
        # A weak prior keeps scales within reach of the data.
        prior = 0.5 * float((((theta[:-1] - 1.0) / 1.0) ** 2).sum())
        return float(0.5 * half @ half + np.log(np.diag(factor)).sum()) + prior

    start = np.append(np.ones(used.shape[1]), np.log(max(0.05, float(logs.std()))))
    found = minimize(loss, start, method="L-BFGS-B", bounds=[(-2.0, 4.0)] * len(start[:-1]) + [(-4.0, 1.0)])
    scales = np.full(points.shape[1], np.exp(1.0))
    scales[varies] = np.exp(found.x[:-1])
    return [float(s) for s in scales], float(np.exp(found.x[-1]))


def _covariance(a: Array, b: Array, amplitude: float) -> Array:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    result: Array = amplitude**2 * (1.0 + distance) * np.exp(-distance)
    return result


@lru_cache(maxsize=256)
def _factored(correction: Correction) -> tuple[Array, Array]:
    """Return the scaled points and the Cholesky factor of their covariance."""
    known = np.array(correction.points) / np.array(correction.scales)
    covariance = _covariance(known, known, correction.amplitude)
    covariance[np.diag_indices_from(covariance)] += np.array(correction.noise) ** 2 + _JITTER
    return known, cholesky(covariance, lower=True)
