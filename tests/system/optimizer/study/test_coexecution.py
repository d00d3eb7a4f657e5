"""A study of co-execution and its report."""

from __future__ import annotations

from pathlib import Path

from optimizer.report.data import read_study
from optimizer.report.study import study_document
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from tests.support.short_studies import Quiet


def test_a_study_of_co_execution_is_reported(tmp_path: Path) -> None:
    config = StudyConfig(
        model="squeezenet1_1@0.25/64",
        budget=6,
        sampler="random",
        evaluator="cost-model",
        platform=Path("snapdragon855"),
        allow="cuts,branches,splits",
        out=tmp_path / "run",
    )
    result = run_study(config, Quiet(), ["optimize"])
    assert any(stage.share for trial in result.history.trials for stage in trial.plan.stages)
    study_document(read_study(tmp_path / "run"))
