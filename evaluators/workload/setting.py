"""A workload, its plan and the lanes of a platform put together: what the desk needs, and who excludes whom."""

from __future__ import annotations

from dataclasses import dataclass

from evaluators.workload.desk import Seat
from search_spaces.arrangement import jobs_of
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor
from search_spaces.pools import lanes_of, members
from search_spaces.workload import Workload

SLICED = "sliced"
"""Option of a lane that the system gives time slices, instead of the desk: share of each resource that it asks for."""

HOST = "host"
"""Option of a lane that is a thread: the lane whose process it is a thread of."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One plan of a workload.

    Attributes:
        seats: for the desk; instances in the order of the plan.
        components: of each seat the component of the joined graph.
        stages: of each seat the plan's stages.
        lanes: names.
        excluded: for each lane a bit set of those that cannot run while it does, itself among them.
    """

    seats: tuple[Seat, ...]
    components: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    lanes: tuple[str, ...]
    excluded: tuple[int, ...]


def setting(workload: Workload, joined: JoinedGraph, plan: Plan, platform: Platform) -> Setting:
    """Return what a plan makes of a workload.

    Args:
        platform: its lanes and pools; more than the plan uses do no harm.

    Raises:
        PlanError: the plan is not for these models or this platform.
    """
    plan.validate(joined.graph, platform)
    lanes = lanes_of(platform)
    number = {lane.name: i for i, lane in enumerate(lanes)}
    jobs = jobs_of(plan, joined)
    instances = workload.instances
    seats = []
    for component, stages in jobs.items():
        client = workload.clients[instances[component].client]
        may = tuple(tuple(number[n] for n in members(platform[plan.stages[s].processor])) for s in stages)
        seats.append(
            Seat(
                may,
                tuple(round(t * 1e9) for t in client.arrival.releases_s(workload.seed + component)),
                client.arrival.requests,
                closed=client.arrival.kind == "closed",
                priority=client.priority,
                deadline_ns=round((client.deadline_s or 0.0) * 1e9),
                queue=client.queue,
            )
        )
    excluded = tuple(sum(1 << j for j, b in enumerate(lanes) if i == j or a.excludes(b)) for i, a in enumerate(lanes))
    return Setting(
        tuple(seats),
        tuple(jobs),
        tuple(tuple(s) for s in jobs.values()),
        tuple(lane.name for lane in lanes),
        excluded,
    )


def demand(lane: Processor) -> dict[str, float]:
    """Return the share of each resource that a running job of a lane asks for."""
    return {**lane.resources, **lane.options.get(SLICED, {})}
