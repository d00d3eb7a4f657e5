"""The sampler ``auto`` for several objectives: members of the model's front, which measurements correct.

The front is that of all chains in the additive model, exact (:mod:`optimizer.exact.front`). Measured stages correct the
model; the front is computed again every few trials. Of its members that were not tried, the one farthest from all that
were is proposed, so that the whole front is covered early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from evaluators.samples import Measurement
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.front import Criterion, FrontChain, pareto_chains
from optimizer.samplers.auto import Problem
from optimizer.samplers.correction import Correction
from optimizer.samplers.objective import corrected
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace, chain_plan

_BLOCK = 8
Criteria = Callable[[ChainCosts], Sequence[Criterion]]


class ParetoProposer:
    """Proposes plans for the front of several objectives.

    Args:
        problem: its model is that of the latency.
        criteria: makes the objectives from costs.
        seconds: returns the unit of stages per second on a processor, by its name: 1 where stages are in seconds.
    """

    def __init__(self, problem: Problem, seed: int, criteria: Criteria, seconds: Callable[[str], float]) -> None:
        self._problem, self._seed, self._criteria, self._seconds = problem, seed, criteria, seconds
        self._correction = Correction(problem.model)
        self._tried: dict[str, Plan] = {}
        self._trials = 0
        space = problem.space
        self._most = space.max_stages if isinstance(space, ChainSpace) else len(problem.graph.operators)
        self._front: list[tuple[Plan, tuple[float, ...]]] = []
        self._block = -1

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials."""
        self._trials += 1
        self._tried[plan.digest] = plan
        if measurement is None or min(measurement.stage_s, default=0.0) <= 0.0:
            return
        usual = speed * measurement.cold
        pairs = zip(measurement.stage_s, plan.stages, strict=True)
        self._correction.observe(plan.stages, tuple(s / usual / self._seconds(p.processor) for s, p in pairs))
        plans = self._correction.plans
        self._correction.choose(1 << (plans.bit_length() - 1))

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
        rng = np.random.default_rng([self._seed, self._trials])
        draws = self._correction.draw(1, rng)
        # The uncorrected model first, then alternately the posterior's mean and a draw.
        which = 0 if not self._correction.plans else (self._block // _BLOCK) % 2
        costs = self._problem.model if not self._correction.plans else corrected(self._problem.model, draws, which)
        try:
            chains = pareto_chains(self._criteria(costs), costs.platform, self._most)
        except (InfeasibleError, UnavailableError):
            return []
        return [(self._plan(chain), chain.values) for chain in chains]

    def _plan(self, chain: FrontChain) -> Plan:
        return chain_plan(self._problem.graph, chain.cuts, chain.processors)


def _farthest(values: NDArray[np.float64], known: NDArray[np.float64]) -> int:
    """Return the row farthest from all known ones, ranges scaled to 1; if none is known, the first objective's best."""
    if not len(known):
        return int(values[:, 0].argmin())
    both = np.concatenate((values, known))
    reach = np.where(both.max(axis=0) > both.min(axis=0), both.max(axis=0) - both.min(axis=0), 1.0)
    gaps = np.abs((values[:, None] - known[None]) / reach).max(axis=2).min(axis=1)
    return int(gaps.argmax())
