"""What a study believes of an objective where plans are no chains: branches side by side, and split operators.

What lanes do adds up whatever the shape of a plan: energy and processor time to a sum, a stream's period to the load of
the busiest lane. So nothing is gained there by working side by side, and the optimum of a sum lies among plans without
splits: a split costs a mean of what its two lanes would cost, and one more start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog

from evaluators.objectives import PricedSession
from optimizer.bounds import Beliefs
from optimizer.branches import best_near, branch_beliefs, branch_starts, predictor
from optimizer.exact.chain_costs import ChainCosts, chain_cost, exclusive_groups
from optimizer.exact.chain_costs import Objective as Law
from optimizer.objective import ObjectiveModel, bounds_at
from optimizer.profile import Profile
from search_spaces.branch_space import BranchSpace
from search_spaces.graph import Graph
from search_spaces.plan import Plan

NonChain = BranchSpace


def latency_price(graph: Graph, space: object, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return what tells the seconds that the model gives a plan of a space."""
    return predictor(graph, space, costs) if isinstance(space, BranchSpace) else lambda plan: chain_cost(costs, plan)


def sum_price(costs: ChainCosts, law: Law = "latency") -> Callable[[Plan], float]:
    """Return what tells what the lanes of a plan do, all together or the busiest one.

    Args:
        costs: weighed, without hand-overs.
        law: ``latency`` for the sum.
    """
    plain = replace(costs, beyond_s=None)  # stages need not be consecutive
    return lambda plan: chain_cost(plain, plan, law)


def objective_price(model: ObjectiveModel, space: object) -> Callable[[Plan], float]:
    """Return what the model says of plans of a space, in the objective's unit."""
    if not isinstance(space, NonChain) or model.objective.law == "memory":
        return model.predict
    if model.objective.law == "latency":
        return latency_price(model.graph, space, model.costs)
    return sum_price(model.costs, model.law)


def space_beliefs(model: ObjectiveModel, session: PricedSession, space: NonChain, profiled: Profile) -> Beliefs:
    """Return what is believed of an objective before anything is measured.

    Raises:
        InfeasibleError: no plan fits.
    """
    graph, platform = model.graph, model.costs.platform
    if model.objective.law == "latency":
        return branch_beliefs(graph, session.inner, profiled, platform, space)
    own, price = session.capabilities.costs, objective_price(model, space)
    plan, is_least = best_near(space, price, branch_starts(space, profiled.costs(platform), profiled.fastest(platform)))
    least = 0.0 if model.objective.law == "memory" else least_work(model.costs, model.law)
    if is_least and not own:
        least = price(plan)
    return Beliefs(model.costs, (plan,), bounds_at(least, proven=is_least and not own, own=own))


def least_work(costs: ChainCosts, law: Law = "latency") -> float:
    """Return what lanes do at least, all together or the busiest one, if each operator may be anywhere, even in pieces.

    Args:
        law: ``latency`` for the sum.
    """
    if law == "latency":
        return float(costs.operator_s.min(axis=0).sum())
    lanes, count = costs.operator_s.shape
    groups = exclusive_groups(costs.platform)
    # Shares of operators on lanes, and the load of the busiest group, which is to be least.
    allowed = np.isfinite(costs.operator_s)
    seconds = np.where(allowed, costs.operator_s, 0.0)
    loads = np.zeros((len(groups), lanes * count + 1))
    for row, group in enumerate(groups):
        for lane in group:
            loads[row, lane * count : (lane + 1) * count] = seconds[lane]
    loads[:, -1] = -1.0
    whole = np.hstack([np.tile(np.eye(count), lanes), np.zeros((count, 1))])
    most = [(0.0, 1.0 if ok else 0.0) for ok in allowed.ravel()]
    aim = np.zeros(lanes * count + 1)
    aim[-1] = 1.0
    found = linprog(
        aim, A_ub=loads, b_ub=np.zeros(len(groups)), A_eq=whole, b_eq=np.ones(count), bounds=[*most, (0.0, None)]
    )
    return float(found.fun) * (1.0 - 1e-9) if found.success else 0.0
