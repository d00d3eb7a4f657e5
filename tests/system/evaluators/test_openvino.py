"""Studies with OpenVINO's kernels, and the error that they are allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.cli import main
from tests.system.evaluators.litert.test_openvino import FIRST, REDUCED, runs


@runs
@pytest.mark.usefixtures("every_runtime")
def test_a_study_and_its_plan(
    tmp_path: Path, cache_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "squeezenet1_1@0.5/64", "--budget", "8", "--max-stages", "2"]
    assert main([*words, "--json", "--out", "run", "--quiet"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert any(name.startswith("whole on") and name.endswith(":openvino") for name in document["baselines"])
    assert main(["execute", "run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["latency_ms"]["median"] > 0


@runs
@pytest.mark.skipif(not REDUCED, reason="this CPU computes in no reduced precision")
def test_plans_keep_the_error_that_is_allowed(
    tmp_path: Path, cache_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "squeezenet1_1@0.5/64", "--budget", "6", "--max-stages", "2", "--json", "--quiet"]
    processors = f"{FIRST},{FIRST}:openvino-{REDUCED}"
    for most in (1e-6, 0.1):
        assert main([*words, "--processors", processors, "--max-error", str(most), "--out", f"run{most}"]) == 0
        best = json.loads(capfd.readouterr().out)["best"]
        assert best["max_rel_error"] <= most
        assert best["identical"] or best["outputs"][0]["name"] == "softmax"
