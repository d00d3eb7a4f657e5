"""The sampler ``auto`` for workloads: plans that the simulator finds good, corrected by measurements.

Simulated annealing by predicted values makes a list of good plans that differ. The times of stages correct what
operators take (:mod:`optimizer.samplers.critic`). For each trial annealing goes on by the corrected values, from the
best measured plan and from the best of the list, and the best plan on its way is proposed. Without prices of
operators, the ratio of measured to predicted values corrects the predictions of plans that use the same processors; the
best plan of the list, or within some moves of the best measured plan, is proposed. Proposals depend on the seed and the
earlier trials only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from evaluators.samples import Measurement
from optimizer.samplers.critic import Critic
from optimizer.samplers.study import below
from search_spaces.core.plan import Plan
from search_spaces.spaces.space import NeighbourlySpace, in_space

STEPS = 1500
_KEPT = 200
_WARM, _WARM_LATER, _COLD = 0.1, 0.02, 0.002  # temperatures of annealing, relative to the time
_NEIGHBOURS, _LISTED = 24, 24
_STEPS_LATER = 6  # a trial's annealing has so many times fewer steps than the first

Predict = Callable[[Plan], float]


class WorkloadProposer:
    """Proposes plans of a workload for the sampler ``auto``.

    Args:
        predict: seconds that a plan is predicted to take; infinite for one that cannot run.
        starts: where annealing begins, beside plans at random.
        seed: of the study.
        steps: of the annealing at first, from the best start and from a plan at random.
        critic: learns the times of operators; None if they have no prices.
        fits: whether a plan may be proposed: it keeps all constraints, and no worker measures it.
    """

    def __init__(
        self,
        space: NeighbourlySpace,
        predict: Predict,
        starts: list[Plan],
        seed: int,
        steps: int = STEPS,
        critic: Critic | None = None,
        fits: Callable[[Plan], bool] = lambda _: True,
    ) -> None:
        self._space, self._seed, self._steps = space, seed, steps
        self._critic, self._fits = critic, fits
        self._predict_s = predict
        self._starts = starts
        self._predicted: dict[str, float] = {}
        self._plans: dict[str, Plan] = {}
        self._tried: dict[str, float] = {}
        self._ratios: dict[str, list[float]] = {}
        self._best: Plan | None = None
        self._trials = 0

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Add a trial, in the order of trials."""
        self._trials += 1
        took_s = measurement.median_s / speed if measurement is not None else math.inf
        self._tried[plan.digest] = took_s
        if measurement is None or measurement.stopped == "raced" or not in_space(self._space, plan):
            return
        if self._critic is not None:
            usual = speed * measurement.cold
            self._critic.observe(plan, tuple(s / usual for s in measurement.stage_s))
        if math.isfinite(predicted_s := self._predict(plan)):  # a damaged log may have lost some of the prices
            self._ratios.setdefault(_processors(plan), []).append(math.log(took_s / predicted_s))
        if self._best is None or took_s < self._tried[self._best.digest]:
            self._best = plan

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None if none is known."""
        if not self._plans:
            self._anneal()
        rng = np.random.default_rng([self._seed, 41, self._trials])
        if self._critic is not None and self._best is not None:
            met = self._annealed(self._critic, self._best, rng)
        else:
            among = dict(self._plans)
            if self._trials % 2 and self._best is not None:
                among = self._near(self._best, rng) | among
            met = {digest: (self._corrected(plan), plan) for digest, plan in among.items()}
        left = [found for digest, found in met.items() if digest not in self._tried]
        good = (p for _, p in sorted(left, key=itemgetter(0)) if math.isfinite(self._predict(p)) and self._fits(p))
        return next(good, None)

    def anew(self, seed: int, critic: Critic | None, fits: Callable[[Plan], bool]) -> WorkloadProposer:
        """Return a proposer with the same list that has observed nothing; arguments are those of the class."""
        self.ranking(0)
        found = WorkloadProposer(self._space, self._predict_s, [], seed, self._steps, critic, fits)
        found._plans, found._predicted = self._plans, self._predicted
        return found

    def _annealed(self, critic: Critic, best: Plan, rng: np.random.Generator) -> dict[str, tuple[float, Plan]]:
        """Return digest → (corrected prediction, plan) of the list, and of the plans that annealing visits.

        It begins at the best measured plan, and at the best one by the corrected predictions.
        """
        critic.learn(rng if self._trials % 2 else None)
        left = sorted((p for d, p in self._plans.items() if d not in self._tried), key=self._predict)[:_LISTED]
        found = {plan.digest: (critic.seconds(plan), plan) for plan in (best, *left)}

        def seconds(plan: Plan) -> float:
            if plan.digest not in found:
                found[plan.digest] = critic.seconds(plan), plan
            return found[plan.digest][0]

        _, modelled = min(found.values(), key=lambda met: met[0])
        for plan in (best, modelled):
            self._walk(plan, seconds, self._steps // _STEPS_LATER, _WARM_LATER, rng)
        return found

    def _near(self, plan: Plan, rng: np.random.Generator) -> dict[str, Plan]:
        """Return some plans that are up to three moves away."""
        found: dict[str, Plan] = {}
        for _ in range(_NEIGHBOURS):
            there = plan
            for _ in range(1 + int(rng.integers(3))):
                there = self._space.neighbour(there, rng)
            found.setdefault(there.digest, there)  # not kept: a resumed study never drew them
        return found

    def ranking(self, count: int) -> list[Plan]:
        """Return the plans of the list that are predicted to be best, the best first."""
        if not self._plans:
            self._anneal()
        return sorted(self._plans.values(), key=self._corrected)[:count]

    def _anneal(self) -> None:
        rng = np.random.default_rng([self._seed, 40])

        def seconds(plan: Plan) -> float:
            self._plans.setdefault(plan.digest, plan)
            return self._predict(plan)

        starts = sorted((plan for plan in self._starts if in_space(self._space, plan)), key=seconds)[:1]
        for plan in (*starts, self._space.plan_at(below(self._space.cardinality(), rng))):
            self._walk(plan, seconds, self._steps, _WARM, rng)
        best = sorted(self._plans.values(), key=self._predict)[:_KEPT]
        self._plans = {plan.digest: plan for plan in best}

    def _walk(self, plan: Plan, seconds: Predict, steps: int, warm: float, rng: np.random.Generator) -> None:
        """Anneal from a plan."""
        here, here_s = plan, seconds(plan)
        for step in range(steps):
            heat = warm * (_COLD / warm) ** (step / steps)
            there = self._space.neighbour(here, rng)
            there_s = seconds(there)
            if there_s <= here_s or rng.random() < math.exp((here_s - there_s) / (heat * here_s)):
                here, here_s = there, there_s

    def _predict(self, plan: Plan) -> float:
        if plan.digest not in self._predicted:
            self._predicted[plan.digest] = self._predict_s(plan)
        return self._predicted[plan.digest]

    def _corrected(self, plan: Plan) -> float:
        """Return the prediction times the median of measured / predicted on the same processors, or else of all."""
        ratios = self._ratios.get(_processors(plan)) or [r for each in self._ratios.values() for r in each]
        return self._predict(plan) * (math.exp(float(np.median(ratios))) if ratios else 1.0)


def _processors(plan: Plan) -> str:
    """Return which processors a plan uses, and whether it has ranks, as one word."""
    return "+".join([*sorted({stage.processor for stage in plan.stages}), *(["Tucker"] if plan.ranks else [])])
