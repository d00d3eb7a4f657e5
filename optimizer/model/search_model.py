"""The search model of plans of any shape and any objectives: predictions, good plans, lower bounds.

A session predicts plans by tables and simulation: the evaluator's own where it has tables, else one made from the
profile. The local search starts from the optima of exact methods for some of the freedoms, so more freedom is never
worse in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from evaluators.base import Session
from evaluators.objectives import Priced, PricedSession, Pricing
from evaluators.simulated import MeasuredPrices, ProfiledSession
from optimizer.exact.bound import Relaxation, relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, chain_cost, weighed
from optimizer.exact.ranks import RankCosts, Shape, best_ranked
from optimizer.exact.segment_model import SegmentModel
from optimizer.model.bounds import Bounds, ModelEstimate
from optimizer.model.objective import known_weights
from optimizer.model.profile import Profile
from search_spaces.core.errors import InfeasibleError, OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import NeighbourlySpace, in_space

_STEPS = 120  # of the local search, from the best start of each objective


class SearchModel:
    """Predicts plans of any shape, and finds good ones by local search.

    Args:
        session: prices plans in the objectives that its ``how`` names, the first one first.
        fits: whether a plan may be proposed.
    """

    def __init__(
        self,
        session: Priced,
        graph: Graph,
        space: NeighbourlySpace,
        fits: Callable[[Plan], bool] = lambda _: True,
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
        except OptimizeError:
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
                plan = self._space.neighbour(best, rng)
                if self.values(plan)[which] < self.values(best)[which] * (1 - 1e-9):
                    best = plan
            found.append(best)
        return tuple({plan.digest: plan for plan in found}.values())


def model_session(session: Session, graph: Graph, platform: Platform, profiled: Profile, space: object) -> Session:
    """Return a session that predicts: the evaluator's own where it computes its latencies, else one of the profile."""
    if session.capabilities.costs:
        return session
    costs = profiled.costs(platform)
    triples = {}
    if isinstance(space, RankSpace):
        table = np.array([profiled.triple_s[p.like] for p in platform.processors])
        triples = {key: table[:, place] for key, place in space.places.items()}
    between = costs.transfer_s[-1]
    prices = MeasuredPrices(costs.operator_s, costs.overhead_s, between, triples)
    powers = session.powers_w() if session.capabilities.powers else {}
    return ProfiledSession(platform, graph, prices, powers)


def priced_model(session: Session, asked: Sequence[Pricing]) -> PricedSession:
    """Return a predicting session of objectives; busy time replaces energy that only a meter measures."""
    return PricedSession(session, [replace(how, powers=known_weights(how), meter=None) for how in asked])


def starts_of(
    space: NeighbourlySpace,
    graph: Graph,
    costs: ChainCosts,
    asked: Sequence[Pricing],
    ranks: RankCosts | None,
    error: float,
    most: int,
) -> list[Plan]:
    """Return starts of the local search: optima of some freedoms, in each additive objective.

    Args:
        costs: of the latency.
        ranks: the costs of triples, where the space has ranks.
        error: the expected error that outputs may have.
    """
    inner = space.chains if isinstance(space, RankSpace) else space
    found = [chain_plan(graph, (), [group[0].name]) for group in costs.platform.classes().values()]
    shapes: list[Shape] = [_Chains(graph, most)]
    if isinstance(inner, SegmentSpace):
        shapes.append(_Shared(inner))
    for how in asked:
        by = known_weights(how)
        summed = how.objective.aggregation == "sum"
        own = weighed(costs, by) if summed else costs
        scale = np.array([by[p.name] if summed else 1.0 for p in costs.platform.processors])
        for shape in shapes:
            found.append(shape.solve(own)[0])
            if ranks is not None:
                model = RankCosts(ranks.space, own, ranks.triple_s * scale[:, None], shape)
                found.append(best_ranked(model, error, most).best)
    return found


@dataclass(frozen=True, slots=True)
class _Chains:
    """Chains, as a :class:`~optimizer.exact.ranks.Shape`."""

    graph: Graph
    most: int

    def solve(self, costs: ChainCosts) -> tuple[Plan, float]:
        chain = best_chains(costs, self.most)[0]
        return chain.plan(self.graph), chain.cost_s

    def price(self, costs: ChainCosts, plan: Plan) -> float:
        return chain_cost(costs, plan)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Cuts, branches and splits, as a :class:`~optimizer.exact.ranks.Shape`."""

    space: SegmentSpace

    def solve(self, costs: ChainCosts) -> tuple[Plan, float]:
        best = SegmentModel(self.space, costs).best()
        return self.space.plan(best.parts), best.cost_s

    def price(self, costs: ChainCosts, plan: Plan) -> float:
        return SegmentModel(self.space, costs).price(plan)


def bound_of(graph: Graph, space: object, costs: ChainCosts, how: Pricing, ranks: RankCosts | None) -> Relaxation:
    """Return the lower bound under the model, in an objective's unit; 0 where none is known."""
    operator_s = np.array(costs.operator_s)
    if ranks is not None:
        for (operator, _), place in ranks.space.places.items():
            operator_s[:, operator] = np.minimum(operator_s[:, operator], ranks.triple_s[:, place])
    cheapest = replace(costs, operator_s=operator_s, beyond_s=None)
    inner = space.chains if isinstance(space, RankSpace) else space
    splits = isinstance(inner, SegmentSpace) and bool(inner.axes)
    if how.objective.aggregation == "plan":
        return Relaxation(0.0, 0.0)
    if how.objective.aggregation == "sum":
        own = weighed(cheapest, known_weights(how))
        least = float(own.operator_s.min(axis=0).sum())
        if isinstance(inner, SegmentSpace):  # running side by side never reduces the sum
            chains = SegmentModel(inner, own, copy_s_per_byte=0.0).best(splits=False, branches=False)
            least = max(least, chains.cost_s)
        return Relaxation(least, least)
    found = relax(graph, cheapest, range(len(graph.operators)) if splits else ())
    return Relaxation(found.work_s, found.work_s) if how.objective.aggregation == "busiest" else found


def composed_estimate(
    model: SearchModel, costs: ChainCosts, optima: tuple[Plan, ...], bound: Relaxation, *, own: bool
) -> ModelEstimate:
    """Return the model estimate before any plan is measured."""
    reached = model.predict(optima[0])
    least = min(bound.latency_s, reached)
    return ModelEstimate(costs, optima, Bounds(least, reached <= least * (1 + 1e-9), bound, own=own))
