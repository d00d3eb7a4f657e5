"""The best chain with ranks under an additive model and a budget of error: a Lagrangian over chains.

Errors of layers are charged at a price (a Lagrange multiplier). At a given price each layer on each processor takes its
cheapest triple, and dynamic programming finds the best chain. Bisection finds the price at which the budget is just
kept. For any price, the cost minus the price of the whole budget is a lower bound (Everett 1963,
doi:10.1287/opre.11.3.399). The rest of the budget is spent layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, Seconds, chain_cost
from optimizer.exact.solution import Solution
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.rewrites.tucker import Ranks, ranks_of
from search_spaces.rewrites.tucker_ranks import RankChoices

_STEPS = 24
_NEAR = 1e-3  # relative distance from the bound at which the search ends
_HAIR = 1e-9


class Shape(Protocol):
    """Finds and prices plans without ranks in an additive model."""

    def solve(self, costs: ChainCosts) -> tuple[Plan, float]:
        """Return the best plan for such costs, and its cost."""
        ...

    def price(self, costs: ChainCosts, plan: Plan) -> float:
        """Return the cost of a plan."""
        ...


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains of at most so many stages, as a :class:`Shape`."""

    graph: Graph
    most: int

    def solve(self, costs: ChainCosts) -> tuple[Plan, float]:
        """Return the best plan for such costs, and its cost."""
        chain = best_chains(costs, self.most)[0]
        return chain.plan(self.graph), chain.cost_s

    def price(self, costs: ChainCosts, plan: Plan) -> float:
        """Return the cost of a plan."""
        return chain_cost(costs, plan)


@dataclass(frozen=True, slots=True, eq=False)
class RankCosts:
    """Costs of layers and of their triples.

    Attributes:
        costs: of the model as it is.
        triple_s: shape ``(P, choices)``: each triple on each processor, in the order of ``space.places``.
        shape: returns the best plan without ranks for such costs, with its cost, and prices such plans.
    """

    space: RankChoices
    costs: ChainCosts
    triple_s: Seconds
    shape: Shape

    @property
    def platform(self) -> Platform:
        """The processors."""
        return self.costs.platform

    def price(self, plan: Plan) -> float:
        """Return the model's seconds of a plan."""
        operator_s = np.array(self.costs.operator_s)
        for operator, found in ranks_of(plan).items():
            operator_s[:, operator] = self.triple_s[:, self.space.places[operator, found]]
        return self.shape.price(replace(self.costs, operator_s=operator_s), replace(plan, ranks=()))

    def cheapest(self, costs: ChainCosts) -> ChainCosts:
        """Return costs with each layer's cheapest triple where that is faster than the layer."""
        operator_s = np.array(costs.operator_s)
        for (operator, _), place in self.space.places.items():
            operator_s[:, operator] = np.minimum(operator_s[:, operator], self.triple_s[:, place])
        return replace(costs, operator_s=operator_s)

    def placed(self, plan: Plan) -> dict[int, int]:
        """Return the processor (index in the platform) of each operator."""
        processor = {p.name: i for i, p in enumerate(self.platform.processors)}
        return {o: processor[s.processor] for s in plan.stages for o in s.operators}

    def gain_s(self, processor: int, operator: int, ranks: Ranks) -> float:
        """Return the seconds that a triple saves over its layer on a processor; negative where it is slower."""
        whole, triple = (
            self.costs.operator_s[processor, operator],
            self.triple_s[processor, self.space.places[operator, ranks]],
        )
        return float(whole - triple) if np.isfinite(triple) else -np.inf

    def slower(self, plan: Plan) -> dict[int, float]:
        """Return the layers whose triples are not faster on their processors, and by how much."""
        on = self.placed(plan)
        gains = {o: self.gain_s(on[o], o, ranks) for o, ranks in ranks_of(plan).items()}
        return {operator: -gain for operator, gain in gains.items() if gain <= 0.0}


@dataclass(frozen=True, slots=True, eq=False)
class RankLimits:
    """Limits of the search.

    Attributes:
        most_error: allowed relative error of outputs.
    """

    model: RankCosts
    most_error: float


def best_ranked(model: RankCosts, most_error: float) -> Solution[Plan]:
    """Return the best chain with ranks whose expected error is at most ``most_error``, with a bound on all of them.

    Args:
        most_error: relative, as :meth:`~search_spaces.rewrites.tucker_ranks.RankChoices.error` computes it.

    Raises:
        InfeasibleError: no chain fits at all.
    """
    budget = most_error**2
    found: list[Plan] = []
    bounds = []
    low, price = 0.0, 0.0
    high: float | None = None
    for _ in range(_STEPS):
        plan, cost_s = _at_price(model, price)
        bounds.append(cost_s - price * budget)
        spent = model.space.error(plan) ** 2
        if spent <= budget * (1 + _HAIR):
            found.append(plan)
            high = price
            if price == 0.0 or model.price(plan) <= max(bounds) * (1.0 + _NEAR):
                break
        else:
            low = price
        # Doubled until it exceeds every gain per error, then bisected.
        price = max(4.0 * price, cost_s) if high is None else 0.5 * (low + high)
    if not found:
        found.append(replace(_at_price(model, np.inf)[0], ranks=()))
    best = min((_spend(model, plan, most_error) for plan in found), key=model.price)
    cost_s = model.price(best)
    return Solution(best, cost_s, min(max(bounds), cost_s))


def _at_price(model: RankCosts, price: float) -> tuple[Plan, float]:
    """Return the cheapest plan at a price of errors, and its cost with that price."""
    space = model.space
    operator_s = np.array(model.costs.operator_s)
    chosen: dict[tuple[int, int], Ranks] = {}
    for operator, options in space.options.items() if np.isfinite(price) else ():
        for processor in range(len(operator_s)):
            whole_s = model.costs.operator_s[processor, operator]
            for ranks in options:
                triple_s = model.triple_s[processor, space.places[operator, ranks]]
                charged = triple_s + price * space.loss(operator, ranks)
                if triple_s < whole_s and charged < operator_s[processor, operator]:
                    operator_s[processor, operator] = charged
                    chosen[processor, operator] = ranks
    plan, cost_s = model.shape.solve(replace(model.costs, operator_s=operator_s))
    on = model.placed(plan)
    taken = {o: chosen[on[o], o] for o in space.options if (on[o], o) in chosen}
    return space.with_ranks(plan, taken), cost_s


def _spend(model: RankCosts, plan: Plan, most_error: float) -> Plan:
    """Spend the rest of the budget: repeat the change of a layer's ranks that gains most."""
    space = model.space
    ranks, on = ranks_of(plan), model.placed(plan)
    left = most_error**2 - space.error(plan) ** 2
    while True:
        best: tuple[float, int, Ranks, float] | None = None
        for operator, options in space.options.items():
            now = _gain_and_loss(model, on[operator], operator, ranks.get(operator))
            for other in options:
                then = _gain_and_loss(model, on[operator], operator, other)
                if then[0] > now[0] and then[1] - now[1] <= left and (best is None or then[0] - now[0] > best[0]):
                    best = then[0] - now[0], operator, other, then[1] - now[1]
        if best is None or best[0] <= 0.0:
            return space.with_ranks(plan, ranks)
        ranks[best[1]] = best[2]
        left -= best[3]


def _gain_and_loss(model: RankCosts, processor: int, operator: int, ranks: Ranks | None) -> tuple[float, float]:
    if ranks is None:
        return 0.0, 0.0
    return model.gain_s(processor, operator, ranks), model.space.loss(operator, ranks)


def uniform(model: RankCosts, processor: str, most_error: float) -> Mapping[int, Ranks]:
    """Return ranks of one share for all layers, the least that keeps the budget; none if none does.

    Args:
        processor: where everything runs; triples that are no faster there are left out.
    """
    space = model.space
    index = [p.name for p in model.platform.processors].index(processor)
    most = max((len(options) for options in space.options.values()), default=0)
    for level in range(most):
        ranks = {o: options[min(level, len(options) - 1)] for o, options in space.options.items()}
        ranks = {o: r for o, r in ranks.items() if model.gain_s(index, o, r) > 0.0}
        if ranks and sum(space.loss(o, r) for o, r in ranks.items()) <= most_error**2:
            return ranks
    return {}
