"""From a plan to what each lane does: its stages in order, and the edges on which lanes meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from search_spaces.graph import Graph
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform

# A lane that waits for another core's stage polls this long before it sleeps; waking costs tens of microseconds. It
# sleeps at once where a stage that needs its cores may run meanwhile: polling would take half a core from it.
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
        sleepers: lanes on whose cores others may still run when their own last stage is over.
    """

    lanes: tuple[LaneProgram, ...]
    edges: tuple[Edge, ...]
    before: list[int]
    sleepers: frozenset[str] = frozenset()

    def meetings(self) -> list[Edge]:
        """Return the plan's own edges, the leader's token to each other lane, and each lane's end back to the leader.

        Stage -1 stands for the leader between two inferences.
        """
        leader = self.lanes[0]
        certain = self.before[leader.stages[-1]]
        starts = [Edge(-1, lane.stages[0], self._spin_ns(lane)) for lane in self.lanes[1:]]
        spin_ns = self._spin_ns(leader)
        ends = [Edge(lane.stages[-1], -1, spin_ns) for lane in self.lanes[1:] if not certain >> lane.stages[-1] & 1]
        return [*self.edges, *starts, *ends]

    def _spin_ns(self, lane: LaneProgram) -> int:
        return 0 if lane.processor in self.sleepers else SPIN_NS


def lane_program(
    order: Schedule, lane: LaneProgram, edges: Sequence[Edge], steps: Mapping[int, dict[str, Any]]
) -> tuple[dict[str, Any], list[int]]:
    """Return what a lane is told of its meetings, and which of ``edges`` (see ``Schedule.meetings``) it needs for that.

    Args:
        steps: stage → what else the lane is told of it.
    """
    leads = lane is order.lanes[0]
    stages = set(lane.stages)
    mine = [
        i
        for i, edge in enumerate(edges)
        if edge.before in stages or edge.after in stages or (leads and -1 in (edge.before, edge.after))
    ]
    local = {i: k for k, i in enumerate(mine)}
    told = [
        step
        | {
            "waits": [[local[i], edges[i].spin_ns] for i in mine if edges[i].after == index and edges[i].before >= 0],
            "signals": [local[i] for i in mine if edges[i].before == index],
        }
        for index, step in steps.items()
    ]
    program = {
        "steps": told,
        "go": [[local[i], edges[i].spin_ns] for i in mine if not leads and edges[i].before == -1],
        "starts": [local[i] for i in mine if leads and edges[i].before == -1],
        "ends": [[local[i], edges[i].spin_ns] for i in mine if leads and edges[i].after == -1],
    }
    return program, mine


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that a stage on an accelerator copies from, and to, the memory that all lanes share."""

    uploads: frozenset[int] = frozenset()
    downloads: frozenset[int] = frozenset()


def copies(graph: Graph, plan: Plan, accelerators: Collection[str]) -> dict[int, Copies]:
    """Return what each stage copies: nothing on a CPU; on an accelerator what is not there yet, and what others read.

    Args:
        accelerators: names of the processors that have a memory of their own.
    """
    place = {operator: stage.processor for stage in plan.stages for operator in stage.operators}
    there: dict[str, set[int]] = {}
    found = {}
    for index, stage in enumerate(plan.stages):
        if stage.processor not in accelerators:
            found[index] = Copies()
            continue
        border = graph.boundary(stage.operators)
        known = there.setdefault(stage.processor, set())
        uploads = frozenset(border.inputs) - known
        downloads = frozenset(
            t
            for t in border.outputs
            if t in graph.outputs or any(place[o] != stage.processor for o in graph.consumers.get(t, ()))
        )
        known.update(border.inputs, border.outputs)
        found[index] = Copies(uploads, downloads)
    return found


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
        shared = {i for i in range(index) if _shared(platform, plan.stages[i], stage)}
        spin_ns = SPIN_NS if all(over >> i & 1 for i in shared) else 0
        needs = ({place[b] for o in stage.operators for b in graph.predecessors(o)} | shared) - {index}
        # From the latest need backwards: what a later one implies needs no edge of its own.
        for need in sorted(needs, reverse=True):
            if not over >> need & 1:
                edges.append(Edge(need, index, spin_ns))
                over |= before[need] | 1 << need
        before.append(over)
        here.stages.append(index)
    sleepers = {
        name
        for name, lane in lanes.items()
        if any(_shared(platform, plan.stages[lane.stages[-1]], later) for later in plan.stages[lane.stages[-1] + 1 :])
    }
    return Schedule(tuple(lanes.values()), tuple(edges), before, frozenset(sleepers))


def _shared(platform: Platform, one: Stage, other: Stage) -> bool:
    """Return whether two stages on different lanes need the same core or device."""
    return one.processor != other.processor and platform[one.processor].excludes(platform[other.processor])
