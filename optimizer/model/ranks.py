"""The model estimate of a study of ranks: times of triples, the best plan under the model, and baselines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Session
from optimizer.exact.bound import relax
from optimizer.exact.least import chain_costs
from optimizer.exact.ranks import Chains, RankCosts, RankLimits, best_ranked, uniform
from optimizer.model.baselines import Baseline, baselines
from optimizer.model.bounds import Bounds, ModelEstimate, price_of
from optimizer.model.profile import Profile, Profiler
from search_spaces.core.constraints import Violation
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform
from search_spaces.core.wording import plural
from search_spaces.rewrites.lower import lowering
from search_spaces.rewrites.tucker import Ranks
from search_spaces.rewrites.tucker_ranks import RankChoices
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer
from search_spaces.spaces.rank_space import RankSpace

SLACK = 3.0
"""If outputs can be compared, plans with an expected error of up to this multiple of the limit are run."""

UNIFORM = "Tucker, one share for all layers"
CHAIN = "the best chain without Tucker"

_LOGGER = logging.getLogger("partition_optimizer")


def rank_profile(of: Profiler, space: RankSpace, known: Profile, most_error: float) -> Profile:
    """Return a profile with the times of each triple on each kind of processor.

    All layers are decomposed at once, by their first, second, … choice. A choice that exceeds the allowed error takes
    infinitely long.

    Raises:
        UnavailableError: the device failed.
        RewriteError, ModelError: the weights cannot be read.
    """
    warn_of_none(space, of.graph.name, most_error)
    allowed = (SLACK * most_error if of.session.capabilities.outputs else most_error) ** 2
    triple_s = {like: np.full(len(space.places), math.inf) for like in of.first}
    for level in range(max(map(len, space.options.values()), default=0)):
        ranks = {o: options[level] for o, options in space.options.items() if level < len(options)}
        ranks = {o: r for o, r in ranks.items() if space.loss(o, r) <= allowed}
        if not ranks:
            continue
        of.progress(f"timing {plural(len(ranks), 'decomposed convolution')}, rank set {level + 1}")
        for like, found in _level_s(of, space, known, ranks).items():
            for operator, seconds in found.items():
                triple_s[like][space.places[operator, ranks[operator]]] = seconds
    return replace(known, triple_s={like: tuple(values.tolist()) for like, values in triple_s.items()})


def warn_of_none(choices: RankChoices, name: str, most_error: float) -> None:
    """Warn if no convolution of a model can be decomposed within the allowed error."""
    if not choices.places:
        _LOGGER.warning("%s: no convolution is decomposed: the offered ranks save no multiply-accumulates", name)
        return
    least = min(choices.loss(*place) ** 0.5 for place in choices.places)
    if least > most_error:
        _LOGGER.warning(
            "%s: no convolution can be decomposed within an error of %g (the smallest estimate is %.2g): allow a "
            "larger --max-error, or use trained weights; for a built-in model use NAME+spectrum",
            name,
            most_error,
            least,
        )


def _level_s(of: Profiler, space: RankSpace, known: Profile, ranks: Mapping[int, Ranks]) -> dict[str, dict[int, float]]:
    """Return, for each kind of processor, the seconds of triples."""
    if of.session.capabilities.costs:
        made = lowering(of.graph).decomposed(tuple(LayerRanks(o, *both) for o, both in ranks.items()))
        table, count = of.session.part_costs(made.graph).operator_s, len(of.graph.operators)
        each = np.stack([np.bincount(made.origins, processor, count) for processor in table])
        row = {p.name: i for i, p in enumerate(of.platform.processors)}
        return {like: {o: float(each[row[name], o]) for o in ranks} for like, name in of.first.items()}
    found: dict[str, dict[int, float]] = {}
    for like, name in of.first.items():
        if not math.isfinite(known.whole_s[like]):
            continue  # it does not support some operators, so perhaps no triples either
        with suppress(UnavailableError):
            seconds = _timed(of, space, name, known.overhead_s[like], ranks)
            found[like] = {o: float(seconds[o]) for o in ranks}
    return found


def _timed(
    of: Profiler, space: RankSpace, name: str, overhead_s: float, ranks: Mapping[int, Ranks]
) -> NDArray[np.float64]:
    """Return the operators' times of a decomposed model, scaled to add up to the whole one."""
    cuts = every_layer(of.graph)
    plans = chain_plan(of.graph, (), [name]), chain_plan(of.graph, cuts, [name] * (len(cuts) + 1))
    whole, apart = (of.time(space.with_ranks(plan, ranks), needed=True) for plan in plans)
    alone: NDArray[np.float64] = np.maximum(np.array(apart.stage_s) - overhead_s, 0.0)
    total = float(alone.sum())
    return alone * ((whole.latency_s.median - overhead_s) / total) if total > 0.0 else alone


def rank_model(
    session: Session, profiled: Profile, platform: Platform, space: RankChoices, most: int, *, least: bool = False
) -> RankCosts:
    """Return the additive model of layers and triples.

    Args:
        most: stages of a plan at most.
        least: use the least cost of transfers, for a bound.
    """
    costs = profiled.costs(platform)
    if session.capabilities.costs:
        costs = chain_costs(platform, session.part_costs(space.graph), least=least)
    if least:
        costs = replace(costs, beyond_s=None)  # decomposed weights may fit where the model's do not
    triple_s = np.array([profiled.triple_s[p.like] for p in platform.processors])
    triple_s = triple_s.reshape(len(platform.processors), len(space.places))
    return RankCosts(space, costs, triple_s, Chains(space.graph, most))


def rank_estimate(session: Session, limits: RankLimits, bound: RankCosts) -> ModelEstimate:
    """Return the model estimate: the optimum with ranks and without, and the lower bound.

    Args:
        session: returns the objective, in the unit of the model.
        limits: with the error that outputs are expected to have.
        bound: the model with the least costs.

    Raises:
        InfeasibleError: no chain fits.
    """
    model, graph = limits.model, limits.model.space.graph
    best = best_ranked(model, limits.most_error)
    plans = dict.fromkeys((best.best, model.shape.solve(model.costs)[0]))
    relaxed = relax(graph, bound.cheapest(bound.costs))
    own = session.capabilities.costs
    # Where stages may overlap, sums are no bound.
    one_by_one = all(i - 1 in graph.predecessors(i) for i in range(1, len(graph.operators)))
    least_s = best_ranked(bound, limits.most_error).bound if one_by_one else relaxed.latency_s
    reached = min(map(price_of(graph, session), plans)) if own else best.value
    least_s = min(least_s, reached)
    return ModelEstimate(model.costs, tuple(plans), Bounds(least_s, reached <= least_s * (1 + 1e-9), relaxed, own=own))


def rank_baselines(limits: RankLimits, fastest: str) -> tuple[Baseline, ...]:
    """Return the baselines of ranks: one share for all layers, and the best cuts without ranks.

    Args:
        fastest: name of the processor that runs the whole model fastest.
    """
    model, space = limits.model, limits.model.space
    shared = uniform(model, fastest, limits.most_error)
    pure = [
        (UNIFORM, space.with_ranks(chain_plan(space.graph, (), [fastest]), shared)),
        (CHAIN, model.shape.solve(model.costs)[0]),
    ]
    usual = {b.plan.digest for b in baselines(space.graph, model.platform, fastest)}  # which a study has anyway
    found = {plan.digest: Baseline(name, plan) for name, plan in reversed(pure) if plan.digest not in usual}
    return tuple(reversed(found.values()))


def rank_violations(model: RankCosts, most_error: float, plan: Plan) -> tuple[Violation, ...]:
    """Return the violations of a plan's ranks: triples that are no faster, and the expected error."""
    if not plan.ranks:
        return ()
    found = []
    if slower := model.slower(plan):
        statement = f"triples that are no faster than their layers (the first is of operator {min(slower)})"
        found.append(Violation(statement, len(slower), 0, "triples", "leave these layers as they are"))
    return (*found, *error_violations(model.space, most_error, plan))


def error_violations(choices: RankChoices, most_error: float, plan: Plan) -> tuple[Violation, ...]:
    """Return the violation of a plan whose expected error exceeds the allowed one."""
    if (error := choices.error(plan)) <= most_error * (1 + 1e-9):
        return ()
    lever = "allow a larger --max-error, or give a model whose weights have a low rank"
    return (Violation("error of the outputs expected from the filters", error, most_error, "relative", lever),)
