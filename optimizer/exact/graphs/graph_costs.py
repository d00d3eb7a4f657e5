"""What a plan of any shape costs in a model: stages on lanes, under the law that the runner and the simulator keep.

A stage begins when its lane, and all lanes that exclude it, are free and all that it reads from other stages is there;
it takes its overhead, what it is handed, and its operators; what it writes is there when it ends. Each lane runs its
stages in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluators.schedule import Event, Timeline
from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform


@dataclass(frozen=True, slots=True, eq=False)
class GraphCosts:
    """What the operators of a graph of n operators and T tensors cost on a platform of P processors, in platform order.

    Attributes:
        platform: the processors, which of them exclude each other, and which are alike; those must cost alike.
        operator_s: shape ``(P, n)``: each operator on each processor; infinite where a processor refuses it.
        overhead_s: shape ``(P,)``: what starting a stage adds.
        hand_over_s: shape ``(T, P, P)``: what a stage pays for reading a tensor that a stage on the one processor wrote
            (``[tensor, from, to]``), once however many of its operators read it; also on one and the same processor.

    Raises:
        ValueError: a shape does not fit, or a number is negative or no number.
    """

    platform: Platform
    operator_s: Seconds
    overhead_s: Seconds
    hand_over_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        lanes = len(self.platform.processors)
        if self.operator_s.ndim != 2 or self.operator_s.shape[0] != lanes or self.overhead_s.shape != (lanes,):
            raise ValueError(f"operator_s {self.operator_s.shape} and overhead_s {self.overhead_s.shape} do not fit")
        if self.hand_over_s.ndim != 3 or self.hand_over_s.shape[1:] != (lanes, lanes):
            raise ValueError(f"hand_over_s has the shape {self.hand_over_s.shape}, not (tensors, {lanes}, {lanes})")
        for array in (self.operator_s, self.overhead_s, self.hand_over_s):
            if np.isnan(array).any() or (array < 0).any():
                raise ValueError("a cost is negative or no number")
        if not (np.isfinite(self.overhead_s).all() and np.isfinite(self.hand_over_s).all()):
            raise ValueError("an overhead or a transfer is infinite; only operators can be unsupported")

    @classmethod
    def of_chain(cls, graph: Graph, costs: ChainCosts) -> GraphCosts:
        """Return the costs of an additive model whose hand-over does not depend on where the cut is.

        Each tensor that crosses is taken to cost what a cut costs on average.
        """
        between = costs.hand_over_s[1:].mean(axis=0) if costs.hand_over_s.shape[0] > 1 else costs.hand_over_s[0]
        tensors = np.broadcast_to(between, (len(graph.tensors), *between.shape))
        return cls(costs.platform, costs.operator_s, costs.overhead_s, tensors)


def simulate(graph: Graph, costs: GraphCosts, plan: Plan) -> Timeline:
    """Return when each stage of a plan runs in the model.

    Raises:
        PlanError: the plan is not for this graph, or its stages are not in an order in which they can run.
    """
    plan.validate(graph, costs.platform)
    processors = costs.platform.processors
    lane_of = {p.name: i for i, p in enumerate(processors)}
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    free_s, ends, events = [0.0] * len(processors), [0.0] * len(plan.stages), []
    for index, stage in enumerate(plan.stages):
        lane, operators = lane_of[stage.processor], list(stage.operators)
        start_s = free_s[lane]
        took_s = float(costs.overhead_s[lane] + costs.operator_s[lane, operators].sum())
        for tensor in graph.boundary(operators).inputs:
            if tensor in graph.producer:
                writer = place[graph.producer[tensor]]
                start_s = max(start_s, ends[writer])
                took_s += float(costs.hand_over_s[tensor, lane_of[plan.stages[writer].processor], lane])
        ends[index] = start_s + took_s
        events.append(Event(index, stage.processor, start_s, ends[index]))
        for other, processor in enumerate(processors):
            if other == lane or processors[lane].excludes(processor):
                free_s[other] = max(free_s[other], ends[index])
    return Timeline(tuple(sorted(events, key=lambda e: (e.start_s, e.stage))))


def makespan_s(graph: Graph, costs: GraphCosts, plan: Plan) -> float:
    """Return the seconds from the first start to the last end."""
    return simulate(graph, costs, plan).makespan_s


def as_plan(graph: Graph, costs: GraphCosts, stages: Iterable[Stage]) -> Plan:
    """Return stages, in the order in which they are to be dispatched, as a plan; canonical unless that is slower.

    The canonical form has its own order of stages. Where two stages of one lane do not depend on each other, another
    order can be faster; such a plan keeps it, and only names alike lanes in the order of their first use.
    """
    plan = Plan(graph.digest, tuple(stages))
    usual = canonical(plan, graph, costs.platform)
    if makespan_s(graph, costs, usual) <= makespan_s(graph, costs, plan) * (1 + 1e-12):
        return usual
    members = {like: iter(group) for like, group in costs.platform.classes().items()}
    renamed: dict[str, str] = {}
    for stage in plan.stages:
        if stage.processor not in renamed:
            renamed[stage.processor] = next(members[costs.platform[stage.processor].like]).name
    return Plan(graph.digest, tuple(Stage(s.operators, renamed[s.processor]) for s in plan.stages))
