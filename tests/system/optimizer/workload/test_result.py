"""What studies of several models tell and leave behind, and what becomes of a plan that is run again."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from evaluators.base import Agreement
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.simulated import Prediction
from optimizer.cli import main
from optimizer.study.config import parse_config
from optimizer.study.several_models import SeveralModels
from optimizer.workload.ranks import PLAIN, grids_of
from search_spaces.models import load
from tests.support.commands import printed, studied
from tests.support.sentences import says

VGG, SQUEEZENET = "vgg11@0.5/32+spectrum", "squeezenet1_1@0.5/64"
ON = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,3med,gpu", "--max-stages", "2", "-q"]
ALLOWED = ("--allow", "ranks", "--max-error", "0.2")

run, study = partial(printed, ON), partial(studied, ON)

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


def written(requests: int) -> str:
    path = Path("w.yaml")
    path.write_text(
        f"models:\n  - {{model: {SQUEEZENET}, count: 2, arrival: {{kind: closed, requests: {requests}}}}}\n"
    )
    return str(path)


def test_a_plan_is_run_again_as_it_was_asked_in_its_study(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = study(capsys, "--workload", written(3), "--budget", "4", "--out", "run")
    written(50)
    Path("other").mkdir()
    monkeypatch.chdir("other")
    again = json.loads(printed([], capsys, "execute", "../run", "--json"))
    outcome = found["workload"]["outcomes"]["best"]
    assert again["mean_ms"] == pytest.approx(outcome["mean_ms"])
    assert again["makespan_ms"] == pytest.approx(outcome["makespan_ms"])


def test_a_model_that_lies_where_the_study_ran_is_found_from_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load(SQUEEZENET).source
    assert source is not None
    shutil.copy(source.path, "mine.tflite")
    study(capsys, "--model", "mine.tflite×2", "--budget", "3", "--out", "run")
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert json.loads(printed([], capsys, "execute", "../run", "--json"))["outputs"] is None
    assert json.loads(printed([], capsys, "compare", "../run", "../run", "--json"))["first"]
    assert Path.cwd().name == "other"


def test_a_study_whose_workload_was_changed_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    study(capsys, "--workload", written(3), "--budget", "3", "--out", "run")
    path = Path("run/best/workload.json")
    document = json.loads(path.read_text())
    document["clients"][0]["own_weights"] = True
    path.write_text(json.dumps(document))
    says(printed([], capsys, "execute", "run", code=2))
    for damaged in ("{", "[]", '{"clients": [{}]}', json.dumps({**document, "seed": None, "clients": []})):
        path.write_text(damaged)
        output = printed([], capsys, "execute", "run", code=2)
        says(output)
        assert output.count("\n") == 1


def test_outputs_that_are_not_what_they_should_be_have_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study(capsys, "--model", f"{SQUEEZENET}×2", "--budget", "3", "--out", "run")
    for error, code in ((0.5, 4), (0.01, 0)):
        agreement = Agreement(False, error, error, 0.1)
        monkeypatch.setattr(Prediction, "verify", lambda _, found=agreement: found)
        assert main(["execute", "run"]) == code
        out = capsys.readouterr().out
        assert ("wrong" in out) == (code == 4)
        says(out)
        assert main(["execute", "run", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["outputs"]["accepted"] == (code == 0)


def test_models_that_are_not_worth_decomposing_are_compared_as_without_tucker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model", "vgg11@0.25/32×2", "--budget", "12")
    plain = study(capsys, *words)
    ranked = study(capsys, *words, "--allow", "ranks", "--max-error", "0.01")
    assert list(ranked["baselines"]) == list(plain["baselines"])
    assert ranked["best"]["plan"] == plain["best"]["plan"]
    assert ranked["speedup"] == plain["speedup"]


def test_files_of_decomposed_models_are_those_of_the_best_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", f"{VGG}×2", *ALLOWED, "--out", "run")
    study(capsys, *words, "--budget", "6")
    stale = Path("run/best/tucker_7_of_before.tflite")
    stale.touch()
    (entry,) = study(capsys, *words, "--budget", "8")["workload"]["tucker"].values()
    assert entry["ranks"]
    assert [p.name for p in Path("run/best").glob("tucker_*")] == [entry["file"]]


def test_a_dry_run_tells_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", f"{VGG}×2", "--dry-run", "--json")
    plain, ranked = json.loads(run(capsys, *words)), json.loads(run(capsys, *words, *ALLOWED))
    assert "most_plans" not in plain
    assert ranked["most_plans"] == ranked["plans"] * (1 + ranked["most_ways"])
    assert ranked["plans"] == plain["plans"]
    assert ranked["baselines"][: len(plain["baselines"])] == plain["baselines"]
    found = study(capsys, "--model", f"{VGG}×2", *ALLOWED, "--budget", "6")
    assert found["space"]["plans"] <= ranked["most_plans"]
    (named,) = {b for b in ranked["baselines"] if b.endswith(", Tucker")}
    kind = named.removesuffix(", Tucker")
    assert any(b.startswith(kind) and b.endswith(", Tucker") for b in found["baselines"])
    assert PLAIN in ranked["baselines"]
    assert PLAIN in found["baselines"]


def test_models_of_one_structure_have_their_triples_priced_once() -> None:
    values = {"model": "vgg11@0.25/32,vgg11@0.25/32+spectrum", "budget": "1", "evaluator": "cost-model"}
    more = {"platform": "pixel4", "allow": "cuts,ranks", "max_error": "0.6"}
    problem = SeveralModels.read(parse_config({**values, **more}), CostModelEvaluator())
    assert len(problem.choices) == 2
    ((_, sets),) = grids_of(problem.workload, problem.choices).items()
    layers = [layer for ranks in sets for layer in ranks]
    assert len(layers) == len(set(layers))
