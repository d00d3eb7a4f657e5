"""Tucker-2: a filter as two matrices on its channel axes and a smaller filter between them.

De Lathauwer, De Moor, Vandewalle: "A Multilinear Singular Value Decomposition" (HOSVD) and "On the Best Rank-1 and
Rank-(R1, R2, …, RN) Approximation of Higher-Order Tensors" (HOOI), SIAM J. Matrix Anal. Appl. 21 (2000). For
convolutions: Kim et al. 2016, arXiv:1511.06530.

Singular vectors of an unfolding are eigenvectors of its Gram matrix, which has one row per channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OUTPUTS, INPUTS = 0, 3
"""Axes of a filter, which is ``(outputs, height, width, inputs)``."""

_SWEEPS = 8
_GAIN = 1e-5  # of the filter's energy: a sweep that finds less is the last one


@dataclass(frozen=True, slots=True)
class Factors:
    """A filter ``(O, h, w, I)`` as three: ``last · core · first``.

    Attributes:
        first: shape ``(r_in, I)``, rows orthonormal.
        core: shape ``(r_out, h, w, r_in)``.
        last: shape ``(O, r_out)``, columns orthonormal.
    """

    first: Array
    core: Array
    last: Array

    def whole(self) -> Array:
        """Return the filter that the three stand for."""
        return _times(_times(self.core, self.last.T, OUTPUTS), self.first, INPUTS)


def spectrum(kernel: Array, axis: int) -> Array:
    """Return the squared singular values of a filter's unfolding along a channel axis, descending; one a channel."""
    found: Array = np.maximum(np.linalg.eigvalsh(_gram(kernel, axis))[::-1], 0.0).astype(np.float64)
    return found


def factor(kernel: Array, inputs: int, outputs: int, *, sweeps: int = _SWEEPS) -> Factors:
    """Return a filter's factors of the given ranks: HOSVD, made better by HOOI sweeps while they find more.

    Args:
        kernel: shape ``(O, h, w, I)``.
        inputs, outputs: ranks, from 1 to the channels.
        sweeps: at most; 0 for HOSVD alone.
    """
    first = _leading(_gram(kernel, INPUTS), inputs)
    last = _leading(_gram(kernel, OUTPUTS), outputs)
    core = _times(_times(kernel, first, INPUTS), last, OUTPUTS)
    energy = float((kernel**2).sum())
    held = float((core**2).sum())
    for _ in range(sweeps):
        if held >= energy * (1 - _GAIN):
            break
        last_of = _times(kernel, last, OUTPUTS)
        better_first = _leading(_gram(last_of, INPUTS), inputs)
        first_of = _times(kernel, better_first, INPUTS)
        better_last = _leading(_gram(first_of, OUTPUTS), outputs)
        better = _times(first_of, better_last, OUTPUTS)
        now = float((better**2).sum())
        if now <= held:
            break
        first, last, core, gained, held = better_first, better_last, better, now - held, now
        if gained < energy * _GAIN:
            break
    return Factors(first.T, core, last)


def _gram(kernel: Array, axis: int) -> Array:
    rows = np.moveaxis(kernel, axis, 0).reshape(kernel.shape[axis], -1)
    product: Array = rows @ rows.T
    return product


def _leading(gram: Array, count: int) -> Array:
    """Return the eigenvectors of the largest eigenvalues as columns; of each, the largest entry is positive."""
    vectors: Array = np.linalg.eigh(gram)[1][:, ::-1][:, :count]
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(count)]
    return vectors * np.where(largest < 0, -1.0, 1.0)


def _times(kernel: Array, matrix: Array, axis: int) -> Array:
    """Multiply an axis of ``n`` entries by a matrix ``(n, m)``, so that it has ``m``."""
    product: Array = np.moveaxis(np.tensordot(kernel, matrix, axes=(axis, 0)), -1, axis)
    return product
