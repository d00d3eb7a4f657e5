"""Estimated times of every way to run a part, whole or shared, on all processors at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, Seconds
from optimizer.exact.shared_costs import Ints, Shared
from search_spaces.core.platform import Platform
from search_spaces.rewrites.splits import Axis

Known = Sequence[tuple[float, float]]
Key = tuple[int, int, str, str]


class Pairs(NamedTuple):
    """Pairs of processors that run parts together; a processor and itself runs them alone.

    Attributes:
        names: P of them.
        first, second: shape ``(P,)``: the processors' indices in the platform.
        near: shape ``(P,)``: whether both share a memory, so that rows are in place.
    """

    names: tuple[tuple[str, str], ...]
    first: Ints
    second: Ints
    near: NDArray[np.bool_]


def pairs_of(platform: Platform, names: Iterable[tuple[str, str]]) -> Pairs:
    """Return pairs of processors as arrays."""
    listed = tuple(names)
    place = {p.name: i for i, p in enumerate(platform.processors)}
    found = np.array([(place[a], place[b]) for a, b in listed], dtype=np.int64).reshape(-1, 2)
    near = np.array([all(platform[name].kind == "cpu" for name in pair) for pair in listed], dtype=np.bool_)
    return Pairs(listed, found[:, 0], found[:, 1], near)


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Parts that begin with one operator, R of them, each on P pairs of processors.

    Attributes:
        how: how they are shared, or None for whole ones.
        lasts, cuts: shape ``(R,)``.
        first_s, second_s: shape ``(R, P)``: seconds of each side, its join included.
    """

    first: int
    how: Axis | None
    lasts: Ints
    cuts: Ints
    pairs: Pairs
    first_s: Seconds
    second_s: Seconds

    def least(self, transfer_s: Seconds, before: int | None) -> tuple[float, int]:
        """Return the least seconds of a part after the one before it, and its index.

        Args:
            transfer_s: shape ``(processors, processors)``: transfers to these parts.
            before: the processor on which the part before them ended.
        """
        total_s = self.total_s(transfer_s, before)
        at = int(total_s.argmin())
        return float(total_s.flat[at]), at

    def total_s(self, transfer_s: Seconds, before: int | None) -> Seconds:
        """Return the seconds of the parts after the one before them, shape ``(R, P)``."""
        a, b = self.pairs.first, self.pairs.second
        if before is None:
            return np.maximum(self.first_s, self.second_s + transfer_s[a, b])
        total_s: Seconds = np.maximum(self.first_s + transfer_s[before, a], self.second_s + transfer_s[before, b])
        return total_s


@dataclass(frozen=True, slots=True, eq=False)
class PartEstimates:
    """Estimates of parts, beside the times of their operators.

    Attributes:
        transfer_s: as in :class:`~optimizer.exact.chain_costs.ChainCosts`; 0 within a processor.
        corrections, usual: as in :class:`~optimizer.exact.segment_model.SegmentModel`; corrections by the first
            operator of their parts.
        slice_s, join_s: seconds for a copied byte.
    """

    costs: ChainCosts
    transfer_s: Seconds
    corrections: Mapping[int, Mapping[Key, Known]]
    usual: Mapping[str, float]
    slice_s: float
    join_s: float

    def whole(self, first: int, lasts: Ints, processors: Pairs, rest_s: Seconds) -> Ways:
        """Return the seconds of whole parts on processors, with the rest of the plan.

        Args:
            rest_s: shape ``(operators + 1, processors)``: of the rest, by the end of a part and its processor.
        """
        seconds = np.cumsum(self.costs.operator_s[:, first : int(lasts[-1])], axis=1)[:, lasts - first - 1].T
        taken_s = (
            self._corrected(first, "whole", lasts, seconds)[:, processors.first] + rest_s[lasts][:, processors.first]
        )
        return Ways(first, None, lasts, np.zeros_like(lasts), processors, taken_s, taken_s)

    def shared(self, shared: Shared, pairs: Pairs, rest_s: Seconds) -> Ways:
        """Return the seconds of shared parts on pairs of processors, with the rest of the plan."""
        a, b = pairs.first, pairs.second
        back_s = self.transfer_s[shared.lasts - 1][:, b, a]
        behind_s = rest_s[shared.lasts][:, a]
        sides_s = self._sides_s(shared, self.slice_s)
        first_s, second_s = sides_s[0][:, a], sides_s[1][:, b]
        stays = pairs.near & (shared.how == "height")
        if self.slice_s > 0.0 and stays.any():
            sides_s = self._sides_s(shared, 0.0)
            first_s = np.where(stays, sides_s[0][:, a], first_s)
            second_s = np.where(stays, sides_s[1][:, b], second_s)
        stays = stays | (self.slice_s == 0.0)
        nbytes = np.where(stays, shared.given_nbytes[:, None], shared.joined_nbytes[:, None])
        behind_s = behind_s + back_s + nbytes * self.join_s
        how, lasts, cuts = shared.how, shared.lasts, shared.cuts
        return Ways(shared.first, how, lasts, cuts, pairs, first_s + behind_s, second_s + behind_s)

    def _sides_s(self, shared: Shared, slice_s: float) -> Seconds:
        """Return the seconds of each side on each processor, shape ``(2, R, L)``."""
        own_s = (shared.seconds + shared.sliced_nbytes[..., None] * slice_s).swapaxes(0, 1)
        return np.array([self._corrected(shared.first, shared.how, shared.lasts, side) for side in own_s])

    def _corrected(self, first: int, how: str, lasts: Ints, own_s: Seconds) -> Seconds:
        """Return the corrected seconds of parts with their start, shape ``(R, L)``."""
        overhead_s = self.costs.overhead_s
        found = own_s * self.usual.get(how, 1.0) + overhead_s
        place = {p.name: i for i, p in enumerate(self.costs.platform.processors)}
        for (_, last, split, processor), known in self.corrections.get(first, {}).items():
            if split != how:
                continue
            rows, at = slice(*np.searchsorted(lasts, (last, last + 1))), place[processor]
            model_s, factors = np.array(known).T
            factor = np.interp(own_s[rows, at] + overhead_s[at], model_s, factors)
            found[rows, at] = own_s[rows, at] * factor + overhead_s[at]
        return found


def by_first(corrections: Mapping[Key, Known]) -> dict[int, dict[Key, Known]]:
    """Return corrections by the operator that parts begin with."""
    found: dict[int, dict[Key, Known]] = {}
    for key, known in corrections.items():
        found.setdefault(key[0], {})[key] = known
    return found
