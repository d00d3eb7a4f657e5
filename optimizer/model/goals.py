"""Objectives of a study: the session that measures them, their model estimate, and the front of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Candidate, Session, conditions_of, counters_of
from evaluators.measurement.final import Final, FinalComparison
from evaluators.objectives import (
    LATENCY,
    OBJECTIVES,
    Objective,
    Priced,
    PricedSession,
    find_objective,
    pricing,
    weights,
)
from evaluators.sampling import SamplingPolicy
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts, chain_cost, weighed
from optimizer.exact.ranks import RankLimits
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import ModelEstimate, model_estimate
from optimizer.model.objective import latency_costs, objective_estimate, objective_model
from optimizer.model.profile import Profile
from optimizer.model.ranks import SLACK, error_violations, rank_baselines, rank_estimate, rank_model, rank_violations
from optimizer.model.robust import NOMINAL, in_states, nominal_plan, robust_estimate
from optimizer.model.search_model import (
    SearchModel,
    bound_of,
    composed_estimate,
    latency_only,
    model_session,
    priced_model,
    starts_of,
)
from optimizer.model.segments import segment_estimate, segment_price
from optimizer.samplers.auto import Problem, Proposer
from optimizer.study.config import StudyConfig, most_stages
from optimizer.study.front import Front, FrontPlan, criteria, front_finalists, has_criterion, knee, significant_front
from optimizer.study.history import History, Trial
from optimizer.study.limits import allowed_error, limits_of
from optimizer.study.verdict import FinalSettings, Verdict, decide
from optimizer.workload.search import WorkloadProposer
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.spaces.chain import ChainSpace
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.space import EnumerableSpace, NeighbourlySpace

# Optima of the model to measure first, without and with the sampler "auto", which corrects the model as it measures.
_MODEL_OPTIMA = (8, 1)
_COMPOSED_STEPS = 120  # a prediction of a split plan takes milliseconds
_PROPOSALS_S, _LEAST_S, _MOST_S = 45.0, 0.05, 0.4


@dataclass(frozen=True, slots=True, eq=False)
class StudyObjective:
    """The objective of a study, with its model estimate.

    Attributes:
        session: measures or predicts it.
        estimate: the model estimate, in its unit.
        predict: the model's value of a plan, in its unit.
        latency: the additive model of the latency.
        latency_s: the model's latency of a plan.
        problem: for samplers, without constraints.
        more: baselines beside the usual ones.
        priced: the session, where it returns other objectives than latencies alone.
        figures: the model's values of limited figures, by name.
        least: their lower bounds under the model.
        breaks: further constraints that a plan violates.
    """

    session: Session
    estimate: ModelEstimate
    predict: Callable[[Plan], float]
    latency: ChainCosts
    latency_s: Callable[[Plan], float]
    problem: Callable[[Callable[[Plan], bool]], Problem]
    more: tuple[Baseline, ...] = ()
    priced: Priced | None = None
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
    _priced(config, platform, session)
    return in_states(session, platform, config.state, config.robust) if config.state else session


def study_objective(
    config: StudyConfig, graph: Graph, platform: Platform, space: EnumerableSpace, session: Session, profiled: Profile
) -> StudyObjective:
    """Return the objective of a study.

    Args:
        session: measures or predicts latencies, on the platform as it is.

    Raises:
        InfeasibleError: no plan fits.
    """
    most = most_stages(config, len(graph.operators))
    optima = _MODEL_OPTIMA[config.sampler == "auto"]
    if _is_composed(config, space):
        return _composed_objective(config, graph, platform, cast("NeighbourlySpace", space), session, profiled, most)
    if isinstance(space, RankSpace):
        return _ranked_objective(config, graph, platform, space, session, profiled, most)
    usual, states = session, in_states(session, platform, config.state, config.robust) if config.state else None
    session = states or session
    priced = _priced(config, platform, session)
    if priced is not None:
        return _priced_objective(config, graph, platform, space, priced, profiled, most, optima)
    more: tuple[Baseline, ...] = ()
    if isinstance(space, SegmentSpace):
        own = session.capabilities.costs and not space.axes
        costs = latency_costs(session, graph, platform, profiled) if own else profiled.costs(platform)
        estimate = segment_estimate(graph, costs, space, own=own)
    elif states is not None:
        estimate = robust_estimate(graph, states, platform, most)
    else:
        estimate = model_estimate(graph, session, profiled, platform, space, most, optima)
    if states is not None:
        more = (Baseline(NOMINAL, nominal_plan(graph, usual, platform, most)),)
    costs = estimate.costs
    predict = segment_price(space, costs) if isinstance(space, SegmentSpace) else partial(chain_cost, costs)
    return StudyObjective(
        session,
        estimate,
        predict,
        costs,
        predict,
        lambda fits: Problem(graph, platform, space, costs, fits),
        more,
    )


def _is_composed(config: StudyConfig, space: EnumerableSpace) -> bool:
    """Return whether no exact method covers these freedoms, objectives and states together."""
    latency = config.objective == (LATENCY.name,) and not needed(config)
    if isinstance(space, RankSpace):
        return not (isinstance(space.chains, ChainSpace) and latency and not config.state)
    if isinstance(space, SegmentSpace):
        return not latency or bool(config.state)
    return bool(config.state) and not latency


def _composed_objective(
    config: StudyConfig,
    graph: Graph,
    platform: Platform,
    space: NeighbourlySpace,
    usual: Session,
    profiled: Profile,
    most: int,
) -> StudyObjective:
    """Return the objective of a study, for plans of any shape, by predictions of whole plans."""
    priced = _priced(config, platform, usual)
    how = priced.how if priced is not None else latency_only(platform)

    def everywhere(session: Session) -> Any:
        return in_states(session, platform, config.state, config.robust) if config.state else session

    session, mean = everywhere(priced or usual), everywhere(usual)
    error, ranks = allowed_error(config) or 0.0, None
    if isinstance(space, RankSpace):
        ranks = rank_model(graph, usual, profiled, platform, space)
    most_expected = SLACK * error if session.capabilities.outputs else error

    def breaks(plan: Plan) -> tuple[Violation, ...]:
        return () if ranks is None else error_violations(ranks.space, most_expected, plan)

    predicting = model_session(usual, graph, platform, profiled, space)
    priced = everywhere(priced_model(predicting, platform, how))
    model = SearchModel(priced, graph, space, lambda plan: not breaks(plan))
    costs = latency_costs(mean, graph, platform, profiled)
    count = len(config.objective)
    starts = starts_of(space, graph, costs, how[:count], ranks, error, most)
    optima = model.optima(starts, count, config.seed)
    bound = bound_of(graph, space, costs, how[0], ranks)
    estimate = composed_estimate(model, costs, optima, bound, own=session.capabilities.costs)

    def propose(problem: Problem, seed: int) -> Proposer:
        return WorkloadProposer(space, model.predict, list(optima), seed, _COMPOSED_STEPS, fits=problem.fits)

    names = [each.objective.name for each in how]
    figures = {name: partial(model.figure, names.index(name)) for name in names[count:]}
    least = {each.objective.name: bound_of(graph, space, costs, each, ranks).latency_s for each in how[count:]}
    latency = SearchModel(everywhere(priced_model(predicting, platform, latency_only(platform))), graph, space)
    more: tuple[Baseline, ...] = ()
    if ranks is not None:
        more = rank_baselines(graph, platform, ranks, error, most, profiled.fastest(platform))
    return StudyObjective(
        session,
        estimate,
        model.predict,
        costs,
        latency.predict,
        lambda fits: Problem(graph, platform, space, costs, fits, search=propose, front=count > 1),
        more,
        priced=session if priced is not None else None,
        figures=figures,
        least=least,
        breaks=breaks,
    )


def _ranked_objective(
    config: StudyConfig,
    graph: Graph,
    platform: Platform,
    space: RankSpace,
    session: Session,
    profiled: Profile,
    most: int,
) -> StudyObjective:
    error = allowed_error(config) or 0.0
    model = plain = rank_model(graph, session, profiled, platform, space)
    bound = rank_model(graph, session, profiled, platform, space, least=True)
    most_expected = SLACK * error if session.capabilities.outputs else error
    estimate = rank_estimate(graph, session, model, bound, error, most)
    limits = RankLimits(model, error, most)
    return StudyObjective(
        session,
        estimate,
        model.price,
        plain.costs,
        plain.price,
        lambda fits: Problem(graph, platform, space, model.costs, fits, ranks=limits),
        rank_baselines(graph, platform, model, error, most, profiled.fastest(platform)),
        breaks=lambda plan: rank_violations(model, most_expected, plan),
    )


def _priced_objective(
    config: StudyConfig,
    graph: Graph,
    platform: Platform,
    space: EnumerableSpace,
    session: PricedSession,
    profiled: Profile,
    most: int,
    optima: int,
) -> StudyObjective:
    model = objective_model(session, graph, platform, profiled)
    latency = latency_costs(session.inner, graph, platform, profiled)
    count = len(config.objective)
    first = session.how[0]
    by = weights(first.objective, platform, first.powers) if first.objective.aggregation == "sum" else {}
    named = PricedSession(session.inner, session.how[:count])
    guided = all(has_criterion(how.objective) if count > 1 else how.objective.of_plan is None for how in named.how)
    makes = None
    if count > 1 and guided:
        makes = (lambda costs: criteria(graph, named, costs), lambda processor: by.get(processor, 1.0))
    figures: dict[str, Callable[[Plan], float]] = {}
    least: dict[str, float] = {}
    for how in session.how:
        if how.objective.name in {limit.name for limit in limits_of(config)} and how.objective.aggregation == "sum":
            by = weights(how.objective, platform, how.powers)
            if set(by) >= {p.name for p in platform.processors}:
                costs = weighed(latency, by)
                figures[how.objective.name] = partial(chain_cost, replace(costs, beyond_s=None))
                least[how.objective.name] = best_chains(costs, most)[0].cost_s
    estimate = objective_estimate(model, session, most, optima)
    for which in range(1, count):  # a front starts from the optimum of each objective
        other = session.only(which)
        found = objective_estimate(objective_model(other, graph, platform, profiled), other, most, 1).optima
        estimate = replace(estimate, optima=tuple({p.digest: p for p in (*estimate.optima, found[0])}.values()))
    return StudyObjective(
        session,
        estimate,
        model.predict,
        latency,
        lambda plan: chain_cost(latency, plan),
        lambda fits: Problem(
            graph, platform, space, latency if count > 1 else model.costs, fits, model.chains, makes, guided=guided
        ),
        priced=session,
        figures=figures,
        least=least,
    )


def _priced(config: StudyConfig, platform: Platform, session: Session) -> PricedSession | None:
    """Return the session that measures objectives and limited figures; None for latencies alone."""
    names = [*config.objective, *needed(config)]
    if names == [LATENCY.name]:
        return None
    return PricedSession(session, [pricing(find_objective(name), platform, session) for name in names])


def needed(config: StudyConfig) -> list[str]:
    """Return the objectives that are limited but not minimised."""
    limited = [LATENCY.name] if config.deadline is not None else []
    limited += [limit.name for limit in limits_of(config) if limit.name in OBJECTIVES]
    return [name for name in limited if name not in config.objective]


def _is(digest: str, trial: Trial) -> bool:
    return trial.plan.digest == digest


def decide_front(
    session: Priced,
    history: History,
    baselines: Mapping[str, Plan],
    how: FinalSettings,
    objectives: Sequence[Objective],
) -> tuple[Front, Verdict]:
    """Return the front of several objectives, each plan compared with the others in each, and its knee's verdict.

    Raises:
        UnavailableError: no plan could be measured.
    """
    trials = (
        front_finalists(history, objectives, lambda t: how.fits(t) and how.allowed(t.plan))
        or front_finalists(history, objectives, how.fits)
        or front_finalists(history, objectives, lambda _: True)
    )
    if not trials:
        raise UnavailableError("no plan could be measured", "see the failures in the trial log")
    for digest in sorted(how.asked - {t.plan.digest for t in trials}):  # each, even where another one dominates it
        trials += front_finalists(history, objectives, partial(_is, digest))
    count = len(objectives)
    policy = replace(
        how.policy,
        max_s=how.policy.max_s / count,
        disturbed_s=how.policy.disturbed_s / count,
        claim_s=how.policy.claim_s / count,
        loaded=max(2, len(trials)),
    )
    stages = [len(t.plan.stages) for t in trials]
    finals: list[Final] = []
    for which in range(1, len(objectives)):
        other = session.only(which)
        how.progress(f"final comparison of {plural(len(trials), 'plan')} by {session.how[which].objective.name}")
        finals.append(
            FinalComparison(
                [_loader(other, how.graph, t.plan) for t in trials],
                policy,
                np.random.default_rng([how.seed, 2, len(finals)]),
                conditions=conditions_of(other),
                counters=counters_of(other),
                watched=lambda found: found.measured,
                computed=other.capabilities.computed,
                counted=session.how[which].objective.of_plan is not None,
                groups=[how.loaded_by(t.plan) for t in trials],
            ).run()
        )
    names = {plan.digest: name for name, plan in reversed(list(baselines.items()))}
    common = [i for i in range(len(trials)) if all(i in f.measured for f in finals)]
    if not common:
        reasons = dict.fromkeys(s.failure for f in finals for s in f.standings if s.failure)
        raise UnavailableError(f"no plan could be measured in every objective: {'; '.join(reasons)}")

    def rows(first: Final) -> list[int]:
        return significant_front([first, *finals], stages)

    def values(first: Final, kept: Sequence[int]) -> NDArray[np.float64]:
        samples = [[f.standings[i].samples for f in (first, *finals)] for i in kept]
        return np.array([[s.median if s else np.inf for s in row] for row in samples])

    def at_knee(first: Final, among: Sequence[int]) -> int:
        kept = [i for i in rows(first) if i in among] or [i for i in among if i in common] or common
        return kept[knee(values(first, kept))]

    first_settings = replace(how, policy=policy)
    verdict = decide(session.only(0), history, baselines, first_settings, trials=trials, choose=at_knee)
    kept = rows(verdict.final)
    if verdict.best not in [trials[i].plan for i in kept]:
        kept.append(next(i for i, t in enumerate(trials) if t.plan == verdict.best))
    table = values(verdict.final, kept)
    plans = tuple(
        FrontPlan(trials[i].plan, names.get(trials[i].plan.digest, ""), tuple(map(float, row)))
        for i, row in zip(kept, table, strict=True)
    )
    return Front(tuple(objectives), plans, next(i for i, p in enumerate(plans) if p.plan == verdict.best)), verdict


def _loader(session: Session, graph: Graph, plan: Plan) -> Callable[[], Candidate]:
    return lambda: session.load(graph, plan, fresh=True)


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
