"""What a study of co-execution believes before it measures: the best plan by the model, and baselines."""

from __future__ import annotations

from collections.abc import Callable

from optimizer.baselines import Baseline, baselines
from optimizer.bounds import Beliefs, Bounds
from optimizer.exact.bound import relax
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.coexecution import CoexecutionModel
from search_spaces.coexecution import CoexecutionSpace
from search_spaces.errors import PlanError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

GREEDY = "CoDL's greedy chains"
SINGLE = "operators split one by one"
CHAINS = "chains split"
BRANCHES = "branches side by side"


def coexecution_beliefs(graph: Graph, costs: ChainCosts, space: CoexecutionSpace) -> Beliefs:
    """Return what is believed: the optimum of the model, which no plan of the space goes below in it."""
    best = CoexecutionModel(space, costs).best()
    # As if each operator could be split: none of the space is faster, and where one cannot the bound is a little low.
    bounds = Bounds(best.cost_s, True, relax(graph, costs, range(len(graph.operators))), own=False)
    return Beliefs(costs, (space.plan(best.parts),), bounds)


def coexecution_baselines(
    graph: Graph, platform: Platform, space: CoexecutionSpace, costs: ChainCosts, fastest: str
) -> tuple[Baseline, ...]:
    """Return the baselines of chains, CoDL's procedure (seed 002), and the best splits of one operator each.

    Of a model with branches also the best plans by the model that only split, and only run branches side by side.
    """
    model = CoexecutionModel(space, costs)
    found = {b.plan.digest: b for b in baselines(graph, platform, fastest)}
    pure = [(GREEDY, model.greedy()), (SINGLE, model.best(chains=False, branches=False))]
    if space.groups:
        pure += [(CHAINS, model.best(branches=False)), (BRANCHES, model.best(splits=False))]
    for name, costed in pure:
        plan = space.plan(costed.parts)
        found.setdefault(plan.digest, Baseline(name, plan))
    return tuple(found.values())


def coexecution_price(space: CoexecutionSpace, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return what tells the seconds that the model gives a plan."""
    model = CoexecutionModel(space, costs)

    def price(plan: Plan) -> float:
        try:
            return model.price(plan)
        except PlanError:
            return chain_cost(costs, plan)

    return price
