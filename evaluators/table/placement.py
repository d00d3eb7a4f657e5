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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from search_spaces.core.bounded import built, parsed_json, read_bounded
from search_spaces.core.errors import UsageError, reason_of, shown

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
        data = parsed_json(read_bounded(path, MAX_NBYTES))
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON of at most {MAX_NBYTES >> 20} MiB: {error}") from error
    return _problem(path, built(_Instance, data, f"{path}: the instance is", UsageError))


_Cost = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Devices = Annotated[int, Field(ge=0, le=MOST_DEVICES)]


@dataclass(frozen=True, slots=True)
class _Node:
    id: int | str
    size: _Cost
    cpu: Annotated[_Cost, Field(alias="cpuLatency")]
    accelerator: Annotated[_Cost, Field(alias="fpgaLatency")]
    name: Any = None
    supported: Annotated[bool, Field(alias="supportedOnFpga")] = True
    colour: Annotated[Any, Field(alias="colorClass")] = None


@dataclass(frozen=True, slots=True)
class _Edge:
    source: Annotated[int | str, Field(alias="sourceId")]
    reader: Annotated[int | str, Field(alias="destId")]
    cost: _Cost


@dataclass(frozen=True, slots=True)
class _Instance:
    nodes: Annotated[tuple[_Node, ...], Field(min_length=1)]
    edges: tuple[_Edge, ...]
    cpus: Annotated[_Devices, Field(alias="maxCPUs")]
    accelerators: Annotated[_Devices, Field(alias="maxFPGAs")]
    memory_bytes: Annotated[_Cost, Field(alias="maxSizePerFPGA")]


def _problem(path: Path, read: _Instance) -> PlacementProblem:
    """Return the problem of an instance, with nodes by their positions."""
    index: dict[int | str, int] = {}
    for position, node in enumerate(read.nodes):
        if index.setdefault(node.id, position) != position:
            raise UsageError(f"{path}: node {position} has the id {shown(node.id)}", "give each node its own id")
    successors: list[set[int]] = [set() for _ in read.nodes]
    transfer: dict[int, float] = {}
    for position, edge in enumerate(read.edges):
        for end in (edge.source, edge.reader):
            if end not in index:
                raise UsageError(f"{path}: edge {position} names node {shown(end)}, which is not there")
        source = index[edge.source]
        if transfer.setdefault(source, edge.cost) != edge.cost:
            raise UsageError(
                f"{path}: edge {position}: the output of node {edge.source} costs {edge.cost:g}, and on another edge "
                f"{transfer[source]:g}",
                "give both the same cost",
            )
        successors[source].add(index[edge.reader])
    colours: dict[Any, int] = {}
    return PlacementProblem(
        name=path.stem,
        names=tuple(str(node.id if node.name is None else node.name) for node in read.nodes),
        cpu=tuple(node.cpu if read.cpus else math.inf for node in read.nodes),
        accelerator=tuple(node.accelerator if node.supported else math.inf for node in read.nodes),
        nbytes=tuple(node.size for node in read.nodes),
        transfer=tuple(transfer.get(i, 0.0) for i in range(len(read.nodes))),
        successors=tuple(tuple(sorted(each)) for each in successors),
        colours=tuple(
            colours.setdefault(i if node.colour is None else str(node.colour), i) for i, node in enumerate(read.nodes)
        ),
        accelerators=read.accelerators,
        memory_bytes=read.memory_bytes,
        cpus=read.cpus,
    )
