"""A placement problem as a model of CP-SAT.

Each cluster of nodes gets a level, which does not fall along an edge: odd levels are the accelerators in the order in
which their parts can run, even ones the CPU before, between and after them. So parts are contiguous by construction,
and accelerators, which are all alike, have no names to permute. Numbers are scaled to integers and rounded down: what
the solver proves is a bound on the true value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evaluators.table.placement import PlacementProblem
from optimizer.exact.graphs.cpsat import run_solver, solver_module
from optimizer.exact.graphs.placement_merge import Clusters
from optimizer.exact.graphs.placement_value import CPU, PlacementObjective

if TYPE_CHECKING:
    from ortools.sat.python import cp_model as cp

_UNITS = 3e8  # the known value in the model's integer units


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The solver's answer: the device of each node or None, the bound, and whether infeasibility is proven."""

    devices: tuple[int, ...] | None
    bound: float
    infeasible: bool


def solve_model(
    problem: PlacementProblem,
    clusters: Clusters,
    objective: PlacementObjective,
    known: float,
    hint: tuple[int, ...] | None,
    time_limit_s: float,
) -> ModelAnswer:
    """Search for a solution that is at most ``known``, and prove a bound."""
    module = solver_module()
    scale = _UNITS / known if 0 < known < math.inf else 1e5
    model = _Model(problem, clusters, module.CpModel(), scale, math.ceil(known * scale) if known < math.inf else 10**12)
    if objective == "period":
        model.limit_loads()
    else:
        model.limit_latency()
    if hint is not None:
        model.hint(hint)
    model.model.minimize(model.worst)
    solver, outcome = run_solver(model.model, time_limit_s)
    bound = solver.best_objective_bound / scale
    return ModelAnswer(model.devices(solver) if outcome == "found" else None, bound, outcome == "infeasible")


class _Model:
    """Levels, and the constraints that every objective shares.

    Units are the nodes that share a level. Clusters that form a cycle, as colours on the CPU may, are separated into
    nodes that only share a device.
    """

    def __init__(
        self, problem: PlacementProblem, clusters: Clusters, model: cp.CpModel, scale: float, most: int
    ) -> None:
        self.problem, self.model, self.scale = problem, model, scale
        self.clusters = clusters
        self.unit = _units(problem, clusters)
        self.worst = model.new_int_var(0, most, "worst")
        self.most = most
        self.levels = 2 * problem.accelerators + 1
        self.at_least = {
            unit: [model.new_constant(1), *(model.new_bool_var("") for _ in range(1, self.levels))]
            for unit in sorted(set(self.unit))
        }
        self.on: dict[int, list[cp.IntVar]] = {}
        self.on_cpu: dict[int, list[cp.IntVar]] = {}  # if there are several CPUs, and their loads count
        for unit, at_least in self.at_least.items():
            for lower, upper in pairwise(at_least[1:]):
                model.add_implication(upper, lower)
            self.on[unit] = [model.new_bool_var("") for _ in range(problem.accelerators)]
            for number, on in enumerate(self.on[unit]):
                model.add(on == at_least[2 * number + 1] - at_least[2 * number + 2])
        for before, after in self.edges:
            for lower, upper in zip(self.at_least[before][1:], self.at_least[after][1:], strict=True):
                model.add_implication(lower, upper)
        self._share(self.on)
        self._forbid()
        self._limit_memory()

    @cached_property
    def edges(self) -> set[tuple[int, int]]:
        """Edges between units."""
        unit = self.unit
        return {
            (unit[v], unit[r])
            for v, readers in enumerate(self.problem.successors)
            for r in readers
            if unit[v] != unit[r]
        }

    @cached_property
    def transfers(self) -> dict[tuple[int, frozenset[int]], int]:
        """Cost of moving outputs, by the unit that writes them and the units that read them."""
        found: dict[tuple[int, frozenset[int]], int] = {}
        for node, readers in enumerate(self.problem.successors):
            others = frozenset(self.unit[r] for r in readers) - {self.unit[node]}
            cost = math.floor(self.problem.transfer[node] * self.scale)
            if others and cost:
                key = self.unit[node], others
                found[key] = found.get(key, 0) + cost
        return found

    def _share(self, choices: dict[int, list[cp.IntVar]]) -> None:
        """Constrain nodes of one cluster, or one colour, to one device."""
        for key in (self.clusters.of, self.problem.colours):
            leader: dict[int, int] = {}
            for node, shared in enumerate(key):
                first = leader.setdefault(shared, self.unit[node])
                if first != self.unit[node]:
                    for one, other in zip(choices[first], choices[self.unit[node]], strict=True):
                        self.model.add(one == other)

    def _forbid(self) -> None:
        accelerator = {
            self.unit[v] for v in range(len(self.unit)) if self.clusters.of[v] in self.clusters.on_accelerator
        }
        for unit in sorted(accelerator):
            self.model.add_exactly_one(self.on[unit])
        for node, cost in enumerate(self.problem.accelerator):
            if math.isinf(cost):
                for on in self.on[self.unit[node]]:
                    self.model.add(on == 0)

    def _limit_memory(self) -> None:
        total = sum(self.problem.nbytes)
        if total <= self.problem.memory_bytes:
            return
        scale = 1e9 / total
        room = math.floor(self.problem.memory_bytes * scale)
        weight = self._sum(self.problem.nbytes, scale)
        for number in range(self.problem.accelerators):
            kept = [w * self.on[unit][number] for unit, w in weight.items() if w]
            self.model.add(sum(kept, start=self.model.new_constant(0)) <= room)

    def _sum(self, values: tuple[float, ...], scale: float) -> dict[int, int]:
        found = dict.fromkeys(self.at_least, 0.0)
        for node, value in enumerate(values):
            found[self.unit[node]] += value if math.isfinite(value) else 0.0
        return {unit: math.floor(value * scale) for unit, value in found.items()}

    def _busy(self) -> list[Any]:
        """Return the load of each accelerator."""
        work = self._sum(self.problem.accelerator, self.scale)
        terms = [[w * self.on[unit][i] for unit, w in work.items() if w] for i in range(self.problem.accelerators)]
        for (unit, readers), cost in self.transfers.items():
            for number, on in enumerate(self.on[unit]):
                out, into = self.model.new_bool_var(""), self.model.new_bool_var("")
                for reader in readers:
                    self.model.add_bool_or(on.negated(), self.on[reader][number], out)
                    self.model.add_bool_or(on, self.on[reader][number].negated(), into)
                terms[number] += [cost * out, cost * into]
        return [sum(t) for t in terms]

    def limit_loads(self) -> None:
        """Let ``worst`` be the largest load."""
        for busy in self._busy():
            self.model.add(busy <= self.worst)
        cpu = self._sum(self.problem.cpu, self.scale)
        if self.problem.cpus <= 1:
            self.model.add(sum(w * (1 - sum(self.on[unit])) for unit, w in cpu.items() if w) <= self.worst)
            return
        for unit, on in self.on.items():
            self.on_cpu[unit] = [self.model.new_bool_var("") for _ in range(self.problem.cpus)]
            self.model.add_exactly_one([*on, *self.on_cpu[unit]])
        self._share(self.on_cpu)
        for number in range(self.problem.cpus):
            self.model.add(sum(w * self.on_cpu[unit][number] for unit, w in cpu.items() if w) <= self.worst)

    def limit_latency(self) -> None:
        """Let ``worst`` be the latency: accelerators run their parts unbroken, the CPU its nodes side by side."""
        busy = self._busy()
        ready = {unit: self.model.new_int_var(0, self.most, "") for unit in self.at_least}
        start = [self.model.new_int_var(0, self.most, "") for _ in busy]
        end = [self.model.new_int_var(0, self.most, "") for _ in busy]
        for number, took in enumerate(busy):
            self.model.add(end[number] >= start[number] + took)
            self.model.add(end[number] <= self.worst)
            for unit, done in ready.items():
                self.model.add(done >= end[number]).only_enforce_if(self.on[unit][number])
        cpu = self._sum(self.problem.cpu, self.scale)
        for unit, done in ready.items():
            self.model.add(done <= self.worst)
            self.model.add(done >= cpu[unit]).only_enforce_if([on.negated() for on in self.on[unit]])
        for before, after in sorted(self.edges):
            self.model.add(ready[after] >= ready[before])
            off = [on.negated() for on in self.on[after]]
            self.model.add(ready[after] >= ready[before] + cpu[after]).only_enforce_if(off)
            for number, on in enumerate(self.on[after]):
                elsewhere = [on, self.on[before][number].negated()]
                self.model.add(start[number] >= ready[before]).only_enforce_if(elsewhere)

    def hint(self, devices: tuple[int, ...]) -> None:
        """Give the solver a solution whose accelerators are in the order of their numbers."""
        for node, unit in enumerate(self.unit):
            if unit == node:
                level = 2 * devices[node] + 1 if devices[node] >= 0 else 0
                for number, at_least in enumerate(self.at_least[unit][1:], start=1):
                    self.model.add_hint(at_least, level >= number)
                for number, on in enumerate(self.on[unit]):
                    self.model.add_hint(on, devices[node] == number)
                for number, on in enumerate(self.on_cpu.get(unit, ())):
                    self.model.add_hint(on, devices[node] == CPU - number)

    def devices(self, solver: cp.CpSolver) -> tuple[int, ...]:
        """Return the device of each node in the solver's solution."""
        chosen = {
            unit: next((i for i, on in enumerate(ons) if solver.boolean_value(on)), self._cpu(unit, solver))
            for unit, ons in self.on.items()
        }
        return tuple(chosen[unit] for unit in self.unit)

    def _cpu(self, unit: int, solver: cp.CpSolver) -> int:
        ons = self.on_cpu.get(unit, ())
        return CPU - next((i for i, on in enumerate(ons) if solver.boolean_value(on)), 0)


def _units(problem: PlacementProblem, clusters: Clusters) -> tuple[int, ...]:
    """Return the smallest node of each node's unit."""
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(clusters.of)
    for node, readers in enumerate(problem.successors):
        graph.add_edges_from(
            (clusters.of[node], clusters.of[r]) for r in readers if clusters.of[node] != clusters.of[r]
        )
    circle = {c for part in nx.strongly_connected_components(graph) if len(part) > 1 for c in part}
    return tuple(v if c in circle and c not in clusters.on_accelerator else c for v, c in enumerate(clusters.of))
