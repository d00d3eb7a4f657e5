"""Explanations: their figures are the evaluator's for the changed plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluators.objectives import OBJECTIVES
from optimizer.cli import main
from optimizer.report.data import read_study
from optimizer.tools.explain import explain
from search_spaces.core.plan import Plan
from tests.support.sentences import says

TABLE = Path(__file__).parents[4] / "experiments" / "tables" / "one_inference.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain") / "run"
    words = ["--model", str(TABLE), "--evaluator", "table", "--max-stages", "3", "--budget", "40", "-q"]
    assert main([*words, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def explained(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["explain", str(run), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_what_is_predicted_is_not_called_measured(explained: dict[str, Any]) -> None:
    both = [m for c in explained["cuts"] for m in (c["left"], c["right"])]
    both += [m for p in explained["parts"] for m in p["elsewhere"].values()] + [
        explained["best"],
        *explained["baselines"].values(),
    ]
    assert all(m["measured_ms"] is None for m in both)
    both = [m for m in both if m["predicted_ms"] is not None]
    assert len(both) > 6
    says(explained["predicted_by"])
    for one in both:
        assert one["predicted_more_ms"] >= -1e-9  # the plan is the best one


def test_the_best_of_every_k_is_no_better_than_the_best(explained: dict[str, Any]) -> None:
    assert [k["stages"] for k in explained["by_stages"]] == [1, 2, 3, 4]
    for entry in explained["by_stages"][:3]:
        assert entry["measured_ms"] is None
        assert len(Plan.from_json(entry["predicted"]).stages) == entry["stages"]
    assert min(k["predicted_ms"] for k in explained["by_stages"][:3]) == pytest.approx(
        explained["best"]["predicted_ms"]
    )


def test_limits_tell_what_binds(explained: dict[str, Any]) -> None:
    limits = {limit["what"]: limit for limit in explained["limits"]}
    assert limits["at most 3 stages (--max-stages)"]["saves_ms"] >= 0.0
    memory = limits["memory of the processors"]
    assert memory["binds"] == (memory["saves_ms"] > 0.0)
    assert limits["transfers take time"]["binds"]
    assert not limits["no stage on cpu"]["binds"]
    says("\n".join(what for what in limits if "npu" in what))
    refused = [m["why_not"] for p in explained["parts"] for m in p["elsewhere"].values() if m["why_not"]]
    assert all("not supported" in why or "not fit" in why for why in refused)
    assert explained["no_plan_below"]["predicted_ms"] <= explained["best"]["predicted_ms"] * (1 + 1e-9)


@pytest.mark.parametrize("allow", ["splits", "ranks", "branches,splits,ranks"])
def test_no_plan_is_below_what_none_is_below(allow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    words = ["--model", "vgg11@0.25/64+spectrum", "--evaluator", "cost-model", "--platform", "zcu102", "--budget", "4"]
    error = ["--max-error", "0.5"] if "ranks" in allow else []
    assert main([*words, *error, "--allow", allow, "-q", "--json", "--out", run]) == 0
    study = json.loads(capsys.readouterr().out)
    assert main(["explain", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["no_plan_below"]["predicted_ms"] == pytest.approx(study["bounds"]["all_plans_ms"])
    assert found["no_plan_below"]["predicted_ms"] <= study["best"]["latency_ms"]["median"] * (1 + 1e-9)


def test_people_and_reports_read_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run)]) == 0
    says(capsys.readouterr().out)
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    says((run / "report.html").read_text())


def test_a_study_that_no_plan_fits_tells_so_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--budget", "9", "--out", str(tmp_path / "run")]
    assert main([*words, "-q", "--deadline", "0.0001"]) == 3
    capsys.readouterr()
    for command in ("report", "explain"):
        assert main([command, str(tmp_path / "run")]) == 2
        says(capsys.readouterr().err.replace(str(tmp_path), "FOLDER"))


def test_a_measured_study_is_explained_by_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--budget", "20", "--out", str(tmp_path / "run")]
    assert main([*words, "-q", "--json"]) == 0
    monkeypatch.setattr("optimizer.tools.explain.make_evaluator", None)  # its device may be away
    found = explain(read_study(tmp_path / "run"))
    says(found["predicted_by"])
    assert found["best"]["measured_ms"] is not None
    assert found["best"]["predicted_ms"] == pytest.approx(found["best"]["measured_ms"], rel=0.2)
    assert len(found["parts"]) == len(found["plan"]["stages"])
    assert len(found["cuts"]) == len(found["plan"]["stages"]) - 1


def test_what_cannot_be_explained_is_reported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    says(capsys.readouterr().err)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "result.json").unlink()
    assert main(["explain", str(copy)]) == 2
    says(capsys.readouterr().err)
    shutil.rmtree(copy)
    shutil.copytree(run, copy)
    config = (copy / "config.yaml").read_text().replace("one_inference", "no_such_table")
    (copy / "config.yaml").write_text(config)
    assert main(["explain", str(copy)]) == 2
    assert "no_such_table.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["table", "model", "several"])
def test_a_study_of_relative_paths_is_read_from_any_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (there := tmp_path / "there").mkdir()
    monkeypatch.chdir(there)
    if kind == "table":
        words, file = ["t.yaml", "--evaluator", "table"], shutil.copy(TABLE, "t.yaml")
    else:
        file = "net.tflite"
        assert main(["inspect", "squeezenet1_1@0.25/64", "-o", file]) == 0
        words = [f"{file}*2" if kind == "several" else file, "--evaluator", "cost-model", "--platform", "pixel4"]
    words += ["--budget", "6", "-q", "--out"]
    assert main([*words, "../run"]) == 0
    monkeypatch.chdir(tmp_path)
    done = ["explain", "execute", "report", *(["export"] if kind != "table" else [])]
    assert [main([command, "run"]) for command in done] == [0] * len(done)
    assert not read_study(tmp_path / "run").missing
    (tmp_path / "here").mkdir()
    (there / file).rename(tmp_path / "here" / file)
    capsys.readouterr()
    for command in ("explain", "execute"):
        assert main([command, "run"]) == 2
        says(capsys.readouterr().err.splitlines()[-1])
    monkeypatch.chdir(tmp_path / "here")
    assert main([*words, "../run"]) == 0  # resumes
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "run"]) == 0


def test_a_deadline_stands_among_what_could_bind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(TABLE), "--evaluator", "table", "--max-stages", "3", "--budget", "20", "-q"]
    assert main([*words, "--deadline", "40", "--out", str(tmp_path / "run"), "--json"]) == 0
    best_ms = json.loads(capsys.readouterr().out)["best"]["latency_ms"]["median"]
    assert main(["explain", str(tmp_path / "run")]) == 0
    says(" ".join(capsys.readouterr().out.split()).replace(f" {40 - best_ms:.4g} ms", " N ms"))


SEARCH = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--budget", "8", "-q"]


@pytest.mark.parametrize("name", ["energy", "throughput", "memory"])
def test_a_plan_is_explained_by_what_it_was_chosen_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = [
        *SEARCH,
        "--processors",
        "1large,gpu",
        "--out",
        str(tmp_path / "run"),
        "--objective",
        name,
        "--max-stages",
        "2",
    ]
    words += ["--power", "1large=2", "--power", "gpu=1"] if name == "energy" else []
    assert main([*words, "--json"]) == 0
    objective, found = OBJECTIVES[name], json.loads(capsys.readouterr().out)
    assert main(["explain", str(tmp_path / "run"), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert (explained["objective"], explained["unit"]) == (name, objective.shown_unit)
    assert explained["best"]["predicted_ms"] == pytest.approx(found["best"][objective.key]["median"])
    assert main(["explain", str(tmp_path / "run")]) == 0
    assert f"predicted, {objective.shown_unit}" in capsys.readouterr().out or name == "memory"


def test_sides_of_a_split_are_reported_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SEARCH, "--processors", "1large,3med", "--out", str(tmp_path / "run"), "--allow", "cuts,branches,splits"]
    assert main([*words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]["plan"]
    assert main(["explain", str(tmp_path / "run"), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert len(explained["parts"]) == len(best["stages"])
    split = [p for p, s in zip(explained["parts"], best["stages"], strict=True) if "share" in s]
    says("\n".join(sorted({p["elsewhere"]["–"]["why_not"] for p in split})))
    assert not any("--max-stages" in limit["what"] for limit in explained["limits"])


def test_limits_are_those_of_plans_with_branches_where_these_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "googlenet@0.25/64", *SEARCH[2:], "--processors", "1large,3med", "--out", str(tmp_path / "run")]
    assert main([*words, "--allow", "cuts,branches", "--json"]) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "run"), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    best = min(e["predicted_ms"] for e in (explained["best"], *explained["baselines"].values()) if e["predicted_ms"])
    easier = [e for e in explained["limits"] if "take" in e["what"]]
    assert easier
    assert all(e["without_ms"] <= best * 1.01 for e in easier)
    assert explained["by_cuts_alone"]


def test_no_plan_is_left_where_an_operator_runs_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.yaml").write_text(
        """
name: branches
unit: ms
devices: [{kind: cpu}, {kind: npu, overhead: 0.2}]
transfers:
  - {from: cpu, to: npu, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
  - {from: npu, to: cpu, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
networks:
  - name: net
    operators:
      - {name: stem, times: {cpu: 6.0, npu: 1.0}, output_bytes: 4.0e+5}
      - {name: left, reads: [stem], times: {cpu: 9.0, npu: 9.2}, output_bytes: 2.0e+5}
      - {name: right, reads: [stem], times: {cpu: never, npu: 1.1}, output_bytes: 1.0e+5}
      - {name: join, reads: [left, right], times: {cpu: 0.4, npu: 0.2}, output_bytes: 1.0e+5}
"""
    )
    words = ["--model", str(tmp_path / "net.yaml"), "--evaluator", "table", "--allow", "cuts,branches", "--budget", "8"]
    assert main([*words, "-q", "--json", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "run"), "--json"]) == 0
    limits = {e["what"]: e for e in json.loads(capsys.readouterr().out)["limits"]}
    assert limits["no stage on npu"]["without_ms"] is None
    assert limits["no stage on cpu"]["without_ms"] > 0.0


def test_chains_of_equal_periods_do_not_hold_up_an_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "squeezenet1_1@0.25/64 --evaluator cost-model --platform pixel4 --objective throughput --allow cuts --budget 3"
    )
    assert main([*words.split(), "-q", "--json", "--out", str(tmp_path / "run")]) == 0
    monkeypatch.setattr("optimizer.tools.explain._PATIENCE_S", 0.0)
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "run")]) == 0
    says(capsys.readouterr().out)
