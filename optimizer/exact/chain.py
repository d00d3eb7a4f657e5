"""The best chains of parts under an additive model of their cost: dynamic programming, exact.

A part costs what its operators take on its processor, plus that processor's overhead; between two parts lies a
hand-over. Parts are costed one after another, as a chain runs. The table of least costs to go is filled from the last
part back; with it as an exact estimate, a best-first search yields the best plans in ascending order and expands
little beyond them.

Lanes that are alike are named in the order of their first use, as in :func:`search_spaces.plan.canonical`, so every
result is a canonical plan and no two are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search_spaces.errors import InfeasibleError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """What the parts of a topological order of n operators cost on a platform of P processors, in platform order.

    Attributes:
        platform: the processors, and which of them are alike. Plans that only swap alike lanes are one plan, costed
            with the lanes that its canonical form names; so alike lanes should have equal costs.
        operator_s: shape ``(P, n)``: each operator on each processor; infinite where a processor refuses it.
        overhead_s: shape ``(P,)``: what starting a part adds.
        hand_over_s: shape ``(n, P, P)``: what a cut before operator ``i`` adds between a part on the one processor
            and the next on the other (``[i, from, to]``); row 0 is not read.

    Raises:
        ValueError: a shape does not fit, or a number is no number.
    """

    platform: Platform
    operator_s: _Seconds
    overhead_s: _Seconds
    hand_over_s: _Seconds

    def __post_init__(self) -> None:
        lanes = len(self.platform.processors)
        count = self.operator_s.shape[-1] if self.operator_s.ndim else 0
        for name, array, shape in (
            ("operator_s", self.operator_s, (lanes, count)),
            ("overhead_s", self.overhead_s, (lanes,)),
            ("hand_over_s", self.hand_over_s, (count, lanes, lanes)),
        ):
            if array.shape != shape:
                raise ValueError(f"{name} has the shape {array.shape}, not {shape}")
            if np.isnan(array).any() or np.isneginf(array).any():
                raise ValueError(f"{name} has an entry that is no number")


@dataclass(frozen=True, slots=True)
class CostedChain:
    """A chain and its cost in the model; ``chain_plan(graph, cuts, processors)`` is its plan, in canonical form.

    Attributes:
        cuts: the operators before which to cut, ascending.
        processors: the processor of each part.
        cost_s: what the model says it takes.
    """

    cuts: tuple[int, ...]
    processors: tuple[str, ...]
    cost_s: float


def best_chains(costs: ChainCosts, max_stages: int, k: int = 1) -> list[CostedChain]:
    """Return the ``k`` cheapest chains of 1 to ``max_stages`` parts, ascending; fewer where there are fewer.

    Equal costs are in order of parts, then cuts, then names. Time: one pass of ``n²`` additions per number of parts
    and state (lane in use, lanes used so far), then about ``k · max_stages · n`` for the plans.

    Raises:
        InfeasibleError: no chain has a finite cost.
        ValueError: ``max_stages`` or ``k`` is less than 1.
    """
    if max_stages < 1 or k < 1:
        raise ValueError(f"at least 1 stage and 1 plan, not {max_stages} and {k}")
    lanes = _Lanes(costs.platform, max_stages)
    part_s = _part_s(costs)
    to_go = _to_go(costs, lanes, part_s, max_stages)
    found = list(_search(costs, lanes, part_s, to_go, k))
    if not found:
        raise InfeasibleError(*_why_none(costs, max_stages))
    return sorted(found, key=lambda c: (c.cost_s, len(c.cuts), c.cuts, c.processors))


def chain_cost(costs: ChainCosts, plan: Plan) -> float:
    """Return the seconds that the model gives a plan of consecutive parts."""
    index = {p.name: i for i, p in enumerate(costs.platform.processors)}
    total, before = 0.0, -1
    for stage in plan.stages:
        lane, operators = index[stage.processor], list(stage.operators)
        total += float(costs.operator_s[lane, operators].sum() + costs.overhead_s[lane])
        if before >= 0:
            total += float(costs.hand_over_s[operators[0], before, lane])
        before = lane
    return total


def lower_bound(graph: Graph, costs: ChainCosts) -> float:
    """Return seconds that no plan goes below in the model, however it cuts, places and overlaps the operators.

    It is the longest path through the graph with each operator on its fastest processor, nothing handed over, and
    the least overhead paid once; overheads and hand-overs must not be negative. For parts that run one after another
    ``best_chains`` gives the tight bound, the optimum; parts of a graph with branches can overlap and beat that.
    """
    fastest = costs.operator_s.min(axis=0)
    ends = np.zeros(len(graph.operators))
    for operator, seconds in enumerate(fastest):
        ends[operator] = seconds + max((ends[p] for p in graph.predecessors(operator)), default=0.0)
    return float(ends.max(initial=0.0) + costs.overhead_s.min())


def _part_s(costs: ChainCosts) -> _Seconds:
    """Return the cost of operators ``first … last-1`` as one part, ``[P, first, last]``; infinite if ``last <= first``.

    Sums run from ``first`` on, not as differences of running totals, which infinite entries would spoil.
    """
    lanes, count = costs.operator_s.shape
    inside = np.triu(np.ones((count, count), dtype=bool))
    sums = np.cumsum(np.where(inside, costs.operator_s[:, None, :], 0.0), axis=2) + costs.overhead_s[:, None, None]
    table = np.full((lanes, count + 1, count + 1), np.inf)
    table[:, :-1, 1:] = np.where(inside, sums, np.inf)
    return table


class _Lanes:
    """The states of a canonical chain of lanes: the lane in use, and how many of each class have been used.

    Attributes:
        of: the processor (index in the platform) of each state.
        after: the states that may follow each state; the last entry is for the start.
    """

    def __init__(self, platform: Platform, max_stages: int) -> None:
        index = {p.name: i for i, p in enumerate(platform.processors)}
        classes = [tuple(index[p.name] for p in group[:max_stages]) for group in platform.classes().values()]
        self.of: list[int] = []
        self.after: list[list[int]] = []
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        used_by: list[tuple[int, ...]] = []

        def followers(used: tuple[int, ...]) -> list[int]:
            states = []
            for which, members in enumerate(classes):
                for place, lane in enumerate(members[: used[which] + 1]):
                    then = tuple(max(u, place + 1) if i == which else u for i, u in enumerate(used))
                    if sum(then) > max_stages:
                        continue
                    if (lane, then) not in numbers:
                        numbers[lane, then] = len(used_by)
                        used_by.append(then)
                        self.of.append(lane)
                    states.append(numbers[lane, then])
            return states

        start = followers(tuple(0 for _ in classes))
        while len(self.after) < len(used_by):
            self.after.append(followers(used_by[len(self.after)]))
        self.after.append(start)


def _to_go(costs: ChainCosts, lanes: _Lanes, part_s: _Seconds, max_stages: int) -> list[_Seconds]:
    """Return, for 0 … ``max_stages - 1`` parts left, what is still to pay after a cut: shape ``(n+1, states)``.

    ``table[left][i, s]``: operators ``i … n-1`` in at most ``left`` parts, hand-over included, after a part in state
    ``s``. Nothing is to pay at ``n``.
    """
    count = costs.operator_s.shape[1]
    states = len(lanes.of)
    done = np.full((count + 1, states), np.inf)
    done[count] = 0.0
    table = [done]
    for _ in range(1, max_stages):
        # enter[i, s]: the same, from the start of a part in state s at operator i on
        enter = np.stack(
            [(part_s[lane] + table[-1][:, state]).min(axis=1) for state, lane in enumerate(lanes.of)], axis=1
        )
        left = done.copy()
        for state, lane in enumerate(lanes.of):
            follow = lanes.after[state]
            hand_over = costs.hand_over_s[:, lane, [lanes.of[f] for f in follow]]
            left[:count, state] = (hand_over + enter[:count, follow]).min(axis=1)
        table.append(left)
    return table


class _Node(NamedTuple):
    """A chain up to a cut; nodes of equal estimate are taken the longest first, so that ties do not spread."""

    estimate_s: float
    parts_left: int
    cuts: tuple[int, ...]
    states: tuple[int, ...]
    spent_s: float


def _search(costs: ChainCosts, lanes: _Lanes, part_s: _Seconds, to_go: list[_Seconds], k: int) -> Iterator[CostedChain]:
    """Yield the ``k`` cheapest chains; at each node only its ``k`` best continuations can matter."""
    count = costs.operator_s.shape[1]
    processors = costs.platform.processors
    heap = [_Node(0.0, len(to_go), (0,), (), 0.0)]
    while heap and k:
        node = heapq.heappop(heap)
        first = node.cuts[-1]
        if first == count:
            yield CostedChain(node.cuts[1:-1], tuple(processors[lanes.of[s]].name for s in node.states), node.spent_s)
            k -= 1
            continue
        follow = lanes.after[node.states[-1] if node.states else -1]
        on = [lanes.of[s] for s in follow]
        spent = node.spent_s + part_s[on, first, :]
        if node.states:
            spent += costs.hand_over_s[first, lanes.of[node.states[-1]], on][:, None]
        estimate = (spent + to_go[node.parts_left - 1][:, follow].T).ravel()
        best = np.argpartition(estimate, k)[:k] if k < estimate.size else np.arange(estimate.size)
        for choice in best[np.isfinite(estimate[best])]:
            which, last = divmod(int(choice), count + 1)
            heapq.heappush(
                heap,
                _Node(
                    float(estimate[choice]),
                    node.parts_left - 1,
                    (*node.cuts, last),
                    (*node.states, follow[which]),
                    float(spent[which, last]),
                ),
            )


def _why_none(costs: ChainCosts, max_stages: int) -> tuple[str, str]:
    refused = np.flatnonzero(~np.isfinite(costs.operator_s).any(axis=0))
    if refused.size:
        return f"operator {int(refused[0])} runs on no processor of {costs.platform.name!r}", "add one that supports it"
    return f"no chain of at most {max_stages} parts runs on {costs.platform.name!r}", "allow more parts"
