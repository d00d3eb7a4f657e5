"""The sampler ``auto`` for objectives other than the latency: optima of the corrected model, drawn from its posterior.

Measured stages, in the objective's unit, correct the additive model (:mod:`~optimizer.samplers.correction`). The best
chain that was not tried is proposed, alternately under the posterior's mean and under a draw (Thompson sampling).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from evaluators.samples import Measurement
from optimizer.exact.chain import chains_in_order
from optimizer.exact.chain_costs import ChainCosts, ChainObjective
from optimizer.samplers.auto import Problem
from optimizer.samplers.correction import Correction
from optimizer.samplers.draws import Draws
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.plan import Plan
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.space import in_space

_LOOKED, _LOOK_S = 400, 1.0


class ChainProposer:
    """The additive model of chains, corrected by measured stages: the base of proposers for other objectives.

    Args:
        problem: with the costs to correct.
        unit: of the measured stages of a processor, per unit of the costs.
    """

    def __init__(self, problem: Problem, seed: int, unit: Callable[[str], float] = lambda _: 1.0) -> None:
        self._problem, self._seed, self._unit = problem, seed, unit
        self._correction = Correction(problem.model)
        self._tried: set[str] = set()
        self._trials = 0
        space = problem.space
        self._most = space.max_stages if isinstance(space, ChainSpace) else len(problem.graph.operators)

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Record a trial, in the order of trials."""
        self._trials += 1
        self._tried.add(plan.digest)
        if measurement is None or min(measurement.stage_s, default=0.0) <= 0.0:
            return
        usual = speed * measurement.cold
        pairs = zip(measurement.stage_s, plan.stages, strict=True)
        self._correction.observe(plan.stages, tuple(s / usual / self._unit(p.processor) for s, p in pairs))
        plans = self._correction.plans
        self._correction.choose(1 << (plans.bit_length() - 1))

    def _draws(self) -> Draws:
        """Return the posterior's mean and a draw."""
        return self._correction.draw(1, np.random.default_rng([self._seed, self._trials]))


class ObjectiveProposer(ChainProposer):
    """Proposes chains for one objective.

    Args:
        problem: its model is in the objective's unit.
        objective: how the stages of a plan add up.
    """

    def __init__(self, problem: Problem, seed: int, objective: ChainObjective) -> None:
        super().__init__(problem, seed)
        self._objective = objective

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None where there is none."""
        costs = corrected(self._problem.model, self._draws(), self._trials % 2, idle=self._objective == "latency")
        stop_s = time.monotonic() + _LOOK_S
        try:
            for chain in chains_in_order(costs, self._most, _LOOKED, objective=self._objective, stop_s=stop_s):
                plan = chain.plan(self._problem.graph)
                # A space of split operators contains fewer chains.
                if plan.digest not in self._tried and self._problem.fits(plan) and in_space(self._problem.space, plan):
                    return plan
        except (UnavailableError, InfeasibleError):
            return None
        return None


def corrected(model: ChainCosts, draws: Draws, which: int, *, idle: bool = True) -> ChainCosts:
    """Return a draw as costs; a stage's first operator does not pay ``together_s``, which is subtracted there."""
    together = draws.together_s[which]
    beyond = np.zeros((*together.shape[:1], together.shape[1] + 1, together.shape[1] + 1))
    beyond[:, :-1, :] = -together[:, :, None]
    transfer = draws.entering_s[which] + (draws.transfer_s[which] if idle else 0.0)
    return replace(
        model,
        operator_s=draws.operator_s[which] + together,
        overhead_s=draws.overhead_s[which],
        transfer_s=transfer,
        beyond_s=beyond,
    )
