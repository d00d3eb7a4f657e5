"""Published device-placement instances: a graph of nodes timed on CPUs and on identical accelerators.

The problem, and its JSON, are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators" (NeurIPS 2020). Every node goes to one of ``cpus`` CPUs or of ``accelerators`` accelerators:

- the nodes of an accelerator fit into its memory, and are one contiguous part that runs once: no path leads out of it
  and back into it, and the parts do not form a cycle (a CPU's nodes may be anywhere);
- nodes of one colour are on one device;
- a transfer of a node's output between an accelerator's memory and that of all CPUs costs the accelerator ``transfer``:
  once to send it, if another device reads it, and once on each accelerator that reads it. CPUs pay nothing.

Costs have the unit of the file; the published ones are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.core.bounded import parsed_json, read_bounded
from search_spaces.core.errors import UsageError, shown

MAX_NBYTES = 64 << 20
MOST_DEVICES = 256


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """A graph to place; every sequence has one entry for each node, edges name nodes by their position.

    Attributes:
        name: of the instance.
        names: of the nodes in the file.
        cpu, accelerator: cost of each node on the CPU and on an accelerator; infinite where it cannot run.
        nbytes: bytes that each node keeps in an accelerator's memory.
        transfer: cost of moving each node's output into an accelerator's memory or out of it.
        successors: the nodes that read each node's output, ascending.
        colours: nodes with the same number are on one device.
        accelerators, memory_bytes: number of accelerators, and memory of each.
        cpus: number of identical CPUs; each runs its nodes one after another where the objective is the load. For the
            latency, as many CPUs are assumed as nodes can run at once.
        predecessors: the nodes that each node reads from.
        order: the nodes in a topological order.

    Raises:
        UsageError: the edges form a cycle, or some node can run on no device.
    """

    name: str
    names: tuple[str, ...]
    cpu: tuple[float, ...]
    accelerator: tuple[float, ...]
    nbytes: tuple[float, ...]
    transfer: tuple[float, ...]
    successors: tuple[tuple[int, ...], ...]
    colours: tuple[int, ...]
    accelerators: int
    memory_bytes: float
    cpus: int = 1
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    order: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        before: list[list[int]] = [[] for _ in self.names]
        for node, after in enumerate(self.successors):
            for reader in after:
                before[reader].append(node)
        object.__setattr__(self, "predecessors", tuple(tuple(p) for p in before))
        waiting = [len(p) for p in before]
        order = [node for node, count in enumerate(waiting) if not count]
        for node in order:
            for reader in self.successors[node]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    order.append(reader)
        if len(order) < len(self.names):
            stuck = next(node for node, count in enumerate(waiting) if count)
            raise UsageError(f"{self.name}: the edges form a cycle; node {self.names[stuck]!r} is in it or after it")
        object.__setattr__(self, "order", tuple(order))
        for node, name in enumerate(self.names):
            if math.isinf(self.cpu[node]) and (math.isinf(self.accelerator[node]) or not self.accelerators):
                raise UsageError(f"{self.name}: node {name!r} runs on no device")


def is_placement(path: Path) -> bool:
    """Return whether a file is a published instance, by its suffix ``.json``."""
    return path.suffix.lower() == ".json"


def read_placement(path: Path) -> PlacementProblem:
    """Read a published instance.

    Raises:
        UsageError: the file is missing, damaged, or not an instance; the text names the node or edge.
    """
    try:
        content = read_bounded(path, MAX_NBYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {(getattr(error, 'strerror', None) or str(error)).lower()}") from error
    try:
        data = parsed_json(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON of at most {MAX_NBYTES >> 20} MiB: {error}") from error
    if not isinstance(data, Mapping):
        raise UsageError(f"{path}: a placement instance is a JSON object, not {shown(data)}")
    return _Reader(path, data).problem()


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    data: Mapping[str, Any]

    def problem(self) -> PlacementProblem:
        nodes, edges = self._entries("nodes"), self._entries("edges")
        index: dict[Any, int] = {}
        for position, node in enumerate(nodes):
            number = node.get("id")
            if not isinstance(number, int | str) or number in index:
                raise UsageError(
                    f"{self.path}: node {position} has the id {shown(number)}", "give each node its own id"
                )
            index[number] = position
        successors, transfer = self._edges(edges, index, len(nodes))
        cpus = self._count("maxCPUs")
        times = [[self._number(n, key, f"node {n['id']}") for n in nodes] for key in ("cpuLatency", "fpgaLatency")]
        colours: dict[Any, int] = {}
        return PlacementProblem(
            name=self.path.stem,
            names=tuple(str(n.get("name", n["id"])) for n in nodes),
            cpu=tuple(t if cpus else math.inf for t in times[0]),
            accelerator=tuple(
                t if n.get("supportedOnFpga", True) else math.inf for n, t in zip(nodes, times[1], strict=True)
            ),
            nbytes=tuple(self._number(n, "size", f"node {n['id']}") for n in nodes),
            transfer=transfer,
            successors=successors,
            colours=tuple(
                colours.setdefault(str(n["colorClass"]) if n.get("colorClass") is not None else i, i)
                for i, n in enumerate(nodes)
            ),
            accelerators=self._count("maxFPGAs"),
            memory_bytes=self._number(self.data, "maxSizePerFPGA", "the instance"),
            cpus=cpus,
        )

    def _edges(
        self, edges: Sequence[Mapping[str, Any]], index: Mapping[Any, int], count: int
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
        successors: list[set[int]] = [set() for _ in range(count)]
        transfer: dict[int, float] = {}
        for position, edge in enumerate(edges):
            ends = [edge.get("sourceId"), edge.get("destId")]
            for end in ends:
                if not isinstance(end, int | str) or end not in index:
                    raise UsageError(f"{self.path}: edge {position} names node {shown(end)}, which is not there")
            source, reader = (index[end] for end in ends)
            cost = self._number(edge, "cost", f"edge {position}")
            if transfer.setdefault(source, cost) != cost:
                raise UsageError(
                    f"{self.path}: edge {position}: the output of node {ends[0]} costs {cost:g}, and on another edge "
                    f"{transfer[source]:g}",
                    "give both the same cost",
                )
            successors[source].add(reader)
        return tuple(tuple(sorted(s)) for s in successors), tuple(transfer.get(i, 0.0) for i in range(count))

    def _entries(self, key: str) -> list[Mapping[str, Any]]:
        found = self.data.get(key)
        if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
            raise UsageError(f"{self.path}: {key!r} is missing, or no list of objects")
        if key == "nodes" and not found:
            raise UsageError(f"{self.path}: there are no nodes")
        return found

    def _count(self, key: str) -> int:
        number = self._number(self.data, key, "the instance")
        if number != int(number) or number > MOST_DEVICES:
            raise UsageError(f"{self.path}: {key} is {number:g}: not a whole number of at most {MOST_DEVICES}")
        return int(number)

    def _number(self, entry: Mapping[str, Any], key: str, what: str) -> float:
        value = entry.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            given = f"is {shown(value)}" if key in entry else "is missing"
            raise UsageError(f"{self.path}: {what}: {key} {given}; it must be a number of at least 0")
        return float(value)
