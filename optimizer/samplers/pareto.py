"""The sampler ``auto`` for several objectives: members of the model's front, which measurements correct.

The front is that of all chains in the additive model, exact (:mod:`optimizer.exact.front`). Measured stages correct the
model; the front is computed again every few trials. Of its members that were not tried, the one farthest from all that
were is proposed, so that the whole front is covered early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.front import Criterion, pareto_chains
from optimizer.samplers.auto import Problem
from optimizer.samplers.objective import ChainProposer, corrected
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import chain_plan

_BLOCK = 8
Criteria = Callable[[ChainCosts], Sequence[Criterion]]


class ParetoProposer(ChainProposer):
    """Proposes plans for the front of several objectives.

    Args:
        problem: its model is that of the latency.
        criteria: makes the objectives from costs.
        seconds: returns the unit of stages per second on a processor, by its name: 1 where stages are in seconds.
    """

    def __init__(self, problem: Problem, seed: int, criteria: Criteria, seconds: Callable[[str], float]) -> None:
        super().__init__(problem, seed, seconds)
        self._criteria = criteria
        self._front: list[tuple[Plan, tuple[float, ...]]] = []
        self._block = -1

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        if self._block < 0 or self._trials >= self._block + _BLOCK:
            self._block = self._trials
            self._front = self._members()
        known = np.array([values for plan, values in self._front if plan.digest in self._tried])
        left = [(p, v) for p, v in self._front if p.digest not in self._tried and self._problem.fits(p)]
        if not left:
            return None
        values = np.array([v for _, v in left])
        return left[_farthest(values, known)][0]

    def _members(self) -> list[tuple[Plan, tuple[float, ...]]]:
        # The uncorrected model first, then alternately the posterior's mean and a draw.
        costs = self._problem.model
        if self._correction.plans:
            costs = corrected(costs, self._draws(), (self._block // _BLOCK) % 2)
        try:
            chains = pareto_chains(self._criteria(costs), costs.platform, self._most)
        except (InfeasibleError, UnavailableError):
            return []
        return [(chain_plan(self._problem.graph, c.cuts, c.processors), c.values) for c in chains]


def _farthest(values: NDArray[np.float64], known: NDArray[np.float64]) -> int:
    """Return the row farthest from all known ones, ranges scaled to 1; if none is known, the first objective's best."""
    if not len(known):
        return int(values[:, 0].argmin())
    both = np.concatenate((values, known))
    reach = np.where(both.max(axis=0) > both.min(axis=0), both.max(axis=0) - both.min(axis=0), 1.0)
    gaps = np.abs((values[:, None] - known[None]) / reach).max(axis=2).min(axis=1)
    return int(gaps.argmax())
