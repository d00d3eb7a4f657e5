"""Draws of the costs from a posterior, and the times of plans under each of them.

Draw 0 is the posterior's mean, the others are random. Everything is computed for all draws at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """S draws of the costs of n operators on P processors, in platform order; in seconds.

    Attributes:
        operator_s: shape ``(S, P, n)``; infinite where a processor refuses the operator.
        together_s: shape ``(S, P, n)``: added for an operator whose predecessor in the order is in its stage.
        overhead_s: shape ``(S, P)``: cost of starting a stage.
        entering_s: shape ``(S, n, P, P)``: added for the first operator of a stage on the second processor after a
            stage on the first one.
        transfer_s: shape ``(S, n, P, P)``: from the end of a stage to the start of one that begins with the operator.
    """

    operator_s: _Seconds
    together_s: _Seconds
    overhead_s: _Seconds
    entering_s: _Seconds
    transfer_s: _Seconds

    def __len__(self) -> int:
        return len(self.operator_s)

    def only(self, first: int, last: int) -> Draws:
        """Return the draws ``first … last - 1``."""
        return Draws(*(getattr(self, f.name)[first:last] for f in fields(self)))


def cheapest_chains(draws: Draws, max_stages: int) -> list[tuple[list[int], list[int]]]:
    """Return for each draw cuts and processors of the cheapest chain whose stages run one after another.

    Dynamic programming over the operators; state: the number of stages so far, and the processor. ``n`` steps of
    ``S · max_stages · P²`` additions.
    """
    count_draws, processors, count = draws.operator_s.shape
    stay = draws.operator_s + draws.together_s
    cut = (draws.entering_s + draws.transfer_s).transpose(1, 0, 2, 3)  # [operator, draw, from, to]
    cost = np.full((count_draws, max_stages, processors), np.inf)
    cost[:, 0] = draws.operator_s[:, :, 0] + draws.overhead_s
    came = np.full((count, count_draws, max_stages, processors), -1, dtype=np.int8)  # the processor before a cut, or -1
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
        part, processor = divmod(int(cost[draw].argmin()), processors)
        cuts, used = [], [processor]
        for operator in range(count - 1, 0, -1):
            previous = int(came[operator, draw, part, processor])
            if previous >= 0:
                cuts.append(operator)
                used.append(previous)
                part, processor = part - 1, previous
        found.append((cuts[::-1], used[::-1]))
    return found
