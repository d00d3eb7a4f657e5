"""The front of a model: what brute force finds over all chains, and the best plan under every limit."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.objectives import peak_nbytes
from evaluators.testing import SyntheticEvaluator
from optimizer.exact import chain as chain_search
from optimizer.exact.chain_costs import ChainCosts, chain_cost, weighed
from optimizer.exact.front import busiest, memory, pareto_chains, summed, undominated
from optimizer.exact.least import least_plan
from search_spaces.core.errors import InfeasibleError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.spaces.chain import chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

PLATFORM = SyntheticEvaluator().platform()
NAMES = [p.name for p in PLATFORM.processors]


def costs_of(seed: int, count: int) -> ChainCosts:
    rng = np.random.default_rng(seed)
    one = rng.uniform(1.0, 5.0, count)
    operator_s = np.stack([one * rng.uniform(0.5, 0.9), one, one])
    transfer = np.full((count, 3, 3), 0.3) * (1.0 - np.eye(3))
    return ChainCosts(PLATFORM, operator_s, np.array([0.5, 0.2, 0.2]), transfer)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_front_is_that_of_all_chains(seed: int, count: int, most: int) -> None:
    costs = costs_of(seed, count)
    energy = weighed(costs, {"cpu": 3.0, "cpu0": 1.0, "cpu1": 1.0})
    criteria = [summed(costs), summed(energy), busiest(costs)]
    graph = Graph("chain", (), (), (), ())
    found = pareto_chains(criteria, PLATFORM, most)
    values = []
    for parts in range(1, min(most, count) + 1):
        for cuts in combinations(range(1, count), parts - 1):
            borders = [0, *cuts, count]
            for names in product(NAMES, repeat=parts):
                stages = tuple(
                    Stage(tuple(range(a, b)), n) for a, b, n in zip(borders[:-1], borders[1:], names, strict=True)
                )
                plan = Plan(graph.digest, stages)
                values.append((chain_cost(costs, plan), chain_cost(energy, plan), chain_cost(costs, plan, "period")))
    front = np.array([c.values for c in found])
    assert len(undominated(front)) == len(front)
    # Sums in another order differ in their last bits, which must decide nothing here.
    table, front = np.round(values, 9), np.round(front, 9)
    assert {tuple(row) for row in table[undominated(table)]} == {tuple(row) for row in front[undominated(front)]}


def test_memory_is_what_the_footprint_says(squeezenet: Graph) -> None:
    count = len(squeezenet.operators)
    rng = np.random.default_rng(0)
    one = rng.uniform(1.0, 2.0, count)
    costs = ChainCosts(PLATFORM, np.stack([one * 0.6, one, one]), np.zeros(3), np.zeros((count, 3, 3)))
    criteria = [summed(costs), memory(squeezenet, PLATFORM)]
    found = pareto_chains(criteria, PLATFORM, 3)
    assert found
    for chain in found:
        plan = chain_plan(squeezenet, chain.cuts, chain.processors)
        assert chain.values[1] * 1e9 == pytest.approx(sum(map(sum, peak_nbytes(squeezenet, plan).values())))


def test_nothing_fits() -> None:
    costs = costs_of(0, 3)
    costs.operator_s[:, 1] = np.inf
    with fails(InfeasibleError):
        pareto_chains([summed(costs)], PLATFORM, 2)


def test_where_time_is_up_the_best_whole_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_search, "_LOOK", 1)
    costs = costs_of(3, 5)
    graph = chain_graph(5)

    def price(plan: Plan) -> float:
        return chain_cost(costs, plan, "period")

    least = least_plan(graph, costs, price, 3, "period", stop_s=0.0)
    assert len(least.best.stages) == 1
    assert least.value == min(price(chain_plan(graph, (), [name])) for name in NAMES)
    assert least.bound <= least.value
