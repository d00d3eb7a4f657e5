"""Plans for several states: the exact one is the best of all chains, and is shown against the nominal one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.objectives import PricedSession, Pricing, find_objective, pricing
from evaluators.testing import SyntheticEvaluator
from optimizer.cli import main
from optimizer.model.robust import NOMINAL, in_states, nominal_plan, robust_estimate
from search_spaces.core.errors import UsageError
from search_spaces.core.plan import Plan
from search_spaces.core.states import Robust, parse_states
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.sentences import fails

PROCESSORS = ("1large", "1small", "gpu")
WATTS = {"1large": 2.0, "1small": 0.5, "gpu": 1.0}
STATES = ("cool:", "hot@0.5:gpu=3,1large=1.5", "busy@0.2:1large=4")


def test_it_is_the_best_of_all_chains() -> None:
    graph = load("vgg16@0.25/64", ())
    evaluator = CostModelEvaluator()
    platform = evaluator.described("pixel4")
    assert platform is not None
    platform = platform.restrict(PROCESSORS)
    with evaluator.prepare(platform) as session:
        states = in_states(session, platform, STATES, "worst").states

        def latencies_s(plan: Plan) -> list[float]:
            return [float(s.load(graph, plan).run(1).latency_s[0]) for s in map(session.in_state, states)]

        space = ChainSpace(graph, platform, 2)
        every = [latencies_s(space.plan_at(i)) for i in range(space.cardinality())]
        criteria: tuple[Robust, ...] = ("worst", "expected")
        for robust in criteria:
            priced = in_states(session, platform, STATES, robust)
            assert priced.states == states
            estimate = robust_estimate(graph, priced, platform, 2)
            value = priced.value_s(latencies_s(estimate.optima[0]))
            assert value == pytest.approx(min(map(priced.value_s, every)))
            assert estimate.bounds.proven
            nominal = nominal_plan(graph, session, platform, 2)
            assert value <= priced.value_s(latencies_s(nominal)) * (1 + 1e-9)


@pytest.mark.parametrize("robust", ["worst", "expected"])
def test_every_objective_is_reported_in_each_state_by_itself(robust: Robust) -> None:
    graph, evaluator = load("squeezenet1_1@0.25/64", ()), CostModelEvaluator()
    platform = evaluator.described("pixel4")
    assert platform is not None
    platform = platform.restrict(PROCESSORS)
    names = ("energy", "throughput", "occupancy", "latency-p99")
    plan = chain_plan(graph, (9,), ["gpu", "1large"])
    with evaluator.prepare(platform) as session:
        how = [replace(pricing(find_objective(name), platform, session), powers=WATTS) for name in names[1:]]
        how.insert(0, Pricing(find_objective("energy"), platform, WATTS))
        output = in_states(PricedSession(session, how), platform, STATES, robust)
        each = [PricedSession(session.in_state(state), how).load(graph, plan) for state in output.states]
        found = output.load(graph, plan)
        assert found.run(1).latency_s[0] == pytest.approx(output.value_s([c.run(1).latency_s[0] for c in each]))
        assert {*found.figures()} == {*names[1:]}
        for which, name in enumerate(names[1:], 1):
            value = output.value_s([c.figures()[name] for c in each])
            assert found.figures()[name] == pytest.approx(value)
            assert output.only(which).load(graph, plan).run(1).latency_s[0] == pytest.approx(value)


def test_a_study_shows_it_against_the_nominal_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--json", "-q"]
    words += ["--processors", ",".join(PROCESSORS), "--max-stages", "2", "--budget", "20", "--out", "run"]
    for state in STATES:
        words += ["--state", state]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    nominal = found["baselines"][NOMINAL]["latency_ms"]["median"]
    assert found["best"]["latency_ms"]["median"] <= nominal


def test_states_that_are_none_are_reported() -> None:
    platform = CostModelEvaluator().described("pixel4")
    assert platform is not None
    for word in ("hot", "hot:dsp=2", "hot:gpu=x"):
        with fails(UsageError):
            parse_states([word], platform)
    assert parse_states(["a@2:gpu=1.5"], platform)[0].factor("gpu") == 1.5


@pytest.mark.parametrize("model", ["squeezenet1_1@0.25/64", "squeezenet1_1@0.25/64*2"])
def test_a_study_in_a_state_that_is_none_takes_no_folder(model: str, tmp_path: Path) -> None:
    words = ["--model", model, "--evaluator", "cost-model", "--platform", "pixel4", "--state", "gpu=2"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()


def test_processors_that_are_alike_take_equally_long_in_a_state() -> None:
    platform = SyntheticEvaluator().platform()
    with fails(UsageError):
        parse_states(["hot:cpu0=2"], platform)
    assert parse_states(["hot:cpu0=2,cpu1=2"], platform)[0].factor("cpu1") == 2.0
