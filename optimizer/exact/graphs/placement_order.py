"""First solutions of a placement problem: an order of its nodes cut into runs, one for each accelerator.

The best runs of a given order come from dynamic programming in time quadratic in the nodes: those with the least
largest load, or, for the latency, with the least sum of their loads and of the nodes that the CPUs run between them, as
if nothing ran side by side. The solutions of some orders start the proof, and give values to merge by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from evaluators.table.placement import PlacementProblem
from optimizer.exact.graphs.placement_merge import Clusters
from optimizer.exact.graphs.placement_value import CPU, PlacementObjective

_DEPTH_FIRST = 0.9  # share of the steps of a drawn order


def first_solutions(
    problem: PlacementProblem, clusters: Clusters, objective: PlacementObjective
) -> Iterator[tuple[int, ...]]:
    """Yield the device of each node for some orders; for the period all nodes are on accelerators."""
    for order in orders(problem, clusters):
        devices = _cut(problem, order, objective)
        if devices is not None:
            yield devices


def filled(problem: PlacementProblem, order: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the greedy placement of Tarnawski et al. (appendix F): one accelerator after another is filled.

    Nodes that fit into none, and those left when all are full, are on the CPU.
    """
    devices, device, kept = [CPU] * len(problem.names), -1, float("inf")
    for group in order:
        nbytes = sum(problem.nbytes[v] for v in group)
        fits = nbytes <= problem.memory_bytes and all(problem.accelerator[v] < float("inf") for v in group)
        if not fits or (kept + nbytes > problem.memory_bytes and device + 1 == problem.accelerators):
            continue
        if kept + nbytes > problem.memory_bytes:
            device, kept = device + 1, 0.0
        kept += nbytes
        for node in group:
            devices[node] = device
    return tuple(devices)


def orders(problem: PlacementProblem, clusters: Clusters) -> Iterator[list[list[int]]]:
    """Yield orders of groups of nodes; nodes that share a cluster or a colour, or lie on a cycle, are one group."""
    parts, members = _parts(problem, clusters)
    rank = {v: i for i, v in enumerate(problem.order)}
    first = {part: min(rank[v] for v in members[part]) for part in parts}
    for key in (first.__getitem__, lambda part: -first[part]):
        yield [members[part] for part in nx.lexicographical_topological_sort(parts, key=key)]
    yield [members[part] for part in reversed(list(nx.dfs_postorder_nodes(parts)))]


def drawn_solutions(
    problem: PlacementProblem, clusters: Clusters, rng: np.random.Generator
) -> Iterator[tuple[int, ...] | None]:
    """Yield endlessly the best latency solutions of drawn orders, mostly depth first; None where nothing fits."""
    parts, members = _parts(problem, clusters)
    while True:
        waits = dict(parts.in_degree())
        ready = [part for part, count in waits.items() if not count]
        rng.shuffle(ready)
        order = []
        while ready:
            last = rng.random() < _DEPTH_FIRST
            part = ready.pop(-1 if last else int(rng.integers(len(ready))))
            order.append(members[part])
            free = []
            for reader in parts.successors(part):
                waits[reader] -= 1
                if not waits[reader]:
                    free.append(reader)
            rng.shuffle(free)
            ready += free
        yield _cut(problem, order, "latency")


def _parts(problem: PlacementProblem, clusters: Clusters) -> tuple[nx.DiGraph[int], dict[int, list[int]]]:
    """Return the acyclic graph of such groups, and the nodes of each."""
    groups = together(problem, clusters)
    of = {node: number for number, group in enumerate(groups) for node in group}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    for node, readers in enumerate(problem.successors):
        graph.add_edges_from((of[node], of[r]) for r in readers)
    parts = nx.condensation(graph)
    return parts, {part: [v for c in parts.nodes[part]["members"] for v in groups[c]] for part in parts}


def together(problem: PlacementProblem, clusters: Clusters) -> list[list[int]]:
    """Return the nodes that are always on one device: those of a cluster and of their colours."""
    shared: nx.Graph[int] = nx.Graph()
    shared.add_nodes_from(range(len(problem.names)))
    for key in (clusters.of, problem.colours):
        leader: dict[int, int] = {}
        shared.add_edges_from((leader.setdefault(own, node), node) for node, own in enumerate(key))
    return [sorted(group) for group in nx.connected_components(shared)]


def _cut(
    problem: PlacementProblem, order: Sequence[Sequence[int]], objective: PlacementObjective
) -> tuple[int, ...] | None:
    """Return the best runs of an order; None where none fit into the memory."""
    count, most = len(order), problem.accelerators
    load = _loads(problem, order)
    on_cpu = np.array([sum(problem.cpu[v] for v in group) for group in order])
    least = np.full((most + 1, count + 1), np.inf)
    least[:, count] = 0.0
    ends = np.zeros((most + 1, count), dtype=int)  # of the run that begins there; no run: the group is on a CPU
    for left in range(most + 1):
        for first in range(count - 1, -1, -1) if objective == "latency" else ():
            least[left, first], ends[left, first] = on_cpu[first] + least[left, first + 1], first
            if left:
                found = load[first] + least[left - 1]
                best = int(found.argmin())
                if found[best] < least[left, first]:
                    least[left, first], ends[left, first] = found[best], best
        if left and objective == "period":
            worst = np.maximum(load[:count], least[left - 1])
            ends[left] = worst.argmin(axis=1)
            least[left, :count] = worst.min(axis=1)
    if not np.isfinite(least[most, 0]):
        return None
    devices, first, left = [CPU] * len(problem.names), 0, most
    while first < count:
        end = int(ends[left, first])
        if end == first:
            first += 1
            continue
        for group in order[first:end]:
            for node in group:
                devices[node] = most - left
        first, left = end, left - 1
    return tuple(devices)


def _loads(problem: PlacementProblem, order: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the load of each run ``first … last-1`` on one accelerator; infinite where it does not fit."""
    count = len(order)
    place = {node: i for i, group in enumerate(order) for node in group}
    last_use = [max((place[r] for r in readers), default=-1) for readers in problem.successors]
    table = np.full((count + 1, count + 1), np.inf)
    for first in range(count):
        load = kept = 0.0
        open_until: dict[int, float] = {}  # transfers out, by the group that reads the output last
        seen: set[int] = set()
        for last in range(first, count):
            for node in order[last]:
                load += problem.accelerator[node]
                kept += problem.nbytes[node]
                for before in problem.predecessors[node]:
                    if place[before] < first and before not in seen:
                        seen.add(before)
                        load += problem.transfer[before]
                if last_use[node] > last:
                    open_until[last_use[node]] = open_until.get(last_use[node], 0.0) + problem.transfer[node]
            open_until.pop(last, None)
            if kept > problem.memory_bytes:
                break
            table[first, last + 1] = load + sum(open_until.values())
    return table
