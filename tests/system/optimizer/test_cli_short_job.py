"""A short job that measures here, as a process of its own, and its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import SEARCHED, command, one_line
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.litert
def test_a_short_job_and_its_plan(tmp_path: Path) -> None:
    processors = ["--processors", "cpu,cpu0"]  # both of LiteRT, whichever other runtimes are installed
    words = ["--model", "squeezenet1_1", *processors, "--budget", "4", "--max-stages", "2"]
    run = command([*words, "--json", "-q", "--out", "run"])
    remarks = [line for line in run.stderr.splitlines() if not line.startswith("optimize: warning: the machine ")]
    assert run.returncode in SEARCHED
    assert not [line for line in remarks if not line.startswith("optimize: undecided")]
    document = json.loads(run.stdout)
    assert document["best"]["identical"] is True
    assert (document["best"]["max_rel_error"], document["best"]["tolerance"]) == (0.0, 0.0)
    assert all(b["identical"] for b in document["baselines"].values() if b["latency_ms"])
    assert document["gap"] is not None
    executed = command(["execute", "run/best/plan.json", "--json"])
    assert (executed.returncode, executed.stderr) == (0, "")
    latency_ms = json.loads(executed.stdout)["latency_ms"]
    assert 0 < latency_ms["median"] < 1000
    (tmp_path / "run" / "best" / "stage_0.tflite").write_bytes(b"x" * 100)
    says(one_line(command(["execute", "run/best"]), 2))
