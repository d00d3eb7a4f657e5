"""What it costs to tell the conditions after a measurement: 20 µs at most, usually."""

from __future__ import annotations

import os

from pytest_benchmark.fixture import BenchmarkFixture

from evaluators.machine import Conditions

MAX_USUAL_S = 2e-5


def test_conditions_of_a_measurement(benchmark: BenchmarkFixture) -> None:
    conditions = Conditions(os.sched_getaffinity(0), list)
    benchmark(conditions.now)
    assert benchmark.stats is not None
    assert benchmark.stats.stats.median <= MAX_USUAL_S
