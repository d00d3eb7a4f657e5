"""Shared studies of several objectives and of several states: every worker gets all values, and finds the same plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import TrialState

from optimizer.cli import main
from optimizer.shared.storage import close_storage, open_storage
from tests.support.postgres import postgres_server
from tests.support.sentences import says

MODEL = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--max-stages", "2"]
BEGIN = [*MODEL, "--processors", "1large,1small,gpu", "--budget", "12", "-q", "--json"]
POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shared.db'}"
        return
    with postgres_server() as server:
        yield server.url


def study(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@contextmanager
def seen_by_optuna(url: str, name: str) -> Iterator[Study]:
    """Give the study as the storage holds it, for Optuna's dashboard and anybody else."""
    storage: BaseStorage = open_storage(url)
    try:
        yield Study(study_name=name, storage=storage)
    finally:
        close_storage(storage)


def test_several_objectives_are_shared(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--study", "front", "--storage", url]
    aims = ["--objective", "latency", "--objective", "energy", *POWERS]
    first = study(capsys, tmp_path / "a", *BEGIN, *aims, *shared)
    second = study(capsys, tmp_path / "b", *shared, "-q", "--json")
    assert first["unique_plans"] == second["unique_plans"] == 12
    assert second["front"] == first["front"]
    values = {tuple(each["values"].values()) for each in first["front"]["plans"]}
    with seen_by_optuna(url, "front") as kept:
        assert len(kept.directions) == 2
        everything = {tuple(1e3 * v for v in trial.values) for trial in kept.get_trials() if trial.values}
    for value in values:
        assert any(value == pytest.approx(other) for other in everything)
    assert main([*BEGIN, *aims, "--power", "gpu=11", *shared, "--out", str(tmp_path / "c")]) == 2
    says(capsys.readouterr().err)
    assert main([*BEGIN, *shared, "--out", str(tmp_path / "d")]) == 2
    says(capsys.readouterr().err)


def test_several_states_are_shared(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--study", "states", "--storage", url]
    states = ["--state", "cool:", "--state", "hot@0.5:gpu=3,1large=1.5", "--robust", "expected"]
    alone = study(capsys, tmp_path / "alone", *BEGIN, *states)
    first = study(capsys, tmp_path / "a", *BEGIN, *states, *shared)
    second = study(capsys, tmp_path / "b", *shared, "-q", "--json")
    assert first["best"]["latency_ms"]["median"] == second["best"]["latency_ms"]["median"]
    assert first["best"]["latency_ms"]["median"] == pytest.approx(alone["best"]["latency_ms"]["median"])
    assert main([*BEGIN, "--state", "cool:", *shared, "--out", str(tmp_path / "c")]) == 2
    says(capsys.readouterr().err)


def test_what_plans_break_is_told_to_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    shared = ["--study", "limits", "--storage", url]
    limits = ["--max-energy", "60", "--deadline", "60", "--sampler", "random", *POWERS]
    study(capsys, tmp_path / "a", *BEGIN, *limits, "--objective", "latency", "--objective", "memory", *shared)
    study(capsys, tmp_path / "b", *shared, "-q", "--json")
    with seen_by_optuna(url, "limits") as kept:
        trials = kept.get_trials()
    broken = [t for t in trials if any(name.startswith("constraints:") for name in t.system_attrs)]
    assert broken
    assert all(len(t.values) == 2 for t in trials if t.state == TrialState.COMPLETE)
