"""Plans run by LiteRT on this machine's cores: what they compute, when, where, and what a dead worker does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.base import Evaluator
from evaluators.contract import check_timeline
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.workers import Workers
from evaluators.measurement.foreground import Foreground
from evaluators.testing import EvaluatorContract
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.support import strategies
from tests.support.models.litert_loading import agrees, loaded, pid_of, single_cores, three_processors
from tests.support.narrowing import there

pytestmark = pytest.mark.litert

PLATFORM = three_processors()
PROCESSORS = [p.name for p in PLATFORM.processors]
SINGLES = single_cores(PLATFORM)
two_cores = pytest.mark.skipif(len(SINGLES) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def session(cache_folder: Path) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(PLATFORM) as opened:
        yield opened


class TestLitert(EvaluatorContract):
    measures = True

    def evaluator(self) -> Evaluator:
        class Small(LitertEvaluator):
            def platform(self) -> Platform:
                return PLATFORM

        return Small()

    def graph(self) -> Graph:
        return load("squeezenet1_1")


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_plan_on_any_processors_computes_what_the_whole_model_computes(
    data: st.DataObject, session: LitertSession, squeezenet: Graph, mobilenet: Graph
) -> None:
    graph = data.draw(st.sampled_from([squeezenet, mobilenet]))
    plan = data.draw(
        st.one_of(strategies.placements(graph, PLATFORM, labels=6), strategies.chains(graph, PLATFORM)),
    )
    with closing(session.load(graph, plan)) as candidate:
        batch = candidate.run(3)
        assert batch.stage_s.shape == (3, len(plan.stages))
        check_timeline(there(batch.timeline), graph, plan, PLATFORM)
        assert there(candidate.verify()).identical


def test_runs_hold_their_cores_and_come_first_once_one_has_ended(
    session: LitertSession, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[set[str], bool]] = []
    original = Foreground.holding

    def holding(self: Foreground, resources: Iterable[str], *, first: bool = True) -> AbstractContextManager[None]:
        names = set(resources)
        found.append((names, first))
        return original(self, names, first=first)

    monkeypatch.setattr(Foreground, "holding", holding)
    name = PROCESSORS[0]
    with closing(session.load(squeezenet, chain_plan(squeezenet, (), [name]), fresh=True)) as candidate:
        candidate.run(1)
        candidate.run(2)
    assert found == [(set(PLATFORM[name].resources), False), (set(PLATFORM[name].resources), True)]


def test_a_plan_whose_outputs_are_wrong_is_noticed(session: LitertSession, squeezenet: Graph) -> None:
    plan = chain_plan(squeezenet, [5], [PROCESSORS[-1]] * 2)
    with closing(loaded(session, squeezenet, plan)) as candidate:
        candidate.run(1)
        output = squeezenet.outputs[0]
        candidate._view(output).reshape(-1)[3] += 1e-3
        agreement = there(candidate.verify())
    assert not agreement.accepted
    assert agreement.max_rel_error > 0


def branches(graph: Graph, first: str, second: str) -> Plan:
    """Run the two largest operators that read one tensor at the same time, as far as the processors allow."""
    pair = max(
        (readers for readers in graph.consumers.values() if len(readers) == 2),
        key=lambda readers: sum(graph.tensors[t].nbytes for o in readers for t in graph.operators[o].outputs),
    )
    count = len(graph.operators)
    before, after = range(pair[0]), range(pair[1] + 1, count)
    assert pair[1] == pair[0] + 1
    stages = ((tuple(before), first), ((pair[0],), first), ((pair[1],), second), (tuple(after), first))
    return Plan(graph.digest, tuple(Stage(operators, processor) for operators, processor in stages))


def overlap_s(session: LitertSession, graph: Graph, plan: Plan) -> list[float]:
    """Return for how long stages 1 and 2 ran at the same time, in each of some inferences; below 0 is a pause."""
    found = []
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(5)
        for _ in range(30):
            timeline = there(candidate.run(1).timeline)
            at = {e.stage: e for e in timeline.events}
            found.append(min(at[1].end_s, at[2].end_s) - max(at[1].start_s, at[2].start_s))
    return found


@two_cores
def test_independent_branches_on_two_cores_run_at_the_same_time(session: LitertSession, squeezenet: Graph) -> None:
    one, two = SINGLES[:2]
    plan = branches(squeezenet, one, two)
    # What others run on this machine may hold one of the cores for most of such a row.
    rows = (overlap_s(session, squeezenet, plan) for _ in range(10))
    assert any(sum(o > 0 for o in row) > len(row) // 4 for row in rows)


@two_cores
def test_processors_that_share_a_core_take_turns(session: LitertSession, squeezenet: Graph) -> None:
    together, alone = PROCESSORS[0], SINGLES[0]
    for pair in ((together, alone), (alone, together)):
        assert max(overlap_s(session, squeezenet, branches(squeezenet, *pair))) <= 0


def test_every_thread_of_a_processor_stays_on_its_cores_and_threads_share_none(
    session: LitertSession, squeezenet: Graph
) -> None:
    for processor in PLATFORM.processors:
        with closing(session.load(squeezenet, chain_plan(squeezenet, (), [processor.name]))) as candidate:
            candidate.run(2)
            tasks = list(Path(f"/proc/{pid_of(session, processor.name)}/task").iterdir())
            threads, cores = processor.options["threads"], processor.options["cores"]
            assert len(tasks) >= threads
            found = [os.sched_getaffinity(int(task.name)) for task in tasks]
            assert set().union(*found) == set(cores)
            if threads == len(cores):
                assert all(len(allowed) == 1 for allowed in found)


@two_cores
def test_a_plan_that_meets_at_hundreds_of_edges(session: LitertSession, mobilenet: Graph) -> None:
    count = len(mobilenet.operators)
    processors = [SINGLES[i % 2] for i in range(count)]
    agrees(session, mobilenet, chain_plan(mobilenet, range(1, count), processors))


def test_stages_are_shared_and_the_least_recently_used_go_first(squeezenet: Graph) -> None:
    limit_nbytes = 4_000_000
    processors = Workers(PLATFORM)
    processor = SINGLES[0]
    session = LitertSession(PLATFORM, processors, limit_nbytes)
    try:
        entries = session._stages._entries

        def unused() -> int:
            return sum(e.nbytes for e in entries.values() if e.users == 0)

        def used() -> list[int]:
            return [e.number for e in entries.values() if e.users and not e.owner]

        first = chain_plan(squeezenet, [10], [processor] * 2)
        held = session.load(squeezenet, first)
        kept = used()
        for cut in (3, 12, 20, 28, 35):
            with closing(session.load(squeezenet, chain_plan(squeezenet, [cut], [processor] * 2))) as candidate:
                candidate.run(1)
                assert set(used()) >= set(kept)  # in use: never thrown out
            assert unused() <= limit_nbytes
        with closing(session.load(squeezenet, first)) as again:
            assert used() == kept
            again.run(1)
        with closing(session.load(squeezenet, first, fresh=True)) as other:
            assert used() == kept
            other.run(1)
        held.run(1)
        held.close()
        assert unused() <= limit_nbytes
        assert all(e.users == 0 for e in entries.values())
    finally:
        session.close()
        processors.close()


@pytest.mark.parametrize("processors", [[SINGLES[0]] * 4, SINGLES[:2] * 2 if len(SINGLES) > 1 else [SINGLES[0]] * 4])
def test_an_inference_over_its_limit_is_broken_off_and_the_next_one_is_whole(
    squeezenet: Graph, processors: list[str]
) -> None:
    plan = chain_plan(squeezenet, (10, 20, 30), processors)
    with LitertEvaluator().prepare(PLATFORM) as session, closing(session.load(squeezenet, plan)) as candidate:
        whole = candidate.run(3)
        limit_s = float(whole.stage_s[:, 0].max()) * 1e-3
        broken = candidate.run(5, stop_above_s=limit_s)
        assert len(broken.latency_s) == 1
        assert limit_s < broken.latency_s[0]
        assert broken.stage_s[0, 0] > 0
        assert not broken.stage_s[0, 1:].any()
        assert (candidate.run(2).stage_s > 0).all()
        assert there(candidate.verify()).identical
