"""Input of the job scheduler: a workload, its plan and the processors of a platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from evaluators.workload.lowered import LoweredModel, Lowerings
from evaluators.workload.scheduler import QueueClient
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import members, single_processors
from search_spaces.core.workload import Arrival

SLICED = "sliced"
"""Option of a processor that the operating system time-slices, not the scheduler: its share of each resource."""

HOST = "host"
"""Option of a processor that is a thread: the processor whose process has this thread."""

RUNS_AS = "runs_as"
"""Option of a processor on which a model runs apart and the device shares what there is: how it runs there."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One plan of a workload, as input of the scheduler.

    Attributes:
        clients: instances in the order of the plan.
        components: for each client, its component of the joined graph.
        stages: for each client and job, the stage of the plan.
        processors: names.
        excluded: for each processor, a bit set of those that cannot run while it does, itself included.
        models: for each client, its lowered model; () where the setting was not made from a plan.
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
        names: of the processors that are not pools.
        excluded: as of :class:`Setting`.
        members: processor or pool of the platform → the processors that run its jobs.
    """

    names: tuple[str, ...]
    excluded: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, platform: Platform) -> NumberedProcessors:
        """Return the numbered processors of a platform."""
        processors = single_processors(platform)
        number = {processor.name: i for i, processor in enumerate(processors)}
        known = {p.name: tuple(number[n] for n in members(p)) for p in platform.processors}
        return cls(tuple(number), exclusions(processors), known)


def setting(plan: Plan, lowerings: Lowerings, law: NumberedProcessors | None = None) -> Setting:
    """Return the scheduler's input for a plan of a workload.

    Args:
        law: of the platform, for a plan that is known to be valid; if None the plan is checked.

    Raises:
        PlanError: the plan is not for these models or this platform.
        RewriteError, ModelError: as of :meth:`~evaluators.workload.lowered.Lowerings.lower`.
    """
    workload, joined = lowerings.workload, lowerings.joined
    if law is None:
        plan.validate(joined.graph, lowerings.platform)
        law = NumberedProcessors.of(lowerings.platform)
    jobs = jobs_of(plan, joined)
    models = lowerings.all(plan, jobs)
    instances = workload.instances
    clients = []
    for component, model in zip(jobs, models, strict=True):
        asks = workload.clients[instances[component].client]
        clients.append(
            QueueClient(
                tuple(law.members[name] for name in model.processors),
                _releases_ns(asks.arrival, workload.seed + component),
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


@lru_cache(256)  # one workload's instances
def _releases_ns(arrival: Arrival, seed: int) -> tuple[int, ...]:
    return tuple(round(t * 1e9) for t in arrival.releases_s(seed))


def exclusions(processors: Sequence[Processor]) -> tuple[int, ...]:
    """Return, for each processor, a bit set of those that cannot run while it does, itself included."""
    return tuple(
        sum(1 << j for j, b in enumerate(processors) if i == j or a.excludes(b)) for i, a in enumerate(processors)
    )


def closed_loops(on: Sequence[int], requests: Sequence[int], processors: Sequence[Processor], jobs: int = 1) -> Setting:
    """Return a setting in which models run in closed loops, each on its own processor.

    Args:
        on: processor of each model.
        requests: number of requests of each model.
        jobs: number of jobs of each model.
    """
    clients = tuple(
        QueueClient(((processor,),) * jobs, (0,), n, closed=True) for processor, n in zip(on, requests, strict=True)
    )
    stages = tuple(tuple(range(k * jobs, (k + 1) * jobs)) for k in range(len(on)))
    return Setting(clients, tuple(range(len(on))), stages, tuple(p.name for p in processors), exclusions(processors))


def alone(found: Setting, clients: Sequence[int]) -> tuple[Setting, tuple[int, ...]]:
    """Return some clients of a setting as a setting of their own, and which processor is each of its processors."""
    used = sorted({p for k in clients for processors in found.clients[k].processors for p in processors})
    place = {processor: i for i, processor in enumerate(used)}
    excluded = tuple(sum(1 << place[q] for q in used if found.excluded[p] >> q & 1) for p in used)
    mine = tuple(
        replace(
            found.clients[k],
            processors=tuple(tuple(place[p] for p in processors) for processors in found.clients[k].processors),
        )
        for k in clients
    )
    names = tuple(found.processors[p] for p in used)
    components, stages = tuple(found.components[k] for k in clients), tuple(found.stages[k] for k in clients)
    return Setting(mine, components, stages, names, excluded), tuple(used)


def demand(processor: Processor) -> dict[str, float]:
    """Return the share of each resource that a running job on a processor needs."""
    return {**processor.resources, **processor.options.get(SLICED, {})}
