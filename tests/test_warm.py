"""``--warm-start``: what is known of the same model on the same device is not measured again; else plans carry over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main
from optimizer.storage import read_log
from optimizer.warm import ORIGIN

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu"]
STUDY += ["--max-stages", "2", "-q", "--json"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def study(capsys: pytest.CaptureFixture[str], model: str, out: str, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["--model", model, *STUDY, "--out", out, *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def tried(out: str) -> set[str]:
    """Return the plans that were measured in a study itself."""
    records = read_log(Path(out) / "trials.jsonl").records
    return {
        r.data["digest"]
        for r in records
        if r.kind in ("trial", "baseline") and r.data["origin"] != ORIGIN and r.data["repeat_of"] is None
    }


def test_nothing_is_measured_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--sampler", "tpe", "--budget", "15")
    first = study(capsys, "squeezenet1_1", "first", *words)
    second = study(capsys, "squeezenet1_1", "second", *words, "--seed", "1", "--warm-start", "first")
    assert not tried("first") & tried("second")
    assert second["unique_plans"] == 15
    assert second["best"]["latency_ms"]["median"] <= first["best"]["latency_ms"]["median"]
    again = study(capsys, "squeezenet1_1", "second", *words, "--seed", "1", "--warm-start", "first")
    assert again["unique_plans"] == 15
    assert again["best"] == second["best"]


def test_a_space_that_is_known_is_exhausted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-stages", "1", "--budget", "10")
    study(capsys, "squeezenet1_1", "first", *words)
    found = study(capsys, "squeezenet1_1", "second", *words, "--warm-start", "first")
    assert found["space"]["exhausted"]
    assert not tried("second")


def test_plans_carry_over_to_another_model_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    study(capsys, "squeezenet1_1", "first", "--budget", "12")
    study(capsys, "mobilenet_v1", "model", "--budget", "6", "--warm-start", "first")
    study(capsys, "squeezenet1_1", "device", "--budget", "6", "--warm-start", "first", "--processors", "1small,gpu")
    for out in ("model", "device"):
        origins = [r.data["origin"] for r in read_log(Path(out) / "trials.jsonl").records if r.kind == "trial"]
        assert origins.count(ORIGIN) >= 1


def test_a_folder_without_a_study_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "squeezenet1_1", *STUDY, "--warm-start", "nowhere"]) == 2
    assert "is no run folder" in capsys.readouterr().err
