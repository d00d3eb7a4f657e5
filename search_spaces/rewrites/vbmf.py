"""The rank of a matrix under noise, with nothing to choose: empirical variational Bayes matrix factorisation.

Nakajima, Sugiyama, Babacan, Tomioka: "Global Analytic Solution of Fully-observed Variational Bayesian Matrix
Factorization", Journal of Machine Learning Research 14 (2013); the equations below are theirs. A matrix is taken to be
a product of two factors plus normal noise; the priors' and the noise's variances come from the matrix itself.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]

_GRID = 400
_REFINEMENTS = 3
_NOISELESS = 1e-12  # of the largest squared singular value: below lies what arithmetic leaves of zero


def evbmf_rank(squared: Array, shape: tuple[int, int]) -> int:
    """Return how many components of a matrix are more than noise; 0 where all is noise.

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

    tau = float(brentq(lambda t: phi(t) + phi(t / alpha), 1e-9, 10.0))
    return (1 + tau) * (1 + alpha / tau)


def _noise_variance(squared: Array, rows: int, columns: int, least: float) -> float:
    """Return the noise variance that makes the matrix most likely: the minimum of the free energy (theorem 3).

    It has one variable and may have several minima, so that a grid is searched, and around its best point finer ones.
    """
    alpha = rows / columns
    most = max(0, math.ceil(rows / (1 + alpha)) - 1)  # components that there can be
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
