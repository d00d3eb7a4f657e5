import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.exact.chain import ChainCosts, best_chains, lower_bound
from search_spaces.chain import ChainSpace, chain_plan
from search_spaces.errors import InfeasibleError
from search_spaces.graph import Graph, Operator
from search_spaces.plan import Plan, canonical
from search_spaces.platform import Platform, Processor
from tests.strategies import chain_costs, chain_graph, graphs, platforms, tensor

_UNITS = ("cpu", "gpu", "npu")


def _platform(*names: str) -> Platform:
    return Platform("p", tuple(Processor(n, "cpu", {}, n) for n in names))


def _cost(costs: ChainCosts, plan: Plan) -> float:
    """Cost a plan in the model, stage by stage."""
    lane = {p.name: i for i, p in enumerate(costs.platform.processors)}
    total = 0.0
    for index, stage in enumerate(plan.stages):
        on = lane[stage.processor]
        if index:
            total += costs.hand_over_s[stage.operators[0], lane[plan.stages[index - 1].processor], on]
        total += costs.overhead_s[on] + sum(costs.operator_s[on, o] for o in stage.operators)
    return float(total)


@given(graphs(max_operators=5), platforms(), st.data())
def test_the_best_chains_are_those_that_brute_force_finds(
    graph: Graph, platform: Platform, data: st.DataObject
) -> None:
    count = len(graph.operators)
    costs = data.draw(chain_costs(platform, count))
    max_stages = data.draw(st.integers(1, min(3, count)))
    k = data.draw(st.integers(1, 30))
    space = ChainSpace(graph, platform, max_stages)
    every = sorted(c for i in range(space.cardinality()) if math.isfinite(c := _cost(costs, space.plan_at(i))))
    if not every:
        with pytest.raises(InfeasibleError):
            best_chains(costs, max_stages, k)
        return
    found = best_chains(costs, max_stages, k)
    assert [c.cost_s for c in found] == pytest.approx(every[:k], rel=1e-12, abs=1e-15)
    plans = [chain_plan(graph, c.cuts, c.processors) for c in found]
    assert [c.cost_s for c in found] == pytest.approx([_cost(costs, p) for p in plans], rel=1e-12, abs=1e-15)
    assert all(canonical(p, graph, platform) == p for p in plans)
    assert len({p.digest for p in plans}) == len(plans) == min(k, len(every))


@settings(max_examples=50)
@given(platforms(), st.integers(2, 40), st.data())
def test_costs_ascend_and_more_plans_or_parts_only_add(platform: Platform, count: int, data: st.DataObject) -> None:
    costs = data.draw(chain_costs(platform, count, refusals=False))
    found = best_chains(costs, 3, 20)
    assert [c.cost_s for c in found] == sorted(c.cost_s for c in found)
    assert best_chains(costs, 3)[0].cost_s == pytest.approx(found[0].cost_s)
    assert best_chains(costs, 4)[0].cost_s <= found[0].cost_s * (1 + 1e-12)
    assert best_chains(costs, 3, 20) == found


@given(graphs(), platforms(), st.data())
def test_no_plan_goes_below_the_bound(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    count = len(graph.operators)
    costs = data.draw(chain_costs(platform, count))
    bound = lower_bound(graph, costs)
    try:
        assert bound <= best_chains(costs, count)[0].cost_s * (1 + 1e-12)
    except InfeasibleError:
        return


def test_a_cut_is_made_where_it_pays_and_not_where_it_does_not() -> None:
    operator_s = np.array([[1.0, 1.0, 9.0, 9.0], [5.0, 5.0, 1.0, 1.0]])
    hand_over_s = np.zeros((4, 2, 2))
    hand_over_s[:, 0, 1] = hand_over_s[:, 1, 0] = 2.0
    costs = ChainCosts(_platform("cpu", "gpu"), operator_s, np.array([0.1, 0.2]), hand_over_s)
    best = best_chains(costs, 4)[0]
    assert (best.cuts, best.processors) == ((2,), ("cpu", "gpu"))
    assert best.cost_s == pytest.approx(1 + 1 + 0.1 + 2 + 0.2 + 1 + 1)
    assert lower_bound(chain_graph(4), costs) == pytest.approx(4.1)
    dear = ChainCosts(costs.platform, operator_s, costs.overhead_s, 10 * hand_over_s)
    assert (best_chains(dear, 4)[0].cuts, best_chains(dear, 4)[0].processors) == ((), ("gpu",))


def test_branches_may_overlap_in_the_bound() -> None:
    operators = (Operator("RELU", (0,), (1,)), Operator("RELU", (0,), (2,)), Operator("ADD", (1, 2), (3,)))
    graph = Graph("branches", (tensor(1),) * 4, operators, (0,), (3,))
    costs = ChainCosts(_platform("cpu"), np.array([[3.0, 4.0, 1.0]]), np.zeros(1), np.zeros((3, 1, 1)))
    assert lower_bound(graph, costs) == 5.0
    assert best_chains(costs, 1)[0].cost_s == 8.0


def test_a_refused_operator_goes_where_it_runs() -> None:
    operator_s = np.array([[1.0, 1.0, 1.0], [0.1, np.inf, 0.1]])
    costs = ChainCosts(_platform("cpu", "gpu"), operator_s, np.zeros(2), np.zeros((3, 2, 2)))
    best = best_chains(costs, 3)[0]
    assert (best.cuts, best.processors) == ((1, 2), ("gpu", "cpu", "gpu"))
    assert len(best_chains(costs, 1, k=5)) == 1
    operator_s[0, 1] = np.inf
    with pytest.raises(InfeasibleError, match="operator 1 runs on no processor of 'p'"):
        best_chains(costs, 3)
    crossed = ChainCosts(costs.platform, np.array([[1, np.inf], [np.inf, 1]]), np.zeros(2), np.zeros((2, 2, 2)))
    with pytest.raises(InfeasibleError, match="no chain of at most 1 parts"):
        best_chains(crossed, 1)


def test_alike_lanes_are_one_choice() -> None:
    lanes = tuple(Processor(f"c{i}", "cpu", {}, "cpu") for i in range(8))
    costs = ChainCosts(Platform("p", lanes), np.ones((8, 3)), np.zeros(8), np.zeros((3, 8, 8)))
    found = best_chains(costs, 3, k=1000)
    assert len(found) == 1 + 2 * 2 + 5
    assert [c.processors for c in found if len(c.cuts) == 1] == [("c0", "c0"), ("c0", "c1")] * 2
    assert found[0].cuts == ()


def test_wrong_shapes_and_numbers_are_refused() -> None:
    def costs(
        *, operator_s: object = ((1.0, 1.0),), overhead_s: object = (0.0,), hand_over_s: object = ((0,), (0,))
    ) -> None:
        arrays = [np.asarray(a, dtype=float) for a in (operator_s, overhead_s, hand_over_s)]
        ChainCosts(_platform("cpu"), arrays[0], arrays[1], arrays[2].reshape(-1, 1, 1))

    costs()
    with pytest.raises(ValueError, match=r"operator_s has the shape \(2, 1\)"):
        costs(operator_s=((1,), (1,)))
    with pytest.raises(ValueError, match="operator_s has the shape"):
        costs(operator_s=(1, 1, 1))
    with pytest.raises(ValueError, match="overhead_s"):
        costs(overhead_s=(1, 1))
    with pytest.raises(ValueError, match="hand_over_s"):
        costs(hand_over_s=(1, 1, 1))
    with pytest.raises(ValueError, match="no number"):
        costs(operator_s=((np.nan, 1.0),))
    fine = ChainCosts(_platform(*_UNITS), np.ones((3, 2)), np.zeros(3), np.zeros((2, 3, 3)))
    for stages, k in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1 stage and 1 plan"):
            best_chains(fine, stages, k)
    assert len(best_chains(fine, 50, 1000)) == 3 + 9
