"""The host's loop over streams obeys the law of the scheduler: it does what the simulator does, without any GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evaluators.cuda.session import CudaCandidate
from evaluators.cuda.worker import Threads, attend
from evaluators.workload.outcome import outcome
from evaluators.workload.scheduler import QueueClient, Scheduler
from evaluators.workload.setting import Setting
from evaluators.workload.simulate import Crowd, JobCost, simulate
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Dispatch, Plan, Stage
from search_spaces.core.platform import Platform, Processor
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.timelines import one_at_a_time

PROCESSORS = 3
PLATFORM = Platform("gpu", tuple(Processor(f"s{i}", "gpu", {f"s{i}": 1.0}, "s", {}) for i in range(PROCESSORS)))


class Clocked:
    """Streams whose work is a number of nanoseconds, on a clock that moves when the host has nothing to do."""

    def __init__(self, fails: int = -1) -> None:
        self.now_ns, self.ends, self.fails = 1, dict[int, int](), fails
        self.most, self.ended_ns = 0, list[int]()

    def start(self, processor: int, work: Any) -> None:
        assert processor not in self.ends, "a processor was given two jobs"
        self.ends[processor] = self.now_ns + int(work)
        self.ended_ns.append(self.ends[processor])
        self.most = max(self.most, len(self.ends))

    def finished(self, processor: int) -> bool:
        if self.ends[processor] > self.now_ns:
            return False
        if self.fails == 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        self.fails -= 1
        del self.ends[processor]
        return True

    def idle(self) -> None:
        self.now_ns = min(self.ends.values())

    def close(self) -> None:
        pass


class Slow(Clocked):
    """The same, on a clock that moves by itself."""

    def idle(self) -> None:
        self.now_ns += 3_000_000_000


@st.composite
def problems(draw: st.DrawFn) -> tuple[Setting, list[list[int]]]:
    """A setting, and the nanoseconds of each job of each client."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    clients, work = [], []
    for _ in range(draw(st.integers(1, 5))):
        jobs = draw(st.integers(1, 3))
        processors = tuple(
            tuple(draw(st.permutations(range(PROCESSORS)))[: draw(st.integers(1, PROCESSORS))]) for _ in range(jobs)
        )
        requests = draw(st.integers(1, 4))
        closed = draw(st.booleans())
        clients.append(
            QueueClient(processors, (0,) * (1 if closed else requests), requests, closed, draw(st.integers(0, 2)))
        )
        work.append([int(t) for t in rng.integers(1_000_000, 900_000_000, jobs)])
    stages, first = [], 0
    for each in work:
        stages.append(tuple(range(first, first + len(each))))
        first += len(each)
    names = tuple(p.name for p in PLATFORM.processors)
    found = Setting(
        tuple(clients), tuple(range(len(clients))), tuple(stages), names, tuple(1 << i for i in range(PROCESSORS))
    )
    return found, work


def run(found: Setting, dispatch: Dispatch, work: list[list[int]], streams: Clocked) -> Scheduler:
    scheduler = Scheduler(found.clients, found.excluded, dispatch)
    attend(scheduler, work, streams, 10.0, lambda: streams.now_ns)
    return scheduler


@given(problems(), st.sampled_from(("fifo", "priority")))
@settings(max_examples=25, deadline=None)
def test_the_host_does_what_the_simulator_does(problem: tuple[Setting, list[list[int]]], dispatch: Dispatch) -> None:
    found, work = problem
    streams = Clocked()
    measured = outcome(run(found, dispatch, work, streams), found.stages, found.processors)
    # Two processors that run the same jobs in another order end together: whichever is served first is right.
    assume(len(set(streams.ended_ns)) == len(streams.ended_ns))
    costs = [
        [dict.fromkeys(processors, JobCost(ns * 1e-9)) for processors, ns in zip(client.processors, each, strict=True)]
        for client, each in zip(found.clients, work, strict=True)
    ]
    predicted = simulate(found, dispatch, costs, Crowd(PLATFORM))
    assert measured.makespan_s == pytest.approx(predicted.makespan_s, rel=1e-6)
    assert measured.latencies_s == pytest.approx(predicted.latencies_s, rel=1e-6)
    assert measured.answered == predicted.answered == sum(client.requests for client in found.clients)
    assert streams.most <= PROCESSORS
    assert one_at_a_time(measured.timeline)


def test_a_job_that_fails_is_reported_in_one_line() -> None:
    found = Setting((QueueClient(((0,),), (0,), 5, closed=True),), (0,), ((0,),), ("s0", "s1", "s2"), (1, 2, 4))
    with fails(UnavailableError) as caught:
        run(found, "fifo", [[1000]], Clocked(fails=2))
    assert "more" not in caught.value.what


def test_a_job_that_never_ends_is_reported() -> None:
    found = Setting((QueueClient(((0,),), (0,), 1),), (0,), ((0,),), ("s0", "s1", "s2"), (1, 2, 4))
    with fails(UnavailableError):
        run(found, "fifo", [[10**13]], Slow())


def test_requests_that_come_later_are_waited_for() -> None:
    streams = Threads([0])
    try:
        scheduler = Scheduler([QueueClient(((0,),), (0, 8_000_000), 2)], [1], "fifo")
        attend(scheduler, [[lambda: None]], streams, 5.0)
    finally:
        streams.close()
    (first, _), (second, ended) = scheduler.requests(0)
    assert second - first == pytest.approx(8_000_000, abs=2)
    assert 0 < ended - second < 100_000_000


def test_what_a_thread_raises_is_a_failure_of_its_job() -> None:
    def failing() -> None:
        raise RuntimeError("no such kernel")

    streams = Threads([0])
    try:
        with fails(UnavailableError):
            attend(Scheduler([QueueClient(((0,),), (0,), 1)], [1], "fifo"), [[failing]], streams, 5.0)
    finally:
        streams.close()


def test_the_timeline_of_a_plan_is_ordered_by_start() -> None:
    def run(found: Setting, dispatch: Dispatch, *_: object) -> list[Scheduler]:
        streams, scheduler = Clocked(), Scheduler(found.clients, found.excluded, dispatch)
        attend(scheduler, [[5, 5, 3]], streams, 10.0, lambda: streams.now_ns)
        return [scheduler]

    bench: Any = SimpleNamespace(run=run, client=SimpleNamespace(generation=0))
    independent: Any = SimpleNamespace(after=(0, 0, 0))
    plan = Plan("0" * 64, (Stage((0,), "s0"), Stage((1,), "s0"), Stage((2,), "s1")))
    found = there(
        CudaCandidate(bench, independent, [], plan, PLATFORM, lambda _: pytest.fail("nothing is compared"))
        .run(1)
        .timeline
    )
    assert [event.stage for event in found.events] == [0, 2, 1]
