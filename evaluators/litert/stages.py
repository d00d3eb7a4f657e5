"""Compiled stages, shared between plans and thrown out when memory runs short."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from evaluators.litert.compiling import compile_stages, engine_of, pack_weights, release_stages
from evaluators.litert.inner import opened
from evaluators.litert.lanes import LaneError, Lanes
from evaluators.litert.memory import available_nbytes
from evaluators.litert.refusals import Refusals, describe, failure, refusal
from evaluators.litert.runtimes import LITERT
from evaluators.litert.settings import may_refuse, reads_files
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.stages import StageModel, cut_stage
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor

_SHARE_OF_MEMORY = 8
_LEAST_NBYTES, _MOST_NBYTES = 256 << 20, 2 << 30

_MOST_CUT = 512
_MOST_REASONS = 8

Group = tuple[tuple[int, ...], ...]
"""The stages of a plan that run on one lane, as their operators; they are compiled together."""

_Key = tuple[str, str, str, Group]


@dataclass(slots=True)
class Entry:
    """Stages compiled together on a lane.

    Attributes:
        number: what the lane calls them; stage ``i`` of the group is signature ``i``.
        models: the stages as they were compiled, in the order of the group.
        nbytes: memory counted for them: weights, mapped or packed, and the tensors inside.
        key: what they are shared under; None where one candidate has them for itself.
        users: candidates that hold them; they are not thrown out while there are any.
    """

    lane: str
    number: int
    models: tuple[StageModel, ...]
    nbytes: int
    key: _Key | None
    users: int = field(default=1)


class StageCache:
    """Compiled stages by graph, operators and processor; the least recently used go first.

    Args:
        limit_nbytes: memory for stages; those that a candidate holds stay beyond it. By default an eighth of what the
            machine has free, at least 256 MiB and at most 2 GiB.

    Attributes:
        limit_nbytes: see there.
    """

    def __init__(self, lanes: Lanes, platform: Platform, limit_nbytes: int | None = None) -> None:
        self._lanes = lanes
        self._platform = platform
        self.limit_nbytes = limit_nbytes if limit_nbytes is not None else _default_limit()
        self._generation = lanes.generation
        self._entries: OrderedDict[_Key, Entry] = OrderedDict()
        self._cut: OrderedDict[tuple[str, str, tuple[int, ...]], StageModel] = OrderedDict()
        self._numbers = count(1)
        self._refusals = Refusals(lanes, self._numbers)
        self._placements: dict[tuple[str, str], str] = {}

    def take(
        self, graph: Graph, content_digest: str, lane: str, group: Group, packed: Path | None, *, fresh: bool
    ) -> Entry:
        """Return the stages of a plan on one lane, compiled; with ``fresh`` newly, and for nobody else.

        Args:
            content_digest: of the model's file; models of one structure may have other weights.

        Raises:
            UnavailableError: the runtime refuses a stage.
        """
        if self._generation != self._lanes.generation:
            self._generation = self._lanes.generation
            self._entries.clear()
        key = (graph.digest, content_digest, lane, group)
        if not fresh and key in self._entries:
            entry = self._entries[key]
            self._entries.move_to_end(key)
            entry.users += 1
            return entry
        cut = [self.cut(graph, content_digest, operators) for operators in group]
        models = opened(graph, self._platform[lane], group, cut)
        number = next(self._numbers)
        self._compile(graph, self._platform[lane], number, group, models, packed)
        nbytes = sum(m.weight_nbytes + _inner_nbytes(graph, o) for m, o in zip(models, group, strict=True))
        entry = Entry(lane, number, models, nbytes, None if fresh else key)
        if entry.key is not None:
            self._entries[entry.key] = entry
            self._shrink()
        return entry

    def refused(self, graph: Graph, lane: str, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that a lane does not take; LiteRT takes all on a CPU.

        Raises:
            UnavailableError: the lane died, or does not answer.
        """
        processor = self._platform[lane]
        return self._refusals.find(graph, processor, operators) if may_refuse(processor) else []

    def _compile(
        self,
        graph: Graph,
        processor: Processor,
        number: int,
        group: Group,
        models: Sequence[StageModel],
        packed: Path | None,
    ) -> None:
        operators = sorted(o for stage in group for o in stage)
        fallback = bool(processor.options.get("fallback"))
        if not fallback and (refused := self._refusals.known(graph, processor, operators)):
            raise refusal(graph, processor, operators, refused)
        try:
            limit_s = self._platform.limits.load_s
            answer = compile_stages(self._lanes, processor, number, models, packed, limit_s=limit_s)
        except LaneError as error:
            where = f"while it compiled operators {operators[0]} to {operators[-1]}"
            if processor.kind == "cpu" and not reads_files(processor):
                raise failure(graph, operators, f"{error.what} {where}") from error
            if error.fatal or not may_refuse(processor) or fallback:
                raise UnavailableError(f"{error.what} {where}") from error
            found = self._refusals.find(graph, processor, operators)
            raise refusal(graph, processor, operators, found) from error
        whole = fallback and len(operators) == len(graph.operators)
        if whole and (graph.digest, processor.name) not in self._placements:
            self._placements[graph.digest, processor.name] = self._placement(graph, processor, answer)

    def placements(self, graph: Graph) -> dict[str, str]:
        """Return processors on which LiteRT has placed a whole network itself, and what it did with it."""
        return {name: text for (digest, name), text in self._placements.items() if digest == graph.digest}

    def _placement(self, graph: Graph, processor: Processor, answer: Mapping[str, Any]) -> str:
        """Return what LiteRT did with a network: partitions on the accelerator, operators left to the CPU, and why."""
        kind, count = processor.kind.upper(), len(graph.operators)
        if answer["accelerated"]:
            return f"all {count} operators of {graph.name} run on the {kind}"
        left = self._refusals.find(graph, processor, range(count))
        reasons = dict.fromkeys(line for text in answer["unsupported"] for line in text.splitlines()[:_MOST_REASONS])
        parts = f"{answer['kernels']} partition{'' if answer['kernels'] == 1 else 's'}"
        return (
            f"LiteRT runs {parts} of {graph.name} on the {kind}; on the CPU stay "
            f"{describe(graph, left) or 'operators that it supports alone'}, and what is in no partition"
            + (f" ({'; '.join(reasons)})" if reasons else "")
        )

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
        pack_weights(self._lanes, self._platform[lane], next(self._numbers), model, packed)

    def cut(self, graph: Graph, content_digest: str, operators: tuple[int, ...]) -> StageModel:
        """Return a stage as a model."""
        key = (graph.digest, content_digest, operators)
        if key in self._cut:
            self._cut.move_to_end(key)
        else:
            self._cut[key] = cut_stage(graph, operators)
            if len(self._cut) > _MOST_CUT:
                self._cut.popitem(last=False)
        return self._cut[key]

    def _shrink(self) -> None:
        total = sum(entry.nbytes for entry in self._entries.values())
        for key, entry in list(self._entries.items()):
            if total <= self.limit_nbytes:
                return
            if entry.users == 0:
                total -= entry.nbytes
                del self._entries[key]
                self._release(entry)

    def _release(self, entry: Entry) -> None:
        release_stages(self._lanes, entry.lane, entry.number)


def compiled_together(plan: Plan, platform: Platform, stages: Sequence[StageModel]) -> list[tuple[str, list[int]]]:
    """Return lanes and the stages that are compiled together there.

    On a CPU all stages of a lane share their workspace and threads. An accelerator has neither, and takes seconds to
    compile: there each stage stands alone, so that other plans with the same stage find it compiled. So do those of
    runtimes that read a stage as a file of its own.
    """
    found: list[tuple[str, list[int]]] = []
    for lane, indices in plan.by_processor().items():
        processor = platform[lane]
        joint = [i for i in indices if processor.kind == "cpu" and engine_of(processor, [stages[i]]) == LITERT]
        found += [(lane, joint)] if joint else []
        found += [(lane, [index]) for index in indices if index not in joint]
    return found


def _inner_nbytes(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that a stage computes for itself, as if none shared space."""
    border = set(graph.boundary(operators).outputs)
    return sum(graph.tensors[t].nbytes for o in operators for t in graph.operators[o].outputs if t not in border)


def _default_limit() -> int:
    free = available_nbytes() or 0
    return min(max(free // _SHARE_OF_MEMORY, _LEAST_NBYTES), _MOST_NBYTES)
