"""A table of times as it stands in a paper: what each layer takes on each kind of device, and what lies between them.

The file is YAML. Times have one ``unit`` for the whole file; every number must be at least 0::

    name: two kinds of boards
    unit: ms                        # of all times: s, ms (usual in papers) or us
    objective: period               # or latency; what `optimize solve` makes small
    max_stages: 4                   # parts of a chain at most; as many as layers where this is missing
    one_part_per_device: false      # whether a device runs one part of the chain at most
    devices:                        # groups of devices that are alike
      - {kind: big, count: 4, memory_bytes: 4.0e+6, overhead: 0.1}   # only the kind must be given
      - {kind: little, count: 4}
    hand_over:                      # what a part waits for the one before it on another device; 0 where none is named
      - {from: big, to: little, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
      - {from: little, to: big, takes: 0.4}
      - {from: big, to: big, takes: 0.1}
    chains:                         # one, or several that run at the same time
      - name: net
        layers:
          - {name: conv1, times: {big: 1.5, little: 4.0}, memory_bytes: 2.0e+6, output_bytes: 8.0e+5}
          - name: fc
            times: {big: 0.7, little: never}                         # a kind that cannot run the layer
            hand_over: [{from: big, to: little, takes: 0.9}]         # of this layer's output, instead of the above

``takes`` is paid once for each cut between devices, and ``output_bytes / bandwidth_bytes_per_s`` of the layer before
the cut is added where both are given. Parts next to each other on one device pay only the overhead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.errors import UsageError
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.platform import Platform, Processor
from search_spaces.yaml_file import Value, parsed

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MOST_DEVICES = 64
_NEVER = "never"
Objective = Literal["latency", "period"]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Device:
    """A group of devices that are alike; memory is infinite where there is no limit."""

    kind: str
    count: int
    memory_bytes: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a chain.

    Attributes:
        name: as in the file.
        seconds: on each kind of device; infinite where it does not run.
        memory_bytes: what it keeps on its device.
        hand_over_s: of its output, from one kind to another.
    """

    name: str
    seconds: dict[str, float]
    memory_bytes: float
    output_bytes: float
    hand_over_s: dict[Pair, float]


@dataclass(frozen=True, slots=True)
class Table:
    """What a file says.

    Attributes:
        chains: name and layers of each; they run at the same time.
        max_stages: parts of a chain at most; None for as many as layers.
        one_part_per_device: whether a device runs one part at most.
    """

    name: str
    objective: Objective
    max_stages: int | None
    one_part_per_device: bool
    devices: tuple[Device, ...]
    chains: tuple[tuple[str, tuple[Layer, ...]], ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers, chain after chain: layer ``i`` is operator ``i`` of the graph."""
        return tuple(layer for _, layers in self.chains for layer in layers)

    def platform(self) -> Platform:
        """Return the devices as processors: ``big0``, ``big1``, … or ``big`` where there is one."""
        lanes = []
        for device in self.devices:
            for i in range(device.count):
                name = f"{device.kind}{i}" if device.count > 1 else device.kind
                lanes.append(Processor(name, "npu", {name: 1.0}, device.kind))
        return Platform(self.name, tuple(lanes))

    def graph(self) -> Graph:
        """Return the chains as one graph; what a layer keeps in memory is a constant that it reads."""
        tensors: list[Tensor] = []
        operators, inputs, outputs = [], [], []

        def tensor(name: str, nbytes: float, *, constant: bool = False) -> int:
            size = math.ceil(nbytes)
            tensors.append(Tensor(name, (size,), "int8", size, constant=constant))
            return len(tensors) - 1

        for chain, layers in self.chains:
            inputs.append(tensor(f"{chain}/input", 0))
            before = inputs[-1]
            for layer in layers:
                reads = [before]
                if layer.memory_bytes:
                    reads.append(tensor(f"{chain}/{layer.name}/kept", layer.memory_bytes, constant=True))
                before = tensor(f"{chain}/{layer.name}", layer.output_bytes)
                operators.append(Operator("LAYER", tuple(reads), (before,), {"name": layer.name}))
            outputs.append(before)
        return Graph(self.name, tuple(tensors), tuple(operators), tuple(inputs), tuple(outputs))

    def operator_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds of each layer on each processor, shape ``(P, n)``."""
        return np.array([[layer.seconds[p.like] for layer in self.layers] for p in platform.processors])

    def overhead_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds that a part adds on each processor, shape ``(P,)``."""
        overhead = {d.kind: d.overhead_s for d in self.devices}
        return np.array([overhead[p.like] for p in platform.processors])

    def hand_over_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds that handing over a layer's output takes, shape ``(n, P, P)``; 0 on one processor."""
        lanes = platform.processors
        return np.array(
            [
                [[0.0 if a is b else layer.hand_over_s.get((a.like, b.like), 0.0) for b in lanes] for a in lanes]
                for layer in self.layers
            ]
        )

    def memory_bytes(self, platform: Platform) -> NDArray[np.float64]:
        """Return what each processor can keep, shape ``(P,)``."""
        memory = {d.kind: d.memory_bytes for d in self.devices}
        return np.array([memory[p.like] for p in platform.processors])


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        UsageError: the file is missing or no table; the text begins with ``file:line``.
    """
    root = parsed(path, "a table of times")
    known = ("name", "unit", "objective", "max_stages", "one_part_per_device", "devices", "hand_over", "chains")
    fields = root.fields("a table", known)
    for key in ("devices", "chains"):
        if key not in fields:
            raise root.error(f"a table must have {key!r}")
    scale = _choice(fields["unit"], "the unit", tuple(_UNITS)) if "unit" in fields else "s"
    reader = _Reader(_UNITS[scale], tuple(_device(e, _UNITS[scale]) for e in fields["devices"].each("devices")))
    reader.check_devices(fields["devices"])
    usual = reader.hand_overs(fields["hand_over"]) if "hand_over" in fields else {}
    chains = tuple(reader.chain(entry, usual) for entry in fields["chains"].each("chains"))
    names = [name for name, _ in chains]
    if len(set(names)) < len(names):
        raise fields["chains"].error("two chains have one name")
    objective: Objective = "latency"
    if "objective" in fields and _choice(fields["objective"], "the objective", ("latency", "period")) == "period":
        objective = "period"
    most = _whole(fields["max_stages"], "max_stages") if "max_stages" in fields else None
    name = fields["name"].text("the table's name") if "name" in fields else path.stem
    once = "one_part_per_device" in fields and _truth(fields["one_part_per_device"], "one_part_per_device")
    return Table(name, objective, most, once, reader.devices, chains)


def _device(entry: Value, scale: float) -> Device:
    fields = entry.fields("a group of devices", ("kind", "count", "memory_bytes", "overhead"))
    if "kind" not in fields:
        raise entry.error("a group of devices must have a kind")
    count = _whole(fields["count"], "the count") if "count" in fields else 1
    if count > _MOST_DEVICES:
        raise fields["count"].error(f"a group has at most {_MOST_DEVICES} devices")
    memory = fields["memory_bytes"].number("memory_bytes") if "memory_bytes" in fields else math.inf
    overhead = fields["overhead"].number("the overhead") * scale if "overhead" in fields else 0.0
    return Device(fields["kind"].text("the kind"), count, memory, overhead)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads entries that name kinds of devices."""

    scale: float
    devices: tuple[Device, ...]

    def check_devices(self, entry: Value) -> None:
        """Raise where two groups have one kind, or names of their devices."""
        kinds = [d.kind for d in self.devices]
        if len(set(kinds)) < len(kinds):
            raise entry.error("two groups of devices have one kind", "give one of them a count")
        names = [f"{d.kind}{i}" if d.count > 1 else d.kind for d in self.devices for i in range(d.count)]
        if len(set(names)) < len(names):
            raise entry.error("two devices would have one name", "rename a kind")

    def hand_overs(self, entry: Value) -> dict[Pair, tuple[float, float]]:
        """Return seconds and seconds per byte for each pair of kinds."""
        found: dict[Pair, tuple[float, float]] = {}
        for one in entry.each("hand_over"):
            fields = one.fields("a hand-over", ("from", "to", "takes", "bandwidth_bytes_per_s"))
            for key in ("from", "to"):
                if key not in fields:
                    raise one.error(f"a hand-over must say {key!r}")
            pair = self._kind(fields["from"]), self._kind(fields["to"])
            if pair in found:
                raise one.error(f"the hand-over from {pair[0]} to {pair[1]} is given twice")
            takes = fields["takes"].number("takes") * self.scale if "takes" in fields else 0.0
            rate = fields.get("bandwidth_bytes_per_s")
            found[pair] = takes, 1.0 / rate.number("the bandwidth", above=1e-9) if rate else 0.0
        return found

    def chain(self, entry: Value, usual: dict[Pair, tuple[float, float]]) -> tuple[str, tuple[Layer, ...]]:
        fields = entry.fields("a chain", ("name", "layers"))
        for key in ("name", "layers"):
            if key not in fields:
                raise entry.error(f"a chain must have {key!r}")
        layers = tuple(self._layer(e, usual) for e in fields["layers"].each("layers"))
        return fields["name"].text("the chain's name"), layers

    def _layer(self, entry: Value, usual: dict[Pair, tuple[float, float]]) -> Layer:
        fields = entry.fields("a layer", ("name", "times", "memory_bytes", "output_bytes", "hand_over"))
        for key in ("name", "times"):
            if key not in fields:
                raise entry.error(f"a layer must have {key!r}")
        name = fields["name"].text("the layer's name")
        times = fields["times"].fields("times", [d.kind for d in self.devices])
        for device in self.devices:
            if device.kind not in times:
                hint = f"give its time, or `{_NEVER}` where {device.kind} cannot run it"
                raise fields["times"].error(f"layer {name!r} has no time on {device.kind!r}", hint)
        seconds = {kind: self._time(value, f"the time of {name!r} on {kind!r}") for kind, value in times.items()}
        if all(math.isinf(s) for s in seconds.values()):
            raise fields["times"].error(f"layer {name!r} runs on no device")
        own = self.hand_overs(fields["hand_over"]) if "hand_over" in fields else {}
        nbytes = fields["output_bytes"].number("output_bytes") if "output_bytes" in fields else 0.0
        kept = fields["memory_bytes"].number("memory_bytes") if "memory_bytes" in fields else 0.0
        hand_over_s = {pair: takes + nbytes * rate for pair, (takes, rate) in {**usual, **own}.items()}
        return Layer(name, seconds, kept, nbytes, hand_over_s)

    def _time(self, value: Value, what: str) -> float:
        return math.inf if value.node.value == _NEVER else value.number(what) * self.scale

    def _kind(self, value: Value) -> str:
        return _choice(value, "the kind", tuple(d.kind for d in self.devices))


def _choice(value: Value, what: str, known: tuple[str, ...]) -> str:
    import difflib

    text = value.text(what)
    if text not in known:
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(known)}"
        raise value.error(f"{what} cannot be {text!r}", hint)
    return text


def _truth(value: Value, what: str) -> bool:
    return _choice(value, what, ("true", "false")) == "true"


def _whole(value: Value, what: str) -> int:
    number = value.number(what, above=1.0)
    if number != int(number):
        raise value.error(f"{what} must be a whole number")
    return int(number)


def check_objective(name: str | None, table: Table) -> Objective:
    """Return the objective to use: the one that a person asked for, else the table's.

    Raises:
        UsageError: there is no such objective.
    """
    if name is None:
        return table.objective
    if name == "latency":
        return "latency"
    if name == "period":
        return "period"
    raise UsageError(f"--objective {name}: a table has the objectives latency and period")
