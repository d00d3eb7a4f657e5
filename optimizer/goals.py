"""What a study makes small, and what it believes of it: the session that tells it, the model, the front of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from evaluators.base import Session
from evaluators.cost_model.session import CostModelSession
from evaluators.cost_model.states import StatesSession
from evaluators.objectives import LATENCY, OBJECTIVES, PricedSession, find_objective, pricing, weights
from evaluators.sampling import SamplingPolicy
from evaluators.tabulated import Tabulated
from optimizer.baselines import Baseline
from optimizer.bounds import Beliefs, beliefs
from optimizer.branches import branch_beliefs, predictor
from optimizer.coexecution import coexecution_beliefs, coexecution_price
from optimizer.config import StudyConfig, most_stages
from optimizer.decide import Verdict
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.ranks import RankAim
from optimizer.exact.weighed import weighed
from optimizer.history import History
from optimizer.limits import allowed_error, limits_of
from optimizer.loop import Loop, measure_plan
from optimizer.objective import known_weights, latency_costs, objective_beliefs, objective_model
from optimizer.objective_spaces import (
    NonChain,
    latency_price,
    least_work,
    objective_price,
    space_beliefs,
    sum_price,
    weighed_ranks,
)
from optimizer.pareto import Front, criteria, front_of, measured_again
from optimizer.profile import Profile
from optimizer.ranks import SLACK, rank_baselines, rank_beliefs, rank_model, rank_violations
from optimizer.robust import NOMINAL, in_states, nominal_plan, robust_beliefs
from optimizer.samplers.auto import Problem
from search_spaces.branch_space import BranchSpace
from search_spaces.coexecution import CoexecutionSpace
from search_spaces.constraints import Violation
from search_spaces.errors import UsageError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.rank_space import RankSpace
from search_spaces.space import EnumerableSpace

# What else is worth a measurement, "auto" finds out better than the model, as soon as it has been corrected once.
_MODEL_OPTIMA = (8, 1)
_PROPOSALS_S, _LEAST_S, _MOST_S = 45.0, 0.05, 0.4


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """What a study makes small.

    Attributes:
        session: tells it of plans.
        believed: in its unit.
        predict: what the model says of a plan, in its unit.
        latency: the additive model of the latency.
        latency_s: what the model says of a plan's latency.
        problem: for samplers, but for the constraints.
        more: baselines beside the usual ones.
        figures: what the model says of other figures of a plan that are limited, by their names.
        least: what no plan goes below in the model, of these.
        breaks: what a plan breaks beside the usual constraints.
    """

    session: Session
    believed: Beliefs
    predict: Callable[[Plan], float]
    latency: ChainCosts
    latency_s: Callable[[Plan], float]
    problem: Callable[[Callable[[Plan], bool]], Problem]
    more: tuple[Baseline, ...] = ()
    figures: Mapping[str, Callable[[Plan], float]] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    breaks: Callable[[Plan], tuple[Violation, ...]] = lambda _: ()


def asked(config: StudyConfig, platform: Platform, session: Session) -> Session:
    """Return the session whose plans are searched: in all states of the platform that a person names.

    Raises:
        UsageError: the session cannot put the platform into states.
    """
    return in_states(session, platform, config.state, config.robust) if config.state else session


def aim_of(
    config: StudyConfig, graph: Graph, platform: Platform, space: EnumerableSpace, session: Session, profiled: Profile
) -> Aim:
    """Return what a study makes small.

    Args:
        session: measures or predicts latencies, on the platform as it is.

    Raises:
        InfeasibleError: no plan fits.
        UnavailableError: the energy is asked for, and nothing tells it.
    """
    most = most_stages(config, len(graph.operators))
    optima = _MODEL_OPTIMA[config.sampler == "auto"]
    if config.max_error is not None and isinstance(session, Tabulated) and not isinstance(space, RankSpace):
        raise UsageError("--max-error: this evaluator computes no outputs", "use --evaluator litert, or leave it out")
    if isinstance(space, RankSpace):
        return _ranked_aim(config, graph, platform, space, session, profiled, most)
    usual, session = session, asked(config, platform, session)
    priced = _priced(config, platform, session)
    if priced is not None:
        return _priced_aim(config, graph, platform, space, priced, profiled, most, optima)
    more: tuple[Baseline, ...] = ()
    if isinstance(space, BranchSpace):
        believed = branch_beliefs(graph, session, profiled, platform, space)
    elif isinstance(space, CoexecutionSpace):
        believed = coexecution_beliefs(graph, profiled.costs(platform), space)
    elif isinstance(session, StatesSession):
        believed = robust_beliefs(graph, session, platform, most)
    else:
        believed = beliefs(graph, session, profiled, platform, space, most, optima)
    if isinstance(session, StatesSession) and isinstance(usual, CostModelSession):
        more = (Baseline(NOMINAL, nominal_plan(graph, usual, platform, most)),)
    costs = believed.costs
    predict = predictor(graph, space, costs)
    if isinstance(space, CoexecutionSpace):
        predict = coexecution_price(space, costs)
    return Aim(
        session,
        believed,
        predict,
        costs,
        predict,
        lambda fits: Problem(graph, platform, space, costs, fits),
        more,
    )


def _ranked_aim(
    config: StudyConfig,
    graph: Graph,
    platform: Platform,
    space: RankSpace,
    session: Session,
    profiled: Profile,
    most: int,
) -> Aim:
    error = allowed_error(config) or 0.0
    model = plain = rank_model(graph, session, profiled, platform, space)
    bound = rank_model(graph, session, profiled, platform, space, least=True)
    most_expected = error if isinstance(session, Tabulated) else SLACK * error
    priced = _priced(config, platform, session)
    if priced is not None:
        session = priced
        if priced.how[0].objective.law == "sum":
            by = known_weights(priced.how[0], platform)
            model, bound = weighed_ranks(model, by), weighed_ranks(bound, by)
    believed = rank_beliefs(graph, session, model, bound, error, most)
    aim = RankAim(model, error, most)
    return Aim(
        session,
        believed,
        model.price,
        plain.costs,
        plain.price,
        lambda fits: Problem(graph, platform, space, model.costs, fits, ranks=aim),
        rank_baselines(graph, platform, model, error, most, profiled.fastest(platform)),
        breaks=lambda plan: rank_violations(model, most_expected, plan),
    )


def _priced_aim(
    config: StudyConfig,
    graph: Graph,
    platform: Platform,
    space: EnumerableSpace,
    session: PricedSession,
    profiled: Profile,
    most: int,
    optima: int,
) -> Aim:
    model = objective_model(session, graph, platform, profiled)
    latency = latency_costs(session.session, graph, platform, profiled)
    several = len(config.objective) > 1
    chains = not isinstance(space, NonChain)
    first = session.how[0]
    by = weights(first.objective, platform, first.powers) if first.objective.law == "sum" else {}
    named = PricedSession(session.session, session.how[: len(config.objective)])
    makes = (lambda costs: criteria(graph, named, costs), lambda lane: by.get(lane, 1.0)) if several else None
    figures: dict[str, Callable[[Plan], float]] = {}
    least: dict[str, float] = {}
    for how in session.how:
        if how.objective.name in {limit.name for limit in limits_of(config)} and how.objective.law == "sum":
            by = weights(how.objective, platform, how.powers)
            if set(by) >= {p.name for p in platform.processors}:
                costs = weighed(latency, by)
                figures[how.objective.name] = sum_price(space, costs)
                least[how.objective.name] = best_chains(costs, most)[0].cost_s if chains else least_work(costs)
    # Where plans are no chains, what is small when parts overlap is searched as the latency is.
    law = model.law if chains or model.objective.law != "latency" else None
    return Aim(
        session,
        space_beliefs(model, session, space, profiled)
        if isinstance(space, NonChain)
        else objective_beliefs(model, session, most, optima),
        objective_price(model, space),
        latency,
        latency_price(graph, space, latency),
        lambda fits: Problem(graph, platform, space, latency if several else model.costs, fits, law, makes),
        figures=figures,
        least=least,
    )


def _priced(config: StudyConfig, platform: Platform, session: Session) -> PricedSession | None:
    """Return the session that tells the objectives of plans, and what constraints ask for; None for latencies alone."""
    names = [*config.objective, *needed(config)]
    if names == [LATENCY.name]:
        return None
    return PricedSession(session, [pricing(find_objective(name), platform, session) for name in names])


def needed(config: StudyConfig) -> list[str]:
    """Return the objectives that are no aim of a study, but are limited."""
    limited = [LATENCY.name] if config.deadline is not None else []
    limited += [limit.name for limit in limits_of(config) if limit.name in OBJECTIVES]
    return [name for name in limited if name not in config.objective]


def find_front(
    config: StudyConfig, history: History, baselines: Mapping[str, Plan], loop: Loop, tell: Callable[[str], None]
) -> Front | None:
    """Return the front of several objectives; where things are measured its plans are measured once more."""
    if len(config.objective) == 1 or not any(t.measurement for t in history.known.values()):
        return None
    objectives = [find_objective(name) for name in config.objective]

    def find() -> Front:
        return front_of(history, objectives, baselines, lambda plan: not loop.violations(plan))

    inner = loop.session.session if isinstance(loop.session, PricedSession) else loop.session
    if isinstance(inner, Tabulated):
        return find()
    return measured_again(
        history,
        find,
        lambda plan: measure_plan(loop, plan, race=False),
        lambda trial: loop.log.append("repeat", trial.to_json()),
        tell,
    )


def at_knee(front: Front, history: History, baselines: Mapping[str, Plan]) -> Verdict:
    """Return the verdict for several objectives: the plan at the knee, and the baseline that is best by the first."""
    known = {name: t for name, plan in baselines.items() if (t := history.known.get(plan.digest)) is not None}
    name = min(known, key=lambda name: known[name].median_s)
    return Verdict(front.best, (name, baselines[name]), None, None)


def repeats_cost_more(session: Session) -> bool:
    """Return whether a run takes longer than the number that it gives says."""
    return isinstance(session, PricedSession)


def policies(config: StudyConfig) -> tuple[SamplingPolicy, SamplingPolicy]:
    """Return how to measure plans that stand in a table by name, and those that are proposed.

    The time for proposals is shared out among the budget: with many of them, each is measured only well enough to see
    whether it belongs to the finalists, which are all measured again.
    """
    each_s = min(max(_PROPOSALS_S / config.budget, _LEAST_S), _MOST_S)
    if find_objective(config.objective[0]).of_blocks:  # whose observations are of many runs each
        named = SamplingPolicy(precision=config.precision, min_runs=2, max_runs=6, warmup_max=2)
        return named, SamplingPolicy(precision=config.precision, min_runs=1, max_runs=4, warmup_max=1)
    named = SamplingPolicy(precision=config.precision, max_s=_MOST_S, min_runs=2)
    return named, SamplingPolicy(precision=config.precision, max_s=each_s, min_runs=1)
