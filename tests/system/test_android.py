"""A study on a phone behind an adb server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.cli import main
from tests.adb_server import phone_in_farm


def test_a_study_on_a_phone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--budget", "5", "--max-stages", "2", "--evaluator", "adb"]
    with phone_in_farm(tmp_path, monkeypatch):
        assert main([*words, "--device", "pixel", "--out", str(tmp_path / "run"), "-q", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unique_plans"] == 5
    assert {s["processor"] for s in result["best"]["plan"]["stages"]} <= {"big", "gpu"}
