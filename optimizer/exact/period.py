"""The least period of several chains at once, by CP-SAT: every lane's share of all chains, and no lane too busy.

Between inferences only the load counts: what each lane does for one inference of every chain. A part begins where a
chain changes its lane.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.exact.chain_costs import ChainCosts, exclusive_groups
from optimizer.exact.cpsat import PROVEN, check_time_limit, run_solver, solver_module
from search_spaces.constraints import Violation, infeasible
from search_spaces.errors import InfeasibleError, UnavailableError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

_UNITS = 1e8


@dataclass(frozen=True, slots=True)
class PeriodSolution:
    """Lanes (indices) of all operators; the period that they give, and what no choice goes below."""

    lanes: tuple[int, ...]
    period_s: float
    bound_s: float
    wall_s: float

    @property
    def proven(self) -> bool:
        """Whether it is the best, up to the rounding of the solver's integers (1e-5)."""
        return self.period_s <= self.bound_s * (1 + PROVEN)


def least_period(
    costs: ChainCosts, chains: Sequence[range], max_stages: int | None, time_limit_s: float
) -> PeriodSolution:
    """Return the best lanes found in the time for operators in chains, with a bound.

    Args:
        costs: of all operators; ``hand_over_s`` before the first operator of a chain is not read.
        chains: the operators of each chain.
        max_stages: parts of a chain at most.

    Raises:
        InfeasibleError: nothing fits.
        UnavailableError: OR-Tools is missing, or the time was too short to find anything.
        UsageError: the time limit is not more than 0.
    """
    check_time_limit(time_limit_s)
    begin_s = time.monotonic()
    total = float(costs.operator_s.min(axis=0).sum())
    if not math.isfinite(total):
        raise InfeasibleError(f"some layer runs on no device of {costs.platform.name!r}", "add one that supports it")
    model = solver_module().CpModel()
    scale = _UNITS / total if total else 1.0
    on, terms = _work(model, costs, scale)
    for chain in chains:
        _cut(model, costs, scale, chain, on, terms, max_stages)
    worst = model.new_int_var(0, 10**15, "")
    groups = exclusive_groups(costs.platform)
    if all(len(group) == 1 for group in groups):  # then alike lanes can change places: the busiest comes first
        index = {p.name: i for i, p in enumerate(costs.platform.processors)}
        for members in costs.platform.classes().values():
            for more, less in pairwise(index[p.name] for p in members):
                model.add(sum(terms[more]) >= sum(terms[less]))
    for group in groups:
        model.add(sum(term for lane in group for term in terms[lane]) <= worst)
    if costs.operator_nbytes is not None and costs.memory_bytes is not None:
        for lane, room in enumerate(costs.memory_bytes.tolist()):
            if math.isfinite(room):
                kept = [math.ceil(nbytes) * on[o][lane] for o, nbytes in enumerate(costs.operator_nbytes.tolist())]
                model.add(sum(kept) <= int(room))
    model.minimize(worst)
    solver, outcome = run_solver(model, time_limit_s)
    if outcome == "infeasible":
        raise _why_none(costs)
    if outcome == "no time":
        raise UnavailableError(f"no plan was found within {time_limit_s:g} s", "give a longer --time-limit")
    chosen = tuple(next(i for i, v in enumerate(row) if solver.boolean_value(v)) for row in on)
    period_s = _period_s(costs, chains, chosen)
    bound_s = min(period_s, solver.best_objective_bound / scale)
    return PeriodSolution(chosen, period_s, bound_s, time.monotonic() - begin_s)


def _work(model: cp.CpModel, costs: ChainCosts, scale: float) -> tuple[list[list[cp.IntVar]], list[list[Any]]]:
    """Return whether each operator is on each lane, and what each lane has to do for its operators."""
    lanes, count = costs.operator_s.shape
    on = [[model.new_bool_var("") for _ in range(lanes)] for _ in range(count)]
    terms: list[list[Any]] = [[] for _ in range(lanes)]
    for operator, choices in enumerate(on):
        model.add_exactly_one(choices)
        for lane, chosen in enumerate(choices):
            seconds = float(costs.operator_s[lane, operator])
            if math.isinf(seconds):
                model.add(chosen == 0)
            else:
                terms[lane].append(int(seconds * scale) * chosen)
    return on, terms


def _cut(
    model: cp.CpModel,
    costs: ChainCosts,
    scale: float,
    chain: range,
    on: list[list[cp.IntVar]],
    terms: list[list[Any]],
    max_stages: int | None,
) -> None:
    """Add what the parts of a chain cost: an overhead each, and what they are handed."""
    lanes, cuts = range(len(terms)), []
    for lane in lanes:
        terms[lane].append(int(float(costs.overhead_s[lane]) * scale) * on[chain[0]][lane])
    for operator in chain[1:]:
        cut = model.new_bool_var("")
        cuts.append(cut)
        for source in lanes:
            before = on[operator - 1][source].negated()
            model.add_bool_or(before, on[operator][source], cut)
            for lane in lanes:
                paid = int(float(costs.overhead_s[lane] + costs.hand_over_s[operator, source, lane]) * scale)
                if lane != source and paid:
                    both = model.new_bool_var("")
                    model.add_bool_or(before, on[operator][lane].negated(), both)
                    terms[lane].append(paid * both)
    if max_stages is not None:
        model.add(sum(cuts) <= max_stages - 1)


def _why_none(costs: ChainCosts) -> InfeasibleError:
    needed = float(costs.operator_nbytes.sum()) if costs.operator_nbytes is not None else 0.0
    room = float(costs.memory_bytes.sum()) if costs.memory_bytes is not None else math.inf
    lever = "give more memory, more devices, or more stages"
    if needed > room:
        return infeasible(
            Violation(f"memory of the devices of {costs.platform.name!r} together", needed, room, "B", lever)
        )
    return InfeasibleError("no choice of devices keeps to the memory and the stages", lever)


def _period_s(costs: ChainCosts, chains: Sequence[range], chosen: Sequence[int]) -> float:
    load = np.zeros(costs.operator_s.shape[0])
    for chain in chains:
        for operator in chain:
            lane = chosen[operator]
            load[lane] += costs.operator_s[lane, operator]
            if operator == chain[0]:
                load[lane] += costs.overhead_s[lane]
            elif chosen[operator - 1] != lane:
                load[lane] += costs.overhead_s[lane] + costs.hand_over_s[operator, chosen[operator - 1], lane]
    return max(float(load[list(group)].sum()) for group in exclusive_groups(costs.platform))
