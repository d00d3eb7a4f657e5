"""The verdict: what wins, what is only lucky, what is recommended when nothing wins, and that no row contradicts it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from evaluators.base import Agreement, Candidate, Session
from evaluators.forwarding import ForwardingCandidate, ForwardingSession
from evaluators.measurement.final import FinalPolicy
from evaluators.objectives import find_objective
from evaluators.samples import Measurement, Samples
from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.model.baselines import Baseline, baselines
from optimizer.study.front import front_finalists
from optimizer.study.history import History, Trial
from optimizer.study.verdict import FAR, LEAST_FINALISTS, FinalSettings, Verdict, decide, finalists, shown_samples
from search_spaces.core.errors import RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

GRAPH = chain_graph(8)
EVALUATOR = SyntheticEvaluator()
PLATFORM = EVALUATOR.platform()
SPACE = ChainSpace(GRAPH, PLATFORM, 4)
SPLIT = chain_plan(GRAPH, (3,), ["cpu", "cpu"])
NAMED = {b.name: b.plan for b in baselines(GRAPH, PLATFORM, "cpu")}
POLICY = FinalPolicy(precision=0.01, max_s=5.0)
HOW = FinalSettings(GRAPH, POLICY, 0)


def history_of(latencies_s: Mapping[Plan, float]) -> History:
    history = History(SPACE.distributions())
    for number, (plan, latency_s) in enumerate(latencies_s.items()):
        found = Measurement(Samples((latency_s,) * 5, {}), (latency_s,) * len(plan.stages), (), "limit", None, None)
        history.add(Trial(number, plan, "test", {}, found))
    return history


def verdict_of(
    measured_s: Mapping[Plan, float],
    factor: Callable[[Plan], float],
    ranking: Sequence[Plan] = (),
    how: FinalSettings = HOW,
    evaluator: SyntheticEvaluator = EVALUATOR,
) -> Verdict:
    with replace(evaluator, interaction=factor).prepare(PLATFORM) as session:
        return decide(session, history_of(measured_s), NAMED, how, ranking)


def test_a_plan_that_is_really_faster_is_recommended() -> None:
    whole = NAMED["whole on cpu"]
    found = verdict_of({whole: 0.1, SPLIT: 0.08}, lambda plan: 0.7 if plan == SPLIT else 1.0)
    assert found.best == found.challenger == SPLIT
    assert found.reference == Baseline("whole on cpu", whole)
    assert found.speedup is not None
    assert found.speedup.significant
    truth = EVALUATOR.true_latency_s(GRAPH, whole) / (0.7 * EVALUATOR.true_latency_s(GRAPH, SPLIT))
    assert found.speedup.value == pytest.approx(truth, rel=0.02)


def test_a_plan_that_was_only_lucky_is_not() -> None:
    """It looked twice as fast during the search; measured again it is slower."""
    whole = NAMED["whole on cpu"]
    found = verdict_of({whole: 0.1, SPLIT: 0.05}, lambda plan: 1.2 if plan == SPLIT else 1.0)
    assert found.best == whole
    assert found.challenger == SPLIT


def test_a_baseline_with_cuts_that_is_the_fastest_is_recommended() -> None:
    """It is a plan like any other: the verdict is on the best, not on who proposed it."""
    whole, cut = NAMED["whole on cpu"], NAMED["layer length K=2"]
    found = verdict_of({whole: 0.1, cut: 0.09, SPLIT: 0.11}, lambda plan: 0.6 if plan == cut else 1.0)
    assert found.best == cut
    assert found.reference.name == "whole on cpu"
    assert found.criterion is not None
    assert found.criterion[0] == "layer length K=2"


def test_a_cut_baseline_that_ties_with_the_whole_model_is_not_preferred() -> None:
    whole, cut = NAMED["whole on cpu"], NAMED["layer length K=2"]
    same = EVALUATOR.true_latency_s(GRAPH, whole) / EVALUATOR.true_latency_s(GRAPH, cut)
    found = verdict_of({whole: 0.1, cut: 0.099}, lambda plan: same if plan == cut else 1.0)
    assert found.best == whole
    assert found.next_best == cut
    ratio = found.ratio(cut, whole)
    assert ratio is not None
    assert not ratio.significant


def test_every_processor_alone_takes_part_whatever_the_search_said_of_it() -> None:
    """As a graphics adapter that was asleep in its own trial."""
    first, other = NAMED["whole on cpu"], NAMED["whole on cpu0"]
    truth_s = {p: EVALUATOR.true_latency_s(GRAPH, p) for p in (first, other)}

    def factor(plan: Plan) -> float:
        return 2.0 * truth_s[other] / truth_s[first] if plan == first else 1.0

    found = verdict_of({first: 0.1, other: 0.19}, factor)
    assert found.reference.name == "whole on cpu0"


def test_whole_models_side_by_side_take_part_whatever_the_search_said_of_them() -> None:
    """As "one after another" of several models, with a stage for each, that was measured while the machine was slow."""
    cut = [plan for plan in dict.fromkeys(SPACE.plan_at(i) for i in range(400)) if len(plan.stages) > 2]
    wholes = [chain_plan(GRAPH, (3,), [name, name]) for name in ("cpu", "cpu0")]
    measured = history_of(dict.fromkeys(cut[:LEAST_FINALISTS], 0.1) | dict.fromkeys(wholes, 10.0))
    found, _ = finalists(measured, {}, [], lambda _: True)
    assert {t.plan for t in found} >= set(wholes)


def test_the_best_baseline_is_the_reference_where_every_plan_has_several_stages() -> None:
    """As with several models, whose processes may be so slow that dozens of plans come before the fastest of them."""
    cut = [plan for plan in dict.fromkeys(SPACE.plan_at(i) for i in range(400)) if len(plan.stages) == 2]
    slow = [plan for plan in cut if plan not in NAMED.values()][LEAST_FINALISTS:][:2]
    fast = [plan for plan in cut if plan not in NAMED.values()][:LEAST_FINALISTS]
    named = dict(zip(("a process each", "one after another"), slow, strict=True))
    trials_s = dict.fromkeys(fast, 0.01) | {slow[0]: 0.09, slow[1]: 0.08}
    truth_s = {plan: EVALUATOR.true_latency_s(GRAPH, plan) for plan in trials_s}
    with replace(EVALUATOR, interaction=lambda plan: trials_s[plan] / truth_s[plan]).prepare(PLATFORM) as session:
        found = decide(session, history_of(trials_s), named, HOW)
    assert found.best in fast
    assert found.reference == Baseline("one after another", slow[1])
    assert found.speedup is not None
    assert found.speedup.significant


def test_the_front_is_of_plans_at_one_speed_of_the_machine_and_of_those_just_behind_them() -> None:
    plans = list(dict.fromkeys(SPACE.plan_at(i) for i in range(400)))[:5]
    history = History(SPACE.distributions(), ["energy"])
    for number, (plan, latency_s, speed) in enumerate(
        zip(plans, (1.0, 1.2, 1.02, 1.3, 1.5), (1.0, 1.5, 1.0, 1.0, 1.0), strict=True)
    ):
        figures = {"energy": 2.0 * latency_s}
        samples = Samples((latency_s,) * 5, {})
        found = Measurement(samples, (latency_s,) * len(plan.stages), (), "limit", None, None, figures=figures)
        history.add(Trial(number, plan, "test", {}, found, speed=speed))
    objectives = [find_objective("latency"), find_objective("energy")]
    front = front_finalists(history, objectives, lambda _: True, 12, 1.3)
    assert [t.plan for t in front][:2] == [plans[1], plans[0]], "the slow machine's 1.2 s are 0.8"
    assert plans[2] in [t.plan for t in front]
    assert plans[4] not in [t.plan for t in front]
    assert len(front_finalists(history, objectives, lambda _: True, 12, 0.0)) <= 2


def test_a_plan_that_is_asked_for_takes_part_even_where_it_breaks_a_limit() -> None:
    whole = NAMED["whole on cpu"]
    found, _ = finalists(
        history_of({whole: 0.1, SPLIT: 0.5}), {}, [], lambda t: t.plan != SPLIT, frozenset({SPLIT.digest})
    )
    assert [t.plan for t in found] == [whole, SPLIT]
    assert [t.plan for t in finalists(history_of({whole: 0.1, SPLIT: 0.5}), {}, [], lambda _: True)[0]] == [whole]


def test_plans_with_too_many_stages_are_compared_and_not_recommended() -> None:
    every, whole = NAMED["every layer"], NAMED["whole on cpu"]
    how = replace(HOW, allowed=lambda plan: len(plan.stages) <= 4)
    found = verdict_of({whole: 0.1, every: 0.01, SPLIT: 0.1}, lambda plan: 0.1 if plan == every else 1.0, how=how)
    assert len(found.best.stages) <= 4
    assert found.standing(every) is not None


def test_the_best_plan_that_is_allowed_takes_part_however_fast_others_are() -> None:
    plans = list(dict.fromkeys(SPACE.plan_at(i) for i in range(400)))
    many = [plan for plan in plans if len(plan.stages) == 4][:LEAST_FINALISTS]
    best = next(plan for plan in plans if len(plan.stages) == 2)
    measured = history_of(dict.fromkeys(many, 0.5) | {best: 2.0, NAMED["whole on cpu"]: 5.0})
    found, _ = finalists(measured, {}, [], lambda _: True, allowed=lambda plan: len(plan.stages) <= 2)
    assert best in [t.plan for t in found]


def test_limits_are_kept_where_a_plan_keeps_them() -> None:
    whole = NAMED["whole on cpu"]
    how = replace(HOW, fits=lambda trial: trial.plan != SPLIT)
    assert verdict_of({whole: 0.1, SPLIT: 0.05}, lambda _: 1.0, how=how).best == whole


def test_finalists_reach_within_15_per_cent_or_are_ten_that_are_not_far() -> None:
    plans = list(dict.fromkeys(SPACE.plan_at(i) for i in range(40)))
    near = history_of({p: 0.1 * (1.0 + 0.002 * i) for i, p in enumerate(plans)})
    found, beyond = finalists(near, {}, [], lambda _: True)
    assert len(found) == len(plans)
    assert beyond == 0
    spread = history_of({p: 0.1 * (1.0 + 0.04 * i) for i, p in enumerate(plans)})
    found, _ = finalists(spread, {}, [], lambda _: True)
    assert len([t for t in found if t.median_s < 0.1 * (1.0 + 0.04 * LEAST_FINALISTS)]) == LEAST_FINALISTS
    assert all(len(t.plan.stages) == 1 for t in found[LEAST_FINALISTS:])
    far = history_of({p: 0.1 * (1.0 + i) for i, p in enumerate(plans)})
    found, _ = finalists(far, {}, [], lambda _: True)
    assert all(len(t.plan.stages) == 1 or t.median_s <= 0.1 * (1.0 + FAR) * 1.01 for t in found)


def test_figures_of_the_search_are_scaled_to_the_state_of_the_final() -> None:
    whole = NAMED["whole on cpu"]
    truth_s = EVALUATOR.true_latency_s(GRAPH, whole)
    found = verdict_of({whole: truth_s / 2, SPLIT: EVALUATOR.true_latency_s(GRAPH, SPLIT) / 2}, lambda _: 1.0)
    assert found.scale == pytest.approx(2.0, rel=0.05)
    trial = Trial(9, NAMED["every layer"], "test", {}, Measurement(Samples((0.5,)), (), (), "limit"))
    samples = shown_samples(found, trial, trial.plan)
    assert samples is not None
    assert samples.median == pytest.approx(1.0, rel=0.05)


def test_too_noisy_to_decide_is_reported_and_the_best_known_plan_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluators.measurement.final.UNDECIDED", 0.02)
    whole = NAMED["whole on cpu"]
    how = replace(HOW, policy=FinalPolicy(min_rounds=3, max_rounds=3))
    same = EVALUATOR.true_latency_s(GRAPH, whole) / EVALUATOR.true_latency_s(GRAPH, SPLIT)
    undecided = 0
    for seed in range(8):
        wild = SyntheticEvaluator(noise=Noise(run=0.1, instance=0.1), seed=seed)
        equal = lambda plan: same if plan == SPLIT else 1.0  # noqa: E731
        found = verdict_of({whole: 0.1, SPLIT: 0.1}, equal, how=how, evaluator=wild)
        undecided += bool(found.undecided)
        assert found.best in {whole, SPLIT}
    assert undecided >= 4


def test_a_plan_that_fails_in_the_final_leaves_the_others() -> None:
    whole = NAMED["whole on cpu"]
    failing = SyntheticEvaluator(fails=lambda plan: plan == SPLIT)
    found = verdict_of({whole: 0.1, SPLIT: 0.05}, lambda _: 1.0, evaluator=failing)
    assert found.best == whole
    assert found.speedup is None
    assert found.standing(SPLIT) is None


class ComparedCandidate(ForwardingCandidate):
    """A candidate whose outputs compare as is said."""

    def __init__(self, inner: Candidate, agreement: Agreement) -> None:
        super().__init__(inner)
        self._agreement = agreement

    def verify(self) -> Agreement:
        return self._agreement


class ComparingSession(ForwardingSession):
    """A session that compares outputs: those of one plan as is said, those of others are identical."""

    def __init__(self, inner: Session, plan: Plan, agreement: Agreement) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, outputs=True)
        self._plan, self._agreement = plan, agreement

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        same = Agreement(identical=True, max_abs_error=0.0, max_rel_error=0.0, tolerance=0.0)
        return ComparedCandidate(
            self.inner.load(graph, plan, fresh=fresh), self._agreement if plan == self._plan else same
        )


def test_outputs_that_the_search_did_not_look_at_are_compared_in_the_final() -> None:
    whole = NAMED["whole on cpu"]
    for wrong in (False, True):
        agreement = Agreement(identical=False, max_abs_error=0.1, max_rel_error=0.5 if wrong else 1e-3, tolerance=1e-2)
        history = history_of({whole: 0.1, SPLIT: 0.14})
        with replace(EVALUATOR, interaction=lambda plan: 0.5 if plan == SPLIT else 1.0).prepare(PLATFORM) as session:
            found = decide(ComparingSession(session, SPLIT, agreement), history, NAMED, HOW)
        assert found.best == (whole if wrong else SPLIT)
        assert found.compared.get(SPLIT.digest) == (None if wrong else agreement)
        assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
        assert (found.standing(SPLIT) is None) == wrong


def test_a_single_finalist_is_the_answer() -> None:
    whole = NAMED["whole on cpu"]
    found = verdict_of({whole: 0.1}, lambda _: 1.0)
    assert found.best == whole
    assert found.challenger is None


def test_without_a_measured_plan_there_is_no_verdict() -> None:
    with EVALUATOR.prepare(PLATFORM) as session, fails(UnavailableError):
        decide(session, history_of({}), NAMED, HOW)


def test_a_verdict_survives_the_log() -> None:
    found = verdict_of({NAMED["whole on cpu"]: 0.1, SPLIT: 0.08}, lambda _: 1.0)
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("field", ["best", "plans", "final", "reference", "scale", "after_pause_s"])
def test_damaged_verdicts(field: str) -> None:
    found = verdict_of({NAMED["whole on cpu"]: 0.1, SPLIT: 0.08}, lambda _: 1.0).to_json()
    with fails(RunFolderError):
        Verdict.from_json({**found, field: 7 if field != "scale" else "much"})


def test_a_device_that_is_lost_in_the_final_is_one_line() -> None:
    failing = SyntheticEvaluator(fails=lambda _: True)
    with fails(UnavailableError):
        verdict_of({NAMED["whole on cpu"]: 0.1, SPLIT: 0.05}, lambda _: 1.0, evaluator=failing)
