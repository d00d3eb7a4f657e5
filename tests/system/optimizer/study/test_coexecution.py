"""Studies of co-execution: the report, and a profile that ran out of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.model.profile import Profile, ProfileTimeError
from optimizer.report.data import read_study
from optimizer.report.study import study_document
from optimizer.study import one_model
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from tests.support.short_studies import Quiet, go


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


def test_a_profile_that_ran_out_of_time_is_told_again_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> Profile:
        raise ProfileTimeError("timing operators ends after 0 s")

    def told(watcher: Quiet) -> bool:
        return any("from the times of operators alone: timing operators ends" in text for text in watcher.messages)

    first, again, warm = Quiet(), Quiet(), Quiet()
    words: dict[str, Any] = {"model": "squeezenet1_1@0.25/64", "allow": "cuts,branches,splits", "budget": 4}
    with monkeypatch.context() as patch:
        patch.setattr(one_model, "split_profile", late)
        go(tmp_path / "first", watcher=first, **words)
    go(tmp_path / "first", watcher=again, **words | {"budget": 5})
    go(tmp_path / "warm", watcher=warm, **words, warm_start=tmp_path / "first")
    assert (told(first), told(again), told(warm)) == (True, True, False)
