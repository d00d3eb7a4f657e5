"""A machine that changes its speed is noticed, and does not decide which plan is best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.base import Batch, Candidate, Capabilities
from evaluators.forwarding import ForwardingSession
from evaluators.measurement.disturbance import RunFilter
from evaluators.measurement.drift import SHARE, Drift, probe
from evaluators.measurement.final import FinalPolicy
from evaluators.samples import Samples
from evaluators.sampling import SamplingPolicy
from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession, example_graph
from optimizer.model.baselines import baselines
from optimizer.study.history import History
from optimizer.study.log import TrialLog
from optimizer.study.loop import DriftMonitor, Loop
from optimizer.study.subjects import Search
from optimizer.study.verdict import FinalSettings, decide, finalists
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.space import in_space

GRAPH = example_graph(6)
NOISE = Noise(run=0.01, spike_share=0.03)
EVALUATOR = SyntheticEvaluator(noise=NOISE)
PLATFORM = EVALUATOR.platform()
SPACE = ChainSpace(GRAPH, PLATFORM, 3)
POLICY = SamplingPolicy(precision=1e-4, max_s=0.4, min_runs=3, max_runs=400)


def steady(_: float) -> float:
    return 1.0


@dataclass
class Machine:
    """What all candidates run on: the seconds that it has run, and how slow it is then.

    Attributes:
        law: seconds of computing → how many times as long things take.
    """

    law: Callable[[float], float] = steady
    spent_s: float = 0.0

    @property
    def factor(self) -> float:
        return self.law(self.spent_s)


@dataclass
class Slowed(Candidate):
    """A candidate on such a machine."""

    inner: Candidate
    machine: Machine
    own: Callable[[], float]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        rows = []
        for _ in range(n):
            factor = self.machine.factor * self.own()
            batch = self.inner.run(1)
            rows.append(replace(batch, latency_s=batch.latency_s * factor, stage_s=batch.stage_s * factor))
            self.machine.spent_s += float(rows[-1].latency_s[0])
            if rows[-1].latency_s[0] > stop_above_s:
                break
        latency_s, stage_s = (np.concatenate([getattr(r, name) for r in rows]) for name in ("latency_s", "stage_s"))
        return Batch(latency_s, stage_s, rows[-1].timeline)

    def close(self) -> None:
        self.inner.close()


class Session(ForwardingSession):
    """A session on such a machine; it reports conditions, so its speed is followed."""

    def __init__(self, inner: SyntheticSession, machine: Machine, own: Callable[[Plan], float] = lambda _: 1.0) -> None:
        super().__init__(inner)
        self.machine, self.own = machine, own
        self.capabilities = Capabilities(conditions=True)

    def conditions(self) -> dict[str, Any]:
        return {"machine": "steady" if self.machine.law is steady else "changing"}

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        return Slowed(self.inner.load(graph, plan, fresh=fresh), self.machine, lambda: self.own(plan))


def samples(rng: np.random.Generator, median_s: float, count: int, noise: float = 0.01) -> Samples:
    return Samples(tuple(float(v) for v in median_s * np.exp(noise * rng.standard_normal(count))))


# The track


def test_noise_is_no_change_and_a_lasting_change_is_found() -> None:
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(300):
        drift = Drift()
        for position in range(10):
            drift.take(samples(rng, 0.01, 3), 0.04, position)
        alarms += drift.speed != 1.0
    assert alarms <= 30, "the first measurement is as noisy as the others"
    for factor in (1.15, 0.87):
        drift = Drift()
        for position in range(10):
            drift.take(samples(rng, 0.01 * (factor if position >= 5 else 1.0), 3), 0.04, position)
        assert drift.speed == pytest.approx(factor, rel=0.03)
        assert drift.uncertainty(2, 1.0) <= 0.03
        assert drift.uncertainty(5, 1.0) >= 0.1, "nobody knows when it changed"


@given(st.floats(1.0, 100.0), st.integers(1, 8))
def test_one_spike_is_no_change(height: float, where: int) -> None:
    drift = Drift()
    for position in range(10):
        drift.take(Samples((0.01, 0.0101, 0.0099)), 0.03, position)
        if position == where:
            drift.take(Samples((0.01 * height,) * 3), 0.03, position)
    assert drift.speed == 1.0


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
def test_the_reference_plan_takes_its_share_and_no_more(steps: list[tuple[float, float]]) -> None:
    drift = Drift()
    longest_s = 0.0
    for position, (measured_s, probe_s) in enumerate(steps):
        drift.measured_s += measured_s
        if drift.due():
            drift.take(Samples((0.01, 0.01)), probe_s, position)
            longest_s = max(longest_s, probe_s)
    # One is allowed by what the one before it took.
    assert drift.probed_s <= SHARE * drift.measured_s + longest_s


def test_a_probe_settles_first() -> None:
    with EVALUATOR.prepare(PLATFORM) as inner:
        machine = Machine(lambda spent_s: 3.0 if spent_s < 1e-9 else 1.0)
        found, spent_s = probe(Session(inner, machine).load(GRAPH, SPACE.plan_at(0)), RunFilter())
    assert len(found.values_s) == 3
    assert max(found.values_s) < 2.5 * min(found.values_s)
    assert spent_s == pytest.approx(machine.spent_s)


# The study


@dataclass
class Study:
    loop: Loop
    machine: Machine
    messages: list[str]

    @property
    def history(self) -> History:
        return self.loop.history

    def records(self, kind: str) -> list[Any]:
        from optimizer.study.log import read_log

        return [r.data for r in read_log(self.loop.log.path).records if r.kind == kind]


def study(folder: Path, machine: Machine, budget: int = 40, seed: int = 0) -> Study:
    messages: list[str] = []
    folder.mkdir(exist_ok=True)
    log, contents = TrialLog.open(folder / "trials.jsonl")
    with log, EVALUATOR.prepare(PLATFORM) as inner:
        session = Session(inner, machine)
        history = History(SPACE.distributions())
        history.restore(contents.records)
        loop = Loop(
            graph=GRAPH,
            space=SPACE,
            search=Search(
                session, lambda plan: EVALUATOR.true_latency_s(GRAPH, plan), (), lambda _: (), POLICY, POLICY
            ),
            history=history,
            log=log,
            sampler="random",
            seed=seed,
            budget=budget,
            queue=[(b.name, b.plan) for b in baselines(GRAPH, PLATFORM, "cpu") if in_space(SPACE, b.plan)],
            notify=lambda trial: monitor.after(trial),  # noqa: PLW0108 - it is made below
        )
        monitor = DriftMonitor(loop, messages.append)
        monitor.restore(contents.records)
        loop.run()
    return Study(loop, machine, messages)


def true_s(plan: Plan) -> float:
    return EVALUATOR.true_latency_s(GRAPH, plan)


def total_s(folder: Path) -> float:
    """What a study on a steady machine takes."""
    machine = Machine()
    study(folder, machine)
    return machine.spent_s


def test_a_steady_machine_is_probed_and_left_alone(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    probes = found.records("speed")
    assert len(probes) >= 3
    assert not found.messages
    assert sum(each["spent_s"] for each in probes[1:]) <= SHARE * found.machine.spent_s
    assert probes[-1]["found"]["conditions"] == {"machine": "steady"}
    assert all(t.measurement is None or t.measurement.latency_s.conditions for t in found.history.trials)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(begins=st.floats(0.3, 0.6), factor=st.sampled_from([1.15, 1.5, 0.7]))
def test_a_lasting_change_is_allowed_for(
    tmp_path_factory: pytest.TempPathFactory, begins: float, factor: float
) -> None:
    begin_s = begins * total_s(tmp_path_factory.mktemp("steady"))
    found = study(tmp_path_factory.mktemp("run"), Machine(lambda spent_s: factor if spent_s > begin_s else 1.0))
    assert found.messages
    assert found.history.speed == pytest.approx(factor, rel=0.05)
    finalists_s = [true_s(t.plan) for t in finalists(found.history, {}, [], lambda _: True)[0]]
    # Whenever it was measured, the best that was tried is among those that are measured again.
    assert min(finalists_s) <= 1.001 * min(true_s(t.plan) for t in found.history.trials)


def test_a_resumed_study_knows_the_speed(tmp_path: Path) -> None:
    begin_s = 0.3 * total_s(tmp_path / "steady")
    first = study(tmp_path / "run", Machine(lambda spent_s: 1.5 if spent_s > begin_s else 1.0))
    again = study(tmp_path / "run", Machine(lambda _: 1.5), budget=41)
    before = [t.median_s for t in first.history.trials]
    assert [t.median_s for t in again.history.trials[: len(before)]] == before
    assert again.history.speed == pytest.approx(first.history.speed)
    one, other = first.history.drift.reference, again.history.drift.reference
    assert one is not None
    assert other is not None
    assert one.values_s == other.values_s


def test_a_machine_that_only_gets_slower_is_decided(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    named = {b.name: b.plan for b in baselines(GRAPH, PLATFORM, "cpu")}
    with EVALUATOR.prepare(PLATFORM) as inner:
        session = Session(inner, Machine(lambda spent_s: 1.0 + 0.05 * spent_s))
        verdict = decide(session, found.history, named, FinalSettings(GRAPH, FinalPolicy(max_s=5.0), 0))
    best_s = min(true_s(t.plan) for t in found.history.ranking())
    assert true_s(verdict.best) <= 1.015 * best_s
    assert not verdict.undecided
