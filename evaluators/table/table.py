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
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError, reason_of, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.wording import did_you_mean
from search_spaces.core.yaml_file import Document, Loc, Part, Word, checked, read_document

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
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


Amount = Annotated[float, Field(ge=0)]
Time = Annotated[Amount | None, BeforeValidator(lambda value: None if value == _NEVER else value)]


class _Device(Part):
    kind: Word
    count: Annotated[int, Field(ge=1, le=64)] = 1
    memory_bytes: Amount | None = None
    overhead: Amount = 0.0


class _Transfer(Part):
    source: Word = Field(alias="from")
    to: Word
    takes: Amount = 0.0
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1e-9)] | None = None


class _Operator(Part):
    name: Word
    times: dict[Word, Time]
    reads: tuple[Word, ...] | None = None
    memory_bytes: Amount = 0.0
    output_bytes: Amount = 0.0
    transfers: tuple[_Transfer, ...] = ()


class _Operators(Part):
    operators: Annotated[tuple[_Operator, ...], Field(min_length=1)]


class _Network(Part):
    name: Word
    operators: Any


class _Table(Part):
    name: Word | None = None
    unit: Literal["s", "ms", "us"] = "s"
    objective: Objective = "latency"
    max_stages: Annotated[int, Field(ge=1)] | None = None
    one_part_per_device: bool = False
    devices: Annotated[tuple[_Device, ...], Field(min_length=1)]
    transfers: tuple[_Transfer, ...] = ()
    networks: Annotated[tuple[_Network, ...], Field(min_length=1)]


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        UsageError: the file is missing or not a table; the text begins with ``file:line``.
    """
    file = read_document(path, _Table, "a table of times")
    found, scale = file.content, _UNITS[file.content.unit]
    devices = tuple(
        Device(d.kind, d.count, math.inf if d.memory_bytes is None else d.memory_bytes, d.overhead * scale)
        for d in found.devices
    )
    _check_devices(file, devices)
    kinds = [device.kind for device in devices]
    usual = _prices(file, found.transfers, (), scale, kinds)
    networks = []
    for number, network in enumerate(found.networks):
        where = "networks", number
        if isinstance(network.operators, str):
            rows = _rows(file, (*where, "operators"), network.operators, kinds)
        else:
            rows = file.part(where, _Operators, "a network", {"operators": network.operators})
        networks.append((network.name, _operators(rows, usual, scale, kinds)))
    if len({name for name, _ in networks}) < len(networks):
        raise file.error(("networks",), "two networks have one name")
    once = found.one_part_per_device
    return Table(found.name or path.stem, found.objective, found.max_stages, once, devices, tuple(networks))


def _check_devices(file: Document[_Table], devices: Sequence[Device]) -> None:
    """Check that groups have different kinds, and devices different names."""
    kinds = [d.kind for d in devices]
    if len(set(kinds)) < len(kinds):
        raise file.error(("devices",), "two groups of devices have one kind", "give one of them a count")
    names = [f"{d.kind}{i}" if d.count > 1 else d.kind for d in devices for i in range(d.count)]
    if len(set(names)) < len(names):
        raise file.error(("devices",), "two devices would have one name", "rename a kind")


def _check_kind(file: Document[Any], where: Loc, kind: str, kinds: Sequence[str]) -> None:
    if kind not in kinds:
        hint = did_you_mean(kind, kinds, f"one of: {', '.join(kinds)}", quoted=True)
        raise file.error(where, f"there is no kind of device {kind!r}", hint)


def _prices(
    file: Document[Any], transfers: Sequence[_Transfer], where: Loc, scale: float, kinds: Sequence[str]
) -> dict[Pair, tuple[float, float]]:
    """Return seconds and seconds per byte for each pair of kinds."""
    found: dict[Pair, tuple[float, float]] = {}
    for number, one in enumerate(transfers):
        at = *where, "transfers", number
        pair = one.source, one.to
        for key, kind in zip(("from", "to"), pair, strict=True):
            _check_kind(file, (*at, key), kind, kinds)
        if pair in found:
            raise file.error(at, f"the transfer from {pair[0]} to {pair[1]} is given twice")
        rate = one.bandwidth_bytes_per_s
        found[pair] = one.takes * scale, 0.0 if rate is None else 1.0 / rate
    return found


def _operators(
    rows: Document[_Operators], usual: Mapping[Pair, tuple[float, float]], scale: float, kinds: Sequence[str]
) -> tuple[TimedOperator, ...]:
    found: list[TimedOperator] = []
    for number, entry in enumerate(rows.content.operators):
        at = "operators", number
        for kind in entry.times:
            _check_kind(rows, (*at, "times", kind), kind, kinds)
        if missing := next((kind for kind in kinds if kind not in entry.times), None):
            hint = f"give its time, or `{_NEVER}` where {missing} cannot run it"
            raise rows.error((*at, "times"), f"operator {entry.name!r} has no time on {missing!r}", hint)
        seconds = {kind: math.inf if time is None else time * scale for kind, time in entry.times.items()}
        if all(math.isinf(s) for s in seconds.values()):
            raise rows.error((*at, "times"), f"operator {entry.name!r} runs on no processor")
        own = _prices(rows, entry.transfers, at, scale, kinds)
        reads: Sequence[int] = range(number - 1, number) if number else ()
        if entry.reads is not None:
            words = enumerate(entry.reads)
            reads = sorted({_position(word, entry.name, found, rows, (*at, "reads", i)) for i, word in words})
        prices = {pair: takes + entry.output_bytes * rate for pair, (takes, rate) in {**usual, **own}.items()}
        found.append(TimedOperator(entry.name, seconds, entry.memory_bytes, entry.output_bytes, prices, tuple(reads)))
    return tuple(found)


def _rows(file: Document[_Table], where: Loc, name: str, kinds: Sequence[str]) -> Document[_Operators]:
    """Return the operators of a CSV file."""
    path = file.path.parent / name
    if not name.strip():
        raise file.error(where, "it names no file", "give operators, or the path of a .csv file")
    try:
        text = read_bounded(path, _MAX_CSV_NBYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise file.error(where, f"{path}: {reason_of(error)}") from error
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    found: list[dict[str, Any]] = []
    at: dict[Loc, int] = {(): 1}
    try:
        header = list(rows.fieldnames or ())
        known = ["name", "reads", "memory_bytes", "output_bytes", *kinds]
        strange = next((name for name in header if name not in known), None)
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise UsageError(f"{path}:1: column {shown(twice)} is there twice", "leave one of them out")
        if strange is not None:
            raise UsageError(f"{path}:1: unknown column {shown(strange)}", f"it may have: {', '.join(known)}")
        for key in ("name", *kinds):
            if key not in header:
                raise UsageError(f"{path}:1: there is no column {key!r}", "an operator needs a name and its times")
        for row in rows:
            if None in row or None in row.values():
                raise UsageError(f"{path}:{rows.line_num}: the line has more or fewer cells than the first one")
            here = "operators", len(found)
            at |= dict.fromkeys(
                (here, *((*here, key) for key in row), *((*here, "times", key) for key in kinds)), rows.line_num
            )
            cells = {column: cell.strip() for column, cell in row.items() if cell.strip()}
            entry: dict[str, Any] = {key: cell for key, cell in cells.items() if key not in kinds}
            entry["times"] = {kind: cells.get(kind, "") for kind in kinds}
            if "reads" in entry:
                entry["reads"] = [word for word in entry["reads"].split() if entry["reads"] != "-"]
            found.append(entry)
    except csv.Error as error:
        raise UsageError(f"{path}:{rows.line_num}: {error}") from error
    if not found:
        raise UsageError(f"{path}: has no operators")
    content = checked(path, _Operators, "the operators", {"operators": found}, at)
    return Document(path, content, at)


def _position(word: str, reader: str, before: Sequence[TimedOperator], rows: Document[Any], where: Loc) -> int:
    """Return the position of the operator that another one reads."""
    found = [i for i, operator in enumerate(before) if operator.name == word]
    if len(found) == 1:
        return found[0]
    if not found:
        hint = "list operators after those that they read"
        raise rows.error(where, f"{reader!r} reads {word!r}, which is not the name of an earlier operator", hint)
    raise rows.error(where, f"{reader!r} reads {word!r}, the name of {len(found)} operators", "give each its own name")


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
