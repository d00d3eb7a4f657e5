"""What the sum of terms misses: how a shape falls onto a kernel's blocks and a device's units, learned from neighbours.

The logarithm of measured over predicted time is smooth over the logarithms of a shape's sizes (slices of four channels,
pixels, filter). A Gaussian process over them corrects near what was measured and fades away from it, where the sum of
terms stands alone; how near the nearest support lies tells how much a prediction is to be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evaluators.cost_model.columns import Array, Columns

NOISE = 0.1  # variance of one residual over that of the process
_JITTER = 1e-6


def shape_coordinates(rows: Columns) -> Array:
    """Return where operators lie in the space of shapes, shape ``(n, 8)``; a unit is a factor of e."""
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
        scale: length of each coordinate of :func:`shape_coordinates`.
        support: ``(m, 8)`` coordinates, in units of ``scale``.
        weights: ``(m,)``; the correction is ``exp(sum(weights * kernel))``.
        spread: standard deviation of the residuals that it explains: how wrong a prediction without it is.
    """

    scale: tuple[float, ...]
    support: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    spread: float

    def apply(self, rows: Columns) -> tuple[Array, Array]:
        """Return the logarithm of the factor, and how well each operator is supported (0 to 1); shape ``(n,)``."""
        near = _kernel(shape_coordinates(rows) / np.asarray(self.scale), np.asarray(self.support))
        return near @ np.asarray(self.weights), near.max(axis=1)


def fit_correction(rows: Columns, residual: Array, *, most: int = 160) -> Correction | None:
    """Fit the logarithm of measured over predicted time; None where there is too little to learn from.

    Args:
        residual: shape ``(n,)``.
        most: points of support; of more shapes, those that lie farthest apart are taken.
    """
    points = shape_coordinates(rows)
    spread = float(residual.std())
    if len(residual) < 8 or spread <= 0.0:
        return None
    scale = points.std(axis=0)
    scale = np.where(scale > 1e-6, np.round(scale, 4), 1.0)
    points = np.round(points / scale, 3)
    shapes, which, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    mean = np.bincount(which, residual) / counts
    support = shapes[_far_apart(shapes, most)]
    near, among = _kernel(shapes, support), _kernel(support, support)
    # Subset of regressors: with all shapes as support this is the exact process.
    precision = near.T @ (near * (counts / NOISE)[:, None]) + among + _JITTER * np.eye(len(support))
    weights = np.linalg.solve(precision, near.T @ (mean * counts / NOISE))
    return Correction(
        scale=tuple(float(s) for s in scale),
        support=tuple(tuple(float(v) for v in point) for point in support),
        weights=tuple(float(f"{w:.5g}") for w in weights),
        spread=round(spread, 4),
    )


def _kernel(a: Array, b: Array) -> Array:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2.0 * a @ b.T
    near: Array = np.exp(-0.5 * np.maximum(squared, 0.0))
    return near


def _far_apart(points: Array, most: int) -> list[int]:
    """Return the indices of at most ``most`` points, each the farthest from those before it."""
    chosen = [int(((points - points.mean(axis=0)) ** 2).sum(1).argmin())]
    distance = ((points - points[chosen[0]]) ** 2).sum(1)
    while len(chosen) < min(most, len(points)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(1))
    return chosen
