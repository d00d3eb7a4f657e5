"""The best chain of which every device runs one part at most: boards in a row, each with its part of the network.

Exact by dynamic programming over the operators, how many devices of each kind are in use, and the kind in use: with
k kinds of c devices each, ``k² (c+1)^k n²`` steps, whichever the objective.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, CostedChain, Objective
from optimizer.exact.chain_tables import part_costs
from search_spaces.errors import InfeasibleError

_Counts = tuple[int, ...]
_Row = NDArray[np.float64]


def best_pipeline(costs: ChainCosts, max_stages: int, objective: Objective = "latency") -> CostedChain:
    """Return the cheapest chain of at most ``max_stages`` parts, no two of them on one device.

    Devices must not exclude each other, and alike ones must cost alike.

    Raises:
        InfeasibleError: none fits.
    """
    lanes = {p.name: i for i, p in enumerate(costs.platform.processors)}
    kinds = [[lanes[p.name] for p in members] for members in costs.platform.classes().values()]
    part_s, count = part_costs(costs), costs.operator_s.shape[1]
    # reached[counts, kind][i]: operators before i are done, the last part was on that kind
    reached: dict[tuple[_Counts, int], _Row] = {}
    came: dict[tuple[_Counts, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for counts in sorted(product(*(range(len(k) + 1) for k in kinds)), key=sum):
        if not 1 <= sum(counts) <= max_stages:
            continue
        for kind, members in enumerate(kinds):
            if not counts[kind]:
                continue
            before = tuple(c - (k == kind) for k, c in enumerate(counts))
            entering = _entering(costs, kinds, reached, before, kind)
            whole = entering[:, :, None] + part_s[members[0]][None]
            if objective == "period":
                least = np.stack([reached[before, k] if (before, k) in reached else entering[k] for k in _all(kinds)])
                load = whole - np.where(np.isfinite(least), least, 0.0)[:, :, None]
                whole = np.maximum(load, np.where(np.isfinite(entering), least, np.inf)[:, :, None])
            flat = whole.reshape(-1, count + 1)
            choice = flat.argmin(axis=0)
            reached[counts, kind] = flat.min(axis=0)
            came[counts, kind] = choice // (count + 1), choice % (count + 1)
    ends = {key: row[count] for key, row in reached.items()}
    best = min(ends, key=lambda key: (ends[key], sum(key[0]))) if ends else None
    if best is None or not np.isfinite(ends[best]):
        raise InfeasibleError(
            f"no chain of at most {max_stages} parts, each on a device of its own, fits {costs.platform.name!r}",
            "allow more parts, more devices, or more memory",
        )
    return _chain(costs, kinds, came, best, float(ends[best]))


def _all(kinds: list[list[int]]) -> range:
    return range(len(kinds))


def _entering(
    costs: ChainCosts, kinds: list[list[int]], reached: dict[tuple[_Counts, int], _Row], before: _Counts, kind: int
) -> _Row:
    """Return what was paid when a part on a kind begins at each operator, hand-over included: ``[from kind, i]``."""
    count = costs.operator_s.shape[1]
    found = np.full((len(kinds), count + 1), np.inf)
    if not any(before):
        found[0, 0] = 0.0
        return found
    for source in _all(kinds):
        if (before, source) in reached:
            first = kinds[source][0]
            other = kinds[kind][1] if kind == source else kinds[kind][0]
            found[source, :count] = reached[before, source][:count] + costs.hand_over_s[:, first, other]
    return found


def _chain(
    costs: ChainCosts,
    kinds: list[list[int]],
    came: dict[tuple[_Counts, int], tuple[NDArray[np.int64], NDArray[np.int64]]],
    best: tuple[_Counts, int],
    cost_s: float,
) -> CostedChain:
    """Return the chain that led to a state; devices of a kind are taken in their order."""
    counts, kind = best
    at, cuts, order = costs.operator_s.shape[1], [], []
    while any(counts):
        order.append(kind)
        source, first = (int(table[at]) for table in came[counts, kind])
        counts = tuple(c - (k == kind) for k, c in enumerate(counts))
        at, kind = first, source
        cuts.append(at)
    used = [iter(members) for members in kinds]
    names = [costs.platform.processors[next(used[k])].name for k in reversed(order)]
    return CostedChain(tuple(reversed(cuts[:-1])), tuple(names), cost_s)
