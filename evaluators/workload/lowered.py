"""The models of a workload as a plan runs them: rewritten, cut into jobs, and which job waits for which."""

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
from search_spaces.rewrites.lower import Lowered, Lowering
from search_spaces.rewrites.views import Viewed

_KEPT = 512

ROUNDING = 1e-4
"""By how much sums in another order may differ, relative: of operators that are split."""


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """What a plan makes of one model of a workload; instances that it treats alike share it.

    Attributes:
        model: before the plan.
        lowered: the plan of this model, as it is run.
        viewed: the same without what moves nothing; its stages are the jobs.
        stages: of each job, which of the model's stages in the plan it belongs to.
        after: of each job a bit set of the jobs that it reads from.
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
        """What the plan gives each job to: a processor, or a pool."""
        return tuple(stage.processor for stage in self.viewed.plan.stages)

    def may_be_off(self, allowed: float) -> float:
        """Return how far its outputs may be from the model's, relative, beside what processors explain.

        Args:
            allowed: for decomposed convolutions.
        """
        return {"bits": 0.0, "rounding": ROUNDING, "approximation": allowed}[self.lowered.keeps]


def over_before(client: QueueClient) -> list[int]:
    """Return, of each job of an instance, a bit set of all jobs that are certainly over when it starts."""
    found: list[int] = []
    for job in range(len(client.processors)):
        before = 0
        for other in client.needs(job):
            before |= found[other] | 1 << other
        found.append(before)
    return found


class Lowerings:
    """Lowers the models of a workload for its plans; all instances of a model share what is made."""

    def __init__(self, joined: JoinedGraph, platform: Platform) -> None:
        self._joined, self._platform = joined, platform
        self._lowerings: dict[int, Lowering] = {}
        self._known: OrderedDict[Hashable, LoweredModel] = OrderedDict()

    def lower(self, plan: Plan, component: int, stages: Sequence[int], ranks: RankSet = ()) -> LoweredModel:
        """Return what a plan makes of one of its components.

        Args:
            stages: of the plan, those of the component.
            ranks: of the component, by its own operators.

        Raises:
            PlanError, RewriteError, ModelError: see :meth:`~search_spaces.rewrites.lower.Lowering.lower`.
        """
        graph = self._joined.components[component].graph
        first = self._joined.components[component].first_operator
        own = [plan.stages[s] for s in stages]
        key = (id(graph), ranks, tuple((tuple(o - first for o in s.operators), s.share, s.processor) for s in own))
        found = self._known.get(key)
        if found is None:
            lowered = self.of(graph).lower(component_plan(plan, self._joined, component, stages))
            viewed = lowered.viewed(self._platform)
            numbers = tuple(lowered.stage_of[i] for i in viewed.stage_of)
            found = self._known[key] = LoweredModel(graph, lowered, viewed, numbers, needs(viewed.plan, viewed.graph))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found

    def all(self, plan: Plan, jobs: dict[int, list[int]]) -> list[LoweredModel]:
        """Return what a plan makes of each of its components, in its order; errors as of :meth:`lower`.

        Args:
            jobs: of each component its stages.
        """
        ranks = ranks_by_component(plan, self._joined)
        return [self.lower(plan, k, stages, ranks[k] if ranks else ()) for k, stages in jobs.items()]

    def whole(self, graph: Graph, ranks: RankSet) -> tuple[Graph, tuple[int, ...]]:
        """Return a decomposed model, and the operator that each of its own came from; errors as :meth:`lower`."""
        made = self.of(graph).decomposed(ranks)
        return made.graph, made.origins

    def origin(self, graph: Graph) -> Graph:
        """Return the model that a graph was made of by rewriting it lately, or the graph where it was not."""
        for component in self._joined.components:
            lowering = self._lowerings.get(id(component.graph))
            if lowering is not None and lowering.has_made(graph):
                return component.graph
        return graph

    def of(self, graph: Graph) -> Lowering:
        """Return what lowers plans of a model."""
        # Graphs of one structure may have other weights.
        return self._lowerings.setdefault(id(graph), Lowering(graph))
