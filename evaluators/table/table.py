"""Tables of times, as in papers: seconds of each operator on each processor, and transfers between processors.

The file is YAML. Times have one ``unit`` for the whole file; every number must be at least 0::

    name: two kinds of boards
    unit: ms                        # of all times: s, ms (usual in papers) or us
    objective: period               # or latency; what `optimize solve` minimises
    max_stages: 4                   # maximum per network; default: the number of its operators
    one_part_per_device: false      # whether a processor runs at most one part of the network
    devices:                        # groups of identical processors; only the kind is required
      - {kind: gpu, memory_bytes: 4.0e+6, overhead: 0.1}
      - {kind: cpu, count: 4}       # four cores, each its own processor: they run operators in parallel
    transfers:                      # time that a stage waits for a tensor from another processor; default: 0
      - {from: gpu, to: cpu, takes: 0.3, bandwidth_bytes_per_s: 1.0e+9}
      - {from: cpu, to: gpu, takes: 0.4}
    networks:                       # one, or several that run concurrently
      - name: net
        operators:                  # in topological order
          - {name: conv1, times: {gpu: 0.5, cpu: 4.0}, memory_bytes: 2.0e+6, output_bytes: 8.0e+5}
          - {name: left, times: {gpu: 0.7, cpu: 2.0}}                # reads the operator before it
          - {name: right, times: {gpu: 0.7, cpu: 2.0}, reads: [conv1]}
          - name: join
            reads: [left, right]
            times: {gpu: 0.1, cpu: never}                            # a kind that cannot run the operator
            transfers: [{from: gpu, to: cpu, takes: 0.9}]            # of this operator's output, instead of the above

``takes`` is paid once for each stage that reads the output on another processor, and
``output_bytes / bandwidth_bytes_per_s`` is added where both are given. Parts next to each other on one processor pay
only the overhead. The operators may also be a CSV file beside the YAML file (``operators: net.csv``), with the columns
``name``, ``reads`` (names, with spaces between them), ``memory_bytes``, ``output_bytes`` and one for each kind; all but
the name and the kinds may be missing or empty, and an empty ``reads`` is the operator before, ``-`` the network's
input.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import did_you_mean
from search_spaces.core.yaml_file import Value, parsed

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MOST_DEVICES = 64
_MAX_CSV_NBYTES = 4 << 20
_NEVER = "never"
Objective = Literal["latency", "period"]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Device:
    """A group of identical devices; memory is infinite where there is no limit."""

    kind: str
    count: int
    memory_bytes: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class TimedOperator:
    """One operator of a network.

    Attributes:
        name: as in the file.
        seconds: on each kind of processor; infinite where it does not run.
        memory_bytes: bytes that it keeps on its processor.
        output_bytes: size of its output.
        transfer_s: seconds of its output's transfer from one kind to another.
        reads: the operators whose outputs it reads, by their positions in the network; none: the network's input.
    """

    name: str
    seconds: dict[str, float]
    memory_bytes: float
    output_bytes: float
    transfer_s: dict[Pair, float]
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of times.

    Attributes:
        networks: name and operators of each; they run concurrently.
        max_stages: maximum number of stages of a network; None for as many as operators.
        one_part_per_device: whether a processor runs at most one part.
    """

    name: str
    objective: Objective
    max_stages: int | None
    one_part_per_device: bool
    devices: tuple[Device, ...]
    networks: tuple[tuple[str, tuple[TimedOperator, ...]], ...]

    @property
    def operators(self) -> tuple[TimedOperator, ...]:
        """All operators, network after network: entry ``i`` is operator ``i`` of the graph."""
        return tuple(operator for _, operators in self.networks for operator in operators)

    @property
    def linear(self) -> bool:
        """Whether every operator reads the one before it and nothing else."""
        return all(
            operator.reads == ((index - 1,) if index else ())
            for _, operators in self.networks
            for index, operator in enumerate(operators)
        )

    def platform(self) -> Platform:
        """Return the devices as processors: ``big0``, ``big1``, … or ``big`` where there is one."""
        processors = []
        for device in self.devices:
            for i in range(device.count):
                name = f"{device.kind}{i}" if device.count > 1 else device.kind
                processors.append(Processor(name, "npu", {name: 1.0}, device.kind))
        return Platform(self.name, tuple(processors))

    def graph(self) -> Graph:
        """Return the networks as one graph; the memory that an operator keeps is a constant that it reads."""
        tensors: list[Tensor] = []
        operators, inputs, outputs = [], [], []

        def tensor(name: str, nbytes: float, *, constant: bool = False) -> int:
            size = math.ceil(nbytes)
            tensors.append(Tensor(name, (size,), "int8", size, constant=constant))
            return len(tensors) - 1

        for network, members in self.networks:
            inputs.append(tensor(f"{network}/input", 0))
            written: list[int] = []
            for member in members:
                reads = [written[i] for i in member.reads] or [inputs[-1]]
                if member.memory_bytes:
                    reads.append(tensor(f"{network}/{member.name}/kept", member.memory_bytes, constant=True))
                written.append(tensor(f"{network}/{member.name}", member.output_bytes))
                operators.append(Operator("OPERATOR", tuple(reads), (written[-1],), {"name": member.name}))
            read = {i for member in members for i in member.reads}
            outputs += [t for i, t in enumerate(written) if i not in read]
        return Graph(self.name, tuple(tensors), tuple(operators), tuple(inputs), tuple(outputs))

    def operator_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds of each operator on each processor, shape ``(P, n)``."""
        return np.array([[operator.seconds[p.like] for operator in self.operators] for p in platform.processors])

    def overhead_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds that a part adds on each processor, shape ``(P,)``."""
        overhead = {d.kind: d.overhead_s for d in self.devices}
        return np.array([overhead[p.like] for p in platform.processors])

    def transfer_s(self, platform: Platform) -> NDArray[np.float64]:
        """Return seconds that moving an operator's output takes, shape ``(n, P, P)``; 0 on one processor."""
        processors = platform.processors
        return np.array(
            [
                [
                    [0.0 if a is b else operator.transfer_s.get((a.like, b.like), 0.0) for b in processors]
                    for a in processors
                ]
                for operator in self.operators
            ]
        )

    def memory_bytes(self, platform: Platform) -> NDArray[np.float64]:
        """Return the memory of each processor in bytes, shape ``(P,)``."""
        memory = {d.kind: d.memory_bytes for d in self.devices}
        return np.array([memory[p.like] for p in platform.processors])


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        UsageError: the file is missing or not a table; the text begins with ``file:line``.
    """
    root = parsed(path, "a table of times")
    known = ("name", "unit", "objective", "max_stages", "one_part_per_device", "devices", "transfers", "networks")
    fields = _fields(root, "a table", known, ("devices", "networks"))
    scale = _choice(fields["unit"], "the unit", tuple(_UNITS)) if "unit" in fields else "s"
    devices = tuple(_device(e, _UNITS[scale]) for e in fields["devices"].each("devices"))
    reader = _Reader(_UNITS[scale], devices)
    reader.check_devices(fields["devices"])
    usual = reader.transfers(fields["transfers"]) if "transfers" in fields else {}
    networks = tuple(reader.network(entry, usual) for entry in fields["networks"].each("networks"))
    names = [name for name, _ in networks]
    if len(set(names)) < len(names):
        raise fields["networks"].error("two networks have one name")
    objective: Objective = "latency"
    if "objective" in fields and _choice(fields["objective"], "the objective", ("latency", "period")) == "period":
        objective = "period"
    most = _whole(fields["max_stages"], "max_stages") if "max_stages" in fields else None
    name = fields["name"].text("the table's name") if "name" in fields else path.stem
    once = "one_part_per_device" in fields
    if once:
        once = _choice(fields["one_part_per_device"], "one_part_per_device", ("true", "false")) == "true"
    return Table(name, objective, most, once, devices, networks)


def _fields(
    entry: Value, what: str, known: Sequence[str], needed: Sequence[str], verb: str = "have"
) -> dict[str, Value]:
    return entry.fields(what, known, **{key: f"{what} must {verb} {key!r}" for key in needed})


def _device(entry: Value, scale: float) -> Device:
    missing = "a group of devices must have a kind"
    fields = entry.fields("a group of devices", ("kind", "count", "memory_bytes", "overhead"), kind=missing)
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
        """Check that groups have different kinds, and devices different names."""
        kinds = [d.kind for d in self.devices]
        if len(set(kinds)) < len(kinds):
            raise entry.error("two groups of devices have one kind", "give one of them a count")
        names = [f"{d.kind}{i}" if d.count > 1 else d.kind for d in self.devices for i in range(d.count)]
        if len(set(names)) < len(names):
            raise entry.error("two devices would have one name", "rename a kind")

    def transfers(self, entry: Value) -> dict[Pair, tuple[float, float]]:
        """Return seconds and seconds per byte for each pair of kinds."""
        found: dict[Pair, tuple[float, float]] = {}
        for one in entry.each("transfers"):
            known = ("from", "to", "takes", "bandwidth_bytes_per_s")
            fields = _fields(one, "a transfer", known, ("from", "to"), "say")
            pair = self._kind(fields["from"]), self._kind(fields["to"])
            if pair in found:
                raise one.error(f"the transfer from {pair[0]} to {pair[1]} is given twice")
            takes = fields["takes"].number("takes") * self.scale if "takes" in fields else 0.0
            rate = fields.get("bandwidth_bytes_per_s")
            found[pair] = takes, 1.0 / rate.number("the bandwidth", above=1e-9) if rate else 0.0
        return found

    def network(self, entry: Value, usual: dict[Pair, tuple[float, float]]) -> tuple[str, tuple[TimedOperator, ...]]:
        fields = _fields(entry, "a network", ("name", "operators"), ("name", "operators"))
        name, rows = fields["name"].text("the network's name"), fields["operators"]
        if rows.node.id == "scalar":
            return name, self._rows(rows, usual)
        found: list[TimedOperator] = []
        for row in rows.each("operators"):
            found.append(self._operator(row, usual, found))
        return name, tuple(found)

    def _operator(
        self, entry: Value, usual: dict[Pair, tuple[float, float]], before: Sequence[TimedOperator]
    ) -> TimedOperator:
        known = ("name", "times", "reads", "memory_bytes", "output_bytes", "transfers")
        fields = _fields(entry, "an operator", known, ("name", "times"))
        name = fields["name"].text("the operator's name")
        times = fields["times"].fields("times", [d.kind for d in self.devices])
        for device in self.devices:
            if device.kind not in times:
                hint = f"give its time, or `{_NEVER}` where {device.kind} cannot run it"
                raise fields["times"].error(f"operator {name!r} has no time on {device.kind!r}", hint)
        seconds = {kind: self._time(value, f"the time of {name!r} on {kind!r}") for kind, value in times.items()}
        own = self.transfers(fields["transfers"]) if "transfers" in fields else {}
        nbytes = fields["output_bytes"].number("output_bytes") if "output_bytes" in fields else 0.0
        kept = fields["memory_bytes"].number("memory_bytes") if "memory_bytes" in fields else 0.0
        reads: tuple[int, ...] = (len(before) - 1,) if before else ()
        if "reads" in fields:
            listed = fields["reads"]
            empty = listed.node.id == "sequence" and not listed.node.value
            words = [] if empty else [(e, e.text("what an operator reads")) for e in listed.each("reads")]
            reads = tuple(_position(word, name, before, where) for where, word in words)
        if all(math.isinf(s) for s in seconds.values()):
            raise fields["times"].error(f"operator {name!r} runs on no processor")
        prices = {pair: takes + nbytes * rate for pair, (takes, rate) in {**usual, **own}.items()}
        return TimedOperator(name, seconds, kept, nbytes, prices, tuple(sorted(set(reads))))

    def _rows(self, entry: Value, usual: dict[Pair, tuple[float, float]]) -> tuple[TimedOperator, ...]:
        """Return the operators of a CSV file."""
        path = entry.path.parent / entry.text("the file of operators")
        try:
            lines = read_bounded(path, _MAX_CSV_NBYTES).decode().splitlines()
        except (OSError, ValueError) as error:
            raise entry.error(f"{path}: {(getattr(error, 'strerror', None) or str(error)).lower()}") from error
        kinds = [d.kind for d in self.devices]
        rows = csv.DictReader(lines, strict=True)
        found: list[TimedOperator] = []
        try:
            header = list(rows.fieldnames or ())
            known = ["name", "reads", "memory_bytes", "output_bytes", *kinds]
            strange = next((name for name in header if name not in known), None)
            if strange is not None or len(set(header)) < len(header):
                raise UsageError(f"{path}:1: unknown column {shown(strange)}", f"it may have: {', '.join(known)}")
            for key in ("name", *kinds):
                if key not in header:
                    raise UsageError(f"{path}:1: there is no column {key!r}", "an operator needs a name and its times")
            for row in rows:
                line = _as_yaml(path, rows.line_num, row, kinds)
                if None in row or None in row.values():
                    raise line.error("the line has more or fewer cells than the first one")
                found.append(self._operator(line, usual, found))
        except csv.Error as error:
            raise UsageError(f"{path}:{rows.line_num}: {error}") from error
        if not found:
            raise UsageError(f"{path}: has no operators")
        return tuple(found)

    def _time(self, value: Value, what: str) -> float:
        return math.inf if value.node.value == _NEVER else value.number(what) * self.scale

    def _kind(self, value: Value) -> str:
        return _choice(value, "the kind", tuple(d.kind for d in self.devices))


def _as_yaml(path: Path, line: int, cells: Mapping[str | Any, str | Any], kinds: Sequence[str]) -> Value:
    """Return a line of a CSV file as the entry of a YAML file that says the same; empty cells are left out."""
    import yaml

    mark = yaml.Mark(str(path), 0, line - 1, 0, None, 0)

    def scalar(text: str) -> Any:
        return yaml.ScalarNode("", text, mark, mark)

    def mapping(fields: Mapping[str, Any]) -> Any:
        return yaml.MappingNode("", [(scalar(key), value) for key, value in fields.items()], mark, mark)

    text = {str(column): str(cell).strip() for column, cell in cells.items()}
    fields = {key: scalar(text[key]) for key in ("name", "memory_bytes", "output_bytes") if text.get(key)}
    fields["times"] = mapping({kind: scalar(text[kind]) for kind in kinds})
    if words := text.get("reads", "").split():
        fields["reads"] = yaml.SequenceNode("", [scalar(word) for word in words if words != ["-"]], mark, mark)
    return Value(mapping(fields), path)


def _position(word: str, reader: str, before: Sequence[TimedOperator], where: Value) -> int:
    """Return the position of the operator that another one reads."""
    found = [i for i, operator in enumerate(before) if operator.name == word]
    if len(found) == 1:
        return found[0]
    if not found:
        hint = "list operators after those that they read"
        raise where.error(f"{reader!r} reads {word!r}, which is not the name of an earlier operator", hint)
    raise where.error(f"{reader!r} reads {word!r}, the name of {len(found)} operators", "give each its own name")


def _choice(value: Value, what: str, known: tuple[str, ...]) -> str:
    text = value.text(what)
    if text not in known:
        hint = did_you_mean(text, known, f"one of: {', '.join(known)}", quoted=True)
        raise value.error(f"{what} cannot be {text!r}", hint)
    return text


def _whole(value: Value, what: str) -> int:
    number = value.number(what, above=1.0)
    if number != int(number):
        raise value.error(f"{what} must be a whole number")
    return int(number)


def check_objective(name: str | None, table: Table) -> Objective:
    """Return the objective to use: the one that the user gave, else the table's.

    Raises:
        UsageError: there is no such objective.
    """
    if name is None:
        return table.objective
    known: tuple[Objective, ...] = get_args(Objective)
    if name not in known:
        raise UsageError(f"--objective {name}: a table has the objectives latency and period")
    return known[known.index(name)]
