"""The least period of several networks at once, by CP-SAT: the placement with the least load of the busiest processor.

The period depends on loads only: the work of each processor for one inference of every network. A stage begins
with an operator of which no input was written on its processor. Each processor that reads a tensor from another one
pays the transfer, once however many of its operators read it.
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
from optimizer.exact.graphs.cpsat import PROVEN, check_time_limit, run_solver, solver_module
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError, UnavailableError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

_UNITS = 1e8  # the sum of the operators' least seconds in the model's integer units


@dataclass(frozen=True, slots=True)
class PeriodSolution:
    """Processors (indices) of all operators, their period, and a lower bound."""

    processors: tuple[int, ...]
    period_s: float
    bound_s: float
    wall_s: float

    @property
    def proven(self) -> bool:
        """Whether it is the best, up to the rounding of the solver's integers (1e-5)."""
        return self.period_s <= self.bound_s * (1 + PROVEN)


def least_period(
    costs: ChainCosts,
    networks: Sequence[range],
    max_stages: int | None,
    time_limit_s: float,
    reads: Sequence[Sequence[int]] | None = None,
) -> PeriodSolution:
    """Return the best processors found in the time for the operators of networks, with a bound.

    Args:
        costs: of all operators; ``transfer_s[i + 1]`` holds the seconds to move the output of operator ``i``.
        networks: the operators of each network, in an order in which they can run.
        max_stages: stages of a network at most.
        reads: the operators whose outputs each one reads; by default each network is a chain.

    Raises:
        InfeasibleError: no placement keeps the limits of memory and stages.
        UnavailableError: OR-Tools is missing, or the time was too short to find anything.
        UsageError: the time limit is not more than 0.
    """
    check_time_limit(time_limit_s)
    begin_s = time.monotonic()
    total = float(costs.operator_s.min(axis=0).sum())
    if not math.isfinite(total):
        raise InfeasibleError(
            f"some operator is supported on no processor of {costs.platform.name!r}", "add one that supports it"
        )
    model = solver_module().CpModel()
    scale = _UNITS / total if total else 1.0
    on, terms = _work(model, costs, scale)
    graph = _Reads.of(networks, reads)
    for network in networks:
        _parts(model, costs, scale, network, graph, on, terms, max_stages)
    worst = model.new_int_var(0, 10**15, "")
    groups = exclusive_groups(costs.platform)
    if all(len(group) == 1 for group in groups):  # then alike processors can change places: the busiest comes first
        index = {p.name: i for i, p in enumerate(costs.platform.processors)}
        for members in costs.platform.classes().values():
            for more, less in pairwise(index[p.name] for p in members):
                model.add(sum(terms[more]) >= sum(terms[less]))
    for group in groups:
        model.add(sum(term for processor in group for term in terms[processor]) <= worst)
    if costs.operator_nbytes is not None and costs.memory_bytes is not None:
        for processor, room in enumerate(costs.memory_bytes.tolist()):
            if math.isfinite(room):
                kept = [math.ceil(nbytes) * on[o][processor] for o, nbytes in enumerate(costs.operator_nbytes.tolist())]
                model.add(sum(kept) <= int(room))
    model.minimize(worst)
    solver, outcome = run_solver(model, time_limit_s)
    if outcome == "infeasible":
        raise _why_none(costs)
    if outcome == "no time":
        raise UnavailableError(f"no plan was found within {time_limit_s:g} s", "give a longer --time-limit")
    chosen = tuple(next(i for i, v in enumerate(row) if solver.boolean_value(v)) for row in on)
    period_s = _period_s(costs, networks, graph, chosen)
    bound_s = min(period_s, solver.best_objective_bound / scale)
    return PeriodSolution(chosen, period_s, bound_s, time.monotonic() - begin_s)


def _work(model: cp.CpModel, costs: ChainCosts, scale: float) -> tuple[list[list[cp.IntVar]], list[list[Any]]]:
    """Return whether each operator is on each processor, and each processor's load from its operators."""
    processors, count = costs.operator_s.shape
    on = [[model.new_bool_var("") for _ in range(processors)] for _ in range(count)]
    terms: list[list[Any]] = [[] for _ in range(processors)]
    for operator, choices in enumerate(on):
        model.add_exactly_one(choices)
        for processor, chosen in enumerate(choices):
            seconds = float(costs.operator_s[processor, operator])
            if math.isinf(seconds):
                model.add(chosen == 0)
            else:
                terms[processor].append(int(seconds * scale) * chosen)
    return on, terms


@dataclass(frozen=True, slots=True)
class _Reads:
    """The operators that each one reads, and those that read each one."""

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, networks: Sequence[range], reads: Sequence[Sequence[int]] | None) -> _Reads:
        first = {network[0] for network in networks}
        count = sum(map(len, networks))
        before = (
            tuple(() if o in first else (o - 1,) for o in range(count)) if reads is None else tuple(map(tuple, reads))
        )
        after: list[list[int]] = [[] for _ in before]
        for reader, read in enumerate(before):
            for operator in set(read):
                after[operator].append(reader)
        return cls(before, tuple(map(tuple, after)))


def _parts(
    model: cp.CpModel,
    costs: ChainCosts,
    scale: float,
    network: range,
    graph: _Reads,
    on: list[list[cp.IntVar]],
    terms: list[list[Any]],
    max_stages: int | None,
) -> None:
    """Add the costs of a network's stages: overheads and transfers."""
    processors = range(len(terms))
    begins: list[Any] = []
    for operator in network:
        before = graph.before[operator]
        if not before:
            for processor in processors:
                terms[processor].append(int(float(costs.overhead_s[processor]) * scale) * on[operator][processor])
            begins.append(1)
        elif len(before) == 1 and len(graph.after[before[0]]) == 1:
            begins.append(_cut(model, costs, scale, operator, before[0], on, terms))
        else:
            begin = [model.new_bool_var("") for _ in processors]
            for processor, own in enumerate(begin):
                model.add_bool_or(on[operator][processor].negated(), *(on[b][processor] for b in before), own)
                terms[processor].append(int(float(costs.overhead_s[processor]) * scale) * own)
            begins.append(sum(begin))
        if len(graph.after[operator]) > 1 or any(len(graph.before[r]) > 1 for r in graph.after[operator]):
            _move(model, costs, scale, operator, graph.after[operator], on, terms)
    if max_stages is not None:
        model.add(sum(begins) <= max_stages)


def _cut(
    model: cp.CpModel,
    costs: ChainCosts,
    scale: float,
    operator: int,
    before: int,
    on: list[list[cp.IntVar]],
    terms: list[list[Any]],
) -> cp.IntVar:
    """Add the cost of a cut between an operator and the only operator that it reads."""
    cut = model.new_bool_var("")
    for source, left in enumerate(on[before]):
        model.add_bool_or(left.negated(), on[operator][source], cut)
        for processor, here in enumerate(on[operator]):
            paid = int(float(costs.overhead_s[processor] + costs.transfer_s[before + 1, source, processor]) * scale)
            if processor != source and paid:
                both = model.new_bool_var("")
                model.add_bool_or(left.negated(), here.negated(), both)
                terms[processor].append(paid * both)
    return cut


def _move(
    model: cp.CpModel,
    costs: ChainCosts,
    scale: float,
    operator: int,
    readers: Sequence[int],
    on: list[list[cp.IntVar]],
    terms: list[list[Any]],
) -> None:
    """Add each processor's cost of reading an output from another one."""
    for source, left in enumerate(on[operator]):
        for processor in range(len(terms)):
            paid = int(float(costs.transfer_s[operator + 1, source, processor]) * scale)
            if processor != source and paid:
                moved = model.new_bool_var("")
                for reader in readers:
                    model.add_bool_or(left.negated(), on[reader][processor].negated(), moved)
                terms[processor].append(paid * moved)


def _why_none(costs: ChainCosts) -> InfeasibleError:
    needed = float(costs.operator_nbytes.sum()) if costs.operator_nbytes is not None else 0.0
    room = float(costs.memory_bytes.sum()) if costs.memory_bytes is not None else math.inf
    lever = "give more memory, more devices, or more stages"
    if needed > room:
        return infeasible(
            Violation(f"memory of the devices of {costs.platform.name!r} together", needed, room, "B", lever)
        )
    return InfeasibleError("no placement keeps the limits of memory and stages", lever)


def _period_s(costs: ChainCosts, networks: Sequence[range], graph: _Reads, chosen: Sequence[int]) -> float:
    load = np.zeros(costs.operator_s.shape[0])
    for operator in (o for network in networks for o in network):
        processor, before = chosen[operator], graph.before[operator]
        load[processor] += costs.operator_s[processor, operator]
        if not any(chosen[b] == processor for b in before):
            load[processor] += costs.overhead_s[processor]
        for reader in {chosen[r] for r in graph.after[operator]} - {processor}:
            load[reader] += costs.transfer_s[operator + 1, processor, reader]
    return max(float(load[list(group)].sum()) for group in exclusive_groups(costs.platform))
