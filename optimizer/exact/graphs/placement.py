"""Solves placement problems, with a lower bound: a first solution, lossless merging, then CP-SAT."""

from __future__ import annotations

import time

from evaluators.table.placement import PlacementProblem
from optimizer.exact.graphs.cpsat import check_time_limit
from optimizer.exact.graphs.placement_latency import improve, lower_bound
from optimizer.exact.graphs.placement_merge import merge
from optimizer.exact.graphs.placement_model import solve_model
from optimizer.exact.graphs.placement_order import filled, first_solutions, orders
from optimizer.exact.graphs.placement_value import CPU, PlacementObjective, value
from optimizer.exact.solution import PROVEN, Solution
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError, UnavailableError

_HAIR = 1e-9
_ROUNDS = 3
_SEARCH_SHARE = 0.4  # of the time, for the local search


def solve_placement(
    problem: PlacementProblem, objective: PlacementObjective = "period", time_limit_s: float = 30.0
) -> Solution[tuple[int, ...]]:
    """Return the best placement found in the time, with a bound that holds for all.

    It is the accelerator of each node, or its CPU: ``CPU``, ``CPU - 1``, …; for the latency always ``CPU``.

    Raises:
        InfeasibleError: no placement keeps all rules.
        UnavailableError: OR-Tools is missing, or the time was too short to find anything.
        UsageError: the time limit is not more than 0.
    """
    check_time_limit(time_limit_s)
    begin_s = time.monotonic()
    best, known = _start(problem, objective)
    side_by_side = objective == "latency"
    clusters = merge(problem, known * (1 + _HAIR), parallel_cpu=side_by_side)
    for _ in range(_ROUNDS):
        starts = list(first_solutions(problem, clusters, objective))
        if side_by_side:
            starts += [filled(problem, order) for order in orders(problem, clusters)]
        found = [(v, d) for d in starts if (v := value(problem, d, objective)) < known]
        if not found:
            break
        known, best = min(found)
        clusters = merge(problem, known * (1 + _HAIR), parallel_cpu=side_by_side)
    least = lower_bound(problem, best) if side_by_side else 0.0
    if side_by_side and best is not None and known > least * (1 + PROVEN):
        best = improve(problem, clusters, best, _SEARCH_SHARE * (time_limit_s - (time.monotonic() - begin_s)))
        known = value(problem, best, objective)
        clusters = merge(problem, known * (1 + _HAIR), parallel_cpu=True)
        least = max(least, lower_bound(problem, best))
    if best is not None and known <= least * (1 + PROVEN):
        return Solution(best, known, min(least, known), time.monotonic() - begin_s, PROVEN)
    left_s = time_limit_s - (time.monotonic() - begin_s)
    answer = solve_model(problem, clusters, objective, known * (1 + _HAIR), best, left_s)
    if answer.devices is not None and value(problem, answer.devices, objective) < known:
        known, best = value(problem, answer.devices, objective), answer.devices
    if best is None:
        raise _why_none(problem, time_limit_s, proven=answer.infeasible)
    return Solution(best, known, min(max(answer.bound, least), known), time.monotonic() - begin_s, PROVEN)


def _start(problem: PlacementProblem, objective: PlacementObjective) -> tuple[tuple[int, ...] | None, float]:
    """Return the best of the simplest solutions: everything on one device."""
    count = len(problem.names)
    alone = [(CPU,) * count] + [(0,) * count] * bool(problem.accelerators)
    return min(
        ((d, v) for d in alone if (v := value(problem, d, objective)) < float("inf")),
        key=lambda pair: pair[1],
        default=(None, float("inf")),
    )


def _why_none(problem: PlacementProblem, time_limit_s: float, *, proven: bool) -> InfeasibleError | UnavailableError:
    forced = sum(n for n, cpu in zip(problem.nbytes, problem.cpu, strict=True) if cpu == float("inf"))
    room = problem.accelerators * problem.memory_bytes
    if forced > room:
        lever = "use more accelerators, or larger ones"
        return infeasible(Violation("memory of the accelerators together", forced, room, "B", lever))
    if proven:
        what = f"{problem.name}: no placement keeps memory, colours and contiguous parts at once"
        return InfeasibleError(what, "use more accelerators, or larger ones")
    return UnavailableError(f"no placement was found within {time_limit_s:g} s", "give a longer --time-limit")
