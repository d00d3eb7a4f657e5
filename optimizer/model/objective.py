"""The model estimate of an objective other than the latency: predictions, optima, bounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from evaluators.base import Session
from evaluators.objectives import Objective, PlacedModel, Pricing
from optimizer.exact.bound import Relaxation
from optimizer.exact.chain import chains_in_order
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, chain_cost, weighed
from optimizer.exact.least import chain_costs, least_plan
from optimizer.model.bounds import Bounds, ModelEstimate, price_of
from optimizer.model.profile import Profile
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan

_SOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class ObjectiveModel:
    """The additive model of an objective.

    Attributes:
        costs: in the objective's unit, of chains; of times where the objective follows from the plan alone.
    """

    objective: Objective
    graph: Graph
    costs: ChainCosts

    @property
    def chains(self) -> ChainObjective:
        """How stages add up: to a sum, or to the load of the busiest processor."""
        return "period" if self.objective.aggregation == "busiest" else "latency"

    def predict(self, plan: Plan) -> float:
        """Return the model's value of a plan, in the objective's unit."""
        if self.objective.of_plan is not None:
            return self.objective.of_plan((PlacedModel(self.graph, plan),))
        return chain_cost(self.costs, plan, self.chains)


def objective_model(how: Pricing, graph: Graph, latency: ChainCosts) -> ObjectiveModel:
    """Return the model of an objective, from that of the latency."""
    return ObjectiveModel(
        how.objective, graph, weighed(latency, known_weights(how), idle=how.objective.aggregation == "path")
    )


def known_weights(how: Pricing) -> dict[str, float]:
    """Return the weight of a second of each processor: its watts, or 1 where a meter measures the energy."""
    by = how.counts
    return (
        by if set(by) >= {p.name for p in how.platform.processors} else {p.name: 1.0 for p in how.platform.processors}
    )


def latency_costs(session: Session, graph: Graph, platform: Platform, profiled: Profile) -> ChainCosts:
    """Return the additive model of the latency."""
    if session.capabilities.costs:
        return chain_costs(platform, session.part_costs(graph))
    return profiled.costs(platform)


def objective_estimate(model: ObjectiveModel, session: Session, most: int, optima: int) -> ModelEstimate:
    """Return the model estimate before any plan is measured.

    Raises:
        InfeasibleError: no plan fits.
    """
    graph, own = model.graph, session.capabilities.costs
    if model.objective.of_plan is not None:
        return _smallest(model, own=own)
    stop_s = time.monotonic() + _SOLVE_S
    if own:
        least = least_plan(graph, model.costs, price_of(graph, session), most, model.chains, stop_s)
        return ModelEstimate(model.costs, (least.best,), bounds_at(least.bound, proven=least.proven, own=True))
    found = []
    bound = 0.0
    try:
        for chain in chains_in_order(model.costs, most, optima, objective=model.chains, stop_s=stop_s):
            found.append(chain.plan(graph))
            bound = bound or chain.cost_s
    except UnavailableError:
        if not found:
            found = [chain_plan(graph, (), [model.costs.platform.processors[0].name])]
    return ModelEstimate(model.costs, tuple(found), bounds_at(bound, proven=bound > 0.0, own=False))


def _smallest(model: ObjectiveModel, *, own: bool) -> ModelEstimate:
    """Return the estimate of what follows from plans alone: the best whole model, and the objective's own bound."""
    wholes = [chain_plan(model.graph, (), [p.name]) for p in model.costs.platform.processors]
    best = min(wholes, key=model.predict)
    bound = model.objective.least(model.graph) if model.objective.least is not None else 0.0
    return ModelEstimate(
        model.costs, (best,), bounds_at(bound, proven=math.isclose(model.predict(best), bound), own=own)
    )


def bounds_at(value: float, *, proven: bool, own: bool) -> Bounds:
    """Return bounds whose relaxations all have this value."""
    return Bounds(value, proven, Relaxation(value, value), own=own)
