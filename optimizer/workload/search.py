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
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

import numpy as np

from evaluators.samples import Measurement
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.simulate import JobCost, stage_means_s
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.samplers.critic import Critic
from optimizer.samplers.study import below, moved
from optimizer.workload.limits import Seconds, call_s, operator_costs
from search_spaces.core.decoded_plan import DecodedPlan, in_runs
from search_spaces.core.errors import RewriteError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members, single_processors
from search_spaces.rewrites.lower import Lowered
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.space import EnumerableSpace, in_space

Value = Callable[[Plan, WorkloadSimulator], float]


@dataclass(slots=True, kw_only=True)
class WorkloadCritic(Critic):
    """Prices plans of a workload from the measured times of jobs; the simulated queue follows those times."""

    simulator: WorkloadSimulator
    value: Value
    _corrected: WorkloadSimulator | None = None

    def observe(self, plan: Plan, stage_s: tuple[float, ...]) -> None:
        """Add a plan's measured stages, without the simulated slowdown of processors that run at once."""
        try:
            outcome = self.simulator.run(plan, known=True)
        except (RewriteError, UnavailableError):
            return
        expected_s = stage_means_s(outcome, self.simulator.setting(plan, known=True), len(plan.stages))
        alone_s = [self.model_s(stage) if stage.processor in self._processors else 0.0 for stage in plan.stages]
        stages = zip(stage_s, expected_s, alone_s, strict=True)
        Critic.observe(self, plan, tuple(s * alone / e if e > 0.0 else 0.0 for s, e, alone in stages))

    def learn(self, rng: np.random.Generator | None) -> None:
        """Settle the estimate: the mean, or a draw (Matheron's rule, as in the correction of ``auto``)."""
        Critic.learn(self, rng)
        self._corrected = WorkloadSimulator(self.simulator.lowerings, self._price)

    def seconds(self, plan: Plan) -> float:
        """Return the prediction of a plan with the learned times."""
        return self.value(plan, self._corrected or self.simulator)

    def _price(self, model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:
        found = self.simulator.cost(model, lowered, processor, operators)
        first = next(c.first_operator for c in self.simulator.joined.components if c.graph.digest == model.digest)
        origins = sorted({first + lowered.origins[o][0] for o in operators})
        name = single_processors(self.simulator.platform)[processor].name
        return replace(found, work_s=found.work_s * self.factor(Stage(tuple(origins), name)))


def workload_critic(simulator: WorkloadSimulator, costs: ChainCosts, value: Value) -> WorkloadCritic:
    """Return a critic that learns a factor on each operator's price, the same in all instances of a network.

    Args:
        costs: of :func:`workload_costs`.
        value: the objective of a plan, as a simulator predicts it.
    """
    begins = {c.graph.digest: c.first_operator for c in reversed(simulator.joined.components)}
    each = [begins[c.graph.digest] + np.arange(len(c.graph.operators)) for c in simulator.joined.components]
    return WorkloadCritic(
        lambda plan: value(plan, simulator), costs, np.concatenate(each), simulator=simulator, value=value
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Jobs:
    """Seconds of a network's operators in jobs, on each processor of a platform; a pool counts as its first processor.

    Attributes:
        begun_s, added_s: shape ``(P, n)``: of :func:`~optimizer.workload.limits.operator_costs`.
        call_s: shape ``(P,)``: of beginning a job.
    """

    begun_s: Seconds
    added_s: Seconds
    call_s: Seconds

    @classmethod
    def of(cls, graph: Graph, simulator: WorkloadSimulator, platform: Platform) -> _Jobs:
        numbers = {p.name: i for i, p in enumerate(single_processors(simulator.platform))}
        price = simulator.prices(graph)
        firsts = (numbers[members(p)[0]] for p in platform.processors)
        each = [operator_costs(partial(price, number), len(graph.operators)) for number in firsts]
        begun_s, added_s = (np.array(found) for found in zip(*each, strict=True))
        return cls(begun_s, added_s, np.array([call_s(*both) for both in each]))


def workload_costs(simulator: WorkloadSimulator, platform: Platform) -> ChainCosts:
    """Return the costs of the operators of all instances, without contention between processors.

    Args:
        platform: processors and pools; a pool is priced as its first processor.
    """
    components, count = simulator.joined.components, len(simulator.joined.graph.operators)
    graphs = {c.graph.digest: c.graph for c in components}
    jobs = {digest: _Jobs.of(graph, simulator, platform) for digest, graph in graphs.items()}
    rows = [jobs[c.graph.digest] for c in components]
    each_s = [np.maximum(np.where(np.isfinite(own.added_s), own.added_s, own.begun_s), 0.0) for own in rows]
    overhead_s = np.max([own.call_s for own in rows], axis=0, initial=0.0)
    between = np.zeros((count, len(platform.processors), len(platform.processors)))
    return ChainCosts(platform, np.concatenate(each_s, axis=1), overhead_s, between)


def shared_starts(space: SharedWorkloadSpace, simulator: WorkloadSimulator) -> list[Plan]:
    """Return plans with stages that are best for a model alone: for all models, and for each beside whole others."""
    best = [_best(model, simulator) for model in space.models]
    clients = [c for c, _ in enumerate(space.models) for _ in range(space.counts[c])]
    found = [DecodedPlan("fifo", tuple(range(len(clients))), tuple(best[c] for c in clients))]
    for place in space.platform.processors:
        whole = [in_runs(len(model.graph.operators), (), [place.name]) for model in space.models]
        for one in range(len(best)):
            rows = tuple(best[c] if c == one else whole[c] for c in clients)
            found.append(DecodedPlan("fifo", tuple(range(len(clients))), rows))
    return list(dict.fromkeys(space.plan(each) for each in found))


def _best(space: SegmentSpace, simulator: WorkloadSimulator) -> tuple[Stage, ...]:
    """Return the stages of the plan with the least latency of one model alone, as jobs are priced."""
    jobs = _Jobs.of(space.graph, simulator, space.platform)
    alone_s = np.where(np.isfinite(jobs.added_s), jobs.added_s, jobs.begun_s - jobs.call_s[:, None])
    processors, count = jobs.begun_s.shape
    between = np.zeros((count, processors, processors))
    costs = ChainCosts(space.platform, np.minimum(alone_s, jobs.begun_s), np.maximum(jobs.call_s, 0.0), between)
    return space.plan(SegmentModel(space, costs).best().parts).stages


STEPS = 1500
SHARED_STEPS = 150  # where operators are split: predicting such a plan takes milliseconds
_KEPT = 200
_WARM, _WARM_LATER, _COLD = 0.1, 0.02, 0.002  # temperatures of annealing, relative to the time
_NEIGHBOURS, _LISTED = 24, 24
_STEPS_LATER = 6  # a trial's annealing has so many times fewer steps than the first

Predict = Callable[[Plan], float]


@dataclass(slots=True, eq=False)
class WorkloadProposer:
    """Proposes plans of a workload for the sampler ``auto``.

    Attributes:
        predict: seconds that a plan is predicted to take; infinite for one that cannot run.
        starts: where annealing begins, beside plans at random.
        seed: of the study.
        steps: of the annealing at first, from the best start and from a plan at random.
        critic: learns the times of operators; None if they have no prices.
        fits: whether a plan may be proposed: it keeps all constraints, and no worker measures it.
    """

    space: EnumerableSpace
    predict: Predict
    starts: list[Plan]
    seed: int
    steps: int = STEPS
    critic: Critic | None = None
    fits: Callable[[Plan], bool] = lambda _: True
    _predicted: dict[str, float] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)
    _tried: dict[str, float] = field(default_factory=dict)
    _ratios: dict[str, list[float]] = field(default_factory=dict)
    _best: Plan | None = None
    _trials: int = 0

    def observe(self, plan: Plan, measurement: Measurement | None, speed: float = 1.0) -> None:
        """Add a trial, in the order of trials."""
        self._trials += 1
        took_s = measurement.median_s / speed if measurement is not None else math.inf
        self._tried[plan.digest] = took_s
        if measurement is None or measurement.stopped == "raced" or not in_space(self.space, plan):
            return
        if self.critic is not None:
            usual = speed * measurement.cold
            self.critic.observe(plan, tuple(s / usual for s in measurement.stage_s))
        if math.isfinite(predicted_s := self._predict(plan)):  # a damaged log may have lost some of the prices
            self._ratios.setdefault(_processors(plan), []).append(math.log(took_s / predicted_s))
        if self._best is None or took_s < self._tried[self._best.digest]:
            self._best = plan

    def propose(self) -> Plan | None:
        """Return a plan that was not tried, or None if none is known."""
        if not self._plans:
            self._anneal()
        rng = np.random.default_rng([self.seed, 41, self._trials])
        if self.critic is not None and self._best is not None:
            met = self._annealed(self.critic, self._best, rng)
        else:
            among = dict(self._plans)
            if self._trials % 2 and self._best is not None:
                among = self._near(self._best, rng) | among
            met = {digest: (self._corrected(plan), plan) for digest, plan in among.items()}
        left = [found for digest, found in met.items() if digest not in self._tried]
        good = (p for _, p in sorted(left, key=itemgetter(0)) if math.isfinite(self._predict(p)) and self.fits(p))
        return next(good, None)

    def anew(self, seed: int, critic: Critic | None, fits: Callable[[Plan], bool]) -> WorkloadProposer:
        """Return a proposer with the same list that has observed nothing; arguments are those of the class."""
        self.ranking(0)
        known = self._predicted, self._plans
        return WorkloadProposer(self.space, self.predict, [], seed, self.steps, critic, fits, *known)

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
            self._walk(plan, seconds, self.steps // _STEPS_LATER, _WARM_LATER, rng)
        return found

    def _near(self, plan: Plan, rng: np.random.Generator) -> dict[str, Plan]:
        """Return some plans that are up to three moves away."""
        found: dict[str, Plan] = {}
        for _ in range(_NEIGHBOURS):
            there = plan
            for _ in range(1 + int(rng.integers(3))):
                there = moved(self.space, there, rng)
            found.setdefault(there.digest, there)  # not kept: a resumed study never drew them
        return found

    def ranking(self, count: int) -> list[Plan]:
        """Return the plans of the list that are predicted to be best, the best first."""
        if not self._plans:
            self._anneal()
        return sorted(self._plans.values(), key=self._corrected)[:count]

    def _anneal(self) -> None:
        rng = np.random.default_rng([self.seed, 40])

        def seconds(plan: Plan) -> float:
            self._plans.setdefault(plan.digest, plan)
            return self._predict(plan)

        starts = sorted((plan for plan in self.starts if in_space(self.space, plan)), key=seconds)[:1]
        for plan in (*starts, self.space.plan_at(below(self.space.cardinality(), rng))):
            self._walk(plan, seconds, self.steps, _WARM, rng)
        best = sorted(self._plans.values(), key=self._predict)[:_KEPT]
        self._plans = {plan.digest: plan for plan in best}

    def _walk(self, plan: Plan, seconds: Predict, steps: int, warm: float, rng: np.random.Generator) -> None:
        """Anneal from a plan."""
        here, here_s = plan, seconds(plan)
        for step in range(steps):
            heat = warm * (_COLD / warm) ** (step / steps)
            there = moved(self.space, here, rng)
            there_s = seconds(there)
            if there_s <= here_s or rng.random() < math.exp((here_s - there_s) / (heat * here_s)):
                here, here_s = there, there_s

    def _predict(self, plan: Plan) -> float:
        if plan.digest not in self._predicted:
            self._predicted[plan.digest] = self.predict(plan)
        return self._predicted[plan.digest]

    def _corrected(self, plan: Plan) -> float:
        """Return the prediction times the median of measured / predicted on the same processors, or else of all."""
        ratios = self._ratios.get(_processors(plan)) or [r for each in self._ratios.values() for r in each]
        return self._predict(plan) * (math.exp(float(np.median(ratios))) if ratios else 1.0)


def _processors(plan: Plan) -> str:
    """Return which processors a plan uses, and whether it has ranks, as one word."""
    return "+".join([*sorted({stage.processor for stage in plan.stages}), *(["Tucker"] if plan.ranks else [])])
