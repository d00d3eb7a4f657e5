"""Each sampler goes on where it was killed; test_resume has the same for more ways to die and fewer samplers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from optimizer.samplers import SAMPLERS
from optimizer.samplers.policy.network import Weights
from search_spaces.core.errors import UsageError
from tests.support.sentences import fails
from tests.support.short_studies import Killed, killed_at, records, tried
from tests.support.short_studies import go as run


def go(folder: Path, sampler: str) -> None:
    run(folder, sampler=sampler, model="squeezenet1_1", max_stages=2)


def same_when_killed(sampler: str, folder: Path) -> None:
    go(folder / "whole", sampler=sampler)
    wanted = tried(folder / "whole")
    for append in (7, 9, 1):
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, append, after=append == 7)
            with pytest.raises(Killed):
                go(folder / "killed", sampler=sampler)
        found = tried(folder / "killed")
        assert found == wanted[: len(found)]
    go(folder / "killed", sampler=sampler)
    assert tried(folder / "killed") == wanted


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_killed_three_times_it_reaches_the_same_plans(sampler: str, tmp_path: Path) -> None:
    package = SAMPLERS[sampler].requires
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    same_when_killed(sampler, tmp_path)


@pytest.mark.parametrize("name", ["TPESampler", "CmaEsSampler", "NSGAIIISampler"])
def test_so_does_any_sampler_by_its_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of these keep state in attributes, one of them as a pickle; the log has neither."""
    if name == "CmaEsSampler":
        pytest.importorskip("cmaes")
    monkeypatch.setattr("optimizer.samplers.is_allowed", lambda _: True)
    same_when_killed(f"optuna.samplers:{name}", tmp_path)
    assert not any(record.data.get("attributes") for record in records(tmp_path / "whole"))


def test_so_does_a_policy_from_a_file(tmp_path: Path) -> None:
    policy = tmp_path / "policy.npz"
    Weights.new(5).save(policy)
    same_when_killed(f"reinforce@{policy}", tmp_path)


def test_a_policy_that_cannot_be_read_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    with fails(UsageError):
        go(tmp_path / "run", sampler=f"reinforce@{tmp_path / 'nothing.npz'}")
    assert not (tmp_path / "run").exists()
