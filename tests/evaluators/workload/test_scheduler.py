"""Laws of the scheduler: processors, exclusion, bounded queues, no starvation; and of what is simulated with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.workload.outcome import OBJECTIVES, Outcome
from evaluators.workload.scheduler import FAILED, REJECTED, QueueClient, Scheduler
from evaluators.workload.setting import SLICED, Setting
from evaluators.workload.simulate import Crowd, JobCost, simulate, stage_means_s
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Dispatch
from search_spaces.core.platform import Platform, Processor
from tests.support.sentences import fails

NS = 1_000_000
PROCESSORS = ("cpu", "cpu0", "cpu1")
EXCLUDED = (0b111, 0b011, 0b101)  # cpu takes both cores
PLATFORM = Platform(
    "two cores",
    (
        Processor("cpu", "cpu", {"core0": 1.0, "core1": 1.0}, "both"),
        Processor("cpu0", "cpu", {"core0": 1.0}, "core"),
        Processor("cpu1", "cpu", {"core1": 1.0}, "core"),
    ),
)

jobs = st.lists(st.sampled_from(((0,), (1,), (2,), (1, 2), (2, 1))), min_size=1, max_size=3).map(tuple)


@st.composite
def clients(draw: st.DrawFn) -> QueueClient:
    processors = draw(jobs)
    requests = draw(st.integers(1, 4))
    closed = draw(st.booleans())
    releases = sorted(draw(st.lists(st.integers(0, 40), min_size=requests, max_size=requests)))
    after = tuple(draw(st.integers(0, (1 << job) - 1)) for job in range(len(processors)))
    return QueueClient(
        processors,
        tuple(t * NS for t in (releases[:1] if closed else releases)),
        requests,
        closed=closed,
        priority=draw(st.integers(0, 2)),
        deadline_ns=draw(st.sampled_from((0, 5 * NS, 50 * NS))),
        queue=draw(st.integers(1, 4)),
        after=draw(st.sampled_from((after, ()))),
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]]:
    found = draw(st.lists(clients(), min_size=1, max_size=4))
    stages, first = [], 0
    for client in found:
        stages.append(tuple(range(first, first + len(client.processors))))
        first += len(client.processors)
    made = Setting(tuple(found), tuple(range(len(found))), tuple(stages), PROCESSORS, EXCLUDED)
    slowed = draw(st.sampled_from(((), (1.0, 1.2, 1.2))))
    costs = [
        [
            {processor: JobCost(draw(st.integers(1, 9)) * 1e-3, slowed) for processor in processors}
            for processors in client.processors
        ]
        for client in found
    ]
    return made, draw(st.sampled_from(("fifo", "priority", "edf"))), costs


def run(drawn: tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]]) -> Outcome:
    return simulate(*drawn, Crowd(PLATFORM))


@settings(max_examples=150)
@given(runs())
def test_processors_never_overlap_and_those_that_exclude_each_other_take_turns(
    drawn: tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]],
) -> None:
    events = run(drawn).timeline.events
    for a in events:
        for b in events:
            if a is not b and EXCLUDED[PROCESSORS.index(a.processor)] >> PROCESSORS.index(b.processor) & 1:
                assert a.end_s <= b.start_s + 1e-9 or b.end_s <= a.start_s + 1e-9


@settings(max_examples=150)
@given(runs())
def test_every_request_ends_or_is_turned_away_and_its_jobs_wait_for_what_they_need_on_processors_that_may(
    drawn: tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]],
) -> None:
    found, _, _ = drawn
    done = run(drawn)
    assert done.answered + sum(r.rejected for each in done.requests for r in each) == done.count
    for client, requests, stages in zip(found.clients, done.requests, found.stages, strict=True):
        answered = sum(r.latency_s is not None for r in requests)
        for stage, processors in zip(stages, client.processors, strict=True):
            mine = [e for e in done.timeline.events if e.stage == stage]
            assert len(mine) == answered
            assert {e.processor for e in mine} <= {PROCESSORS[processor] for processor in processors}
        ran = [[e for e in done.timeline.events if e.stage == stage] for stage in stages]
        for job, events in enumerate(ran):
            for number, event in enumerate(events):
                needed = [ran[other][number] for other in client.needs(job)]
                needed += [each[number - 1] for each in ran if number]  # one request at a time
                assert all(other.end_s <= event.start_s + 1e-9 for other in needed)


@settings(max_examples=150)
@given(runs())
def test_under_fifo_a_job_waits_for_no_more_than_what_was_before_it(
    drawn: tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]],
) -> None:
    """No starvation: between ready and start only jobs run that were ready before, or running; one at least does."""
    found, _, costs = drawn
    done = simulate(found, "fifo", costs, Crowd(PLATFORM))
    events = done.timeline.events
    ready: dict[int, list[float]] = {}
    for client, requests, stages in zip(found.clients, done.requests, found.stages, strict=True):
        came = [r.came_s for r in requests if r.latency_s is not None]
        ends: dict[int, list[float]] = {s: [e.end_s for e in events if e.stage == s] for s in stages}
        before = 0.0
        for number, at in enumerate(came):
            for place, stage in enumerate(stages):
                needed = [ends[stages[other]][number] for other in client.needs(place)]
                ready.setdefault(stage, []).append(max(at, before, *needed))
            before = max(each[number] for each in ends.values())
    seen: dict[int, int] = {}
    for event in events:
        number = seen.get(event.stage, 0)
        seen[event.stage] = number + 1
        since_s = ready[event.stage][number]
        counts: dict[int, int] = {}
        ahead_s = 0.0
        for other in events:
            rank = counts.get(other.stage, 0)
            counts[other.stage] = rank + 1
            if other is not event and other.end_s > since_s and ready[other.stage][rank] <= since_s + 1e-9:
                ahead_s += other.end_s - max(other.start_s, since_s)
        assert event.start_s - since_s <= ahead_s + 1e-9


@settings(max_examples=60)
@given(runs())
def test_values_of_all_objectives_are_times(drawn: tuple[Setting, Dispatch, list[list[dict[int, JobCost]]]]) -> None:
    found = run(drawn)
    assert all(found.value_s(objective) > 0.0 for objective in OBJECTIVES)
    assert found.value_s("worst") >= found.value_s("mean") * (1 - 1e-12)  # three equal latencies add up with rounding
    stages = sum(map(len, drawn[0].stages))
    assert len(stage_means_s(found, drawn[0], stages)) == stages


def alone(client: QueueClient, cost_s: float) -> Outcome:
    made = Setting((client,), (0,), ((0,),), PROCESSORS, EXCLUDED)
    return simulate(made, "fifo", [[{1: JobCost(cost_s)}]], Crowd(PLATFORM))


def test_a_full_queue_turns_requests_away() -> None:
    found = alone(QueueClient(((1,),), (0,) * 5, 5, queue=2), 0.01)
    assert [r.rejected for r in found.requests[0]] == [False, False, False, True, True]
    assert found.misses == 2
    assert found.makespan_s == pytest.approx(0.03)


def test_a_closed_loop_asks_when_it_was_answered() -> None:
    found = alone(QueueClient(((1,),), (0,), 4, closed=True), 0.01)
    assert [r.latency_s for r in found.requests[0]] == pytest.approx([0.01] * 4)
    assert found.makespan_s == pytest.approx(0.04)


def test_a_burst_of_alike_models_on_two_cores_is_served_two_by_two() -> None:
    one = QueueClient(((1, 2),), (0,), 1)
    made = Setting((one,) * 4, (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), PROCESSORS, EXCLUDED)
    costs = [[{1: JobCost(0.01), 2: JobCost(0.01)}]] * 4
    found = simulate(made, "fifo", costs, Crowd(PLATFORM))
    assert found.latencies_s == pytest.approx((0.01, 0.01, 0.02, 0.02))


def test_processors_that_the_system_slices_share_their_cores() -> None:
    processors = tuple(
        Processor(f"process {i}", "cpu", {}, "core", {SLICED: {"core0": 0.5, "core1": 0.5}}) for i in range(4)
    )
    each = tuple(QueueClient(((i,),), (0,), 1) for i in range(4))
    made = Setting(each, (0, 1, 2, 3), ((0,), (1,), (2,), (3,)), tuple(p.name for p in processors), (1, 2, 4, 8))
    costs = [[{i: JobCost(0.01)}] for i in range(4)]
    found = simulate(made, "fifo", costs, Crowd(Platform("cores", processors)))
    assert found.latencies_s == pytest.approx((0.02,) * 4)


def test_the_order_of_the_queue_follows_priority_and_deadline() -> None:
    plain = QueueClient(((1,),), (0,), 1)
    urgent = replace(plain, priority=1, deadline_ns=5 * NS)
    made = Setting((plain, urgent), (0, 1), ((0,), (1,)), PROCESSORS, EXCLUDED)
    costs = [[{1: JobCost(0.01)}]] * 2
    orders: tuple[Dispatch, ...] = ("fifo", "priority", "edf")
    found = {d: [e.stage for e in simulate(made, d, costs, Crowd(PLATFORM)).timeline.events] for d in orders}
    assert found == {"fifo": [0, 1], "priority": [1, 0], "edf": [1, 0]}


def test_a_model_that_fails_leaves_its_processor_to_the_others() -> None:
    one = QueueClient(((1,), (1,)), (0, 0), 2)
    scheduler = Scheduler((one, one), EXCLUDED, "fifo")
    scheduler.begin(1)
    scheduler.arrive(1)
    assert scheduler.start(1) == [(0, 1)]
    scheduler.fail(0)
    assert scheduler.start(1) == []  # what it was at still runs
    scheduler.finish(1, 1)
    assert [ended for _, ended in scheduler.requests(0)] == [FAILED, FAILED]
    now = 1
    while not scheduler.over:
        ((job, processor),) = scheduler.start(now)
        assert (scheduler.whose(job)[0], processor) == (1, 1)
        now += 10
        scheduler.finish(1, now)
    assert [ended for _, ended in scheduler.requests(1)] == [21, 41]
    assert REJECTED not in [ended for _, ended in scheduler.requests(1)]


def test_a_time_that_is_none_is_reported() -> None:
    with fails(UnavailableError):
        alone(QueueClient(((1,),), (0,), 1), float("inf"))
