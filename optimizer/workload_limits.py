"""What a workload demands that no plan can give: memory, deadlines, and lanes for what comes periodically."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from evaluators.workload.predicted import WorkloadSimulator
from optimizer.deadline import TRUST
from search_spaces.arrangement import RankSet, ranks_by_component
from search_spaces.constraints import Violation, infeasible
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.pools import lanes_of
from search_spaces.rewrites.ranked import ranks_of
from search_spaces.rewrites.tucker import outline

_MEMORY = "raise memory_limit_mb, let instances share weights, or take fewer of them"
_LATE = "allow a longer deadline, or take a smaller model"
_BUSY = "ask less often, or take fewer instances or smaller models"


def memory_nbytes(simulator: WorkloadSimulator, ranks: Sequence[RankSet] = ()) -> int:
    """Return the least memory that a workload takes: weights, once where they are shared, and an arena an instance.

    Args:
        ranks: of each instance, where models are decomposed.
    """
    workload, joined = simulator.workload, simulator.joined
    shared: dict[tuple[str, RankSet], int] = {}
    known: dict[tuple[int, RankSet], tuple[int, int]] = {}
    total = 0
    for number, (instance, component) in enumerate(zip(workload.instances, joined.components, strict=True)):
        client, own = workload.clients[instance.client], ranks[number] if ranks else ()
        if (key := (id(component.graph), own)) not in known:
            graph = decomposed(component.graph, own)
            known[key] = sum(t.nbytes for t in graph.tensors if t.constant), largest_moment(graph)
        weights, moment = known[key]
        total += moment
        if client.own_weights:
            total += weights
        else:
            shared[client.model, own] = weights
    return total + sum(shared.values())


def decomposed(graph: Graph, ranks: RankSet) -> Graph:
    """Return a model's structure with some convolutions as triples; their own weights are no longer in it."""
    if not ranks:
        return graph
    made = outline(graph, ranks_of(Plan(graph.digest, (), ranks=ranks)))
    read = {t for operator in made.operators for t in operator.inputs}
    tensors = tuple(t if i in read or not t.constant else replace(t, nbytes=0) for i, t in enumerate(made.tensors))
    return replace(made, tensors=tensors)


def memory_violations(simulator: WorkloadSimulator, plan: Plan) -> tuple[Violation, ...]:
    """Return what a plan breaks of the workload's memory limit."""
    limit = simulator.workload.memory_limit_nbytes
    if limit is None:
        return ()
    demand = memory_nbytes(simulator, ranks_by_component(plan, simulator.joined))
    return (Violation("memory of the workload", demand, limit, "B", _MEMORY),) if demand > limit else ()


def largest_moment(graph: Graph) -> int:
    """Return the most bytes that one operator of a model reads and writes: they are in memory at the same time."""
    found = 0
    for operator in graph.operators:
        touched = {t for t in (*operator.inputs, *operator.outputs) if t != -1 and not graph.tensors[t].constant}
        found = max(found, sum(graph.tensors[t].nbytes for t in touched))
    return found


def least_s(simulator: WorkloadSimulator, graph: Graph, ranks: RankSet = ()) -> float:
    """Return what no plan goes below for one inference of a model, in the prices: each operator on its fastest lane.

    Args:
        ranks: with which the model runs.
    """
    count = len(graph.operators)
    each, whole = np.full(count, np.inf), np.inf
    for lane, processor in enumerate(lanes_of(simulator.platform)):
        if not processor.resources:  # only baselines use it
            continue
        mine = [simulator.cost(graph, lane, (operator,), ranks).work_s for operator in range(count)]
        each = np.minimum(each, mine)
        whole = min(whole, simulator.cost(graph, lane, tuple(range(count)), ranks).work_s)
    return float(min(whole, each.sum()))


def check(simulator: WorkloadSimulator, sets: Sequence[Sequence[RankSet]] = ()) -> dict[str, float]:
    """Check that some plan may keep what is demanded; return the least seconds of each client's inference.

    Args:
        sets: of each client the ranks that it may get beside none.

    Raises:
        InfeasibleError: none can; the violations tell demand, bound, gap and what to change.
        UnavailableError: a model runs nowhere.
    """
    workload = simulator.workload
    clients = [i.client for i in workload.instances]
    least: dict[str, float] = {}
    for c, client in enumerate(workload.clients):
        graph = simulator.joined.components[clients.index(c)].graph
        each = [least_s(simulator, graph, ranks) for ranks in ((), *(sets[c] if sets else ()))]
        least[client.name] = min(each)
        if not np.isfinite(least[client.name]):
            raise UnavailableError(f"no lane takes all operators of {client.model!r}", "name others with --processors")
    broken = list(_broken(simulator, least, sets))
    if broken:
        raise infeasible(*broken)
    return least


def _broken(
    simulator: WorkloadSimulator, least: dict[str, float], sets: Sequence[Sequence[RankSet]]
) -> Iterator[Violation]:
    workload = simulator.workload
    if workload.memory_limit_nbytes is not None:
        demand = _least_nbytes(simulator, sets)
        if demand > workload.memory_limit_nbytes:
            yield Violation("memory of the workload", demand, workload.memory_limit_nbytes, "B", _MEMORY)
    busy = 0.0
    for client in workload.clients:
        bound_s = least[client.name]
        if client.deadline_s is not None and bound_s > TRUST * client.deadline_s:
            yield Violation(f"an inference of {client.name!r} alone", bound_s, client.deadline_s, "s", _LATE)
        if client.arrival.kind == "periodic" and client.deadline_s is not None:
            busy += client.count * bound_s / client.arrival.period_s
    lanes = _at_once(simulator)
    if busy > TRUST * lanes:
        yield Violation("lanes that periodic models keep busy", busy, lanes, "lanes", _BUSY)


def _least_nbytes(simulator: WorkloadSimulator, sets: Sequence[Sequence[RankSet]]) -> int:
    """Return the memory with the ranks of each client that take least, chosen one client after the other."""
    clients = [i.client for i in simulator.workload.instances]
    chosen: list[RankSet] = [()] * len(sets)
    for c, each in enumerate(sets):

        def demand(ranks: RankSet, c: int = c) -> int:
            return memory_nbytes(simulator, [ranks if k == c else chosen[k] for k in clients])

        chosen[c] = min(((), *each), key=demand)
    return memory_nbytes(simulator, [chosen[k] for k in clients] if sets else ())


def _at_once(simulator: WorkloadSimulator) -> int:
    """Return how many of the space's lanes can run at once, at most."""
    lanes = [lane for lane in lanes_of(simulator.platform) if lane.resources]
    chosen: list[int] = []
    for i in sorted(range(len(lanes)), key=lambda i: sum(lanes[i].resources.values())):
        if not any(lanes[i].excludes(lanes[j]) for j in chosen):
            chosen.append(i)
    return len(chosen)
