"""A study of several models with decomposed convolutions, and the error that it tells of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluators.workload.predicted import PredictedSession
from optimizer.cli import main
from tests.support.sentences import says
from tests.system.optimizer.workload.test_result import ALLOWED, VGG, run

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


def test_an_error_is_reported_as_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", f"{VGG}×2,mobilebert/8", *ALLOWED, "--budget", "8")

    def output(out: str) -> str:
        return " ".join(run(capsys, *words, "--out", out).split())

    says(text := output("run"))
    assert "no way" not in text
    tucker = json.loads(Path("run/result.json").read_text())["workload"]["tucker"]
    assert tucker[VGG]["error_measured"] is False
    assert not tucker["mobilebert/8"]["decomposable"]
    assert main(["report", "run"]) == 0
    says(Path("run/report.md").read_text())
    monkeypatch.setattr(PredictedSession, "decomposed_error", lambda *_: 0.05)
    says(output("measured"))
    assert json.loads(Path("measured/result.json").read_text())["workload"]["tucker"][VGG]["error_measured"] is True
