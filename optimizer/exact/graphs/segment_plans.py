"""Plans of one segment without a solver: what one costs, all of them where there are few, and a good first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optimizer.exact.graphs.graph_costs import GraphCosts
from optimizer.exact.graphs.segment_model import SegmentPlan
from optimizer.exact.graphs.segments import Segment
from search_spaces.core.graph import Graph

Stages = tuple[tuple[tuple[int, ...], int], ...]


def segment_cost(
    graph: Graph, costs: GraphCosts, segment: Segment, entry_processor: int | None, stages: Stages, *, continued: bool
) -> float:
    """Return the seconds from the end of the entry gate's work to the end of all stages, run in this order."""
    processors = costs.platform.processors
    free = [0.0] * len(processors)
    place = {o: i for i, (operators, _) in enumerate(stages) for o in operators}
    ends: list[float] = []
    entry_end = 0.0
    for index, (operators, on) in enumerate(stages):
        goes_on = continued and index == 0
        begin = free[on] if goes_on else max(free[on], entry_end)
        took = float(costs.operator_s[on, list(operators)].sum()) + (0.0 if goes_on else costs.overhead_s[on])
        read = {t for o in operators for t in graph.operators[o].inputs if t in graph.producer}
        for tensor in read:
            writer = graph.producer[tensor]
            if writer == segment.entry and not goes_on and entry_processor is not None:
                took += float(costs.transfer_s[tensor, entry_processor, on])
            elif writer in place and place[writer] != index:
                if place[writer] > index:
                    return float("inf")
                begin = max(begin, ends[place[writer]])
                took += float(costs.transfer_s[tensor, stages[place[writer]][1], on])
        ends.append(begin + took)
        if goes_on:
            entry_end = begin + took
        for other, processor in enumerate(processors):
            if other == on or processors[on].excludes(processor):
                free[other] = max(free[other], begin + took)
    return max(ends, default=0.0)


def is_chain(graph: Graph, segment: Segment) -> bool:
    """Return whether each operator needs the one before it, so that no two can overlap."""
    return all(a in graph.predecessors(b) for a, b in zip(segment.operators, segment.operators[1:], strict=False))


def all_chains(
    graph: Graph, costs: GraphCosts, segment: Segment, entry_processor: int | None
) -> Iterator[tuple[int, SegmentPlan]]:
    """Yield every plan of a segment that is a chain, with the processor of its last operator."""
    processors = range(len(costs.platform.processors))

    def extend(done: Stages, index: int, *, continued: bool) -> Iterator[tuple[Stages, bool]]:
        if index == len(segment.operators):
            yield done, continued
            return
        operator = segment.operators[index]
        if index == 0 and entry_processor is not None:
            yield from extend((((operator,), entry_processor),), 1, continued=True)
        if done:
            (operators, processor) = done[-1]
            yield from extend((*done[:-1], ((*operators, operator), processor)), index + 1, continued=continued)
        for processor in processors:
            yield from extend((*done, ((operator,), processor)), index + 1, continued=continued)

    for stages, continued in extend((), 0, continued=False):
        cost = segment_cost(graph, costs, segment, entry_processor, stages, continued=continued)
        if cost < float("inf"):
            yield stages[-1][1], SegmentPlan(stages, continued, cost, cost)


def list_schedule(
    graph: Graph, costs: GraphCosts, segment: Segment, entry_processor: int | None, exit_processor: int | None
) -> SegmentPlan | None:
    """Return a plan made operator by operator, each on the processor where it ends first, then with stages merged.

    Operators go by the length of what follows them (HEFT: Topcuoglu et al. 2002, doi:10.1109/71.993206).
    """
    finite = np.where(np.isfinite(costs.operator_s), costs.operator_s, np.nan)
    mean = np.nanmean(finite[:, list(segment.operators)], axis=0)
    rank: dict[int, float] = {}
    for operator, seconds in zip(reversed(segment.operators), reversed(mean.tolist()), strict=True):
        after = {c for t in graph.operators[operator].outputs for c in graph.consumers.get(t, ())}
        rank[operator] = seconds + max((rank[c] for c in after if c in rank), default=0.0)
    stages: list[tuple[tuple[int, ...], int]] = []
    for operator in sorted(segment.operators, key=lambda o: (-rank[o], o)):
        choices = [
            (
                segment_cost(
                    graph, costs, segment, entry_processor, (*stages, ((operator,), processor)), continued=False
                ),
                processor,
            )
            for processor in range(len(costs.platform.processors))
            if operator != segment.exit or exit_processor in (None, processor)
        ]
        stages.append(((operator,), min(choices)[1]))
    cost = segment_cost(graph, costs, segment, entry_processor, tuple(stages), continued=False)
    if cost == float("inf"):
        return None
    return _merged(graph, costs, segment, entry_processor, SegmentPlan(tuple(stages), False, cost, 0.0))


def _merged(
    graph: Graph, costs: GraphCosts, segment: Segment, entry_processor: int | None, plan: SegmentPlan
) -> SegmentPlan:
    """Return the plan with neighbours on one processor made one stage wherever that helps."""
    index = 0
    while index < len(plan.stages):
        operators, processor = plan.stages[index]
        if index == 0 and not plan.continued and processor == entry_processor:
            cost = segment_cost(graph, costs, segment, entry_processor, plan.stages, continued=True)
            if cost <= plan.cost_s:
                plan = SegmentPlan(plan.stages, True, cost, 0.0)
        follower = next((i for i in range(index + 1, len(plan.stages)) if plan.stages[i][1] == processor), None)
        if follower is not None:
            joined: Sequence[tuple[tuple[int, ...], int]] = [
                *plan.stages[:index],
                (tuple(sorted((*operators, *plan.stages[follower][0]))), processor),
                *plan.stages[index + 1 : follower],
                *plan.stages[follower + 1 :],
            ]
            cost = segment_cost(graph, costs, segment, entry_processor, tuple(joined), continued=plan.continued)
            if cost <= plan.cost_s:
                plan = SegmentPlan(tuple(joined), plan.continued, cost, 0.0)
                continue
        index += 1
    return plan
