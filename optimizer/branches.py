"""What a study in the space of branches believes before it measures: times of runs, baselines, the best plan by model.

The runs are timed as the stages that they would be, and joins as they happen between lanes that run side by side, since
the bound is to count what stages and joins cost on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations

import numpy as np

from evaluators.base import Refuser, Session
from evaluators.samples import Measurement
from evaluators.sampling import SamplingPolicy, measure
from evaluators.tabulated import Tabulated
from evaluators.timeline import Timeline
from optimizer.baselines import Baseline
from optimizer.bounds import Beliefs, Bounds
from optimizer.exact.bound import relax
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.cpsat import PROVEN
from optimizer.exact.dag import best_plan
from optimizer.exact.graph_costs import GraphCosts, makespan_s
from optimizer.exact.least import chain_costs
from optimizer.profile import Profile
from optimizer.seed_003 import seed_003
from search_spaces.branch_space import BranchSpace
from search_spaces.branches import walk
from search_spaces.chain import chain_plan
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan, Stage, canonical
from search_spaces.platform import Platform, Processor
from search_spaces.space import SearchSpace

SEED_003 = "seed 003"
SIDE_BY_SIDE = "every group side by side"
_POLICY = SamplingPolicy(precision=0.01, max_s=0.6, min_runs=5, max_runs=60)
_JOINS = 12  # inferences in which joins are timed
_SOLVE_S = 10.0
_ALL_TRIED = 256  # plans
_MOST_ROUNDS = 4


def predictor(graph: Graph, space: SearchSpace, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return what tells the seconds that the model gives a plan: where branches may overlap, the time until the end."""
    if not isinstance(space, BranchSpace):
        return lambda plan: chain_cost(costs, plan)
    table = GraphCosts.of_chain(graph, costs)
    return lambda plan: makespan_s(graph, table, plan)


def branch_profile(
    session: Session,
    graph: Graph,
    platform: Platform,
    space: BranchSpace,
    known: Profile,
    progress: Callable[[str], None],
) -> Profile:
    """Return a profile whose operators add up to the measured runs, with hand-over as it is where branches meet.

    Args:
        known: the operators, as they were timed one by one.

    Raises:
        UnavailableError: the device failed.
    """
    operator_s, overhead_s, hand_over_s = dict(known.operator_s), dict(known.overhead_s), dict(known.hand_over_s)
    for like, members in platform.classes().items():
        name = members[0].name
        if isinstance(session, Refuser) and session.refused(graph, name):
            continue
        progress(f"timing {len(space.runs.runs)} runs of branches on {name}")
        whole_s = known.whole_s[like]
        apart = _time(session, graph, Plan(graph.digest, tuple(Stage(r, name) for r in space.runs.runs)))
        overhead_s[like] = max(0.0, (apart.latency_s.median - whole_s) / (len(space.runs.runs) - 1))
        operator_s[like] = _rescaled(space, known.operator_s[like], apart.stage_s, overhead_s[like], whole_s)
    for a, b in _side_by_side(platform):
        if not all(np.isfinite(known.whole_s[p.like]) for p in (a, b)):
            continue
        progress(f"timing joins of {a.name} and {b.name}")
        pair = "|".join(sorted((a.like, b.like)))
        hand_over_s[pair] = _join_s(session, graph, space, a, b, operator_s, overhead_s)
    return Profile(operator_s, overhead_s, hand_over_s, known.whole_s)


def _rescaled(
    space: BranchSpace, operator_s: tuple[float, ...], stage_s: tuple[float, ...], overhead_s: float, whole_s: float
) -> tuple[float, ...]:
    """Return operators' times that add up to their runs', in proportion, and all of them to the whole model."""
    found = np.array(operator_s)
    for run, took_s in zip(space.runs.runs, stage_s, strict=True):
        inside = list(run)
        total = float(found[inside].sum())
        wanted = max(0.0, took_s - overhead_s)
        found[inside] = found[inside] * (wanted / total) if total > 0 else wanted / len(inside)
    total = float(found.sum())
    if total > 0:
        found *= max(0.0, whole_s - overhead_s) / total
    return tuple(float(s) for s in found)


def _join_s(
    session: Session,
    graph: Graph,
    space: BranchSpace,
    a: Processor,
    b: Processor,
    operator_s: Mapping[str, Sequence[float]],
    overhead_s: Mapping[str, float],
) -> float:
    """Return what a stage pays for each tensor that a stage on another lane wrote, with all groups side by side.

    That is what it waits beyond the end of that stage, and what it takes longer than behind one on its own lane, since
    what it reads lies in another core's cache.
    """
    lanes = [a.name] * len(space.runs.runs)
    for group in space.runs.groups:
        for number, branch in enumerate(space.runs.branches(group)):
            for run in branch:
                lanes[run] = (a, b)[number % 2].name
    plan = space.plan(lanes)
    like = {p.name: p.like for p in (a, b)}
    usual_s = [
        sum(operator_s[like[s.processor]][o] for o in s.operators) + overhead_s[like[s.processor]] for s in plan.stages
    ]
    writer = {t: s.processor for s in plan.stages for o in s.operators for t in graph.operators[o].outputs}
    handed = [
        sum(writer.get(t, s.processor) != s.processor for t in graph.boundary(s.operators).inputs) for s in plan.stages
    ]
    found = []
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(2)
        for _ in range(_JOINS):
            timeline = candidate.run(1).timeline
            if timeline is not None:
                took_s = {e.stage: e.end_s - e.start_s for e in timeline.events}
                colder_s = sum(took_s[i] - usual_s[i] for i, count in enumerate(handed) if count)
                found.append((sum(waits_s(graph, plan, timeline)) + max(0.0, colder_s)) / max(1, sum(handed)))
    return max(0.0, float(np.median(found))) if found else 0.0


def waits_s(graph: Graph, plan: Plan, timeline: Timeline | None) -> list[float]:
    """Return, for each stage that waited for another lane last, how long after that stage's end it began."""
    if timeline is None:
        return []
    place = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
    events = {event.stage: event for event in timeline.events}
    found: list[float] = []
    ended: dict[str, float] = {}
    for index, stage in enumerate(plan.stages):
        needs = {place[p] for o in stage.operators for p in graph.predecessors(o)} - {index}
        last = max(needs, key=lambda i: events[i].end_s, default=None)
        elsewhere = last is not None and plan.stages[last].processor != stage.processor
        if last is not None and elsewhere and events[last].end_s >= ended.get(stage.processor, 0.0):
            found.append(events[index].start_s - events[last].end_s)
        ended[stage.processor] = events[index].end_s
    return found


def branch_baselines(space: BranchSpace, platform: Platform, costs: ChainCosts, home: str) -> tuple[Baseline, ...]:
    """Return the baselines: whole on each kind of processor, seed 003's procedure, and every group side by side.

    Args:
        home: the processor that runs the whole model fastest.
    """
    graph = space.runs.graph
    names = [p.name for p in platform.processors]
    seed, eager = _procedures(space, costs, names.index(home))
    found = [
        Baseline(f"whole on {members[0].name}", canonical(chain_plan(graph, (), [members[0].name]), graph, platform))
        for members in platform.classes().values()
    ]
    return (*found, Baseline(SEED_003, seed), *([Baseline(SIDE_BY_SIDE, eager)] if eager != seed else []))


def _procedures(space: BranchSpace, costs: ChainCosts, home: int) -> tuple[Plan, Plan]:
    """Return the plan of seed 003's procedure, and that of it with stages and hand-over for nothing.

    The latter puts side by side whatever gains anything at all.
    """
    names = [p.name for p in costs.platform.processors]
    free = replace(costs, overhead_s=np.zeros_like(costs.overhead_s), hand_over_s=np.zeros_like(costs.hand_over_s))
    seed, eager = (space.plan([names[lane] for lane in seed_003(space.runs, c, home)]) for c in (costs, free))
    return seed, eager


def branch_beliefs(
    graph: Graph, session: Session, profiled: Profile, platform: Platform, space: BranchSpace
) -> Beliefs:
    """Return what is believed before anything is measured: the best plan of the space by the model, and its bound.

    The runs are placed jointly, by search or, where many runs lie between two gates, by CP-SAT; without OR-Tools the
    best plan near the baselines stands for the optimum of such a model, and its bound is that on all plans.
    """
    own = isinstance(session, Tabulated)
    costs = (
        chain_costs(platform, session.part_costs(graph)) if isinstance(session, Tabulated) else profiled.costs(platform)
    )
    relaxed = relax(graph, costs)
    price = predictor(graph, space, costs)
    starts = branch_starts(space, costs, profiled.fastest(platform))
    bound_s = relaxed.latency_s
    try:
        solved = best_plan(space.runs.as_graph(), run_costs(space, costs), _SOLVE_S)
    except UnavailableError:
        solved = None
    if solved is not None:
        lane_of = {run: stage.processor for stage in solved.plan.stages for run in stage.operators}
        starts.insert(0, space.plan([lane_of[run] for run in range(len(space.runs.runs))]))
        bound_s = solved.bound_s
    plan, is_least = best_near(space, price, starts)
    if is_least:
        bound_s = max(bound_s, price(plan))
    if own:  # what the evaluator computes itself may be less than the model here, but not less than the relaxations
        return Beliefs(costs, (plan,), Bounds(relaxed.latency_s, False, relaxed, own=True))
    return Beliefs(
        costs, (plan,), Bounds(float(bound_s), bool(price(plan) <= bound_s * (1 + PROVEN)), relaxed, own=False)
    )


def branch_starts(space: BranchSpace, costs: ChainCosts, home: str) -> list[Plan]:
    """Return plans near which a good one is looked for: of seed 003's procedure, and whole on each processor."""
    names = [p.name for p in costs.platform.processors]
    wholes = [space.plan([name] * len(space.runs.runs)) for name in names]
    return [*_procedures(space, costs, names.index(home)), *wholes]


def best_near(space: BranchSpace, price: Callable[[Plan], float], starts: Sequence[Plan]) -> tuple[Plan, bool]:
    """Return the cheapest plan that is found, and whether it is known to be the cheapest of the space.

    A solver may join stages where that delays little and saves a start; stages of the space join where it delays
    nothing. So what is best for the one need not be for the other, and each step from the best start counts: a run, or
    a branch with all that is in it, goes to another lane. Few plans are all tried.
    """
    count = space.cardinality()
    if count <= _ALL_TRIED:
        return min((space.plan_at(i) for i in range(count)), key=price), True
    best = min(starts, key=price)
    least_s = price(best)
    moved: list[tuple[int, ...]] = [(run,) for run in range(len(space.runs.runs))]
    moved += [branch for group in walk(space.runs.groups) for branch in space.runs.branches(group) if len(branch) > 1]
    names = sorted({name for plan in starts for name in space.lanes(plan)})
    for _ in range(_MOST_ROUNDS):
        before_s = least_s
        for runs in moved:
            for name in names:
                lanes = space.lanes(best)
                for run in runs:
                    lanes[run] = name
                plan = space.plan(lanes)
                if (seconds := price(plan)) < least_s:
                    best, least_s = plan, seconds
        if least_s >= before_s:
            break
    return best, False


def run_costs(space: BranchSpace, costs: ChainCosts) -> GraphCosts:
    """Return what runs cost, as operators of the graph of runs."""
    graph = space.runs.as_graph()
    together = np.stack([costs.operator_s[:, list(run)].sum(axis=1) for run in space.runs.runs], axis=1)
    of_operators = GraphCosts.of_chain(space.runs.graph, costs)
    return GraphCosts(costs.platform, together, of_operators.overhead_s, of_operators.hand_over_s[: len(graph.tensors)])


def _side_by_side(platform: Platform) -> list[tuple[Processor, Processor]]:
    """Return one pair of lanes that can run at once for each pair of kinds that has one."""
    found: Mapping[tuple[str, ...], tuple[Processor, Processor]] = {
        tuple(sorted((a.like, b.like))): (a, b)
        for a, b in reversed(list(combinations(platform.processors, 2)))
        if not a.excludes(b)
    }
    return list(found.values())


def _time(session: Session, graph: Graph, plan: Plan) -> Measurement:
    with closing(session.load(graph, plan)) as candidate:
        return measure(candidate, _POLICY)
