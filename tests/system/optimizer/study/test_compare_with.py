"""``--compare-with``: a person's own plan is measured, and takes part in the final however slow it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.model.baselines import is_baseline
from optimizer.study.verdict import Verdict
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import answered
from tests.support.sentences import says

ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "-q"]
ONE = ["--model", "squeezenet1_1", "--budget", "12", "--max-stages", "3", *ON]
TWO = ["--model", "squeezenet1_1", "--model", "mobilenet_v1@0.25/128", "--budget", "6", "--allow", "cuts", *ON]
SLOW = "plan of slow"

pytestmark = pytest.mark.usefixtures("elsewhere")


def write(plan: Plan, file: str) -> Plan:
    Path(file).write_text(json.dumps(plan.to_json()))
    return plan


def slow_plan() -> Plan:
    graph = load("squeezenet1_1")
    return write(chain_plan(graph, [5, 9], ["1small", "gpu", "1small"]), "slow.json")


def verdict_of(out: str) -> Verdict:
    lines = Path(out, "trials.jsonl").read_text().splitlines()
    return [Verdict.from_json(json.loads(line)["data"]) for line in lines if '"verdict"' in line[:200]][-1]


def test_it_takes_part_in_the_final(capsys: pytest.CaptureFixture[str]) -> None:
    plan = slow_plan()
    found = answered(capsys, [*ONE, "--out", "run", "--compare-with", "slow.json"])
    verdict = verdict_of("run")
    assert SLOW in verdict.names
    assert verdict.plans[verdict.names.index(SLOW)] == plan
    assert verdict.best != plan
    assert SLOW in found["baselines"]
    assert main(["report", "run"]) == 0
    assert SLOW in Path("run/report.html").read_text()


def test_a_baseline_takes_part_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    name = "every layer"
    answered(capsys, [*ONE, "--out", "run"])
    assert name not in verdict_of("run").names
    answered(capsys, [*ONE, "--out", "run", "--compare-with", name])  # a finished study has its final again
    verdict = verdict_of("run")
    ratio = verdict.ratio(verdict.plans[verdict.names.index(name)], verdict.best)
    assert ratio is not None
    assert ratio.value > 1.0


@pytest.mark.parametrize("name", ["every layers", "layer length K=9", "layer type K=3", "plan of mine", "whole"])
def test_what_no_study_can_have_is_no_baseline(name: str) -> None:
    assert not is_baseline(name)
    assert is_baseline("every layer")
    assert is_baseline("one after another on cpu")


def test_a_baseline_that_a_study_lacks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE[:-1], "--budget", "2", "--out", "run", "--compare-with", "whole on none"]) == 0
    says(next(line for line in capsys.readouterr().err.splitlines() if "--compare-with" in line))


def test_a_baseline_that_is_asked_for_is_measured_though_the_budget_is_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*ONE[:2], *ON, "--budget", "6", "--allow", "cuts,splits", "--out", "run"]
    found = answered(capsys, [*words, "--compare-with", "every layer"])
    assert found["baselines"]["every layer"]["latency_ms"] is not None


def test_a_plan_outside_of_the_space_is_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    plan = slow_plan()
    found = answered(capsys, [*ONE, "--max-stages", "1", "--out", "run", "--compare-with", "slow.json"])
    assert plan in verdict_of("run").plans
    assert SLOW in found["baselines"]


def test_of_several_models(capsys: pytest.CaptureFixture[str]) -> None:
    first = Plan.from_json(answered(capsys, [*TWO, "--out", "first"])["best"]["plan"])
    found = answered(capsys, [*TWO, "--seed", "1", "--out", "second", "--compare-with", "first"])
    assert first in verdict_of("second").plans
    assert "plan of first" in found["baselines"]


def test_dry_run_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    slow_plan()
    assert SLOW in answered(capsys, [*ONE, "--dry-run", "--compare-with", "slow.json"])["baselines"]


def test_it_costs_no_budget_and_is_measured_when_a_finished_study_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = slow_plan()
    words = [*ONE, "--budget", "3", "--study", "mine"]
    answered(capsys, words)
    found = answered(capsys, [*words, "--compare-with", "slow.json"])
    assert found["unique_plans"] == 3
    assert plan in verdict_of("runs/mine").plans
    again = answered(capsys, [*words, "--compare-with", "slow.json"])
    assert again["best"] == found["best"]


def test_a_baseline_is_in_the_final_where_a_person_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    graph = load("squeezenet1_1")
    plan = write(chain_plan(graph, range(1, len(graph.operators)), ["gpu"] * len(graph.operators)), "mine.json")
    answered(capsys, [*ONE, "--out", "run", "--compare-with", "mine.json"])
    assert plan in verdict_of("run").plans


def test_workers_that_share_a_study_compare_it_each(capsys: pytest.CaptureFixture[str]) -> None:
    plan = slow_plan()
    shared = [*ONE, "--storage", "sqlite:///shared.db", "--study", "together"]
    answered(capsys, [*shared, "--out", "first"])
    found = answered(capsys, [*shared, "--out", "second", "--compare-with", "slow.json"])
    assert plan in verdict_of("second").plans
    assert SLOW in found["baselines"]
    again = answered(capsys, [*shared, "--out", "third"])  # the plan is no trial of the study that they share
    assert SLOW not in again["baselines"]
    assert again["unique_plans"] == found["unique_plans"]


def test_the_plan_of_the_run_that_a_study_starts_from(capsys: pytest.CaptureFixture[str]) -> None:
    slow_plan()
    first = answered(capsys, [*ONE, "--out", "first"])["best"]["plan"]
    given = ["--warm-start", "first", "--compare-with", "first", "--compare-with", "slow.json"]
    found = answered(capsys, [*ONE, "--out", "second", *given])
    assert {"plan of first", SLOW} <= set(found["baselines"])
    assert {Plan.from_json(first), slow_plan()} <= set(verdict_of("second").plans)


def test_a_plan_of_two_names_is_recommended_once(capsys: pytest.CaptureFixture[str]) -> None:
    best = answered(capsys, [*ONE, "--out", "run"])["best"]["plan"]
    write(Plan.from_json(best), "mine.json")
    assert main([*ONE, "--out", "again", "--compare-with", "mine.json", "--compare-with", "run"]) == 0
    told = capsys.readouterr().out.partition("recommended plan")[0]
    assert told.count("  recommended  ") == 1
    says(told)
    assert main(["report", "again"]) == 0
    says(Path("again/report.html").read_text())


def test_it_takes_part_by_several_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    plan = slow_plan()
    answered(
        capsys, [*ONE, "--objective", "latency", "--objective", "memory", "--out", "run", "--compare-with", "slow.json"]
    )
    assert plan in verdict_of("run").plans


def test_a_plan_with_splits_is_compared_with_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,3med", "-q"]
    model = ["--model", "squeezenet1_1", "--budget", "6", *on]
    first = answered(capsys, [*model, "--allow", "cuts,branches,splits", "--out", "first"])
    assert any("share" in stage for stage in first["best"]["plan"]["stages"])
    found = answered(capsys, [*model, "--allow", "cuts", "--out", "second", "--compare-with", "first"])
    assert "plan of first" in found["baselines"]
    assert Plan.from_json(first["best"]["plan"]) in verdict_of("second").plans


def test_a_deployed_plan_of_several_models_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    first = answered(capsys, [*TWO, "--out", "first"])["best"]["plan"]
    Path("deployed.json").write_text(json.dumps({"kind": "workload plan", "plan": first}))
    assert "plan of deployed" in answered(capsys, [*TWO, "--dry-run", "--compare-with", "deployed.json"])["baselines"]


@pytest.mark.parametrize("wrong", ["static", "two models in a stage", "ranks"])
def test_a_plan_that_several_models_cannot_have_is_one_line(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    plan = answered(capsys, [*TWO, "--out", "first"])["best"]["plan"]
    last = plan["stages"][-1]["operators"][-1][1]
    plan |= {
        "static": {"dispatch": "static"},
        "two models in a stage": {"stages": [{"operators": [[0, last]], "processor": "gpu"}]},
        "ranks": {"ranks": [[3, 7, 7]]},
    }[wrong]
    Path("wrong.json").write_text(json.dumps(plan))
    capsys.readouterr()
    assert main([*TWO, "--out", "second", "--compare-with", "wrong.json"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    says(told)


@pytest.mark.parametrize(
    "given",
    ["missing.json", ".", "other.json", "text.json", "phone.json", "twice", "ranks.json", "queue.json", "gap.json"],
)
def test_a_file_that_cannot_be_compared_with_is_one_line(capsys: pytest.CaptureFixture[str], given: str) -> None:
    plan = slow_plan()
    Path("twice").mkdir()
    Path("ranks.json").write_text(json.dumps(plan.to_json() | {"ranks": [[3, 7, 7]]}))
    Path("queue.json").write_text(json.dumps(plan.to_json() | {"dispatch": "fifo"}))
    split = plan.to_json()
    first = split["stages"][0]
    split["stages"][0:1] = [
        first | {"share": ["height", 0, 3]},
        first | {"share": ["height", 5, 9], "processor": "gpu"},
    ]
    Path("gap.json").write_text(json.dumps(split))
    write(plan, "twice/slow.json")
    write(chain_plan(load("alexnet"), [], ["gpu"]), "other.json")
    Path("text.json").write_text("[1, ")
    write(chain_plan(load("squeezenet1_1"), [], ["dsp"]), "phone.json")
    words = ["slow.json", "--compare-with", "twice/slow.json"] if given == "twice" else [given]
    assert main([*ONE, "--out", "run", "--compare-with", *words]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    says(told)
    assert not Path("run").exists()
