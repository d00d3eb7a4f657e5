"""The latency of a placement problem: a local search, and what no placement goes below.

The bound follows one path through the graph. The nodes of an accelerator are one contiguous part, so they are one run
of the path, and a run holds no more than an accelerator's memory. What a run costs is at least its nodes and the
transfers of the path's outputs at both its ends; the best runs come from dynamic programming. Paths that are long in
the best placement known make the bound tight; what runs beside them it does not see.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from evaluators.table.placement import PlacementProblem
from optimizer.exact.placement_merge import Clusters
from optimizer.exact.placement_value import CPU, loads, value

_COOLING = (0.02, 0.0005)  # relative to the value: of the first and of the last move
_PATIENCE = 400  # moves a cluster without a better placement, after which the search ends
_HAIR = 1e-12
_WHOLE_RUN = 0.3  # share of the moves that take all of a device's nodes beside a border along


def improve(
    problem: PlacementProblem, clusters: Clusters, start: tuple[int, ...], time_limit_s: float, seed: int = 0
) -> tuple[int, ...]:
    """Return the best placement that a local search finds (simulated annealing), never worse than its start.

    A move takes a colour's nodes, or all that follow or precede them on their device, to the device of a neighbour, to
    a CPU or to an accelerator that is free.
    """
    rng, end_s = np.random.default_rng(seed), time.monotonic() + time_limit_s
    groups = _groups(problem, clusters)
    of = {node: i for i, group in enumerate(groups) for node in group}
    rank = {node: i for i, node in enumerate(problem.order)}
    beside = [
        sorted({of[n] for v in group for n in (*problem.predecessors[v], *problem.successors[v])} - {i})
        for i, group in enumerate(groups)
    ]
    best = now = start
    best_value = now_value = value(problem, start, "latency")
    begin_s, moves, last_better = time.monotonic(), 0, 0
    while (at_s := time.monotonic()) < end_s and moves - last_better < _PATIENCE * len(groups):
        moves += 1
        share = (at_s - begin_s) / time_limit_s
        heat = best_value * _COOLING[0] * (_COOLING[1] / _COOLING[0]) ** share
        chosen = int(rng.integers(len(groups)))
        own = now[groups[chosen][0]]
        free = next((a for a in range(problem.accelerators) if a not in now), CPU)
        around = {now[groups[i][0]] for i in beside[chosen]} | {CPU, free}
        targets = sorted(d for d in around if d != own)
        if not targets:
            continue
        target = targets[int(rng.integers(len(targets)))]
        moving = list(groups[chosen])
        if rng.random() < _WHOLE_RUN:
            border, later = rank[moving[0]], bool(rng.integers(2))
            moving = [v for v, d in enumerate(now) if d == own and ((rank[v] >= border) == later or v in moving)]
        then = list(now)
        for node in moving:
            then[node] = target
        tried = tuple(then)
        found = value(problem, tried, "latency")
        if found <= now_value or (heat > 0.0 and rng.random() < math.exp((now_value - found) / heat)):
            now, now_value = tried, found
            if found < best_value:
                best, best_value, last_better = tried, found, moves
    return best


def _groups(problem: PlacementProblem, clusters: Clusters) -> list[list[int]]:
    """Return the nodes that are always on one device: those of a cluster and of their colours."""
    import networkx as nx

    together: nx.Graph[int] = nx.Graph()
    together.add_nodes_from(range(len(problem.names)))
    for key in (clusters.of, problem.colours):
        leader: dict[int, int] = {}
        together.add_edges_from((leader.setdefault(shared, node), node) for node, shared in enumerate(key))
    return [sorted(group) for group in nx.connected_components(together)]


def lower_bound(problem: PlacementProblem, devices: Sequence[int] | None) -> float:
    """Return what no placement goes below, by several paths.

    Args:
        devices: the best placement known, whose longest paths are tried, too.
    """
    light = [min(pair) for pair in zip(problem.cpu, problem.accelerator, strict=True)]
    weights = [light, list(problem.cpu)]
    if devices is not None:
        took = loads(problem, devices)
        # A node of a part is given its own share of what the part takes, transfers included.
        work = dict.fromkeys(took, 0.0)
        for node, device in enumerate(devices):
            work[device] += problem.accelerator[node] if device >= 0 else problem.cpu[node]
        scale = {d: took[d] / work[d] if d >= 0 and 0.0 < work[d] < math.inf else 1.0 for d in took}
        weights.append(
            [(problem.accelerator[v] if d >= 0 else problem.cpu[v]) * scale[d] for v, d in enumerate(devices)]
        )
        weights.append([w + problem.transfer[v] for v, w in enumerate(light)])
    return max((_path_bound(problem, path) for path in {_longest(problem, w) for w in weights}), default=0.0)


def _longest(problem: PlacementProblem, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the path whose weights add up to most; infinite ones count as nothing."""
    heavy = [w if math.isfinite(w) else 0.0 for w in weights]
    best: dict[int, tuple[float, int]] = {}
    for node in problem.order:
        before = max(problem.predecessors[node], key=lambda p: best[p][0], default=-1)
        best[node] = heavy[node] + (best[before][0] if before >= 0 else 0.0), before
    node = max(best, key=lambda v: best[v][0], default=-1)
    path = []
    while node >= 0:
        path.append(node)
        node = best[node][1]
    return tuple(reversed(path))


def _path_bound(problem: PlacementProblem, path: Sequence[int]) -> float:
    """Return the least latency of the nodes of a path alone."""
    count, most = len(path), problem.accelerators
    seconds = np.array([problem.accelerator[v] for v in path])
    refused = np.concatenate(([0], np.cumsum(np.isinf(seconds))))
    work = np.concatenate(([0.0], np.cumsum(np.where(np.isinf(seconds), 0.0, seconds))))
    kept = np.concatenate(([0.0], np.cumsum([problem.nbytes[v] for v in path])))
    move = np.array([problem.transfer[v] for v in path])
    into = np.concatenate(([0.0], move[:-1]))  # reading in what the node before wrote
    out = np.concatenate((move[:-1], [0.0]))
    table = np.full((count + 1, most + 1), np.inf)  # of the nodes so far, by how many accelerators were used
    table[0] = 0.0
    for end in range(1, count + 1):
        node = path[end - 1]
        table[end] = table[end - 1] + problem.cpu[node]
        first = int(np.searchsorted(kept, kept[end] - problem.memory_bytes * (1 + _HAIR), "left"))
        begins = np.arange(min(first, end), end)
        begins = begins[refused[begins] == refused[end]]
        if len(begins) and most:
            run = work[end] - work[begins] + into[begins] + out[end - 1]
            table[end, 1:] = np.minimum(table[end, 1:], (table[begins, :-1] + run[:, None]).min(axis=0))
    return float(table[count].min())
