from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evaluators.testing import example_graph
from optimizer.study.result import Result
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.spaces.chain import chain_plan

TYPICAL = {"mean_ms": 10.0, "makespan_ms": 100.0, "throughput_per_s": 20.0, "instances_ms": [10.0], "misses": 0}


@pytest.mark.parametrize(
    ("arrival", "makespan_ms", "rate"),
    [
        (Arrival("periodic", 2, 0.05), 100.0, 20.0),
        (Arrival("poisson", 2, 0.05), 100.0, 20.0),
        (Arrival("burst", 2, offset_s=0.01), 100.0, 20.0),
        (Arrival("burst", 2), 200.0, 10.0),
        (Arrival("closed", 2), 200.0, 10.0),
    ],
)
def test_what_waits_for_requests_lasts_as_long_on_a_slower_machine(
    arrival: Arrival, makespan_ms: float, rate: float
) -> None:
    result: Any = SimpleNamespace(
        samples=lambda _: None,
        verdict=None,
        workload=Workload("w", (Client("a", "squeezenet1_1", 1, arrival),)),
        predictions={},
        objective=SimpleNamespace(name="latency"),
    )
    found = Result._figures(result, chain_plan(example_graph(), (), ["cpu"]), ["a"], TYPICAL, 2.0)
    assert (found["mean_ms"], found["instances_ms"]) == (20.0, {"a": 20.0})
    assert (found["makespan_ms"], found["throughput_per_s"]) == (makespan_ms, rate)
