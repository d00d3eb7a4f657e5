"""Compiled stages, shared between plans and thrown out when memory runs short."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from evaluators.litert.compiling import compile_stages, engine_of, pack_weights, release_stages
from evaluators.litert.inner import opened
from evaluators.litert.refusals import Refusals, describe, failure, refusal
from evaluators.litert.settings import may_refuse, reads_files
from evaluators.litert.worker.runtimes import LITERT
from evaluators.litert.workers import WorkerError, Workers
from evaluators.machine import available_nbytes
from evaluators.workload.setting import HOST
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.stages import StageModel, cut_stage, packing_model
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor

_SHARE_OF_MEMORY = 8
_LEAST_NBYTES, _MOST_NBYTES = 256 << 20, 2 << 30

_MOST_CUT = 1024
_MOST_REASONS = 8

Group = tuple[tuple[int, ...], ...]
"""Stages that are compiled together on one worker, as their operators."""
Ports = Mapping[int, tuple[Sequence[int], Sequence[int]]]
"""Stage → its input and output tensors, in the order of its model."""


@dataclass(slots=True)
class Entry:
    """Stages compiled together on a worker.

    Attributes:
        number: what the worker calls them; stage ``i`` of the group is signature ``i``.
        models: the stages as they were compiled, in the order of the group.
        nbytes: memory counted for them: weights, mapped or packed, and the tensors inside.
        owner: the one candidate or instance that has them; they go with it. "" where they are shared.
        ends: how often the worker had ended before.
        users: candidates that hold them; they are not thrown out while there are any.
    """

    worker: str
    number: int
    models: tuple[StageModel, ...]
    nbytes: int
    owner: str
    ends: int
    users: int = field(default=1)


@dataclass(slots=True)
class TakenStages:
    """The compiled stages of a plan.

    Attributes:
        compiled: stage → what it was compiled as on its worker: a number, and its signature there.
    """

    compiled: dict[int, tuple[int, int]] = field(default_factory=dict)
    ports: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


class StageCache:
    """Compiled stages by graph, operators and worker; the least recently used go first.

    Args:
        limit_nbytes: memory for stages; those that a candidate holds stay beyond it. By default an eighth of what the
            machine has free, at least 256 MiB and at most 2 GiB.

    Attributes:
        limit_nbytes: see there.
    """

    def __init__(self, workers: Workers, platform: Platform, limit_nbytes: int | None = None) -> None:
        self._workers = workers
        self._platform = platform
        self.limit_nbytes = limit_nbytes if limit_nbytes is not None else _default_limit()
        self._entries: OrderedDict[tuple[str, str, str, Group, str], Entry] = OrderedDict()
        self._cut: OrderedDict[tuple[str, str, tuple[int, ...]], StageModel] = OrderedDict()
        self._numbers = count(1)
        self._refusals = Refusals(workers, self._numbers)
        self._placements: dict[tuple[str, str], str] = {}

    def process(self, processor: str) -> str:
        """Return the name of the worker that a processor is, or is a thread of."""
        return str(self._platform[processor].options.get(HOST, processor))

    def take(
        self,
        graph: Graph,
        content_digest: str,
        processor: str,
        group: Group,
        packed: Path | None,
        *,
        owner: str = "",
        cut: Sequence[StageModel] = (),
    ) -> Entry:
        """Return stages compiled on a processor; :meth:`give_back` must be called.

        Args:
            content_digest: of the model's file; models of one structure may have other weights.
            packed: packed weights that they can use.
            owner: who has them for itself.
            cut: the stages as models, where they are not to be cut from the graph's file.

        Raises:
            UnavailableError: the runtime refuses a stage, or the worker died.
        """
        worker = self.process(processor)
        key = (worker, graph.digest, content_digest, group, owner)
        entry = self._entries.get(key)
        if entry is not None and self._is_there(entry):
            self._entries.move_to_end(key)
            entry.users += 1
            return entry
        found = replace(self._platform[processor], name=worker)
        models = opened(graph, found, group, cut or [self.cut(graph, content_digest, o) for o in group])
        number = next(self._numbers)
        self._compile(graph, found, number, group, models, packed)
        nbytes = sum(m.weight_nbytes + _inner_nbytes(graph, o) for m, o in zip(models, group, strict=True))
        entry = Entry(worker, number, models, nbytes, owner, self._workers.ends[worker])
        self._entries[key] = entry
        self._shrink()
        return entry

    def take_plan(
        self,
        graph: Graph,
        content_digest: str,
        plan: Plan,
        stages: Sequence[StageModel],
        operators: Group,
        packed: Callable[[Group], Path | None],
        *,
        owner: str = "",
    ) -> TakenStages:
        """Return all stages of a plan, compiled; errors as of :meth:`take`.

        Args:
            stages, operators: of each stage of the plan its model, and the operators of ``graph`` in it.
            packed: returns the packed weights that stages can use which are compiled together.
        """
        found = TakenStages()
        try:
            for processor, indices in compiled_together(plan, self._platform, stages):
                group, cut = tuple(operators[i] for i in indices), [stages[i] for i in indices]
                entry = self.take(graph, content_digest, processor, group, packed(group), owner=owner, cut=cut)
                found.entries.append(entry)
                for signature, (index, model) in enumerate(zip(indices, entry.models, strict=True)):
                    found.compiled[index] = (entry.number, signature)
                    found.ports[index] = (model.inputs, model.outputs)
        except BaseException:
            self.give_back(*found.entries)  # those that were taken before one was refused
            raise
        return found

    def unsupported(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a processor does not take; LiteRT takes all on a CPU.

        Raises:
            UnavailableError: the worker died, or does not answer.
        """
        found = self._platform[processor]
        return self._refusals.find(graph, found, range(len(graph.operators))) if may_refuse(found) else []

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
            answer = compile_stages(self._workers, processor, number, models, packed, limit_s=limit_s)
        except WorkerError as error:
            if graph.source is None:  # the stages come from files, and the model is not here
                raise
            where = f"while it compiled operators {operators[0]} to {operators[-1]}"
            if processor.kind == "cpu" and not reads_files(processor):
                raise failure(graph, operators, f"{error.what} {where}") from error
            if error.fatal or not may_refuse(processor) or fallback:
                raise UnavailableError(f"{error.what} {where}") from error
            found = self._refusals.find(graph, processor, operators)
            raise refusal(graph, processor, operators, found) from error
        whole = fallback and graph.source is not None and len(operators) == len(graph.operators)
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

    def give_back(self, *entries: Entry) -> None:
        """Tell that stages are no longer needed by whoever took them."""
        for entry in entries:
            entry.users -= 1
        self._shrink()

    def pack(self, processor: str, graph: Graph, path: Path) -> None:
        """Have the runtime write its packed weights of a whole model to ``path``.

        Raises:
            UnavailableError: the runtime refuses it.
        """
        pack_weights(self._workers, self._platform[processor], next(self._numbers), packing_model(graph), path)

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

    def forget_cut(self, content_digest: str) -> None:
        """Let go of the stages of a model that is not needed again."""
        for key in [key for key in self._cut if key[1] == content_digest]:
            del self._cut[key]

    def _is_there(self, entry: Entry) -> bool:
        return entry.ends == self._workers.ends[entry.worker]

    def _shrink(self) -> None:
        total = sum(entry.nbytes for entry in self._entries.values() if not entry.owner)
        for key, entry in list(self._entries.items()):
            is_there = self._is_there(entry)
            if not is_there or (not entry.users and (entry.owner or total > self.limit_nbytes)):
                total -= 0 if entry.owner else entry.nbytes
                del self._entries[key]
                if is_there:
                    release_stages(self._workers, entry.worker, entry.number)


def compiled_together(plan: Plan, platform: Platform, stages: Sequence[StageModel]) -> list[tuple[str, list[int]]]:
    """Return processors and the stages that are compiled together there.

    On a CPU all stages of a processor share their workspace and threads. An accelerator has neither, and takes seconds
    to compile: there each stage stands alone, so that other plans with the same stage find it compiled. So do those of
    runtimes that read a stage as a file of its own.
    """
    found: list[tuple[str, list[int]]] = []
    for name, indices in plan.by_processor().items():
        processor = platform[name]
        joint = [i for i in indices if processor.kind == "cpu" and engine_of(processor, [stages[i]]) == LITERT]
        found += [(name, joint)] if joint else []
        found += [(name, [index]) for index in indices if index not in joint]
    return found


def _inner_nbytes(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that a stage computes for itself, as if none shared space."""
    border = set(graph.boundary(operators).outputs)
    return sum(graph.tensors[t].nbytes for o in operators for t in graph.operators[o].outputs if t not in border)


def _default_limit() -> int:
    free = available_nbytes() or 0
    return min(max(free // _SHARE_OF_MEMORY, _LEAST_NBYTES), _MOST_NBYTES)
