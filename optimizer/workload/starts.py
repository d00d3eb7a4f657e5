"""First plans of a search in which several models may be split or have branches side by side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evaluators.workload.predicted import WorkloadSimulator
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.workload.limits import operator_costs
from search_spaces.core.decoded_plan import DecodedPlan, in_runs
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.pools import members, single_processors
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace


def shared_starts(space: SharedWorkloadSpace, simulator: WorkloadSimulator) -> list[Plan]:
    """Return plans with stages that are best for a model alone: for all models, and for each beside whole others."""
    best = [_best(model, simulator) for model in space.models]
    clients = [c for c, _ in enumerate(space.models) for _ in range(space.counts[c])]
    found = [DecodedPlan("fifo", tuple(range(len(clients))), tuple(best[c] for c in clients))]
    for place in space.platform.processors:
        whole = [in_runs(len(model.graph.operators), (), [place.name]) for model in space.models]
        for one in range(len(best)):
            rows = tuple(best[c] if c == one else whole[c] for c in clients)
            found.append(DecodedPlan("fifo", tuple(range(len(clients))), rows))
    return list(dict.fromkeys(space.plan(each) for each in found))


def _best(space: SegmentSpace, simulator: WorkloadSimulator) -> tuple[Stage, ...]:
    """Return the stages of the plan with the least latency of one model alone, as jobs are priced."""
    numbers = {processor.name: number for number, processor in enumerate(single_processors(simulator.platform))}
    count = len(space.graph.operators)
    rows = list(_rows(space, simulator, numbers))
    operator_s = np.array([added_s for added_s, _ in rows])
    overhead_s = np.array([call_s for _, call_s in rows])
    processors = len(rows)
    costs = ChainCosts(space.platform, operator_s, overhead_s, np.zeros((count, processors, processors)))
    return space.plan(SegmentModel(space, costs).best().parts).stages


def _rows(
    space: SegmentSpace, simulator: WorkloadSimulator, numbers: dict[str, int]
) -> Iterator[tuple[NDArray[np.float64], float]]:
    """Yield for each processor or pool the seconds that operators add to a job, and the overhead of a job."""
    count = len(space.graph.operators)
    for processor in space.platform.processors:
        begun_s, added_s = operator_costs(partial(simulator.part_s, space.graph, numbers[members(processor)[0]]), count)
        both = np.isfinite(begun_s) & np.isfinite(added_s)
        call_s = float(np.median(begun_s[both] - added_s[both])) if both.any() else 0.0
        yield np.minimum(np.where(np.isfinite(added_s), added_s, begun_s - call_s), begun_s), max(0.0, call_s)
