"""What plans with split stages cost: the rewritten model's, as CoDL (seed 002) counts it.

T = transform + map + sync + max(sides): sides are stages that run at the same time, hand-overs are paid where they
begin and where they meet, tiles are rounded up by the kernels' own models. Slices and concatenations that move nothing
(:mod:`search_spaces.rewrites.views`) are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from evaluators.cost_model.plans import Errors, PlanSimulator
from evaluators.timeline import Event, Timeline
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.rewrites.lowering import Lowered, Lowering
from search_spaces.rewrites.views import without_copies


def run_split(
    simulator_of: Callable[[Graph], PlanSimulator], lowering: Lowering, plan: Plan, platform: Platform
) -> tuple[Timeline, Errors]:
    """Return the timeline of a plan with split stages, told in the plan's own stages, and how sure it is.

    Args:
        simulator_of: returns the simulator of a graph.
        lowering: of the plan's graph.

    Raises:
        PlanError, RewriteError: the plan cannot be run.
        UnavailableError: a lane does not take an operator of its stage.
    """
    lowered = lowering.lower(plan)
    simulator = simulator_of(lowered.graph)
    viewed = without_copies(lowered.graph, lowered.plan, platform)
    left = {operator for stage in viewed.operators for operator in stage}
    moves_nothing = [o for o in range(len(lowered.graph.operators)) if o not in left]
    if moves_nothing:
        operator_s = np.array(simulator.prices.operator_s)
        operator_s[:, moves_nothing] = np.where(np.isfinite(operator_s[:, moves_nothing]), 0.0, np.inf)
        simulator = PlanSimulator(lowered.graph, platform, replace(simulator.prices, operator_s=operator_s))
    events = (
        Event(lowered.stage_of[e.stage], e.lane, e.start_s, e.end_s, e.copied_s)
        for e in simulator.run(lowered.plan).events
    )
    return Timeline(tuple(events)), _folded(simulator.errors(lowered.plan), lowered, plan, platform)


def _folded(errors: Errors, lowered: Lowered, plan: Plan, platform: Platform) -> Errors:
    """Return what may be wrong by the operators of the plan's own graph, as for plans without splits.

    What is wrong about an operator is wrong about both of its sides.
    """
    kinds = len(platform.classes())
    count = 1 + max(o for stage in plan.stages for o in stage.operators)
    single = errors[: kinds * len(lowered.operator_of)].reshape(kinds, -1)
    found = np.zeros((kinds, count))
    for index, operator in enumerate(lowered.operator_of):
        found[:, operator] += single[:, index]
    return np.concatenate((found.ravel(), errors[single.size :]))
