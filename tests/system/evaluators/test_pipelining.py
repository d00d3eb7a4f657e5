"""A study that finds a pipeline on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluators.litert import pipeline
from tests.support.commands import answered, tells


@pytest.mark.litert
def test_a_study_finds_a_pipeline_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "_BLOCK_S", 0.01)  # this is no measurement
    words = ["--model", "mobilenet_v1@0.25/128", "--objective", "throughput", "--processors", "cpu0,cpu1"]
    found = answered(capsys, [*words, "--max-stages", "2", "--budget", "4", "-q", "--out", "run"])
    assert found["best"]["period_ms"]["median"] > 0
    assert found["best"]["identical"] is not False
    tells(capsys, "execute", "run", "--stream")
    assert answered(capsys, ["execute", "run", "--stream"])["in_flight"] > 1
