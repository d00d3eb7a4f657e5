"""Stages on their workers: compiled, refused, shared between plans, and evicted when memory runs short.

Schemas are sent through a worker's channel, weights as open files. A runtime keeps a stage's inner tensors in a
workspace of its own. With the tensors between stages in the arena, a cut model then touches more memory than the whole
one, and falls out of the nearest cache. So stages that share a worker expose their inner tensors as further outputs,
and the arena reuses space among them all. Stage files keep their true outputs.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from ai_edge_litert import schema_py_generated as schema

from evaluators.litert.settings import cache_settings, compile_settings, may_refuse, packs_weights, reads_files
from evaluators.litert.worker.runtimes import INTERPRETER, LITERT, OPENVINO, kernel_symbol, runtime_of
from evaluators.litert.workers import Request, WorkerError, Workers
from evaluators.machine import available_nbytes
from evaluators.workload.setting import HOST
from search_spaces.core.errors import UnavailableError, reason_of
from search_spaces.core.graph import Graph, Tensor
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.recent import recent
from search_spaces.core.wording import operator_range
from search_spaces.models.litert import graph_of
from search_spaces.models.shapes import needs_interpreter, why_it_fails
from search_spaces.models.stages import (
    JoinedModel,
    StageModel,
    cut_stage,
    flattened,
    handing_out,
    join,
    packing_model,
    weights_as_inputs,
)

COMPILE_LIMIT_S, _RELEASE_LIMIT_S = 300.0, 60.0
_CUSTOM = schema.BuiltinOperator.CUSTOM

_SHARE_OF_MEMORY = 8
_LEAST_CACHE_NBYTES, _MOST_CACHE_NBYTES = 256 << 20, 2 << 30
_MOST_CUT = 1024
_MOST_REASONS = 8

_FILES_LIMIT_S = 60.0
_MOST_SHOWN = 8
# The end of the runtime's message about an operator, and the position in its own sources before that.
_NODE = re.compile(r"Node number (\d+) \((.*?)\) failed to (\w+)")
_FITTING = "give inputs that fit: --input FILE.npz"
_SOURCE = re.compile(r"\S+\.(?:cc|h):\d+ ")
_NONE_AT_ALL = 4  # when all of so many operators are refused, the driver is the likely cause

# Types whose elements have a fixed size, in whole bytes.
_PLAIN = frozenset({"float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool"})
# Each further output costs the runtime about 1 µs a call, and it does not matter where small (cached) tensors lie.
_LEAST_NBYTES = 64 << 10
_LARGE_NBYTES = 48 << 20  # of weights; OpenVINO takes a quarter of a second to read them from a .tflite
# Operators that XNNPACK computes one by one. It fuses a PAD with the convolution that reads it (ResNet-50's first stage
# was 13 % slower with the tensor between them exposed) and a RELU with the operator before it, and it works in place
# where it only goes through elements or changes a shape.
_WRITERS = frozenset(
    {
        *("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED"),
        *("MAX_POOL_2D", "AVERAGE_POOL_2D", "CONCATENATION", "ADD", "RESIZE_BILINEAR"),
    }
)
_READERS = _WRITERS | {"PAD", "PADV2", "MEAN", "MUL", "SOFTMAX"}

Group = tuple[tuple[int, ...], ...]
"""Stages that are compiled together on one worker, each as its operators."""

Key = tuple[str, str, str, Group, str]
"""Worker, digests of the graph and of its weights, stages, and their owner."""


@dataclass(frozen=True, slots=True)
class StageSource:
    """A model whose stages are compiled.

    Attributes:
        digest: of the model's file; models of one structure may have different weights.
        packed: returns the packed weights that stages which are compiled together can use.
        owner: the candidate or instance that uses them alone; "" where they are shared.
    """

    graph: Graph
    digest: str
    packed: Callable[[Group], Path | None]
    owner: str = ""


_Wanted = tuple[Key, Processor, tuple[StageModel, ...], Path | None]
"""Stages to compile: their key, processor, models, and packed weights that they can use."""


@dataclass(slots=True)
class Entry:
    """Stages compiled together on a worker.

    Attributes:
        number: identifies them to the worker; stage ``i`` of the group is signature ``i``.
        models: the stages as they were compiled, in the order of the group.
        nbytes: memory that counts for them: weights, mapped or packed, and inner tensors.
        owner: the candidate or instance that uses them alone, and with which they end; "" where they are shared.
        ends: how often the worker had ended when they were compiled.
        users: candidates that hold them; they are not evicted while there are any.
    """

    worker: str
    number: int
    models: tuple[StageModel, ...]
    nbytes: int
    owner: str
    ends: int
    users: int = 0


@dataclass(slots=True)
class TakenStages:
    """The compiled stages of a plan.

    Attributes:
        compiled: stage → number and signature of the compiled model on its worker.
        ports: stage → its input and output tensors in the order of its model.
    """

    compiled: dict[int, tuple[int, int]] = field(default_factory=dict)
    ports: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


class StageCache:
    """Compiled stages by graph, operators and worker; the least recently used are evicted first.

    Args:
        limit_nbytes: memory for stages; those that a candidate holds stay beyond it. By default an eighth of the free
            memory, at least 256 MiB and at most 2 GiB.

    Attributes:
        workers, platform: they compile and run the stages.
    """

    def __init__(self, workers: Workers, platform: Platform, limit_nbytes: int | None = None) -> None:
        self.workers = workers
        self.platform = platform
        usual = min(max((available_nbytes() or 0) // _SHARE_OF_MEMORY, _LEAST_CACHE_NBYTES), _MOST_CACHE_NBYTES)
        self.limit_nbytes = usual if limit_nbytes is None else limit_nbytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._cut: OrderedDict[tuple[str, str, tuple[int, ...]], StageModel] = OrderedDict()
        self._numbers = count(1)
        self._refusals = Refusals(workers, self._numbers)
        self._placements: dict[tuple[str, str], str] = {}

    def process(self, processor: str) -> str:
        """Return the name of the worker of a processor; several processors may be threads of one worker."""
        return str(self.platform[processor].options.get(HOST, processor))

    def take(self, source: StageSource, processor: str, group: Group, cut: Sequence[StageModel]) -> Entry:
        """Return stages compiled on a processor; release them by :meth:`give_back`.

        Args:
            cut: the stages as models.

        Raises:
            UnavailableError: the runtime refuses a stage, or the worker died.
        """
        wanted = self._wanted(source, processor, group, cut)
        if wanted is None:
            key = self._key(source, processor, group)
            self._entries.move_to_end(key)
            self._entries[key].users += 1
            return self._entries[key]
        (entry,) = self._compile(source.graph, [wanted])
        self._shrink()
        return entry

    def _key(self, source: StageSource, processor: str, group: Group) -> Key:
        return self.process(processor), source.graph.digest, source.digest, group, source.owner

    def _wanted(self, source: StageSource, processor: str, group: Group, cut: Sequence[StageModel]) -> _Wanted | None:
        """Return what to compile; None where it is compiled, and the worker has not ended since."""
        key = self._key(source, processor, group)
        if key in self._entries and self._is_there(self._entries[key]):
            return None
        found = replace(self.platform[processor], name=self.process(processor))
        return key, found, opened(source.graph, found, group, cut), source.packed(group)

    def _keep(self, key: Key, number: int, graph: Graph, models: tuple[StageModel, ...]) -> Entry:
        """Add an entry for stages that have been compiled, and return it."""
        worker, _, _, group, owner = key
        nbytes = sum(m.weight_nbytes + _inner_nbytes(graph, o) for m, o in zip(models, group, strict=True))
        self._entries[key] = Entry(worker, number, models, nbytes, owner, self.workers.ends[worker])
        return self._entries[key]

    def take_plan(self, source: StageSource, plan: Plan, stages: Sequence[StageModel], operators: Group) -> TakenStages:
        """Return all stages of a plan, compiled; errors as in :meth:`take`.

        Args:
            stages, operators: for each stage of the plan its model, and its operators in the source's graph.
        """
        found = TakenStages()
        groups = [
            (processor, indices, tuple(operators[i] for i in indices), [stages[i] for i in indices])
            for processor, indices in compiled_together(plan, self.platform, stages)
        ]
        held = self._compile_side_by_side(source, groups)
        try:
            for processor, indices, group, cut in groups:
                entry = self.take(source, processor, group, cut)
                found.entries.append(entry)
                for signature, (index, model) in enumerate(zip(indices, entry.models, strict=True)):
                    found.compiled[index] = (entry.number, signature)
                    found.ports[index] = (model.inputs, model.outputs)
        except BaseException:
            self.give_back(*found.entries)  # those that were taken before the error
            raise
        finally:
            for entry in held:
                entry.users -= 1
        return found

    def _compile_side_by_side(
        self, source: StageSource, groups: Sequence[tuple[str, list[int], Group, list[StageModel]]]
    ) -> list[Entry]:
        """Have CPU workers compile missing stages in parallel, because packing weights takes long; hold the results.

        Raises:
            UnavailableError: as in :meth:`take`.
        """
        lacking: dict[str, _Wanted] = {}
        for name, _, group, cut in groups:
            processor, worker = self.platform[name], self.process(name)
            if worker in lacking or processor.kind != "cpu" or engine_of(processor, cut) != LITERT:
                continue
            if (wanted := self._wanted(source, name, group, cut)) is not None:
                lacking[worker] = wanted
        return self._compile(source.graph, list(lacking.values())) if len(lacking) > 1 else []

    def unsupported(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a processor does not support; on a CPU, LiteRT supports all.

        Raises:
            UnavailableError: the worker died, or did not answer in time.
        """
        found = self.platform[processor]
        return self._refusals.find(graph, found, range(len(graph.operators))) if may_refuse(found) else []

    def _compile(self, graph: Graph, wanted: Sequence[_Wanted]) -> list[Entry]:
        """Have different workers compile stages in parallel; return them, each with one user.

        Raises:
            UnavailableError: as in :meth:`take`.
        """
        requests: dict[str, Request] = {}
        numbers = [next(self._numbers) for _ in wanted]
        with ExitStack() as stack:
            for number, (key, processor, models, packed) in zip(numbers, wanted, strict=True):
                operators = _operators(key)
                if refused := self._refusals.known(graph, processor, operators) if not _falls_back(processor) else ():
                    raise refusal(graph, processor, operators, refused)
                requests[processor.name] = _compile_request(stack, processor, number, models, packed)
            answers, errors = self.workers.ask_each(requests, self.platform.limits.load_s)
        pairs = zip(numbers, wanted, strict=True)
        made = [self._keep(key, n, graph, models) for n, (key, found, models, _) in pairs if found.name in answers]
        for key, processor, models, _ in wanted:
            if processor.name in errors:
                self._raise(errors[processor.name], graph, processor, _operators(key), models)
            whole = graph.source is not None and len(_operators(key)) == len(graph.operators)
            if whole and _falls_back(processor) and (graph.digest, processor.name) not in self._placements:
                text = self._placement(graph, processor, answers[processor.name])
                self._placements[graph.digest, processor.name] = text
        for entry in made:
            entry.users = 1
        return made

    def _raise(
        self,
        error: WorkerError,
        graph: Graph,
        processor: Processor,
        operators: Sequence[int],
        models: Sequence[StageModel],
    ) -> NoReturn:
        """Raise the error that names the operator because of which a worker could not compile stages.

        Raises:
            UnavailableError: always.
        """
        if graph.source is None:  # the stages come from files, without the whole model
            raise (failure_of_files(models, error) if processor.kind == "cpu" else error) from error
        where = f"while it compiled {operator_range(operators[0], operators[-1])}"
        if processor.kind == "cpu" and not reads_files(processor):
            raise failure(graph, operators, f"{error.what} {where}") from error
        if error.fatal or not may_refuse(processor) or _falls_back(processor):
            raise UnavailableError(f"{error.what} {where}") from error
        found = self._refusals.find(graph, processor, operators)
        raise refusal(graph, processor, operators, found) from error

    def placements(self, graph: Graph) -> dict[str, str]:
        """Return, for processors on which LiteRT places operators itself, its placement of a whole network."""
        return {name: text for (digest, name), text in self._placements.items() if digest == graph.digest}

    def _placement(self, graph: Graph, processor: Processor, answer: Mapping[str, Any]) -> str:
        """Return a text of LiteRT's placement: partitions on the accelerator, operators left to the CPU, and why."""
        kind, count = processor.kind.upper(), len(graph.operators)
        if answer["accelerated"]:
            return f"all {count} operators of {graph.name} run on the {kind}"
        left = self._refusals.find(graph, processor, range(count))
        reasons = dict.fromkeys(line for text in answer["unsupported"] for line in text.splitlines()[:_MOST_REASONS])
        parts = f"{answer['kernels']} partition{'' if answer['kernels'] == 1 else 's'}"
        return (
            f"LiteRT runs {parts} of {graph.name} on the {kind}; on the CPU stay "
            f"{describe(graph, left) or 'operators that it supports alone'}, and operators outside of the partitions"
            + (f" ({'; '.join(reasons)})" if reasons else "")
        )

    def give_back(self, *entries: Entry) -> None:
        """Release stages that were taken."""
        for entry in entries:
            entry.users -= 1
        self._shrink()

    def pack(self, processor: str, graph: Graph, path: Path) -> None:
        """Have the runtime write its packed weights of a whole model to ``path``.

        Raises:
            UnavailableError: the runtime refuses it.
        """
        model, number, found = packing_model(graph), next(self._numbers), self.platform[processor]
        joined = JoinedModel(model.schema, (model.source,), dict.fromkeys(model.buffers, 0))
        settings = compile_settings(found, path, LITERT)
        head = {"op": "compile", "id": number, "signatures": 0, "settings": settings, "engine": LITERT}
        with ExitStack() as stack:
            files = _opened(stack, [model.source.path])
            self.workers.ask(processor, Request(head, joined.view(), files), COMPILE_LIMIT_S)
        release_stages(self.workers, processor, number)

    def cut(self, graph: Graph, content_digest: str, operators: tuple[int, ...]) -> StageModel:
        """Return a stage as a model."""
        key = (graph.digest, content_digest, operators)
        return recent(self._cut, key, lambda: cut_stage(graph, operators), _MOST_CUT)

    def forget_cut(self, content_digest: str) -> None:
        """Forget the cut stages of a model that is no longer needed."""
        for key in [key for key in self._cut if key[1] == content_digest]:
            del self._cut[key]

    def _is_there(self, entry: Entry) -> bool:
        return entry.ends == self.workers.ends[entry.worker]

    def _shrink(self) -> None:
        total = sum(entry.nbytes for entry in self._entries.values() if not entry.owner)
        for key, entry in list(self._entries.items()):
            is_there = self._is_there(entry)
            if not is_there or (not entry.users and (entry.owner or total > self.limit_nbytes)):
                total -= 0 if entry.owner else entry.nbytes
                del self._entries[key]
                if is_there:
                    release_stages(self.workers, entry.worker, entry.number)


def compiled_together(plan: Plan, platform: Platform, stages: Sequence[StageModel]) -> list[tuple[str, list[int]]]:
    """Return processors, each with stages that are compiled together there.

    On a CPU all stages of a processor share their workspace and threads. An accelerator has neither, and takes seconds
    to compile: there each stage is compiled alone, so that other plans with the same stage find it compiled. So it is
    for runtimes that read each stage from a file of its own.
    """
    found: list[tuple[str, list[int]]] = []
    for name, indices in plan.by_processor().items():
        processor = platform[name]
        joint = [i for i in indices if processor.kind == "cpu" and engine_of(processor, [stages[i]]) == LITERT]
        found += [(name, joint)] if joint else []
        found += [(name, [index]) for index in indices if index not in joint]
    return found


def _operators(key: Key) -> list[int]:
    """Return the operators of stages, ascending."""
    return sorted(o for stage in key[3] for o in stage)


def _falls_back(processor: Processor) -> bool:
    """Return whether LiteRT runs on the CPU what a processor does not support."""
    return bool(processor.options.get("fallback"))


def _inner_nbytes(graph: Graph, operators: tuple[int, ...]) -> int:
    """Return the bytes of a stage's inner tensors, as if none shared space."""
    border = set(graph.boundary(operators).outputs)
    return sum(graph.tensors[t].nbytes for o in operators for t in graph.operators[o].outputs if t not in border)


def compile_strictly(
    workers: Workers, processor: Processor, number: int, stages: Sequence[StageModel], limit_s: float
) -> dict[str, Any]:
    """Compile stages on a processor's worker, under ``number``, without fallback to the CPU; return its answer.

    Args:
        limit_s: the worker is ended if it takes longer.

    Raises:
        UnavailableError: the runtime refuses them, or a file that holds their weights is gone.
    """
    with ExitStack() as stack:
        request = _compile_request(stack, processor, number, stages, None, strict=True)
        return workers.ask(processor.name, request, limit_s)


def _compile_request(
    stack: ExitStack,
    processor: Processor,
    number: int,
    stages: Sequence[StageModel],
    packed: Path | None,
    *,
    strict: bool = False,
) -> Request:
    """Return the request that compiles stages; the stack closes the files that are sent with it."""
    engine = engine_of(processor, stages)
    settings = compile_settings(processor, packed, engine, strict=strict)
    if not strict:  # a strict compilation only tests for support, so its result is not kept
        settings |= cache_settings(processor)
    head = {"op": "compile", "id": number, "signatures": len(stages), "settings": settings, "engine": engine}
    if engine == OPENVINO:
        return Request(head, fds=_with_weights(stack, stages, settings))
    if engine != LITERT:
        return Request(head, fds=[_written(stack, join([stage])) for stage in stages])
    joined = join(stages)
    library = joined.sources[0].custom_ops
    custom = custom_operators(joined.schema)
    if library is not None and custom:
        settings["custom_ops"] = {"library": str(library), "operators": custom}
    if processor.kind == "gpu":
        joined = replace(joined, schema=flattened(joined.schema))
    return Request(head, joined.view(), _opened(stack, [source.path for source in joined.sources]))


def custom_operators(model: Any) -> list[tuple[str, int]]:
    """Return names and versions of the custom operators in a schema (``ModelT``)."""
    codes = (c for c in model.operatorCodes or () if c.builtinCode == _CUSTOM and c.customCode)
    return [(c.customCode.decode(errors="replace"), int(c.version)) for c in codes]


def engine_of(processor: Processor, stages: Sequence[StageModel]) -> str:
    """Return the engine for stages that are compiled together on a processor: compiled models where possible."""
    if reads_files(processor):
        return runtime_of(processor)
    alone = processor.kind == "cpu" and any(needs_interpreter(stage.schema) for stage in stages)
    return INTERPRETER if alone else LITERT


def release_stages(workers: Workers, worker: str, number: int) -> None:
    """Have a worker release what was compiled under ``number``."""
    workers.ask(worker, Request({"op": "release", "id": number}), _RELEASE_LIMIT_S)


def _written(stack: ExitStack, joined: JoinedModel) -> int:
    """Return a file in memory with the whole model, for a runtime that reads files only."""
    try:
        descriptor = os.memfd_create("stage", os.MFD_CLOEXEC)
        file = stack.enter_context(os.fdopen(descriptor, "wb"))
        joined.write_into(file, joined.sources[0].path.name)
        file.flush()
    except OSError as error:
        raise UnavailableError(f"no memory for a stage of {joined.sources[0].path}: {error}") from error
    return descriptor


def _with_weights(stack: ExitStack, stages: Sequence[StageModel], settings: dict[str, Any]) -> list[int]:
    """Return the files of stages, each followed by that of its weights where these are large; set ``weights``.

    OpenVINO takes 5 ms to read a megabyte of a ``.tflite``; reading weights separately costs as much as 50 MB of it.
    """
    fds, settings["weights"] = [], []
    for stage in stages:
        lean, weights = weights_as_inputs(stage) if stage.weight_nbytes >= _LARGE_NBYTES else (stage, {})
        fds.append(_written(stack, join([lean])))
        fds += _opened(stack, [stage.source.path]) if weights else ()
        settings["weights"].append({name: (extent.offset, extent.nbytes) for name, extent in weights.items()})
    return fds


def _opened(stack: ExitStack, paths: Sequence[Path]) -> list[int]:
    try:
        return [stack.enter_context(path.open("rb")).fileno() for path in paths]
    except OSError as error:
        raise UnavailableError(f"{error.filename}: {reason_of(error)}") from error


def opens(processor: Processor, stages: int) -> bool:
    """Return whether that many stages on a processor expose their inner tensors.

    XNNPACK only: other kernels are so slow that it makes no difference, or work in place. A stage alone on its worker
    has no other stage to share space with.
    """
    return stages > 1 and packs_weights(processor)


def inner_tensors(graph: Graph, operators: Sequence[int]) -> tuple[int, ...]:
    """Return the inner tensors that a stage exposes, ascending.

    Any operator of a graph can be a stage of its own, so its outputs can cross a border. Excluded are tensors that the
    runtime fuses away, that are too small to matter, or that have no size before they are computed.
    """
    border = set(graph.boundary(operators).outputs)
    found = []
    for operator in operators:
        for tensor in graph.operators[operator].outputs:
            kinds = [graph.operators[reader].kind for reader in graph.consumers.get(tensor, ())]
            stands_alone = graph.operators[operator].kind in _WRITERS and kinds and _READERS.issuperset(kinds)
            if stands_alone and tensor not in border and _has_place(graph.tensors[tensor]):
                found.append(tensor)
    return tuple(sorted(found))


def _has_place(tensor: Tensor) -> bool:
    plain = tensor.dtype in _PLAIN and not tensor.variable and min(tensor.shape, default=0) >= 0
    return plain and tensor.nbytes >= _LEAST_NBYTES


def opened(
    graph: Graph, processor: Processor, stages: Sequence[Sequence[int]], models: Sequence[StageModel]
) -> tuple[StageModel, ...]:
    """Return the stages of a processor as they are compiled there, with inner tensors exposed where it pays.

    Args:
        stages: the operators of each.
        models: the stages, cut from ``graph``.
    """
    if not opens(processor, len(stages)):
        return tuple(models)
    return tuple(handing_out(m, inner_tensors(graph, o)) for m, o in zip(models, stages, strict=True))


class Refusals:
    """Which operators of each graph each kind of accelerator supports; tested once."""

    def __init__(self, workers: Workers, numbers: count[int]) -> None:
        self._workers = workers
        self._numbers = numbers
        self._taken: dict[tuple[str, str], dict[int, bool]] = {}

    def known(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that are known to be refused."""
        taken = self._taken.get((graph.digest, processor.like), {})
        return [o for o in operators if not taken.get(o, True)]

    def find(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return those of ``operators`` that the processor refuses, alone and beside their neighbours.

        They are tested together with the operators that compute their constants. One that is refused alone is tested
        again together with the operators that it reads from and writes to, as the accelerator would see it.

        Raises:
            UnavailableError: the worker died, or did not answer in time.
        """
        taken = self._taken.setdefault((graph.digest, processor.like), {})
        asked = [o for o in operators if o not in taken]
        alone = self._refused_alone(graph, processor, asked)
        refused = set(alone)
        if len(operators) > 1 and not reads_files(processor):
            refused = {o for o in alone if not self._taken_beside_others(graph, processor, o, alone)}
        taken |= {o: o not in refused for o in asked}
        return self.known(graph, processor, operators)

    def _refused_alone(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> list[int]:
        """Return the refused operators by bisection: few compilations where few are refused."""
        if not operators or self._takes(graph, processor, operators):
            return []
        if len(operators) == 1:
            return list(operators)
        middle = len(operators) // 2
        halves = operators[:middle], operators[middle:]
        return [o for half in halves for o in self._refused_alone(graph, processor, half)]

    def _taken_beside_others(self, graph: Graph, processor: Processor, operator: int, alone: Sequence[int]) -> bool:
        readers = {r for t in graph.operators[operator].outputs for r in graph.consumers.get(t, ())}
        beside = sorted({operator, *((graph.predecessors(operator) | readers) - set(alone))})
        return len(beside) > 1 and self._takes(graph, processor, beside)

    def _takes(self, graph: Graph, processor: Processor, operators: Sequence[int]) -> bool:
        number = next(self._numbers)
        apart = reads_files(processor)  # such a runtime supports operators one by one; a delegate sees their neighbours
        stages = [cut_stage(graph, (o,)) for o in operators] if apart else [cut_stage(graph, operators)]
        limit_s = _FILES_LIMIT_S if apart else COMPILE_LIMIT_S
        try:
            answer = compile_strictly(self._workers, processor, number, stages, limit_s)
        except WorkerError as error:
            # Such a runtime may crash or hang on a single model; where a GPU driver does, it does so on all of them.
            if error.fatal and not apart:
                raise
            return False
        release_stages(self._workers, processor.name, number)
        return bool(answer["accelerated"])


def refusal(graph: Graph, processor: Processor, operators: Sequence[int], refused: Sequence[int]) -> UnavailableError:
    """Return the error that names the refused operators of a stage."""
    where = f"the stage of {operator_range(operators[0], operators[-1])}"
    if not refused:
        return UnavailableError(
            f"{processor.name} does not support {where} together, although it supports each of them alone"
        )
    if len(refused) == len(operators) >= _NONE_AT_ALL:
        return UnavailableError(
            f"{processor.name} supports none of the operators {operators[0]} to {operators[-1]}",
            "its driver may not work with the runtime; see runtime.log in the run folder",
        )
    unseen = "" if processor.kind == "cpu" else ", or let the CPU run them: --allow-fallback"
    return UnavailableError(
        f"{processor.name} does not support operator{'s' * (len(refused) > 1)} {describe(graph, refused)} in {where}",
        f"place them on another processor{unseen}",
    )


def failure(graph: Graph, operators: Sequence[int], what: str) -> UnavailableError:
    """Return the error that names the operator because of which a stage does not run on a CPU, and the reason.

    Args:
        what: the worker's message.
    """
    operators, source = list(operators), graph.source
    if source is not None and source.custom_ops is not None and f"{source.custom_ops} " in what:
        return _without_kernel(graph, operators, source.custom_ops, what)
    said = why_it_fails(cut_stage(graph, operators), graph)
    while said and len(operators) > 1 and _NODE.search(said) is None:  # the runtime died without a message: bisect
        half = operators[: len(operators) // 2]
        of_half = why_it_fails(cut_stage(graph, half), graph)
        operators = half if of_half else operators[len(half) :]
        said = of_half or why_it_fails(cut_stage(graph, operators), graph)
    where = operator_range(operators[0], operators[-1])
    found = _NODE.search(said)
    if found is None:
        kinds = "" if len(operators) > 1 else f" ({graph.operators[operators[0]].kind})"
        hint = _FITTING if source is not None and source.given else ""
        return UnavailableError(f"{where}{kinds} cannot be run: {said or what}", hint)
    place = _operator_at(graph, operators, int(found[1]))
    reason = " ".join(_SOURCE.sub("", said[: found.start()]).split()) or what
    if found[2].startswith("Flex"):
        return UnavailableError(
            f"operator {place} ({found[2]}) is an operator of TensorFlow, for which LiteRT has no kernel",
            "convert the model again, without SELECT_TF_OPS",
        )
    if "unresolved custom op" in reason:
        if source is not None and source.custom_ops is not None:  # why_it_fails runs without that library
            return UnavailableError(f"{where} cannot be run: {what}")
        return UnavailableError(
            f"operator {place} ({found[2]}) is a custom operator without a kernel",
            "give the library with its kernel: --custom-ops LIBRARY.so",
        )
    return UnavailableError(
        f"operator {place} ({found[2]}) cannot be run: {reason}",
        _FITTING
        if found[3] == "invoke" and "support" not in reason.lower()
        else "no runtime on this machine has a kernel for it; convert the model again",
    )


def _without_kernel(graph: Graph, operators: Sequence[int], library: Path, what: str) -> UnavailableError:
    """Return the error that names the operator whose kernel a library lacks; the first one where it cannot be loaded.

    Args:
        what: the worker's message about the library.
    """
    names = [name for name, _ in custom_operators(cut_stage(graph, operators).schema)]
    kinds = [name for name in names if what.partition("exports no ")[2].split()[:1] == [kernel_symbol(name)]] or names
    inside = ((o, part.kind) for o in operators for part in graph.operators[o].flat())
    place, kind = next((found for found in inside if found[1] in kinds), (operators[0], kinds[0]))
    said = what[what.index(f"{library} ") :].partition(" while it compiled")[0]
    lacks = "exports no" in said
    return UnavailableError(
        f"operator {place} ({kind}) has no kernel: {said}",
        "give a library that exports this LiteRtCustomOpKernel: --custom-ops LIBRARY"
        if lacks
        else "give a shared library that is built for this machine: --custom-ops LIBRARY",
    )


def failure_of_files(models: Iterable[StageModel], what: UnavailableError) -> UnavailableError:
    """Return the error that names stage file and operator because of which stages fail on a CPU, else ``what``."""
    for model in models:
        part = graph_of(model.source, model.source.path.name)
        found = failure(part, range(len(part.operators)), str(what))
        if found.hint:
            return UnavailableError(f"{model.source.path}: {found.what}", found.hint)
    return what


def _operator_at(graph: Graph, operators: Sequence[int], node: int) -> int:
    """Return the graph's operator of a stage's node; nodes that compute constants come before the others."""
    flat = [o for o in operators for _ in graph.operators[o].flat()]
    before = len(cut_stage(graph, operators).schema.subgraphs[0].operators) - len(flat)
    return flat[max(0, min(node - before, len(flat) - 1))]


def describe(graph: Graph, operators: Sequence[int]) -> str:
    """Return ``7 (GATHER), 12 (TOPK_V2)``, at most eight of them."""
    shown = ", ".join(f"{o} ({graph.operators[o].kind})" for o in operators[:_MOST_SHOWN])
    return shown + (f" and {len(operators) - _MOST_SHOWN} more" if len(operators) > _MOST_SHOWN else "")
