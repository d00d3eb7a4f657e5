"""Costs of chains for other objectives than the latency: energy, processor time, the load of the busiest processor.

They count the work of processors and no idle time, so transfers that keep no processor busy are left out; costs without
them are a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from optimizer.exact.chain import chains_in_order
from optimizer.exact.chain_costs import ChainCosts, ChainObjective
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import chain_plan

_MOST_PRICED = 100
_HAIR = 1e-12


@dataclass(frozen=True, slots=True)
class LeastPlan:
    """The best plan that is known.

    Attributes:
        value: its cost.
        bound: no chain costs less.
    """

    plan: Plan
    value: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether there is no better one."""
        return self.value <= self.bound * (1 + 1e-9)


def weighed(costs: ChainCosts, weights: Mapping[str, float], *, idle: bool = False) -> ChainCosts:
    """Return costs in another unit: each processor's seconds times its weight.

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


def least_plan(
    graph: Graph,
    costs: ChainCosts,
    price: Callable[[Plan], float],
    max_stages: int,
    objective: ChainObjective,
    stop_s: float,
) -> LeastPlan:
    """Return the plan that an evaluator prices lowest; plans are priced in ascending order of their bounds.

    The whole graph on each processor is priced first, as the answer if time is up before the first chain is found.

    Args:
        costs: a bound on the evaluator's cost, by ``objective``: ``latency`` for a sum over the stages.
        price: the evaluator's cost of a plan; infinite if the plan is not supported.
        stop_s: the monotonic time at which to return the best plan that is known.

    Raises:
        InfeasibleError: no chain fits.
    """
    wholes = [chain_plan(graph, (), [processor.name]) for processor in costs.platform.processors]
    best = min(((price(plan), plan) for plan in wholes), key=itemgetter(0))
    bound, left = 0.0, _MOST_PRICED
    try:
        for chain in chains_in_order(costs, max_stages, _MOST_PRICED, objective=objective, stop_s=stop_s):
            left -= 1
            bound = chain.cost_s
            if bound >= best[0] * (1 - _HAIR):
                return LeastPlan(best[1], best[0], best[0])
            plan = chain_plan(graph, chain.cuts, chain.processors)
            found = price(plan)
            if found < best[0]:
                best = found, plan
    except UnavailableError:
        left = 0
    if not np.isfinite(best[0]):
        raise InfeasibleError(f"no chain of at most {max_stages} stages runs on {costs.platform.name!r}")
    return LeastPlan(best[1], best[0], min(best[0], bound) if not left else best[0])
