"""The synthetic evaluator keeps the contract, and its numbers depend on what they say they depend on."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.base import Batch, Candidate, Evaluator, Session
from evaluators.forwarding import ForwardingCandidate, ForwardingSession
from evaluators.schedule import Event, Timeline
from evaluators.testing import (
    EvaluatorContract,
    Noise,
    SyntheticEvaluator,
    check_timeline,
    example_graph,
    schedule,
)
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.support.narrowing import there
from tests.support.sentences import fails

GRAPH = example_graph()
PLATFORM = SyntheticEvaluator().platform()
SPACE = ChainSpace(GRAPH, PLATFORM, 4)
PLANS = st.integers(0, SPACE.cardinality() - 1).map(SPACE.plan_at)


class TestSyntheticEvaluator(EvaluatorContract):
    def evaluator(self) -> Evaluator:
        return SyntheticEvaluator(noise=Noise(instance=0.005, spike_share=0.1))


@given(PLANS)
def test_schedules_are_lawful(plan: Plan) -> None:
    check_timeline(schedule(GRAPH, plan, PLATFORM), GRAPH, plan, PLATFORM)


@given(PLANS, st.integers(0, 2**32), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_runs_depend_on_seed_plan_and_number_alone(plan: Plan, seed: int, batches: list[int]) -> None:
    evaluator = SyntheticEvaluator(seed, Noise(instance=0.01, spike_share=0.2))
    with evaluator.prepare(PLATFORM) as session:
        at_once = session.load(GRAPH, plan).run(sum(batches)).latency_s.tolist()
        other = session.load(GRAPH, SPACE.plan_at(0))
        candidate = session.load(GRAPH, plan)
        bit_by_bit: list[float] = []
        for runs in batches:
            other.run(runs)
            bit_by_bit += candidate.run(runs).latency_s.tolist()
    assert bit_by_bit == at_once
    with SyntheticEvaluator(seed + 1, Noise()).prepare(PLATFORM) as session:
        assert session.load(GRAPH, plan).run(1).latency_s.tolist() != at_once[:1]


def test_fresh_instances_differ_and_are_the_same_again() -> None:
    evaluator = SyntheticEvaluator(noise=Noise(run=0.0, instance=0.005))
    plan = SPACE.plan_at(5)

    def instances() -> list[float]:
        with evaluator.prepare(PLATFORM) as session:
            return [float(session.load(GRAPH, plan, fresh=True).run(2).latency_s[1]) for _ in range(5)]

    assert len(set(instances())) == 5
    assert instances() == instances()


@given(PLANS)
def test_without_noise_a_run_takes_the_true_latency(plan: Plan) -> None:
    evaluator = SyntheticEvaluator(noise=Noise(run=0.0, cold=0.0), interaction=lambda p: 1.0 + len(p.stages))
    with evaluator.prepare(PLATFORM) as session:
        batch = session.load(GRAPH, plan).run(2)
    assert batch.latency_s == pytest.approx(evaluator.true_latency_s(GRAPH, plan))


def test_cutting_on_one_processor_costs_only_the_transfer() -> None:
    evaluator = SyntheticEvaluator()
    whole = evaluator.true_latency_s(GRAPH, chain_plan(GRAPH, [], ["cpu"]))
    cut = evaluator.true_latency_s(GRAPH, chain_plan(GRAPH, [3], ["cpu", "cpu"]))
    assert whole < cut < whole + 1e-4
    assert evaluator.true_latency_s(GRAPH, chain_plan(GRAPH, [], ["cpu0"])) > whole


def test_plans_that_are_made_to_fail() -> None:
    evaluator = SyntheticEvaluator(fails=lambda p: len(p.stages) == 2, returns_nan=lambda p: len(p.stages) == 3)
    with evaluator.prepare(PLATFORM) as session:
        with fails(UnavailableError):
            session.load(GRAPH, chain_plan(GRAPH, [3], ["cpu", "cpu0"]))
        three = session.load(GRAPH, chain_plan(GRAPH, [3, 4], ["cpu", "cpu0", "cpu"]))
        assert math.isnan(three.run(1).latency_s[0])
    with fails(UnavailableError):
        session.load(GRAPH, chain_plan(GRAPH, [], ["cpu"]))


class Wrapped(ForwardingCandidate):
    """A synthetic candidate whose batches are changed on the way out."""

    def __init__(self, inner: Candidate, change: Callable[[Candidate, int, float], Batch]) -> None:
        super().__init__(inner)
        self.change = change

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        return self.change(self.inner, n, stop_above_s)


class WrappedSession(ForwardingSession):
    def __init__(self, inner: Session, change: Callable[[Candidate, int, float], Batch]) -> None:
        super().__init__(inner)
        self.change = change

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        return Wrapped(self.inner.load(graph, plan, fresh=fresh), self.change)


class WrappedEvaluator(Evaluator):
    name = "wrapped"

    def __init__(self, change: Callable[[Candidate, int, float], Batch]) -> None:
        self.change = change

    def platform(self) -> Platform:
        return PLATFORM

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[Session]:
        with SyntheticEvaluator().prepare(platform, scratch) as session:
            yield WrappedSession(session, self.change)


def contract(change: Callable[[Candidate, int, float], Batch], *, measured: bool) -> EvaluatorContract:
    class Contract(EvaluatorContract):
        measures = measured

        def evaluator(self) -> Evaluator:
            return WrappedEvaluator(change)

    return Contract()


def sleeping(unit: float) -> Callable[[Candidate, int, float], Batch]:
    """Runs that take real time, reported in a unit of so many seconds."""

    def change(candidate: Candidate, n: int, stop_above_s: float) -> Batch:
        batch = candidate.run(n, stop_above_s)
        took_s = []
        for _ in batch.latency_s:
            start_s = time.perf_counter()
            time.sleep(0.001)
            took_s.append(time.perf_counter() - start_s)
        return Batch(np.array(took_s) / unit, batch.stage_s)

    return change


def late(candidate: Candidate, n: int, stop_above_s: float) -> Batch:
    return candidate.run(n)


def without_stages(candidate: Candidate, n: int, stop_above_s: float) -> Batch:
    batch = candidate.run(n, stop_above_s)
    return Batch(batch.latency_s, batch.stage_s[:, :0])


def overlapping(candidate: Candidate, n: int, stop_above_s: float) -> Batch:
    batch = candidate.run(n, stop_above_s)
    timeline = batch.timeline or Timeline(())
    return Batch(
        batch.latency_s,
        batch.stage_s,
        Timeline(tuple(Event(e.stage, e.processor, 0.0, e.end_s) for e in timeline.events)),
    )


def test_the_contract_notices_bad_evaluators() -> None:
    with fails(AssertionError):
        contract(late, measured=False).test_stops_after_a_slow_run()
    with fails(AssertionError):
        contract(without_stages, measured=False).test_a_batch_has_a_row_for_each_run()
    with fails(AssertionError):
        contract(overlapping, measured=False).test_timelines_are_lawful()


def test_the_contract_checks_the_unit_against_a_clock() -> None:
    contract(sleeping(1.0), measured=True).test_latencies_are_seconds_of_this_clock()
    for unit in (1e-3, 1e3):
        with fails(AssertionError):
            contract(sleeping(unit), measured=True).test_latencies_are_seconds_of_this_clock()


def test_unlawful_timelines_are_noticed() -> None:
    plan = chain_plan(GRAPH, [3, 5], ["cpu", "cpu0", "cpu1"])
    good = schedule(GRAPH, plan, PLATFORM).events
    check_timeline(Timeline(good), GRAPH, plan, PLATFORM)
    first, second, third = good
    wrong = [
        (first, second),
        (first, second, Event(2, "cpu0", third.start_s, third.end_s)),
        (first, second, Event(2, "cpu1", second.start_s, third.end_s)),
        (first, second, Event(2, "cpu1", third.start_s, 0.0)),
        (second, first, third),
    ]
    for events in wrong:
        with pytest.raises(AssertionError):
            check_timeline(Timeline(events), GRAPH, plan, PLATFORM)


def test_excluded_processors_take_turns_in_the_schedule() -> None:
    apart = chain_plan(GRAPH, [1, 2, 4], ["cpu0", "cpu", "cpu1", "cpu"])
    with SyntheticEvaluator().prepare(PLATFORM) as session, closing(session.load(GRAPH, apart)) as candidate:
        timeline = there(candidate.run(1).timeline)
    check_timeline(timeline, GRAPH, apart, PLATFORM)


def test_importing_needs_neither_pytest_nor_scipy() -> None:
    script = (
        "import sys, evaluators.testing, evaluators.measurement.final, evaluators.sampling;"
        "sys.exit(' '.join({'pytest', 'scipy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
