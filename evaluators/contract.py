"""Contract tests for evaluators.

A plug-in's tests subclass :class:`EvaluatorContract` under a name that begins with ``Test`` and say how to make the
evaluator; pytest does the rest. The module itself does not need pytest.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import numpy as np

from evaluators.base import CONTRACT_VERSION, Batch, Candidate, Evaluator, Session
from evaluators.schedule import Timeline
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Limits, Platform
from search_spaces.core.plugins import contract_version
from search_spaces.core.wording import plural
from search_spaces.spaces.chain import chain_plan

_TRIES = 20  # a call may wait until another study has measured on these cores
_CLOCK_S = 1e-6  # tolerance of event times: clocks of two processes may be read a moment apart
_PATIENCE_S = 10.0  # within this time, an evaluator that measures obeys an interrupt or a limit
_MANY = 1_000_000


def example_graph(operators: int = 8) -> Graph:
    """Return a small graph without weights on disk: a chain whose second operator also feeds the last one."""
    tensors = tuple(Tensor(f"t{i}", (1, 64, 64, 16), "float32", 64 * 64 * 16 * 4) for i in range(operators + 1))
    kinds = itertools.cycle(("CONV_2D", "DEPTHWISE_CONV_2D", "MAX_POOL_2D"))
    chain = [Operator(kind, (i,), (i + 1,)) for i, kind in zip(range(operators), kinds, strict=False)]
    if operators > 3:
        chain[-1] = Operator("ADD", (operators - 1, 2), (operators,))
    return Graph("example", tensors, tuple(chain), (0,), (operators,))


class EvaluatorContract:
    """Tests of :class:`~evaluators.base.Evaluator`, :class:`~evaluators.base.Session` and their candidates.

    Attributes:
        measures: whether running takes the time that is reported (a prediction does not).
        call_s: most seconds of a call of ``run`` besides the runs, for example to reach a board and load the plan.
    """

    measures: bool = False
    call_s: float = 0.01

    def failing(self, graph: Graph, platform: Platform) -> Plan | None:  # noqa: ARG002
        """Return a plan on which the device fails, or None; may be overridden."""
        return None

    def evaluator(self) -> Evaluator:
        """Return a new evaluator; must be overridden."""
        raise NotImplementedError

    def graph(self) -> Graph:
        """Return a graph of at least 3 operators that the evaluator can load."""
        return example_graph()

    def plans(self, graph: Graph, platform: Platform) -> list[Plan]:
        """Return plans to try: the whole graph on every processor, and cut in three over all pairs of processors."""
        processors = [p.name for p in platform.processors]
        count = len(graph.operators)
        words = [[a] for a in processors] + [[a, b, a] for a in processors for b in processors]
        cuts = {1: [], 3: [count // 3, 2 * count // 3]}
        found = [canonical(chain_plan(graph, cuts[len(word)], word), graph, platform) for word in words]
        return list({plan.digest: plan for plan in found}.values())

    @contextmanager
    def _session(self, limits: Limits | None = None) -> Iterator[tuple[Session, Platform]]:
        evaluator = self.evaluator()
        platform = evaluator.platform()
        if limits is not None:
            platform = replace(platform, limits=limits)
        with TemporaryDirectory() as scratch, evaluator.prepare(platform, Path(scratch)) as session:
            yield session, platform

    def _candidates(self, most: int | None = None) -> Iterator[tuple[Candidate, Plan, Platform]]:
        """Yield a candidate of each plan to try, or of the first ones, loaded in one session."""
        graph = self.graph()
        with self._session() as (session, platform):
            for plan in self.plans(graph, platform)[:most]:
                with closing(session.load(graph, plan)) as candidate:
                    yield candidate, plan, platform

    def test_has_a_name_and_a_platform(self) -> None:
        """The name is not empty, the platform has processors (its own rule), and the contract is this one."""
        evaluator = self.evaluator()
        version = contract_version(evaluator)
        _require(version == CONTRACT_VERSION, f"written for contract {version}; this is {CONTRACT_VERSION}")
        _require(bool(evaluator.name), "the evaluator has no name")
        _require(bool(evaluator.platform().name), "the platform has no name")

    def test_fingerprint_is_plain_and_the_same_again(self) -> None:
        """Two sessions of equal evaluators on one machine have one fingerprint, of plain values."""
        with self._session() as (session, _):
            first = json.dumps(session.fingerprint(), sort_keys=True, allow_nan=False)
            _require(json.dumps(session.fingerprint(), sort_keys=True) == first, "it changes within a session")
        with self._session() as (session, _):
            again = json.dumps(session.fingerprint(), sort_keys=True)
            _require(again == first, f"{again} is not {first}")

    def test_a_batch_has_a_row_for_each_run(self) -> None:
        """``run(n)`` gives n latencies and n rows of stage times, positive seconds."""
        for candidate, plan, _ in self._candidates():
            for runs in (1, 3):
                _check_batch(candidate.run(runs), runs, plan)

    def test_latencies_are_seconds_of_this_clock(self) -> None:
        """Where runs are measured, their sum agrees with a clock around them, up to the cost of the call."""
        if not self.measures:
            return
        for candidate, _, _ in self._candidates(3):
            candidate.run(2)
            beyond: list[float] = []
            for _ in range(_TRIES):
                start_s = time.perf_counter()
                latency_s = float(candidate.run(10).latency_s.sum())
                wall_s = time.perf_counter() - start_s
                _require(latency_s <= wall_s, f"10 runs took {wall_s} s and are reported as {latency_s} s")
                beyond.append(wall_s - 2 * latency_s)
                if beyond[-1] <= self.call_s:
                    break
            _require(min(beyond) <= self.call_s, f"10 runs: {wall_s} s, reported as {latency_s} s")

    def test_stops_after_a_slow_run(self) -> None:
        """``stop_above_s`` ends the batch with the first slower run, and never before."""
        for candidate, plan, _ in self._candidates(1):
            _check_batch(candidate.run(4, stop_above_s=0.0), 1, plan, whole=False)
            _check_batch(candidate.run(4, stop_above_s=math.inf), 4, plan)

    def test_timelines_are_lawful(self) -> None:
        """Every stage runs once, on its processor, after those it reads from; exclusive processors take turns."""
        graph = self.graph()
        for candidate, plan, platform in self._candidates():
            batch = candidate.run(2)
            if batch.timeline is not None:
                check_timeline(batch.timeline, graph, plan, platform)
                longest_s = float(batch.latency_s[-1]) + _CLOCK_S
                _require(batch.timeline.makespan_s <= longest_s, "the timeline is longer than the latency")

    def test_several_candidates_at_once(self) -> None:
        """A candidate still runs after others are loaded and closed; a fresh instance is another candidate."""
        graph = self.graph()
        with self._session() as (session, platform):
            first, second, *_ = self.plans(graph, platform)
            with closing(session.load(graph, first)) as one:
                for fresh in (False, True):
                    with (
                        closing(session.load(graph, first, fresh=fresh)) as same,
                        closing(session.load(graph, second, fresh=fresh)) as other,
                    ):
                        _check_batch(same.run(1), 1, first)
                        _check_batch(other.run(1), 1, second)
                        _check_batch(one.run(1), 1, first)
                _check_batch(one.run(2), 2, first)

    def test_outputs_agree(self) -> None:
        """A plan computes what the whole model computes, where there are outputs."""
        for candidate, _, _ in self._candidates():
            agreement = candidate.verify()
            _require(agreement is None or agreement.accepted, f"outputs differ: {agreement}")

    def test_refuses_what_it_cannot_run(self) -> None:
        """A plan for another graph, or with a processor that is not there, is an OptimizeError; the session goes on."""
        graph = self.graph()
        whole = tuple(range(len(graph.operators)))
        with self._session() as (session, platform):
            processor = platform.processors[0].name
            for plan in (Plan("0" * 64, (Stage(whole, processor),)), Plan(graph.digest, (Stage(whole, "not there"),))):
                try:
                    session.load(graph, plan).close()
                except OptimizeError:
                    continue
                _require(False, f"loaded {plan}")
            _check_runs(session, graph, self.plans(graph, platform)[0])

    def test_a_failure_is_reported_and_is_not_the_end(self) -> None:
        """A plan that the device fails at is an UnavailableError that says why, and other plans still run."""
        graph = self.graph()
        with self._session() as (session, platform):
            plan = self.failing(graph, platform)
            if plan is None:
                return
            try:
                with closing(session.load(graph, plan)) as candidate:
                    candidate.run(1)
            except UnavailableError as error:
                _require(bool(error.what), "the error does not say what is wrong")
            else:
                _require(False, f"{plan} did not fail")
            _check_runs(session, graph, self.plans(graph, platform)[0])

    def test_sessions_come_one_after_another(self) -> None:
        """One evaluator can be prepared again; closing twice does no harm; after its end a session loads nothing."""
        graph, evaluator = self.graph(), self.evaluator()
        platform = evaluator.platform()
        plan = self.plans(graph, platform)[0]
        for _ in range(2):
            with evaluator.prepare(platform) as session:
                candidate = session.load(graph, plan)
                _check_batch(candidate.run(1), 1, plan)
                candidate.close()
                candidate.close()
                left_open = session.load(graph, plan)  # noqa: F841 - the session must end without its being closed
            try:
                session.load(graph, plan)
            except OptimizeError:
                continue
            _require(False, "a session that is over loaded a plan")

    def test_leaves_nothing_when_the_search_fails(self) -> None:
        """An exception within the session passes through unchanged."""
        try:
            with self._session() as (session, platform):
                session.load(self.graph(), self.plans(self.graph(), platform)[0])
                raise _FailedError  # noqa: TRY301 - that it passes through is the point
        except _FailedError:
            return
        _require(False, "the session swallowed an exception")

    def test_an_interrupt_ends_a_run(self) -> None:
        """Ctrl-C interrupts a long batch soon, and the session can still be left."""
        if not self.measures or threading.current_thread() is not threading.main_thread():
            return
        graph = self.graph()
        begin_s = time.monotonic()
        with suppress(KeyboardInterrupt), self._session() as (session, platform):
            candidate = session.load(graph, self.plans(graph, platform)[0])
            begin_s = time.monotonic()
            with _interrupt_after(0.3):
                candidate.run(_MANY)
            _require(False, "the interrupt did not come through")
        took_s = time.monotonic() - begin_s
        _require(took_s < _PATIENCE_S, f"an interrupt took {took_s:.1f} s")

    def test_a_run_keeps_to_its_limit(self) -> None:
        """An inference that takes longer than the platform's limit is an UnavailableError, raised soon."""
        if not self.measures:
            return
        graph = self.graph()
        with self._session(Limits(run_s=1e-4)) as (session, platform):
            plan = self.plans(graph, platform)[0]
            begin_s = time.monotonic()
            try:
                with closing(session.load(graph, plan)) as candidate:
                    begin_s = time.monotonic()
                    _check_batch(candidate.run(1), 1, plan)  # an evaluator may also be quick enough
            except UnavailableError:
                pass
            took_s = time.monotonic() - begin_s
            _require(took_s < _PATIENCE_S, f"with a limit of 0.1 ms, a run took {took_s:.1f} s")


class _FailedError(Exception):
    """What a search might raise within a session."""


def check_timeline(timeline: Timeline, graph: Graph, plan: Plan, platform: Platform) -> None:
    """Check the laws that measured and simulated timelines share.

    Raises:
        AssertionError: a stage is missing, on the wrong processor or too early, or two events may not overlap but do.
    """
    events = sorted(timeline.events, key=lambda e: e.start_s)
    _require(sorted(e.stage for e in events) == list(range(len(plan.stages))), f"not every stage runs once: {events}")
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    at = {e.stage: e for e in events}
    for event in events:
        stage = plan.stages[event.stage]
        _require(event.end_s >= event.start_s, f"{event} ends before it starts")
        _require(event.processor == stage.processor, f"{event} is not on the processor of {stage}")
        for before in {place[b] for o in stage.operators for b in graph.predecessors(o)} - {event.stage}:
            _require(at[before].end_s <= event.start_s + _CLOCK_S, f"{event} starts before {at[before]} has ended")
    _require(all(a.start_s <= b.start_s for a, b in pairwise(timeline.events)), "events are not ordered by start")
    for one, other in itertools.combinations(events, 2):
        exclusive = one.processor != other.processor and platform[one.processor].excludes(platform[other.processor])
        _require(not exclusive or one.end_s <= other.start_s + _CLOCK_S, f"{one} and {other} overlap")
    for event in events:
        running = [e for e in events if e.processor == event.processor and e.start_s <= event.start_s]
        busy = sum(e.end_s > event.start_s + _CLOCK_S for e in running if e is not event) + 1
        _require(busy <= platform[event.processor].slots, f"{busy} stages run on {event.processor!r} at once")


def _check_runs(session: Session, graph: Graph, plan: Plan) -> None:
    with closing(session.load(graph, plan)) as candidate:
        _check_batch(candidate.run(1), 1, plan)


@contextmanager
def _interrupt_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the body as Ctrl-C would; an alarm that was set before is restored."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, before)


def _check_batch(batch: Batch, runs: int, plan: Plan, *, whole: bool = True) -> None:
    """Check figures of a batch; a run that was interrupted, not ``whole``, has 0 s for stages that it did not reach."""
    _require(batch.latency_s.shape == (runs,), f"latencies of shape {batch.latency_s.shape} for {plural(runs, 'run')}")
    shape = (runs, len(plan.stages))
    _require(batch.stage_s.shape == shape, f"stage times of shape {batch.stage_s.shape}, not {shape}")
    for seconds in (batch.latency_s, batch.stage_s if whole else np.maximum(batch.stage_s, _CLOCK_S)):
        _require(bool(np.all(np.isfinite(seconds) & (seconds > 0))), f"times are not positive: {seconds}")
    longest = batch.stage_s.max(axis=1)
    _require(bool(np.all(longest <= batch.latency_s + _CLOCK_S)), "a stage takes longer than its inference")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
