"""The model estimate of branches and splits: times of joins, the best plan under the model, and baselines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from evaluators.base import Batch
from evaluators.schedule import Timeline
from optimizer.exact.bound import relax
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import NEVER_S, ChainCosts, chain_cost
from optimizer.exact.graphs.dag import list_scheduled
from optimizer.exact.graphs.graph_costs import GraphCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.exact.side_by_side import side_by_side
from optimizer.model.baselines import (
    BRANCHES,
    BY_CHANNELS,
    BY_HEIGHT,
    CHAINS,
    CUTS,
    EVERY,
    GREEDY,
    LIST,
    MOST_PARTS,
    SEED_003,
    SIDE_BY_SIDE,
    SINGLE,
    Baseline,
    baselines,
)
from optimizer.model.bounds import Bounds, ModelEstimate
from optimizer.model.branch_greedy import branch_greedy
from optimizer.model.profile import Profile, Profiler, pair_of
from search_spaces.core.errors import InfeasibleError, PlanError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer
from search_spaces.spaces.segment_space import Block, SegmentSpace
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import Part

_RUNS, _LEAST_RUNS, _MOST_S = 12, 3, 1.0


def split_profile(of: Profiler, space: SegmentSpace, known: Profile) -> Profile:
    """Return a profile with directly measured times of starting a part and of joining another core.

    As differences of two latencies they would drown in noise on large models. Processors that run beside no other one
    keep their times. Joins are measured in a plan that splits every operator, since a core that waits for half a model
    would go idle.

    Args:
        known: the operators' times; those of processors with memory of their own stay as they are.

    Raises:
        UnavailableError: the device failed.
    """
    operator_s, overhead_s, transfer_s = dict(known.operator_s), dict(known.overhead_s), dict(known.transfer_s)
    count = len(of.graph.operators)
    cores = [p for p in of.platform.processors if p.kind == "cpu" and np.isfinite(known.whole_s[p.like])]
    together = [(a, b) for a, b in combinations(cores, 2) if not a.excludes(b)]
    sharing = {p.like: p.name for pair in reversed(together) for p in reversed(pair)}
    for like, name in sharing.items() if count > 1 else ():
        of.progress(f"timing stages on {name}")
        batches = _runs(of, chain_plan(of.graph, every_layer(of.graph), [name] * count))
        took_s = np.median([batch.stage_s[0] for batch in batches], axis=0)
        overhead_s[like] = float(np.median([gap for batch in batches for gap in _gaps_s(batch)]))
        rest_s = max(0.0, known.whole_s[like] - overhead_s[like])
        operator_s[like] = tuple(float(s) for s in took_s * (rest_s / max(float(took_s.sum()), 1e-12)))
    for a, b in reversed(together) if count > 1 else ():
        of.progress(f"timing joins of {a.name} and {b.name}")
        plan = space.plan(shared_by(space, (a.name, b.name), (known.whole_s[a.like], known.whole_s[b.like])))
        waits = [wait for batch in _runs(of, plan) for wait in waits_s(of.graph, plan, batch.timeline)]
        if waits:
            transfer_s[pair_of(a.like, b.like)] = max(0.0, float(np.median(waits)))
    return Profile(operator_s, overhead_s, transfer_s, known.whole_s)


def shared_by(space: SegmentSpace, on: tuple[str, str], whole_s: tuple[float, float]) -> tuple[Part, ...]:
    """Return a plan that splits every operator into sides of about the same time, where it can.

    Args:
        whole_s: seconds of the whole model on each of the two.
    """
    share = min(max(round(GRID * whole_s[1] / max(sum(whole_s), 1e-12)), 1), GRID - 1)
    quicker = on[int(whole_s[1] < whole_s[0])]
    blocks: list[Block] = []
    for segment in space.segments:
        first, last = segment.first, segment.last
        split = space.alone(first, "each height", share)
        if len(segment) > 1:
            blocks.append(Block(first, last, "each height", *on, share))
        elif split is not None:
            axis, cut = split
            step = next(step for step, at in space.cuts(first, last, axis).items() if at == cut)
            blocks.append(Block(first, last, axis, *on, step))
        else:
            blocks.append(Block(first, last, "whole", quicker))
    return space.expand(blocks)


def waits_s(graph: Graph, plan: Plan, timeline: Timeline | None) -> list[float]:
    """Return, for each stage that waited for another processor, the seconds from that one's end to its start."""
    if timeline is None:
        return []
    places: dict[int, list[int]] = {}  # several of an operator that is split
    for index, stage in enumerate(plan.stages):
        for o in stage.operators:
            places.setdefault(o, []).append(index)
    events = {event.stage: event for event in timeline.events}
    found: list[float] = []
    ended: dict[str, float] = {}
    for index, stage in enumerate(plan.stages):
        if index not in events:  # a stage of nothing but operators that need no copy
            continue
        needs = {at for o in stage.operators for p in graph.predecessors(o) for at in places[p]} - {
            index
        } & events.keys()
        last = max(needs, key=lambda i: events[i].end_s, default=None)
        elsewhere = last is not None and plan.stages[last].processor != stage.processor
        if last is not None and elsewhere and events[last].end_s >= ended.get(stage.processor, 0.0):
            found.append(events[index].start_s - events[last].end_s)
        ended[stage.processor] = events[index].end_s
    return found


def _runs(of: Profiler, plan: Plan) -> Sequence[Batch]:
    """Return some runs of a plan, after one that warms it up."""
    found: list[Batch] = []
    with closing(of.load(plan)) as candidate:
        candidate.run(1)
        end_s = time.monotonic() + _MOST_S
        while len(found) < _LEAST_RUNS or (len(found) < _RUNS and time.monotonic() < end_s):
            found.append(candidate.run(1))
    return found


def _gaps_s(batch: Batch) -> list[float]:
    """Return the seconds between each stage's end and the start of the next one."""
    events = sorted(batch.timeline.events, key=lambda e: e.start_s) if batch.timeline is not None else []
    return [max(0.0, b.start_s - a.end_s) for a, b in pairwise(events)] or [0.0]


def segment_estimate(graph: Graph, costs: ChainCosts, space: SegmentSpace, *, own: bool = False) -> ModelEstimate:
    """Return the model estimate: the optimum, which is also the lower bound of the space if it is exact.

    Args:
        own: whether the costs are the evaluator's own, whose prices of plans may include more.
    """
    model = SegmentModel(space, costs)
    best = model.best()
    exact = not own and _tried(model)
    # Relaxation: every operator can be split. Where one cannot, the bound is a little low.
    relaxed = relax(graph, costs, range(len(graph.operators)) if space.axes else ())
    bounds = Bounds(best.cost_s if exact else relaxed.latency_s, exact, relaxed, own=own)
    return ModelEstimate(costs, (space.plan(best.parts),), bounds)


def segment_baselines(
    graph: Graph, platform: Platform, space: SegmentSpace, costs: ChainCosts, fastest: str, asked: Collection[str] = ()
) -> tuple[Baseline, ...]:
    """Return the baselines: each processor alone, published procedures for branches and splits, and those of cuts.

    Of branches the procedure of NEST-C (seed 003), and all of them side by side. Of splits CoDL's procedure (seed 002),
    the best splits of one operator each, along one axis and along both, and each operator split in proportion, as a
    pool of threads would, by the two processors that are the quickest together. Also the best plan of cuts alone by the
    model, which is outside the space if a module is cut twice, and, if there are both, those of branches and of splits
    alone. Where runs are too many for all their placements to be tried, also the plan of list scheduling, whose stages
    the space need not have.

    Args:
        asked: names of baselines that are returned even where another one is the same plan.
    """
    model = SegmentModel(space, costs)
    usual = baselines(graph, platform, fastest)
    found = [b for b in usual if len(b.plan.stages) == 1]
    named: list[tuple[str, Sequence[Part]]] = []
    if space.branching:
        main = [p.name for p in platform.processors].index(fastest)
        free = replace(costs, overhead_s=np.zeros_like(costs.overhead_s), transfer_s=np.zeros_like(costs.transfer_s))
        named += [(SEED_003, _greedy(space, costs, main)), (SIDE_BY_SIDE, _greedy(space, free, main))]
    if space.axes:
        named.append((GREEDY, model.greedy().parts))
        axes: tuple[tuple[str, Axis | None], ...] = (SINGLE, None), (BY_HEIGHT, "height"), (BY_CHANNELS, "channels")
        named += [(name, model.best(chains=False, branches=False, axis=axis).parts) for name, axis in axes]
    if space.axes and space.branching:
        named += [(BRANCHES, model.best(splits=False).parts), (CHAINS, model.best(branches=False).parts)]
    with suppress(InfeasibleError, UnavailableError):
        cut = best_chains(costs, min(MOST_PARTS, len(graph.operators)), stop_s=time.monotonic() + _MOST_S)[0]
        best = canonical(cut.plan(graph), graph, platform)
        found.append(Baseline(CUTS, best))
    scheduled = None if _tried(model) else list_scheduled(graph, _between(graph, costs))
    if scheduled is not None:
        found.append(Baseline(LIST, scheduled))
    whole_s = {p: chain_cost(costs, chain_plan(graph, (), [p])) for pair in space.pairs for p in pair}
    able = [pair for pair in space.pairs if all(np.isfinite(whole_s[processor]) for processor in pair)]
    if able and space.axes:
        on = max(able, key=lambda pair: sum(1 / max(whole_s[processor], 1e-12) for processor in pair))
        named.append((EVERY, shared_by(space, on, (whole_s[on[0]], whole_s[on[1]]))))
    found += [Baseline(name, space.plan(parts)) for name, parts in named]
    known: dict[str, Baseline] = {}
    for each in found:
        known.setdefault(each.plan.digest, each)
    known |= {b.plan.digest: b for b in usual}
    return tuple(dict.fromkeys((*known.values(), *(b for b in found if b.name in asked))))


def _tried(model: SegmentModel) -> bool:
    """Return whether all placements of all runs are tried."""
    return all(side_by_side(segment, model.costs).exact for segment in model.space.branching)


def _between(graph: Graph, costs: ChainCosts) -> GraphCosts:
    """Return the costs of a chain's operators with a transfer for each tensor, from its writer."""
    processors = len(costs.platform.processors)
    between = np.zeros((len(graph.tensors), processors, processors))
    for operator in range(1, len(graph.operators)):
        between[list(graph.operators[operator - 1].outputs)] = np.minimum(costs.transfer_s[operator], NEVER_S)
    return GraphCosts(costs.platform, costs.operator_s, costs.overhead_s, between)


def _greedy(space: SegmentSpace, costs: ChainCosts, main: int) -> tuple[Part, ...]:
    """Return the plan of seed 003's procedure; side by side is always better where stages and transfers are free."""
    runs = BranchRuns.of(space.graph)
    names = [p.name for p in costs.platform.processors]
    processors = branch_greedy(runs, costs, main)
    return space.placed([names[processors[runs.run_of[o]]] for o in range(len(space.graph.operators))])


def segment_price(space: SegmentSpace, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return a function from a plan to the model's seconds."""
    model = SegmentModel(space, costs)

    def price(plan: Plan) -> float:
        try:
            return model.price(plan)
        except PlanError:
            return chain_cost(costs, plan)

    return price
