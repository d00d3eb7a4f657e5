"""The model estimate of a graph on a platform: costs, the best plans under them, and lower bounds.

Where the evaluator computes its latencies (``capabilities.costs``), bounds and optima hold for its own tables, and the
evaluator itself prices the best plan. Where it measures, they hold for the additive model of the profiled operators; a
plan measured below such a bound shows the model wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from evaluators.base import Session
from evaluators.objectives import Objective, PlacedModel, Pricing
from optimizer.exact.bound import Relaxation, model_error, relax
from optimizer.exact.chain import best_chains, chains_in_order
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, chain_cost, weighed
from optimizer.exact.least import chain_costs, least_chain, least_plan
from optimizer.model.profile import Profile
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace, chain_plan
from search_spaces.spaces.space import SearchSpace

_SOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds under the model.

    Attributes:
        space_s: for plans of the space, in seconds.
        proven: whether some plan takes exactly that.
        all_plans: relaxations over all plans of this graph on these processors.
        own: whether the evaluator computes with the same model, so that no result can be below the bound.
    """

    space_s: float
    proven: bool
    all_plans: Relaxation
    own: bool

    def slower(self, factor: float) -> Bounds:
        """Return the bounds on the same machine when it takes ``factor`` times as long."""
        relaxed = Relaxation(self.all_plans.critical_path_s * factor, self.all_plans.work_s * factor)
        return replace(self, space_s=self.space_s * factor, all_plans=relaxed)

    def error(self, latency_s: float) -> float:
        """Return how far a latency is below the bound, relative to it: the least error of the model."""
        return model_error(latency_s, self.space_s)

    def to_json(self) -> dict[str, Any]:
        """Return the bounds as plain values, in milliseconds (thousandths of the objective's unit)."""
        return {
            "space_ms": self.space_s * 1e3,
            "proven": self.proven,
            "all_plans_ms": self.all_plans.latency_s * 1e3,
            "critical_path_ms": self.all_plans.critical_path_s * 1e3,
            "work_ms": self.all_plans.work_s * 1e3,
            "model": "the evaluator's own" if self.own else "profiled operators",
        }


@dataclass(frozen=True, slots=True, eq=False)
class ModelEstimate:
    """The model estimate of a graph on a platform.

    Attributes:
        costs: additive, for samplers.
        optima: the best plans under the model, the best first.
    """

    costs: ChainCosts
    optima: tuple[Plan, ...]
    bounds: Bounds


def price_of(graph: Graph, session: Session) -> Callable[[Plan], float]:
    """Return a function from a plan to the seconds that a session computes; infinite where it refuses the plan."""

    def price(plan: Plan) -> float:
        try:
            with closing(session.load(graph, plan)) as candidate:
                return float(candidate.run(1).latency_s[0])
        except UnavailableError:
            return float("inf")

    return price


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
            return self.objective.value_of_plan((PlacedModel(self.graph, plan),))
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


def objective_estimate(
    model: ObjectiveModel, session: Session, space: SearchSpace, most: int, optima: int
) -> ModelEstimate:
    """Return the model estimate of chains before any plan is measured.

    Args:
        session: returns the objective.
        most: stages of a chain at most.
        optima: the number of best plans to return, where the evaluator measures.

    Raises:
        InfeasibleError: no plan fits.
    """
    graph, costs, own = model.graph, model.costs, session.capabilities.costs
    if model.objective.of_plan is not None:
        return _smallest(model, own=own)
    if model.objective.aggregation == "path":
        return _fastest(graph, costs, session, space, most, optima)
    stop_s = time.monotonic() + _SOLVE_S
    if own:
        least = least_plan(graph, costs, price_of(graph, session), most, model.chains, stop_s)
        return ModelEstimate(costs, (least.best,), bounds_at(least.bound, proven=least.proven, own=True))
    found = []
    bound = 0.0
    try:
        for chain in chains_in_order(costs, most, optima, objective=model.chains, stop_s=stop_s):
            found.append(chain.plan(graph))
            bound = bound or chain.cost_s
    except UnavailableError:
        if not found:
            found = [chain_plan(graph, (), [costs.platform.processors[0].name])]
    return ModelEstimate(costs, tuple(found), bounds_at(bound, proven=bound > 0.0, own=False))


def _fastest(
    graph: Graph, costs: ChainCosts, session: Session, space: SearchSpace, most: int, optima: int
) -> ModelEstimate:
    """Return the estimate of latencies: chains that overlap, too, and bounds of all plans."""
    own = session.capabilities.costs
    if own:
        cheapest = chain_costs(costs.platform, session.part_costs(graph), least=True)
        least = least_chain(graph, cheapest, price_of(graph, session), most)
        plans, bound_s, proven = [least.best], least.bound, least.proven
    else:
        found = best_chains(costs, most, optima)
        plans, bound_s, proven = [chain.plan(graph) for chain in found], found[0].cost_s, True
    relaxed = relax(graph, costs)
    if not isinstance(space, ChainSpace):
        bound_s, proven = min(bound_s, relaxed.latency_s), False
    return ModelEstimate(costs, tuple(plans), Bounds(bound_s, proven, relaxed, own=own))


def _smallest(model: ObjectiveModel, *, own: bool) -> ModelEstimate:
    """Return the estimate of what follows from plans alone: the best whole model, and the objective's own bound."""
    wholes = [chain_plan(model.graph, (), [p.name]) for p in model.costs.platform.processors]
    best = min(wholes, key=model.predict)
    with model.objective.named("least"):
        bound = model.objective.least(model.graph) if model.objective.least is not None else 0.0
    return ModelEstimate(
        model.costs, (best,), bounds_at(bound, proven=math.isclose(model.predict(best), bound), own=own)
    )


def bounds_at(value: float, *, proven: bool, own: bool) -> Bounds:
    """Return bounds whose relaxations all have this value."""
    return Bounds(value, proven, Relaxation(value, value), own=own)
