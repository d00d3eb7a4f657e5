"""One segment of a graph as a model of CP-SAT: which operators form a stage, where it runs, and when.

A stage is named by its first operator, its leader. The stage that the entry gate is in may go on into the segment
(leader ``OPEN``): it costs no overhead then, and begins at time 0, the end of the gate's own work. Cycles of stages are
ruled out by time: a stage begins when those that it reads from have ended.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optimizer.exact.chain_costs import exclusive_groups
from optimizer.exact.graphs.cpsat import WORKERS, run_solver, solver_module
from optimizer.exact.graphs.segment_plans import SegmentCosts, SegmentPlan

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

OPEN = -1
_UNITS = 1e7  # the segment's least work in the model's integer units
_LARGEST = 2.0**50  # in these units; sums must not overflow


def solve_segment(
    of: SegmentCosts, exit_processor: int | None, time_limit_s: float, known: SegmentPlan | None = None
) -> SegmentPlan | None:
    """Return the best plan of a segment for given processors of its gates; None where none was found.

    Args:
        known: a plan to start from.
    """
    model = _Model(of, exit_processor)
    if known is not None:
        model.hint(known)
    model.model.minimize(model.end)
    until = time.monotonic() + time_limit_s
    for workers in (WORKERS, 1):  # two were once seen to end early without an answer
        solver, outcome = run_solver(model.model, until - time.monotonic(), workers=workers)
        if outcome == "found":
            bound_s = max(0.0, solver.best_objective_bound - len(of.segment.operators)) / model.scale
            return model.plan(solver, bound_s)
        if time.monotonic() > until:
            break
    return None


class _Model:
    """Variables: ``member[operator, leader, processor]``, one true for each operator, and times of stages."""

    def __init__(self, of: SegmentCosts, exit_processor: int | None) -> None:
        self.model: cp.CpModel = solver_module().CpModel()
        self.graph, self.costs, self.segment, self.entry_processor = of.graph, of.costs, of.segment, of.entry_processor
        graph, costs, segment = of.graph, of.costs, of.segment
        self.processors = range(len(costs.platform.processors))
        finite = np.where(np.isfinite(costs.operator_s), costs.operator_s, 0.0)[:, list(segment.operators)]
        tensors = costs.transfer_s[self._tensors].max(axis=(1, 2), initial=0.0) if self._tensors else np.zeros(1)
        reads = sum(len(graph.operators[o].inputs) for o in segment.operators)
        worst_s = float(finite.max(axis=0).sum() + len(segment.operators) * costs.overhead_s.max())
        worst_s += reads * float(tensors.max())
        times_s = np.concatenate([finite.ravel(), costs.overhead_s, tensors])
        at_least = float(costs.operator_s[:, list(segment.operators)].min(axis=0).sum())
        # If all operators can take 0 s, the smallest positive time sets the scale.
        at_least = at_least or float(times_s.min(initial=1.0, where=times_s > 0))
        self.scale = min(_UNITS / at_least, _LARGEST / (worst_s or 1.0))
        self.horizon = int(worst_s * self.scale) + 1
        self._members(exit_processor)
        self.start = {leader: self.model.new_int_var(0, self.horizon, "") for leader in self.leaders}
        self.stop = {leader: self.model.new_int_var(0, self.horizon, "") for leader in self.leaders}
        self._durations()
        self._one_at_a_time()
        self._order()
        self.end = self.model.new_int_var(0, self.horizon, "end")
        for leader in self.leaders:
            self.model.add(self.end >= self.stop[leader])
        self._at_least_the_work()

    @cached_property
    def leaders(self) -> list[int]:
        """Possible stages, by their first operators."""
        return [OPEN] * (self.entry_processor is not None) + list(self.segment.operators)

    @cached_property
    def _tensors(self) -> list[int]:
        """Tensors that operators of the segment read from each other or from the entry."""
        inside = {*self.segment.operators, self.segment.entry}
        reads = {t for o in self.segment.operators for t in self.graph.operators[o].inputs}
        return sorted(t for t in reads if self.graph.producer.get(t, -1) in inside)

    def _ticks(self, seconds: float) -> int:
        return int(seconds * self.scale)  # rounded down, so that what is proven is a bound

    def _members(self, exit_processor: int | None) -> None:
        new = self.model.new_bool_var
        self.member: dict[tuple[int, int, int], cp.IntVar] = {}
        for operator in self.segment.operators:
            for leader in self.leaders:
                for processor in self.processors:
                    possible = leader <= operator and (leader != OPEN or processor == self.entry_processor)
                    if possible and np.isfinite(self.costs.operator_s[processor, operator]):
                        self.member[operator, leader, processor] = new("")
        self.in_stage: dict[tuple[int, int], list[cp.IntVar]] = {}
        self.on: dict[tuple[int, int], list[cp.IntVar]] = {}
        for (operator, leader, processor), chosen in self.member.items():
            self.in_stage.setdefault((operator, leader), []).append(chosen)
            self.on.setdefault((operator, processor), []).append(chosen)
            if leader not in (OPEN, operator):
                leads = self.member.get((leader, leader, processor))
                if leads is None:
                    self.model.add(chosen == 0)
                else:
                    self.model.add_implication(chosen, leads)
        for operator in self.segment.operators:
            self.model.add_exactly_one(v for (o, _, _), v in self.member.items() if o == operator)
        if exit_processor is not None and self.segment.exit is not None:
            self.model.add(sum(self.on.get((self.segment.exit, exit_processor), [])) == 1)

    def _leads(self, leader: int, processor: int) -> cp.IntVar | None:
        return self.member.get((leader, leader, processor))

    def _durations(self) -> None:
        terms: dict[int, list[cp.LinearExprT]] = {leader: [] for leader in self.leaders}
        for (operator, leader, processor), chosen in self.member.items():
            seconds = self.costs.operator_s[processor, operator]
            if operator == leader:  # a stage takes a tick at least: stages of no length could wait for each other
                terms[leader].append((1 + self._ticks(float(self.costs.overhead_s[processor]))) * chosen)
            terms[leader].append(self._ticks(float(seconds)) * chosen)
        for tensor in self._tensors:
            writer = self.graph.producer[tensor]
            readers = [r for r in self.graph.consumers[tensor] if r in self.segment.operators]
            for leader in self.leaders:
                for processor in self.processors:
                    inside = [
                        self.member[r, leader, processor] for r in readers if (r, leader, processor) in self.member
                    ]
                    if inside:
                        terms[leader] += self._transfer(tensor, writer, leader, processor, inside)
        for leader in self.leaders:
            self.model.add(self.stop[leader] == self.start[leader] + sum(terms[leader]))
        if self.entry_processor is not None:
            self.model.add(self.start[OPEN] == 0)

    def _transfer(
        self, tensor: int, writer: int, leader: int, processor: int, inside: list[cp.IntVar]
    ) -> list[cp.LinearExprT]:
        """Return what a stage pays for a tensor, for each processor that its writer may be on."""
        terms: list[cp.LinearExprT] = []
        for source in self.processors:
            cost = self._ticks(float(self.costs.transfer_s[tensor, source, processor]))
            from_entry = writer == self.segment.entry
            written = self.on.get((writer, source), [])
            if (
                not cost
                or (from_entry and (source != self.entry_processor or leader == OPEN))
                or not (from_entry or written)
            ):
                continue
            pays = self.model.new_bool_var("")
            same = self.member.get((writer, leader, processor)) if source == processor else None
            for reads in inside:
                if from_entry:
                    self.model.add_implication(reads, pays)
                else:  # it reads, the writer is on that processor, and not in this stage
                    self.model.add(pays + 1 + (0 if same is None else same) >= reads + sum(written))
            terms.append(cost * pays)
        return terms

    def _one_at_a_time(self) -> None:
        intervals: dict[int, list[cp.IntervalVar]] = {processor: [] for processor in self.processors}
        for leader in self.leaders:
            length = self.model.new_int_var(0, self.horizon, "")
            self.model.add(length == self.stop[leader] - self.start[leader])
            for processor in self.processors:
                if leader == OPEN:
                    if processor == self.entry_processor:
                        whole = self.model.new_interval_var(self.start[leader], length, self.stop[leader], "")
                        intervals[processor].append(whole)
                elif (leads := self._leads(leader, processor)) is not None:
                    intervals[processor].append(
                        self.model.new_optional_interval_var(self.start[leader], length, self.stop[leader], leads, "")
                    )
        for group in exclusive_groups(self.costs.platform):
            self.model.add_no_overlap([i for processor in group for i in intervals[processor]])

    def _order(self) -> None:
        """Let a stage begin after those that it reads from."""
        ends = {o: self.model.new_int_var(0, self.horizon, "") for o in self.segment.operators}
        begins = {o: self.model.new_int_var(0, self.horizon, "") for o in self.segment.operators}
        for (operator, leader), chosen in self.in_stage.items():
            self._if_any(chosen, ends[operator], self.stop[leader])
            self._if_any(chosen, begins[operator], self.start[leader])
        for reader in self.segment.operators:
            for writer in sorted(self.graph.predecessors(reader)):
                for leader in self.leaders:
                    here = self.in_stage.get((reader, leader))
                    if here is None:
                        continue
                    if writer == self.segment.entry:
                        # The gate's stage ends when what was added to it has ended.
                        if leader != OPEN:
                            for v in here:
                                self.model.add(self.start[leader] >= self.stop[OPEN]).only_enforce_if(v)
                        continue
                    together = self.in_stage.get((writer, leader), [])
                    for v in here:
                        apart = [w.negated() for w in together]
                        self.model.add(self.start[leader] >= ends[writer]).only_enforce_if([v, *apart])

    def _if_any(self, chosen: list[cp.IntVar], one: cp.IntVar, other: cp.IntVar) -> None:
        for literal in chosen:
            self.model.add(one == other).only_enforce_if(literal)

    def _at_least_the_work(self) -> None:
        """Help the proof: processors that exclude each other do all that is placed on them before the end."""
        for group in exclusive_groups(self.costs.platform):
            work = [
                (
                    self._ticks(float(self.costs.operator_s[processor, operator]))
                    + (1 + self._ticks(float(self.costs.overhead_s[processor])) if operator == leader else 0)
                )
                * chosen
                for (operator, leader, processor), chosen in self.member.items()
                if processor in group
            ]
            if work:
                self.model.add(sum(work) <= self.end)

    def hint(self, known: SegmentPlan) -> None:
        """Give the solver a plan to start from."""
        for index, (operators, processor) in enumerate(known.stages):
            leader = OPEN if known.continued and index == 0 else operators[0]
            for operator in operators:
                for (o, le, la), chosen in self.member.items():
                    if o == operator:
                        self.model.add_hint(chosen, (le, la) == (leader, processor))

    def plan(self, solver: cp.CpSolver, bound_s: float) -> SegmentPlan:
        """Return the solver's solution; its cost is rounded as the model's integers are."""
        stages: dict[tuple[int, int], list[int]] = {}
        for (operator, leader, processor), chosen in self.member.items():
            if solver.boolean_value(chosen):
                stages.setdefault((leader, processor), []).append(operator)
        ordered = sorted(
            stages, key=lambda key: (solver.value(self.start[key[0]]), solver.value(self.stop[key[0]]), key)
        )
        found = tuple((tuple(sorted(stages[key])), key[1]) for key in ordered)
        continued = bool(ordered) and ordered[0][0] == OPEN
        return SegmentPlan(found, continued, solver.objective_value / self.scale, bound_s)
