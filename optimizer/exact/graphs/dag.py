"""The best plan of a graph with branches on concurrent processors: exact, or with the remaining gap.

Gates divide the graph into segments (:mod:`~.segments`); a plan is a path through the processors of the gates, and the
lower bound is the shortest path through bounds of the segments. A segment is solved by search
(:mod:`~.segment_search`) where it is small, else by CP-SAT, the largest ones by annealing; if it has more than a few
operators, only for the processors of its gates that the shortest path uses. No bound is below that of
:mod:`optimizer.exact.bound`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.exact.bound import relax
from optimizer.exact.graphs.cpsat import check_time_limit
from optimizer.exact.graphs.graph_costs import GraphCosts, as_plan, makespan_s
from optimizer.exact.graphs.segment_model import solve_segment
from optimizer.exact.graphs.segment_plans import SegmentCosts, SegmentPlan, improved, list_schedule
from optimizer.exact.graphs.segment_search import Problem, beam_segment, search_segment
from optimizer.exact.graphs.segments import Segment, segments
from optimizer.exact.solution import PROVEN, Solution
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage

_FEW = 5  # operators of a segment up to which it is solved for all processors of its gates at once
_MOST_SEARCHED = 18  # operators of a segment up to which the search beats CP-SAT
_MOST_SOLVED = 40  # operators of a segment up to which CP-SAT is better than more of the local search
_HAIR = 1e-9
_SHARE = 0.6  # of the time of a segment, for a local search before CP-SAT

Ends = tuple[int | None, int | None]
ProcessorIndex = int | None


def best_plan(graph: Graph, costs: GraphCosts, time_limit_s: float = 30.0) -> Solution[Plan]:
    """Return the plan with the least makespan that is found in the time, with a bound on all plans.

    The plan is canonical, unless its order of stages is faster than the canonical one.

    Raises:
        InfeasibleError: some operator runs on no processor.
        UnavailableError: OR-Tools is missing, and the graph has a segment that needs it; or the time was too short to
            find a plan.
        UsageError: the time limit is not more than 0.
    """
    check_time_limit(time_limit_s)
    _check_support(costs)
    begin_s = time.monotonic()
    parts = [_Part(graph, costs, segment) for segment in segments(graph)]
    known: dict[object, dict[Ends, _Answer]] = {}
    for part in parts:
        part.answers = known.setdefault(part.key, part.answers)
    end_s = begin_s + time_limit_s
    while True:
        least, path = _shortest(parts, lambda answer: answer.bound_s)
        spent, _ = _shortest(parts, lambda answer: answer.cost_s)
        open_pairs = [(part, ends) for part, ends in zip(parts, path, strict=True) if part.answers[ends].open]
        if not open_pairs or spent <= least * (1 + _HAIR):
            break
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        slack_s = spent - least
        for number, (part, ends) in enumerate(open_pairs):
            share_s = (end_s - time.monotonic()) / (len(open_pairs) - number)
            if share_s > 0 and part.answers[ends].open:
                part.refine(ends, slack_s, share_s)
    spent, path = _shortest(parts, lambda answer: answer.cost_s)
    if spent == float("inf"):
        raise UnavailableError(f"no plan was found within {time_limit_s:g} s", "give a longer --time-limit")
    steps = [part.plan(ends) for part, ends in zip(parts, path, strict=True)]
    whole = _list_scheduled(graph, costs)
    if whole is not None and whole.cost_s < spent:  # its stages may span gates
        steps = [whole]
    plan = as_plan(graph, costs, _stages(costs, steps))
    took_s = makespan_s(graph, costs, plan)
    bound_s = min(took_s, max(least, relax(graph, costs).latency_s))
    return Solution(plan, float(took_s), float(bound_s), time.monotonic() - begin_s, PROVEN)


def list_scheduled(graph: Graph, costs: GraphCosts) -> Plan | None:
    """Return the plan of list scheduling (HEFT); None if some operator runs on no processor."""
    whole = _list_scheduled(graph, costs)
    return None if whole is None else as_plan(graph, costs, _stages(costs, [whole]))


def _list_scheduled(graph: Graph, costs: GraphCosts) -> SegmentPlan | None:
    return list_schedule(
        SegmentCosts(graph, costs, Segment(None, tuple(range(len(graph.operators))), None), None), None
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The solution of a segment between two processors, so far.

    Attributes:
        plan: the best so far, of the segment moved to operator 0; None where there is none.
        bound_s: lower bound.
        open: whether more work could improve it.
        tried: whether there has been a search already.
    """

    plan: SegmentPlan | None
    bound_s: float
    open: bool
    tried: bool = False

    @property
    def cost_s(self) -> float:
        return self.plan.cost_s if self.plan else float("inf")


class _Part:
    """A segment, with its solutions for each choice of the processors of its gates."""

    def __init__(self, graph: Graph, costs: GraphCosts, segment: Segment) -> None:
        self._graph, self._costs, self._segment = graph, costs, segment
        self._of = {entry: SegmentCosts(graph, costs, segment, entry) for entry in self._processors(segment.entry)}
        self.key = _key(graph, costs, segment)
        self.answers = self._first()

    def _processors(self, gate: int | None) -> list[ProcessorIndex]:
        processors = range(len(self._costs.platform.processors))
        return [None] if gate is None else [p for p in processors if self._costs.operator_s[p, gate] < float("inf")]

    def _first(self) -> dict[Ends, _Answer]:
        """Return a first solution: exact for a few operators, else a list schedule and a path."""
        operators, found = self._segment.operators, dict[Ends, _Answer]()
        for entry_processor, of in self._of.items():
            for exit_processor in self._processors(self._segment.exit):
                problem, few = Problem.make(of, exit_processor), len(operators) <= _FEW
                if few:
                    made, bound_s = search_segment(problem, operators, math.inf, math.inf)
                else:
                    made, bound_s = list_schedule(of, exit_processor), problem.bound_s
                plan = _moved(made, -operators[0]) if made else None
                found[entry_processor, exit_processor] = _Answer(plan, bound_s, open=not few)
        return found

    def plan(self, ends: Ends) -> SegmentPlan:
        """Return the best plan known, in its place in the graph."""
        plan = self.answers[ends].plan
        if plan is None:
            raise UnavailableError("no plan was found for a part of the graph", "give a longer --time-limit")
        return _moved(plan, self._segment.operators[0])

    def refine(self, ends: Ends, slack_s: float, time_limit_s: float) -> None:
        """Find the best plan for one choice of processors, or prove that it is ``slack_s`` above the bound."""
        of, segment, before = self._of[ends[0]], self._segment, self.answers[ends]
        first = segment.operators[0]
        if len(segment.operators) <= _MOST_SEARCHED:
            problem = Problem.make(of, ends[1])
            if not before.tried:  # a better plan first: it bounds the search
                plan = beam_segment(problem, segment.operators)
                if plan is not None:
                    seconds = of.seconds(plan.stages, continued=plan.continued)
                    plan = _moved(replace(plan, cost_s=seconds), -first) if seconds < before.cost_s else before.plan
                self.answers[ends] = _Answer(plan or before.plan, before.bound_s, open=True, tried=True)
                return
            most_s = min(before.cost_s, before.bound_s + slack_s) * (1 + _HAIR)
            plan, bound_s = search_segment(problem, segment.operators, most_s, time.monotonic() + time_limit_s)
            done = plan is not None or bound_s >= before.cost_s
            best = _moved(plan, -first) if plan is not None else before.plan
            self.answers[ends] = _Answer(best, max(before.bound_s, bound_s), open=not done, tried=True)
            return
        known = _moved(before.plan, first) if before.plan else None
        solved = len(segment.operators) <= _MOST_SOLVED
        if known is not None:
            known = improved(of, ends[1], known, _SHARE * time_limit_s if solved else time_limit_s)
            before = replace(before, plan=_moved(known, -first))
        answer = solve_segment(of, ends[1], (1 - _SHARE) * time_limit_s, known) if solved else None
        best, bound_s = before.plan, before.bound_s
        if answer is not None:
            seconds = of.seconds(answer.stages, continued=answer.continued)
            if seconds < before.cost_s:
                best = _moved(replace(answer, cost_s=seconds), -first)
            bound_s = max(bound_s, answer.bound_s)
        self.answers[ends] = _Answer(best, bound_s, open=False)


def _shortest(parts: list[_Part], length: Callable[[_Answer], float]) -> tuple[float, list[Ends]]:
    """Return the length of the shortest path through the gates' processors, and each segment's processors on it."""
    paths: dict[ProcessorIndex, tuple[float, list[Ends]]] = {None: (0.0, [])}
    for part in parts:
        here: dict[ProcessorIndex, tuple[float, list[Ends]]] = {}
        for (before, after), answer in part.answers.items():
            if before in paths:
                spent = paths[before][0] + length(answer)
                if after not in here or spent < here[after][0]:
                    here[after] = spent, [*paths[before][1], (before, after)]
        paths = here
    return min(paths.values(), key=lambda path: path[0])


def _key(graph: Graph, costs: GraphCosts, segment: Segment) -> object:
    """Return a key that is equal for segments that are the same problem."""
    first = segment.operators[0]
    entry = [] if segment.entry is None else [segment.entry]
    rank = {o: i for i, o in enumerate((*entry, *segment.operators))}
    names: dict[int, int] = {}
    reads = [
        [
            (rank[graph.producer[t]], names.setdefault(t, len(names)), costs.transfer_s[t].tobytes())
            for t in graph.operators[operator].inputs
            if graph.producer.get(t) in rank
        ]
        for operator in segment.operators
    ]
    seconds = costs.operator_s[:, first : first + len(segment.operators)].tobytes()
    refused = b"" if segment.entry is None else np.isinf(costs.operator_s[:, segment.entry]).tobytes()
    return seconds, refused, repr(reads), segment.entry is None, segment.exit is None


def _moved(plan: SegmentPlan, by: int) -> SegmentPlan:
    """Return the same plan for a segment elsewhere in the graph."""
    return replace(
        plan, stages=tuple((tuple(o + by for o in operators), processor) for operators, processor in plan.stages)
    )


def _stages(costs: GraphCosts, steps: Sequence[SegmentPlan]) -> list[Stage]:
    """Return the stages of consecutive segments; a stage that continues beyond a gate stays one stage."""
    found: list[tuple[tuple[int, ...], int]] = []
    for step in steps:
        rest = list(step.stages)
        if step.continued:
            operators, processor = rest.pop(0)
            gate = max(range(len(found)), key=lambda i: found[i][0][-1])  # the stage that holds the gate
            found[gate] = (*found[gate][0], *operators), processor
        found += rest
    names = [p.name for p in costs.platform.processors]
    return [Stage(tuple(sorted(operators)), names[processor]) for operators, processor in found]


def _check_support(costs: GraphCosts) -> None:
    refused = np.flatnonzero(np.isinf(costs.operator_s).all(axis=0))
    if refused.size:
        raise InfeasibleError(
            f"operator {int(refused[0])} is supported on no processor of {costs.platform.name!r}",
            "add one that supports it",
        )
