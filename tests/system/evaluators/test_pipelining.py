"""A study that finds a pipeline on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluators.litert import pipeline
from optimizer.cli import main
from tests.support.sentences import says


@pytest.mark.litert
def test_a_study_finds_a_pipeline_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "_BLOCK_S", 0.01)  # this is no measurement
    words = ["--model", "mobilenet_v1@0.25/128", "--objective", "throughput", "--processors", "cpu0,cpu1"]
    assert main([*words, "--max-stages", "2", "--budget", "4", "-q", "--json", "--out", "run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["period_ms"]["median"] > 0
    assert found["best"]["identical"] is not False
    assert main(["execute", "run", "--stream"]) == 0
    says(capsys.readouterr().out)
    assert main(["execute", "run", "--stream", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_flight"] > 1
