"""How long a person waits for ``optimize --help``, and for the first line of an error: at most 0.4 s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [["--help"], ["execute", "--help"], []], ids=["help", "execute", "nothing"])
def test_quick_answers(benchmark: BenchmarkFixture, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "optimizer.cli", *arguments]
    benchmark(subprocess.run, command, capture_output=True, cwd=ROOT, check=False)
    if benchmark.stats is not None:
        assert benchmark.stats.stats.min <= 0.4
