"""Critic of a workload: times of operators learned from jobs, and plans simulated with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.simulate import JobCost, stage_means_s
from optimizer.exact.chain_costs import ChainCosts
from optimizer.samplers.critic import Critic
from optimizer.workload.limits import operator_costs
from search_spaces.core.errors import RewriteError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.core.pools import members, single_processors
from search_spaces.rewrites.lower import Lowered

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


def workload_costs(simulator: WorkloadSimulator, platform: Platform) -> ChainCosts:
    """Return the costs of the operators of all instances, without contention between processors.

    Args:
        platform: processors and pools; a pool is priced as its first processor.
    """
    names, components = [p.name for p in single_processors(simulator.platform)], simulator.joined.components
    count = len(simulator.joined.graph.operators)
    operator_s, overhead_s = np.zeros((len(platform.processors), count)), np.zeros(len(platform.processors))
    for row, processor in enumerate(platform.processors):
        number = names.index(members(processor)[0])
        for component in {c.graph.digest: c for c in components}.values():
            graph = component.graph
            price = partial(simulator.part_s, graph, number)
            begun_s, added_s = operator_costs(price, len(graph.operators))
            each_s = np.maximum(np.where(np.isfinite(added_s), added_s, begun_s), 0.0)
            for other in components:
                if other.graph.digest == graph.digest:
                    operator_s[row, other.first_operator : other.first_operator + len(each_s)] = each_s
            both = np.isfinite(begun_s) & np.isfinite(added_s)
            call_s = float(np.median(begun_s[both] - added_s[both])) if both.any() else 0.0
            overhead_s[row] = max(overhead_s[row], call_s)
    between = np.zeros((count, len(platform.processors), len(platform.processors)))
    return ChainCosts(platform, operator_s, overhead_s, between)
