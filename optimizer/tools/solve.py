"""``optimize solve FILE``: the best placement of a table of times or of a published instance, with its proof."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from evaluators.table.placement import is_placement, read_placement
from evaluators.table.table import Objective, Table, check_objective, read_table
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.graphs.cpsat import check_time_limit
from optimizer.exact.graphs.dag import best_plan
from optimizer.exact.graphs.graph_costs import GraphCosts
from optimizer.exact.graphs.placement import solve_placement
from optimizer.exact.graphs.placement_value import CPU, PlacementObjective, device_names, loads
from optimizer.exact.period import least_period
from optimizer.exact.solution import PROVEN, relative_gap
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.platform import Platform
from search_spaces.core.wording import percent, plural

SCHEMA_VERSION = 1
_MOST_NAMES = 6
_OWN_UNIT = "of the file"
_SEARCH_SHARE = 0.2  # of the time for best-first search; the rest is for CP-SAT, which proves faster


@dataclass(frozen=True, slots=True)
class Part:
    """A run of operators on one device."""

    device: str
    chain: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Solved:
    """A placement and its proof.

    Attributes:
        value, bound: the placement's objective and the lower bound of all placements, in ``unit``.
        unit: ``ms``, or that of the file.
        loads: load of each device by one inference, in ``unit``.
    """

    name: str
    objective: str
    value: float
    bound: float
    unit: str
    parts: tuple[Part, ...]
    wall_s: float
    loads: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How far the value can be above the best one, relative to the bound."""
        return relative_gap(self.value, self.bound)

    @property
    def proven(self) -> bool:
        """Whether it is the best, up to the rounding of the solver's integers (1e-5)."""
        return self.gap <= PROVEN

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in ("name", "objective", "unit", "value", "bound")},
            "gap": self.gap if self.gap < float("inf") else None,
            "proven": self.proven,
            "parts": [asdict(part) for part in self.parts],
            "loads": self.loads,
            "wall_s": self.wall_s,
        }


def solve_file(path: Path, objective: str | None, time_limit_s: float) -> Solved:
    """Solve a table (YAML) or a published instance (JSON).

    Args:
        objective: ``latency`` or ``period``; None for the one that the table names, ``period`` for an instance.

    Raises:
        UsageError: the file, the objective or the time limit is wrong.
        InfeasibleError: no placement keeps all limits.
        UnavailableError: OR-Tools is needed and missing, or the time was too short to find anything.
    """
    check_time_limit(time_limit_s)
    if is_placement(path):
        return _instance(path, objective or "period", time_limit_s)
    table = read_table(path)
    wanted = check_objective(objective, table)
    if table.one_part_per_device and not (len(table.networks) == 1 and table.linear):
        raise UsageError(f"{table.name}: one_part_per_device is solved for one network that is a chain", "leave it out")
    if len(table.networks) == 1 and table.linear:
        return _chain(table, wanted, time_limit_s)
    return _period(table, time_limit_s) if wanted == "period" else _latency(table, time_limit_s)


def _instance(path: Path, objective: str, time_limit_s: float) -> Solved:
    if objective not in get_args(PlacementObjective):
        raise UsageError(f"--objective {objective}: a placement instance supports latency and period")
    problem = read_placement(path)
    found = solve_placement(problem, cast("PlacementObjective", objective), time_limit_s)
    names = device_names(problem)
    if objective == "latency" and problem.cpus > 1:
        names[CPU] = "cpus"
    parts = tuple(
        Part(names[device], "", tuple(problem.names[v] for v in problem.order if found.best[v] == device))
        for device in sorted(set(found.best), key=found.best.index)
    )
    load = {names[device]: value for device, value in loads(problem, found.best).items()}
    return Solved(problem.name, objective, found.value, found.bound, _OWN_UNIT, parts, found.wall_s, load)


def table_costs(table: Table, platform: Platform) -> ChainCosts:
    """Return the costs of all operators; ``transfer_s[i]`` is for moving the output of operator ``i - 1``."""
    after = table.transfer_s(platform)
    return ChainCosts(
        platform,
        table.operator_s(platform),
        table.overhead_s(platform),
        np.concatenate((np.zeros_like(after[:1]), after[:-1])),
        np.array([o.memory_bytes for o in table.operators]),
        table.memory_bytes(platform),
    )


def _chain(table: Table, objective: Objective, time_limit_s: float) -> Solved:
    begin_s = time.monotonic()
    platform = table.platform()
    costs = table_costs(table, platform)
    once, most = table.one_part_per_device, min(table.max_stages or len(table.operators), len(table.operators))
    most = min(most, len(platform.processors)) if once else most
    share = _SEARCH_SHARE if objective == "period" and not once else 1.0
    try:
        best = best_chains(costs, most, objective=objective, stop_s=begin_s + share * time_limit_s, once=once)[0]
    except UnavailableError:
        if share == 1.0:
            raise
        return _period(table, (1.0 - share) * time_limit_s)
    borders = [0, *best.cuts, len(table.operators)]
    processor = {p.name: i for i, p in enumerate(platform.processors)}
    processors = [0] * len(table.operators)
    for (first, last), device in zip(pairwise(borders), best.processors, strict=True):
        processors[first:last] = [processor[device]] * (last - first)
    value = best.cost_s * 1e3
    wall_s = time.monotonic() - begin_s
    return Solved(table.name, objective, value, value, "ms", _parts(table, platform, processors), wall_s)


def _period(table: Table, time_limit_s: float) -> Solved:
    platform = table.platform()
    ranges = _ranges(table)
    reads = [
        [first.start + i for i in o.reads] for first, (_, own) in zip(ranges, table.networks, strict=True) for o in own
    ]
    found = least_period(table_costs(table, platform), ranges, table.max_stages, time_limit_s, reads)
    parts = _parts(table, platform, found.best)
    return Solved(table.name, "period", found.value * 1e3, found.bound * 1e3, "ms", parts, found.wall_s)


def _latency(table: Table, time_limit_s: float) -> Solved:
    needed = sum(o.memory_bytes for o in table.operators)
    tight = any(device.memory_bytes < needed for device in table.devices)
    for limited, what in ((table.max_stages is not None, "max_stages"), (tight, "memory_bytes of devices")):
        if limited:
            raise UsageError(
                f"{table.name}: {what} of several networks, or of one with branches, is solved for the period only",
                "leave it out, or give --objective period; optimize --evaluator table searches with all limits",
            )
    platform, graph = table.platform(), table.graph()
    transfer_s = table.transfer_s(platform)
    between = np.zeros((len(graph.tensors), len(platform.processors), len(platform.processors)))
    for layer, operator in enumerate(graph.operators):
        between[operator.outputs[0]] = transfer_s[layer]
    costs = GraphCosts(platform, table.operator_s(platform), table.overhead_s(platform), between)
    found = best_plan(graph, costs, time_limit_s)
    starts = {r.start: name for r, (name, _) in zip(_ranges(table), table.networks, strict=True)}
    chain_of = {o: starts[max(s for s in starts if s <= o)] for o in range(len(table.operators))}
    parts = tuple(
        Part(s.processor, chain_of[s.operators[0]], tuple(table.operators[o].name for o in s.operators))
        for s in found.best.stages
    )
    return Solved(table.name, "latency", found.value * 1e3, found.bound * 1e3, "ms", parts, found.wall_s)


def _ranges(table: Table) -> list[range]:
    ends = [0, *accumulate(len(layers) for _, layers in table.networks)]
    return [range(first, end) for first, end in pairwise(ends)]


def _parts(table: Table, platform: Platform, processors: list[int] | tuple[int, ...]) -> tuple[Part, ...]:
    """Return the stages: an operator that reads only what is on its own processor joins the last of these stages."""
    found: list[Part] = []
    for (network, members), operators in zip(table.networks, _ranges(table), strict=True):
        stage_of: list[int] = []
        for member, operator in zip(members, operators, strict=True):
            alone = any(processors[operators[i]] != processors[operator] for i in member.reads)
            stage = len(found) if alone or not member.reads else max(stage_of[i] for i in member.reads)
            if stage == len(found):
                found.append(Part(platform.processors[processors[operator]].name, network, ()))
            found[stage] = replace(found[stage], nodes=(*found[stage].nodes, member.name))
            stage_of.append(stage)
    return tuple(found)


def render(solved: Solved) -> str:
    """Return the placement and its proof as text."""
    what = {"latency": "latency of one inference", "period": "period: load of the busiest device"}[solved.objective]
    unit = "" if solved.unit == _OWN_UNIT else f" {solved.unit}"
    proof = (
        "proven to be the best" if solved.proven else f"at least {solved.bound:.6g}{unit}: gap {percent(solved.gap, 2)}"
    )
    lines = [f"{solved.name}: {what} {solved.value:.6g}{unit}, {proof}; {solved.wall_s:.2f} s"]
    width = max(len(p.device) for p in solved.parts)
    for part in solved.parts:
        names = ", ".join(part.nodes[:_MOST_NAMES]) + (", …" if len(part.nodes) > _MOST_NAMES else "")
        load = f", load {solved.loads[part.device]:.6g}" if part.device in solved.loads else ""
        where = f"{part.chain}: " if part.chain else ""
        lines.append(f"  {part.device:{width}}  {where}{plural(len(part.nodes), 'operator')}{load}: {names}")
    return "\n".join(lines)
