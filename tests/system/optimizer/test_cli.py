"""Full disks, damaged files and a cache that is spoilt, met by the command as a process of its own."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from optimizer.study.log import read_log
from search_spaces.models.cache import ENVIRONMENT
from tests.optimizer.cli.test_errors import flip
from tests.support.commands import SYNTHETIC, command, one_line
from tests.support.disks import small_disk
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_full_disk_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    arguments = [*SYNTHETIC, "--budget", "60", "--out", "disk/run"]
    with small_disk(tmp_path / "disk", "100k") as disk:
        says(one_line(command([*arguments, "--json"]), 2))
        kept = read_log(disk / "run" / "trials.jsonl")
        assert not kept.damage
        assert len(kept.records) > 5
        assert not [p for p in (disk / "run").iterdir() if p.name.endswith(".tmp")]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert command(arguments).returncode == 0
        assert read_log(disk / "run" / "trials.jsonl").records[: len(kept.records)] == kept.records


def test_a_limit_on_file_size_is_a_full_disk_too(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    arguments = [*SYNTHETIC, "--budget", "60", "--out", "run"]
    assert "trials.jsonl" in one_line(command(arguments, preexec_fn=limit), 2)
    kept = read_log(tmp_path / "run" / "trials.jsonl")
    assert not kept.damage
    assert len(kept.records) > 5


def test_a_full_cache_folder_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        statement = one_line(command([*SYNTHETIC, "--budget", "2"], env={ENVIRONMENT: str(disk)}), 2)
        says(statement)
        assert ENVIRONMENT in statement


def test_a_corrupt_model_in_the_cache_is_built_again_with_a_warning(tmp_path: Path) -> None:
    env = {ENVIRONMENT: str(tmp_path / "cache")}
    arguments = [*SYNTHETIC, "--budget", "2"]
    assert command([*arguments, "--out", "first"], env=env).stderr == ""
    (model,) = (tmp_path / "cache").glob("models/*.tflite")
    content = model.read_bytes()
    flip(model)
    run = command([*arguments, "--out", "second"], env=env)
    assert run.returncode == 0
    assert run.stderr.startswith("optimize: ")
    assert run.stderr.count("\n") == 1
    assert "damaged" in run.stderr
    assert model.read_bytes() == content
    assert command([*arguments, "--out", "third"], env=env).stderr == ""
