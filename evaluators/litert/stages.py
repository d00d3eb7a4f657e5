"""Compiled stages, shared between plans and thrown out when memory runs short."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from evaluators.litert.lanes import Lanes, Request
from evaluators.litert.settings import compile_settings
from search_spaces.graph import Graph
from search_spaces.models.stages import StageModel, cut_stage
from search_spaces.plan import Stage
from search_spaces.platform import Platform

_COMPILE_LIMIT_S = 300.0
_RELEASE_LIMIT_S = 60.0
_SHARE_OF_MEMORY = 8
_LEAST_NBYTES, _MOST_NBYTES = 256 << 20, 2 << 30

_Key = tuple[str, tuple[int, ...], str]


@dataclass(slots=True)
class Entry:
    """A compiled stage on a lane.

    Attributes:
        number: what the lane calls it.
        nbytes: memory counted for it: its weights, mapped or packed, and the tensors inside it.
        users: candidates that hold it; it is not thrown out while there are any.
    """

    lane: str
    number: int
    model: StageModel
    nbytes: int
    key: _Key | None
    users: int = field(default=1)


class StageCache:
    """Compiled stages by graph, operators and processor; the least recently used go first.

    Args:
        limit_nbytes: memory for stages that no candidate holds; by default an eighth of what the machine has free,
            at least 256 MiB and at most 2 GiB.
    """

    def __init__(self, lanes: Lanes, platform: Platform, limit_nbytes: int | None = None) -> None:
        self._lanes = lanes
        self._platform = platform
        self._limit = limit_nbytes if limit_nbytes is not None else _default_limit()
        self._generation = lanes.generation
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()
        self._cut: dict[tuple[str, tuple[int, ...]], StageModel] = {}
        self._numbers = 0

    def take(self, graph: Graph, stage: Stage, packed: Path | None, *, fresh: bool) -> Entry:
        """Return a compiled stage; with ``fresh`` a new one that nobody else gets.

        Raises:
            UnavailableError: the runtime refuses the stage.
        """
        if self._generation != self._lanes.generation:
            self._generation = self._lanes.generation
            self._entries.clear()
        key = (graph.digest, stage.operators, stage.processor)
        if not fresh and key in self._entries:
            entry = self._entries[key]
            self._entries.move_to_end(key)
            entry.users += 1
            return entry
        model = self._cut.get(key[:2]) or cut_stage(graph, stage.operators)
        self._cut[key[:2]] = model
        entry = Entry(
            stage.processor,
            self.compile(stage.processor, model, packed),
            model,
            model.weight_nbytes + _inner_nbytes(graph, stage.operators),
            None if fresh else key,
        )
        if not fresh:
            self._entries[key] = entry
            self._shrink()
        return entry

    def give_back(self, entry: Entry) -> None:
        """Tell that a candidate no longer needs a stage."""
        entry.users -= 1
        if self._generation != self._lanes.generation:
            return
        if entry.key is None:
            self._release(entry)
        else:
            self._shrink()

    def compile(self, lane: str, model: StageModel, packed: Path | None) -> int:
        """Compile a stage on a lane and return its number there.

        Raises:
            UnavailableError: the runtime refuses it.
        """
        self._numbers += 1
        settings = compile_settings(self._platform[lane], packed)
        head = {"op": "compile", "id": self._numbers, "settings": settings}
        with model.source.path.open("rb") as source:
            request = Request(head, model.view(), [source.fileno()])
            self._lanes.ask(lane, request, _COMPILE_LIMIT_S)
        return self._numbers

    def _shrink(self) -> None:
        total = sum(entry.nbytes for entry in self._entries.values())
        for key, entry in list(self._entries.items()):
            if total <= self._limit:
                return
            if entry.users == 0:
                total -= entry.nbytes
                del self._entries[key]
                self._release(entry)

    def _release(self, entry: Entry) -> None:
        self._lanes.ask(entry.lane, Request({"op": "release", "id": entry.number}), _RELEASE_LIMIT_S)


def _inner_nbytes(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that a stage computes for itself, as if none shared space."""
    border = set(graph.boundary(operators).outputs)
    return sum(graph.tensors[t].nbytes for o in operators for t in graph.operators[o].outputs if t not in border)


def _default_limit() -> int:
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    return min(max(free // _SHARE_OF_MEMORY, _LEAST_NBYTES), _MOST_NBYTES)
