"""The sentences of a study's answer: how plans compare, and what was tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY, OBJECTIVES
from evaluators.workload.objectives import find_workload_objective
from optimizer.report.answer import (
    against_text,
    answer_text,
    called,
    figure_text,
    gain_text,
    missed_text,
    slower_text,
    slower_than,
)
from optimizer.report.console import _EVERY_S, Steps
from optimizer.report.terminal import tried_text
from optimizer.study.history import WARM
from optimizer.study.result import Result
from tests.support.sentences import says

ENERGY = OBJECTIVES["energy"]


RATIOS = (
    *((1.0, 1.0, 1.0), (1.008, 0.99, 1.02), (1.099, 0.99, 1.21), (1.03, 0.88, 1.18), (1.03, 0.9996, 1.06)),
    *((0.96, 0.9, 1.05), (1.1, 0.9, 1.3), (1.047, 1.017, 1.079), (0.94, 0.91, 0.97), (3.0, 2.5, 3.5)),
)


@pytest.mark.parametrize("ratio", [Ratio(*values) for values in RATIOS])
def test_ratios_in_words(ratio: Ratio) -> None:
    says(slower_text(ratio))
    says(slower_than(ratio, ENERGY, "it"))


def test_equal_latencies_in_words() -> None:
    says(slower_than(Ratio(1.0, 1.0, 1.0), LATENCY, "it"))


@pytest.mark.parametrize("ratio", [Ratio(258.0, 253.0, 263.0), Ratio(0.9, 0.8, 0.95), Ratio(1.1, 0.9, 1.3)])
def test_missed_deadlines_have_no_ratio(ratio: Ratio) -> None:
    says(against_text(ratio, find_workload_objective("misses"), racing=False))


def test_figures_in_words() -> None:
    for interval in ((0.0123, 0.0123), (0.0121, 0.0125), (1e-9, 2302.0)):
        says(figure_text(0.0123, interval, "ms"))


def test_a_plan_is_called_by_its_name_or_by_its_number_in_the_table() -> None:
    baseline, proposed = ({"stages": [{"processor": name}] * 2} for name in ("cpu", "gpu"))
    result = {"baselines": {"the cheapest cut": {"plan": baseline}}}
    says(called(result, baseline, 3))
    says(called(result, proposed, 17))
    says(called(result, proposed))


def test_an_answer_that_is_not_decided_says_so() -> None:
    plans: list[Any] = [{"stages": [{"processor": name}]} for name in ("cpu", "gpu")]
    speedup = {"plan": plans[1], "baseline": "whole on cpu", "ratio": 0.9, "ci95": [0.6, 1.3]}
    result = {
        "best": {"plan": plans[0]},
        "baselines": {"whole on cpu": {"plan": plans[0]}},
        "speedup": speedup,
        "space": {"exhausted": False},
    }
    for decided in (True, False):
        says(answer_text({**result, "decided": decided}))


def test_plans_that_were_tried_in_vain_are_told_from_none() -> None:
    result: dict[str, Any] = {"speedup": None, "best": {"plan": {}}, "baselines": {}, "space": {"exhausted": False}}
    for tried in (1, 12):
        says(gain_text({**result, "unique_plans": tried}))


def study(tried: int, outside: int = 0, taken: int = 0, *, earlier: int = 0, exhausted: bool = False) -> Result:
    beyond = [SimpleNamespace(origin="every layer", measurement=1)] * outside
    beyond += [SimpleNamespace(origin=WARM, measurement=1)] * taken
    history = SimpleNamespace(measured=tried, outside=beyond, known=range(tried + len(beyond)))
    made: Any = SimpleNamespace(history=history, exhausted=exhausted, earlier=earlier, wall_s=5.0, cardinality=60)
    return cast("Result", made)


@pytest.mark.parametrize(
    "made",
    [
        study(20),
        study(20, 1),
        study(60, exhausted=True),
        study(20, earlier=12),
        study(20, 2, earlier=22),
        study(6, taken=7),
    ],
)
def test_what_was_tried(made: Result) -> None:
    says(tried_text(made))


def test_steps_that_differ_in_numbers_only_are_written_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("optimizer.report.console.time.monotonic", lambda: now_s)
    steps, due = Steps(), []
    for count, number in [(24, 1), (24, 2), (11, 3), (2, 4)]:
        due.append(steps.is_due(f"final comparison of {count} plans, round {number}"))
    assert due == [True, False, False, False]
    assert steps.is_due("timing 39 operators on cpu0")
    assert steps.is_due("timing 39 operators on cpu1")
    assert not steps.silent
    now_s = _EVERY_S
    assert steps.silent
    assert steps.is_due("timing 40 operators on cpu1")
    assert not steps.is_due("timing 41 operators on cpu1")


def test_missed_deadlines_are_told_as_counts_and_by_the_mean_latency_where_they_are_equal() -> None:
    def of(misses: int, mean_ms: float) -> dict[str, float]:
        return {"misses": misses, "requests": 16, "mean_ms": mean_ms}

    outcomes = {"best": of(2, 7.9), "whole": of(5, 8.5), "a process each": of(2, 9.25)}
    for name, sure in (("whole", True), ("a process each", False), ("", True), ("", False)):
        says(missed_text(outcomes, name, sure=sure))
