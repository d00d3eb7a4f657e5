"""A machine that changes its speed is noticed, waited for, and does not decide which plan is best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.base import Agreement, Batch, Candidate
from evaluators.comparison import ComparisonPolicy
from evaluators.drift import SHARE, SpeedWatch, change, look
from evaluators.samples import Samples
from evaluators.sampling import SamplingPolicy
from evaluators.testing import Noise, SyntheticEvaluator, SyntheticSession, example_graph
from optimizer.baselines import baselines
from optimizer.decide import decide
from optimizer.history import History
from optimizer.loop import Loop, in_space, measure_plan
from optimizer.storage import TrialLog
from optimizer.watch import Watchman, suspects
from search_spaces.chain import ChainSpace
from search_spaces.errors import UnstableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan

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
        calms: whether it is at its first speed for ever once somebody has waited.
    """

    law: Callable[[float], float] = steady
    calms: bool = False
    spent_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    @property
    def factor(self) -> float:
        return 1.0 if self.calms and self.slept_s else self.law(self.spent_s)


@dataclass
class Slowed:
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

    def verify(self) -> Agreement | None:
        return None

    def close(self) -> None:
        self.inner.close()


@dataclass
class Session:
    """A session on such a machine; it is a witness, so it is watched."""

    inner: SyntheticSession
    machine: Machine
    own: Callable[[Plan], float] = lambda _: 1.0

    def fingerprint(self) -> dict[str, Any]:
        return self.inner.fingerprint()

    def conditions(self) -> dict[str, Any]:
        return {"slept": len(self.machine.slept_s)}

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        return Slowed(self.inner.load(graph, plan, fresh=fresh), self.machine, lambda: self.own(plan))


def samples(rng: np.random.Generator, median_s: float, count: int, noise: float = 0.01) -> Samples:
    return Samples(tuple(float(v) for v in median_s * np.exp(noise * rng.standard_normal(count))))


# The decision


def test_noise_is_no_change_and_a_change_is_found() -> None:
    rng = np.random.default_rng(1)
    alarms = sum(change(samples(rng, 0.01, 3), samples(rng, 0.01, 3)) != 1.0 for _ in range(2000))
    assert alarms <= 10, "0.5 %, and a second look has to agree"
    for factor in (1.15, 0.87):
        found = [change(samples(rng, 0.01, 3), samples(rng, 0.01 * factor, 3)) for _ in range(300)]
        seen = [f for f in found if f != 1.0]
        assert len(seen) >= 285
        assert np.median(seen) == pytest.approx(factor, rel=0.02)


@given(st.floats(1.0, 100.0), st.integers(0, 2))
def test_one_spike_is_no_change(height: float, where: int) -> None:
    found = [0.0101, 0.0100, 0.0102]
    found[where] *= height
    assert change(Samples((0.01, 0.0101, 0.0099)), Samples(tuple(found))) == 1.0


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
def test_looking_takes_its_share_and_no_more(steps: list[tuple[float, float]]) -> None:
    watch = SpeedWatch()
    longest_s = 0.0
    for position, (measured_s, look_s) in enumerate(steps):
        watch.measured_s += measured_s
        if watch.due():
            watch.take(Samples((0.01, 0.01)), look_s, position)
            longest_s = max(longest_s, look_s)
    # A look is allowed by what the one before it took.
    assert watch.looked_s <= SHARE * watch.measured_s + longest_s


def test_a_look_settles_first() -> None:
    with EVALUATOR.prepare(PLATFORM) as inner:
        machine = Machine(lambda spent_s: 3.0 if spent_s < 1e-9 else 1.0)
        found, spent_s = look(Session(inner, machine).load(GRAPH, SPACE.plan_at(0)))
    assert len(found.values_s) == 3
    assert max(found.values_s) < 2.5 * min(found.values_s)
    assert spent_s == pytest.approx(machine.spent_s)


# The study


@dataclass
class Study:
    loop: Loop
    watchman: Watchman
    machine: Machine
    told: list[str]

    @property
    def history(self) -> History:
        return self.loop.history

    def records(self, kind: str) -> list[Any]:
        from optimizer.storage import read_log

        return [r.data for r in read_log(self.loop.log.path).records if r.kind == kind]


def study(folder: Path, machine: Machine, budget: int = 40, seed: int = 0) -> Study:
    told: list[str] = []
    folder.mkdir(exist_ok=True)
    log, contents = TrialLog.open(folder / "trials.jsonl")
    with log, EVALUATOR.prepare(PLATFORM) as inner:
        session = Session(inner, machine)
        history = History(SPACE.distributions())
        history.restore(contents.records)
        loop = Loop(
            graph=GRAPH,
            space=SPACE,
            session=session,
            history=history,
            log=log,
            named=POLICY,
            policy=POLICY,
            sampler="random",
            seed=seed,
            budget=budget,
            queue=[(b.name, b.plan) for b in baselines(GRAPH, PLATFORM, "cpu") if in_space(SPACE, b.plan)],
            predict=lambda plan: EVALUATOR.true_latency_s(GRAPH, plan),
            notify=lambda trial: watchman.after(trial),  # noqa: PLW0108 - it is made below
        )
        watchman = Watchman(
            session,
            GRAPH,
            history,
            log,
            lambda plan: measure_plan(loop, plan, race=False),
            told.append,
            machine.slept_s.append,
        )
        watchman.restore(contents.records)
        loop.run()
    return Study(loop, watchman, machine, told)


def true_s(plan: Plan) -> float:
    return EVALUATOR.true_latency_s(GRAPH, plan)


def total_s(folder: Path) -> float:
    """What a study on a steady machine takes."""
    machine = Machine()
    study(folder, machine)
    return machine.spent_s


def test_a_steady_machine_is_looked_at_and_left_alone(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    looks = found.records("speed")
    assert len(looks) >= 3
    assert not found.told
    assert not found.machine.slept_s
    assert not found.records("repeat")
    assert all(look["changed"] == 1.0 for look in looks)
    assert sum(look["spent_s"] for look in looks[1:]) <= SHARE * found.machine.spent_s
    assert looks[-1]["found"]["conditions"] == {"slept": 0}
    assert all(t.measurement is None or "slept" in t.measurement.latency_s.conditions for t in found.history.trials)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begins=st.floats(0.3, 0.6), factor=st.sampled_from([1.15, 1.5, 0.7]))
def test_a_lasting_change_is_allowed_for(
    tmp_path_factory: pytest.TempPathFactory, begins: float, factor: float
) -> None:
    begin_s = begins * total_s(tmp_path_factory.mktemp("steady"))
    found = study(tmp_path_factory.mktemp("run"), Machine(lambda spent_s: factor if spent_s > begin_s else 1.0))
    assert found.told
    assert found.machine.slept_s
    assert found.history.speed == pytest.approx(factor, rel=0.04)
    # What is called the best is as good as any that was tried, whenever it was measured.
    best = found.history.ranking()[0].plan
    assert true_s(best) <= 1.05 * min(true_s(t.plan) for t in found.history.trials)


def test_a_disturbed_stretch_is_waited_for_and_measured_again(tmp_path: Path) -> None:
    whole_s = total_s(tmp_path / "steady")
    repeated = 0
    for percent in (20, 35, 50):
        begin_s = whole_s * percent / 100
        machine = Machine(lambda spent_s, begin_s=begin_s: 1.6 if spent_s > begin_s else 1.0, calms=True)  # type: ignore[misc]
        found = study(tmp_path / str(percent), machine)
        assert found.history.speed == 1.0
        assert len(machine.slept_s) == 1
        again = found.records("repeat")
        assert len(again) <= 8
        assert all(r["speed"] == 1.0 for r in again)
        repeated += len(again)
        best = found.history.ranking()[0].plan
        assert true_s(best) <= 1.05 * min(true_s(t.plan) for t in found.history.trials)
    assert repeated


def test_a_study_that_goes_on_knows_the_speed(tmp_path: Path) -> None:
    begin_s = 0.3 * total_s(tmp_path / "steady")
    first = study(tmp_path / "run", Machine(lambda spent_s: 1.5 if spent_s > begin_s else 1.0))
    again = study(tmp_path / "run", Machine(lambda _: 1.5), budget=41)
    before = [t.median_s for t in first.history.trials]
    assert [t.median_s for t in again.history.trials[: len(before)]] == before
    assert again.history.speed == pytest.approx(first.history.speed)
    one, other = first.watchman._watch.reference, again.watchman._watch.reference
    assert one is not None
    assert other is not None
    assert one.values_s == other.values_s
    assert not again.told


def test_only_what_could_be_best_is_suspected(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    for good in (0, 10, 30, found.history.next_number):
        for fastest, slowest in ((1.0, 1.0), (1.0, 1.3), (0.7, 1.0)):
            named = suspects(found.history, good, fastest, slowest)
            best_s = found.history.ranking()[0].median_s
            assert all(t.number >= good and t.median_s <= 1.03 * slowest / fastest * best_s for t in named)
            assert len(named) <= 8
            assert good > 0 or named


# The end


def test_a_ratio_that_keeps_changing_ends_with_5(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    named = {b.name: b.plan for b in baselines(GRAPH, PLATFORM, "cpu")}
    slept: list[float] = []
    with EVALUATOR.prepare(PLATFORM) as inner:
        runs = iter(range(10**9))
        wholes = {plan.digest for plan in named.values()}

        def own(plan: Plan) -> float:
            return 1.0 if plan.digest in wholes else 1.0 + next(runs) * 2e-3

        policy = ComparisonPolicy(precision=0.001, max_s=5.0, min_rounds=8, max_rounds=8)
        with pytest.raises(UnstableError, match="too unstable to decide: the ratio of the best plan to") as caught:
            decide(GRAPH, Session(inner, Machine(), own), found.history, named, policy, 0, sleep=slept.append)
    assert caught.value.exit_code == 5
    assert len(slept) == 2


def test_a_machine_that_slows_both_alike_is_compared_once_more_and_decided(tmp_path: Path) -> None:
    found = study(tmp_path, Machine())
    named = {b.name: b.plan for b in baselines(GRAPH, PLATFORM, "cpu")}
    slept: list[float] = []
    with EVALUATOR.prepare(PLATFORM) as inner:
        machine = Machine(lambda spent_s: 1.0 + spent_s)
        policy = ComparisonPolicy(precision=0.001, max_s=5.0, min_rounds=12, max_rounds=12)
        verdict = decide(GRAPH, Session(inner, machine), found.history, named, policy, 0, sleep=slept.append)
    assert len(slept) == 1
    assert verdict.comparison is not None
    assert verdict.comparison.unstable
    assert not verdict.comparison.undecided
    assert verdict.challenger is not None
    truth = true_s(verdict.baseline[1]) / true_s(verdict.challenger)
    assert verdict.comparison.speedup == pytest.approx(truth, rel=0.02)
    assert len(verdict.comparison.stage_s[1]) == len(verdict.challenger.stages)
