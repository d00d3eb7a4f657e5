"""``--compare-with``: a person's own plan is measured, and takes part in the final however slow it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.study.verdict import Verdict
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import answered
from tests.support.sentences import says

ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "-q"]
ONE = ["--model", "squeezenet1_1", "--budget", "12", "--max-stages", "3", *ON]
TWO = ["--model", "squeezenet1_1", "--model", "mobilenet_v1@0.25/128", "--budget", "6", *ON]
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
    return next(Verdict.from_json(json.loads(line)["data"]) for line in lines if '"verdict"' in line[:200])


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


@pytest.mark.parametrize("given", ["missing.json", ".", "other.json", "text.json", "phone.json", "twice"])
def test_a_file_that_cannot_be_compared_with_is_one_line(capsys: pytest.CaptureFixture[str], given: str) -> None:
    plan = slow_plan()
    Path("twice").mkdir()
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
