"""Warm-up, repetition and racing: laws, costs and error rates, the latter by simulation of the documented noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Batch, Candidate
from evaluators.measurement.disturbance import Counters, RunFilter
from evaluators.samples import Samples
from evaluators.sampling import MARGIN, WARM_S, ColdStart, SamplingPolicy, measure, noise, prune_limit_s, slower
from search_spaces.core.errors import UnavailableError
from tests.support.sentences import fails

POLICY = SamplingPolicy()
LATENCIES = st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=60)


@dataclass
class Scripted(Candidate):
    """Returns given latencies, one after another, then always the last; counts the calls."""

    values_s: list[float]
    asked: list[tuple[int, float]] = field(default_factory=list)
    done: int = 0

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        self.asked.append((n, stop_above_s))
        taken: list[float] = []
        while len(taken) < n and not (taken and taken[-1] > stop_above_s):
            taken.append(self.values_s[min(self.done, len(self.values_s) - 1)])
            self.done += 1
        latency_s = np.array(taken)
        return Batch(latency_s, np.stack([latency_s * 0.25, latency_s * 0.75], axis=1))


def shared_machine(rng: np.random.Generator, latency_s: float, runs: int = 130) -> Scripted:
    """An instance with its lasting offset, noise of runs, spikes, and a cold first run."""
    runs_s = latency_s * np.exp(0.005 * rng.standard_normal() + 0.01 * rng.standard_normal(runs))
    runs_s *= np.where(rng.random(runs) < 0.05, rng.uniform(1.05, 2.0, runs), 1.0)
    runs_s[0] *= 1.0 + rng.exponential(0.1)
    return Scripted([float(v) for v in runs_s])


@given(LATENCIES, st.none() | LATENCIES)
def test_laws_of_a_measurement(values_s: list[float], incumbent_s: list[float] | None) -> None:
    incumbent = None if incumbent_s is None else Samples(tuple(incumbent_s))
    candidate = Scripted(values_s)
    found = measure(candidate, POLICY, incumbent, lambda: {"load": 0.5})
    all_s = (*found.warmup_s, *found.latency_s.values_s)
    assert len(all_s) == candidate.done, "no run is lost"
    assert found.latency_s.conditions == {"load": 0.5}
    assert len(found.warmup_s) <= POLICY.warmup_max
    assert len(found.latency_s.values_s) <= POLICY.max_runs
    assert found.stage_s == pytest.approx((found.latency_s.median * 0.25, found.latency_s.median * 0.75))
    assert len(found.warmup_s) in (0, POLICY.warmup_max) or len(all_s) == 2 or math.fsum(all_s) >= WARM_S
    if found.stopped == "raced":
        assert incumbent is not None
        assert found.latency_s.median > incumbent.median
    else:
        assert len(found.latency_s.values_s) >= POLICY.min_runs
    if found.stopped == "precision":
        assert found.latency_s.precision <= POLICY.precision
    if found.stopped == "limit":
        assert len(found.latency_s.values_s) == POLICY.max_runs or math.fsum(all_s) >= POLICY.max_s


@given(LATENCIES, LATENCIES)
def test_the_same_latencies_lead_to_the_same_decisions(values_s: list[float], incumbent_s: list[float]) -> None:
    first, again = Scripted(values_s), Scripted(values_s)
    incumbent = Samples(tuple(incumbent_s))
    assert measure(first, POLICY, incumbent) == measure(again, POLICY, incumbent)
    assert first.asked == again.asked


@pytest.mark.parametrize(
    ("values_s", "warm"),
    [
        ([0.1], 1),
        ([0.2, 0.1], 1),
        ([0.4, 0.2, 0.1], 2),
        ([0.1, 0.15, 0.1], 1),
        ([1.3 - 0.1 * i for i in range(12)], 10),
        ([0.006, 0.004], 6),
        ([0.001], 10),
    ],
)
def test_the_warm_up_ends_when_runs_get_no_faster(values_s: list[float], warm: int) -> None:
    patient = replace(POLICY, max_s=1e3)
    assert measure(Scripted(values_s), patient).warmup_s == tuple(
        values_s[min(i, len(values_s) - 1)] for i in range(warm)
    )


def test_a_warm_up_ends_when_the_time_is_up_and_leaves_the_last_runs_as_samples() -> None:
    found = measure(Scripted([1.0, 0.9, 0.8, 0.7]), SamplingPolicy(max_s=1.5, min_runs=1))
    assert (found.warmup_s, found.latency_s.values_s, found.stopped) == ((1.0,), (0.9,), "limit")


def test_a_known_cold_start_lets_the_first_run_decide() -> None:
    incumbent = Samples((0.1,) * 9)
    assert prune_limit_s(1, incumbent, 1.1) < 0.19 < min(prune_limit_s(1, incumbent, cold) for cold in (1.5, math.inf))


def test_a_first_run_that_does_not_promise_a_new_best_is_enough_where_there_is_no_time_for_another() -> None:
    incumbent, cold, short = Samples((0.1,) * 9), ColdStart(1.05, 1.1), SamplingPolicy(max_s=0.15, min_runs=1)
    tie = measure(Scripted([0.106, 0.1]), short, incumbent, cold=cold, single_run=True)
    assert (tie.stopped, tie.latency_s.values_s, tie.warmup_s) == ("single-run", (0.106,), ())
    assert tie.median_s == pytest.approx(0.106 / 1.05)
    assert not tie.promised
    fast = measure(Scripted([0.1, 0.1]), short, incumbent, cold=cold, single_run=True)
    assert (fast.stopped, fast.latency_s.values_s, fast.cold, fast.promised) == ("limit", (0.1,), 1.0, True)
    best = measure(Scripted([0.1, 0.09, 0.091]), short, incumbent, cold=cold, single_run=True)
    assert best.latency_s.values_s == (0.09, 0.091)  # fast twice: enough samples to be the one to beat
    for least in (
        measure(Scripted([0.106, 0.1]), short, incumbent, cold=cold),
        measure(Scripted([0.106, 0.1]), short, incumbent, single_run=True),
        measure(Scripted([0.106, 0.1]), short, single_run=True, cold=cold),
        measure(Scripted([0.106, 0.1]), replace(short, max_s=0.3), incumbent, cold=cold, single_run=True),
    ):
        assert least.stopped != "single-run"


@pytest.mark.parametrize(
    ("lost", "first_s", "runs"),
    [
        pytest.param(0.05, 0.111, 1, id="less than first runs differ by themselves"),
        pytest.param(0.05, 0.106, 2, id="without the loss it may be the new best"),
        pytest.param(0.2, 0.16, 2, id="more than first runs differ by themselves"),
    ],
)
def test_a_first_run_that_lost_a_little_time_is_enough_unless_it_may_be_the_best(
    lost: float, first_s: float, runs: int
) -> None:
    incumbent, cold, short = Samples((0.1,) * 9), ColdStart(1.05, 1.1), SamplingPolicy(max_s=0.15, min_runs=1)
    reading = count()

    def counters() -> Counters:
        """The first run lasts 1 s; later ones lose nothing."""
        number = next(reading)
        return Counters(at_s=float(number), waited_ns={1: int(1e9 * lost) if number else 0})

    runs_of = RunFilter(counters)
    found = measure(Scripted([first_s, 0.105]), short, incumbent, cold=cold, single_run=True, runs=runs_of)
    assert len((*found.warmup_s, *found.latency_s.values_s)) == runs
    assert (found.stopped == "single-run") == (runs == 1)


def test_a_run_that_was_broken_off_tells_nothing_of_its_stages() -> None:
    class Broken(Scripted):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            found = super().run(n, stop_above_s)
            found.stage_s[found.latency_s > 0.2, 1] = 0.0
            return found

    found = measure(Broken([0.1, 0.1, 0.25]), SamplingPolicy(max_s=0.3, min_runs=1), Samples((0.1,) * 9))
    assert found.stage_s == pytest.approx((0.025, 0.075))


def test_the_limit_is_of_measured_seconds() -> None:
    noisy = [0.1, 0.1, 0.13] * 100
    for max_s in (0.3, 1.0, 3.0):
        found = measure(Scripted(noisy), SamplingPolicy(max_s=max_s))
        spent_s = math.fsum((*found.warmup_s, *found.latency_s.values_s))
        assert found.stopped == "limit"
        assert len(found.latency_s.values_s) == 5 or max_s <= spent_s <= max_s + 0.15


def test_the_limit_is_of_the_seconds_that_runs_take_where_their_figures_are_others() -> None:
    class Several(Scripted):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            return replace(super().run(n, stop_above_s), run_s=1.5)

    candidate = Several([0.025, 0.026, 0.028] * 100)
    found = measure(candidate, SamplingPolicy(max_s=1.5, min_runs=3))
    assert found.stopped == "limit"
    assert candidate.done == 4


@pytest.mark.parametrize(
    ("slowdown", "most"), [(-0.03, 12.0), (0.0, 12.0), (0.05, 6.0), (0.1, 3.5), (0.25, 3.2), (0.6, 2.3), (2.5, 1.1)]
)
def test_a_worse_candidate_costs_few_runs(slowdown: float, most: float) -> None:
    rng = np.random.default_rng(1)
    costs, raced = [], []
    for _ in range(150):
        incumbent = measure(shared_machine(rng, 0.1), POLICY).latency_s
        candidate = shared_machine(rng, 0.1 * (1.0 + slowdown))
        raced.append(measure(candidate, POLICY, incumbent).stopped == "raced")
        costs.append(candidate.done)
    assert np.mean(costs) <= most
    if slowdown <= 0.0:
        assert np.mean(raced) <= 0.01
    elif slowdown >= 0.1:
        assert np.mean(raced) >= 0.98, "an incumbent with several spikes looks noisy"


def test_the_cold_start_of_a_small_model_does_not_end_its_race() -> None:
    incumbent = Samples((0.003,) * 9)
    found = measure(Scripted([0.015, 0.008, 0.005, 0.004, 0.003]), POLICY, incumbent)
    assert found.stopped == "precision"
    assert found.latency_s.median == 0.003


@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_the_race_is_fair_however_often_one_looks(spikes: float) -> None:
    rng = np.random.default_rng(2)
    incumbent = Samples(tuple(0.1 * np.exp(0.01 * np.linspace(-1.6, 1.6, 15))))
    assert noise(incumbent) == pytest.approx(0.01, rel=0.3)
    lost = 0
    for _ in range(600):
        runs_s = 0.1 * (1.0 + MARGIN) * np.exp(noise(incumbent) * rng.standard_normal(100))
        runs_s[rng.random(100) < spikes] *= 2.0
        values_s = [float(v) for v in runs_s]
        lost += any(slower(values_s[:n], incumbent) for n in range(1, 101))
    assert lost / 600 <= 0.02, "1 % at the margin, up to the error of the simulation"


@given(LATENCIES, st.integers(0, 59), st.floats(1.0, 100.0))
def test_a_slower_run_never_saves_a_candidate(values_s: list[float], at: int, factor: float) -> None:
    incumbent = Samples((0.1,) * 9)
    worse_s = [v * factor if i == at else v for i, v in enumerate(values_s)]
    assert slower(worse_s, incumbent) >= slower(values_s, incumbent)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf])
def test_an_evaluator_that_returns_no_latency(value: float) -> None:
    with fails(UnavailableError):
        measure(Scripted([0.1, 0.1, value]), POLICY)


def test_an_evaluator_that_returns_nothing() -> None:
    class Empty(Scripted):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002
            return Batch(np.empty(0), np.empty((0, 1)))

    with fails(UnavailableError):
        measure(Empty([]), POLICY)


def test_an_evaluator_that_changes_its_stages() -> None:
    class Changing(Scripted):
        def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
            batch = super().run(n, stop_above_s)
            return Batch(batch.latency_s, np.ones((len(batch.latency_s), self.done)))

    with fails(UnavailableError):
        measure(Changing([0.1]), POLICY)
