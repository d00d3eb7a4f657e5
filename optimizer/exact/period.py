"""The least period of several networks at once, by CP-SAT: the placement with the least load of the busiest processor.

The period depends on loads only: the work of each processor for one inference of every network. A stage begins
with an operator that reads no other, or one on another processor, since it must wait for that one. Each processor that
reads a tensor from another one pays the transfer, once however many of its operators read it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.exact.chain_costs import ChainCosts, exclusive_groups
from optimizer.exact.graphs.cpsat import check_time_limit, run_solver, solver_module
from optimizer.exact.solution import PROVEN, Solution
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.errors import InfeasibleError, UnavailableError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

_UNITS = 1e8  # the sum of the operators' least seconds in the model's integer units


def least_period(
    costs: ChainCosts,
    networks: Sequence[range],
    max_stages: int | None,
    time_limit_s: float,
    reads: Sequence[Sequence[int]],
) -> Solution[tuple[int, ...]]:
    """Return the best processors (indices) found in the time for the operators of networks, with a bound.

    Args:
        costs: of all operators; ``transfer_s[i + 1]`` holds the seconds to move the output of operator ``i``.
        networks: the operators of each network, in an order in which they can run.
        max_stages: stages of a network at most.
        reads: the operators whose outputs each one reads.

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
    made = _Model(costs, reads, _UNITS / total if total else 1.0)
    model, terms = made.model, made.terms
    for network in networks:
        made.add_stages(network, max_stages)
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
                nbytes = enumerate(costs.operator_nbytes.tolist())
                model.add(sum(math.ceil(kept) * made.on[o][processor] for o, kept in nbytes) <= int(room))
    model.minimize(worst)
    solver, outcome = run_solver(model, time_limit_s)
    if outcome == "infeasible":
        raise _why_none(costs)
    if outcome == "no time":
        raise UnavailableError(f"no plan was found within {time_limit_s:g} s", "give a longer --time-limit")
    chosen = tuple(next(i for i, v in enumerate(row) if solver.boolean_value(v)) for row in made.on)
    period_s = made.period_s(chosen)
    bound_s = min(period_s, solver.best_objective_bound / made.scale)
    return Solution(chosen, period_s, bound_s, time.monotonic() - begin_s, PROVEN)


class _Model:
    """Loads of processors as a model of CP-SAT.

    Attributes:
        on: whether each operator is on each processor.
        terms: the load of each processor, as a list of terms.
        before, after: the operators that each one reads, and those that read it.
    """

    def __init__(self, costs: ChainCosts, reads: Sequence[Sequence[int]], scale: float) -> None:
        self.costs, self.scale = costs, scale
        self.model: cp.CpModel = solver_module().CpModel()
        processors, count = costs.operator_s.shape
        self.before = reads
        self.after: list[list[int]] = [[] for _ in reads]
        for reader, read in enumerate(reads):
            for operator in set(read):
                self.after[operator].append(reader)
        self.on = [[self.model.new_bool_var("") for _ in range(processors)] for _ in range(count)]
        self.terms: list[list[Any]] = [[] for _ in range(processors)]
        for operator, choices in enumerate(self.on):
            self.model.add_exactly_one(choices)
            for processor, chosen in enumerate(choices):
                seconds = float(costs.operator_s[processor, operator])
                if math.isinf(seconds):
                    self.model.add(chosen == 0)
                else:
                    self.terms[processor].append(self._ticks(seconds) * chosen)

    def _ticks(self, seconds: float) -> int:
        return int(float(seconds) * self.scale)

    def add_stages(self, network: range, max_stages: int | None) -> None:
        """Add the costs of a network's stages: overheads and transfers."""
        begins: list[Any] = []
        overhead = [self._ticks(seconds) for seconds in self.costs.overhead_s]
        for operator in network:
            before, here = self.before[operator], self.on[operator]
            if not before:
                for processor, on in enumerate(here):
                    self.terms[processor].append(overhead[processor] * on)
                begins.append(1)
            elif len(before) == 1 and len(self.after[before[0]]) == 1:
                begins.append(self._cut(operator, before[0]))
            else:
                begin = [self.model.new_bool_var("") for _ in here]
                for processor, own in enumerate(begin):
                    for b in before:
                        self.model.add_bool_or(here[processor].negated(), self.on[b][processor], own)
                    self.terms[processor].append(overhead[processor] * own)
                begins.append(sum(begin))
            if len(self.after[operator]) > 1 or any(len(self.before[r]) > 1 for r in self.after[operator]):
                self._move(operator)
        if max_stages is not None:
            self.model.add(sum(begins) <= max_stages)

    def _cut(self, operator: int, before: int) -> cp.IntVar:
        """Add the cost of a cut between an operator and the only operator that it reads."""
        cut = self.model.new_bool_var("")
        for source, left in enumerate(self.on[before]):
            self.model.add_bool_or(left.negated(), self.on[operator][source], cut)
            for processor, here in enumerate(self.on[operator]):
                entered_s = self.costs.overhead_s[processor] + self.costs.transfer_s[before + 1, source, processor]
                self._pay(left, [here], source, processor, entered_s)
        return cut

    def _move(self, operator: int) -> None:
        """Add each processor's cost of reading an output from another one."""
        for source, left in enumerate(self.on[operator]):
            for processor in range(len(self.terms)):
                readers = [self.on[reader][processor] for reader in self.after[operator]]
                self._pay(left, readers, source, processor, self.costs.transfer_s[operator + 1, source, processor])

    def _pay(self, left: cp.IntVar, readers: Sequence[cp.IntVar], source: int, processor: int, seconds: float) -> None:
        """Let a processor pay if the writer is on another one, and any reader on it."""
        paid = self._ticks(seconds)
        if processor != source and paid:
            pays = self.model.new_bool_var("")
            for reader in readers:
                self.model.add_bool_or(left.negated(), reader.negated(), pays)
            self.terms[processor].append(paid * pays)

    def period_s(self, chosen: Sequence[int]) -> float:
        """Return the load of the busiest processor, given the processor of each operator."""
        costs, load = self.costs, np.zeros(len(self.terms))
        for operator, processor in enumerate(chosen):
            load[processor] += costs.operator_s[processor, operator]
            if not self.before[operator] or any(chosen[b] != processor for b in self.before[operator]):
                load[processor] += costs.overhead_s[processor]
            for reader in {chosen[r] for r in self.after[operator]} - {processor}:
                load[reader] += costs.transfer_s[operator + 1, processor, reader]
        return max(float(load[list(group)].sum()) for group in exclusive_groups(costs.platform))


def _why_none(costs: ChainCosts) -> InfeasibleError:
    needed = float(costs.operator_nbytes.sum()) if costs.operator_nbytes is not None else 0.0
    room = float(costs.memory_bytes.sum()) if costs.memory_bytes is not None else math.inf
    lever = "give more memory, more devices, or more stages"
    if needed > room:
        return infeasible(
            Violation(f"memory of the devices of {costs.platform.name!r} together", needed, room, "B", lever)
        )
    return InfeasibleError("no placement keeps the limits of memory and stages", lever)
