"""The least remaining cost of a chain from any cut on, by dynamic programming."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from evaluators.cost_model.plans import consecutive_s
from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.spaces.processor_words import following


class ChainStates:
    """The states of a canonical chain of processors: the processor in use, and how many of each class have been used.

    Args:
        once: whether each stage is on a processor of its own.
        stop_s: the monotonic time at which to give up: many kinds of many processors have many states.

    Attributes:
        of: the processor (index in the platform) of each state.
        after: the states that may follow each state; the last entry is for the start.

    Raises:
        UnavailableError: the time is up.
    """

    def __init__(self, platform: Platform, max_stages: int, *, once: bool = False, stop_s: float = math.inf) -> None:
        self._stop_s = stop_s
        index = {p.name: i for i, p in enumerate(platform.processors)}
        classes = [tuple(index[p.name] for p in group[:max_stages]) for group in platform.classes().values()]
        sizes = tuple(len(members) for members in classes)
        self.of: list[int] = []
        self.after: list[list[int]] = []
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        used_by: list[tuple[int, ...]] = []

        def followers(used: tuple[int, ...]) -> list[int]:
            states = []
            for which, place, then in following(used, sizes):
                state = classes[which][place], then
                if sum(then) <= max_stages and (then != used or not once):
                    if state not in numbers:
                        numbers[state] = len(used_by)
                        used_by.append(then)
                        self.of.append(state[0])
                    states.append(numbers[state])
            return states

        start = followers(tuple(0 for _ in classes))
        while len(self.after) < len(used_by):
            self.check_time()
            self.after.append(followers(used_by[len(self.after)]))
        self.after.append(start)

    def check_time(self) -> None:
        """Raise where the time is up."""
        if time.monotonic() > self._stop_s:
            hint = "give a longer --time-limit, or a smaller max_stages"
            raise UnavailableError("the best chain was not found in time", hint)


class Edges:
    """The edges between two runs of operators, counted by sums over all pairs of operators.

    Attributes:
        in_turn: whether every operator reads the one before it alone, so that stages run one after another.
    """

    def __init__(self, graph: Graph) -> None:
        count = len(graph.operators)
        found = np.zeros((count + 1, count + 1), dtype=np.int64)
        for operator in range(count):
            for before in graph.predecessors(operator):
                found[before + 1, operator + 1] = 1
        self._sums = found.cumsum(axis=0).cumsum(axis=1)
        self.in_turn = all(graph.predecessors(o) == {o - 1} for o in range(1, count))

    def between(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        """Return how many edges lead from operators ``a … b-1`` to operators ``c … d-1``; of arrays as an array."""
        sums = self._sums
        return sums[b, d] - sums[a, d] - sums[b, c] + sums[a, c]


def part_costs(costs: ChainCosts) -> Seconds:
    """Return the cost of operators ``first … last-1`` as one stage, ``[P, first, last]``.

    It is infinite where ``last <= first``, and where the stage alone is too large for the processor's memory.
    """
    table = consecutive_s(costs.operator_s) + costs.overhead_s[:, None, None]
    if costs.beyond_s is not None:
        table += costs.beyond_s
    if costs.operator_nbytes is not None and costs.memory_bytes is not None:
        total = np.concatenate(([0.0], np.cumsum(costs.operator_nbytes)))
        table[(total[None, :] - total[:, None])[None] > costs.memory_bytes[:, None, None]] = np.inf
    return table


def latency_to_go(
    costs: ChainCosts, processors: ChainStates, part_s: Seconds, max_stages: int, min_stages: int = 1
) -> list[Seconds]:
    """Return the remaining cost after a cut for 0 … ``max_stages - 1`` stages left: shape ``(n+1, states)``.

    ``table[left][i, s]``: operators ``i … n-1`` in at most ``left`` stages, transfer included, after a stage in state
    ``s``. At ``n`` it is 0, unless there are too few stages.
    """
    count = costs.operator_s.shape[1]
    table = [_done(count, len(processors.of), last=max_stages >= min_stages)]
    for spent in range(max_stages - 1, 0, -1):
        processors.check_time()
        # enter[i, s]: the same, from the start of a stage in state s at operator i on
        enter = np.stack(
            [(part_s[processor] + table[-1][:, state]).min(axis=1) for state, processor in enumerate(processors.of)],
            axis=1,
        )
        left = _done(count, len(processors.of), last=spent >= min_stages)
        for state, processor in enumerate(processors.of):
            follow = processors.after[state]
            transfer = costs.transfer_s[:, processor, [processors.of[f] for f in follow]]
            left[:count, state] = (transfer + enter[:count, follow]).min(axis=1, initial=np.inf)
        table.append(left)
    return table


def period_to_go(
    costs: ChainCosts, processors: ChainStates, part_s: Seconds, max_stages: int, min_stages: int = 1
) -> list[Seconds]:
    """Return the same for the period: the longest stage that is still to come, transfer included.

    Stages of one processor are not added up, so it is a bound.
    """
    count = costs.operator_s.shape[1]
    table = [_done(count, len(processors.of), last=max_stages >= min_stages)]
    for spent in range(max_stages - 1, 0, -1):
        left = _done(count, len(processors.of), last=spent >= min_stages)
        for processor in set(processors.of):
            processors.check_time()
            # enter[f]: from the start of a stage in state f, which the processor transfers to
            from_here = [s for s, of in enumerate(processors.of) if of == processor]
            follow = sorted({f for s in from_here for f in processors.after[s]})
            enter = {
                f: np.maximum(
                    part_s[processors.of[f], :count] + costs.transfer_s[:, processor, processors.of[f]][:, None],
                    table[-1][:, f],
                ).min(axis=1)
                for f in follow
            }
            for state in from_here:
                for f in processors.after[state]:
                    np.minimum(left[:count, state], enter[f], out=left[:count, state])
        table.append(left)
    return table


def _done(count: int, states: int, *, last: bool) -> Seconds:
    done = np.full((count + 1, states), np.inf)
    done[count] = 0.0 if last else np.inf
    return done
