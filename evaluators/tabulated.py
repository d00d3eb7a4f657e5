"""The tables that an evaluator computes latencies from: what is proven on them is a bound on what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PartCosts:
    """What parts of consecutive operators of a graph cost on P lanes, in platform order; n operators.

    Attributes:
        operator_s: shape ``(P, n)``; infinite where a lane does not take an operator.
        overhead_s: of each part, shape ``(P,)``.
        beyond_s: what operators ``first … last-1`` as one part take beside, ``[lane, first, last]``, shape
            ``(P, n+1, n+1)``; not negative.
        hand_over_s: what a cut before operator ``i`` usually adds between a part on the one lane and the next on the
            other, ``[i, from, to]``, shape ``(n, P, P)``; row 0 is not read.
        least_hand_over_s: what it adds at least where the second part reads from the first, whichever parts they are.
        operator_nbytes: what each operator keeps in memory, shape ``(n,)``; None for nothing.
        memory_bytes: of each lane, shape ``(P,)``; None for no limit.
    """

    operator_s: Table
    overhead_s: Table
    beyond_s: Table
    hand_over_s: Table
    least_hand_over_s: Table
    operator_nbytes: Table | None = None
    memory_bytes: Table | None = None
