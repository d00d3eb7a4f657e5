"""Objectives of a study of one model: the session that measures them, and their model estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from evaluators.base import Session
from evaluators.objectives import LATENCY, OBJECTIVES, Priced, PricedSession, Pricing, find_objective, pricing
from evaluators.sampling import SamplingPolicy
from evaluators.simulated import MeasuredPrices, ProfiledSession
from optimizer.exact.bound import Relaxation, relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, chain_cost, weighed
from optimizer.exact.ranks import Chains, RankCosts, RankLimits, Shape, best_ranked
from optimizer.exact.segment_model import SegmentModel
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import (
    Bounds,
    ModelEstimate,
    known_weights,
    latency_costs,
    objective_estimate,
    objective_model,
)
from optimizer.model.profile import Profile
from optimizer.model.ranks import SLACK, error_violations, rank_baselines, rank_estimate, rank_model, rank_violations
from optimizer.model.robust import NOMINAL, in_states, nominal_plan, robust_estimate
from optimizer.model.search_model import SearchModel, Shared
from optimizer.model.segments import segment_estimate, segment_price
from optimizer.samplers.auto import Problem, Proposer
from optimizer.study.config import StudyConfig, most_stages
from optimizer.study.front import criteria, has_criterion
from optimizer.study.limits import allowed_error, limits_of
from optimizer.workload.search import WorkloadProposer
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace, chain_plan
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace, SearchSpace

# Optima of the model to measure first, without and with the sampler "auto", which corrects the model as it measures.
_MODEL_OPTIMA = (8, 1)
_COMPOSED_STEPS = 120  # a prediction of a split plan takes milliseconds
_PROPOSALS_S, _LEAST_S, _MOST_S = 45.0, 0.05, 0.4

Predict = Callable[[Plan], float]


@dataclass(frozen=True, slots=True, eq=False)
class StudyObjective:
    """The objective of a study, with its model estimate.

    Attributes:
        session: measures or predicts it.
        predict: the model's value of a plan, in its unit.
        problem: for samplers, without constraints; its optima need not be in the space.
        bounds: under the model, in the objective's unit.
        latency: the additive model of the latency.
        latency_s: the model's latency of a plan.
        more: baselines beside the usual ones.
        figures: the model's values of limited figures, by name.
        least: their lower bounds under the model.
        breaks: further constraints that a plan violates.
    """

    session: Session
    predict: Predict
    problem: Problem
    bounds: Bounds
    latency: ChainCosts
    latency_s: Callable[[Plan], float]
    more: tuple[Baseline, ...] = ()
    figures: Mapping[str, Callable[[Plan], float]] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    breaks: Callable[[Plan], tuple[Violation, ...]] = lambda _: ()


def asked(config: StudyConfig, platform: Platform, space: EnumerableSpace, session: Session) -> Session:
    """Return the session to search with: in all states of the platform that ``--state`` names.

    Raises:
        UsageError: the session has no states or outputs, or no meter or power gives the energy.
        UnavailableError: it cannot measure an objective.
    """
    if config.max_error is not None and not (session.capabilities.outputs or isinstance(space, RankSpace)):
        raise UsageError("--max-error: this evaluator computes no outputs", "use --evaluator litert, or leave it out")
    _pricings(config, platform, session)
    return _everywhere(config, platform, session)


def study_objective(
    config: StudyConfig, graph: Graph, platform: Platform, space: EnumerableSpace, session: Session, profiled: Profile
) -> StudyObjective:
    """Return the objective of a study.

    Args:
        session: measures or predicts latencies, on the platform as it is.

    Raises:
        InfeasibleError: no plan fits.
    """
    of = _Asked(config, graph, platform, space, session, profiled)
    if of.is_composed:
        return of.composed()
    if of.ranks is not None:
        return of.ranked(of.ranks)
    if isinstance(space, SegmentSpace):
        return of.shared(space)
    return of.in_states() if config.state else of.chains()


class _Asked:
    """The objective of a study, by the exact method for its freedoms and objectives, or by local search."""

    def __init__(
        self,
        config: StudyConfig,
        graph: Graph,
        platform: Platform,
        space: EnumerableSpace,
        usual: Session,
        profiled: Profile,
    ) -> None:
        self._config, self._graph, self._platform, self._space = config, graph, platform, space
        self._usual, self._profiled = usual, profiled
        self._most, self._count = most_stages(config, len(graph.operators)), len(config.objective)
        self._how = _pricings(config, platform, usual)
        self.is_latency = [how.objective for how in self._how] == [LATENCY]
        self._session: Any = self._everywhere(usual if self.is_latency else PricedSession(usual, self._how))
        self._error = allowed_error(config) or 0.0
        self._most_expected = SLACK * self._error if usual.capabilities.outputs else self._error
        self.ranks: RankCosts | None = None
        self._more: tuple[Baseline, ...] = ()
        if isinstance(space, RankSpace):
            self.ranks = rank_model(usual, profiled, platform, space, self._most)
            limits = RankLimits(self.ranks, self._error)
            self._more = rank_baselines(limits, profiled.fastest(platform))

    def _everywhere(self, session: Session) -> Any:
        return _everywhere(self._config, self._platform, session)

    @cached_property
    def _latency(self) -> ChainCosts:
        """The additive model of the latency."""
        return latency_costs(self._everywhere(self._usual), self._graph, self._platform, self._profiled)

    @property
    def _inner(self) -> SearchSpace:
        """The space without ranks."""
        return self._space.chains if isinstance(self._space, RankSpace) else self._space

    @property
    def _optima(self) -> int:
        return _MODEL_OPTIMA[self._config.sampler == "auto"]

    @property
    def is_composed(self) -> bool:
        """Whether no exact method covers these freedoms, objectives and states together."""
        if any(how.objective.aggregation == "run" for how in self._how):
            return True
        if isinstance(self._space, RankSpace):
            return not (isinstance(self._space.chains, ChainSpace) and self.is_latency and not self._config.state)
        if isinstance(self._space, SegmentSpace):
            return not self.is_latency or bool(self._config.state)
        return bool(self._config.state) and not self.is_latency

    def _problem(self, estimate: ModelEstimate, **more: Any) -> Problem:
        return Problem(self._graph, self._platform, self._space, estimate.costs, optima=estimate.optima, **more)

    def shared(self, space: SegmentSpace) -> StudyObjective:
        """Return the latency of plans of shared segments."""
        own = self._usual.capabilities.costs and not space.axes
        costs = self._latency if own else self._profiled.costs(self._platform)
        estimate = segment_estimate(self._graph, costs, space, own=own)
        return self._latencies(estimate, segment_price(space, costs))

    def in_states(self) -> StudyObjective:
        """Return the latency of chains in several states."""
        estimate = robust_estimate(self._graph, self._session, self._platform, self._most)
        self._more = (Baseline(NOMINAL, nominal_plan(self._graph, self._usual, self._platform, self._most)),)
        return self._latencies(estimate, partial(chain_cost, estimate.costs))

    def _latencies(self, estimate: ModelEstimate, predict: Predict) -> StudyObjective:
        return StudyObjective(
            self._session, predict, self._problem(estimate), estimate.bounds, estimate.costs, predict, self._more
        )

    def composed(self) -> StudyObjective:
        """Return objectives of plans of any shape, by predictions of whole plans."""
        graph, space, ranks, costs = self._graph, self._space, self.ranks, self._latency

        def breaks(plan: Plan) -> tuple[Violation, ...]:
            return () if ranks is None else error_violations(ranks.space, self._most_expected, plan)

        model = SearchModel(self._predicting(self._how), graph, space, lambda plan: not breaks(plan))
        optima = model.optima(self._starts(), self._count, self._config.seed)
        bounds, reached = [self._bound(how) for how in self._how], model.predict(optima[0])
        least = min(bounds[0].latency_s, reached)
        proven = reached <= least * (1 + 1e-9)
        own = self._session.capabilities.costs
        estimate = ModelEstimate(costs, optima, Bounds(least, proven, bounds[0], own=own))

        def propose(problem: Problem, seed: int) -> Proposer:
            return WorkloadProposer(space, model.predict, list(optima), seed, _COMPOSED_STEPS, fits=problem.fits)

        limited = [(i, how.objective.name) for i, how in enumerate(self._how) if i >= self._count]
        latency = SearchModel(self._predicting([Pricing(LATENCY, self._platform, {})]), graph, space)
        return StudyObjective(
            self._session,
            model.predict,
            self._problem(estimate, search=propose, front=self._count > 1),
            estimate.bounds,
            costs,
            latency.predict,
            self._more,
            {name: partial(model.figure, i) for i, name in limited},
            {name: bounds[i].latency_s for i, name in limited},
            breaks,
        )

    def _predicting(self, asked: Sequence[Pricing]) -> Priced:
        """Return a session that predicts objectives; busy time replaces energy that only a meter measures.

        It is the evaluator's own where that computes its latencies, else one of the profile.
        """
        session, platform = self._usual, self._platform
        if not session.capabilities.costs:
            costs, triples = self._profiled.costs(platform), {}
            if self.ranks is not None:
                triples = {key: self.ranks.triple_s[:, place] for key, place in self.ranks.space.places.items()}
            prices = MeasuredPrices(costs.operator_s, costs.overhead_s, costs.transfer_s[-1], triples)
            powers = session.powers_w() if session.capabilities.powers else {}
            session = ProfiledSession(platform, self._graph, prices, powers)
        how = [replace(each, powers=known_weights(each), meter=None) for each in asked]
        return cast("Priced", self._everywhere(PricedSession(session, how)))

    def _starts(self) -> list[Plan]:
        """Return starts of the local search: optima of some freedoms, in each additive objective."""
        costs, ranks = self._latency, self.ranks
        found = [chain_plan(self._graph, (), [group[0].name]) for group in costs.platform.classes().values()]
        shapes: list[Shape] = [Chains(self._graph, self._most)]
        if isinstance(self._inner, SegmentSpace):
            shapes.append(Shared(self._inner))
        for how in self._how[: self._count]:
            by = known_weights(how)
            summed = how.objective.aggregation == "sum"
            own = weighed(costs, by) if summed else costs
            scale = np.array([by[p.name] if summed else 1.0 for p in costs.platform.processors])
            for shape in shapes:
                found.append(shape.solve(own)[0])
                if ranks is not None:
                    model = RankCosts(ranks.space, own, ranks.triple_s * scale[:, None], shape)
                    found.append(best_ranked(model, self._error).best)
        return found

    def _bound(self, how: Pricing) -> Relaxation:
        """Return the lower bound under the model, in an objective's unit; 0 where none is known."""
        if not how.objective.is_additive:
            return Relaxation(0.0, 0.0)
        cheapest = replace(self._latency, beyond_s=None)
        if self.ranks is not None:
            cheapest = self.ranks.cheapest(cheapest)
        if how.objective.aggregation == "sum":
            own = weighed(cheapest, known_weights(how))
            least = float(own.operator_s.min(axis=0).sum())
            if isinstance(self._inner, SegmentSpace):  # running side by side never reduces the sum
                chains = SegmentModel(self._inner, own, copy_s_per_byte=0.0).best(splits=False, branches=False)
                least = max(least, chains.cost_s)
            return Relaxation(least, least)
        splits = isinstance(self._inner, SegmentSpace) and bool(self._inner.axes)
        found = relax(self._graph, cheapest, range(len(self._graph.operators)) if splits else ())
        return Relaxation(found.work_s, found.work_s) if how.objective.aggregation == "busiest" else found

    def ranked(self, ranks: RankCosts) -> StudyObjective:
        """Return the latency of chains with ranks."""
        bound = rank_model(self._usual, self._profiled, self._platform, ranks.space, self._most, least=True)
        limits = RankLimits(ranks, self._error)
        estimate = rank_estimate(self._usual, limits, bound)
        return StudyObjective(
            self._session,
            ranks.price,
            self._problem(estimate, ranks=limits),
            estimate.bounds,
            ranks.costs,
            ranks.price,
            self._more,
            breaks=lambda plan: rank_violations(ranks, self._most_expected, plan),
        )

    def chains(self) -> StudyObjective:
        """Return any objectives of chains."""
        session, latency, count = self._session, self._latency, self._count
        models = [objective_model(how, self._graph, latency) for how in self._how]
        sessions = [session] if self.is_latency else [session.only(which) for which in range(count)]
        first, *others = (
            objective_estimate(model, alone, self._space, self._most, 1 if which else self._optima)
            for which, (model, alone) in enumerate(zip(models, sessions, strict=False))
        )
        # A front starts from the optimum of each objective.
        optima = {plan.digest: plan for plan in (*first.optima, *(each.optima[0] for each in others))}
        named, by = self._how[:count], self._how[0].counts if models[0].objective.aggregation == "sum" else {}
        guided = all(has_criterion(how.objective) if count > 1 else how.objective.of_plan is None for how in named)
        makes = None
        if count > 1 and guided:
            makes = (lambda costs: criteria(self._graph, named, costs), lambda processor: by.get(processor, 1.0))
        figures: dict[str, Predict] = {}
        least: dict[str, float] = {}
        limited = {limit.name for limit in limits_of(self._config)}
        names = {p.name for p in self._platform.processors}
        for model, how in zip(models, self._how, strict=True):
            name = model.objective.name
            if name in limited and model.objective.aggregation == "sum" and set(how.counts) >= names:
                figures[name] = partial(chain_cost, replace(model.costs, beyond_s=None))
                least[name] = best_chains(model.costs, self._most)[0].cost_s
        costs = latency if count > 1 else models[0].costs
        chains = None if self.is_latency else models[0].chains  # auto has a proposer of its own for latencies
        estimate = ModelEstimate(costs, tuple(optima.values()), first.bounds)
        return StudyObjective(
            session,
            models[0].predict,
            self._problem(estimate, chains=chains, criteria=makes, guided=guided),
            estimate.bounds,
            latency,
            partial(chain_cost, latency),
            figures=figures,
            least=least,
        )


def _everywhere(config: StudyConfig, platform: Platform, session: Session) -> Session:
    """Return a session in all states that are asked for."""
    return in_states(session, platform, config.state, config.robust) if config.state else session


def _pricings(config: StudyConfig, platform: Platform, session: Session) -> list[Pricing]:
    """Return how a session measures objectives, then limited figures."""
    return [pricing(find_objective(name), platform, session) for name in (*config.objective, *needed(config))]


def needed(config: StudyConfig) -> list[str]:
    """Return the objectives that are limited but not minimised."""
    limited = [LATENCY.name] if config.deadline is not None else []
    limited += [limit.name for limit in limits_of(config) if limit.name in OBJECTIVES]
    return [name for name in limited if name not in config.objective]


def policies(config: StudyConfig) -> tuple[SamplingPolicy, SamplingPolicy]:
    """Return the sampling policies of named plans and of proposals.

    Proposals share the time of the budget: with many of them, each is measured only well enough to see whether it
    belongs to the finalists, which are all measured again.
    """
    each_s = min(max(_PROPOSALS_S / config.budget, _LEAST_S), _MOST_S)
    if find_objective(config.objective[0]).many_runs:  # each observation takes many runs
        named = SamplingPolicy(precision=config.precision, min_runs=2, max_runs=6, warmup_max=2)
        return named, SamplingPolicy(precision=config.precision, min_runs=1, max_runs=4, warmup_max=1)
    named = SamplingPolicy(precision=config.precision, max_s=_MOST_S, min_runs=2)
    return named, SamplingPolicy(precision=config.precision, max_s=each_s, min_runs=1)
