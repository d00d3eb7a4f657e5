"""The bound of a session that computes is a bound of what it says, and its best chain is the best of all."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.plans import PlanSimulator, part_costs
from optimizer.cli import main
from optimizer.exact import least as module
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.least import chain_costs, least_chain
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.platform import Platform, Processor, tell_apart
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.evaluators.cost_model.test_simulate import priced
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, graphs, platforms, shared_platforms


@st.composite
def simulators(draw: st.DrawFn) -> PlanSimulator:
    graph = draw(graphs())
    platform = draw(st.one_of(platforms(max_processors=3), shared_platforms()))
    processors = tuple(replace(p, like=p.name) for p in tell_apart(platform.processors)[:3])
    apart = Platform(platform.name, processors)
    return PlanSimulator(graph, apart, draw(priced(graph, apart)))


def fastest_of_all_s(simulator: PlanSimulator, most: int) -> float:
    """Return the latency of the fastest chain, by simulating each."""
    space = ChainSpace(simulator.graph, simulator.platform, min(most, len(simulator.graph.operators)))
    found = math.inf
    for index in range(space.cardinality()):
        with suppress(UnavailableError):  # a processor refuses an operator
            found = min(found, simulator.latency_s(space.plan_at(index)))
    return found


@settings(max_examples=25, deadline=None)
@given(simulators(), st.integers(1, 5))
def test_no_chain_is_below_the_least_and_one_reaches_it(simulator: PlanSimulator, most: int) -> None:
    graph, platform = simulator.graph, simulator.platform
    every = fastest_of_all_s(simulator, most)
    costs = chain_costs(platform, part_costs(simulator), least=True)
    found = least_chain(graph, costs, simulator.latency_s, most)
    assert found.bound <= every * (1 + 1e-9)
    assert simulator.latency_s(found.best) == found.value >= every * (1 - 1e-9)
    if found.proven:
        assert found.value == pytest.approx(every)


@settings(max_examples=12, deadline=None)
@given(simulators(), st.integers(1, 4))
def test_giving_up_early_leaves_a_bound(simulator: PlanSimulator, most: int) -> None:
    every = fastest_of_all_s(simulator, most)
    costs = chain_costs(simulator.platform, part_costs(simulator), least=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_PRICED", 2)
        patch.setattr(module, "_MOST_CUTS", 1)
        found = least_chain(simulator.graph, costs, simulator.latency_s, most)
    assert found.bound <= every * (1 + 1e-9) <= found.value * (1 + 2e-9)


@settings(max_examples=12, deadline=None)
@given(simulators(), st.data())
def test_parts_that_wait_for_each_other_add_up(simulator: PlanSimulator, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 8))
    graph = chain_graph(count)
    alone = PlanSimulator(graph, simulator.platform, data.draw(priced(graph, simulator.platform)))
    costs = chain_costs(simulator.platform, part_costs(alone))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4)))
    names = [p.name for p in simulator.platform.processors]
    plan = chain_plan(graph, cuts, [data.draw(st.sampled_from(names)) for _ in range(len(cuts) + 1)])
    if alone.prices.asleep_s is None:
        assert chain_cost(costs, plan) == pytest.approx(alone.latency_s(plan))
    else:  # who slept while others had its cores starts later than the parts know
        assert chain_cost(costs, plan) <= alone.latency_s(plan) * (1 + 1e-9)


def test_large_parts_that_slow_down_are_cut() -> None:
    platform = Platform("p", (Processor("a", "cpu", {}, "a"),))
    beyond = np.zeros((1, 5, 5))
    beyond[0, 0, 4] = 10.0
    costs = ChainCosts(platform, np.ones((1, 4)), np.full(1, 0.1), np.zeros((4, 1, 1)), beyond_s=beyond)
    best = best_chains(costs, 2)[0]
    assert best.cost_s == pytest.approx(4.2)
    assert len(best.cuts) == 1
    with fails(ValueError):
        replace(costs, beyond_s=beyond[:, 1:])


def test_what_runs_nowhere_is_reported() -> None:
    platform = Platform("p", (Processor("a", "cpu", {}, "a"),))
    tables = ChainCosts(platform, np.full((1, 3), np.inf), np.zeros(1), np.zeros((3, 1, 1)))
    with fails(InfeasibleError):
        least_chain(chain_graph(3), tables, lambda _: 1.0, 2)
    fits = replace(tables, operator_s=np.ones((1, 3)))
    with fails(InfeasibleError):
        least_chain(chain_graph(3), fits, lambda _: float("inf"), 2)


@pytest.mark.parametrize(("device", "model"), [("exynos2200", "vgg16@0.25/64"), ("snapdragon888", "squeezenet1_1")])
def test_a_study_on_a_cost_model_is_proven(
    device: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--evaluator", "cost-model", "--platform", device, "--budget", "6", "-q"]
    assert main([*arguments, "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gap"] == pytest.approx(0.0, abs=1e-9)
    assert result["model_error"] == pytest.approx(0.0, abs=1e-9)
    assert result["bounds"]["proven"]
    assert result["bounds"]["all_plans_ms"] <= result["model_bound_ms"] * (1 + 1e-9)
