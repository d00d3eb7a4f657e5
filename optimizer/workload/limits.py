"""Limits of a workload that no plan can keep: memory, deadlines, and processors for periodic requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluators.workload.predicted import WorkloadSimulator
from optimizer.exact.bound import Relaxation
from optimizer.model.bounds import Bounds
from optimizer.study.deadline import TRUST
from optimizer.workload.memory import Memory, violation
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.pools import single_processors
from search_spaces.core.workload import Workload

_LATE = "allow a longer deadline, or take a smaller model"
_LATE_TOGETHER = "allow longer deadlines, let requests come apart, or take fewer instances or smaller models"
_MOST_BEGINS, _MOST_DUE = 100, 2000
_BUSY = "ask less often, or take fewer instances or smaller models"

Seconds = NDArray[np.float64]
JobPrice = Callable[[range], float]


@dataclass(frozen=True, slots=True)
class Least:
    """Lower bounds of one inference of a model, by the prices; infinite if no processor supports it.

    Attributes:
        latency_s: from its start to its end.
        work_s: the sum of its jobs.
    """

    latency_s: float
    work_s: float


def least(
    simulator: WorkloadSimulator, graph: Graph, ranks: RankSet = (), *, runs: bool = True, splits: bool = False
) -> Least:
    """Return the bounds of an inference of a model.

    If jobs are runs of operators, in any number and on any processors, dynamic programming over the operators finds the
    quickest plan: each operator joins the job of the one before it, or begins a job on any processor. The seconds that
    it adds to a job are those of the job of the two, less the first one's. Measured prices of longer jobs may not add
    up like this; the result is the least of this additive model. If the longest job of a processor takes less than its
    operators add up to, as without traffic between branches, all of the processor's costs are scaled down to it. If not
    all operators wait for the one before them, processors may share the work, but an operator follows its inputs.

    Args:
        ranks: of the model.
        runs: whether each job is a run of operators; else the least seconds of each operator are added up.
        splits: whether operators may be split.
    """
    count = len(graph.operators)
    whole_s, processors = math.inf, dict[str, tuple[Seconds, Seconds]]()
    for number, processor in enumerate(single_processors(simulator.platform)):
        if not processor.resources or processor.like in processors:  # only baselines use it, or it is known already
            continue

        def job_s(operators: range, index: int = number) -> float:
            return simulator.part_s(graph, index, operators, ranks)

        processors[processor.like] = operator_costs(job_s, count)
        whole_s = min(whole_s, job_s(range(count)))
    if not processors:
        return Least(math.inf, math.inf)
    each_s = np.min([np.minimum(begun_s, added_s) for begun_s, added_s in processors.values()], axis=0)
    work_s = min(whole_s, _quickest_s(list(processors.values())) if runs else float(each_s.sum()))
    if runs and all(o - 1 in graph.predecessors(o) for o in range(1, count)):
        return Least(work_s, work_s)
    path_s = 0.0 if splits else _longest_path_s(graph, each_s)
    return Least(min(whole_s, max(path_s, work_s / _at_once(simulator))), work_s)


def _longest_path_s(graph: Graph, each_s: Seconds) -> float:
    """Return the seconds of the longest path of operators."""
    over_s = np.zeros(len(each_s))
    for o, took_s in enumerate(each_s):
        over_s[o] = took_s + max((over_s[before] for before in graph.predecessors(o)), default=0.0)
    return float(over_s.max())


def operator_costs(job_s: JobPrice, count: int) -> tuple[Seconds, Seconds]:
    """Return each operator's seconds as the first of a job, and those that it adds to the job of the one before it."""
    begun_s = np.array([job_s(range(o, o + 1)) for o in range(count)])
    added_s = np.full(count, np.inf)
    for o in range(1, count):
        if np.isfinite(begun_s[o - 1]):
            added_s[o] = min(begun_s[o], job_s(range(o - 1, o + 1)) - begun_s[o - 1])
    run = _longest_run(np.isfinite(begun_s))
    if len(run) > 1:
        chain_s = begun_s[run.start] + added_s[run.start + 1 : run.stop].sum()
        if 0.0 < (took_s := job_s(run)) < chain_s:
            return begun_s * (took_s / chain_s), added_s * (took_s / chain_s)
    return begun_s, added_s


def _longest_run(taken: NDArray[np.bool_]) -> range:
    """Return the longest run of operators that a processor supports."""
    borders = np.flatnonzero(np.diff(np.concatenate(([0], taken, [0]))))
    runs = [range(int(a), int(b)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    return max(runs, key=len, default=range(0))


def _quickest_s(processors: Sequence[tuple[Seconds, Seconds]]) -> float:
    begun_s, added_s = (np.array(each) for each in zip(*processors, strict=True))
    done_s = begun_s[:, 0]
    for o in range(1, begun_s.shape[1]):
        done_s = np.minimum(done_s + added_s[:, o], done_s.min() + begun_s[:, o])
    return float(done_s.min())


def check(
    simulator: WorkloadSimulator,
    memory: Memory,
    sets: Sequence[Sequence[RankSet]] = (),
    freedoms: AbstractSet[str] = frozenset(),
) -> Mapping[str, Least]:
    """Check that some plan may keep the workload's limits; return the bounds of each client's inference.

    Args:
        sets: of each client the ranks that it may get beside none.
        freedoms: of the plans.

    Raises:
        InfeasibleError: none can; the violations have demand, bound, gap and what to change.
        UnavailableError: no processor supports a model.
    """
    workload = simulator.workload
    clients = [i.client for i in workload.instances]
    runs = not freedoms & {"branches", "splits"}
    found: dict[str, Least] = {}
    for c, client in enumerate(workload.clients):
        graph = simulator.joined.components[clients.index(c)].graph
        every = ((), *(sets[c] if sets else ()))
        each = [least(simulator, graph, ranks, runs=runs, splits="splits" in freedoms) for ranks in every]
        found[client.name] = Least(min(e.latency_s for e in each), min(e.work_s for e in each))
        if not np.isfinite(found[client.name].work_s):
            raise UnavailableError(
                f"no processor supports all operators of {client.model!r}", "name others with --processors"
            )
    broken = list(_broken(simulator, memory, found, sets))
    if broken:
        raise infeasible(*broken)
    return found


def bound_of(objective: str, simulator: WorkloadSimulator, bounds: Mapping[str, Least], *, own: bool) -> Bounds | None:
    """Return the lower bounds of an objective; None for an objective without one.

    Args:
        bounds: of each client, by its name.
        own: whether the prices are the evaluator's own.
    """
    workload = simulator.workload
    each_s = [bounds[client.name].latency_s for client in workload.clients for _ in range(client.count)]
    least_s = {"mean": sum(each_s) / len(each_s), "worst": max(each_s), "makespan": max(each_s)}.get(objective)
    if least_s is None:
        return None
    work_s = 0.0
    if objective == "makespan" and all(
        client.arrival.kind == "burst" and client.arrival.requests == 1 for client in workload.clients
    ):
        work_s = sum(client.count * bounds[client.name].work_s for client in workload.clients) / _at_once(simulator)
    return Bounds(max(least_s, work_s), proven=False, all_plans=Relaxation(least_s, work_s), own=own)


def _broken(
    simulator: WorkloadSimulator, memory: Memory, bounds: Mapping[str, Least], sets: Sequence[Sequence[RankSet]]
) -> Iterator[Violation]:
    workload = simulator.workload
    if workload.memory_limit_nbytes is not None:
        demand = memory.bound_nbytes(sets)
        if demand > workload.memory_limit_nbytes:
            yield violation(demand, workload.memory_limit_nbytes)
    busy = 0.0
    for client in workload.clients:
        bound = bounds[client.name]
        if client.deadline_s is not None and bound.latency_s > TRUST * client.deadline_s:
            yield Violation(f"an inference of {client.name!r} alone", bound.latency_s, client.deadline_s, "s", _LATE)
        if client.arrival.kind == "periodic" and client.deadline_s is not None:
            busy += client.count * bound.work_s / client.arrival.period_s
    processors = _at_once(simulator)
    yield from _late_together(workload, bounds, processors)
    if busy > TRUST * processors:
        sentence = "the periodic models need {demand}; the device has {bound}"
        what, busy = "processors for the periodic models", float(f"{busy:.3g}")
        yield Violation(what, busy, processors, "processors", _BUSY, sentence)


def _late_together(workload: Workload, bounds: Mapping[str, Least], processors: int) -> Iterator[Violation]:
    """Yield the first interval in which more work arrives and is due than all processors can do.

    Random arrivals are left out: only a sample of their times is known.
    """
    due = sorted(
        (release_s + client.deadline_s, release_s, client.count * bounds[client.name].work_s)
        for client in workload.clients
        if client.deadline_s is not None and client.arrival.kind != "poisson"
        for release_s in client.arrival.releases_s(workload.seed)
    )[:_MOST_DUE]
    for begin_s in sorted({release_s for _, release_s, _ in due})[:_MOST_BEGINS]:
        needed_s = 0.0
        for end_s, release_s, work_s in due:
            if release_s < begin_s:
                continue
            needed_s += work_s / processors
            if needed_s > TRUST * (end_s - begin_s):
                what = f"requests from {begin_s:g} s on that are due by {end_s:g} s"
                sentence = f"{what} take at least {{demand}}, and have {{bound}}"
                yield Violation(what, needed_s, end_s - begin_s, "s", _LATE_TOGETHER, sentence)
                return


def _at_once(simulator: WorkloadSimulator) -> int:
    """Return how many of the space's processors can run at once, at most."""
    processors = [processor for processor in single_processors(simulator.platform) if processor.resources]
    chosen: list[int] = []
    for i in sorted(range(len(processors)), key=lambda i: sum(processors[i].resources.values())):
        if not any(processors[i].excludes(processors[j]) for j in chosen):
            chosen.append(i)
    return len(chosen)
