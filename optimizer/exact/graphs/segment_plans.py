"""Plans of one segment without a solver: the cost of one, and a good first one."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

import numpy as np

from optimizer.exact.chain_costs import busy_with
from optimizer.exact.graphs.graph_costs import GraphCosts
from optimizer.exact.graphs.segments import Segment
from search_spaces.core.graph import Graph

Stages = tuple[tuple[tuple[int, ...], int], ...]

_COOLING = (0.005, 0.0001)  # temperature of the first and of the last move, relative to the plan's time
_MOVES = (0.4, 0.75, 0.9)  # cumulative shares: change the processor, change the place, merge; the rest divide
_FAR = 12  # places that a stage moves at most
_LOOK = 64  # moves between two checks of the time


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How a segment runs between two gates.

    Attributes:
        stages: operators and processor (index) of each stage, in the order of their begin; the first may be a
            continuation of the entry gate's stage.
        continued: whether it is.
        cost_s: seconds from the end of the entry gate's work to that of the exit (or of everything).
        bound_s: no plan of the segment between these processors takes less.
    """

    stages: tuple[tuple[tuple[int, ...], int], ...]
    continued: bool
    cost_s: float
    bound_s: float


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCosts:
    """Computes the seconds of a segment's plans, given the processor of its entry gate."""

    graph: Graph
    costs: GraphCosts
    segment: Segment
    entry_processor: int | None
    _known: dict[tuple[int, ...], _Work] = field(default_factory=dict)
    busy: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy", busy_with(self.costs.platform))

    def seconds(self, stages: Stages, *, continued: bool) -> float:
        """Return the seconds from the end of the entry gate's work to the end of all stages, run in this order.

        Infinite where a stage reads what a later one writes.
        """
        run = _Run(self)
        for operators, on in stages:
            end = run.end(operators, on, goes_on=continued and not run.ended)
            if end == math.inf:
                return end
            run.add(operators, on, end, goes_on=continued and not run.ended)
        return run.last_s

    def work(self, operators: tuple[int, ...]) -> _Work:
        """Return the seconds and the inputs of some operators."""
        if operators not in self._known:
            inside = set(operators)
            read = {t for o in operators for t in self.graph.operators[o].inputs if t in self.graph.producer}
            known = {*self.segment.operators, self.segment.entry} - inside
            reads = tuple((t, self.graph.producer[t]) for t in read if self.graph.producer[t] in known)
            seconds = self.costs.operator_s[:, list(operators)].sum(axis=1)
            self._known[operators] = _Work(tuple(seconds.tolist()), reads)
        return self._known[operators]


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of some operators on each processor, and their inputs from others: (tensor, writer)."""

    seconds: tuple[float, ...]
    reads: tuple[tuple[int, int], ...]


class _Run:
    """The schedule of the stages that have been added."""

    def __init__(self, of: SegmentCosts) -> None:
        self._of = of
        self._free = [0.0] * len(of.costs.overhead_s)
        self._entry_s = self.last_s = 0.0
        self.ended: dict[int, tuple[float, int]] = {}  # operator → when, and on which processor

    def end(self, operators: tuple[int, ...], on: int, *, goes_on: bool = False) -> float:
        """Return when a stage would end; infinite if an input is not available yet.

        Args:
            goes_on: whether it is a continuation of the entry gate's stage.
        """
        of, work = self._of, self._of.work(operators)
        begin, took = max(self._free[on], self._entry_s), work.seconds[on]
        if not goes_on:
            took += float(of.costs.overhead_s[on])
        for tensor, writer in work.reads:
            if writer == of.segment.entry:
                if not goes_on and of.entry_processor is not None:
                    took += float(of.costs.transfer_s[tensor, of.entry_processor, on])
            elif writer in self.ended:
                there_s, source = self.ended[writer]
                begin = max(begin, there_s)
                took += float(of.costs.transfer_s[tensor, source, on])
            else:
                return math.inf
        return begin + took

    def add(self, operators: tuple[int, ...], on: int, end_s: float, *, goes_on: bool = False) -> None:
        """Append a stage that ends at ``end_s``."""
        self.ended.update(dict.fromkeys(operators, (end_s, on)))
        self.last_s = max(self.last_s, end_s)
        if goes_on:
            self._entry_s = end_s
        for other in self._of.busy[on]:
            self._free[other] = max(self._free[other], end_s)


def list_schedule(of: SegmentCosts, exit_processor: int | None) -> SegmentPlan | None:
    """Return a plan made operator by operator, each on the processor where it ends first, then with stages merged.

    Operators are ordered by upward rank (HEFT: Topcuoglu et al. 2002, doi:10.1109/71.993206).
    """
    graph, costs, segment = of.graph, of.costs, of.segment
    finite = np.where(np.isfinite(costs.operator_s), costs.operator_s + costs.overhead_s[:, None], np.nan)
    mean = np.nanmean(finite[:, list(segment.operators)], axis=0)
    moved = costs.transfer_s.mean(axis=(1, 2))
    rank: dict[int, float] = {}
    for operator, seconds in zip(reversed(segment.operators), reversed(mean.tolist()), strict=True):
        after = {(c, t) for t in graph.operators[operator].outputs for c in graph.consumers.get(t, ())}
        rank[operator] = seconds + max((rank[c] + float(moved[t]) for c, t in after if c in rank), default=0.0)
    run, stages = _Run(of), list[tuple[tuple[int, ...], int]]()
    for operator in sorted(segment.operators, key=lambda o: (-rank[o], o)):
        end_s, processor = min(
            (run.end((operator,), processor), processor)
            for processor in range(len(costs.platform.processors))
            if operator != segment.exit or exit_processor in (None, processor)
        )
        run.add((operator,), processor, end_s)
        stages.append(((operator,), processor))
    return None if run.last_s == math.inf else _merged(of, SegmentPlan(tuple(stages), False, run.last_s, 0.0))


def _merged(of: SegmentCosts, plan: SegmentPlan) -> SegmentPlan:
    """Return the plan with consecutive stages of a processor merged if that is not slower."""
    index = 0
    while index < len(plan.stages):
        processor = plan.stages[index][1]
        if index == 0 and not plan.continued and processor == of.entry_processor:
            cost = of.seconds(plan.stages, continued=True)
            if cost <= plan.cost_s:
                plan = SegmentPlan(plan.stages, True, cost, 0.0)
        follower = next((i for i in range(index + 1, len(plan.stages)) if plan.stages[i][1] == processor), None)
        if follower is not None:
            joined = _joined(plan.stages, index, follower)
            cost = of.seconds(joined, continued=plan.continued)
            if cost <= plan.cost_s:
                plan = SegmentPlan(joined, plan.continued, cost, 0.0)
                continue
        index += 1
    return plan


def _joined(stages: Stages, one: int, other: int) -> Stages:
    """Return the stages with a later one merged into an earlier one."""
    operators = tuple(sorted((*stages[one][0], *stages[other][0])))
    return (*stages[:one], (operators, stages[one][1]), *stages[one + 1 : other], *stages[other + 1 :])


def improved(of: SegmentCosts, exit_processor: int | None, plan: SegmentPlan, time_limit_s: float) -> SegmentPlan:
    """Return the best plan that simulated annealing finds, never worse than the one that it begins with.

    A move changes a stage's processor or its place in the order, merges it with the next one on its processor, or
    divides it.
    """
    rng, begin_s = random.Random(0), time.monotonic()  # noqa: S311
    best, now, now_s = plan, plan.stages, plan.cost_s
    processors = range(len(of.costs.platform.processors))
    while (share := (time.monotonic() - begin_s) / time_limit_s) < 1.0:
        heat_s = plan.cost_s * _COOLING[0] * (_COOLING[1] / _COOLING[0]) ** share
        for _ in range(_LOOK):
            place = rng.randrange(int(plan.continued), max(len(now), int(plan.continued) + 1))
            if place >= len(now):
                return best
            tried = _neighbour(now, place, rng, processors, first=int(plan.continued))
            stays = next((on for operators, on in tried if of.segment.exit in operators), exit_processor)
            if exit_processor not in (None, stays):
                continue
            took_s = of.seconds(tried, continued=plan.continued)
            if took_s < now_s or rng.random() < math.exp((now_s - took_s) / heat_s):
                now, now_s = tried, took_s
                if now_s < best.cost_s:
                    best = SegmentPlan(now, plan.continued, now_s, plan.bound_s)
    return _merged(of, best)


def _neighbour(stages: Stages, place: int, rng: random.Random, processors: range, first: int) -> Stages:
    """Return stages after one move of the one at ``place``; nothing is moved before ``first``."""
    operators, on = stages[place]
    how = rng.random()
    if how < _MOVES[0]:
        return (*stages[:place], (operators, rng.choice(processors)), *stages[place + 1 :])
    if how < _MOVES[1]:
        rest = (*stages[:place], *stages[place + 1 :])
        to = min(max(first, place + rng.randint(-_FAR, _FAR)), len(rest))
        return (*rest[:to], (operators, on), *rest[to:])
    if how < _MOVES[2]:
        after = next((i for i in range(place + 1, len(stages)) if stages[i][1] == on), None)
        return stages if after is None else _joined(stages, place, after)
    if len(operators) == 1:
        return stages
    cut = rng.randrange(1, len(operators))
    return (*stages[:place], (operators[:cut], on), (operators[cut:], on), *stages[place + 1 :])
