"""Input of the job scheduler: a workload, its plan and the processors of a platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluators.workload.lowered import LoweredModel, Lowerings
from evaluators.workload.scheduler import QueueClient
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import members, single_processors
from search_spaces.core.workload import Workload

SLICED = "sliced"
"""Option of a processor that the system gives time slices, instead of the scheduler: its share of each resource."""

HOST = "host"
"""Option of a processor that is a thread: the processor whose process it is a thread of."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One plan of a workload.

    Attributes:
        clients: for the scheduler; instances in the order of the plan.
        components: of each client the component of the joined graph.
        stages: of each client, of each of its jobs, the plan's stage.
        processors: names.
        excluded: for each processor a bit set of those that cannot run while it does, itself among them.
        models: of each client its model as the plan runs it, where a plan made the setting.
    """

    clients: tuple[QueueClient, ...]
    components: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    processors: tuple[str, ...]
    excluded: tuple[int, ...]
    models: tuple[LoweredModel, ...] = ()


@dataclass(frozen=True, slots=True)
class NumberedProcessors:
    """The processors of a platform, by number.

    Attributes:
        names: of the processors that are no pools.
        excluded: see :class:`Setting`.
        members: processor or pool of the platform → the processors that take what it is given.
    """

    names: tuple[str, ...]
    excluded: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, platform: Platform) -> NumberedProcessors:
        """Return the law of a platform."""
        processors = single_processors(platform)
        number = {processor.name: i for i, processor in enumerate(processors)}
        known = {p.name: tuple(number[n] for n in members(p)) for p in platform.processors}
        return cls(tuple(number), exclusions(processors), known)


def setting(
    workload: Workload,
    joined: JoinedGraph,
    plan: Plan,
    platform: Platform,
    lowerings: Lowerings,
    law: NumberedProcessors | None = None,
) -> Setting:
    """Return what a plan makes of a workload.

    Args:
        platform: its processors and pools; more than the plan uses do no harm.
        law: of the platform, for a plan that is known to be valid; else the plan is checked.

    Raises:
        PlanError: the plan is not for these models or this platform.
        RewriteError, ModelError: see :meth:`~evaluators.workload.lowered.Lowerings.lower`.
    """
    if law is None:
        plan.validate(joined.graph, platform)
        law = NumberedProcessors.of(platform)
    jobs = jobs_of(plan, joined)
    models = lowerings.all(plan, jobs)
    instances = workload.instances
    clients = []
    for component, model in zip(jobs, models, strict=True):
        asks = workload.clients[instances[component].client]
        clients.append(
            QueueClient(
                tuple(law.members[name] for name in model.processors),
                tuple(round(t * 1e9) for t in asks.arrival.releases_s(workload.seed + component)),
                asks.arrival.requests,
                closed=asks.arrival.kind == "closed",
                priority=asks.priority,
                deadline_ns=round((asks.deadline_s or 0.0) * 1e9),
                queue=asks.queue,
                after=model.after,
            )
        )
    stages_of = tuple(tuple(s[i] for i in m.stages) for s, m in zip(jobs.values(), models, strict=True))
    return Setting(tuple(clients), tuple(jobs), stages_of, law.names, law.excluded, tuple(models))


def exclusions(processors: Sequence[Processor]) -> tuple[int, ...]:
    """Return for each processor a bit set of those that cannot run while it does, itself among them."""
    return tuple(
        sum(1 << j for j, b in enumerate(processors) if i == j or a.excludes(b)) for i, a in enumerate(processors)
    )


def closed_loops(on: Sequence[int], requests: Sequence[int], processors: Sequence[Processor], jobs: int = 1) -> Setting:
    """Return a setting in which models ask in closed loops, each on a processor of its own.

    Args:
        on: of each model its processor.
        requests: how often it asks.
        jobs: into how many it is cut.
    """
    clients = tuple(
        QueueClient(((processor,),) * jobs, (0,), n, closed=True) for processor, n in zip(on, requests, strict=True)
    )
    stages = tuple(tuple(range(k * jobs, (k + 1) * jobs)) for k in range(len(on)))
    return Setting(clients, tuple(range(len(on))), stages, tuple(p.name for p in processors), exclusions(processors))


def demand(processor: Processor) -> dict[str, float]:
    """Return the share of each resource that a running job of a processor needs."""
    return {**processor.resources, **processor.options.get(SLICED, {})}
