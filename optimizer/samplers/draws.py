"""Costs that a posterior holds possible, side by side, and what plans take under each of them.

Draw 0 is the posterior's mean, the others are random. Everything is computed for all draws at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """S draws of what n operators cost on P processors, in platform order; in seconds.

    Attributes:
        operator_s: shape ``(S, P, n)``; infinite where a processor refuses the operator.
        together_s: shape ``(S, P, n)``: what an operator takes more where its predecessor in the order is in its part.
        overhead_s: shape ``(S, P)``: what starting a part adds.
        entering_s: shape ``(S, n, P, P)``: what an operator takes more as the first of a part on the second processor
            after a part on the first one.
        hand_over_s: shape ``(S, n, P, P)``: from the end of a part to the start of one that begins with the operator.
    """

    operator_s: _Seconds
    together_s: _Seconds
    overhead_s: _Seconds
    entering_s: _Seconds
    hand_over_s: _Seconds

    def __len__(self) -> int:
        return len(self.operator_s)

    def only(self, first: int, last: int) -> Draws:
        """Return the draws ``first … last - 1``."""
        return Draws(*(getattr(self, f.name)[first:last] for f in fields(self)))


def cheapest_chains(draws: Draws, max_stages: int) -> list[tuple[list[int], list[int]]]:
    """Return for each draw the cuts and the lanes of the cheapest chain of parts that run one after another.

    Dynamic programming over the operators; state: how many parts so far, and the lane. ``n`` steps of
    ``S · max_stages · P²`` additions.
    """
    count_draws, lanes, count = draws.operator_s.shape
    stay = draws.operator_s + draws.together_s
    cut = (draws.entering_s + draws.hand_over_s).transpose(1, 0, 2, 3)  # [operator, draw, from, to]
    cost = np.full((count_draws, max_stages, lanes), np.inf)
    cost[:, 0] = draws.operator_s[:, :, 0] + draws.overhead_s
    came = np.full((count, count_draws, max_stages, lanes), -1, dtype=np.int8)  # the lane before a cut, or -1
    for operator in range(1, count):
        on = cost + stay[:, None, :, operator]
        if max_stages > 1:
            options = cost[:, :-1, :, None] + cut[operator][:, None]
            before = options.argmin(axis=2)
            new = options.min(axis=2) + (draws.operator_s[:, :, operator] + draws.overhead_s)[:, None]
            better = new < on[:, 1:]
            came[operator, :, 1:][better] = before[better]
            on[:, 1:] = np.where(better, new, on[:, 1:])
        cost = on
    found = []
    for draw in range(count_draws):
        part, lane = divmod(int(cost[draw].argmin()), lanes)
        cuts, used = [], [lane]
        for operator in range(count - 1, 0, -1):
            previous = int(came[operator, draw, part, lane])
            if previous >= 0:
                cuts.append(operator)
                used.append(previous)
                part, lane = part - 1, previous
        found.append((cuts[::-1], used[::-1]))
    return found
