"""The value of a solution of a placement problem (load or latency), and the rules that it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evaluators.table.placement import PlacementProblem

CPU = -1
"""The first CPU; the others are -2, -3, …"""

PlacementObjective = Literal["period", "latency"]


def device_names(problem: PlacementProblem) -> dict[int, str]:
    """Return the names of devices, CPUs first."""
    cpus = {CPU - i: f"cpu{i}" if problem.cpus > 1 else "cpu" for i in range(max(1, problem.cpus))}
    return cpus | {i: f"accelerator{i}" for i in range(problem.accelerators)}


def loads(problem: PlacementProblem, devices: Sequence[int]) -> dict[int, float]:
    """Return the load of each device with its transfers: accelerators by number, CPUs as ``CPU``, ``CPU - 1``, ….

    Args:
        devices: the accelerator or the CPU of each node.
    """
    found = dict.fromkeys(range(min(CPU, -problem.cpus), problem.accelerators), 0.0)
    for node, device in enumerate(devices):
        found[device] += problem.cpu[node] if device < 0 else problem.accelerator[node]
        elsewhere = {max(CPU, devices[r]) for r in problem.successors[node]} - {max(CPU, device)}
        for payer in [device] * bool(elsewhere) + sorted(elsewhere):
            if payer >= 0:
                found[payer] += problem.transfer[node]
    return found


def latency(problem: PlacementProblem, devices: Sequence[int]) -> float:
    """Return the time of one inference; infinite if parts form a cycle, so that none of them begins.

    An accelerator begins when all inputs of its part are available; it reads them, computes, and sends its outputs, one
    after another; other devices see its outputs when it has ended. CPUs run each node as soon as its inputs are there,
    side by side (Tarnawski et al. 2020, section 4: latency minimisation, which takes there to be enough of them).
    """
    return max(ends(problem, devices), default=0.0)


def ends(problem: PlacementProblem, devices: Sequence[int]) -> list[float]:
    """Return when the output of each node is in the CPUs' memory; infinite if it never is."""
    took = loads(problem, devices)
    count = len(devices)
    # A unit is a node of a CPU, or all nodes of an accelerator.
    unit = [node if device < 0 else count + device for node, device in enumerate(devices)]
    members: dict[int, list[int]] = {}
    waits = dict.fromkeys(unit, 0)
    for node, own in enumerate(unit):
        members.setdefault(own, []).append(node)
        waits[own] += sum(unit[p] != own for p in problem.predecessors[node])
    begin = dict.fromkeys(unit, 0.0)
    found = [float("inf")] * count
    ready = [own for own, left in waits.items() if not left]
    while ready:
        own = ready.pop()
        end = begin[own] + (problem.cpu[own] if own < count else took[own - count])
        for node in members[own]:
            found[node] = end
            for reader in problem.successors[node]:
                other = unit[reader]
                if other != own:
                    begin[other] = max(begin[other], end)
                    waits[other] -= 1
                    if not waits[other]:
                        ready.append(other)
    return found


def value(problem: PlacementProblem, devices: Sequence[int], objective: PlacementObjective) -> float:
    """Return the largest load, or the latency; infinite where a rule is broken, or parts form a cycle."""
    if not _keeps_rules(problem, devices):
        return float("inf")
    took = latency(problem, devices)
    return took if objective == "latency" or took == float("inf") else max(loads(problem, devices).values())


def _keeps_rules(problem: PlacementProblem, devices: Sequence[int]) -> bool:
    """Return whether nodes run on their devices, which have memory for them, and those of a colour are together."""
    kept = [0.0] * problem.accelerators
    of_colour: dict[int, int] = {}
    for node, device in enumerate(devices):
        runs = (problem.cpu if device < 0 else problem.accelerator)[node] < float("inf")
        if not runs or of_colour.setdefault(problem.colours[node], device) != device:
            return False
        if device >= 0:
            kept[device] += problem.nbytes[node]
    return all(nbytes <= problem.memory_bytes for nbytes in kept)
