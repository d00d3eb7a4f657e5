"""Campaigns of several processes: killed, interrupted, beside each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optimizer.cli import main
from optimizer.study.log import read_log
from tests.support.campaign_files import MODEL, answers, written
from tests.support.sentences import says
from tests.system.optimizer.campaign.test_run import BASIC

ROOT = Path(__file__).parents[3]


def records(folder: Path) -> dict[str, int]:
    return {p.parent.name: len(read_log(p).records) for p in folder.glob("*/trials.jsonl")}


def test_a_killed_campaign_goes_on(tmp_path: Path) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: random, budget: 150, seed: [0, 1]}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    command = [sys.executable, "-m", "optimizer.cli", "run", str(path), "--out", str(out), "-q"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit_s = time.monotonic() + 60
    while not any(n > 40 for n in records(out).values()):
        assert time.monotonic() < limit_s
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = sum(records(out).values())  # on a busy machine the second study may have begun
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    assert len(records(out)) == 2
    state = json.loads((out / "campaign.json").read_text())
    assert [s["status"] for s in state["studies"]] == ["done", "done"]
    assert sum(records(out).values()) > before
    for log in out.glob("*/trials.jsonl"):
        numbers = [r.data["number"] for r in read_log(log).records if r.kind == "trial"]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_it_and_tells_how_to_go_on(tmp_path: Path, jobs: int) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: random, budget: 150, seed: [0, 1]}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    command = [sys.executable, "-m", "optimizer.cli", "run", str(path), "--out", str(out), "-q", "--jobs", str(jobs)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit_s = time.monotonic() + 60
    while not any(n > 40 for n in records(out).values()):
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    says(errors)
    state = json.loads((out / "campaign.json").read_text())
    assert "failed" not in {s["status"] for s in state["studies"]}


@pytest.mark.usefixtures("as_elsewhere")
def test_studies_run_beside_each_other_where_nothing_is_measured(tmp_path: Path) -> None:
    path, one, two = written(tmp_path, BASIC), tmp_path / "one", tmp_path / "two"
    assert main(["run", str(path), "--out", str(one), "-q"]) == 0
    assert main(["run", str(path), "--out", str(two), "-q", "--jobs", "2"]) == 0
    assert answers(one) == answers(two)
