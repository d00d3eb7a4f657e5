"""What every evaluator must do, as tests.

A plug-in's tests subclass :class:`EvaluatorContract` under a name that begins with ``Test`` and say how to make the
evaluator; pytest does the rest. The module itself does not need pytest.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from evaluators.base import Batch, Evaluator, Session
from evaluators.timeline import Timeline
from search_spaces.chain import chain_plan
from search_spaces.errors import OptimizeError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.plan import Plan, Stage, canonical
from search_spaces.platform import Platform

_CLOCK_S = 1e-6  # events are compared with this tolerance: clocks of two processes may be read a moment apart


def example_graph(operators: int = 8) -> Graph:
    """Return a small graph without weights on disk: a chain whose second operator also feeds the last (a branch)."""
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
    """

    measures: bool = False

    def evaluator(self) -> Evaluator:
        """Return a new evaluator; must be overridden."""
        raise NotImplementedError

    def graph(self) -> Graph:
        """Return a graph of at least 3 operators that the evaluator can load."""
        return example_graph()

    def plans(self, graph: Graph, platform: Platform) -> list[Plan]:
        """Return plans to try: the whole graph on every lane, and cut in three over all pairs of lanes."""
        lanes = [p.name for p in platform.processors]
        count = len(graph.operators)
        words = [[a] for a in lanes] + [[a, b, a] for a in lanes for b in lanes]
        cuts = {1: [], 3: [count // 3, 2 * count // 3]}
        found = [canonical(chain_plan(graph, cuts[len(word)], word), graph, platform) for word in words]
        return list({plan.digest: plan for plan in found}.values())

    @contextmanager
    def _session(self) -> Iterator[tuple[Session, Platform]]:
        evaluator = self.evaluator()
        platform = evaluator.platform()
        with TemporaryDirectory() as scratch, evaluator.prepare(platform, Path(scratch)) as session:
            yield session, platform

    def test_has_a_name_and_a_platform(self) -> None:
        """The name is not empty, and the platform has processors (its own rule)."""
        evaluator = self.evaluator()
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
        graph = self.graph()
        with self._session() as (session, platform):
            for plan in self.plans(graph, platform):
                with closing(session.load(graph, plan)) as candidate:
                    for runs in (1, 3):
                        _check_batch(candidate.run(runs), runs, plan)

    def test_latencies_are_seconds_of_this_clock(self) -> None:
        """Where runs are measured, their sum is what a clock around them shows, up to the cost of the call."""
        if not self.measures:
            return
        graph = self.graph()
        with self._session() as (session, platform):
            for plan in self.plans(graph, platform)[:3]:
                with closing(session.load(graph, plan)) as candidate:
                    candidate.run(2)
                    start_s = time.perf_counter()
                    latency_s = float(candidate.run(10).latency_s.sum())
                    wall_s = time.perf_counter() - start_s
                    _require(latency_s <= wall_s, f"10 runs took {wall_s} s and are reported as {latency_s} s")
                    _require(wall_s <= 2 * latency_s + 0.01, f"10 runs: {wall_s} s, reported as {latency_s} s")

    def test_stops_after_a_slow_run(self) -> None:
        """``stop_above_s`` ends the batch with the first slower run, and never before."""
        graph = self.graph()
        with self._session() as (session, platform):
            plan = self.plans(graph, platform)[0]
            with closing(session.load(graph, plan)) as candidate:
                _check_batch(candidate.run(4, stop_above_s=0.0), 1, plan)
                _check_batch(candidate.run(4, stop_above_s=math.inf), 4, plan)

    def test_timelines_are_lawful(self) -> None:
        """Every stage runs once on its lane and after those it reads from; lanes that exclude each other take turns."""
        graph = self.graph()
        with self._session() as (session, platform):
            for plan in self.plans(graph, platform):
                with closing(session.load(graph, plan)) as candidate:
                    batch = candidate.run(2)
                    if batch.timeline is not None:
                        check_timeline(batch.timeline, graph, plan, platform)
                        longest_s = float(batch.latency_s[-1]) + _CLOCK_S
                        _require(batch.timeline.makespan_s <= longest_s, "the timeline is longer than the latency")

    def test_several_candidates_at_once(self) -> None:
        """A candidate runs on while others are loaded and closed; a fresh instance is another candidate."""
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
        """What a plan computes is what the whole model computes, where there are outputs."""
        graph = self.graph()
        with self._session() as (session, platform):
            for plan in self.plans(graph, platform):
                with closing(session.load(graph, plan)) as candidate:
                    agreement = candidate.verify()
                    _require(agreement is None or agreement.accepted, f"outputs differ: {agreement}")

    def test_refuses_what_it_cannot_run(self) -> None:
        """A plan for another graph, or with a lane that is not there, is an error of ours, not a crash."""
        graph = self.graph()
        whole = tuple(range(len(graph.operators)))
        with self._session() as (session, platform):
            lane = platform.processors[0].name
            for plan in (Plan("0" * 64, (Stage(whole, lane),)), Plan(graph.digest, (Stage(whole, "no such lane"),))):
                try:
                    session.load(graph, plan).close()
                except OptimizeError:
                    continue
                _require(False, f"loaded {plan}")


def check_timeline(timeline: Timeline, graph: Graph, plan: Plan, platform: Platform) -> None:
    """Check the laws that measured and simulated timelines share.

    Raises:
        AssertionError: a stage is missing, on the wrong lane or too early, or two events may not overlap but do.
    """
    events = sorted(timeline.events, key=lambda e: e.start_s)
    _require(sorted(e.stage for e in events) == list(range(len(plan.stages))), f"not every stage runs once: {events}")
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    at = {e.stage: e for e in events}
    for event in events:
        stage = plan.stages[event.stage]
        _require(event.end_s >= event.start_s, f"{event} ends before it starts")
        _require(event.lane == stage.processor, f"{event} is not on the lane of {stage}")
        for before in {place[b] for o in stage.operators for b in graph.predecessors(o)} - {event.stage}:
            _require(at[before].end_s <= event.start_s + _CLOCK_S, f"{event} starts before {at[before]} has ended")
    _require(all(a.start_s <= b.start_s for a, b in pairwise(timeline.events)), "events are not ordered by start")
    for one, other in itertools.combinations(events, 2):
        exclusive = one.lane == other.lane or platform[one.lane].excludes(platform[other.lane])
        _require(not exclusive or one.end_s <= other.start_s + _CLOCK_S, f"{one} and {other} overlap")


def _check_batch(batch: Batch, runs: int, plan: Plan) -> None:
    _require(batch.latency_s.shape == (runs,), f"latencies of shape {batch.latency_s.shape} for {runs} runs")
    shape = (runs, len(plan.stages))
    _require(batch.stage_s.shape == shape, f"stage times of shape {batch.stage_s.shape}, not {shape}")
    for seconds in (batch.latency_s, batch.stage_s):
        _require(bool(np.all(np.isfinite(seconds) & (seconds > 0))), f"times are not positive: {seconds}")
    longest = batch.stage_s.max(axis=1)
    _require(bool(np.all(longest <= batch.latency_s + _CLOCK_S)), "a stage takes longer than its inference")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
