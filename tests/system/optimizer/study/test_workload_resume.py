"""Studies of several models whose log was damaged, or that were killed early: what is lost is learnt again, no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.samples import Measurement, Samples
from evaluators.workload.predicted import Grids, PredictedSession
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.log import read_log
from optimizer.study.several_models import SeveralModels
from optimizer.workload.ranks import Variants, find_variants
from optimizer.workload.search import WorkloadProposer
from search_spaces.core.errors import EXIT_INTERRUPTED
from tests.support.commands import rewrite_log, studied, tried
from tests.support.short_studies import Killed, go, killed_at
from tests.support.short_studies import tried as trials

MODELS = "vgg11@0.25/32+spectrum×2"
ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,gpu", "--max-stages", "2", "-q"]
WORDS = ["--model", MODELS, "--allow", "ranks", "--max-error", "0.2"]

study = partial(studied, [*WORDS, *ON])

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


def numbers(folder: str) -> list[int]:
    return [r.data["number"] for r in read_log(Path(folder) / "trials.jsonl").records if r.kind == "trial"]


def kinds(folder: str) -> list[str]:
    return [r.kind for r in read_log(Path(folder) / "trials.jsonl").records]


def priced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mapping[str, Any] | None, Grids]]:
    """Return a list that gets what each session is asked the prices of: what is known, and which triples."""
    found: list[tuple[Mapping[str, Any] | None, Grids]] = []
    price = PredictedSession.price

    def noted(
        self: PredictedSession,
        known: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        grids: Grids = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        found.append((known, grids))
        return price(self, known, progress, grids)

    monkeypatch.setattr(PredictedSession, "price", noted)
    return found


def test_prices_that_are_lost_are_learnt_with_those_of_triples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study(capsys, "--budget", "4", "--out", "run")
    asked = priced(monkeypatch)
    rewrite_log("run", lambda record: record.kind != "prices")
    study(capsys, "--budget", "6", "--out", "run")
    study(capsys, "--budget", "7", "--out", "run")
    (lost, grids), (known, none) = asked
    assert lost is None
    assert grids
    assert known is not None
    assert not none
    study(capsys, "--budget", "7", "--out", "whole")
    assert tried("run") == tried("whole")


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_variants_that_are_lost_are_found_again_and_the_budget_is_not_spent_twice(
    capsys: pytest.CaptureFixture[str], sampler: str
) -> None:
    words = ("--sampler", sampler, "--budget")
    study(capsys, *words, "8", "--out", "run")
    before = tried("run")
    rewrite_log("run", lambda record: record.kind != "ranks")
    found = study(capsys, *words, "8", "--out", "run")
    assert tried("run") == before
    assert kinds("run").count("verdict") == 1  # nothing was measured since
    assert found["unique_plans"] == 8
    study(capsys, *words, "11", "--out", "run")
    study(capsys, *words, "11", "--out", "whole")
    assert tried("run") == tried("whole")
    assert numbers("run") == numbers("whole")


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_plans_with_variants_that_are_not_found_again_keep_their_place_in_the_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    words = ("--sampler", sampler, "--out", "run", "--budget")
    study(capsys, *words, "12")
    before = tried("run")
    rewrite_log("run", lambda record: record.kind != "ranks")
    monkeypatch.setattr(
        "optimizer.study.several_models.find_variants",
        lambda *arguments: Variants(tuple(each[-1:] for each in find_variants(*arguments).of)),
    )
    for budget in ("12", "14", "16"):
        study(capsys, *words, budget)
        assert tried("run")[: len(before)] == before
        assert numbers("run") == list(range(len(numbers("run"))))
    assert len(set(tried("run"))) == 16


def test_what_was_priced_survives_a_kill_before_variants_are_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optimizer.study.several_models.find_variants", killed)
    assert main([*WORDS, *ON, "--budget", "4", "--out", "run"]) == EXIT_INTERRUPTED
    assert kinds("run") == ["prices"]


def test_a_plan_that_prices_say_nothing_of_corrects_none() -> None:
    values = {"model": "squeezenet1_1@0.5/64×2", "budget": "1", "evaluator": "cost-model", "platform": "snapdragon855"}
    problem = SeveralModels.read(parse_config({**values, "max_stages": "1"}), CostModelEvaluator())
    plans = [problem.space.plan_at(i) for i in range(2)]
    proposer = WorkloadProposer(problem.space, lambda plan: np.inf if plan == plans[0] else 1.0, plans, 0)
    measured = Measurement(Samples((0.1,) * 5, {}), (0.1,), (), "limit", None, None)
    for plan in plans:
        proposer.observe(plan, measured)
    proposed = proposer.propose()
    assert proposed is not None
    assert proposed not in plans


def test_what_another_worker_measures_is_not_proposed() -> None:
    values = {"model": "squeezenet1_1@0.5/64×2", "budget": "1", "evaluator": "cost-model", "platform": "snapdragon855"}
    problem = SeveralModels.read(parse_config({**values, "max_stages": "2"}), CostModelEvaluator())
    annealed = WorkloadProposer(problem.space, lambda plan: 1.0 / len(plan.stages), [problem.space.plan_at(0)], 0, 20)
    pending: set[str] = set()
    proposer = annealed.anew(1, None, lambda plan: plan.digest not in pending)
    for _ in range(4):
        plan = proposer.propose()
        assert plan is not None
        assert plan.digest not in pending
        pending.add(plan.digest)


@pytest.mark.parametrize("sampler", ["auto", "brute-force", "reinforce"])
@pytest.mark.parametrize("allow", ["cuts", "cuts,branches"])
def test_killed_at_any_moment_it_proposes_what_it_would_have(tmp_path: Path, sampler: str, allow: str) -> None:
    values: dict[str, Any] = {
        "evaluator": "cost-model",
        "platform": "pixel4",
        "processors": ("1large", "gpu"),
        "budget": 14,
    }

    def run(folder: Path) -> None:
        go(folder, model="squeezenet1_1@0.25/64*2,squeezenet1_1@0.5/64", allow=allow, sampler=sampler, **values)

    run(tmp_path / "whole")
    wanted = trials(tmp_path / "whole")
    assert sum(origin == sampler for _, _, origin, *_ in wanted) > 5
    for append in (9, 5, 1) if allow == "cuts" else (5,):
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, append, after=append == 5)
            with pytest.raises(Killed):
                run(tmp_path / "killed")
    run(tmp_path / "killed")
    assert trials(tmp_path / "killed") == wanted


def test_prices_that_were_completed_are_written_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study(capsys, "--budget", "2", "--out", "run")
    price, seen = PredictedSession.price, list[Any]()

    def completed(self: PredictedSession, known: Any, progress: Any, grids: Grids = MappingProxyType({})) -> Any:
        seen.append(known)
        return {**price(self, known, progress, grids), "triples": "all"}

    monkeypatch.setattr(PredictedSession, "price", completed)
    study(capsys, "--budget", "3", "--out", "run")
    study(capsys, "--budget", "4", "--out", "run")
    assert [each.get("triples") for each in seen] == [None, "all"]
    assert kinds("run").count("prices") == 2
