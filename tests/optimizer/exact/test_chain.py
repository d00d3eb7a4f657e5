import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.exact.bound import model_error, relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, chain_cost
from search_spaces.core.errors import InfeasibleError
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.sentences import fails, says
from tests.support.strategies import chain_costs, chain_graph, graphs, platforms, shared_platforms, tensor

OBJECTIVES: tuple[ChainObjective, ...] = ("latency", "period")
_UNITS = ("cpu", "gpu", "npu")


def _platform(*names: str) -> Platform:
    return Platform("p", tuple(Processor(n, "cpu", {}, n) for n in names))


def _loads(costs: ChainCosts, plan: Plan) -> dict[str, float]:
    """Cost a plan in the model, stage by stage: what each processor does."""
    processor = {p.name: i for i, p in enumerate(costs.platform.processors)}
    loads = dict.fromkeys(processor, 0.0)
    for index, stage in enumerate(plan.stages):
        on = processor[stage.processor]
        if index:
            loads[stage.processor] += costs.transfer_s[
                stage.operators[0], processor[plan.stages[index - 1].processor], on
            ]
        loads[stage.processor] += costs.overhead_s[on] + sum(costs.operator_s[on, o] for o in stage.operators)
    return loads


def _cost(costs: ChainCosts, plan: Plan, objective: ChainObjective = "latency") -> float:
    """Return the latency; or the period, where each processor counts with each single processor that it excludes."""
    loads = _loads(costs, plan)
    if objective == "latency":
        return sum(loads.values())
    processors = costs.platform.processors
    sets = [s for n in range(1, len(processors) + 1) for s in combinations(processors, n)]
    exclusive = [s for s in sets if all(a.excludes(b) for a, b in combinations(s, 2))]
    return max(sum(loads[p.name] for p in group) for group in exclusive)


def _fits(costs: ChainCosts, plan: Plan) -> bool:
    if costs.operator_nbytes is None or costs.memory_bytes is None:
        return True
    kept = np.zeros(len(costs.platform.processors))
    for stage in plan.stages:
        processor = next(i for i, p in enumerate(costs.platform.processors) if p.name == stage.processor)
        kept[processor] += costs.operator_nbytes[list(stage.operators)].sum()
    return bool((kept <= costs.memory_bytes).all())


@given(graphs(max_operators=5), st.one_of(platforms(), shared_platforms()), st.sampled_from(OBJECTIVES), st.data())
def test_the_best_chains_are_those_that_brute_force_finds(
    graph: Graph, platform: Platform, objective: ChainObjective, data: st.DataObject
) -> None:
    count = len(graph.operators)
    costs = data.draw(chain_costs(platform, count))
    if data.draw(st.booleans(), label="limited"):
        leader = [next(i for i, q in enumerate(platform.processors) if q.like == p.like) for p in platform.processors]
        sizes = st.lists(st.integers(0, 4), min_size=count, max_size=count)
        rooms = st.lists(st.integers(0, 9), min_size=len(leader), max_size=len(leader))
        nbytes, memory = (np.array(data.draw(s), dtype=float) for s in (sizes, rooms))
        costs = replace(costs, operator_nbytes=nbytes, memory_bytes=memory[leader])
    max_stages = data.draw(st.integers(1, min(3, count)))
    min_stages = data.draw(st.integers(1, max_stages))
    k = data.draw(st.integers(1, 30))
    space = ChainSpace(graph, platform, max_stages)
    plans = [space.plan_at(i) for i in range(space.cardinality())]
    plans = [p for p in plans if len(p.stages) >= min_stages and _fits(costs, p)]
    every = sorted(c for p in plans if math.isfinite(c := _cost(costs, p, objective)))
    if not every:
        with pytest.raises(InfeasibleError):
            best_chains(costs, max_stages, k, objective=objective, min_stages=min_stages)
        return
    found = best_chains(costs, max_stages, k, objective=objective, min_stages=min_stages)
    assert [c.cost_s for c in found] == pytest.approx(every[:k], rel=1e-12, abs=1e-15)
    plans = [chain_plan(graph, c.cuts, c.processors) for c in found]
    for cost in (_cost, chain_cost):
        assert [c.cost_s for c in found] == pytest.approx([cost(costs, p, objective) for p in plans], rel=1e-12)
    assert all(_fits(costs, p) and canonical(p, graph, platform) == p for p in plans)
    assert len({p.digest for p in plans}) == len(plans) == min(k, len(every))


@settings(max_examples=50)
@given(platforms(), st.integers(2, 40), st.data())
def test_costs_ascend_and_more_plans_or_parts_only_add(platform: Platform, count: int, data: st.DataObject) -> None:
    costs = data.draw(chain_costs(platform, count, refusals=False))
    found = best_chains(costs, 3, 20)
    assert [c.cost_s for c in found] == pytest.approx(sorted(c.cost_s for c in found), rel=1e-12, abs=1e-15)
    assert best_chains(costs, 3)[0].cost_s == pytest.approx(found[0].cost_s)
    assert best_chains(costs, 4)[0].cost_s <= found[0].cost_s * (1 + 1e-12)
    assert best_chains(costs, 3, 20) == found


@given(graphs(), st.one_of(platforms(), shared_platforms()), st.data())
def test_no_plan_goes_below_the_bound(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    count = len(graph.operators)
    costs = data.draw(chain_costs(platform, count))
    bounds = relax(graph, costs)
    split = relax(graph, costs, range(count))
    assert split.work_s == bounds.work_s
    assert split.critical_path_s <= bounds.critical_path_s * (1 + 1e-12)
    try:
        assert bounds.latency_s <= best_chains(costs, count)[0].cost_s * (1 + 1e-12)
        assert bounds.work_s <= best_chains(costs, count, objective="period")[0].cost_s * (1 + 1e-12)
    except InfeasibleError:
        return


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4))
def test_an_operator_that_can_be_split_takes_what_all_processors_take_together(seconds: list[float]) -> None:
    costs = ChainCosts(
        _platform(*(f"p{i}" for i in range(len(seconds)))),
        np.array([[s] for s in seconds]),
        np.zeros(len(seconds)),
        np.zeros((1, len(seconds), len(seconds))),
    )
    together = 1.0 / sum(1.0 / s for s in seconds)
    assert relax(chain_graph(1), costs, [0]).critical_path_s == pytest.approx(together)
    assert relax(chain_graph(1), costs).work_s == pytest.approx(together)
    assert relax(chain_graph(1), costs).critical_path_s == min(seconds)


def test_processors_that_exclude_each_other_do_not_share_an_operator() -> None:
    platform = Platform("p", tuple(Processor(n, "cpu", {"core": 1.0}, n) for n in ("a", "b")))
    costs = ChainCosts(platform, np.array([[2.0], [3.0]]), np.zeros(2), np.zeros((1, 2, 2)))
    assert relax(chain_graph(1), costs, [0]).latency_s == pytest.approx(2.0)


def test_a_plan_below_the_bound_tells_how_wrong_the_model_is() -> None:
    assert model_error(1.2, 1.0) == model_error(1.0, 1.0) == model_error(1.0, 0.0) == 0.0
    assert model_error(0.9, 1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_of_chains_that_cost_the_same_the_one_with_the_fewest_parts_is_named(objective: ChainObjective) -> None:
    operator_s = np.array([[0.1, 0.2, 0.3, 0.7, 0.11]])
    costs = ChainCosts(_platform("cpu"), operator_s, np.zeros(1), np.zeros((5, 1, 1)))
    assert best_chains(costs, 4, objective=objective)[0].cuts == ()
    assert best_chains(costs, 4, k=9, objective=objective)[0].cuts == ()
    assert len(best_chains(costs, 4, k=9, objective=objective)) == 9
    assert len(best_chains(costs, 4, min_stages=2, objective=objective)[0].cuts) == 1


def test_branches_may_overlap_in_the_bound() -> None:
    operators = (Operator("RELU", (0,), (1,)), Operator("RELU", (0,), (2,)), Operator("ADD", (1, 2), (3,)))
    graph = Graph("branches", (tensor(1),) * 4, operators, (0,), (3,))
    two = ChainCosts(_platform("a", "b"), np.array([[3.0, 4.0, 1.0]] * 2), np.zeros(2), np.zeros((3, 2, 2)))
    assert relax(graph, two).latency_s == 5.0
    assert best_chains(two, 1)[0].cost_s == 8.0
    one = ChainCosts(_platform("a"), two.operator_s[:1], np.zeros(1), np.zeros((3, 1, 1)))
    assert relax(graph, one).latency_s == pytest.approx(8.0)


def test_a_refused_operator_goes_where_it_runs() -> None:
    operator_s = np.array([[1.0, 1.0, 1.0], [0.1, np.inf, 0.1]])
    costs = ChainCosts(_platform("cpu", "gpu"), operator_s, np.zeros(2), np.zeros((3, 2, 2)))
    best = best_chains(costs, 3)[0]
    assert (best.cuts, best.processors) == ((1, 2), ("gpu", "cpu", "gpu"))
    assert len(best_chains(costs, 1, k=5)) == 1
    operator_s[0, 1] = np.inf
    with fails(InfeasibleError):
        best_chains(costs, 3)
    crossed = ChainCosts(costs.platform, np.array([[1, np.inf], [np.inf, 1]]), np.zeros(2), np.zeros((2, 2, 2)))
    with fails(InfeasibleError) as error:
        best_chains(crossed, 1)
    assert [(v.demand, v.bound, v.gap, v.unit) for v in error.value.violations] == [(2, 1, 1, "stages")]


def test_a_model_that_is_too_large_is_reported_with_what_is_missing() -> None:
    costs = ChainCosts(
        _platform("a", "b"),
        np.ones((2, 3)),
        np.zeros(2),
        np.zeros((3, 2, 2)),
        np.array([4e6, 4e6, 2e6]),
        np.array([5e6, 2e6]),
    )
    with fails(InfeasibleError) as error:
        best_chains(costs, 3)
    (violation,) = error.value.violations
    assert violation.demand == pytest.approx(1.6 * 7e6, rel=2e-3)
    assert violation.bound == 7e6
    assert violation.to_json()["gap"] == violation.gap == violation.demand - violation.bound
    says(violation.lever)
    with fails(InfeasibleError):
        best_chains(costs, 4, min_stages=4)


def test_wrong_shapes_and_numbers_are_refused() -> None:
    def costs(
        *, operator_s: object = ((1.0, 1.0),), overhead_s: object = (0.0,), transfer_s: object = ((0,), (0,))
    ) -> None:
        arrays = [np.asarray(a, dtype=float) for a in (operator_s, overhead_s, transfer_s)]
        ChainCosts(_platform("cpu"), arrays[0], arrays[1], arrays[2].reshape(-1, 1, 1))

    costs()
    with fails(ValueError):
        costs(operator_s=((1,), (1,)))
    with fails(ValueError):
        costs(operator_s=(1, 1, 1))
    with fails(ValueError):
        costs(overhead_s=(1, 1))
    with fails(ValueError):
        costs(transfer_s=(1, 1, 1))
    with fails(ValueError):
        costs(operator_s=((np.nan, 1.0),))
    fine = ChainCosts(_platform(*_UNITS), np.ones((3, 2)), np.zeros(3), np.zeros((2, 3, 3)))
    for stages, k in ((0, 1), (1, 0)):
        with fails(ValueError):
            best_chains(fine, stages, k)
    with fails(ValueError):
        best_chains(fine, 2, min_stages=3)
    assert len(best_chains(fine, 50, 1000)) == 3 + 9
