"""The loop: what is measured first, what costs budget, what is never measured twice, and when it ends."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.base import Candidate, Session
from evaluators.forwarding import ForwardingSession
from evaluators.sampling import SamplingPolicy
from evaluators.testing import Noise, SyntheticEvaluator, example_graph, schedule
from optimizer.exact.chain_costs import ChainCosts
from optimizer.model.baselines import Baseline, baselines
from optimizer.samplers.auto import Problem
from optimizer.samplers.study import MOST_REPEATS
from optimizer.study.history import UNSEEN, History, Trial
from optimizer.study.limits import violations
from optimizer.study.log import TrialLog, read_log
from optimizer.study.loop import LOST, Loop
from optimizer.study.subjects import Search
from search_spaces.core.allowed_code import allow
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace, chain_plan
from search_spaces.spaces.space import in_space
from tests.support.commands import answered
from tests.support.models.tflite_models import Net
from tests.support.sentences import fails, says

GRAPH = example_graph(6)
PLATFORM = SyntheticEvaluator().platform()
POLICY = SamplingPolicy(max_s=0.05, min_runs=3)
RANDOM = "random"


class Stuck(optuna.samplers.RandomSampler):
    """A sampler that proposes one point for ever."""

    def __init__(self, seed: int) -> None:
        super().__init__(0 * seed)


STUCK = f"{__name__}:Stuck"
allow(STUCK)


class Counting(ForwardingSession):
    """A session that counts how often each plan is loaded."""

    def __init__(self, inner: Session) -> None:
        super().__init__(inner)
        self.loads: Counter[str] = Counter()

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        self.loads[plan.digest] += 1
        return self.inner.load(graph, plan, fresh=fresh)


@contextmanager
def a_loop(
    folder: Path,
    evaluator: SyntheticEvaluator | None = None,
    *,
    budget: int = 20,
    max_stages: int = 3,
    sampler: str = "tpe",
    seed: int = 0,
    queue: tuple[tuple[str, Plan], ...] = (),
    graph: Graph = GRAPH,
    notify: Callable[[Trial], None] = lambda _: None,
    refused: frozenset[int] = frozenset(),
    proven_s: float = 0.0,
    limit_s: float = math.inf,
    asked: frozenset[str] = frozenset(),
) -> Iterator[tuple[Loop, Counting]]:
    space = ChainSpace(graph, PLATFORM, max_stages)
    log, contents = TrialLog.open(folder / "trials.jsonl")
    history = History(space.distributions())
    history.restore(contents.records)
    with log, (evaluator or SyntheticEvaluator()).prepare(PLATFORM) as inner:
        session = Counting(inner)
        law = SyntheticEvaluator()
        costs = law_of(graph, refused)
        yield (
            Loop(
                graph=graph,
                space=space,
                search=Search(
                    session,
                    lambda plan: law.true_latency_s(graph, plan),
                    (),
                    partial(violations, graph, costs, 9),
                    POLICY,
                    POLICY,
                    Problem(graph, PLATFORM, space, costs, lambda plan: not violations(graph, costs, 9, plan)),
                ),
                history=history,
                log=log,
                sampler=sampler,
                seed=seed,
                budget=budget,
                queue=queue,
                notify=notify,
                proven_s=proven_s,
                limit_s=limit_s,
                asked=asked,
            ),
            session,
        )


def law_of(graph: Graph, refused: frozenset[int]) -> ChainCosts:
    """Return the law of the synthetic evaluator as an additive model; the first processor refuses some operators."""
    processors, count = PLATFORM.processors, len(graph.operators)
    operator_s = np.empty((len(processors), count))
    for row, processor in enumerate(processors):
        apart = chain_plan(graph, range(1, count), [processor.name] * count)
        operator_s[row] = [e.end_s - e.start_s for e in schedule(graph, apart, PLATFORM).events]
    operator_s[0, sorted(refused)] = np.inf
    return ChainCosts(
        PLATFORM, operator_s, np.zeros(len(processors)), np.full((count, len(processors), len(processors)), 3e-6)
    )


def test_plans_that_were_asked_for_are_tried_when_the_time_is_over(tmp_path: Path) -> None:
    whole, cut = chain_plan(GRAPH, (), ["cpu"]), chain_plan(GRAPH, (3,), ["cpu", "cpu"])
    queue = (("whole", whole), ("asked", cut))
    with a_loop(tmp_path, queue=queue, limit_s=0.0, asked=frozenset({cut.digest})) as (loop, _):
        assert not loop.run()
        assert [t.plan for t in loop.history.trials] == [cut]


def sequence(loop: Loop) -> list[tuple[int, str, str, float]]:
    return [(t.number, t.plan.digest, t.origin, t.median_s) for t in loop.history.trials]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    sampler=st.sampled_from(["tpe", "random", "qmc", "nsga2"]),
    budget=st.integers(1, 25),
)
def test_budget_is_what_distinct_plans_cost(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sampler: str, budget: int
) -> None:
    reported: list[Trial] = []
    with a_loop(tmp_path_factory.mktemp("run"), seed=seed, sampler=sampler, budget=budget, notify=reported.append) as (
        loop,
        session,
    ):
        loop.run()
        trials = loop.history.trials
        first = [t for t in trials if t.repeat_of is None]
        assert len(first) == len({t.plan.digest for t in first}) == loop.history.measured == budget
        assert dict(session.loads) == {t.plan.digest: 1 for t in first}
        assert reported == trials
        assert [t.number for t in trials] == list(range(len(trials)))
        for trial in trials:
            if trial.repeat_of is not None:
                assert trials[trial.repeat_of].plan == trial.plan
                assert trial.measurement is None
                assert loop.history.study.trials[trial.number].value == trials[trial.repeat_of].median_s


def test_named_plans_come_first_and_once(tmp_path: Path) -> None:
    named = baselines(GRAPH, PLATFORM, "cpu")
    space = ChainSpace(GRAPH, PLATFORM, 3)
    inside = tuple((b.name, b.plan) for b in named if in_space(space, b.plan))
    outside = [b for b in named if not in_space(space, b.plan)]
    assert inside
    assert outside
    with a_loop(tmp_path, queue=(*inside, ("model optimum", inside[0][1])), budget=len(inside) + 3) as (loop, session):
        loop.run_outside(outside)
        loop.run_outside(outside)
        assert loop.history.measured == 0
        loop.run()
        distinct = {plan.digest: name for name, plan in reversed(inside)}
        assert [t.origin for t in loop.history.trials[: len(distinct)]] == [
            name for name, plan in inside if distinct[plan.digest] == name
        ]
        assert {t.origin for t in loop.history.trials[len(distinct) :]} == {"tpe"}
        assert all(count == 1 for count in session.loads.values())
        assert all(session.loads[b.plan.digest] for b in outside)
        assert not any(t.raced for t in loop.history.trials[: len(distinct)])


def test_after_fifty_repeats_an_unseen_plan_is_drawn(tmp_path: Path) -> None:
    with a_loop(tmp_path, sampler=STUCK, budget=6) as (loop, session):
        loop.run()
        origins = [t.origin for t in loop.history.trials]
        unseen = [i for i, origin in enumerate(origins) if origin == UNSEEN]
        # One new plan, fifty repeats, an unseen plan; then patience halves while the sampler finds nothing.
        assert unseen[0] == 1 + MOST_REPEATS
        assert [b - a - 1 for a, b in pairwise(unseen)] == [25, 12, 6, 3]
        assert all(loop.history.trials[i].repeat_of is None for i in unseen)
        assert loop.history.measured == 6
        assert all(count == 1 for count in session.loads.values())


@pytest.mark.parametrize("sampler", ["tpe", STUCK, "qmc", "brute-force"])
def test_an_exhausted_space_ends_the_study(tmp_path: Path, sampler: str) -> None:
    with a_loop(tmp_path, sampler=sampler, budget=10_000, max_stages=2, graph=example_graph(4)) as (loop, session):
        assert loop.run()
        assert loop.history.measured == loop.space.cardinality() == len(session.loads)
        assert loop.run()
    with a_loop(tmp_path, sampler=sampler, budget=10_000, max_stages=2, graph=example_graph(4)) as (loop, session):
        assert loop.run()
        assert not session.loads


def test_points_of_a_space_that_mean_one_plan_are_no_plans_to_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One operator on two cores that are alike: 11 points, 6 plans."""
    net = Net()
    model = str(net.outputs(net.op("RELU", [net.input()])).write(tmp_path / "m.tflite"))
    words = [model, "--evaluator", "synthetic", "-q", "--study", "s"]
    for n, more in enumerate(([], ["--storage", f"sqlite:///{tmp_path / 's.db'}"])):
        found = answered(capsys, [*words, *more, "--out", str(tmp_path / str(n))])
        assert found["space"]["exhausted"]
        assert found["unique_plans"] == 6


def two_stages(plan: Plan) -> bool:
    return len(plan.stages) == 2


@pytest.mark.parametrize(
    "evaluator",
    [SyntheticEvaluator(fails=two_stages), SyntheticEvaluator(returns_nan=two_stages)],
    ids=["fails", "nan"],
)
def test_failing_plans_are_failed_trials_and_never_tried_again(tmp_path: Path, evaluator: SyntheticEvaluator) -> None:
    with a_loop(tmp_path, evaluator, budget=40, max_stages=2, seed=3) as (loop, session):
        loop.run()
        failed = [t for t in loop.history.trials if t.repeat_of is None and t.failure]
        assert failed
        assert all(len(t.plan.stages) == 2 and t.measurement is None for t in failed)
        assert all(session.loads[t.plan.digest] == 1 for t in failed)
        assert loop.history.measured == min(40, loop.space.cardinality())
        states = Counter(t.state.name for t in loop.history.study.trials)
        assert states["FAIL"] >= len(failed)
        before = sequence(loop)
    with a_loop(tmp_path, evaluator, budget=40, max_stages=2, seed=3) as (loop, session):
        loop.run()
        assert sequence(loop) == before
        assert not session.loads


def test_a_device_that_fails_at_everything_is_given_up_early(tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(fails=lambda plan: bool(plan.stages))
    with a_loop(tmp_path, evaluator, budget=30) as (loop, session):
        with fails(UnavailableError):
            loop.run()
        assert len(session.loads) == 5


def test_a_device_that_stops_working_ends_the_study_and_keeps_what_it_measured(tmp_path: Path) -> None:
    gone: list[Plan] = []
    evaluator = SyntheticEvaluator(fails=lambda _: bool(gone))
    with a_loop(tmp_path, evaluator, budget=40) as (loop, _):
        doomed = replace(loop, notify=lambda trial: gone.append(trial.plan) if trial.number == 9 else None)
        with fails(UnavailableError):
            doomed.run()
        assert loop.history.measured == 10
    with a_loop(tmp_path, SyntheticEvaluator(), budget=40) as (loop, _):
        assert loop.run() is False
        assert not [trial for trial in loop.history.trials if trial.failure], "what the device failed at is tried again"


def test_plans_that_fail_before_any_works_are_tried_again_once_the_device_does(tmp_path: Path) -> None:
    with a_loop(tmp_path, SyntheticEvaluator(fails=lambda plan: bool(plan.stages)), budget=30) as (loop, _):
        loop.run_outside([Baseline("every layer", chain_plan(GRAPH, range(1, 6), ["cpu"] * 6))])
        with fails(UnavailableError):
            loop.run()
    with a_loop(tmp_path, budget=30) as (loop, _):
        loop.run_outside([Baseline("every layer", chain_plan(GRAPH, range(1, 6), ["cpu"] * 6))])
        loop.run()
        assert not [t for t in (*loop.history.outside, *loop.history.trials) if t.failure]


def test_few_plans_that_all_fail_are_an_error_and_tried_again(tmp_path: Path) -> None:
    broken = SyntheticEvaluator(fails=lambda plan: bool(plan.stages))
    with a_loop(tmp_path, broken, budget=2) as (loop, _), fails(UnavailableError):
        loop.run()
    with a_loop(tmp_path, budget=2) as (loop, _):
        loop.run()
        assert len(loop.history.ranking()) == 2


def test_a_plan_at_which_the_device_stops_twice_is_a_failed_plan(tmp_path: Path) -> None:
    seen: list[Plan] = []
    worst: list[Plan] = []
    down: list[bool] = []

    def stops(plan: Plan) -> bool:
        """Return whether the device fails: at the ninth plan, always, and at what is run right after it."""
        if down:
            return down.pop()
        seen.append(plan)
        if plan in worst or len(seen) == 9:
            worst[:] = [plan]
            down.append(True)
        return bool(down)

    with a_loop(tmp_path, SyntheticEvaluator(fails=stops), budget=20) as (loop, _), fails(UnavailableError):
        loop.run()
    lost = {r.data["plan"] for r in read_log(tmp_path / "trials.jsonl").records if r.kind == LOST}
    assert lost == {worst[0].digest}
    with a_loop(tmp_path, SyntheticEvaluator(fails=stops), budget=20) as (loop, _):
        loop.lost.update(lost)
        loop.run()
        assert [t.plan for t in loop.history.trials if t.failure] == worst


def test_a_baseline_outside_the_space_that_fails_is_kept_as_failed(tmp_path: Path) -> None:
    plan = chain_plan(GRAPH, range(1, 6), ["cpu"] * 6)
    with a_loop(tmp_path, SyntheticEvaluator(fails=lambda plan: bool(plan.stages))) as (loop, _):
        loop.run_outside([Baseline("every layer", plan)])
        assert loop.history.known[plan.digest].failure


def test_the_loop_finds_a_better_plan_than_it_was_given(tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(noise=Noise(run=0.002))
    whole = chain_plan(GRAPH, (), ["cpu0"])
    with a_loop(tmp_path, evaluator, queue=(("whole", whole),), budget=40) as (loop, _):
        loop.run()
        best = loop.history.ranking()[0]
        space = loop.space
        true = [evaluator.true_latency_s(GRAPH, space.plan_at(i)) for i in range(space.cardinality())]
        assert evaluator.true_latency_s(GRAPH, best.plan) <= sorted(true)[len(true) // 20]


def test_large_spaces_draw_unseen_plans_without_being_listed(tmp_path: Path) -> None:
    graph = example_graph(200)
    with a_loop(tmp_path, graph=graph, max_stages=40, sampler=STUCK, budget=2) as (loop, _):
        assert loop.space.cardinality() > 2**64
        loop.run()
        assert [t.origin for t in loop.history.trials].count(UNSEEN) == 1


def test_an_interrupt_in_a_measurement_leaves_the_log_at_the_last_trial(tmp_path: Path) -> None:
    def interrupt(trial: Trial) -> None:
        if trial.number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with a_loop(tmp_path, notify=interrupt, sampler=RANDOM) as (loop, _), contextlib.suppress(KeyboardInterrupt):
        loop.run()
        pytest.fail("the interrupt was lost")
    with a_loop(tmp_path, sampler=RANDOM) as (loop, _):
        assert len(loop.history.trials) == 8
        loop.run()
        assert loop.history.measured == 20


@pytest.mark.parametrize("sampler", ["auto", "brute-force"])
def test_plans_are_proposed_without_repeats(tmp_path: Path, sampler: str) -> None:
    with a_loop(tmp_path, sampler=sampler, budget=40) as (loop, session):
        loop.run()
        assert loop.history.repeats == 0
        assert [t.origin for t in loop.history.trials] == [sampler] * 40
        assert all(count == 1 for count in session.loads.values())
        reported = loop.history.study.trials
        assert [t.value for t in reported] == [t.median_s for t in loop.history.trials]
        assert [t.params for t in reported] == [t.params for t in loop.history.trials]


@pytest.mark.parametrize("sampler", ["auto", "reinforce", "tpe"])
def test_plans_that_break_a_constraint_are_never_run(tmp_path: Path, sampler: str) -> None:
    broken = chain_plan(GRAPH, (), [PLATFORM.processors[0].name])
    with a_loop(tmp_path, sampler=sampler, budget=30, refused=frozenset({2}), queue=(("whole", broken),)) as (
        loop,
        session,
    ):
        loop.run()
        infeasible = [t for t in loop.history.trials if t.failure and not t.broke]
        assert infeasible[0].plan == broken
        says(infeasible[0].failure)
        assert not any(session.loads[t.plan.digest] for t in infeasible)
        run = [t.plan for t in loop.history.trials if t.measurement]
        assert not any(s.processor == PLATFORM.processors[0].name and 2 in s.operators for p in run for s in p.stages)
        if sampler != "tpe":
            assert len(infeasible) == 1


def test_a_study_may_end_when_hardly_anything_is_left_to_gain(tmp_path: Path) -> None:
    (tmp_path / "to the end").mkdir()
    with a_loop(tmp_path / "to the end", sampler="auto", budget=20) as (loop, _):
        loop.run()
        best = loop.history.ranking()[0].median_s
    with a_loop(tmp_path, sampler="auto", budget=20, proven_s=best * 1.2) as (loop, _):
        assert not loop.run()
        assert 1 <= loop.history.measured < 20
        assert loop.history.ranking()[0].median_s <= best * 1.2
