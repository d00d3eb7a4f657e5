"""Every proposed plan comes out of Optuna's ``ask``: who replaces the sampler replaces every plan but the queue's."""
# ruff: noqa: ARG002 - signatures are Optuna's

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimizer.model.baselines import baselines
from optimizer.samplers import SAMPLERS, quiet_optuna, study_sampler
from optimizer.samplers.study import ExhaustedError, PlanSampler, StudySampler
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.folder import RunFolder
from optimizer.study.history import OPTIMUM, UNSEEN, History, Trial
from optimizer.study.loop import Loop
from search_spaces.core.allowed_code import allow
from search_spaces.core.errors import UsageError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.space import in_space
from tests.support.sentences import fails
from tests.support.short_studies import Quiet, go, tried
from tests.system.optimizer.study.test_loop import GRAPH, PLATFORM, a_loop

SPACE = ChainSpace(GRAPH, PLATFORM, 3)
NAMED = tuple((b.name, b.plan) for b in baselines(GRAPH, PLATFORM, "cpu") if in_space(SPACE, b.plan))
EXHAUSTED = -1
MODEL = "squeezenet1_1@0.25/64"


class Scripted(optuna.samplers.RandomSampler):
    """Proposes the plans that a test wrote down, by their numbers in the space."""

    script: ClassVar[Sequence[int]] = ()
    asked: ClassVar[int] = 0

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:
        return {name: d for name, d in SPACE.distributions().items() if not d.single()}

    def sample_relative(self, study: optuna.Study, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        index = self.script[Scripted.asked % len(self.script)]
        Scripted.asked += 1
        if index == EXHAUSTED:
            raise ExhaustedError
        return SPACE.encode(SPACE.plan_at(index))


class Wild(optuna.samplers.RandomSampler):
    """Proposes what the space does not hold."""

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return 99


class Opened(Quiet):
    """Keeps the history of a study."""

    history: History

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        self.history = history


SCRIPTED, WILD = f"{__name__}:Scripted", f"{__name__}:Wild"
allow(SCRIPTED)
allow(WILD)


def enqueued(history: History) -> list[bool]:
    return ["fixed_params" in trial.system_attrs for trial in history.study.get_trials(deepcopy=False)]


def play(folder: Path, script: Sequence[int], budget: int) -> Loop:
    Scripted.script, Scripted.asked = script, 0
    with a_loop(folder, sampler=SCRIPTED, queue=NAMED, budget=budget) as (loop, _):
        loop.run()
    return loop


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.integers(0, SPACE.cardinality() - 1), min_size=30, max_size=30, unique=True))
def test_who_replaces_the_sampler_replaces_every_plan_but_the_queue(
    tmp_path_factory: pytest.TempPathFactory, script: list[int]
) -> None:
    loop = play(tmp_path_factory.mktemp("run"), script, 20)
    queued = {plan.digest for _, plan in NAMED}
    trials = loop.history.trials
    assert [t.plan.digest in queued and t.repeat_of is None for t in trials] == enqueued(loop.history)
    proposed = [t.plan for t, was_queued in zip(trials, enqueued(loop.history), strict=True) if not was_queued]
    assert proposed == [SPACE.plan_at(i) for i in script[: len(proposed)]]
    assert len(trials) - len(proposed) == len(queued)


@pytest.mark.parametrize("sampler", sorted(n for n, kind in SAMPLERS.items() if kind.requires != "torch"))
def test_a_study_enqueues_its_baselines_and_nothing_else(sampler: str, tmp_path: Path) -> None:
    watcher = Opened()
    result = go(tmp_path / "run", sampler=sampler, watcher=watcher, model=MODEL, budget=20)
    names = set(result.baselines)
    trials = watcher.history.trials
    assert [t.origin in names for t in trials] == enqueued(watcher.history)
    assert {t.origin for t in trials} - names <= {sampler, OPTIMUM, UNSEEN}
    assert not (sampler != "auto" and any(t.origin == OPTIMUM for t in trials))
    outside = {f"{t.origin} ({t.plan.digest[:8]})" for t in watcher.history.outside}
    assert outside
    assert set(watcher.history.study.user_attrs) == outside


def test_the_models_optimum_is_what_auto_proposes_first(tmp_path: Path) -> None:
    watcher = Opened()
    go(
        tmp_path / "run",
        sampler="auto",
        watcher=watcher,
        model=MODEL,
        budget=20,
        evaluator="cost-model",
        platform="xavier",
    )
    proposed = [t for t, queued in zip(watcher.history.trials, enqueued(watcher.history), strict=True) if not queued]
    optima = [t for t in proposed if t.origin == OPTIMUM]
    assert optima == proposed[:1]
    assert optima[0].median_s <= min(t.median_s for t in watcher.history.known.values()) * (1 + 1e-9)


def test_half_of_the_budget_is_left_for_proposals_where_processors_can_share_work(tmp_path: Path) -> None:
    values = {"model": "squeezenet1_1", "evaluator": "cost-model", "platform": "pixel4", "out": tmp_path / "run"}
    values |= {"processors": ("gpu", "1large", "1med", "1small"), "budget": 12}
    result = run_study(StudyConfig.model_validate(values), Quiet(), ["optimize"])
    origins = [trial[2] for trial in tried(tmp_path / "run")]
    assert [origin in result.baselines for origin in origins] == [True] * 6 + [False] * 6


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.integers(EXHAUSTED, 40), min_size=1, max_size=12))
def test_a_sampler_that_repeats_itself_or_has_nothing_left_gets_unseen_plans(
    tmp_path_factory: pytest.TempPathFactory, script: list[int]
) -> None:
    trials = play(tmp_path_factory.mktemp("run"), script, 25).history.trials
    assert len({t.plan.digest for t in trials if t.repeat_of is None}) == 25
    known = set[str]()
    for trial in trials:
        assert not (trial.origin == UNSEEN and trial.plan.digest in known)
        known.add(trial.plan.digest)


def test_where_nothing_keeps_a_limit_few_plans_are_predicted() -> None:
    predicted: list[Plan] = []

    def allowed(plan: Plan) -> bool:
        predicted.append(plan)
        return False

    knows_nothing = PlanSampler("nothing", SPACE, None)
    sampler = StudySampler("nothing", SPACE, 0, lambda _: optuna.samplers.RandomSampler(), knows_nothing, allowed)
    sampler.begin(0)
    asked = optuna.create_study(sampler=sampler).ask(dict(SPACE.distributions()))
    assert sampler.origin == UNSEEN
    assert SPACE.decode(asked.params) == predicted[-1]
    assert len(predicted) == 50


def test_what_was_reported_of_a_trial_is_final(tmp_path: Path) -> None:
    seen: list[list[Any]] = []

    def look(trial: Trial) -> None:
        seen.append([(t.number, t.state, t.params, t.values) for t in loop.history.study.get_trials(deepcopy=False)])

    with a_loop(tmp_path, sampler="tpe", budget=25, max_stages=2, notify=look) as (loop, _):
        loop.run()
    assert any(t.repeat_of is not None for t in loop.history.trials)
    for before, after in pairwise(seen):
        assert after[: len(before)] == before
    with a_loop(tmp_path, sampler="tpe", budget=25, max_stages=2) as (again, _):
        trials = again.history.study.get_trials(deepcopy=False)
        assert [(t.number, t.state, t.params, t.values) for t in trials] == seen[-1]


def test_parameters_that_the_space_does_not_hold_are_one_line(tmp_path: Path) -> None:
    with (
        a_loop(tmp_path, sampler=WILD, budget=3) as (loop, _),
        fails(UsageError),
    ):
        loop.run()


def test_plans_that_others_measure_are_running_trials(tmp_path: Path) -> None:
    quiet_optuna()
    history = History(SPACE.distributions())
    history.propose_by(study_sampler("random", 0, SPACE))
    mine, other = SPACE.plan_at(3), SPACE.plan_at(5)
    number, params = history.ask(0, SPACE.encode(mine))
    history.running[mine.digest] = number
    pending = {mine.digest: params, other.digest: SPACE.encode(other), "hostile": {"stages": "x"}, "short": {}}
    history.settle(pending)
    history.settle(pending)
    assert [t.state.name for t in history.study.trials] == ["RUNNING", "RUNNING"]
    history.tell(Trial(9, other, "random", SPACE.encode(other), failure="its device is gone"))
    history.settle({})
    assert [t.state.name for t in history.study.trials] == ["FAIL", "FAIL"]
    assert not history.running
