"""Branch greedy (NEST-C): places each group of parallel branches by the times of its branches alone.

With no more branches than processors each gets one of its own; with more, all processors but one get a branch each and
the last one the rest. All such choices are tried. A group is run one branch after another where that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts, concurrent_sets
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.branches import BranchGroup

_MOST_ALONE = 12  # longest branches that may get a processor of their own


def branch_greedy(runs: BranchRuns, costs: ChainCosts, main: int) -> list[int]:
    """Return the processor (index in the platform) of each run.

    Args:
        costs: of the operators; a branch on another processor than ``main`` also pays for transfers there and back.
        main: the processor of operators in no group.
    """
    processors = [main] * len(runs.runs)
    for group in runs.groups:
        chosen = _group(runs, group, costs, main)
        for branch, processor in zip(runs.branches(group), chosen, strict=True):
            for run in branch:
                processors[run] = processor
    return processors


def _group(runs: BranchRuns, group: BranchGroup, costs: ChainCosts, main: int) -> tuple[int, ...]:
    """Return the processor of each branch of a group."""
    alone_s = _branch_s(runs, group, costs)
    between = costs.transfer_s[1:].mean(axis=0) if len(costs.transfer_s) > 1 else costs.transfer_s[0]
    best = (main,) * len(alone_s)
    least_s = float(alone_s[:, main].sum())
    for processors in concurrent_sets(costs.platform):
        for chosen in _matchings(alone_s, processors):
            busy_s = dict.fromkeys(chosen, 0.0)
            for branch, processor in enumerate(chosen):
                busy_s[processor] += float(alone_s[branch, processor])
            took_s = max(busy_s[processor] + _stage_s(costs, between, main, processor) for processor in busy_s)
            # A branch on the main processor becomes a stage of its own only where another branch runs elsewhere.
            took_s += 2.0 * float(costs.overhead_s[main]) if set(chosen) != {main} else 0.0
            if took_s < least_s:
                best, least_s = chosen, took_s
    return best


def _branch_s(runs: BranchRuns, group: BranchGroup, costs: ChainCosts) -> NDArray[np.float64]:
    """Return the seconds of each branch on each processor, shape ``(branches, P)``."""
    members = [[o for r in branch for o in runs.runs[r]] for branch in runs.branches(group)]
    return np.array([costs.operator_s[:, operators].sum(axis=1) for operators in members])


def _stage_s(costs: ChainCosts, between: NDArray[np.float64], main: int, processor: int) -> float:
    """Return the seconds that a branch pays for being a stage of its own on a processor."""
    if processor == main:
        return 0.0
    return float(costs.overhead_s[processor] + between[main, processor] + between[processor, main])


def _matchings(alone_s: NDArray[np.float64], processors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the processors of the branches in each combination that the procedure tries."""
    count = len(alone_s)
    if count <= len(processors):
        yield from permutations(processors, count)
        return
    longest = np.argsort(-np.min(alone_s, axis=1), kind="stable")[:_MOST_ALONE].tolist()
    for shared in processors:
        others = [processor for processor in processors if processor != shared]
        for alone in permutations(longest, len(others)):
            chosen = [shared] * count
            for branch, processor in zip(alone, others, strict=True):
                chosen[branch] = processor
            yield tuple(chosen)
