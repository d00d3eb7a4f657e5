"""Models of a workload that run apart, each in a process or a thread of its own: baselines that no plan schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluators.workload.setting import HOST, SLICED
from search_spaces.core.platform import MEMORY, Platform, Processor
from search_spaces.core.pools import members, single_processors

PROCESSES, THREADS = "one process per model", "one thread per model"
_THREADS_HOST = "threads"


@dataclass(frozen=True, slots=True)
class Apart:
    """A way to run models apart.

    Attributes:
        name: of the baseline.
        processors: one for each instance of a model; they hold no resources, so that the job scheduler never delays
            their jobs, and the system, or the device, shares what there is.
        hosts: processors in whose processes they are threads.
    """

    name: str
    processors: tuple[Processor, ...]
    hosts: tuple[Processor, ...] = ()


def numbered(name: str, processor: Processor, count: int) -> tuple[Processor, ...]:
    """Return a processor for each of ``count`` instances, without resources, named after a baseline."""
    return tuple(replace(processor, name=f"{name}: {k}", resources={}) for k in range(1, count + 1))


def on_cores(platform: Platform, count: int, *, threads: bool) -> list[Apart]:
    """Return processes, then threads, for each kind of processor, time-sliced by the operating system.

    Each has the threads of a processor of that kind.

    Args:
        platform: the processors of the space.
        count: number of instances.
        threads: whether processors may be threads of one process.
    """
    host = _host(platform)
    kinds = [group for group in platform.classes().values() if len(members(group[0])) == 1]
    alike = Counter(group[0].options.get("threads", 1) for group in kinds if group[0].kind == "cpu")
    found = []
    for label, hosts in ((PROCESSES, ()), *(((THREADS, (host,)),) if threads else ())):
        for group in kinds:
            base, cores = group[0], _cores(group)
            wanted = base.options.get("threads", 1)
            asked = {name: 1.0 / len(group) for processor in group for name in processor.resources}
            options = {**base.options, SLICED: asked, **({"cores": cores} if cores else {})}
            options |= {HOST: host.name} if hosts else {}
            many = f", {wanted} thread{'s' if wanted > 1 else ''} each" if len(kinds) > 1 else ""
            if alike[wanted] > 1 or (len(group) == 1 and max(alike.values(), default=0) > 1):
                many += f" on {base.name}"  # as cores of another size
            name = f"{label}{many}" if base.kind == "cpu" else f"{label} on {base.name}"
            if not hosts or (base.kind == "cpu" and "runtime" not in base.options):  # the host runs LiteRT alone
                found.append(Apart(name, numbered(name, replace(base, options=options), count), hosts))
    return found


def _cores(group: Sequence[Processor]) -> tuple[int, ...]:
    return tuple(sorted({core for processor in group for core in processor.options.get("cores", ())}))


def _host(platform: Platform) -> Processor:
    """Return the process that hosts the threads, as a processor."""
    cpu = [processor for processor in single_processors(platform) if processor.kind == "cpu"]
    limit = {name: value for p in cpu for name, value in p.options.items() if name == MEMORY}
    return Processor(_THREADS_HOST, "cpu", {}, "threads", {"cores": _cores(cpu), "threads": 1, **limit})
