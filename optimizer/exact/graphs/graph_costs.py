"""Costs of a plan of any shape in a model: stages on processors, by the rules of the runner and the simulator.

A stage begins when its processor and all processors that exclude it are free and its inputs are available. It takes its
overhead, its transfers and its operators; its outputs are available when it ends. Each processor runs its stages in the
order of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from evaluators.schedule import Event, Timeline
from optimizer.exact.chain_costs import OperatorCosts, Seconds, busy_with
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical


@dataclass(frozen=True, slots=True, eq=False)
class GraphCosts(OperatorCosts):
    """Costs of operators and of T tensors between stages of any shape.

    Attributes:
        transfer_s: shape ``(T, P, P)``: the seconds that a stage pays for a tensor of another stage (``[tensor, from,
            to]``), once for all its operators; also within one processor.

    Raises:
        ValueError: a shape does not fit, or a value is negative or NaN.
    """

    transfer_s: Seconds

    def __post_init__(self) -> None:
        processors = len(self.platform.processors)
        if (
            self.operator_s.ndim != 2
            or self.operator_s.shape[0] != processors
            or self.overhead_s.shape != (processors,)
        ):
            raise ValueError(f"operator_s {self.operator_s.shape} and overhead_s {self.overhead_s.shape} do not fit")
        if self.transfer_s.ndim != 3 or self.transfer_s.shape[1:] != (processors, processors):
            raise ValueError(
                f"transfer_s has the shape {self.transfer_s.shape}, not (tensors, {processors}, {processors})"
            )
        for array in (self.operator_s, self.overhead_s, self.transfer_s):
            if np.isnan(array).any() or (array < 0).any():
                raise ValueError("a cost is negative or no number")
        if not (np.isfinite(self.overhead_s).all() and np.isfinite(self.transfer_s).all()):
            raise ValueError("an overhead or a transfer is infinite; only operators can be unsupported")


def simulate(graph: Graph, costs: GraphCosts, plan: Plan) -> Timeline:
    """Return the timeline of a plan under the model.

    Raises:
        PlanError: the plan is not for this graph, or its stages are not in an order in which they can run.
    """
    plan.validate(graph, costs.platform)
    busy, numbers = busy_with(costs.platform), {p.name: i for i, p in enumerate(costs.platform.processors)}
    place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    free_s, ends, events = [0.0] * len(busy), [0.0] * len(plan.stages), []
    for index, stage in enumerate(plan.stages):
        on, operators = numbers[stage.processor], list(stage.operators)
        start_s = free_s[on]
        took_s = float(costs.overhead_s[on] + costs.operator_s[on, operators].sum())
        for tensor in graph.boundary(operators).inputs:
            if tensor in graph.producer:
                writer = place[graph.producer[tensor]]
                start_s = max(start_s, ends[writer])
                took_s += float(costs.transfer_s[tensor, numbers[plan.stages[writer].processor], on])
        ends[index] = start_s + took_s
        events.append(Event(index, stage.processor, start_s, ends[index]))
        for other in busy[on]:
            free_s[other] = max(free_s[other], ends[index])
    return Timeline(tuple(sorted(events, key=lambda e: (e.start_s, e.stage))))


def makespan_s(graph: Graph, costs: GraphCosts, plan: Plan) -> float:
    """Return the seconds from the first start to the last end."""
    return simulate(graph, costs, plan).makespan_s


def as_plan(graph: Graph, costs: GraphCosts, stages: Iterable[Stage]) -> Plan:
    """Return stages, in the order in which they are to be dispatched, as a plan; canonical unless that is slower.

    The canonical form has its own order of stages. Where two stages of one processor do not depend on each other,
    another order can be faster; such a plan keeps it, and only names alike processors in the order of their first use.
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
