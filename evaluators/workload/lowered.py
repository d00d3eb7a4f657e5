"""The models of a workload lowered for a plan: rewritten, cut into jobs, and the dependencies of jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from evaluators.workload.scheduler import QueueClient
from search_spaces.core.decoded_plan import RankSet, component_plan, ranks_by_component
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan, needs
from search_spaces.core.platform import Platform
from search_spaces.core.recent import recent
from search_spaces.core.workload import Workload
from search_spaces.rewrites.lower import Lowered, lowering
from search_spaces.rewrites.views import Viewed

_KEPT = 512

ROUNDING = 1e-4
"""Largest relative error of outputs by sums in another order, as in split operators."""


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """One model of a workload, lowered for a plan; instances that run it in the same way share it.

    Attributes:
        model: the original model.
        lowered: its lowered plan.
        viewed: that plan without elided operators; its stages are the jobs.
        stages: for each job, which of the model's stages in the plan it belongs to.
        after: for each job, a bit set of the jobs that it reads from.
    """

    model: Graph
    lowered: Lowered
    viewed: Viewed
    stages: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def graph(self) -> Graph:
        """The rewritten model."""
        return self.lowered.graph

    @property
    def operators(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each job, in :attr:`graph`."""
        return self.viewed.operators

    @property
    def processors(self) -> tuple[str, ...]:
        """The processor or pool of each job in the plan."""
        return tuple(stage.processor for stage in self.viewed.plan.stages)

    def may_be_off(self, allowed: float) -> float:
        """Return the largest relative error of its outputs that the rewrites may cause.

        Args:
            allowed: the limit for decomposed convolutions.
        """
        return {"bits": 0.0, "rounding": ROUNDING, "approximation": allowed}[self.lowered.keeps]


def over_before(client: QueueClient) -> list[int]:
    """Return, for each job of an instance, a bit set of the jobs that have surely ended when it starts."""
    found: list[int] = []
    for job in range(len(client.processors)):
        before = 0
        for other in client.needs(job):
            before |= found[other] | 1 << other
        found.append(before)
    return found


class Lowerings:
    """Lowers the models of a workload for its plans; all instances of a model share the results.

    Attributes:
        workload, joined: the workload and its models, as one graph.
        platform: processors and pools; plans need not use all.
    """

    def __init__(self, workload: Workload, joined: JoinedGraph, platform: Platform) -> None:
        self.workload, self.joined, self.platform = workload, joined, platform
        self._known: OrderedDict[Hashable, LoweredModel] = OrderedDict()

    def lower(self, plan: Plan, component: int, stages: Sequence[int], ranks: RankSet = ()) -> LoweredModel:
        """Return one component of a plan, lowered.

        Args:
            stages: positions of the component's stages in the plan.
            ranks: of the component, with operator indices of its own model.

        Raises:
            PlanError, RewriteError, ModelError: as of :meth:`~search_spaces.rewrites.lower.Lowering.lower`.
        """
        graph = self.joined.components[component].graph
        first = self.joined.components[component].first_operator
        own = [plan.stages[s] for s in stages]
        key = (id(graph), ranks, tuple((tuple(o - first for o in s.operators), s.share, s.processor) for s in own))

        def lower() -> LoweredModel:
            lowered = lowering(graph).lower(component_plan(plan, self.joined, component, stages))
            viewed = lowered.viewed(self.platform)
            numbers = tuple(lowered.stage_of[i] for i in viewed.stage_of)
            return LoweredModel(graph, lowered.without(viewed), viewed, numbers, needs(viewed.plan, viewed.graph))

        return recent(self._known, key, lower, _KEPT)

    def all(self, plan: Plan, jobs: dict[int, list[int]]) -> list[LoweredModel]:
        """Return the lowered components of a plan, in its order. Raises as :meth:`lower`.

        Args:
            jobs: the stages of each component.
        """
        ranks = ranks_by_component(plan, self.joined)
        return [self.lower(plan, k, stages, ranks[k] if ranks else ()) for k, stages in jobs.items()]

    def origin(self, graph: Graph) -> Graph:
        """Return the original model of a recently rewritten graph, or the graph itself if it is not one."""
        for component in self.joined.components:
            if lowering(component.graph).has_made(graph):
                return component.graph
        return graph
