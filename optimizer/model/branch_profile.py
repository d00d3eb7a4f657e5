"""Times of branches as stages, and the cost of joining two processors, measured on the device.

The speed of a machine drifts by more than branches gain, so plans run in turns, and each turn is compared with its own
run of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluators.measurement.final import SETTLE_BELOW_S
from optimizer.exact.segment_model import SegmentModel
from optimizer.model.profile import Profile, Profiler, pair_of
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import plural
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace

_TURNS_S = 1.5  # plans run in turns for so many seconds,
_LEAST_TURNS, _MOST_TURNS = 7, 80  # within these bounds


def branch_profile(of: Profiler, space: SegmentSpace, known: Profile) -> Profile:
    """Return a profile whose operators add up to the measured runs, with the transfers measured at joins.

    Args:
        known: the operators' times, measured one by one.

    Raises:
        UnavailableError: the device failed.
    """
    graph, runs = of.graph, BranchRuns.of(of.graph)
    operator_s, overhead_s, transfer_s = dict(known.operator_s), dict(known.overhead_s), dict(known.transfer_s)
    for like, name in of.first.items():
        if of.refused(name):
            continue
        of.progress(f"timing {plural(len(runs.runs), 'run')} of branches on {name}")
        whole_s = known.whole_s[like]
        plans = chain_plan(graph, (), [name]), Plan(graph.digest, tuple(Stage(r, name) for r in runs.runs))
        apart = _in_turns(of, plans)[1]
        overhead_s[like] = whole_s * max(0.0, apart.latency - 1.0) / max(1, len(runs.runs) - 1)
        stage_s = apart.stages * whole_s
        operator_s[like] = _rescaled(runs, known.operator_s[like], stage_s, overhead_s[like], whole_s)
    found = Profile(operator_s, overhead_s, transfer_s, known.whole_s)
    for a, b in _side_by_side(of.platform):
        if not all(np.isfinite(known.whole_s[p.like]) for p in (a, b)):
            continue
        of.progress(f"timing joins of {a.name} and {b.name}")
        transfer_s[pair_of(a.like, b.like)] = _join_s(of, space, (a, b), found)
    return replace(found, transfer_s=transfer_s)


class _Shares(NamedTuple):
    """Median times of a plan and of its stages, relative to another plan in the same turns."""

    latency: float
    stages: NDArray[np.float64]


def _in_turns(of: Profiler, plans: Sequence[Plan]) -> list[_Shares]:
    """Run plans in turns, and return the times of each relative to the first one."""
    latency_s: list[list[float]] = [[] for _ in plans]
    stage_s: list[list[NDArray[np.float64]]] = [[] for _ in plans]
    with ExitStack() as stack:
        built = [stack.enter_context(closing(of.load(plan))) for plan in plans]
        short = max(float(candidate.run(1).latency_s[0]) for candidate in built) < SETTLE_BELOW_S
        order, turns, spent_s = list(range(len(plans))), 0, 0.0
        while turns < _LEAST_TURNS or (turns < _MOST_TURNS and spent_s < _TURNS_S):
            for which in order:
                if short:
                    spent_s += float(built[which].run(1).latency_s[0])
                batch = built[which].run(1)
                spent_s += float(batch.latency_s[0])
                latency_s[which].append(float(batch.latency_s[0]))
                stage_s[which].append(batch.stage_s[0])
            order.reverse()
            turns += 1
    first_s = np.array(latency_s[0])
    return [
        _Shares(float(np.median(np.array(took_s) / first_s)), np.median(np.array(stages_s) / first_s[:, None], axis=0))
        for took_s, stages_s in zip(latency_s, stage_s, strict=True)
    ]


def _rescaled(
    runs: BranchRuns, operator_s: tuple[float, ...], stage_s: NDArray[np.float64], overhead_s: float, whole_s: float
) -> tuple[float, ...]:
    """Return operators' times scaled to add up to their runs', and all of them to the whole model."""
    found = np.array(operator_s)
    for run, took_s in zip(runs.runs, stage_s, strict=True):
        inside = list(run)
        total = float(found[inside].sum())
        wanted = max(0.0, took_s - overhead_s)
        found[inside] = found[inside] * (wanted / total) if total > 0 else wanted / len(inside)
    total = float(found.sum())
    if total > 0:
        found *= max(0.0, whole_s - overhead_s) / total
    return tuple(float(s) for s in found)


def _join_s(of: Profiler, space: SegmentSpace, processors: tuple[Processor, Processor], known: Profile) -> float:
    """Return the seconds that a stage pays for each tensor written by a stage on another processor.

    Solved so that the model agrees with the measured plan of all groups side by side, relative to the whole model on
    the first processor. So it includes waiting, reads from another core's cache, and shared memory.
    """
    one, other = processors
    names = [one.name] * len(of.graph.operators)
    for segment in space.branching:
        for number, run in enumerate(segment.runs):
            for operator in run:
                names[operator] = processors[number % 2].name
    plan = space.plan(space.placed(names))
    if len({stage.processor for stage in plan.stages}) == 1:
        return 0.0
    measured = _in_turns(of, [chain_plan(of.graph, (), [one.name]), plan])[1].latency
    pair = pair_of(one.like, other.like)

    def excess(join_s: float) -> float:
        costs = replace(known, transfer_s={**known.transfer_s, pair: join_s}).costs(of.platform)
        return SegmentModel(space, costs).price(plan) / known.whole_s[one.like] - measured

    return _root(excess, known.whole_s[one.like])


def _root(excess: Callable[[float], float], most: float) -> float:
    """Return the root of an increasing function between 0 and ``most``; the nearer end where it has none."""
    if excess(0.0) >= 0.0:
        return 0.0
    if excess(most) <= 0.0:
        return most
    from scipy.optimize import brentq

    return float(brentq(excess, 0.0, most, xtol=1e-12))


def _side_by_side(platform: Platform) -> list[tuple[Processor, Processor]]:
    """Return one pair of processors that can run at once for each pair of kinds that has one."""
    found: Mapping[tuple[str, ...], tuple[Processor, Processor]] = {
        tuple(sorted((a.like, b.like))): (a, b)
        for a, b in reversed(list(combinations(platform.processors, 2)))
        if not a.excludes(b)
    }
    return list(found.values())
