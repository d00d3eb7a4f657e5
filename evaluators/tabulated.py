"""Evaluators that know beforehand what they will say: sessions that tell their costs, and where the model comes from.

A session that computes its latencies from tables need not be asked operator by operator, and what is proven on its
tables is a bound on what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from search_spaces.graph import Graph

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


@runtime_checkable
class Tabulated(Protocol):
    """A session that computes latencies, always the same for a plan.

    Where each part of a plan reads from the one before it, the latency is the sum over the parts and at least the
    least hand-overs between them; where parts overlap, it is at least that of the longest path through the parts.
    """

    def part_costs(self, graph: Graph) -> PartCosts:
        """Return the costs of a graph on the session's platform.

        Raises:
            UnavailableError: there are none of this graph.
        """
        ...


@runtime_checkable
class GraphSource(Protocol):
    """An evaluator that brings the model, too."""

    def graph_of(self, source: str) -> Graph:
        """Return the model that a person named.

        Raises:
            UsageError: there is none.
        """
        ...
