"""Plans of a workload priced and simulated: what searches go by, and a session that only predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Capabilities, Session
from evaluators.prediction import Prediction
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.setting import LaneLaw, Setting, setting
from evaluators.workload.simulate import Crowd, JobCost, simulate, stage_means_s
from search_spaces.arrangement import RankSet, component_plan, jobs_of, ranks_by_component
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform
from search_spaces.workload import Workload

Price = Callable[[Graph, int, tuple[int, ...], RankSet], JobCost]
"""What operators of a model with some ranks cost as one job on a lane, by its number among those that are no pools."""

Grids = Mapping[str, Sequence[RankSet]]
"""Of models, by digest: sets of ranks of which each triple is to be priced, once where several sets have it."""

Errors = Callable[[Graph, Plan], NDArray[np.float64]]
"""What prices of a model's plan may be wrong about, as in :attr:`evaluators.base.Batch.errors`."""


class WorkloadSimulator:
    """Simulates plans of one workload.

    Args:
        platform: its lanes and pools.
        price: see :data:`Price`; asked once for each job.
        errors: see :data:`Errors`; None where prices were measured.
    """

    def __init__(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        price: Price,
        errors: Errors | None = None,
    ) -> None:
        self.workload, self.joined, self.platform = workload, joined, platform
        self._price, self._errors = price, errors
        self._crowd = Crowd(platform)
        self._law = LaneLaw.of(platform)
        self._costs: dict[tuple[str, int, tuple[int, ...], RankSet], JobCost] = {}

    def run(self, plan: Plan, *, known: bool = False) -> Outcome:
        """Return what a plan is predicted to do.

        Args:
            known: whether the plan is known to be valid.

        Raises:
            PlanError: it is not for these models or this platform.
            UnavailableError: a lane does not take a job.
        """
        found = setting(self.workload, self.joined, plan, self.platform, self._law if known else None)
        ranks = ranks_by_component(plan, self.joined)
        jobs = [self._jobs(found, plan, k, ranks) for k in range(len(found.seats))]
        return simulate(found, plan.dispatch, jobs, self._crowd)

    def errors(self, plan: Plan) -> NDArray[np.float64] | None:
        """Return what the prices of a plan's jobs may be wrong about; None where they were measured.

        Relative to the time of all jobs together, and the same things in the same places for all plans: those of each
        model, whatever its instances. An objective is taken to be wrong by as much as the jobs are.
        """
        if self._errors is None:
            return None
        found: dict[str, NDArray[np.float64]] = {}
        total_s = 0.0
        for number, stages in jobs_of(plan, self.joined).items():
            component = self.joined.components[number]
            own = component_plan(plan, self.joined, number, stages)
            lanes = [self._law.members[stage.processor][0] for stage in own.stages]
            parts = tuple(Stage(s.operators, self._law.names[n]) for s, n in zip(own.stages, lanes, strict=True))
            each = zip(parts, lanes, strict=True)
            took_s = sum(self.cost(component.graph, n, part.operators, own.ranks).work_s for part, n in each)
            error_s = took_s * self._errors(component.graph, replace(own, stages=parts))
            found[component.graph.digest] = found.get(component.graph.digest, 0.0) + error_s
            total_s += took_s
        return np.concatenate([found[digest] for digest in sorted(found)]) / total_s

    def _jobs(self, found: Setting, plan: Plan, seat: int, ranks: Sequence[RankSet]) -> list[Mapping[int, JobCost]]:
        component = self.joined.components[found.components[seat]]
        own = ranks[found.components[seat]] if ranks else ()
        jobs: list[Mapping[int, JobCost]] = []
        for stage, lanes in zip(found.stages[seat], found.seats[seat].lanes, strict=True):
            operators = component.own(plan.stages[stage].operators)
            jobs.append({lane: self.cost(component.graph, lane, operators, own) for lane in lanes})
        return jobs

    def cost(self, graph: Graph, lane: int, operators: tuple[int, ...], ranks: RankSet = ()) -> JobCost:
        """Return what operators of a model cost as one job on a lane.

        Args:
            ranks: of the model's operators that are decomposed, in this job and others.
        """
        key = (graph.digest, lane, operators, ranks)
        if key not in self._costs:
            self._costs[key] = self._price(graph, lane, operators, ranks)
        return self._costs[key]


class PredictedSession(Session):
    """See :class:`~evaluators.base.Session`, for plans of a workload; loading one is simulating it."""

    capabilities = Capabilities(decompose=True)

    def __init__(self, simulator: WorkloadSimulator, objective: Objective, facts: Mapping[str, Any]) -> None:
        self.simulator = simulator
        self._objective = objective
        self._facts = dict(facts)
        self.closed = False

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {**self._facts, "workload": self.simulator.workload.digest, "objective": self._objective}

    def price(
        self,
        known: Mapping[str, Any] | None,  # noqa: ARG002
        progress: Callable[[str], None],  # noqa: ARG002
        grids: Grids = MappingProxyType({}),  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """See :class:`~evaluators.workload.host.WorkloadSession`; the model knows by itself."""
        return {}

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`: there are no outputs."""
        return None

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> PredictedRun:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`.

        Args:
            graph: the joined one.
        """
        if self.closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block")
        found = self.simulator.run(plan)
        return PredictedRun(found, len(plan.stages), self._objective, self.simulator.errors(plan))


class PredictedRun(Prediction):
    """A plan of a workload with a predicted run.

    Attributes:
        outcome: what is predicted.
    """

    def __init__(
        self, found: Outcome, stages: int, objective: Objective, errors: NDArray[np.float64] | None = None
    ) -> None:
        value_s, stage_s = np.array([found.value_s(objective)]), np.array([stage_means_s(found, stages)])
        super().__init__(Batch(value_s, stage_s, found.timeline, errors))
        self.outcome = found
