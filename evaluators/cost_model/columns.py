"""Features of many operators as arrays, for arithmetic on all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    interval: Array  # seconds between two uses of the same weights; 0 where unknown
    duty: Array  # share of the time just before that matrix products took

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
            f.interval_s,
            f.duty,
        )
        for f in features
    ]
    return Columns(*np.asarray(rows, dtype=np.float64).reshape(len(rows), 14).T)
