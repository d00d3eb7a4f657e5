"""``optimize compare``: two runs' plans from their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluators.litert.deployment import KIND, write_deployment
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.tools import compare
from search_spaces.core.graph import Graph
from search_spaces.spaces.chain import chain_plan
from tests.support.commands import SEARCHED
from tests.support.remote_agents import agent_process
from tests.support.sentences import says

pytestmark = pytest.mark.litert


@pytest.fixture(scope="module")
def runs(squeezenet: Graph, mobilenet: Graph, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders with nothing but a best plan: a model whole and in parts, and another model."""
    platform = LitertEvaluator().platform()
    processor = platform.processors[-1].name
    plans = {
        "whole": (squeezenet, chain_plan(squeezenet, (), [processor])),
        "parts": (squeezenet, chain_plan(squeezenet, (10, 20), [processor] * 3)),
        "other": (mobilenet, chain_plan(mobilenet, (), [processor])),
    }
    found = {}
    for name, (graph, plan) in plans.items():
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "best").mkdir()
        if graph.source is None:
            raise AssertionError(name)
        write_deployment(found[name] / "best", graph, plan, platform, graph.source.content_digest())
    graph, plan = plans["whole"]
    found["rewritten"] = tmp_path_factory.mktemp("rewritten")
    (found["rewritten"] / "best").mkdir()
    write_deployment(found["rewritten"] / "best", graph, plan, platform, "0" * 64)  # as of another file of this model
    return found


def test_a_model_and_its_rewrite_are_one(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = replace(compare._POLICY, max_s=3.0, disturbed_s=0.0)  # equal plans are compared as long as there is time
    monkeypatch.setattr(compare, "_POLICY", brief)
    code = main(["compare", str(runs["whole"]), str(runs["rewritten"])])
    out, err = capsys.readouterr()
    assert code in (0, 5), err  # 5: a busy machine
    if code == 0:
        says(out)


def test_two_runs_are_compared_with_an_interval(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["compare", str(runs["whole"]), str(runs["parts"] / "best" / "plan.json"), "--json"])
    out, err = capsys.readouterr()
    if code == 5:  # a busy machine: said so, and nothing else
        assert (out, err.count("\n")) == ("", 1)
        return
    found = json.loads(out)
    assert found["ci95"][0] <= found["speedup"] <= found["ci95"][1]
    assert 0.5 < found["speedup"] < 1.5
    assert found["significant"] == (not found["ci95"][0] <= 1 <= found["ci95"][1])


def test_a_plan_that_another_machine_measured_is_measured_here_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_POLICY", replace(compare._POLICY, max_s=3.0, disturbed_s=0.0))
    runs = [str(tmp_path / name) for name in ("here", "there")]
    study = ["squeezenet1_1@0.25/64", "--budget", "1", "-q"]
    assert main([*study, "--processors", "cpu0", "--out", runs[0]]) in SEARCHED
    with agent_process(tmp_path / "agent", "litert") as (_, address):
        device = ["--evaluator", "remote", "--device", address]
        assert main([*study, "--processors", "cpu", "--out", runs[1], *device]) in SEARCHED
    capsys.readouterr()
    code = main(["compare", *runs, "-q", "--json"])
    out, err = capsys.readouterr()
    assert code in SEARCHED, err
    if code == 0:
        says("\n".join(note for note in json.loads(out)["notes"] if "remote" in note))


@pytest.mark.parametrize("second", ["other", "nothing"])
def test_runs_that_cannot_be_compared(runs: dict[str, Path], second: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs["whole"]), str(runs.get(second, runs["whole"] / second))]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Traceback" not in err


def test_a_damaged_plan_of_several_models_is_one_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"kind": KIND}))
    assert main(["compare", str(tmp_path / "plan.json"), str(runs["whole"])]) == 2
    says(capsys.readouterr().err)


def test_predictions_are_compared_on_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Profiles of some processors of a device have fewer terms that may be wrong than the profile of all."""
    for name, words in {
        "one": ["--platform", "pixel4", "--processors", "gpu"],
        "two": ["--platform", "pixel4", "--processors", "gpu,1large"],
        "other": ["--platform", "xavier"],
    }.items():
        out = str(tmp_path / name)
        study = ["squeezenet1_1@0.25/64", "--budget", "1", "--evaluator", "cost-model", "--out", out, "-q", *words]
        assert main(study) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), "-q"]) == 0
    assert "predicted" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other"), "-q"]) == 2
    says(capsys.readouterr().err.strip().splitlines()[-1])
