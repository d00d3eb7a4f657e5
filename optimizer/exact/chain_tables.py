"""What a chain of parts has still to pay at least, from any cut on: the dynamic programme behind the search."""

from __future__ import annotations

import numpy as np

from optimizer.exact.chain_costs import ChainCosts, Seconds
from search_spaces.core.platform import Platform


class Lanes:
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


def part_costs(costs: ChainCosts) -> Seconds:
    """Return the cost of operators ``first … last-1`` as one part, ``[P, first, last]``.

    It is infinite where ``last <= first``, and where the part alone is too large for the processor's memory. Sums run
    from ``first`` on, not as differences of running totals, which infinite entries would spoil.
    """
    lanes, count = costs.operator_s.shape
    inside = np.triu(np.ones((count, count), dtype=bool))
    sums = np.cumsum(np.where(inside, costs.operator_s[:, None, :], 0.0), axis=2) + costs.overhead_s[:, None, None]
    table = np.full((lanes, count + 1, count + 1), np.inf)
    table[:, :-1, 1:] = np.where(inside, sums, np.inf)
    if costs.beyond_s is not None:
        table += costs.beyond_s
    if costs.operator_nbytes is not None and costs.memory_bytes is not None:
        total = np.concatenate(([0.0], np.cumsum(costs.operator_nbytes)))
        table[(total[None, :] - total[:, None])[None] > costs.memory_bytes[:, None, None]] = np.inf
    return table


def latency_to_go(
    costs: ChainCosts, lanes: Lanes, part_s: Seconds, max_stages: int, min_stages: int = 1
) -> list[Seconds]:
    """Return, for 0 … ``max_stages - 1`` parts left, what is still to pay after a cut: shape ``(n+1, states)``.

    ``table[left][i, s]``: operators ``i … n-1`` in at most ``left`` parts, hand-over included, after a part in state
    ``s``. At ``n`` nothing is to pay, unless that would be too few parts.
    """
    count = costs.operator_s.shape[1]
    table = [_done(count, len(lanes.of), last=max_stages >= min_stages)]
    for spent in range(max_stages - 1, 0, -1):
        # enter[i, s]: the same, from the start of a part in state s at operator i on
        enter = np.stack(
            [(part_s[lane] + table[-1][:, state]).min(axis=1) for state, lane in enumerate(lanes.of)], axis=1
        )
        left = _done(count, len(lanes.of), last=spent >= min_stages)
        for state, lane in enumerate(lanes.of):
            follow = lanes.after[state]
            hand_over = costs.hand_over_s[:, lane, [lanes.of[f] for f in follow]]
            left[:count, state] = (hand_over + enter[:count, follow]).min(axis=1, initial=np.inf)
        table.append(left)
    return table


def period_to_go(
    costs: ChainCosts, lanes: Lanes, part_s: Seconds, max_stages: int, min_stages: int = 1
) -> list[Seconds]:
    """Return the same for the period: the longest part that is still to come, hand-over included.

    It leaves out that a processor's parts add up, so it is a bound, not the value.
    """
    count = costs.operator_s.shape[1]
    table = [_done(count, len(lanes.of), last=max_stages >= min_stages)]
    for spent in range(max_stages - 1, 0, -1):
        left = _done(count, len(lanes.of), last=spent >= min_stages)
        for lane in set(lanes.of):
            # enter[f]: from the start of a part in state f, which the lane hands over to
            from_here = [s for s, of in enumerate(lanes.of) if of == lane]
            follow = sorted({f for s in from_here for f in lanes.after[s]})
            enter = {
                f: np.maximum(
                    part_s[lanes.of[f], :count] + costs.hand_over_s[:, lane, lanes.of[f]][:, None],
                    table[-1][:, f],
                ).min(axis=1)
                for f in follow
            }
            for state in from_here:
                for f in lanes.after[state]:
                    np.minimum(left[:count, state], enter[f], out=left[:count, state])
        table.append(left)
    return table


def _done(count: int, states: int, *, last: bool) -> Seconds:
    done = np.full((count + 1, states), np.inf)
    done[count] = 0.0 if last else np.inf
    return done
