"""The best chain with at most one stage on each device: a row of boards.

Exact by dynamic programming over the operators, how many devices of each kind are in use, and the kind in use: with
k kinds of c devices each, ``k² (c+1)^k n²`` steps, whichever the objective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, ChainObjective, CostedChain
from optimizer.exact.chain_tables import part_costs
from search_spaces.core.errors import InfeasibleError, UnavailableError

_Counts = tuple[int, ...]
_State = tuple[_Counts, int]  # devices in use of each kind, and the kind of the last stage
_Row = NDArray[np.float64]
_Came = tuple[NDArray[np.int64], NDArray[np.int64]]


def best_pipeline(
    costs: ChainCosts, max_stages: int, objective: ChainObjective = "latency", *, stop_s: float = math.inf
) -> CostedChain:
    """Return the cheapest chain of at most ``max_stages`` stages, no two of them on one device.

    Devices must not exclude each other, and alike ones must cost alike.

    Args:
        stop_s: the monotonic time at which to give up: many kinds of many devices take long.

    Raises:
        InfeasibleError: none fits.
        UnavailableError: the time is up.
    """
    processors = {p.name: i for i, p in enumerate(costs.platform.processors)}
    kinds = [[processors[p.name] for p in members] for members in costs.platform.classes().values()]
    part_s, count = part_costs(costs), costs.operator_s.shape[1]
    # reached[counts, kind][i]: the least cost of operators before i, the last stage being on that kind
    reached: dict[_State, _Row] = {}
    came: dict[_State, _Came] = {}
    for counts in _in_use([len(members) for members in kinds], min(max_stages, count)):
        if time.monotonic() > stop_s:
            raise UnavailableError(
                "the best chain was not found in time", "give a longer --time-limit, or a smaller max_stages"
            )
        for kind, members in enumerate(kinds):
            if not counts[kind]:
                continue
            before = tuple(c - (k == kind) for k, c in enumerate(counts))
            spent, entered = _entering(costs, kinds, reached, before, kind)
            load = entered[:, :, None] + part_s[members[0]][None]  # of the new part: [from kind, first, last]
            whole = np.maximum(spent[:, :, None], load) if objective == "period" else spent[:, :, None] + load
            flat = whole.reshape(-1, count + 1)
            choice = flat.argmin(axis=0)
            reached[counts, kind] = flat.min(axis=0)
            came[counts, kind] = choice // (count + 1), choice % (count + 1)
    ends = {state: row[count] for state, row in reached.items()}
    best = min(ends, key=lambda state: (ends[state], sum(state[0])))
    if not np.isfinite(ends[best]):
        raise InfeasibleError(
            f"no chain of at most {max_stages} stages, each on a device of its own, fits {costs.platform.name!r}",
            "allow more stages, more devices, or more memory",
        )
    return _chain(costs, kinds, came, best, float(ends[best]))


def _in_use(sizes: list[int], most: int) -> Iterator[_Counts]:
    """Yield how many devices of each kind may be in use, one at least and ``most`` in all, the fewest first."""

    def of(kinds: list[int], total: int) -> Iterator[_Counts]:
        if not kinds:
            if not total:
                yield ()
            return
        for used in range(max(0, total - sum(kinds[1:])), min(kinds[0], total) + 1):
            for rest in of(kinds[1:], total - used):
                yield (used, *rest)

    for total in range(1, min(most, sum(sizes)) + 1):
        yield from of(sizes, total)


def _entering(
    costs: ChainCosts, kinds: list[list[int]], reached: dict[_State, _Row], before: _Counts, kind: int
) -> tuple[_Row, _Row]:
    """Return the costs before a stage that begins at each operator, by the kind of the stage before it.

    Returns:
        The costs of the stages before it, and the transfers to it; both ``[from kind, operator]``, and infinite where
        no stage can begin.
    """
    count = costs.operator_s.shape[1]
    spent, entered = np.full((2, len(kinds), count + 1), np.inf)
    if not any(before):
        spent[0, 0] = entered[0, 0] = 0.0
        return spent, entered
    for source, members in enumerate(kinds):
        if (before, source) in reached:
            spent[source] = reached[before, source]
            entered[source, :count] = costs.transfer_s[:, members[0], kinds[kind][1 if kind == source else 0]]
    return spent, entered


def _chain(
    costs: ChainCosts, kinds: list[list[int]], came: dict[_State, _Came], best: _State, cost_s: float
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
