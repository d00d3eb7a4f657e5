"""A plan of a workload that really runs, and its models as it runs them: what all evaluators that measure share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from evaluators.base import Agreement, Batch, Candidate
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.setting import Setting
from evaluators.workload.simulate import stage_means_s
from search_spaces.arrangement import RankSet, component_plan, ranks_by_component
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan
from search_spaces.rewrites.lower import Lowering
from search_spaces.workload import Workload

Operators = tuple[int, ...]


class HostedRun(Candidate, ABC):
    """See :class:`~evaluators.workload.host.WorkloadCandidate`.

    Args:
        found: the plan's setting.
        objective: what latencies are.
    """

    def __init__(self, found: Setting, plan: Plan, objective: Objective) -> None:
        self._found, self._plan, self._objective = found, plan, objective
        self._outcome: Outcome | None = None

    @abstractmethod
    def once(self) -> Outcome:
        """Run the workload once.

        Raises:
            UnavailableError: a model failed.
        """

    @abstractmethod
    def agreements(self) -> Iterable[Agreement]:
        """Return how the outputs of each instance, which has run, compare with its whole model's."""

    @property
    def outcome(self) -> Outcome:
        """What came of the last run; runs once if there was none."""
        if self._outcome is None:
            self._outcome = self.once()
        return self._outcome

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`; a run is ended by nothing but its end.

        Raises:
            UnavailableError: a model failed.
        """
        values, stages = [], []
        for _ in range(n):
            self._outcome = found = self.once()
            values.append(found.value_s(self._objective))
            stages.append(stage_means_s(found, len(self._plan.stages)))
            if values[-1] > stop_above_s:
                break
        return Batch(np.array(values), np.array(stages), self._outcome.timeline if self._outcome else None)

    def verify(self) -> Agreement | None:
        """See :class:`~evaluators.base.Candidate`: the worst agreement of all instances."""
        if self._outcome is None:
            self._outcome = self.once()
        return worst(self.agreements())


def worst(found: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements: one that is not accepted, then the one that is off most."""
    return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))


class Rewriter:
    """Decomposes the models of a workload for its plans; all instances of a model share what is made."""

    def __init__(self, workload: Workload, joined: JoinedGraph) -> None:
        self._workload, self._joined = workload, joined
        self._lowerings: dict[int, Lowering] = {}

    def jobs(self, plan: Plan, component: int, stages: Sequence[int]) -> tuple[Graph, list[Operators]]:
        """Return the model that a component of a plan runs, and the operators of each of its jobs.

        Args:
            stages: of the plan, those of the component.

        Raises:
            RewriteError, ModelError: see :func:`~search_spaces.rewrites.tucker.decompose`.
        """
        graph = self._joined.components[component].graph
        lowered = self._lowering(graph).lower(component_plan(plan, self._joined, component, stages))
        return lowered.graph, [stage.operators for stage in lowered.plan.stages]

    def whole(self, graph: Graph, ranks: RankSet) -> tuple[Graph, tuple[int, ...]]:
        """Return a decomposed model, and of each of its operators the one that it came from; errors as :meth:`jobs`."""
        made = self._lowering(graph).decomposed(ranks)
        return made.graph, made.origins

    def origin(self, graph: Graph) -> Graph:
        """Return the model that a graph was made of by decomposing it lately, or the graph where it was not."""
        for component in self._joined.components:
            lowering = self._lowerings.get(id(component.graph))
            if lowering is not None and lowering.has_made(graph):
                return component.graph
        return graph

    def may_be_off(self, component: int, plan: Plan) -> float:
        """Return how far outputs of an instance may be from its model's since the plan has decomposed that."""
        ranks = ranks_by_component(plan, self._joined)
        return (self._workload.client_of(component).tucker or 0.0) if ranks and ranks[component] else 0.0

    def _lowering(self, graph: Graph) -> Lowering:
        # Graphs of one structure may have other weights.
        return self._lowerings.setdefault(id(graph), Lowering(graph))
