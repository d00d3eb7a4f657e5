"""Violated constraints, as data: demand, supply, and what the user can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.core.errors import InfeasibleError

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that no plan keeps, or that one plan breaks.

    Attributes:
        statement: what is limited, in words: ``memory of 'npu0'``.
        demand: the least that is needed, in ``unit``.
        bound: the most that is available.
        unit: ``B``, ``s``, ``stages``, …; amounts are shown with SI prefixes.
        lever: what the user can change so that it fits.
        sentence: the violation in words, with ``{demand}`` and ``{bound}``.
    """

    statement: str
    demand: float
    bound: float
    unit: str
    lever: str
    sentence: str = ""

    @property
    def gap(self) -> float:
        """By how much the demand exceeds the bound; at most 0 where it fits."""
        return self.demand - self.bound

    def __str__(self) -> str:
        demand, bound = (_amount(value, self.unit) for value in (self.demand, self.bound))
        if self.sentence:
            return self.sentence.replace("{demand}", demand).replace("{bound}", bound)
        return f"{self.statement}: {demand} needed, {bound} available"

    def to_json(self) -> dict[str, Any]:
        """Return the violation as plain values."""
        names = ("statement", "demand", "bound", "gap", "unit", "lever")
        return {name: getattr(self, name) for name in names}


def infeasible(first: Violation, *others: Violation) -> InfeasibleError:
    """Return the error for violated constraints, with the advice for the first; it carries all as ``violations``."""
    violations = (first, *others)
    return InfeasibleError("; ".join(map(str, violations)), first.lever, violations)


def _amount(value: float, unit: str) -> str:
    if unit == "s" and abs(value) < 1.0:
        return f"{value * 1e3:.4g} ms"
    if unit == "B":
        for factor, prefix in _PREFIXES:
            if abs(value) >= factor:
                return f"{value / factor:.4g} {prefix}B"
    if unit == "J" and abs(value) < 1.0:
        return f"{value * 1e3:.4g} mJ"
    if unit == "relative":
        return f"{value:.3g}"
    return f"{value:.6g} {unit.removesuffix('s') if value == 1.0 else unit}"
