"""Corrections of the sum of terms, learnt from similar shapes by Gaussian processes.

The logarithm of measured over predicted time is smooth over the logarithms of a shape's sizes (slices of four channels,
pixels, filter). :class:`Correction` corrects near measured shapes and fades away from them, where the sum of terms
remains; the distance to the nearest support point says how far a prediction can be trusted.

:class:`Process` is finer. Where thousands of operators were timed within models,
neighbours of a shape predict better than a smooth correction: how sizes are divided into tiles, what the producer left
in cache. The covariance is Matérn 3/2, since neighbouring shapes may lie on either side of a tile; the noise is the one
that predicts left-out networks best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve, solve_triangular

from evaluators.cost_model.features import Array, Columns, history_effect

_JITTER = 1e-6


def shape_coordinates(rows: Columns) -> Array:
    """Return the positions of operators in the space of shapes, shape ``(n, 8)``; one unit is a factor of e."""
    slices, slices_in = np.ceil(rows.channels / 4), np.ceil(rows.channels_in / 4)
    moved = np.maximum(rows.read + rows.written + rows.weight, 1.0)
    return np.stack(
        [
            np.log(np.maximum(rows.pixels, 1.0)),
            np.log(np.maximum(rows.pixels_in, 1.0) / np.maximum(rows.pixels, 1.0)),
            np.log(slices),
            np.log(slices_in),
            np.log(np.maximum(rows.taps, 1.0)),
            np.log(np.maximum(rows.groups, 1.0)),
            np.log(moved),
            slices % 2,
        ],
        axis=1,
    )


@dataclass(frozen=True, slots=True)
class Correction:
    """A Gaussian process with a squared exponential kernel, reduced to its support.

    Attributes:
        scale: length scale of each coordinate of :func:`shape_coordinates`.
        support: ``(m, 8)`` coordinates, in units of ``scale``.
        weights: ``(m,)``; the correction is ``exp(sum(weights * kernel))``.
        spread: standard deviation of the residuals that it explains: the error of a prediction without it.
    """

    scale: tuple[float, ...]
    support: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    spread: float

    def apply(self, rows: Columns) -> tuple[Array, Array]:
        """Return the logarithm of the factor, and how well each operator is supported (0 to 1); shape ``(n,)``."""
        near = squared_exponential(shape_coordinates(rows) / np.asarray(self.scale), np.asarray(self.support))
        return near @ np.asarray(self.weights), near.max(axis=1)


def squared_exponential(a: Array, b: Array) -> Array:
    """Return the covariance of points, shape ``(len(a), len(b))``: 1 where they are equal."""
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2.0 * a @ b.T
    near: Array = np.exp(-0.5 * np.maximum(squared, 0.0))
    return near


FEATURES = 15
_TILES_CHANNELS, _TILE_PIXELS = (16, 32, 64), 7
_INTERVALS_S = (5e-4, 3e-2)
_HISTORY = 5.0  # scale of the history effect, in octaves
_DOUBTS, _SLOW, _FAST, _LOUDER = 2, 2.5, -4.0, 4.0
_SCALE = 8.0
"""Length scale (octaves). In four calibrations of two cores, scales from 7 to 12 predict models that are kept out, and
their operators, about equally well. Shorter ones predict these worse, even where they predict left-out networks of the
fit better: generated networks are more alike than published ones."""
_FACTORS, _USUAL_FACTOR = (1.0, 2.0, 4.0, 8.0), 1.0
_LEAST_NETWORKS = 3


@dataclass(frozen=True, slots=True)
class Process:
    """A fitted process; used like :class:`~evaluators.cost_model.correction.Correction`.

    Attributes:
        points: features of the measured shapes, one row each.
        weights: their weights in the mean.
        scales: length scale of each feature.
        spread: standard deviation of the residuals that it explains.
        noise: standard deviation of the mean of the measurements of each shape.
        louder: factor by which measurements are noisier than they were declared.
    """

    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    scales: tuple[float, ...]
    spread: float
    noise: tuple[float, ...]
    louder: float = 1.0

    def fits(self) -> bool:
        """Return whether points, weights and scales match each other and this version's features."""
        counts = {len(point) for point in self.points} | {len(self.scales)}
        return counts == {FEATURES} and len(self.points) == len(self.weights) == len(self.noise) > 0

    def apply(self, rows: Columns) -> tuple[Array, Array]:
        """Return the logarithm of the factor, and how well each operator is supported (0 to 1); shape ``(n,)``."""
        known, factor = _factored(self)
        # Sizes beyond the measured range are clipped to it: rates saturate.
        within = np.clip(shape_features(rows) / np.array(self.scales), known.min(axis=0), known.max(axis=0))
        cross = _matern(within, known, self.spread)
        half = solve_triangular(factor, cross.T, lower=True)
        explained = (half**2).sum(axis=0) / self.spread**2
        return cross @ np.array(self.weights), np.sqrt(np.clip(explained, 0.0, 1.0))


def shape_features(rows: Columns) -> Array:
    """Return features of operators, shape ``(n, FEATURES)``: logarithms to base 2, and waste of tiles."""

    def log2(values: Array) -> Array:
        result: Array = np.log2(np.maximum(values, 1.0))
        return result

    depth = rows.macs / np.maximum(rows.pixels * rows.channels, 1.0)  # products for one element of the output
    channels = rows.channels / np.maximum(rows.groups, 1.0)  # of one group, which is multiplied separately
    return np.stack(
        [
            log2(rows.pixels),
            log2(channels),
            log2(np.where(rows.macs > 0, depth, rows.channels_in)),
            log2(rows.taps),
            log2(rows.pixels_in / np.maximum(rows.pixels, 1.0)),
            log2(rows.groups),
            rows.inputs,
            rows.resident / np.maximum(rows.read, 1.0),
            np.log2((rows.read + 64.0) / (rows.written + 64.0)),
            np.where(rows.weight > 0, np.log2(np.clip(rows.interval, *_INTERVALS_S)), 0.0),
            _HISTORY * history_effect(rows.matrix_share),
            *(_left_over(channels, tile) for tile in _TILES_CHANNELS),
            _left_over(rows.pixels, _TILE_PIXELS),
        ],
        axis=1,
    )


def _left_over(values: Array, tile: int) -> Array:
    """Return the ratio of whole tiles to the values, as a logarithm to base 2."""
    result: Array = np.log2(np.ceil(values / tile) * tile / np.maximum(values, 1.0))
    return result


def fit_process(
    rows: Columns,
    residual: Array,
    noise: Array,
    networks: npt.NDArray[np.int64],
    seconds: Array,
    like: Process | None = None,
    *,
    tune: bool = True,
) -> Process:
    """Fit a process to the logarithms of measured over analytic times.

    Args:
        residual: shape ``(n,)``.
        noise: standard deviation of each residual's measurement.
        networks, seconds: as of :func:`louder_noise`.
        like: a process whose scales, spread and factor on the noise are used.
        tune: whether to search for the best factor, which takes a while.
    """
    points = np.round(shape_features(rows), 4)
    scales, spread = np.full(points.shape[1], _SCALE), max(0.05, float(residual.std()))
    if like is not None:
        scales, spread = np.array(like.scales), like.spread
    covariance = _matern(points / scales, points / scales, spread)
    known = networks if tune else networks[:0]
    louder = louder_noise(covariance, residual, noise, known, seconds) if like is None else like.louder
    noise = noise * louder
    noise = _doubted(covariance, residual, noise)
    covariance[np.diag_indices_from(covariance)] += noise**2 + _JITTER
    weights = cho_solve((cholesky(covariance, lower=True), True), residual)
    return Process(
        tuple(tuple(float(v) for v in row) for row in points),
        tuple(float(f"{w:.6g}") for w in weights),
        tuple(round(float(s), 4) for s in scales),
        float(spread),
        tuple(round(float(v), 5) for v in noise),
        float(louder),
    )


def _doubted(covariance: Array, residual: Array, noise: Array) -> Array:
    """Return the noise, increased for measurements that contradict the others, which were probably disturbed.

    A measurement's deviation from its prediction by all others follows from the inverse covariance (Rasmussen and
    Williams 2006, equation 5.12). Disturbed runs are slow, so the threshold is lower for slow ones.
    """
    noise = noise.copy()
    for _ in range(_DOUBTS):
        whole = covariance + np.diag(noise**2 + _JITTER)
        inverse = cho_solve((cholesky(whole, lower=True), True), np.eye(len(noise)))
        off = (inverse @ residual) / np.sqrt(np.diag(inverse))
        noise[(off > _SLOW) | (off < _FAST)] *= _LOUDER
    return noise


def louder_noise(
    covariance: Array, residual: Array, noise: Array, networks: npt.NDArray[np.int64], seconds: Array
) -> float:
    """Return the factor on the noise that predicts left-out networks best.

    The error is that of the sum of a network's operators, and of each. Of fewer than three networks nothing is learnt.

    Args:
        networks: the network of each residual, shape ``(n,)``.
        seconds: time of each operator, shape ``(n,)``.
    """
    where = [np.flatnonzero(networks == network) for network in np.unique(networks)]
    if len(where) < _LEAST_NETWORKS:
        return _USUAL_FACTOR
    losses: dict[float, float] = {}
    for louder in _FACTORS:
        noisy = covariance + np.diag((noise * louder) ** 2 + _JITTER)
        inverse = cho_solve((cholesky(noisy, lower=True), True), np.eye(len(noise)))
        weights = inverse @ residual
        # Errors of operators that are left out together (Rasmussen and Williams 2006, equation 5.12, for blocks).
        errors = [solve(inverse[np.ix_(at, at)], weights[at], assume_a="pos") for at in where]
        pairs = list(zip(where, errors, strict=True))
        losses[louder] = float(np.mean([abs(seconds[at] @ e) / seconds[at].sum() + abs(e).mean() for at, e in pairs]))
    return min(losses, key=losses.__getitem__)


def _matern(a: Array, b: Array, spread: float) -> Array:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    result: Array = spread**2 * (1.0 + distance) * np.exp(-distance)
    return result


@lru_cache(maxsize=512)
def _factored(process: Process) -> tuple[Array, Array]:
    """Return the scaled points and the Cholesky factor of their covariance."""
    known = np.array(process.points) / np.array(process.scales)
    covariance = _matern(known, known, process.spread)
    covariance[np.diag_indices_from(covariance)] += np.array(process.noise) ** 2 + _JITTER
    return known, cholesky(covariance, lower=True)


def together(keys: Sequence[object], logs: Array, noise: float) -> tuple[list[int], Array, Array]:
    """Merge equal shapes: return the first index of each, the mean of its logarithms, and that mean's deviation.

    Args:
        noise: standard deviation of one measurement; half of it is common to all measurements of one shape.
    """
    where: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        where.setdefault(key, []).append(index)
    first = [rows[0] for rows in where.values()]
    mean = np.array([float(np.mean(logs[rows])) for rows in where.values()])
    count = np.array([len(rows) for rows in where.values()])
    return first, mean, noise * np.sqrt(0.25 + 0.75 / count)
