"""Limits on energy and on the outputs' error: plans that break them are not recommended; if all do, the study fails."""

from __future__ import annotations

import json

import pytest

from optimizer.cli import main
from tests.support.sentences import says

STUDY = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--max-stages", "2"]
STUDY += ["--processors", "1large,1small,gpu", "--budget", "20", "-q"]
POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]

pytestmark = pytest.mark.usefixtures("elsewhere")


def energy_mj(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[float, float]:
    """Return what the best plan takes, in milliseconds and millijoules."""
    capsys.readouterr()
    assert main([*STUDY, *POWERS, *words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    return best["latency_ms"]["median"], best["figures"]["energy"] * 1e3


def test_the_fastest_plan_within_the_energy(capsys: pytest.CaptureFixture[str]) -> None:
    fast_ms, much_mj = energy_mj(capsys, "--max-energy", "1000", "--out", "any")
    slow_ms, less_mj = energy_mj(capsys, "--max-energy", f"{0.9 * much_mj}", "--out", "less")
    assert less_mj <= 0.9 * much_mj
    assert slow_ms > fast_ms


def test_energy_that_no_plan_keeps_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STUDY, *POWERS, "--max-energy", "0.01"]) == 3
    says(capsys.readouterr().err)
