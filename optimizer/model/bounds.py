"""The model estimate of a graph on a platform: costs, the best plans under them, and lower bounds.

Where the evaluator computes its latencies (``capabilities.costs``), bounds and optima hold for its own tables, and the
evaluator itself prices the best plan. Where it measures, they hold for the additive model of the profiled operators; a
plan measured below such a bound shows the model wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from evaluators.base import Session
from optimizer.exact.bound import Relaxation, model_error, relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.least import chain_costs, least_chain
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.space import SearchSpace


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


def model_estimate(
    graph: Graph, session: Session, costs: ChainCosts, space: SearchSpace, most: int, optima: int
) -> ModelEstimate:
    """Return the model estimate before any plan is measured.

    Args:
        costs: of the latency.
        most: stages of a chain at most.
        optima: the number of best plans to return, where the evaluator measures.

    Raises:
        InfeasibleError: no plan fits.
    """
    own = session.capabilities.costs
    if own:
        cheapest = chain_costs(costs.platform, session.part_costs(graph), least=True)
        least = least_chain(graph, cheapest, price_of(graph, session), most)
        bound_s, proven = least.bound, least.proven
        plans: tuple[Plan, ...] = (least.best,)
    else:
        found = best_chains(costs, most, optima)
        plans = tuple(chain.plan(graph) for chain in found)
        bound_s, proven = found[0].cost_s, True
    relaxed = relax(graph, costs)
    if not isinstance(space, ChainSpace):
        bound_s, proven = min(bound_s, relaxed.latency_s), False
    return ModelEstimate(costs, plans, Bounds(bound_s, proven, relaxed, own=own))


def price_of(graph: Graph, session: Session) -> Callable[[Plan], float]:
    """Return a function from a plan to the seconds that a session computes; infinite where it refuses the plan."""

    def price(plan: Plan) -> float:
        try:
            with closing(session.load(graph, plan)) as candidate:
                return float(candidate.run(1).latency_s[0])
        except UnavailableError:
            return float("inf")

    return price
