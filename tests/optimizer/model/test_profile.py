"""The profile of operators, and the additive model that it makes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluators.base import Batch, Candidate
from evaluators.forwarding import ForwardingCandidate, ForwardingSession
from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import chain_cost
from optimizer.model.profile import Profile, Profiler, profile
from search_spaces.core.errors import RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

GRAPH = chain_graph(9)
EVALUATOR = SyntheticEvaluator(noise=Noise(run=1e-9, instance=0.0, spike_share=0.0, cold=1.0))
PLATFORM = EVALUATOR.platform()


def made(count: int = 9) -> Profile:
    with EVALUATOR.prepare(PLATFORM) as session:
        return profile(Profiler(session, chain_graph(count), PLATFORM))


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


class _Choosy(ForwardingSession):
    """Fails on plans of many stages, as a board does where each stage takes a process of its own."""

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        if len(plan.stages) > 2:
            raise UnavailableError("run(1) took longer than 40 s")
        return self.inner.load(graph, plan, fresh=fresh)


def test_where_operators_cannot_be_timed_one_by_one_their_shares_are_by_work() -> None:
    graph, told = load("squeezenet1_1@0.25/64"), list[str]()
    with EVALUATOR.prepare(PLATFORM) as session:
        found = profile(Profiler(_Choosy(session), graph, PLATFORM, told.append))
    for like, seconds in found.operator_s.items():
        assert sum(seconds) == pytest.approx(found.whole_s[like])
        assert max(seconds) == seconds[int(np.argmax([c.macs for c in operator_costs(graph)]))]
    assert sum("multiply-accumulates" in line for line in told) == len(found.operator_s)


def test_a_profile_whose_time_is_over_is_shared_out_and_slow_runs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = 0.0, list[str]()

    class Slow(ForwardingCandidate):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            nonlocal now_s
            found = self.inner.run(n, stop_above_s)
            now_s += 2.0 * found.stage_s.size
            return found

    class Board(ForwardingSession):
        def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
            return Slow(self.inner.load(graph, plan, fresh=fresh))

    monkeypatch.setattr("optimizer.model.profile.time.monotonic", lambda: now_s)
    with EVALUATOR.prepare(PLATFORM) as session:
        found = profile(Profiler(Board(session), GRAPH, PLATFORM, told.append, limit_s=30.0, begin_s=0.0))
    assert sum("multiply-accumulates" in line for line in told) == len(found.operator_s)
    assert any("9 stages" in line for line in told)
    assert all(np.isfinite(seconds).all() for seconds in found.operator_s.values())


def test_equal_operators_take_equal_times_however_their_stages_drift() -> None:
    class Drifting(ForwardingCandidate):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            found = super().run(n, stop_above_s)
            return Batch(found.latency_s, found.stage_s * np.linspace(0.8, 1.2, found.stage_s.shape[1]))

    class Session(ForwardingSession):
        def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
            return Drifting(self.inner.load(graph, plan, fresh=fresh))

    graph, evaluator = load("mobilenet_v1@0.25/64"), SyntheticEvaluator()
    with evaluator.prepare(evaluator.platform()) as session:
        found = profile(Profiler(Session(session), graph, evaluator.platform()))
    shapes = [tuple(graph.tensors[t].shape for t in (*o.inputs, *o.outputs)) for o in graph.operators]
    alike = [i for i, shape in enumerate(shapes) if shapes.count(shape) > 4]
    assert len(alike) >= 10
    for like, operator_s in found.operator_s.items():
        assert len({operator_s[i] for i in alike}) == len({shapes[i] for i in alike})
        assert sum(operator_s) + found.overhead_s[like] == pytest.approx(found.whole_s[like], rel=0.01)
