"""Figures of runs of several models: they go together, and what a file or a device says of them is checked."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from evaluators.schedule import Timeline
from evaluators.workload.outcome import Outcome, Request, read_figures, typical_figures


def run(*seconds: float | None, makespan_s: float = 1.0) -> Outcome:
    return Outcome(tuple((Request(0.0, s, s is None, s is None),) for s in seconds), makespan_s, Timeline(()))


def test_models_figures_go_with_those_of_all() -> None:
    """Where runs alternate, medians of each model would not: 0.1 and 0.1 of runs whose mean is 0.15."""
    runs = [run(0.1, 0.2), run(0.2, 0.1)] * 4
    found = typical_figures([r.to_json() for r in runs])
    assert sum(found["instances_ms"]) / 2 == pytest.approx(found["mean_ms"])
    assert found["mean_ms"] == pytest.approx(150.0)
    assert found["worst_ms"] >= max(found["instances_ms"])
    assert found["answered"] + found["rejected"] == found["requests"] == 2
    assert read_figures(json.loads(json.dumps(found))) == found
    assert typical_figures([]) == read_figures(None) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"throughput_per_s": 0},
        {"throughput_per_s": None},
        {"instances_ms": None},
        {"instances_ms": []},
        {"instances_ms": 3.0},
        {"instances_ms": [math.nan]},
        {"worst_ms": [1.0]},
        {"mean_ms": None},
        {"mean_ms": "x"},
        {"requests": math.inf},
    ],
)
def test_damaged_figures_are_refused(wrong: dict[str, Any]) -> None:
    found = typical_figures([run(0.1, None).to_json()])
    assert read_figures(found)["longest_ms"] == pytest.approx(100.0)
    with pytest.raises(ValueError):
        read_figures(found | wrong)
    with pytest.raises(ValueError):
        read_figures({key: value for key, value in found.items() if key != "misses"})


def test_fewer_missed_deadlines_come_first_and_one_outweighs_no_study() -> None:
    """However late the others are; a run with one more is a few times worse, since means are those of logarithms."""
    rows = itertools.product((0.004, 0.039, 0.041, 9.0, None), repeat=3)
    found = [
        Outcome(tuple((Request(0.0, s, s is None, s is None or s > 0.04),) for s in each), 10.0, Timeline(()), 0.04)
        for each in rows
    ]
    ordered = sorted(found, key=lambda each: each.value_s("misses"))
    assert [each.misses for each in ordered] == sorted(each.misses for each in found)
    assert ordered[0].value_s("misses") == pytest.approx(0.004)
    assert ordered[-1].value_s("misses") == pytest.approx(4 * 0.04)


@pytest.mark.parametrize("wrong", [run(), run(0.1, makespan_s=0.0), run(math.nan), run(-1.0), run(None)])
def test_a_run_that_cannot_be_is_named(wrong: Outcome) -> None:
    assert wrong.problem
    assert not run(0.1, None).problem
