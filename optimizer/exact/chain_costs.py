"""Costs of a chain of stages in an additive model: operators, overheads and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan

Seconds = NDArray[np.float64]
Bytes = NDArray[np.float64]
ChainObjective = Literal["latency", "period"]

NEVER_S = 1e15
"""Seconds of an unsupported operator where times are multiplied by 0: infinity would give NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCosts:
    """Costs of n operators on P processors, in platform order.

    Attributes:
        platform: the processors, and which of them are alike. Plans that only swap alike processors are one plan,
            costed with the processors that its canonical form names; so alike processors should have equal costs.
        operator_s: shape ``(P, n)``: each operator on each processor; infinite if it is not supported there.
        overhead_s: shape ``(P,)``: the seconds that each stage adds.
    """

    platform: Platform
    operator_s: Seconds
    overhead_s: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts(OperatorCosts):
    """Costs of stages of a topological order of the operators.

    Attributes:
        transfer_s: shape ``(n, P, P)``: the seconds that a cut before operator ``i`` adds to the stage after it
            (``[i, from, to]``); row 0 is not read.
        operator_nbytes: shape ``(n,)``: bytes that each operator keeps on its processor; None for none.
        memory_bytes: shape ``(P,)``: capacity of each processor; None for no limit.
        beyond_s: shape ``(P, n+1, n+1)``: the seconds that operators ``first … last-1`` as one stage add to the above,
            ``[processor, first, last]``; None for nothing.

    Raises:
        ValueError: a shape does not fit, or a value is NaN.
    """

    transfer_s: Seconds
    operator_nbytes: Bytes | None = None
    memory_bytes: Bytes | None = None
    beyond_s: Seconds | None = None

    def __post_init__(self) -> None:
        processors = len(self.platform.processors)
        count = self.operator_s.shape[-1] if self.operator_s.ndim else 0
        for name, array, shape in (
            ("operator_s", self.operator_s, (processors, count)),
            ("overhead_s", self.overhead_s, (processors,)),
            ("transfer_s", self.transfer_s, (count, processors, processors)),
            ("operator_nbytes", self.operator_nbytes, (count,)),
            ("memory_bytes", self.memory_bytes, (processors,)),
            ("beyond_s", self.beyond_s, (processors, count + 1, count + 1)),
        ):
            if array is None:
                continue
            if array.shape != shape:
                raise ValueError(f"{name} has the shape {array.shape}, not {shape}")
            if np.isnan(array).any() or np.isneginf(array).any():
                raise ValueError(f"{name} has an entry that is not a number")


@dataclass(frozen=True, slots=True)
class CostedChain:
    """A chain and its cost in the model.

    Attributes:
        cuts: the operators before which to cut, ascending.
        processors: the processor of each stage.
        cost_s: the latency of one inference under the model, or the period of a pipeline.
    """

    cuts: tuple[int, ...]
    processors: tuple[str, ...]
    cost_s: float

    def plan(self, graph: Graph) -> Plan:
        """Return the plan of a graph that runs like this, in canonical form."""
        return chain_plan(graph, self.cuts, self.processors)


def chain_cost(costs: ChainCosts, plan: Plan, objective: ChainObjective = "latency") -> float:
    """Return the model's seconds of a plan of consecutive stages: its latency, or its period.

    The latency is the sum over the stages, which run one after another. The period is the time between two inferences
    of a pipeline that is always full: the work of the busiest processor in one inference; processors that exclude each
    other take turns, so they count as one.
    """
    index = {p.name: i for i, p in enumerate(costs.platform.processors)}
    load_s, before = np.zeros(len(index)), -1
    for stage in plan.stages:
        processor, operators = index[stage.processor], list(stage.operators)
        load_s[processor] += costs.operator_s[processor, operators].sum() + costs.overhead_s[processor]
        if costs.beyond_s is not None:
            load_s[processor] += costs.beyond_s[processor, operators[0], operators[-1] + 1]
        if before >= 0:
            load_s[processor] += costs.transfer_s[operators[0], before, processor]
        before = processor
    if objective == "latency":
        return float(load_s.sum())
    return max(float(load_s[list(group)].sum()) for group in exclusive_groups(costs.platform))


def weighed(costs: ChainCosts, weights: Mapping[str, float], *, idle: bool = False) -> ChainCosts:
    """Return costs in another unit: each processor's seconds times its weight.

    Energy, processor time and the load of the busiest processor count work and no idle time, so transfers that keep no
    processor busy are left out; costs without them are a bound.

    Args:
        weights: of each processor, by name: watts, or how many cores it takes.
        idle: keep the transfers, weighed as the processor that receives.
    """
    factor = np.array([weights[p.name] for p in costs.platform.processors])
    return replace(
        costs,
        operator_s=costs.operator_s * factor[:, None],
        overhead_s=costs.overhead_s * factor,
        transfer_s=costs.transfer_s * factor if idle else np.zeros_like(costs.transfer_s),
        beyond_s=None if costs.beyond_s is None else costs.beyond_s * factor[:, None, None],
    )


def exclusive_groups(platform: Platform) -> list[tuple[int, ...]]:
    """Return the largest sets of processors (indices) of which only one can be busy; they cover all processors."""
    return _largest_sets(platform, excluding=True)


def concurrent_sets(platform: Platform) -> list[tuple[int, ...]]:
    """Return the largest sets of processors (indices) of which any two can be busy at once."""
    return _largest_sets(platform, excluding=False)


def _largest_sets(platform: Platform, *, excluding: bool) -> list[tuple[int, ...]]:
    """Return the maximal cliques of processors that exclude each other, or of those that do not."""
    import networkx as nx

    pairs = combinations(enumerate(platform.processors), 2)
    graph: nx.Graph[int] = nx.Graph((i, j) for (i, a), (j, b) in pairs if a.excludes(b) == excluding)
    graph.add_nodes_from(range(len(platform.processors)))
    return sorted(tuple(sorted(group)) for group in nx.find_cliques(graph))


def busy_with(platform: Platform) -> tuple[tuple[int, ...], ...]:
    """Return for each processor (index) those that are busy while it runs, itself included."""
    processors = platform.processors
    return tuple(tuple(j for j, b in enumerate(processors) if a is b or a.excludes(b)) for a in processors)
