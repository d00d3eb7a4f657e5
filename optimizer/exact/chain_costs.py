"""What a chain of parts costs in an additive model: each part its operators, its overhead and what it is handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform

Seconds = NDArray[np.float64]
Bytes = NDArray[np.float64]
Objective = Literal["latency", "period"]


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """What the parts of a topological order of n operators cost on a platform of P processors, in platform order.

    Attributes:
        platform: the processors, and which of them are alike. Plans that only swap alike lanes are one plan, costed
            with the lanes that its canonical form names; so alike lanes should have equal costs.
        operator_s: shape ``(P, n)``: each operator on each processor; infinite where a processor refuses it.
        overhead_s: shape ``(P,)``: what starting a part adds.
        hand_over_s: shape ``(n, P, P)``: what a cut before operator ``i`` adds between a part on the one processor
            and the next on the other (``[i, from, to]``), in the time of the next one; row 0 is not read.
        operator_nbytes: shape ``(n,)``: what each operator keeps in the memory of its processor; None for nothing.
        memory_bytes: shape ``(P,)``: how much each processor can keep; None for no limit.
        beyond_s: shape ``(P, n+1, n+1)``: what operators ``first … last-1`` as one part add beside the above,
            ``[lane, first, last]``; None for nothing.

    Raises:
        ValueError: a shape does not fit, or a number is no number.
    """

    platform: Platform
    operator_s: Seconds
    overhead_s: Seconds
    hand_over_s: Seconds
    operator_nbytes: Bytes | None = None
    memory_bytes: Bytes | None = None
    beyond_s: Seconds | None = None

    def __post_init__(self) -> None:
        lanes = len(self.platform.processors)
        count = self.operator_s.shape[-1] if self.operator_s.ndim else 0
        for name, array, shape in (
            ("operator_s", self.operator_s, (lanes, count)),
            ("overhead_s", self.overhead_s, (lanes,)),
            ("hand_over_s", self.hand_over_s, (count, lanes, lanes)),
            ("operator_nbytes", self.operator_nbytes, (count,)),
            ("memory_bytes", self.memory_bytes, (lanes,)),
            ("beyond_s", self.beyond_s, (lanes, count + 1, count + 1)),
        ):
            if array is None:
                continue
            if array.shape != shape:
                raise ValueError(f"{name} has the shape {array.shape}, not {shape}")
            if np.isnan(array).any() or np.isneginf(array).any():
                raise ValueError(f"{name} has an entry that is not a number")

    @property
    def limited(self) -> bool:
        """Whether memory can rule a plan out."""
        return self.operator_nbytes is not None and self.memory_bytes is not None


@dataclass(frozen=True, slots=True)
class CostedChain:
    """A chain and its cost in the model; ``chain_plan(graph, cuts, processors)`` is its plan, in canonical form.

    Attributes:
        cuts: the operators before which to cut, ascending.
        processors: the processor of each part.
        cost_s: what the model says it takes: the latency of one inference, or the period of a pipeline.
    """

    cuts: tuple[int, ...]
    processors: tuple[str, ...]
    cost_s: float


def chain_cost(costs: ChainCosts, plan: Plan, objective: Objective = "latency") -> float:
    """Return the seconds that the model gives a plan of consecutive parts: its latency, or its period.

    The latency is the sum over the parts, which run one after another. The period is the time between two inferences
    of a pipeline that is always full: what the busiest processor does in one inference, all its parts taken together;
    processors that exclude each other take turns, so they count as one.
    """
    index = {p.name: i for i, p in enumerate(costs.platform.processors)}
    load_s, before = np.zeros(len(index)), -1
    for stage in plan.stages:
        lane, operators = index[stage.processor], list(stage.operators)
        load_s[lane] += costs.operator_s[lane, operators].sum() + costs.overhead_s[lane]
        if costs.beyond_s is not None:
            load_s[lane] += costs.beyond_s[lane, operators[0], operators[-1] + 1]
        if before >= 0:
            load_s[lane] += costs.hand_over_s[operators[0], before, lane]
        before = lane
    if objective == "latency":
        return float(load_s.sum())
    return max(float(load_s[list(group)].sum()) for group in exclusive_groups(costs.platform))


def exclusive_groups(platform: Platform) -> list[tuple[int, ...]]:
    """Return the largest sets of lanes (indices) of which only one can be busy; each lane is in at least one."""
    lanes = platform.processors
    beside = [{j for j, q in enumerate(lanes) if i != j and p.excludes(q)} for i, p in enumerate(lanes)]
    return sorted(_cliques(beside, [], set(range(len(lanes))), set()))


def concurrent_sets(platform: Platform) -> list[tuple[int, ...]]:
    """Return the largest sets of lanes (indices) that can all be busy at once, two by two."""
    lanes = platform.processors
    beside = [{j for j, q in enumerate(lanes) if i != j and not p.excludes(q)} for i, p in enumerate(lanes)]
    return sorted(_cliques(beside, [], set(range(len(lanes))), set()))


def _cliques(beside: Sequence[set[int]], chosen: list[int], waiting: set[int], done: set[int]) -> list[tuple[int, ...]]:
    """Return the maximal cliques (Bron and Kerbosch 1973, doi:10.1145/362342.362367)."""
    if not waiting and not done:
        return [tuple(sorted(chosen))]
    found = []
    pivot = max(waiting | done, key=lambda v: len(beside[v] & waiting))
    for lane in sorted(waiting - beside[pivot]):
        found += _cliques(beside, [*chosen, lane], waiting & beside[lane], done & beside[lane])
        waiting = waiting - {lane}
        done = done | {lane}
    return found
