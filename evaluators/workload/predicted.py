"""Simulation of workload plans from costs of jobs, for searches, and a session that only predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Capabilities, ClosableSession, Session
from evaluators.simulated import Prediction
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.setting import NumberedProcessors, Setting, setting
from evaluators.workload.simulate import Crowd, JobCost, simulate, stage_means_s
from search_spaces.core.decoded_plan import RankSet, component_plan, jobs_of
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.states import State
from search_spaces.rewrites.lower import Lowered, lowering

_MOST_COSTS = 1 << 16

Price = Callable[[Graph, Lowered, int, tuple[int, ...]], JobCost]
"""Returns the cost of a job: model, lowered model, number of the processor (pools not counted), operators."""

PartPrice = Callable[[int, Sequence[int]], float]
"""Returns the seconds of one job: number of the processor (pools not counted), operators of the model."""

Grids = Mapping[str, Sequence[RankSet]]
"""Digest of a model → rank sets whose triples are measured; a triple in several sets is measured once."""

Errors = Callable[[Graph, Plan], NDArray[np.float64]]
"""Returns the errors of the costs of a model's plan, as in :attr:`evaluators.base.Batch.errors`."""


class WorkloadSimulator:
    """Simulates plans of one workload.

    Args:
        lowerings: of its models; may be shared with others.
        price: costs of jobs; called once for each job.
        errors: of costs; None where costs were measured.
    """

    def __init__(self, lowerings: Lowerings, price: Price, errors: Errors | None = None) -> None:
        self.workload, self.joined, self.platform = lowerings.workload, lowerings.joined, lowerings.platform
        self.lowerings, self._price, self._errors = lowerings, price, errors
        self._crowd = Crowd(self.platform)
        self._law = NumberedProcessors.of(self.platform)
        self._costs: dict[tuple[str, str, frozenset[int], int, tuple[int, ...]], JobCost] = {}

    def run(self, plan: Plan, *, known: bool = False) -> Outcome:
        """Return the predicted outcome of a plan.

        Args:
            known: whether the plan is known to be valid.

        Raises:
            PlanError: it is not for these models or this platform.
            RewriteError: a model cannot be rewritten like that.
            UnavailableError: a processor does not support a job.
        """
        found = self.setting(plan, known=known)
        return simulate(
            found, plan.dispatch, [self._jobs(found, client) for client in range(len(found.clients))], self._crowd
        )

    def setting(self, plan: Plan, *, known: bool = False) -> Setting:
        """Return the scheduler's input for a plan. Raises as :meth:`run`."""
        return setting(plan, self.lowerings, self._law if known else None)

    def errors(self, plan: Plan) -> NDArray[np.float64] | None:
        """Return the errors of a prediction, as of :attr:`~evaluators.base.Batch.errors`; None for measured costs.

        They are relative to the time of all jobs together, and in the same order for all plans: for each model, over
        all its instances. The relative error of an objective is assumed to be that of the jobs.
        """
        if self._errors is None:
            return None
        found: dict[str, NDArray[np.float64]] = {}
        total_s = 0.0
        made = self.setting(plan)
        for client, (number, stages) in enumerate(jobs_of(plan, self.joined).items()):
            graph = self.joined.components[number].graph
            own = component_plan(plan, self.joined, number, stages)
            processors = [self._law.names[self._law.members[stage.processor][0]] for stage in own.stages]
            parts = tuple(replace(s, processor=processor) for s, processor in zip(own.stages, processors, strict=True))
            took_s = sum(next(iter(costs.values())).work_s for costs in self._jobs(made, client))
            error_s = took_s * self._errors(graph, replace(own, stages=parts))
            found[graph.digest] = found.get(graph.digest, 0.0) + error_s
            total_s += took_s
        return np.concatenate([found[digest] for digest in sorted(found)]) / total_s

    def _jobs(self, found: Setting, client: int) -> list[Mapping[int, JobCost]]:
        model, processors = found.models[client], found.clients[client].processors
        return [
            {processor: self.cost(model.model, model.lowered, processor, operators) for processor in each}
            for operators, each in zip(model.operators, processors, strict=True)
        ]

    def cost(self, model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:
        """Return the cost of operators of a lowered model as one job on a processor."""
        key = (model.digest, lowered.graph.digest, lowered.left_out, processor, operators)
        if key not in self._costs:
            if len(self._costs) > _MOST_COSTS:
                self._costs.clear()
            self._costs[key] = self._price(model, lowered, processor, operators)
        return self._costs[key]

    def prices(self, model: Graph, ranks: RankSet = ()) -> PartPrice:
        """Return the function that prices operators of a model as one job on a processor.

        Args:
            ranks: of all decomposed operators of the model, in this job and others.
        """
        lowered = lowering(model).lower(Plan(model.digest, (), ranks=ranks))
        become: dict[int, list[int]] = defaultdict(list)  # operator → those that it is when lowered
        for index, (origin, _) in enumerate(lowered.origins):
            become[origin].append(index)

        def part_s(processor: int, operators: Sequence[int]) -> float:
            members = tuple(sorted(index for operator in operators for index in become.get(operator, ())))
            return self.cost(model, lowered, processor, members).work_s

        return part_s


class PredictedSession(ClosableSession):
    """A session that loads a plan of a workload by simulating it.

    Args:
        usual: a session that predicts plans of one model, in the usual state of the platform.
        simulator_of: returns the simulator for such a session, in any state of the platform.
        of: the same session in the state of this one; ``usual`` by default.
    """

    capabilities = Capabilities(computed=True, decompose=True, powers=True, states=True)

    def __init__(
        self,
        usual: Session,
        simulator_of: Callable[[Any], WorkloadSimulator],
        objective: Objective,
        of: Session | None = None,
    ) -> None:
        self._usual, self._of, self._simulator_of, self._objective = usual, of or usual, simulator_of, objective
        self.simulator = simulator_of(self._of)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        own = {"workload": self.simulator.workload.digest, "objective": self._objective}
        return {**self._usual.fingerprint(), **own}

    def powers_w(self) -> Mapping[str, float]:
        """Return the watts of processors while they run, where known."""
        return self._usual.powers_w()

    def in_state(self, state: State) -> PredictedSession:
        """Return a session on the platform in that state."""
        return PredictedSession(self._usual, self._simulator_of, self._objective, self._of.in_state(state))

    def price(
        self,
        known: Mapping[str, Any] | None,  # noqa: ARG002
        progress: Callable[[str], None],  # noqa: ARG002
        grids: Grids = MappingProxyType({}),  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Return {}: the simulator needs no measured costs."""
        return {}

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:  # noqa: ARG002
        """Return None: there are no outputs."""
        return None

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Prediction:  # noqa: ARG002
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Args:
            graph: the joined one.
        """
        self.check_open()
        found = self.simulator.run(plan)
        stage_s = stage_means_s(found, self.simulator.setting(plan, known=True), len(plan.stages))
        errors = self.simulator.errors(plan)
        value_s = np.array([found.value_s(self._objective)])
        return Prediction(Batch(value_s, np.array([stage_s]), found.timeline, errors, found))
