"""The latency of a placement problem: a local search and a lower bound.

The bound follows one path through the graph. The nodes of an accelerator form one contiguous part, so those on the path
are consecutive (a run), and the part also holds every node between the run's first and its last one. Ancestors of the
node before the run, and descendants of the node after it, are on other devices. So a run costs at least the work
between its ends and the transfers to and from other devices, and fits into an accelerator's memory; dynamic programming
finds the best runs. Long paths of the best known placement make the bound tight; work beside a path is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evaluators.table.placement import PlacementProblem
from optimizer.exact.graphs.placement_merge import Clusters
from optimizer.exact.graphs.placement_order import drawn_solutions, together
from optimizer.exact.graphs.placement_value import CPU, loads, value

_COOLING = (0.02, 0.0005)  # temperature of the first and of the last move, relative to the value
_PATIENCE = 400  # moves a cluster without a better placement, after which the search ends
_HAIR = 1e-12
_DRAWN = 0.4  # share of the time for drawn orders
_WHOLE_RUN = 0.3  # share of the moves that also take all earlier, or all later, nodes of the device


def improve(
    problem: PlacementProblem, clusters: Clusters, start: tuple[int, ...], time_limit_s: float, seed: int = 0
) -> tuple[int, ...]:
    """Return the best placement that a search finds, never worse than its start.

    It begins with the best cuts of drawn orders and goes on by simulated annealing. A move takes a colour's nodes, or
    all that follow or precede them on their device, to the device of a neighbour, to a CPU or to an accelerator that is
    free.
    """
    rng, begin_s = np.random.default_rng(seed), time.monotonic()
    end_s = begin_s + time_limit_s
    for drawn in drawn_solutions(problem, clusters, rng):
        if drawn is not None and value(problem, drawn, "latency") < value(problem, start, "latency"):
            start = drawn
        if time.monotonic() > begin_s + _DRAWN * time_limit_s:
            break
    groups = together(problem, clusters)
    of = {node: i for i, group in enumerate(groups) for node in group}
    rank = {node: i for i, node in enumerate(problem.order)}
    beside = [
        sorted({of[n] for v in group for n in (*problem.predecessors[v], *problem.successors[v])} - {i})
        for i, group in enumerate(groups)
    ]
    best = now = start
    best_value = now_value = value(problem, start, "latency")
    begin_s, moves, last_better = time.monotonic(), 0, 0
    time_limit_s = max(end_s - begin_s, _HAIR)
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


def lower_bound(problem: PlacementProblem, devices: Sequence[int] | None) -> float:
    """Return a lower bound of all placements, from several paths.

    Args:
        devices: the best placement known, whose longest paths are tried, too.
    """
    light = [min(pair) for pair in zip(problem.cpu, problem.accelerator, strict=True)]
    weights = [light, list(problem.cpu)]
    if devices is not None:
        took = loads(problem, devices)
        # The time of a part, transfers included, is shared among its nodes in proportion to their work.
        work = dict.fromkeys(took, 0.0)
        for node, device in enumerate(devices):
            work[device] += problem.accelerator[node] if device >= 0 else problem.cpu[node]
        scale = {d: took[d] / work[d] if d >= 0 and 0.0 < work[d] < math.inf else 1.0 for d in took}
        weights.append(
            [(problem.accelerator[v] if d >= 0 else problem.cpu[v]) * scale[d] for v, d in enumerate(devices)]
        )
        weights.append([w + problem.transfer[v] for v, w in enumerate(light)])
    reach = _reach(problem)
    return max((_path_bound(problem, path, reach) for path in {_longest(problem, w) for w in weights}), default=0.0)


def _reach(problem: PlacementProblem) -> NDArray[np.float32]:
    """Return which nodes can be reached from each node, itself included: 1 or 0, shape ``(n, n)``."""
    reach = np.eye(len(problem.names), dtype=np.float32)
    for node in reversed(problem.order):
        for reader in problem.successors[node]:
            np.maximum(reach[node], reach[reader], out=reach[node])
    return reach


def _longest(problem: PlacementProblem, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the path with the largest sum of weights; infinite weights count as 0."""
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


def _path_bound(problem: PlacementProblem, path: Sequence[int], reach: NDArray[np.float32]) -> float:
    """Return the least latency of a path, over all placements of its nodes."""
    count, most = len(path), problem.accelerators
    table = np.full((count + 1, most + 1), np.inf)  # by nodes so far, and by accelerators used
    table[0] = 0.0
    run = _run_costs(problem, path, reach) if most else np.full((count, count), np.inf)
    for end in range(1, count + 1):
        table[end] = table[end - 1] + problem.cpu[path[end - 1]]
        if most:
            found = (table[:end, :-1] + run[:end, end - 1, None]).min(axis=0)
            table[end, 1:] = np.minimum(table[end, 1:], found)
    return float(table[count].min())


def _run_costs(problem: PlacementProblem, path: Sequence[int], reach: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the least time of an accelerator with exactly the nodes ``[first, last]`` of a path."""
    from scipy.sparse import csr_array

    nodes, count = len(problem.names), len(path)
    edges = [(node, reader) for node, readers in enumerate(problem.successors) for reader in readers]
    ends = np.array(edges, dtype=np.intp).reshape(-1, 2).T
    reads = csr_array((np.ones(len(edges), np.float32), tuple(ends)), shape=(nodes, nodes))
    seconds, nbytes, move = map(np.array, (problem.accelerator, problem.nbytes, problem.transfer))
    refused = np.isinf(seconds)
    seconds = np.where(refused, 0.0, seconds)
    found = np.full((count, count), np.inf)
    after = [reach[path[i + 1]] if i + 1 < count else np.zeros(nodes, np.float32) for i in range(count)]
    written = ((reads @ np.stack(after, axis=1)) > 0).T
    for first, begin in enumerate(path):
        between = reach[begin][None, :] * reach[:, list(path[first:])].T
        fits = (between @ nbytes <= problem.memory_bytes * (1 + _HAIR)) & ~between[:, refused].any(axis=1)
        if not fits.any():
            continue
        between, lasts = between[fits], first + np.flatnonzero(fits)
        costs = between @ seconds
        costs += (between * written[lasts]) @ move
        if first:
            before = np.flatnonzero(reach[:, path[first - 1]] * move)
            costs += move[before] @ ((reads[before] @ between.T) > 0)
        found[first, lasts] = costs
    return found
