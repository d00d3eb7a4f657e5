"""From a plan to what each lane does: its stages in order, and the edges on which lanes meet."""

from __future__ import annotations

from dataclasses import dataclass, field

from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

# A lane that waits for another core's stage polls this long before it sleeps; waking costs tens of microseconds.
SPIN_NS = 2_000_000


@dataclass(frozen=True, slots=True)
class Edge:
    """``after`` on its lane may start when ``before`` on another lane is done."""

    before: int
    after: int
    spin_ns: int


@dataclass(slots=True)
class LaneProgram:
    """One lane's share: its stages in dispatch order."""

    processor: str
    stages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan ready for its lanes.

    Attributes:
        lanes: the lane of stage 0 (the leader) first.
        edges: the meetings that are needed, none implied by another.
        before: for each stage the stages certainly over when it starts, as a bit set.
    """

    lanes: tuple[LaneProgram, ...]
    edges: tuple[Edge, ...]
    before: list[int]


def schedule(graph: Graph, plan: Plan, platform: Platform) -> Schedule:
    """Return the lanes' programs for a plan with static dispatch.

    A stage waits for the stages whose tensors it reads, and for every earlier stage on a lane that shares a resource
    with its own, since the two must not run at once.
    """
    lanes: dict[str, LaneProgram] = {}
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    before: list[int] = []
    edges: list[Edge] = []
    for index, stage in enumerate(plan.stages):
        here = lanes.setdefault(stage.processor, LaneProgram(stage.processor))
        over = 0
        if here.stages:
            over = before[here.stages[-1]] | 1 << here.stages[-1]
        needs = {place[b] for o in stage.operators for b in graph.predecessors(o)} - {index}
        for earlier in range(index):
            other = plan.stages[earlier].processor
            if other != stage.processor and platform[other].excludes(platform[stage.processor]):
                needs.add(earlier)
        # From the latest need backwards: what a later one implies needs no edge of its own.
        for need in sorted(needs, reverse=True):
            if not over >> need & 1:
                shared = platform[plan.stages[need].processor].excludes(platform[stage.processor])
                edges.append(Edge(need, index, 0 if shared else SPIN_NS))
                over |= before[need] | 1 << need
        before.append(over)
        here.stages.append(index)
    return Schedule(tuple(lanes.values()), tuple(edges), before)
