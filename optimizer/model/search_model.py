"""The search model of plans of any shape and any objectives: predictions of whole plans, and good plans.

The local search starts from the optima of exact methods for some of the freedoms, so more freedom is never worse in the
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from evaluators.objectives import Priced
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.samplers.study import moved
from search_spaces.core.errors import InfeasibleError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace, in_space

_STEPS = 120  # of the local search, from the best start of each objective


class SearchModel:
    """Predicts plans of any shape, and finds good ones by local search.

    Args:
        session: prices plans in the objectives that its ``how`` names, the first one first.
        fits: whether a plan may be proposed.
    """

    def __init__(
        self, session: Priced, graph: Graph, space: EnumerableSpace, fits: Callable[[Plan], bool] = lambda _: True
    ) -> None:
        self._session, self._graph, self._space, self._fits = session, graph, space, fits
        self._known: dict[str, tuple[float, ...]] = {}

    def values(self, plan: Plan) -> tuple[float, ...]:
        """Return the prediction of a plan in each objective; infinite where it cannot or may not run."""
        if plan.digest not in self._known:
            self._known[plan.digest] = self._values(plan)
        return self._known[plan.digest]

    def _values(self, plan: Plan) -> tuple[float, ...]:
        never = (math.inf,) * len(self._session.how)
        if not self._fits(plan):
            return never
        try:
            with closing(self._session.load(self._graph, plan)) as candidate:
                first = float(candidate.run(1).latency_s[0])
                others = candidate.figures()
        except (UsageError, UnavailableError):
            return never
        return (first, *(others[how.objective.name] for how in self._session.how[1:]))

    def predict(self, plan: Plan) -> float:
        """Return the prediction of a plan in the first objective."""
        return self.values(plan)[0]

    def figure(self, which: int, plan: Plan) -> float:
        """Return the prediction of a plan in one of the objectives."""
        return self.values(plan)[which]

    def optima(self, starts: Iterable[Plan], objectives: int, seed: int) -> tuple[Plan, ...]:
        """Return the best plan found for each of the first objectives; several may be the same.

        Raises:
            InfeasibleError: no start can be run.
        """
        known = [plan for plan in {p.digest: p for p in starts}.values() if in_space(self._space, plan)]
        found = []
        for which in range(objectives):
            best = min(known, key=lambda plan: (self.values(plan)[which], len(plan.stages)), default=None)
            if best is None or math.isinf(self.values(best)[which]):
                raise InfeasibleError(f"no plan of {self._graph.name!r} runs on these processors", "name others")
            rng = np.random.default_rng([seed, 17, which])
            for _ in range(_STEPS):
                plan = moved(self._space, best, rng)
                if self.values(plan)[which] < self.values(best)[which] * (1 - 1e-9):
                    best = plan
            found.append(best)
        return tuple({plan.digest: plan for plan in found}.values())


@dataclass(frozen=True, slots=True)
class Shared:
    """Cuts, branches and splits, as a :class:`~optimizer.exact.ranks.Shape`."""

    space: SegmentSpace

    def solve(self, costs: ChainCosts) -> tuple[Plan, float]:
        """Return the best plan for such costs, and its cost."""
        best = SegmentModel(self.space, costs).best()
        return self.space.plan(best.parts), best.cost_s

    def price(self, costs: ChainCosts, plan: Plan) -> float:
        """Return the cost of a plan."""
        return SegmentModel(self.space, costs).price(plan)
