"""The best chains of stages under an additive cost model: dynamic programming and best-first search, exact.

A stage costs what its operators take on its processor, plus that processor's overhead; between two stages lies a
transfer. The objective is the latency, the sum over the stages as they run one after another, or the period of a
pipeline, the load of its busiest processor. Dynamic programming from the last stage back gives the least remaining
cost; with it as the estimate, best-first search yields the best plans in ascending order and expands little beyond
them. For the latency without limits the estimate is exact. The memory of a processor, and the load of one with several
stages, are known along the path only; there the estimate is a bound, and the search is still exact.

Processors that are alike are named in the order of their first use, as in :func:`search_spaces.core.plan.canonical`, so
every result is a canonical plan and no two are the same.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, ChainObjective, CostedChain, Seconds, exclusive_groups
from optimizer.exact.chain_tables import ChainStates, latency_to_go, part_costs, period_to_go
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError, UnavailableError

_MOST_TRIED = 64  # stages; no larger number is suggested
_MOST_TIMES = 2.0**40
_ROUNDING = 1e-9  # costs that differ by less, relative, are the same
_LOOK = 256  # chains taken between two checks of the time
_FIT = 1e-3  # relative precision of the missing memory


def best_chains(
    costs: ChainCosts,
    max_stages: int,
    k: int = 1,
    *,
    objective: ChainObjective = "latency",
    min_stages: int = 1,
    stop_s: float = math.inf,
    once: bool = False,
) -> list[CostedChain]:
    """Return the ``k`` cheapest chains of ``min_stages`` to ``max_stages`` stages, ascending; all if there are fewer.

    Equal costs are ordered by stages, then cuts, then names; the latency decides which of them are among the ``k``. The
    first one has the fewest stages of all with the same cost up to rounding.

    Time for the latency without limits of memory: one pass
    of ``n²`` additions per number of stages and state (processor in use, processors used so far), then about
    ``k · max_stages · n`` for the plans.

    Args:
        stop_s: the monotonic time at which to give up: the period, limits of memory, and many kinds of boards in a row
            can make the search long.
        once: whether each stage must be on a processor of its own, as in a row of boards.

    Raises:
        InfeasibleError: no chain has a finite cost and fits into the memory.
        UnavailableError: the time is up; the message holds the lower bound.
        ValueError: ``max_stages``, ``min_stages`` or ``k`` is less than 1, or ``min_stages`` more than ``max_stages``.
    """
    how: dict[str, Any] = {"objective": objective, "min_stages": min_stages, "stop_s": stop_s, "once": once}
    found = chains_in_order(costs, max_stages, k, **how)
    ordered = sorted(found, key=lambda c: (c.cost_s, len(c.cuts), c.cuts, c.processors))
    first = _fewest_parts(costs, ordered[0], **how)
    return [first, *(chain for chain in ordered if chain != first)][:k]


def chains_in_order(
    costs: ChainCosts,
    max_stages: int,
    k: int,
    *,
    objective: ChainObjective = "latency",
    min_stages: int = 1,
    stop_s: float = math.inf,
    once: bool = False,
) -> Iterator[CostedChain]:
    """Yield the chains of :func:`best_chains` as soon as each is proven to be the next; equal costs come in any order.

    Raises:
        InfeasibleError, UnavailableError, ValueError: as :func:`best_chains`.
    """
    if max_stages < 1 or k < 1:
        raise ValueError(f"at least 1 stage and 1 plan, not {max_stages} and {k}")
    if not 1 <= min_stages <= max_stages:
        raise ValueError(f"at least {min_stages} stages and at most {max_stages}")
    found = False
    for chain in _Search(costs, max_stages, objective, min_stages, stop_s, once=once).chains(k):
        found = True
        yield chain
    if not found:
        raise _why_none(costs, min_stages, max_stages, once=once)


def _fewest_parts(
    costs: ChainCosts, best: CostedChain, objective: ChainObjective, min_stages: int, stop_s: float, *, once: bool
) -> CostedChain:
    """Return a chain with the fewest stages among those that cost what the best one costs; ``best`` when time is up."""
    enough_s = best.cost_s * (1.0 + _ROUNDING)
    low, high = min_stages, len(best.cuts) + 1
    while low < high and time.monotonic() < stop_s:
        middle = (low + high) // 2
        try:
            chain = next(_Search(costs, middle, objective, min_stages, stop_s, once=once).chains(1), None)
        except UnavailableError:  # time is up
            return best
        if chain is not None and chain.cost_s <= enough_s:
            best, high = chain, len(chain.cuts) + 1
        else:
            low = middle + 1
    return best


class _Node(NamedTuple):
    """A chain up to a cut; of nodes with equal estimates the longest is expanded first, so that ties do not spread.

    Attributes:
        estimate_s: lower bound of all chains that begin like this.
        latency_s: lower bound of their latency; it orders chains of equal period.
        used: the load of each exclusive group of processors (for the period only), the cost of all stages together, and
            the bytes kept by each processor where memory is limited.
        siblings, rank: all continuations of the parent, best first, and the index of this one.
    """

    estimate_s: float
    latency_s: float
    parts_left: int
    cuts: tuple[int, ...]
    states: tuple[int, ...]
    used: tuple[float, ...]
    siblings: _Siblings
    rank: int


class _Siblings(NamedTuple):
    """The continuations of a node by one stage: (state, last) by ascending estimate, and their costs."""

    parent: _Node | None
    follow: list[int]
    order: NDArray[np.int64]
    estimate_s: Seconds
    latency_s: Seconds
    cost_s: Seconds


class _Search:
    """Best-first search over chains, from the first stage on."""

    def __init__(
        self,
        costs: ChainCosts,
        max_stages: int,
        objective: ChainObjective = "latency",
        min_stages: int = 1,
        stop_s: float = math.inf,
        *,
        once: bool = False,
    ) -> None:
        self._costs, self._stop_s = costs, stop_s
        tables_s = stop_s if once else math.inf  # of a row of boards, which may be of many kinds
        self._processors = ChainStates(costs.platform, max_stages, once=once, stop_s=tables_s)
        self._part_s = part_costs(costs)
        self._sum_to_go = latency_to_go(costs, self._processors, self._part_s, max_stages, min_stages)
        every = tuple(range(len(costs.platform.processors)))
        groups: list[tuple[int, ...]] = []
        if objective == "period":
            self._most_to_go = period_to_go(costs, self._processors, self._part_s, max_stages, min_stages)
            groups = exclusive_groups(costs.platform)
        self._groups = len(groups)
        # The sums that a stage on each processor adds to: the load of its groups, and last the sum over all stages.
        self._sums = [
            [*(g for g, members in enumerate(groups) if processor in members), self._groups] for processor in every
        ]
        if costs.operator_nbytes is not None and costs.memory_bytes is not None:
            self._nbytes: Seconds | None = np.concatenate(([0.0], np.cumsum(costs.operator_nbytes)))
            self._memory: Seconds = costs.memory_bytes
        else:
            self._nbytes = None
        self._width = self._groups + 1 + (len(every) if self._nbytes is not None else 0)

    def chains(self, k: int) -> Iterator[CostedChain]:
        """Yield the ``k`` cheapest chains, about in order."""
        count = self._costs.operator_s.shape[1]
        processors = self._costs.platform.processors
        heap: list[_Node] = []
        self._push(heap, self._continue(None, 0, (0.0,) * self._width, len(self._sum_to_go)), 0)
        seen: dict[tuple[int, int, int], list[tuple[float, ...]]] = {}
        left, taken = k, 0
        while heap and left:
            node = heapq.heappop(heap)
            taken += 1
            if taken % _LOOK == 0 and time.monotonic() > self._stop_s:
                raise UnavailableError(
                    f"no chain was proven the best in time; none takes less than {node.estimate_s * 1e3:.6g} ms",
                    "give a longer --time-limit",
                )
            self._push(heap, node.siblings, node.rank + 1)
            first = node.cuts[-1]
            if first == count:
                names = tuple(processors[self._processors.of[s]].name for s in node.states)
                cost_s = max(node.used[: self._groups]) if self._groups else node.used[0]
                yield CostedChain(node.cuts[1:-1], names, cost_s)
                left -= 1
                continue
            # Chains that k others match or beat here cannot be among the k best.
            better = seen.setdefault((first, node.states[-1], node.parts_left), [])
            if sum(all(a <= b for a, b in zip(other, node.used, strict=True)) for other in better) >= k:
                continue
            better.append(node.used)
            self._push(heap, self._continue(node, first, node.used, node.parts_left), 0)

    def _continue(self, node: _Node | None, first: int, used: tuple[float, ...], parts_left: int) -> _Siblings:
        """Return the continuations: the next stage in each state, up to each operator."""
        processors, before = self._processors, self._processors.of[node.states[-1]] if node else -1
        if parts_left == 0:
            return _Siblings(node, [], np.empty(0, dtype=np.int64), np.empty(0), np.empty(0), np.empty((0, 0)))
        follow = processors.after[node.states[-1] if node else -1]
        on = [processors.of[s] for s in follow]
        cost = self._part_s[on, first, :]
        if node is not None:
            cost = cost + self._costs.transfer_s[first, before, on][:, None]
        if self._nbytes is not None:
            kept = self._nbytes - self._nbytes[first]
            room = self._memory[on] - np.array([used[self._groups + 1 + processor] for processor in on])
            cost = np.where(kept[None, :] > room[:, None], np.inf, cost)
        latency = used[self._groups] + cost + self._sum_to_go[parts_left - 1][:, follow].T
        estimate = latency
        if self._groups:
            load = np.array([max(used[g] for g in self._sums[processor][:-1]) for processor in on])[:, None] + cost
            most = np.maximum(self._most_to_go[parts_left - 1][:, follow].T, max(used[: self._groups]))
            estimate = np.maximum(np.maximum(load, most), latency / self._groups)  # the busiest is above the mean
        estimate, latency = estimate.ravel(), latency.ravel()
        order = np.lexsort((latency, estimate)) if self._groups else np.argsort(estimate, kind="stable")
        return _Siblings(node, follow, order[: int(np.isfinite(estimate).sum())], estimate, latency, cost)

    def _push(self, heap: list[_Node], siblings: _Siblings, rank: int) -> None:
        """Push continuation number ``rank`` of a node, if there is one: the others wait until it is taken."""
        if rank >= len(siblings.order):
            return
        choice = int(siblings.order[rank])
        which, last = divmod(choice, siblings.cost_s.shape[1])
        parent, state = siblings.parent, siblings.follow[which]
        processor = self._processors.of[state]
        used = list(parent.used) if parent else [0.0] * self._width
        for group in self._sums[processor]:
            used[group] += float(siblings.cost_s[which, last])
        first = parent.cuts[-1] if parent else 0
        if self._nbytes is not None:
            used[self._groups + 1 + processor] += float(self._nbytes[last] - self._nbytes[first])
        heapq.heappush(
            heap,
            _Node(
                float(siblings.estimate_s[choice]),
                float(siblings.latency_s[choice]),
                (parent.parts_left if parent else len(self._sum_to_go)) - 1,
                (*(parent.cuts if parent else (0,)), last),
                (*(parent.states if parent else ()), state),
                tuple(used),
                siblings,
                rank,
            ),
        )


def _why_none(costs: ChainCosts, min_stages: int, max_stages: int, *, once: bool) -> InfeasibleError:
    """Return the error that names the reason: support, number of stages, or memory."""
    name, count = costs.platform.name, costs.operator_s.shape[1]
    refused = np.flatnonzero(~np.isfinite(costs.operator_s).any(axis=0))
    if refused.size:
        return InfeasibleError(
            f"operator {int(refused[0])} is supported on no processor of {name!r}", "add one that supports it"
        )
    if min_stages > count:
        lever = f"allow {count} stages"
        return infeasible(Violation(f"stages of a chain of {count} operators", min_stages, count, "stages", lever))
    if once:
        what = f"no chain of at most {max_stages} stages, each on a device of its own, fits {name!r}"
        return InfeasibleError(what, "allow more stages, more devices, or more memory")
    most = min(count, _MOST_TRIED)
    if _feasible(costs, min_stages, most):
        low, high = max_stages, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _feasible(costs, min_stages, middle) else (middle, high)
        statement = f"stages of a chain that runs on {name!r}"
        return infeasible(Violation(statement, high, max_stages, "stages", f"allow {high} stages"))
    if costs.memory_bytes is None or not _feasible(replace(costs, memory_bytes=None), min_stages, max_stages):
        return InfeasibleError(f"no chain of at most {max_stages} stages runs on {name!r}", "allow more stages")
    return infeasible(_too_large(costs, min_stages, max_stages))


def _too_large(costs: ChainCosts, min_stages: int, max_stages: int) -> Violation:
    """Return the missing memory, where all processors have more of it by the same factor."""
    total = float(costs.memory_bytes.sum()) if costs.memory_bytes is not None else 0.0
    statement = f"memory of the processors of {costs.platform.name!r} together, shared as it is"
    low, high = 1.0, 2.0
    while not _feasible(_scaled(costs, high), min_stages, max_stages):
        low, high = high, 2.0 * high
        if high > _MOST_TIMES:  # no factor helps a processor with 0 bytes
            demand = float(costs.operator_nbytes.sum()) if costs.operator_nbytes is not None else 0.0
            return Violation(
                statement, demand, min(total, demand), "B", "give each processor that is needed some memory"
            )
    while high - low > _FIT * low:
        middle = (low + high) / 2.0
        low, high = (low, middle) if _feasible(_scaled(costs, middle), min_stages, max_stages) else (middle, high)
    lever = f"give every processor {high:.3f} times the memory, or choose a smaller model"
    return Violation(statement, total * high, total, "B", lever)


def _scaled(costs: ChainCosts, factor: float) -> ChainCosts:
    return replace(costs, memory_bytes=None if costs.memory_bytes is None else costs.memory_bytes * factor)


def _feasible(costs: ChainCosts, min_stages: int, max_stages: int) -> bool:
    return next(_Search(costs, max_stages, min_stages=min_stages).chains(1), None) is not None
