"""The sampler ``auto`` for workloads: plans that the simulator finds good, corrected by what was measured.

Simulated annealing by predicted values makes a list of good plans that differ; of these, and of what lies some moves
away from the best measured plan, the best is proposed. The times of stages correct what operators take
(:mod:`optimizer.samplers.critic`); where nothing is known of operators, what was measured over what was predicted
corrects the predictions of plans that use the same lanes. All follows from the seed and the earlier trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from evaluators.samples import Measurement
from optimizer.samplers.critic import Critic
from optimizer.samplers.study import below
from optimizer.study.loop import in_space
from search_spaces.core.plan import Plan
from search_spaces.spaces.space import NeighbourlySpace

STEPS = 220
_STARTS, _KEPT = 4, 200
_WARM, _COLD = 0.1, 0.002
_NEIGHBOURS, _GENERATIONS, _LISTED = 24, 6, 24

Predict = Callable[[Plan], float]


class WorkloadProposer:
    """See the module, and :class:`~optimizer.samplers.auto.Proposer`.

    Args:
        predict: seconds that a plan is predicted to take; infinite for one that cannot be.
        starts: where annealing begins, beside plans at random.
        seed: of the study.
        steps: of the annealing, from each start.
        critic: learns what operators take; None where nothing is known of them.
    """

    def __init__(
        self,
        space: NeighbourlySpace,
        predict: Predict,
        starts: list[Plan],
        seed: int,
        steps: int = STEPS,
        critic: Critic | None = None,
    ) -> None:
        self._space, self._seed, self._steps = space, seed, steps
        self._critic = critic
        self._predict_s = predict
        self._starts = starts
        self._predicted: dict[str, float] = {}
        self._plans: dict[str, Plan] = {}
        self._tried: dict[str, float] = {}
        self._ratios: dict[str, list[float]] = {}
        self._best: Plan | None = None
        self._trials = 0

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """See :class:`~optimizer.samplers.auto.Proposer`."""
        self._trials += 1
        took_s = measurement.median_s / speed if measurement is not None else math.inf
        self._tried[plan.digest] = took_s
        if measurement is None or measurement.stopped == "raced" or not in_space(self._space, plan):
            return
        if self._critic is not None:
            usual = speed * measurement.cold
            self._critic.observe(plan, tuple(s / usual for s in measurement.stage_s))
        if math.isfinite(predicted_s := self._predict(plan)):  # a damaged log may have lost some of the prices
            self._ratios.setdefault(_lanes(plan), []).append(math.log(took_s / predicted_s))
        if self._best is None or took_s < self._tried[self._best.digest]:
            self._best = plan

    def propose(self) -> Plan | None:
        """See :class:`~optimizer.samplers.auto.Proposer`."""
        if not self._plans:
            self._anneal()
        rng = np.random.default_rng([self._seed, 41, self._trials])
        if self._critic is not None and self._best is not None:
            met = self._climbed(self._critic, self._best, rng)
        else:
            among = dict(self._plans)
            if self._trials % 2 and self._best is not None:
                among = self._near(self._best, rng) | among
            met = {digest: (self._corrected(plan), plan) for digest, plan in among.items()}
        left = [found for digest, found in met.items() if digest not in self._tried]
        _, plan = min(left, key=lambda found: found[0], default=(math.inf, None))
        return plan if plan is None or math.isfinite(self._predict(plan)) else None

    def _climbed(self, critic: Critic, best: Plan, rng: np.random.Generator) -> dict[str, tuple[float, Plan]]:
        """Return what plans of the list, and those that a climb meets, are thought to take.

        It begins at the best measured plan, or at the one that is thought to be best, in turns.
        """
        critic.learn(rng if self._trials % 2 else None)
        left = sorted((p for d, p in self._plans.items() if d not in self._tried), key=self._predict)[:_LISTED]
        found = {plan.digest: (critic.seconds(plan), plan) for plan in (best, *left)}
        at = found[best.digest] if self._trials // 2 % 2 else min(found.values(), key=lambda met: met[0])
        for _ in range(_GENERATIONS):
            near = self._near(at[1], rng)
            found |= {digest: (critic.seconds(plan), plan) for digest, plan in near.items() if digest not in found}
            at = min((at, *(found[digest] for digest in near)), key=lambda met: met[0])
        return found

    def _near(self, plan: Plan, rng: np.random.Generator) -> dict[str, Plan]:
        """Return some plans that are up to three moves away."""
        found: dict[str, Plan] = {}
        for _ in range(_NEIGHBOURS):
            there = plan
            for _ in range(1 + int(rng.integers(3))):
                there = self._space.neighbour(there, rng)
            found.setdefault(there.digest, there)  # not for later: a study that goes on never drew them
        return found

    def ranking(self, count: int) -> list[Plan]:
        """Return the plans of the list that are predicted to be best, the best first."""
        if not self._plans:
            self._anneal()
        return sorted(self._plans.values(), key=self._corrected)[:count]

    def _anneal(self) -> None:
        rng = np.random.default_rng([self._seed, 40])
        starts = sorted((plan for plan in self._starts if in_space(self._space, plan)), key=self._predict)[:_STARTS]
        for plan in (*starts, *(self._space.plan_at(below(self._space.cardinality(), rng)) for _ in range(2))):
            here, here_s = plan, self._predict(plan)
            self._keep(here)
            for step in range(self._steps):
                heat = _WARM * (_COLD / _WARM) ** (step / self._steps)
                there = self._space.neighbour(here, rng)
                there_s = self._predict(there)
                self._keep(there)
                if there_s <= here_s or rng.random() < math.exp((here_s - there_s) / (heat * here_s)):
                    here, here_s = there, there_s
        best = sorted(self._plans.values(), key=self._predict)[:_KEPT]
        self._plans = {plan.digest: plan for plan in best}

    def _keep(self, plan: Plan) -> None:
        self._plans.setdefault(plan.digest, plan)

    def _predict(self, plan: Plan) -> float:
        if plan.digest not in self._predicted:
            self._predicted[plan.digest] = self._predict_s(plan)
        return self._predicted[plan.digest]

    def _corrected(self, plan: Plan) -> float:
        """Return the prediction, times what plans on the same lanes took over theirs, or else all plans."""
        ratios = self._ratios.get(_lanes(plan)) or [r for each in self._ratios.values() for r in each]
        return self._predict(plan) * (math.exp(float(np.median(ratios))) if ratios else 1.0)


def _lanes(plan: Plan) -> str:
    """Return which lanes a plan uses, and whether it has ranks, as one word."""
    return "+".join([*sorted({stage.processor for stage in plan.stages}), *(["Tucker"] if plan.ranks else [])])
