"""Compiled stages, shared between plans and thrown out when memory runs short."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from evaluators.litert.lanes import Lanes, Request
from evaluators.litert.memory import available_nbytes
from evaluators.litert.settings import compile_settings
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.joined import JoinedModel, join
from search_spaces.models.stages import StageModel, cut_stage
from search_spaces.platform import Platform

_COMPILE_LIMIT_S = 300.0
_RELEASE_LIMIT_S = 60.0
_SHARE_OF_MEMORY = 8
_LEAST_NBYTES, _MOST_NBYTES = 256 << 20, 2 << 30

Group = tuple[tuple[int, ...], ...]
"""The stages of a plan that run on one lane, as their operators; they are compiled together."""


@dataclass(slots=True)
class Entry:
    """Stages compiled together on a lane.

    Attributes:
        number: what the lane calls them; stage ``i`` of the group is signature ``i``.
        models: the stages, in the order of the group.
        nbytes: memory counted for them: weights, mapped or packed, and the tensors inside.
        key: what they are shared under; None where one candidate has them for itself.
        users: candidates that hold them; they are not thrown out while there are any.
    """

    lane: str
    number: int
    models: tuple[StageModel, ...]
    nbytes: int
    key: tuple[str, str, Group] | None
    users: int = field(default=1)


class StageCache:
    """Compiled stages by graph, operators and processor; the least recently used go first.

    Args:
        limit_nbytes: memory for stages; those that a candidate holds stay beyond it. By default an eighth of what the
            machine has free, at least 256 MiB and at most 2 GiB.
    """

    def __init__(self, lanes: Lanes, platform: Platform, limit_nbytes: int | None = None) -> None:
        self._lanes = lanes
        self._platform = platform
        self._limit = limit_nbytes if limit_nbytes is not None else _default_limit()
        self._generation = lanes.generation
        self._entries: OrderedDict[tuple[str, str, Group], Entry] = OrderedDict()
        self._cut: dict[tuple[str, tuple[int, ...]], StageModel] = {}
        self._numbers = count(1)

    def take(self, graph: Graph, lane: str, group: Group, packed: Path | None, *, fresh: bool) -> Entry:
        """Return the stages of a plan on one lane, compiled; with ``fresh`` newly, and for nobody else.

        Raises:
            UnavailableError: the runtime refuses a stage.
        """
        if self._generation != self._lanes.generation:
            self._generation = self._lanes.generation
            self._entries.clear()
        key = (graph.digest, lane, group)
        if not fresh and key in self._entries:
            entry = self._entries[key]
            self._entries.move_to_end(key)
            entry.users += 1
            return entry
        models = tuple(self._stage(graph, operators) for operators in group)
        number = next(self._numbers)
        compile_stages(self._lanes, self._platform, lane, number, join(models), packed)
        nbytes = sum(m.weight_nbytes + _inner_nbytes(graph, o) for m, o in zip(models, group, strict=True))
        entry = Entry(lane, number, models, nbytes, None if fresh else key)
        if entry.key is not None:
            self._entries[entry.key] = entry
            self._shrink()
        return entry

    def give_back(self, entry: Entry) -> None:
        """Tell that a candidate no longer needs its stages."""
        entry.users -= 1
        if self._generation != self._lanes.generation:
            return
        if entry.key is None:
            self._release(entry)
        else:
            self._shrink()

    def compile_once(self, lane: str, model: StageModel, packed: Path) -> None:
        """Compile a model and throw it away, for what the runtime leaves in ``packed``.

        Raises:
            UnavailableError: the runtime refuses it.
        """
        number = next(self._numbers)
        joined = JoinedModel(model.schema, (model.source,), dict.fromkeys(model.buffers, 0))
        compile_stages(self._lanes, self._platform, lane, number, joined, packed)
        self._lanes.ask(lane, Request({"op": "release", "id": number}), _RELEASE_LIMIT_S)

    def _stage(self, graph: Graph, operators: tuple[int, ...]) -> StageModel:
        key = (graph.digest, operators)
        if key not in self._cut:
            self._cut[key] = cut_stage(graph, operators)
        return self._cut[key]

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


def compile_stages(
    lanes: Lanes, platform: Platform, lane: str, number: int, joined: JoinedModel, packed: Path | None
) -> None:
    """Compile stages on a lane, which will know them by ``number``.

    Raises:
        UnavailableError: the runtime refuses them, or a file that holds their weights is gone.
    """
    settings = compile_settings(platform[lane], packed)
    signatures = len(joined.schema.signatureDefs or ())
    head = {"op": "compile", "id": number, "signatures": signatures, "settings": settings}
    with ExitStack() as stack:
        files = _opened(stack, [source.path for source in joined.sources])
        lanes.ask(lane, Request(head, joined.view(), files), _COMPILE_LIMIT_S)


def _opened(stack: ExitStack, paths: Sequence[Path]) -> list[int]:
    try:
        return [stack.enter_context(path.open("rb")).fileno() for path in paths]
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error


def _inner_nbytes(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that a stage computes for itself, as if none shared space."""
    border = set(graph.boundary(operators).outputs)
    return sum(graph.tensors[t].nbytes for o in operators for t in graph.operators[o].outputs if t not in border)


def _default_limit() -> int:
    free = available_nbytes() or 0
    return min(max(free // _SHARE_OF_MEMORY, _LEAST_NBYTES), _MOST_NBYTES)
