"""Processes that are killed or interrupted in the middle of a study, and the command that goes on with it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import SEARCHED
from tests.support.sentences import says
from tests.support.short_studies import tried, verdict

ROOT = Path(__file__).parents[4]
COMMAND = [sys.executable, "-m", "optimizer.cli", "--model", "squeezenet1_1", "--evaluator", "synthetic"]


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def wait_for_trials(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"kind":"trial"') < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_minus_nine_at_random_moments(tmp_path: Path) -> None:
    arguments = ["--budget", "40", "--max-stages", "3", "--study", "s", "-q"]
    whole = start([*arguments, "--out", "whole"], tmp_path)
    assert whole.wait(120) == 0
    whole.communicate()
    for count in (1, 9, 25):
        process = start([*arguments, "--out", "killed"], tmp_path)
        wait_for_trials(tmp_path / "killed" / "trials.jsonl", count, process)
        process.kill()
        process.communicate()
        found = tried(tmp_path / "killed")
        assert len(found) >= count
        assert found == tried(tmp_path / "whole")[: len(found)]
    process = start([*arguments, "--out", "killed"], tmp_path)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in SEARCHED, stderr
    assert tried(tmp_path / "killed") == tried(tmp_path / "whole")
    assert verdict(tmp_path / "killed") == verdict(tmp_path / "whole")


def interrupted_and_resumed(arguments: list[str], folder: Path, tmp_path: Path, number: int) -> list[str]:
    process = start([*arguments, "--json"], tmp_path)
    wait_for_trials(folder / "trials.jsonl", 4, process)
    begin_s = time.monotonic()
    os.killpg(process.pid, number)  # as a terminal does: everyone gets it
    stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - begin_s < 5
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    document = json.loads(stdout)
    assert document["complete"] is False
    assert document["best"]["latency_ms"]["median"] > 0
    last = stderr.splitlines()[-1]
    says(last)
    return shlex.split(last.partition("resume with: ")[2])[1:]


def end_of(process: subprocess.Popen[str]) -> Any:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode in SEARCHED, stderr
    return json.loads(stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_the_command_that_goes_on(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "runs" / "my study"
    arguments = ["--budget", "60", "--sampler", "random", "--out", "runs/my study"]
    command = interrupted_and_resumed(arguments, folder, tmp_path, number)
    before = tried(folder)
    again = subprocess.Popen(
        [sys.executable, "-m", "optimizer.cli", *command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    document = end_of(again)
    assert document["complete"]
    assert document["unique_plans"] == 60
    assert tried(folder)[: len(before)] == before


@pytest.mark.litert
def test_an_interrupt_while_the_device_measures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--evaluator", "litert", "--processors", "cpu", "--budget", "500", "--out", "run"]
    command = interrupted_and_resumed(arguments, folder, tmp_path, signal.SIGINT)
    assert command[:2] == ["--model", "squeezenet1_1"]
