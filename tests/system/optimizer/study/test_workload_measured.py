"""A study of several models that are measured: its table says what its verdict says."""

from __future__ import annotations

import pytest

from tests.support.commands import studied

pytestmark = [pytest.mark.usefixtures("elsewhere"), pytest.mark.litert]


def test_each_models_figures_are_of_the_runs_that_decided(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.study.course._FINAL_OF_TRIAL_S", 0.0)
    words = ("--model", "squeezenet1_1@0.5/64,mobilenet_v1@0.25/64", "--processors", "cpu0,cpu1", "--max-stages", "1")
    found = studied(["-q"], capsys, *words, "--budget", "3")
    outcomes = found["workload"]["outcomes"]
    assert found["evaluator"] == "litert"
    assert set(outcomes) == {"best", *found["baselines"]}
    for name, entry in outcomes.items():
        plan = found["best"] if name == "best" else found["baselines"][name]
        assert entry["mean_ms"] == pytest.approx(plan["latency_ms"]["median"])
        assert sum(entry["instances_ms"].values()) / 2 == pytest.approx(entry["mean_ms"])  # of the same runs
        assert entry["predicted"]["objective"] > 0
    assert found["best"]["slower_than_best"]["ratio"] == 1.0
