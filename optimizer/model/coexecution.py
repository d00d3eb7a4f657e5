"""What a study of co-execution believes before it measures: the best plan by the model, and baselines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import combinations, pairwise

import numpy as np

from evaluators.base import Batch, Session
from optimizer.exact.bound import relax
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.coexecution import CoexecutionModel
from optimizer.model.baselines import Baseline, baselines
from optimizer.model.bounds import Beliefs, Bounds
from optimizer.model.branches import waits_s
from optimizer.model.profile import Profile
from search_spaces.core.errors import PlanError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.coexecution import CoexecutionSpace
from search_spaces.spaces.cuts import every_layer
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import Part

GREEDY = "CoDL's greedy chains"
SINGLE = "operators split one by one"
CHAINS = "chains split"
EVERY = "every operator shared"
BRANCHES = "branches side by side"
_RUNS, _LEAST_RUNS, _MOST_S = 12, 3, 2.5


def coexecution_profile(
    session: Session,
    graph: Graph,
    platform: Platform,
    space: CoexecutionSpace,
    known: Profile,
    progress: Callable[[str], None],
) -> Profile:
    """Return a profile in which starting a part, and meeting another core, are read off the clock where they happen.

    As differences of two latencies they drown in noise on large models, and where chains begin and end hangs on them.
    Cores meet where every operator is shared by both: one that waited for long, as behind a model's half, would sleep.

    Args:
        known: the operators, as they were timed; what has a memory of its own stays as it is.

    Raises:
        UnavailableError: the device failed.
    """
    operator_s, overhead_s, hand_over_s = dict(known.operator_s), dict(known.overhead_s), dict(known.hand_over_s)
    count = len(graph.operators)
    cores = [p for p in platform.processors if p.kind == "cpu" and np.isfinite(known.whole_s[p.like])]
    for like, name in {p.like: p.name for p in reversed(cores)}.items() if count > 1 else ():
        progress(f"timing stages on {name}")
        batches = _runs(session, graph, chain_plan(graph, every_layer(graph), [name] * count))
        took_s = np.median([batch.stage_s[0] for batch in batches], axis=0)
        overhead_s[like] = float(np.median([gap for batch in batches for gap in _gaps_s(batch)]))
        rest_s = max(0.0, known.whole_s[like] - overhead_s[like])
        operator_s[like] = tuple(float(s) for s in took_s * (rest_s / max(float(took_s.sum()), 1e-12)))
    for a, b in reversed(list(combinations(cores, 2))) if count > 1 else ():
        progress(f"timing joins of {a.name} and {b.name}")
        plan = space.plan(_shared_by(space, (a.name, b.name), (known.whole_s[a.like], known.whole_s[b.like])))
        waits = [wait for batch in _runs(session, graph, plan) for wait in waits_s(graph, plan, batch.timeline)]
        if waits:
            hand_over_s["|".join(sorted((a.like, b.like)))] = max(0.0, float(np.median(waits)))
    return Profile(operator_s, overhead_s, hand_over_s, known.whole_s)


def _shared_by(space: CoexecutionSpace, on: tuple[str, str], whole_s: tuple[float, float]) -> list[Part]:
    """Return every operator as a part, shared so that both sides take about as long, or whole where it cannot be.

    Args:
        whole_s: what the whole model takes on each of the two.
    """
    first = round(GRID * whole_s[1] / max(sum(whole_s), 1e-12))
    found = []
    for operator in range(len(space.graph.operators)):
        split = [(axis, cuts) for axis in space.axes if (cuts := space.cuts(operator, operator + 1, axis))]
        if not split:
            found.append(Part(operator, operator + 1, (on[int(whole_s[1] < whole_s[0])],)))
            continue
        axis, cuts = split[0]
        cut = cuts[min(cuts, key=lambda step: abs(step - first))]
        found.append(Part(operator, operator + 1, on, axis, cut))
    return found


def _runs(session: Session, graph: Graph, plan: Plan) -> Sequence[Batch]:
    """Return some runs of a plan, after one that warms it up."""
    found: list[Batch] = []
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(1)
        end_s = time.monotonic() + _MOST_S
        while len(found) < _LEAST_RUNS or (len(found) < _RUNS and time.monotonic() < end_s):
            found.append(candidate.run(1))
    return found


def _gaps_s(batch: Batch) -> list[float]:
    """Return what passed between each stage's end and the start of the next one."""
    events = sorted(batch.timeline.events, key=lambda e: e.start_s) if batch.timeline is not None else []
    return [max(0.0, b.start_s - a.end_s) for a, b in pairwise(events)] or [0.0]


def coexecution_beliefs(graph: Graph, costs: ChainCosts, space: CoexecutionSpace) -> Beliefs:
    """Return what is believed: the optimum of the model, which no plan of the space goes below in it."""
    best = CoexecutionModel(space, costs).best()
    # As if each operator could be split: none of the space is faster, and where one cannot the bound is a little low.
    bounds = Bounds(best.cost_s, True, relax(graph, costs, range(len(graph.operators))), own=False)
    return Beliefs(costs, (space.plan(best.parts),), bounds)


def coexecution_baselines(
    graph: Graph, platform: Platform, space: CoexecutionSpace, costs: ChainCosts, fastest: str
) -> tuple[Baseline, ...]:
    """Return the baselines: whole on each kind, CoDL's procedure (seed 002), and the best splits of one operator each.

    And each operator split in proportion, as a pool of threads would, by the two cores that are the quickest together.
    Of a model with branches also the best plans by the model that only split, and only run branches side by side.
    """
    model = CoexecutionModel(space, costs)
    found = {b.plan.digest: b for b in baselines(graph, platform, fastest) if len(b.plan.stages) == 1}
    pure = []
    if space.axes:
        pure += [(GREEDY, model.greedy()), (SINGLE, model.best(chains=False, branches=False))]
    if space.groups:
        pure += [(BRANCHES, model.best(splits=False)), *([(CHAINS, model.best(branches=False))] if space.axes else [])]
    named = [(name, costed.parts) for name, costed in pure]
    cores = [p.name for p in platform.processors if p.kind == "cpu"]
    whole_s = {core: chain_cost(costs, chain_plan(graph, (), [core])) for core in cores}
    able = [pair for pair in space.pairs if all(np.isfinite(whole_s.get(lane, np.inf)) for lane in pair)]
    if able and space.axes:
        on = max(able, key=lambda pair: sum(1 / max(whole_s[lane], 1e-12) for lane in pair))
        named.append((EVERY, tuple(_shared_by(space, on, (whole_s[on[0]], whole_s[on[1]])))))
    for name, parts in named:
        plan = space.plan(parts)
        found.setdefault(plan.digest, Baseline(name, plan))
    return tuple(found.values())


def coexecution_price(space: CoexecutionSpace, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return what tells the seconds that the model gives a plan."""
    model = CoexecutionModel(space, costs)

    def price(plan: Plan) -> float:
        try:
            return model.price(plan)
        except PlanError:
            return chain_cost(costs, plan)

    return price
