"""The sentences of a study's answer: how plans compare, and what was tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evaluators.measurement.final import Ratio
from evaluators.objectives import LATENCY, OBJECTIVES
from optimizer.report.answer import missed_text, slower_text, slower_than
from optimizer.report.console import _EVERY_S, Steps
from optimizer.report.terminal import tried_text
from optimizer.study.history import WARM
from optimizer.study.result import Result

ENERGY = OBJECTIVES["energy"]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(1.0, 1.0, 1.0), "equal"),
        (Ratio(1.008, 0.99, 1.02), "equal within 2.0 %"),
        (Ratio(1.099, 0.99, 1.21), "9.9 % slower [−1.0, 21]"),
        (Ratio(1.03, 0.88, 1.18), "3.0 % slower [−12, 18]"),
        (Ratio(1.03, 0.9996, 1.06), "3.0 % slower [0.0, 6.0]"),
        (Ratio(0.96, 0.9, 1.05), "4.0 % faster [−5.0, 10]"),
        (Ratio(1.1, 0.9, 1.3), "not decided"),
        (Ratio(1.047, 1.017, 1.079), "4.7 % slower [1.7, 7.9]"),
        (Ratio(0.94, 0.91, 0.97), "6.0 % faster [3.0, 9.0]"),
        (Ratio(3.0, 2.5, 3.5), "3 times as long [2.5, 3.5]"),
    ],
)
def test_ratios_in_words(ratio: Ratio, text: str) -> None:
    assert slower_text(ratio) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(1.008, 0.99, 1.02), "equal within 2.0 % to it"),
        (Ratio(1.1, 0.9, 1.3), "not decided against it"),
        (Ratio(1.047, 1.017, 1.079), "4.7 % more energy than it (95 %: 1.7 to 7.9 %)"),
        (Ratio(3.0, 2.5, 3.5), "3 times as much as it (95 %: 2.5 to 3.5)"),
    ],
)
def test_ratios_in_sentences(ratio: Ratio, text: str) -> None:
    assert slower_than(ratio, ENERGY, "it") == text
    assert slower_than(Ratio(1.0, 1.0, 1.0), LATENCY, "it") == "equal to it"


def study(tried: int, outside: int = 0, taken: int = 0, *, earlier: int = 0, exhausted: bool = False) -> Result:
    beyond = [SimpleNamespace(origin="every layer", measurement=1)] * outside
    beyond += [SimpleNamespace(origin=WARM, measurement=1)] * taken
    history = SimpleNamespace(measured=tried, outside=beyond, known=range(tried + len(beyond)))
    made: Any = SimpleNamespace(history=history, exhausted=exhausted, earlier=earlier, wall_s=5.0, cardinality=60)
    return cast("Result", made)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (study(20), "60 plans in the space, 20 of them tried in 5.0 s"),
        (study(20, 1), "60 plans in the space, 20 of them and 1 baseline outside of it tried in 5.0 s"),
        (study(60, exhausted=True), "60 plans in the space, all of them tried in 5.0 s"),
        (study(20, earlier=12), "60 plans in the space, 20 of them tried, 8 now in 5.0 s"),
        (study(20, 2, earlier=22), "60 plans in the space, 20 of them and 2 baselines outside of it tried earlier"),
        (study(6, taken=7), "60 plans in the space, 6 of them tried in 5.0 s, 7 taken over"),
    ],
)
def test_what_was_tried(made: Result, text: str) -> None:
    assert tried_text(made) == text


def test_steps_that_differ_in_numbers_only_are_written_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("optimizer.report.console.time.monotonic", lambda: now_s)
    steps, due = Steps(), []
    for count, number in [(24, 1), (24, 2), (11, 3), (2, 4)]:
        due.append(steps.is_due(f"final comparison of {count} plans, round {number}"))
    assert due == [True, False, False, False]
    assert steps.is_due("timing 39 operators on cpu0")
    assert steps.is_due("timing 39 operators on cpu1")
    now_s = _EVERY_S
    assert steps.is_due("timing 40 operators on cpu1")
    assert not steps.is_due("timing 41 operators on cpu1")


def test_missed_deadlines_are_told_as_counts_and_by_the_mean_latency_where_they_are_equal() -> None:
    def of(misses: int, mean_ms: float) -> dict[str, float]:
        return {"misses": misses, "requests": 16, "mean_ms": mean_ms}

    outcomes = {"best": of(2, 7.9), "whole": of(5, 8.5), "a process each": of(2, 9.25)}
    ours = "2 of 16 requests of a typical run miss their deadlines"
    assert missed_text(outcomes, "whole", sure=True) == f"{ours}, 5 with “whole”, the best baseline"
    equal = missed_text(outcomes, "a process each", sure=False)
    assert equal.endswith("; the mean latency is 7.9 ms instead of 9.25 ms; not significant")
    assert missed_text(outcomes, "", sure=True) == f"{ours}; no plan with fewer was found"
    assert missed_text(outcomes, "", sure=False) == f"{ours}; no plan with significantly fewer was found"
