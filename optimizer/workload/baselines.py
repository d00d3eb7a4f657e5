"""Baselines of several models (seed 001's processes among them), as plans and the processors that they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from evaluators.workload.setting import HOST, SLICED
from optimizer.model.baselines import Baseline
from search_spaces.core.decoded_plan import DecodedPlan, in_runs
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import members, single_processors
from search_spaces.spaces.workload_space import WorkloadSpace

PROCESSES, THREADS = "one process per model", "one thread per model"
SEQUENTIAL, STATIC = "one after another", "one processor per model"
MAPPED = "whole models, each on the best processor"
_MOST_MAPPINGS = 64
_THREADS_HOST = "threads"


def workload_baselines(
    space: WorkloadSpace, *, threads: bool, processes: bool = True
) -> tuple[tuple[Baseline, ...], Platform]:
    """Return the baselines, which run every model whole, and the space's platform with processors that only they use.

    ``one process per model`` and ``one thread per model``, with each number of threads that the platform's processors
    have, if they are allowed; ``one after another`` on each kind of processor; ``one processor per model``, in turns,
    if several can run at once. A process, or a thread, for each instance is a processor that holds no resources: the
    job scheduler never delays it, and the operating system shares the cores.

    Args:
        threads: whether processors may be threads of one process.
        processes: whether processors may be processes that the system schedules.
    """
    count = len(space.joined.components)
    variants = list(_variants(space, threads=threads)) if processes else []
    found = [Baseline(label, _whole(space, [p.name for p in own]).plan(space.joined)) for label, own in variants]
    for group in space.platform.classes().values():
        first = group[0]
        if len(members(first)) > 1:
            names = members(first)
            found.append(Baseline(STATIC, space.plan(_whole(space, [names[k % len(names)] for k in range(count)]))))
        else:
            found.append(Baseline(f"{SEQUENTIAL} on {first.name}", space.plan(_whole(space, [first.name] * count))))
    more = (*(p for _, own in variants for p in own), *([_host(space)] if threads else ()))
    return tuple(found), replace(space.platform, processors=(*space.platform.processors, *more))


def mapped(space: WorkloadSpace, predict: Callable[[Plan], float]) -> Baseline:
    """Return the best way to give each instance, whole, a processor of its own choice, by prediction.

    All ways are tried where there are few; otherwise instances move one after another while that is better, from the
    two best ways to have all on one processor.

    Args:
        predict: the objective of a plan.
    """
    names, count = [p.name for p in space.platform.processors], len(space.joined.components)

    @cache
    def value(way: tuple[str, ...]) -> float:
        return predict(space.plan(_whole(space, way)))

    def improved(way: tuple[str, ...]) -> tuple[str, ...]:
        before = None
        while way != before:
            before = way
            for k in range(count):
                way = min((way, *((*way[:k], name, *way[k + 1 :]) for name in names)), key=value)
        return way

    ways: list[tuple[str, ...]]
    if len(names) ** count <= _MOST_MAPPINGS:
        ways = list(product(names, repeat=count))
    else:
        ways = [improved(way) for way in sorted(((name,) * count for name in names), key=value)[:2]]
    best = min(ways, key=value)
    return Baseline(MAPPED, space.plan(_whole(space, best)))


def first_plans(space: WorkloadSpace) -> list[Baseline]:
    """Return plans to try before any search: all models whole, from one queue, on each pool or processor."""
    count = len(space.joined.components)
    return [
        Baseline(
            f"{dispatch} on {processor.name}",
            space.plan(replace(_whole(space, [processor.name] * count), dispatch=dispatch)),
        )
        for processor in space.platform.processors
        for dispatch in space.dispatches
    ]


def _whole(space: WorkloadSpace, processors: Sequence[str]) -> DecodedPlan:
    models = [component.graph for component in space.joined.components]
    rows = (in_runs(len(graph.operators), (), [processor]) for graph, processor in zip(models, processors, strict=True))
    return DecodedPlan("fifo", tuple(range(len(processors))), tuple(rows))


def _variants(space: WorkloadSpace, *, threads: bool) -> Iterator[tuple[str, tuple[Processor, ...]]]:
    """Yield processes, then threads, for each kind of processor: a name, and a processor for each instance.

    The operating system schedules them; each has the threads of a processor of that kind.
    """
    count = len(space.joined.components)
    kinds = [group for group in space.platform.classes().values() if len(members(group[0])) == 1]
    alike = Counter(group[0].options.get("threads", 1) for group in kinds if group[0].kind == "cpu")
    for label, host in ((PROCESSES, ""), *(((THREADS, _THREADS_HOST),) if threads else ())):
        for group in kinds:
            base, cores = group[0], _cores(group)
            wanted = base.options.get("threads", 1)
            asked = {name: 1.0 / len(group) for processor in group for name in processor.resources}
            options = {
                **base.options,
                SLICED: asked,
                **({"cores": cores} if cores else {}),
                **({HOST: host} if host else {}),
            }
            many = f", {wanted} thread{'s' if wanted > 1 else ''} each" if len(kinds) > 1 and base.kind == "cpu" else ""
            if alike[wanted] > 1 or (len(group) == 1 and max(alike.values(), default=0) > 1):
                many += f" on {base.name}"  # as cores of another size
            what = f"{label}{many}" if base.kind == "cpu" else f"{label} on {base.name}"
            names = [f"{what}: {k}" for k in range(1, count + 1)]
            processors = tuple(replace(base, name=name, resources={}, options=options) for name in names)
            if not host or (base.kind == "cpu" and "runtime" not in base.options):  # the host runs LiteRT alone
                yield what, processors


def _cores(group: Sequence[Processor]) -> tuple[int, ...]:
    return tuple(sorted({core for processor in group for core in processor.options.get("cores", ())}))


def _host(space: WorkloadSpace) -> Processor:
    """Return the process that hosts the threads, as a processor."""
    cpu = [processor for processor in single_processors(space.platform) if processor.kind == "cpu"]
    cores = _cores(cpu)
    return Processor(_THREADS_HOST, "cpu", {}, "threads", {"cores": cores, "threads": 1})
