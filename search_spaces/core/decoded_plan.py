"""A decoded plan of a workload: dispatch, order of the instances, and the cuts, processors and ranks of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from search_spaces.core.errors import PlanError
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Dispatch, LayerRanks, Plan, Stage
from search_spaces.core.platform import Platform

RankSet = tuple[LayerRanks, ...]
"""The convolutions of one model that run as Tucker-2 triples, with their ranks; empty for the unchanged model."""


@dataclass(frozen=True, slots=True)
class DecodedPlan:
    """A plan by the components of a joined graph.

    Attributes:
        dispatch: which ready job a free processor takes: the one that became ready first (``fifo``), that of the
            highest priority (``priority``), or that of the earliest deadline (``edf``). Ties go to the request that
            came first, then to the component that is first in ``order``.
        order: indices of the components, the first to be served first.
        stages: of each component, with operator indices of its own model, on processors or pools.
        ranks: of each component, with operator indices of its own model, ascending; () where no component has any.
    """

    dispatch: Dispatch
    order: tuple[int, ...]
    stages: tuple[tuple[Stage, ...], ...]
    ranks: tuple[RankSet, ...] = ()

    def plan(self, joined: JoinedGraph) -> Plan:
        """Return the plan, in the order of the components."""
        stages = []
        for index in self.order:
            first = joined.components[index].first_operator
            stages += [Stage(tuple([o + first for o in s.operators]), s.processor, s.share) for s in self.stages[index]]
        return Plan(joined.graph.digest, tuple(stages), self.dispatch, joined_ranks(self.ranks, joined))

    def canonical(self, clients: Sequence[int], platform: Platform) -> DecodedPlan:
        """Return the canonical form, which is the same for all equivalent decoded plans.

        Instances of one client are numbered in their order, and interchangeable processors in the order of first use.
        Idempotent.

        Args:
            clients: the client of each component; ranks are the same within one.
        """
        found = dict[int, int]()  # component → its new index
        waiting = {c: iter([i for i, other in enumerate(clients) if other == c]) for c in set(clients)}
        for index in self.order:
            found[index] = next(waiting[clients[index]])
        groups = {like: iter(processors) for like, processors in platform.classes().items()}
        renamed: dict[str, str] = {}
        for processor in (stage.processor for index in self.order for stage in self.stages[index]):
            if processor not in renamed:
                renamed[processor] = next(groups[platform[processor].like]).name
        back = {new: old for old, new in found.items()}
        rows = (self.stages[back[i]] for i in range(len(back)))
        return DecodedPlan(
            self.dispatch,
            tuple(found[i] for i in self.order),
            tuple(tuple([Stage(s.operators, renamed[s.processor], s.share) for s in row]) for row in rows),
            self.ranks,
        )


def in_runs(operators: int, cuts: Sequence[int], processors: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of a model with ``operators`` operators that is cut before the operators ``cuts``."""
    borders = pairwise((0, *cuts, operators))
    return tuple(
        Stage(tuple(range(first, last)), processor)
        for (first, last), processor in zip(borders, processors, strict=True)
    )


def jobs_of(plan: Plan, joined: JoinedGraph) -> dict[int, list[int]]:
    """Return the stages of each component, components in the order of the plan.

    Raises:
        PlanError: a stage holds operators of two components, or the jobs of one are not next to each other.
    """
    found: dict[int, list[int]] = {}
    last = -1
    for index, stage in enumerate(plan.stages):
        owners = {joined.component_of[o] for o in stage.operators}
        if len(owners) > 1:
            raise PlanError(f"stage {index} of the plan holds operators of {len(owners)} models")
        (owner,) = owners
        if owner in found and owner != last:
            raise PlanError(f"the jobs of {joined.components[owner].name!r} are not next to each other in the plan")
        found.setdefault(owner, []).append(index)
        last = owner
    return found


def decoded_plan(plan: Plan, joined: JoinedGraph) -> DecodedPlan:
    """Return a valid plan by its components.

    Raises:
        PlanError: the dispatch is ``static``, or :func:`jobs_of` rejects the stages.
    """
    if plan.dispatch == "static":
        raise PlanError("the plan runs its stages in a fixed order; a workload's jobs go through a queue")
    rows = {
        index: tuple(
            Stage(joined.components[index].own(stage.operators), stage.processor, stage.share)
            for stage in map(plan.stages.__getitem__, stages)
        )
        for index, stages in jobs_of(plan, joined).items()
    }
    ranks = ranks_by_component(plan, joined)
    return DecodedPlan(plan.dispatch, tuple(rows), tuple(rows[i] for i in range(len(joined.components))), ranks)


def joined_ranks(each: Sequence[RankSet], joined: JoinedGraph) -> RankSet:
    """Return the ranks of all components, with operator indices of the joined graph."""
    return tuple(
        LayerRanks(layer.operator + component.first_operator, layer.inputs, layer.outputs)
        for component, own in zip(joined.components, each, strict=False)
        for layer in own
    )


def ranks_by_component(plan: Plan, joined: JoinedGraph) -> tuple[RankSet, ...]:
    """Return the ranks of each component, with operator indices of its own model; () where the plan has none."""
    found: list[list[LayerRanks]] = [[] for _ in joined.components if plan.ranks]
    for operator, inputs, outputs in plan.ranks:
        owner = joined.component_of[operator]
        found[owner].append(LayerRanks(operator - joined.components[owner].first_operator, inputs, outputs))
    return tuple(map(tuple, found))


def component_plan(plan: Plan, joined: JoinedGraph, component: int, stages: Sequence[int]) -> Plan:
    """Return the plan of one component's own model.

    Args:
        stages: positions of the component's stages in the plan.
    """
    own = joined.components[component]
    parts = tuple(replace(plan.stages[s], operators=own.own(plan.stages[s].operators)) for s in stages)
    ranks = ranks_by_component(plan, joined)
    return Plan(own.graph.digest, parts, ranks=ranks[component] if ranks else ())
