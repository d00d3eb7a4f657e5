"""What a solver found, and how far it can be from the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

Found = TypeVar("Found")

PROVEN = 1e-5  # largest gap that is due to rounding to the integers of CP-SAT


@dataclass(frozen=True, slots=True)
class Solution(Generic[Found]):
    """The best that was found, and a lower bound.

    Attributes:
        best: a plan, or the device of each operator.
        value: its cost in the model, as seconds.
        bound: nothing costs less.
        wall_s: seconds that solving took.
        rounding: relative difference that is due to rounding alone.
    """

    best: Found
    value: float
    bound: float
    wall_s: float = 0.0
    rounding: float = 1e-9

    @property
    def gap(self) -> float:
        """How far the value can be above the best one, relative to the bound."""
        return relative_gap(self.value, self.bound)

    @property
    def proven(self) -> bool:
        """Whether there is nothing better, up to rounding."""
        return self.value <= self.bound * (1 + self.rounding)


def relative_gap(value: float, bound: float) -> float:
    """Return how far a value can be above the best one, relative to the lower bound."""
    return value / bound - 1.0 if bound > 0 else 0.0 if value == 0 else math.inf
