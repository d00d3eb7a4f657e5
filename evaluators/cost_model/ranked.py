"""What plans with ranks cost: the decomposed model's, told in the operators and stages of the plan (seed 001)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from evaluators.cost_model.plans import Errors, PlanSimulator
from evaluators.timeline import Timeline
from search_spaces.graph import Graph
from search_spaces.plan import LayerRanks, Plan
from search_spaces.rewrites.ranked import Ranking, firsts, outline_origins, placed, ranks_of

_KEPT = 64


class RankedSimulator:
    """Simulates plans with ranks of one model.

    Args:
        graph: the model as it is.
        simulator_of: makes the simulator of a graph.
    """

    def __init__(self, graph: Graph, simulator_of: Callable[[Graph], PlanSimulator]) -> None:
        self._graph = graph
        self._simulator_of = simulator_of
        self._ranking = Ranking(graph)
        self._known: OrderedDict[str, PlanSimulator] = OrderedDict()

    def run(self, plan: Plan) -> tuple[Timeline, Errors]:
        """Return the timeline of a plan, and how sure it is.

        Raises:
            PlanError, RewriteError: the plan cannot be run.
            UnavailableError: a lane does not take an operator of its stage.
        """
        simulator, origins = self._made(plan)
        lowered = placed(self._graph, plan, simulator.graph, origins)
        return simulator.run(lowered), self._folded(simulator.errors(lowered), origins)

    def errors(self, plan: Plan) -> Errors:
        """Return how sure :meth:`run` is; errors are its own."""
        simulator, origins = self._made(plan)
        lowered = placed(self._graph, plan, simulator.graph, origins)
        return self._folded(simulator.errors(lowered), origins)

    def stage(
        self, lane: int, operators: Sequence[int], ranks: tuple[LayerRanks, ...]
    ) -> tuple[float, float, tuple[float, ...]]:
        """Return what operators cost as one stage, triples in the place of those that have ranks.

        See :meth:`~evaluators.cost_model.plans.PlanSimulator.stage`; ``ranks`` are those of the whole model.
        """
        simulator, origins = self._made(Plan(self._graph.digest, (), ranks=ranks))
        inside = set(operators)
        return simulator.stage(lane, tuple(i for i, origin in enumerate(origins) if origin in inside))

    def _made(self, plan: Plan) -> tuple[PlanSimulator, tuple[int, ...]]:
        """Return the simulator of the decomposed model, and of each of its operators the one that it came from."""
        made = self._ranking.outline(plan)
        if made.digest not in self._known:
            self._known[made.digest] = self._simulator_of(made)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return self._known[made.digest], outline_origins(self._graph, ranks_of(plan))

    def _folded(self, errors: Errors, origins: tuple[int, ...]) -> Errors:
        """Return errors with those of a triple's operators as one, that of the operator that they stand for.

        They begin with one for each kind of lane and operator; so plans of different ranks have them in one order.
        """
        # kinds·n + kinds + kinds + kinds² entries in all
        count = len(origins)
        kinds = next(k for k in range(1, len(errors) + 1) if k * (count + 2 + k) >= len(errors))
        single = errors[: kinds * count].reshape(kinds, count)
        squares = np.add.reduceat(single**2, firsts(origins), axis=1)
        return np.concatenate([np.sqrt(squares).ravel(), errors[kinds * count :]])
