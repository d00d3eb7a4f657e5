"""The profile of operators, and the additive model that it makes."""

from __future__ import annotations

import pytest

from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.exact.chain import best_chains, chain_cost
from optimizer.model.profile import Profile, profile
from search_spaces.core.errors import RunFolderError
from search_spaces.spaces.chain import chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

GRAPH = chain_graph(9)
EVALUATOR = SyntheticEvaluator(noise=Noise(run=1e-9, instance=0.0, spike_share=0.0, cold=1.0))
PLATFORM = EVALUATOR.platform()


def made(count: int = 9) -> Profile:
    with EVALUATOR.prepare(PLATFORM) as session:
        return profile(session, chain_graph(count), PLATFORM)


def test_the_model_gives_each_processor_alone_what_was_measured() -> None:
    costs = made().costs(PLATFORM)
    for name in ("cpu", "cpu0", "cpu1"):
        plan = chain_plan(GRAPH, (), [name])
        assert chain_cost(costs, plan) == pytest.approx(EVALUATOR.true_latency_s(GRAPH, plan), rel=1e-6)


def test_the_cost_of_a_plan_is_what_the_solver_says_it_is() -> None:
    costs = made().costs(PLATFORM)
    for chain in best_chains(costs, 3, 20):
        plan = chain_plan(GRAPH, chain.cuts, chain.processors)
        assert chain_cost(costs, plan) == pytest.approx(chain.cost_s)


def test_a_model_of_one_operator_has_a_profile() -> None:
    found = made(1)
    assert found.transfer_s == dict.fromkeys(found.transfer_s, 0.0)
    assert found.fastest(PLATFORM) == "cpu"


def test_a_profile_survives_the_log_and_a_damaged_one_is_reported() -> None:
    found = made()
    assert Profile.from_json(found.to_json()) == found
    for damaged in (None, {}, {**found.to_json(), "whole_s": 3}, {**found.to_json(), "operator_s": {"cpu": ["x"]}}):
        with fails(RunFolderError):
            Profile.from_json(damaged)
