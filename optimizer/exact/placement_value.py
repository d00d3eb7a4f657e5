"""What a solution of a placement problem is worth: its load or latency, and the rules that it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from evaluators.table.placement import PlacementProblem

CPU = -1
PlacementObjective = Literal["period", "latency"]


def loads(problem: PlacementProblem, devices: Sequence[int]) -> dict[int, float]:
    """Return what each device has to do, transfers included: accelerators by number, the CPU as ``CPU``.

    Args:
        devices: the accelerator of each node, or ``CPU``.
    """
    found = dict.fromkeys(range(CPU, problem.accelerators), 0.0)
    for node, device in enumerate(devices):
        found[device] += problem.cpu[node] if device == CPU else problem.accelerator[node]
        elsewhere = {devices[r] for r in problem.successors[node]} - {device}
        for payer in [device] * bool(elsewhere) + sorted(elsewhere):
            if payer != CPU:
                found[payer] += problem.transfer[node]
    return found


def latency(problem: PlacementProblem, devices: Sequence[int]) -> float:
    """Return the time of one inference.

    An accelerator begins when all that its part reads from elsewhere is there, reads it in, computes, and sends out,
    one after another; others see its outputs when it has ended. The CPU runs each node as soon as its inputs are
    there, side by side (Tarnawski et al. 2020, section 4: latency minimisation).
    """
    took = loads(problem, devices)
    ready: dict[int, float] = {}

    def end(node: int) -> float:
        """Return when the output is in the CPU's memory, for nodes whose predecessors all have ``ready``."""
        before = max((ready[p] for p in problem.predecessors[node]), default=0.0)
        return before + problem.cpu[node]

    parts: dict[int, list[int]] = {}
    for node, device in enumerate(devices):
        if device != CPU:
            parts.setdefault(device, []).append(node)
    waiting_cpu = [v for v in problem.order if devices[v] == CPU]
    while len(ready) < len(devices):
        before = len(ready)
        for device, nodes in list(parts.items()):
            outside = {p for v in nodes for p in problem.predecessors[v]} - set(nodes)
            if all(p in ready for p in outside):
                finish = max((ready[p] for p in outside), default=0.0) + took[device]
                ready.update(dict.fromkeys(nodes, finish))
                del parts[device]
        for node in waiting_cpu:
            if node not in ready and all(p in ready for p in problem.predecessors[node]):
                ready[node] = end(node)
        if len(ready) == before:
            return float("inf")  # parts that depend on each other in a circle never begin
    return max(ready.values(), default=0.0)


def value(problem: PlacementProblem, devices: Sequence[int], objective: PlacementObjective) -> float:
    """Return the largest load, or the latency; infinite where a rule is broken (see :func:`broken`)."""
    if broken(problem, devices):
        return float("inf")
    return max(loads(problem, devices).values()) if objective == "period" else latency(problem, devices)


def broken(problem: PlacementProblem, devices: Sequence[int]) -> str:
    """Return which rule a solution breaks, or ""."""
    kept = [0.0] * problem.accelerators
    of_colour: dict[int, int] = {}
    for node, device in enumerate(devices):
        if not CPU <= device < problem.accelerators:
            return f"node {problem.names[node]!r} is on device {device}, which is not there"
        if (problem.cpu if device == CPU else problem.accelerator)[node] == float("inf"):
            return f"node {problem.names[node]!r} does not run on its device"
        if device != CPU:
            kept[device] += problem.nbytes[node]
        if of_colour.setdefault(problem.colours[node], device) != device:
            return f"node {problem.names[node]!r} is not where the others of its colour are"
    full = next((i for i, nbytes in enumerate(kept) if nbytes > problem.memory_bytes), None)
    if full is not None:
        return f"accelerator {full} holds more than its memory"
    if latency(problem, devices) == float("inf"):
        return "the parts of the accelerators depend on each other in a circle"
    return ""
