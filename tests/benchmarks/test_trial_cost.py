"""What a trial costs beside its measurement: sampler, loop and durable log together, 100 parameters, 1,000 trials."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_MS = 3.0
ROOT = Path(__file__).parents[2]


@pytest.mark.benchmark
@pytest.mark.parametrize("sampler", ["auto", "random"])
def test_a_trial(sampler: str, record_property: Callable[[str, object], None]) -> None:
    # A process of its own: how many threads numpy uses is settled when it is imported.
    command = [sys.executable, "-m", "tests.benchmarks.trial_cost", "-", "--samplers", sampler]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)["samplers"][sampler]
    record_property("ms_per_trial", found["ms_per_trial"])
    assert found["syncs"] == found["records"]
    if sampler == "auto":
        assert found["records"] == found["trials"]
        assert found["ms_per_trial"] <= LIMIT_MS
