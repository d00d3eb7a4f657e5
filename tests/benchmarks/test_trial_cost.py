"""What sampler, loop and durable log add to Optuna's own ask and tell: 100 parameters, 1,000 trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

LIMIT_MS = 3.0
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sampler", ["auto", "random"])
def test_a_trial(sampler: str, benchmark: BenchmarkFixture) -> None:
    # A process of its own: how many threads numpy uses is settled when it is imported.
    command = [sys.executable, "-m", "tests.benchmarks.trial_cost", "-", "--samplers", sampler]
    done: list[str] = []

    def thousand_trials() -> None:
        done.append(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout)

    benchmark.pedantic(thousand_trials, rounds=1)  # type: ignore[no-untyped-call]
    found = json.loads(done[0])["samplers"][sampler]
    benchmark.extra_info.update(found)
    assert found["syncs"] == found["records"]
    assert found["added_ms"] <= LIMIT_MS
    if sampler == "auto":
        assert found["records"] == found["trials"]
