"""A plan with ranks as a plan without: of the decomposed model, in which each of its triples is in one stage.

A stage that holds a convolution holds the three that take its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from search_spaces.errors import PlanError
from search_spaces.graph import Graph
from search_spaces.plan import Plan, Stage
from search_spaces.rewrites.tucker import Triple, TuckerGraph, decompose, outline
from search_spaces.rewrites.tucker_layers import Ranks

_KEPT = 64
_TRIPLE = 3

Key = tuple[tuple[int, int, int], ...]
Made = TypeVar("Made")


def ranks_of(plan: Plan) -> dict[int, Ranks]:
    """Return operator → ranks of a plan's triples."""
    return {operator: Ranks(*both) for operator, *both in plan.ranks}


def outline_origins(graph: Graph, ranks: Mapping[int, Ranks]) -> tuple[int, ...]:
    """Return, for each operator of :func:`~search_spaces.rewrites.tucker.outline`, the one that it came from."""
    return tuple(o for o in range(len(graph.operators)) for _ in range(_TRIPLE if o in ranks else 1))


def firsts(origins: Sequence[int]) -> list[int]:
    """Return where each operator begins among those that came from it, which follow each other."""
    return [i for i, origin in enumerate(origins) if i == 0 or origins[i - 1] != origin]


def placed(graph: Graph, plan: Plan, made: Graph, origins: tuple[int, ...]) -> Plan:
    """Return a plan with ranks as a plan of the decomposed model.

    Args:
        origins: for each operator of ``made``, which operator of the plan's graph it came from.

    Raises:
        PlanError: stages are sides of a split: a convolution is split, or decomposed, not both.
    """
    if any(stage.share is not None for stage in plan.stages):
        raise PlanError(f"a plan of {graph.name!r} has ranks and split stages", "leave one of them out")
    stage_of = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
    members: list[list[int]] = [[] for _ in plan.stages]
    for index, origin in enumerate(origins):
        members[stage_of[origin]].append(index)
    stages = zip(members, plan.stages, strict=True)
    return Plan(made.digest, tuple(Stage(tuple(own), stage.processor) for own, stage in stages), plan.dispatch)


class Ranking:
    """Decomposes one model for its plans, and keeps what it made lately: triples of any, models of the last ones."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._triples: dict[tuple[int, Ranks], Triple] = {}
        self._models: OrderedDict[Key, TuckerGraph] = OrderedDict()
        self._outlines: OrderedDict[Key, Graph] = OrderedDict()

    def model(self, plan: Plan) -> TuckerGraph:
        """Return the decomposed model, weights included.

        Raises:
            RewriteError: an operator cannot be decomposed, or a rank is above its channels.
            ModelError: the model has no file, or its file cannot be read.
        """
        return _kept(self._models, plan, lambda: decompose(self._graph, ranks_of(plan), self._triples))

    def has_made(self, graph: Graph) -> bool:
        """Return whether a graph is one of the decomposed models that are still known."""
        return any(made.graph is graph for made in self._models.values())

    def outline(self, plan: Plan) -> Graph:
        """Return the decomposed model without weights, for what prices operators.

        Raises:
            RewriteError: see :meth:`model`.
        """
        return _kept(self._outlines, plan, lambda: outline(self._graph, ranks_of(plan)))


def _kept(known: OrderedDict[Key, Made], plan: Plan, make: Callable[[], Made]) -> Made:
    if plan.ranks not in known:
        known[plan.ranks] = make()
        if len(known) > _KEPT:
            known.popitem(last=False)
    known.move_to_end(plan.ranks)
    return known[plan.ranks]
