"""The verdict: what wins, what is only lucky, and what is recommended when nothing wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from evaluators.comparison import ComparisonPolicy
from evaluators.samples import Measurement, Samples
from evaluators.testing import SyntheticEvaluator
from optimizer.baselines import baselines
from optimizer.decide import Verdict, decide
from optimizer.history import History, Trial
from search_spaces.chain import ChainSpace, chain_plan
from search_spaces.errors import UnavailableError
from search_spaces.plan import Plan
from tests.strategies import chain_graph

GRAPH = chain_graph(8)
EVALUATOR = SyntheticEvaluator()
PLATFORM = EVALUATOR.platform()
SPLIT = chain_plan(GRAPH, (3,), ["cpu", "cpu"])
NAMED = {b.name: b.plan for b in baselines(GRAPH, PLATFORM, "cpu")}
POLICY = ComparisonPolicy(precision=0.01, max_s=5.0)


def history_of(latencies_s: Mapping[Plan, float]) -> History:
    history = History(ChainSpace(GRAPH, PLATFORM, 4).distributions())
    for number, (plan, latency_s) in enumerate(latencies_s.items()):
        found = Measurement(Samples((latency_s,) * 5, {}), (latency_s,), (), "limit", None, None)
        history.add(Trial(number, plan, "test", {}, found))
    return history


def verdict_of(measured_s: Mapping[Plan, float], factor: Callable[[Plan], float]) -> Verdict:
    evaluator = SyntheticEvaluator(interaction=factor)
    with evaluator.prepare(PLATFORM) as session:
        return decide(GRAPH, session, history_of(measured_s), NAMED, POLICY, 0)


def test_a_plan_that_is_really_faster_is_recommended() -> None:
    whole = NAMED["whole on cpu"]
    found = verdict_of({whole: 0.1, SPLIT: 0.08}, lambda plan: 0.7 if plan == SPLIT else 1.0)
    assert found.best == found.challenger == SPLIT
    assert found.baseline == ("whole on cpu", whole)
    assert found.comparison is not None
    assert found.comparison.significant
    truth = EVALUATOR.true_latency_s(GRAPH, whole) / (0.7 * EVALUATOR.true_latency_s(GRAPH, SPLIT))
    assert found.comparison.speedup == pytest.approx(truth, rel=0.02)


def test_a_plan_that_was_only_lucky_is_not() -> None:
    """It looked twice as fast during the search; measured again it is slower."""
    whole = NAMED["whole on cpu"]
    found = verdict_of({whole: 0.1, SPLIT: 0.05}, lambda plan: 1.2 if plan == SPLIT else 1.0)
    assert found.best == whole
    assert found.challenger == SPLIT


def test_a_plan_that_its_parts_speak_for_is_a_finalist_whatever_its_own_run_said() -> None:
    """Four plans had one lucky run each; the one that all measurements of its parts point to had an unlucky one."""
    whole = NAMED["whole on cpu"]
    lucky = [chain_plan(GRAPH, (cut,), ["cpu", "cpu"]) for cut in (1, 2, 5, 6)]
    measured_s = {whole: 0.1, **dict.fromkeys(lucky, 0.05), SPLIT: 0.09}
    evaluator = SyntheticEvaluator(interaction=lambda plan: 0.7 if plan == SPLIT else 1.0)
    with evaluator.prepare(PLATFORM) as session:
        history = history_of(measured_s)
        assert decide(GRAPH, session, history, NAMED, POLICY, 0).best != SPLIT
        assert decide(GRAPH, session, history, NAMED, POLICY, 0, believed=[SPLIT, *lucky]).best == SPLIT


def test_a_cut_baseline_that_only_ties_with_the_whole_model_is_no_yardstick() -> None:
    whole, cut = NAMED["whole on cpu"], NAMED["layer length K=2"]
    evaluator = SyntheticEvaluator()
    same = evaluator.true_latency_s(GRAPH, whole) / evaluator.true_latency_s(GRAPH, cut)
    found = verdict_of({whole: 0.1, cut: 0.099}, lambda plan: same if plan == cut else 1.0)
    assert found.baseline[0] == "whole on cpu"
    assert found.challenger is None
    assert found.comparison is None


def test_a_processor_that_looked_a_little_slower_than_another_is_measured_again() -> None:
    """As a graphics adapter that was asleep in its own trial; one that looked much slower is left alone."""
    first, other = NAMED["whole on cpu"], NAMED["whole on cpu0"]
    truth_s = {p: EVALUATOR.true_latency_s(GRAPH, p) for p in (first, other)}

    def factor(plan: Plan) -> float:
        return 2.0 * truth_s[other] / truth_s[first] if plan == first else 1.0

    found = verdict_of({first: 0.1, other: 0.11}, factor)
    assert found.baseline[0] == "whole on cpu0"
    assert found.again_s["whole on cpu"] > 1.5 * found.again_s["whole on cpu0"]
    assert verdict_of({first: 0.1, other: 0.2}, factor).baseline[0] == "whole on cpu"


def test_without_a_measured_baseline_there_is_no_verdict() -> None:
    with EVALUATOR.prepare(PLATFORM) as session, pytest.raises(UnavailableError, match="no baseline"):
        decide(GRAPH, session, history_of({SPLIT: 0.1}), NAMED, POLICY, 0)


def test_a_verdict_survives_the_log() -> None:
    found = verdict_of({NAMED["whole on cpu"]: 0.1, SPLIT: 0.08}, lambda _: 1.0)
    assert Verdict.from_json(found.to_json()) == found
