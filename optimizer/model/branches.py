"""What a study in the space of branches believes before it measures: baselines, the best plan by model, its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from evaluators.base import Session
from evaluators.schedule import Timeline
from optimizer.exact.bound import relax
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.graphs.cpsat import PROVEN
from optimizer.exact.graphs.dag import best_plan
from optimizer.exact.graphs.graph_costs import GraphCosts, makespan_s
from optimizer.exact.least import chain_costs
from optimizer.model.baselines import Baseline
from optimizer.model.bounds import Beliefs, Bounds
from optimizer.model.branch_greedy import branch_greedy
from optimizer.model.profile import Profile
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.branch_space import BranchSpace
from search_spaces.spaces.branches import walk
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.space import SearchSpace

SEED_003 = "branch greedy (NEST-C)"
SIDE_BY_SIDE = "every group side by side"
_SOLVE_S = 10.0
_ALL_TRIED = 256  # plans
_MOST_ROUNDS = 4


def predictor(graph: Graph, space: SearchSpace, costs: ChainCosts) -> Callable[[Plan], float]:
    """Return what tells the seconds that the model gives a plan: where branches may overlap, the time until the end."""
    if not isinstance(space, BranchSpace):
        return lambda plan: chain_cost(costs, plan)
    table = GraphCosts.of_chain(graph, costs)
    return lambda plan: makespan_s(graph, table, plan)


def waits_s(graph: Graph, plan: Plan, timeline: Timeline | None) -> list[float]:
    """Return, for each stage that waited for another lane last, how long after that stage's end it began."""
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
        needs = {at for o in stage.operators for p in graph.predecessors(o) for at in places[p]} - {index}
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
    seed, eager = (space.plan([names[lane] for lane in branch_greedy(space.runs, c, home)]) for c in (costs, free))
    return seed, eager


def branch_beliefs(
    graph: Graph, session: Session, profiled: Profile, platform: Platform, space: BranchSpace
) -> Beliefs:
    """Return what is believed before anything is measured: the best plan of the space by the model, and its bound.

    The runs are placed jointly, by search or, where many runs lie between two gates, by CP-SAT; without OR-Tools the
    best plan near the baselines stands for the optimum of such a model, and its bound is that on all plans.
    """
    own = session.capabilities.costs
    costs = chain_costs(platform, session.part_costs(graph)) if own else profiled.costs(platform)
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
