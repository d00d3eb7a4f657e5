"""Simulation of plans: timeline, period of a stream, uncertainty; and cost tables of consecutive stages.

:func:`part_costs` covers all chain plans at once. The time of consecutive operators is looked up in a table over
processor, first operator and operator after the last; bytes between stages come from sums over rectangles (writers of
the one, readers of the other).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from evaluators.base import PartCosts
from evaluators.cost_model.features import fusions
from evaluators.cost_model.profile import COLD_BYTES
from evaluators.cost_model.transfers import Prices
from evaluators.schedule import (
    Law,
    Span,
    Task,
    Timeline,
    rounds,
    run_tasks,
    stream_period_s,
    timeline,
)
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.rewrites.views import Held
from search_spaces.spaces.cuts import cut_points

CORRELATION = 0.3
"""Between the errors of two operators on one processor: a kernel model is wrong about many operators alike."""

UNSURE = 0.2
"""Relative standard deviation of the cost of a stage call, and of a transfer."""

Errors = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Inside:
    """Properties of a stage that do not depend on its processor.

    Attributes:
        reads: tensors from other stages: the operator that writes it, the tensor, its bytes.
        io_bytes: bytes that cross its border.
        weight_bytes: of the constants that it reads.
        all: its operators.
    """

    reads: tuple[tuple[int, int, int], ...]
    io_bytes: int
    weight_bytes: int
    all: frozenset[int]


class PlanSimulator:
    """Simulates plans of a graph on a platform.

    Args:
        prices: tables for the platform's processors and the graph's operators.
        held: tensors that no operator of a plan writes, as of :class:`~search_spaces.rewrites.views.Viewed`.
    """

    def __init__(self, graph: Graph, platform: Platform, prices: Prices, held: Held | None = None) -> None:
        self.graph = graph
        self.held: Held = held or {}
        self.platform = platform
        self.law = Law.of(platform)
        self._processors = {p.name: i for i, p in enumerate(platform.processors)}
        self._insides: dict[tuple[int, ...], _Inside] = {}
        self._fused_with = fused_with(graph, prices)
        self.reprice(prices)

    def reprice(self, prices: Prices) -> None:
        """Simulate by other prices from now on; what cost nothing before costs nothing now."""
        self.prices = prices
        self._work: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[float, ...]]] = {}
        crowded = (prices.slow_compute > 1.0) | (prices.slow_memory > 1.0)
        self._crowded = [bool(row.any()) for row in crowded]
        self._latency: list[list[float]] = prices.latency_s.tolist()
        self._byte: list[list[float]] = prices.byte_s.tolist()
        self._cold: list[list[float]] | None = None if prices.cold_s is None else prices.cold_s.tolist()
        self._asleep: list[list[float]] | None = None if prices.asleep_s is None else prices.asleep_s.tolist()

    def tasks(self, plan: Plan) -> list[Task]:
        """Return the plan's stages as tasks, task ``i`` for stage ``i``; the plan must fit the graph and platform."""
        place: dict[int, int] = {}
        on: list[int] = []
        there: dict[tuple[int, int], int] = {}  # tensor and processor → its bytes that were moved there
        found: list[Task] = []
        several = len({stage.processor for stage in plan.stages}) > 1
        excluded = self.law.excluded
        # For each processor: stages after its last one on processors that need its cores, the latest of each.
        turns: list[dict[int, int]] = [{} for _ in excluded]
        for index, stage in enumerate(plan.stages):
            processor = self._processors[stage.processor]
            work_s, _, slowed = self.stage(processor, stage.operators)
            needs: dict[int, float] = {}
            for writer, tensor, nbytes in self._inside(stage.operators).reads:
                before = place[writer]
                source = on[before]
                if source == processor:
                    needs.setdefault(before, 0.0)
                else:
                    asleep = self._asleep is not None and turns[processor]
                    needs[before] = (self._asleep if asleep else self._latency)[source][processor]  # type: ignore[index]
                    moved = there.get((tensor, processor), 0)
                    # Two parts of a tensor may overlap; together they are no more than all of it.
                    if more := min(nbytes, self.graph.tensors[tensor].nbytes - moved):
                        there[tensor, processor] = moved + more
                        work_s += more * self._byte[source][processor]
                        if self._cold is not None:
                            work_s += _cold(more) * self._cold[source][processor]
            if self._asleep is not None and several:
                for source, before in turns[processor].items():
                    needs.setdefault(before, self._asleep[source][processor])
                turns[processor] = {}
                for other in excluded[processor]:
                    turns[other][processor] = index
            found.append(Task(processor, work_s, tuple(needs.items()), slowed if several else ()))
            on.append(processor)
            for operator in stage.operators:
                place[operator] = index
        return found

    def run(self, plan: Plan) -> Timeline:
        """Return the timeline of one inference.

        Raises:
            UnavailableError: a processor does not support an operator of its stage.
        """
        return timeline(run_tasks(self.tasks(plan), self.law), [stage.processor for stage in plan.stages])

    def latency_s(self, plan: Plan) -> float:
        """Return the latency of one inference (s)."""
        return makespan_s(run_tasks(self.tasks(plan), self.law))

    def stream_period_s(self, plan: Plan) -> float:
        """Return the period of a stream of inferences (s), overlapped as in the runner (:mod:`evaluators.schedule`)."""
        place = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
        needs = [{place[writer] for writer, _, _ in self._inside(stage.operators).reads} for stage in plan.stages]
        how = rounds(plan, self.platform, needs)
        return stream_period_s(self.tasks(plan), self.law, how)

    def errors(self, plan: Plan) -> Errors:
        """Return the relative change of a plan's latency by one standard deviation of each source of error.

        The sources are, for each kind of processor: each operator on it, the common error of all operators on it
        (:data:`CORRELATION`), and the cost of stage calls; and transfers between each two kinds. They are the same for
        all plans, so that errors which two plans share do not make their comparison uncertain.
        """
        kinds = [p.like for p in self.platform.processors]
        known = list(dict.fromkeys(kinds))
        count, p = len(self.graph.operators), self.prices
        single, common = np.zeros((len(known), count)), np.zeros(len(known))
        calls, ways = np.zeros(len(known)), np.zeros((len(known), len(known)))
        total = 0.0
        place = {o: self._processors[s.processor] for s in plan.stages for o in s.operators}
        for stage in plan.stages:
            processor = self._processors[stage.processor]
            kind = known.index(kinds[processor])
            operators, each = list(stage.operators), self._each_s(processor, stage.operators)
            single[kind, operators] = each * p.sigma[processor, operators]
            call_s = self._call_s(processor, stage.operators)
            calls[kind] += UNSURE * call_s
            total += float(each.sum()) + call_s
            for writer, _, nbytes in self._inside(stage.operators).reads:
                if (source := place[writer]) != processor:
                    transfer_s = p.latency_s[source, processor] + nbytes * p.byte_s[source, processor]
                    if p.cold_s is not None:
                        transfer_s += _cold(nbytes) * p.cold_s[source, processor]
                    ways[known.index(kinds[source]), kind] += UNSURE * transfer_s
        common = math.sqrt(CORRELATION) * single.sum(axis=1)
        parts = (math.sqrt(1.0 - CORRELATION) * single.ravel(), common, calls, ways.ravel())
        return np.concatenate(parts) / total if total > 0 else np.zeros(sum(part.size for part in parts))

    def stage(self, processor: int, operators: tuple[int, ...]) -> tuple[float, float, tuple[float, ...]]:
        """Return a stage's time on a processor (s), its share of traffic, and slowdowns by other busy processors."""
        key = (processor, operators)
        if key not in self._work:
            p, inside = self.prices, self._inside(operators)
            each = self._each_s(processor, operators)
            total = float(each.sum()) + self._call_s(processor, operators)
            if p.capacity_bytes[processor]:
                beyond = max(0.0, inside.weight_bytes - float(p.capacity_bytes[processor]))
                total += beyond * float(p.pressure_per_byte[processor]) * float(each.sum())
            finite = np.isfinite(total) and total > 0
            share = float((each * p.traffic[list(operators)]).sum() / total) if finite else 0.0
            slowed: tuple[float, ...] = ()
            if self._crowded[processor]:
                factors = share * p.slow_memory[processor] + (1.0 - share) * p.slow_compute[processor]
                slowed = tuple(float(f) for f in factors)
            self._work[key] = (total, share, slowed)
        return self._work[key]

    def _call_s(self, processor: int, operators: tuple[int, ...]) -> float:
        io_s = self._inside(operators).io_bytes * self.prices.io_s_per_byte[processor]
        return float(self.prices.invocation_s[processor] + io_s)

    def _each_s(self, processor: int, operators: tuple[int, ...]) -> Seconds:
        """Return the time of each operator in a stage (s), also of those fused elsewhere with what the stage lacks."""
        p, inside = self.prices, self._inside(operators).all
        found: Seconds = p.operator_s[processor, list(operators)]
        if p.alone_s is None:
            return found
        alone = [not inside.issuperset(self._fused_with.get(o, ())) for o in operators]
        return found + np.where(alone, p.alone_s[processor, list(operators)], 0.0)

    def _inside(self, operators: tuple[int, ...]) -> _Inside:
        if operators not in self._insides:
            self._insides[operators] = _inside(self.graph, operators, self.held)
        return self._insides[operators]


def fused_with(graph: Graph, prices: Prices) -> dict[int, tuple[int, ...]]:
    """Return for each operator that some processor fuses with others those that its stage must hold for that."""
    if prices.alone_s is None:
        return {}
    needs = fusions(graph)
    where = np.flatnonzero(prices.alone_s.any(axis=0)).tolist()
    return {o: needs[o] or graph.consumers[graph.operators[o].outputs[0]][:1] for o in where}


def by_origins(errors: Errors, origins: Sequence[tuple[int, int]], count: int, kinds: int) -> Errors:
    """Return the errors of a rewritten model's plan by operators of the original model, comparable with other plans.

    Both sides of a split operator share its error; the three operators of a triple have independent ones.

    Args:
        origins: see :class:`~search_spaces.rewrites.lower.Lowered`.
        count: operators of the original model.
        kinds: of processors.
    """
    single = errors[: kinds * len(origins)].reshape(kinds, -1)
    places = 1 + max(place for _, place in origins)
    found = np.zeros((kinds, count * places))
    for index, (operator, place) in enumerate(origins):
        found[:, operator * places + place] += single[:, index]
    each = np.sqrt((found.reshape(kinds, count, places) ** 2).sum(axis=2))
    return np.concatenate((each.ravel(), errors[single.size :]))


def makespan_s(spans: Sequence[Span]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _inside(graph: Graph, operators: tuple[int, ...], held: Held) -> _Inside:
    border = graph.boundary(operators)
    tensors = graph.tensors
    parts = (part for t in border.inputs for part in held.get(t, ((t, tensors[t].nbytes),)))
    reads = tuple((graph.producer[t], t, nbytes) for t, nbytes in parts if t in graph.producer)
    return _Inside(
        reads,
        sum(tensors[t].nbytes for t in (*border.inputs, *border.outputs)),
        sum(tensors[t].nbytes for t in border.constants),
        frozenset(operators),
    )


Whole = NDArray[np.int64]
Seconds = NDArray[np.float64]


def all_chains(operators: int, platform: Platform, max_stages: int) -> Iterator[tuple[Whole, Whole]]:
    """Yield every canonical chain plan of K = 1, 2, … ``max_stages`` stages, a batch of N plans for each K.

    A batch holds the operators before which to cut, ascending, shape ``(N, K-1)``, and the processor of each stage as
    its index in the platform, shape ``(N, K)``.

    Among alike processors those that come first are used first, as in :func:`search_spaces.core.plan.canonical`.
    """
    for parts in range(1, min(max_stages, operators) + 1):
        words = np.array(list(processor_words(platform, parts)), np.int64).reshape(-1, parts)
        chosen = list(combinations(range(1, operators), parts - 1))
        cuts = np.array(chosen, np.int64).reshape(len(chosen), parts - 1)
        yield np.repeat(cuts, len(words), axis=0), np.tile(words, (len(cuts), 1))


def processor_words(platform: Platform, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the processors of each canonical chain of ``parts`` stages; alike ones appear in the order of first use."""
    index = {p.name: i for i, p in enumerate(platform.processors)}
    groups = [tuple(index[p.name] for p in members) for members in platform.classes().values()]
    place = {processor: (which, rank) for which, group in enumerate(groups) for rank, processor in enumerate(group)}
    for word in product(range(len(index)), repeat=parts):
        used = [0] * len(groups)
        for processor in word:
            which, rank = place[processor]
            if rank > used[which]:
                break
            used[which] = max(used[which], rank + 1)
        else:
            yield word


def _cold(nbytes: int) -> float:
    return min(1.0, nbytes / COLD_BYTES)


def consecutive_s(operator_s: Seconds) -> Seconds:
    """Return the time (s) of operators ``first … last-1``, ``[P, first, last]``; infinite where there are none.

    Sums run from ``first`` on, not as differences of running totals, which infinite entries would spoil.
    """
    processors, count = operator_s.shape
    inside = np.triu(np.ones((count, count), bool))
    table = np.full((processors, count + 1, count + 1), np.inf)
    sums = np.cumsum(np.where(inside, operator_s[:, None, :], 0.0), axis=2)
    table[:, :-1, 1:] = np.where(inside, sums, np.inf)
    return table


def _beyond_s(simulator: PlanSimulator) -> Seconds:
    """Return the time (s) of ``first … last-1`` as one stage beyond operators and invocation, ``[P, first, last]``.

    It is 0 where a processor does not support some of them.
    """
    graph, p = simulator.graph, simulator.prices
    operators_s = consecutive_s(p.operator_s)
    finite = np.isfinite(operators_s)
    found = np.zeros_like(operators_s)
    if p.capacity_bytes.any():
        constants = [tensor for tensor in graph.consumers if graph.tensors[tensor].constant]
        over = np.maximum(0.0, _border_bytes(graph, constants)[None] - p.capacity_bytes[:, None, None])
        share = np.where(p.capacity_bytes > 0, p.pressure_per_byte, 0.0)[:, None, None] * over
        found += np.where(finite, operators_s, 0.0) * share
    if p.io_s_per_byte.any():
        found += np.where(finite, p.io_s_per_byte[:, None, None] * _border_bytes(graph, graph.activation_tensors), 0.0)
    for one, others in fused_with(graph, p).items():
        if p.alone_s is not None:  # stages that hold it without one that it is fused with
            least, most = min(others), max(others)
            without = np.s_[: one + 1, one + 1 : most + 1] if most > one else np.s_[least + 1 : one + 1, one + 1 :]
            found[:, *without] += p.alone_s[:, one, None, None]
    return found


def part_costs(simulator: PlanSimulator) -> PartCosts:
    """Return the costs of consecutive stages.

    The least transfers count only tensors from the operator before a cut to the one after it: these cross the cut
    whichever stages lie beside it.
    """
    graph, p = simulator.graph, simulator.prices
    processors, count = p.operator_s.shape
    crossing, sure, colds = np.zeros((count, 1, 1)), np.zeros((count, 1, 1)), np.zeros((count, 1, 1))
    for point in cut_points(graph):
        after = set(graph.operators[point.position].inputs)
        for tensor in point.tensors:
            nbytes, writer = graph.tensors[tensor].nbytes, graph.producer.get(tensor)
            crossing[point.position] += nbytes if writer is not None else 0
            colds[point.position] += _cold(nbytes) if writer is not None else 0
            sure[point.position] += nbytes if writer == point.position - 1 and tensor in after else 0
    apart = 1.0 - np.eye(processors)
    cold_s = 0.0 if p.cold_s is None else colds * p.cold_s
    return PartCosts(
        operator_s=p.operator_s,
        overhead_s=p.invocation_s,
        beyond_s=_beyond_s(simulator),
        transfer_s=apart * ((crossing > 0) * p.latency_s + crossing * p.byte_s + cold_s),
        least_transfer_s=apart * (p.latency_s + sure * p.byte_s),
    )


def _border_bytes(graph: Graph, tensors: Iterable[int]) -> Seconds:
    """Return the bytes of some tensors that cross the border of operators ``first … last-1``, ``[first, last]``."""
    count, areas = len(graph.operators), []
    for tensor in tensors:
        nbytes, readers = graph.tensors[tensor].nbytes, graph.consumers.get(tensor, ())
        writer = graph.producer.get(tensor, -1)
        # Read by a stage that begins after the writer and holds a reader; only its first reader counts.
        for before, reader in pairwise((writer, *readers)):
            areas.append((range(before + 1, reader + 1), range(reader + 1, count + 1), nbytes))
        if writer >= 0 and (readers or tensor in graph.outputs):
            end = count + 1 if tensor in graph.outputs else readers[-1] + 1
            areas.append((range(writer + 1), range(writer + 1, end), nbytes))
    return _piled(count, areas)


def _piled(count: int, areas: Iterable[tuple[range, range, int]]) -> Seconds:
    """Return the sum of bytes at each (row, column), each area adding its own, shape ``(count + 1, count + 1)``."""
    steps = np.zeros((count + 2, count + 2))
    for rows, columns, nbytes in areas:
        if len(rows) and len(columns):
            steps[rows.start, columns.start] += nbytes
            steps[rows.stop, columns.start] -= nbytes
            steps[rows.start, columns.stop] -= nbytes
            steps[rows.stop, columns.stop] += nbytes
    found: Seconds = steps.cumsum(axis=0).cumsum(axis=1)[: count + 1, : count + 1]
    return found
