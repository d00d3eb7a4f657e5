"""Plans on the simulator: timeline, period of a stream of inferences, energy, memory, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluators.cost_model.simulate import Law, Span, Task, period_s, run_tasks, timeline
from evaluators.cost_model.transfers import Prices
from evaluators.timeline import Timeline
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

CORRELATION = 0.3
"""Between the errors of two operators on one processor: what a model of kernels gets wrong, it gets wrong for many."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """What a stage is, wherever it runs.

    Attributes:
        reads: what it reads from other stages: the operator that writes it, the tensor, its bytes.
        io_bytes: what crosses its border.
        weight_bytes: of the constants that it reads.
        peak_bytes: most activations alive at once within it.
    """

    reads: tuple[tuple[int, int, int], ...]
    io_bytes: int
    weight_bytes: int
    peak_bytes: int


class PlanSimulator:
    """A graph on a platform, priced; simulates its plans.

    Args:
        prices: tables with the platform's lanes and the graph's operators.
    """

    def __init__(self, graph: Graph, platform: Platform, prices: Prices) -> None:
        self.graph = graph
        self.platform = platform
        self.prices = prices
        self.law = Law.of(platform)
        self._lanes = {p.name: i for i, p in enumerate(platform.processors)}
        self._insides: dict[tuple[int, ...], _Inside] = {}
        self._work: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[float, ...]]] = {}
        crowded = (prices.slow_compute > 1.0) | (prices.slow_memory > 1.0)
        self._crowded = [bool(row.any()) for row in crowded]
        self._latency: list[list[float]] = prices.latency_s.tolist()
        self._byte: list[list[float]] = prices.byte_s.tolist()

    def tasks(self, plan: Plan) -> list[Task]:
        """Return the plan's stages as tasks, task ``i`` for stage ``i``; the plan must fit the graph and platform."""
        place: dict[int, int] = {}
        on: list[int] = []
        there: set[tuple[int, int]] = set()
        found: list[Task] = []
        several = len({stage.processor for stage in plan.stages}) > 1
        for index, stage in enumerate(plan.stages):
            lane = self._lanes[stage.processor]
            work_s, _, slowed = self._stage(lane, stage.operators)
            needs: dict[int, float] = {}
            for writer, tensor, nbytes in self._inside(stage.operators).reads:
                before = place[writer]
                source = on[before]
                if source == lane:
                    needs.setdefault(before, 0.0)
                else:
                    needs[before] = self._latency[source][lane]
                    if (tensor, lane) not in there:
                        there.add((tensor, lane))
                        work_s += nbytes * self._byte[source][lane]
            found.append(Task(lane, work_s, tuple(needs.items()), slowed if several else ()))
            on.append(lane)
            for operator in stage.operators:
                place[operator] = index
        return found

    def run(self, plan: Plan) -> Timeline:
        """Return when each stage runs in one inference.

        Raises:
            UnavailableError: a lane does not take an operator of its stage.
        """
        return timeline(run_tasks(self.tasks(plan), self.law), [stage.processor for stage in plan.stages])

    def latency_s(self, plan: Plan) -> float:
        """Return the seconds of one inference."""
        return makespan_s(run_tasks(self.tasks(plan), self.law))

    def period_s(self, plan: Plan, inferences: int = 0) -> float:
        """Return the seconds from result to result where inferences follow each other without a pause."""
        return period_s(self.tasks(plan), self.law, inferences)

    def sigma(self, plan: Plan) -> float:
        """Return the relative standard deviation of a plan's predicted latency.

        Errors of operators on one lane go together by :data:`CORRELATION`; those of different lanes do not.
        """
        variance, total = 0.0, 0.0
        by_lane: dict[int, tuple[float, float]] = {}
        for stage in plan.stages:
            lane = self._lanes[stage.processor]
            operators = list(stage.operators)
            deviations = self.prices.operator_s[lane, operators] * self.prices.sigma[lane, operators]
            squares, plain = by_lane.get(lane, (0.0, 0.0))
            by_lane[lane] = (squares + float((deviations**2).sum()), plain + float(deviations.sum()))
            total += float(self.prices.operator_s[lane, operators].sum())
        for squares, plain in by_lane.values():
            variance += (1.0 - CORRELATION) * squares + CORRELATION * plain**2
        return math.sqrt(variance) / total if total > 0 else 0.0

    def energy_j(self, plan: Plan) -> float | None:
        """Return the joules of one inference above idle; None where the power of a lane is unknown."""
        total = 0.0
        for event in self.run(plan).events:
            total += (event.end_s - event.start_s) * float(self.prices.power_w[self._lanes[event.lane]])
        return None if math.isnan(total) else total

    def peak_bytes(self, plan: Plan) -> dict[str, int]:
        """Return the memory that each lane of a plan needs: its weights, and the most activations of one stage."""
        found = {}
        for lane, indices in plan.by_processor().items():
            insides = [self._inside(plan.stages[i].operators) for i in indices]
            found[lane] = sum(i.weight_bytes for i in insides) + max(i.peak_bytes for i in insides)
        return found

    def _stage(self, lane: int, operators: tuple[int, ...]) -> tuple[float, float, tuple[float, ...]]:
        """Return a stage's time on a lane, the share of it that is traffic, and how other lanes slow it."""
        key = (lane, operators)
        if key not in self._work:
            p, inside = self.prices, self._inside(operators)
            each = p.operator_s[lane, list(operators)]
            total = float(each.sum() + p.invocation_s[lane] + inside.io_bytes * p.io_s_per_byte[lane])
            if p.capacity_bytes[lane]:
                beyond = max(0.0, inside.weight_bytes - float(p.capacity_bytes[lane]))
                total += beyond * float(p.pressure_per_byte[lane]) * float(each.sum())
            finite = np.isfinite(total) and total > 0
            share = float((each * p.traffic[list(operators)]).sum() / total) if finite else 0.0
            slowed: tuple[float, ...] = ()
            if self._crowded[lane]:
                factors = share * p.slow_memory[lane] + (1.0 - share) * p.slow_compute[lane]
                slowed = tuple(float(f) for f in factors)
            self._work[key] = (total, share, slowed)
        return self._work[key]

    def _inside(self, operators: tuple[int, ...]) -> _Inside:
        if operators not in self._insides:
            self._insides[operators] = _inside(self.graph, operators)
        return self._insides[operators]


def makespan_s(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _inside(graph: Graph, operators: tuple[int, ...]) -> _Inside:
    border = graph.boundary(operators)
    tensors = graph.tensors
    reads = tuple((graph.producer[t], t, tensors[t].nbytes) for t in border.inputs if t in graph.producer)
    io_bytes = sum(tensors[t].nbytes for t in (*border.inputs, *border.outputs))
    return _Inside(reads, io_bytes, sum(tensors[t].nbytes for t in border.constants), _peak(graph, operators))


def _peak(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the most bytes of activations that are alive at once while operators run one after another."""
    border = graph.boundary(operators)
    inside = set(operators)
    size = {t: graph.tensors[t].nbytes for o in operators for t in (*graph.operators[o].outputs, *border.inputs)}
    kept = set(border.outputs)
    last = {t: max((c for c in graph.consumers.get(t, ()) if c in inside), default=-1) for t in size}
    alive = sum(size[t] for t in border.inputs)
    most = alive
    for operator in operators:
        alive += sum(size[t] for t in graph.operators[operator].outputs)
        most = max(most, alive)
        for t in {*graph.operators[operator].inputs, *graph.operators[operator].outputs} & size.keys():
            if t not in kept and last[t] <= operator:
                alive -= size[t]
    return most
