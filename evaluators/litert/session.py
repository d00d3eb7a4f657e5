"""Measure plans on this machine's processors: the evaluator ``litert``."""

from __future__ import annotations

import importlib.metadata
import platform as host
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Candidate, Capabilities, ClosableSession, Evaluator, EvaluatorCapabilities
from evaluators.forwarding import LoweredCandidate
from evaluators.litert import tensors
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.deployment import write_deployment
from evaluators.litert.packed import Holder, can_be_packed, packed_weights, usable_packed
from evaluators.litert.processors import (
    check_is_here,
    computes_with_xnnpack,
    local_platform,
    make_processor,
    reduced_processors,
    with_reference,
)
from evaluators.litert.program import largest
from evaluators.litert.runner import PlanRunner
from evaluators.litert.settings import TOLERANCE_F32, packs_weights, tolerance
from evaluators.litert.stages import StageCache, StageSource, failure
from evaluators.litert.worker.runtimes import LITERT, PACKAGES, runtime_of, version
from evaluators.litert.workers import Arena, Workers
from evaluators.machine import Conditions, cpu_model
from evaluators.measurement.disturbance import Counters, TaskCounters
from evaluators.turns import Turns
from evaluators.workload.apart import Apart, on_cores
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor, with_cpu
from search_spaces.core.pools import single_processors
from search_spaces.models.inputs import drawn_inputs
from search_spaces.models.shapes import needs_interpreter
from search_spaces.rewrites.lower import Keeps, Lowered, lowering
from search_spaces.rewrites.views import Viewed, as_it_is
from search_spaces.spaces.chain import chain_plan

if TYPE_CHECKING:
    from evaluators.litert.workload import LitertWorkload
    from evaluators.workload.outcome import Objective
    from search_spaces.core.joined_graph import JoinedGraph
    from search_spaces.core.workload import Workload

INPUT_SEED = 0
# Relative. A kernel may sum in another order where a side of a split has another shape than the whole, as kernels of
# other processors do; networks that normalise by their data amplify it: fast style transfer is off by 5e-5. Beyond 1,
# outputs approximate nothing; below it, --max-error decides.
_OFF: Mapping[Keeps, float] = {"bits": 0.0, "rounding": TOLERANCE_F32, "approximation": 1.0}
_TOP1_INPUTS, _TOP1_S = 100, 20.0
_REWRITTEN_NBYTES = 4  # the arena of rewritten models is so many times as large as the model's own


class LitertEvaluator(Evaluator):
    """Measures plans by LiteRT and OpenVINO on this machine."""

    name = "litert"
    capabilities = EvaluatorCapabilities(names=True, reduced=True, places=True, workloads=True, apart=True)

    def platform(self) -> Platform:
        """Return the processors that this evaluator finds by itself."""
        return local_platform()

    def processor(self, name: str) -> Processor:
        """Return the processor of a name; :mod:`evaluators.litert.processor_names` lists the names."""
        return make_processor(name)

    def own_placements(self, platform: Platform) -> tuple[Processor, ...]:
        """Return processors on which the runtime places the operators of a whole network itself, as baselines.

        For example ``gpu+cpu``, ``npu+cpu``.
        """
        there = {p.like for p in platform.processors}
        firsts = [members[0] for members in platform.classes().values()]
        own = [with_cpu(p) for p in firsts if p.kind != "cpu" and runtime_of(p) == LITERT]
        return tuple(p for p in own if p.like not in there)

    def apart(self, platform: Platform, count: int) -> list[Apart]:
        """Return the ways to run models in processes or threads of their own, for baselines."""
        return on_cores(platform, count, threads=True)

    def reduced(self) -> Sequence[Processor]:
        """Return processors of lower precision, for studies that allow an error and name no processors."""
        return reduced_processors()

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[LitertSession]:
        """Open a session on a platform; leaving the context ends its processes.

        The runtime's own messages go to ``scratch/runtime.log``.
        """
        check_is_here(platform)
        platform = with_reference(platform)
        with (
            closing(Workers(platform, scratch / "runtime.log" if scratch else None)) as workers,
            closing(LitertSession(platform, workers)) as session,
        ):
            yield session

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[LitertWorkload]:
        """Open a session for one workload, as :meth:`prepare` does for single models.

        The runtime's own messages go to ``scratch/runtime.log``.
        """
        from evaluators.litert.workload import LitertWorkload
        from evaluators.workload.lowered import Lowerings

        processors = replace(platform, processors=single_processors(platform))
        check_is_here(processors)
        facts = {"evaluator": self.name, "versions": _versions(processors), "platform": processors.to_json()}
        with (
            closing(Workers(processors, scratch / "runtime.log" if scratch else None)) as workers,
            closing(LitertWorkload(Lowerings(workload, joined, platform), objective, workers, facts)) as session,
        ):
            yield session


def _versions(platform: Platform) -> dict[str, str]:
    """Return the versions of the runtimes in use."""
    used = dict.fromkeys((LITERT, *map(runtime_of, platform.processors)))
    return {PACKAGES[runtime].distribution: version(runtime) for runtime in used}


class LocalSession(ClosableSession):
    """Base of sessions of one network and of several: workers, compiled stages, packed weights, a reference.

    The outputs of every plan are compared with those of the whole model on the first processor that computes with
    XNNPACK.

    Args:
        platform: processors, and pools of them.
        workers: they stay the caller's to close.
        facts: constant part of all conditions.
    """

    def __init__(
        self, platform: Platform, workers: Workers, facts: Mapping[str, Any], memory_limit_nbytes: int | None = None
    ) -> None:
        self.platform = platform
        own = single_processors(platform)
        fitting = [p for p in own if computes_with_xnnpack(p) and p.resources]
        self._reference_processor = next(filter(packs_weights, fitting), fitting[0])
        self._workers = workers
        self._stages = StageCache(workers, platform, memory_limit_nbytes if workers.memory is None else 0)
        self._turns = Turns(workers.end_limited, self._waits)
        self._numbers = count(1)
        self._holder = Holder()
        used = {core for p in own for core in p.cores}
        self._conditions = Conditions(used, workers.processes, {**facts, "runs_first": workers.foreground.preferred})
        self._counters = TaskCounters(used, workers.processes, queued_s=lambda: workers.foreground.queued_s)

    def conditions(self) -> dict[str, Any]:
        """Return conditions that may have affected the last measurements (governor, load, versions, …)."""
        return self._conditions.now()

    def counters(self) -> Counters:
        """Return the kernel's counters of the worker processes; without the loading of plans that take turns."""
        found = self._counters.read()
        return found if self._workers.memory is None else replace(found, page_faults=self._waits() - self._turns.waits)

    def _waits(self) -> int:
        return self._workers.page_faults

    def in_turn(self, load: Callable[[], Candidate]) -> Candidate:
        """Return a loaded candidate; where memory is limited, others are unloaded meanwhile."""
        return load() if self._workers.memory is None else self._turns.load(load)

    def digest(self, graph: Graph) -> str:
        """Return the digest of a model's file, or of the model that it was rewritten to.

        Raises:
            UnavailableError: the model has no file.
        """
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; LiteRT runs files")
        return graph.source.content_digest()

    def _packed(self, graph: Graph) -> Path | None:
        """Return a model's packed weights, made where they are missing, and keep the file from being removed."""
        digest, name = self.digest(graph), self._reference_processor.name
        whole = self._stages.cut(graph, digest, tuple(range(len(graph.operators))))
        if not packs_weights(self._reference_processor) or needs_interpreter(whole.schema) or not can_be_packed(graph):
            return None
        return self._workers.own(self._holder.hold(packed_weights(digest, lambda path: self._pack(name, graph, path))))

    def _pack(self, processor: str, graph: Graph, path: Path) -> None:
        with self._workers.without_limit(processor):  # packing takes as much memory as the weights
            self._stages.pack(processor, graph, path)

    def _ready(self, graph: Graph, packed: Path | None, reference: Callable[[], object]) -> None:
        """Compute a model's reference where memory is limited, without limit, so that plans have all of the memory."""
        if self._workers.memory is not None:
            with self._workers.without_limit(self._reference_processor.name):
                reference()
            self._workers.charge(packed, graph.source.path if graph.source else None)

    def _tolerance(self, graph: Graph, processors: Sequence[str]) -> float:
        return tolerance([self.platform[name] for name in processors], self._reference_processor, graph)


@dataclass(slots=True)
class _Model:
    """A loaded graph.

    Attributes:
        whole: of a rewritten graph, the model that it was rewritten from.
        tolerance: of a rewritten graph, the error that is accepted beside that of its processors.
        wide: the arena that graphs rewritten from this one share.
        users: candidates that hold it; it is not forgotten while there are any.
    """

    graph: Graph
    content_digest: str
    packed: Path | None
    arena: Arena
    inputs: list[NDArray[np.generic]]
    reference: list[NDArray[np.generic]] = field(default_factory=list)
    whole: _Model | None = None
    tolerance: float = 0.0
    wide: Arena | None = None
    users: int = 0

    def arenas(self) -> list[Arena]:
        """Return its shared memory."""
        return [memory for memory in (self.arena, self.wide) if memory is not None]

    def let_go(self) -> None:
        """Record that a candidate no longer holds it."""
        self.users -= 1


class LitertSession(LocalSession):
    """A session on one platform, for any number of models and plans."""

    def __init__(self, platform: Platform, workers: Workers, memory_limit_nbytes: int | None = None) -> None:
        super().__init__(platform, workers, {"versions": _versions(platform)}, memory_limit_nbytes)
        self._models: OrderedDict[tuple[str, str], _Model] = OrderedDict()
        usual = Capabilities(conditions=True, deploy=True, unsupported=True, stream=True, pause=True, outputs=True)
        self.capabilities = replace(usual, rewrites=True, placements=True, counters=self._counters.works)

    def inputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return the inputs with which plans of a model are measured."""
        return self._model(graph).inputs

    def placements(self, graph: Graph) -> dict[str, str]:
        """Return, for processors on which the runtime places operators itself, its placement of a whole network."""
        return self._stages.placements(graph)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {
            "evaluator": LitertEvaluator.name,
            "runtime": importlib.metadata.version("ai-edge-litert"),
            "versions": _versions(self.platform),
            "machine": host.machine(),
            "cpu": cpu_model(),
            "kernel": host.release(),
            "platform": self.platform.to_json(),
        }

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; with ``fresh``, share nothing with what is loaded already (a rebuilt instance)."""
        self.check_open()
        plan.validate(graph, self.platform)
        return self.in_turn(lambda: self._loaded(graph, plan, fresh=fresh))

    def _loaded(self, graph: Graph, plan: Plan, *, fresh: bool) -> Candidate:
        model, lowered = self._lowered(self._model(graph), plan)
        viewed = lowered.viewed(self.platform)
        candidate = self._candidate(model, lowered.plan, viewed, fresh=fresh, check=True)
        candidate.set_inputs(model.inputs)
        if not lowered.rewritten:
            return candidate
        return LoweredCandidate(candidate, len(plan.stages), [lowered.stage_of[i] for i in viewed.stage_of])

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        """Write ``plan.json`` and the stage files to ``folder``, run them, and compare outputs."""
        whole = self._model(graph)
        model, lowered = self._lowered(whole, plan)
        path = write_deployment(folder, model.graph, lowered.plan, self.platform, model.content_digest)
        with PlanRunner(path, custom_ops=graph.source.custom_ops if graph.source else None) as runner:
            outputs = list(runner.run(whole.inputs).values())
            off = max(self._tolerance(graph, list(plan.by_processor())), model.tolerance)
            found = tensors.agreement(graph, outputs, self._reference(whole), off)
            if found.identical or graph.stateful or not tensors.is_classifier(graph):
                return found
            return replace(found, top1=self._top1(whole, lambda arrays: next(iter(runner.run(arrays).values()))))

    def _top1(self, model: _Model, answer: Callable[[list[NDArray[Any]]], NDArray[Any]]) -> tuple[int, int]:
        """Return for how many drawn inputs the top class differs from the whole model's, and how many were drawn."""
        changed, end_s = 0, time.monotonic() + _TOP1_S
        with closing(self._unchecked(model)) as candidate:
            for seed in range(1, _TOP1_INPUTS + 1):
                arrays = drawn_inputs(model.graph, seed)
                candidate.set_inputs(arrays)
                candidate.run(1)
                changed += int(np.argmax(candidate.outputs()[0]) != np.argmax(answer(arrays)))
                if time.monotonic() > end_s:
                    break
        return changed, seed

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a processor does not support, ascending."""
        return self._stages.unsupported(graph, processor)

    def _lowered(self, model: _Model, plan: Plan) -> tuple[_Model, Lowered]:
        """Return the model that a plan runs, rewritten where the plan says so, and the plan in terms of it."""
        lowered = lowering(model.graph).lower(plan)
        if not lowered.rewritten:
            return model, lowered
        digest = self.digest(lowered.graph)
        if model.wide is None:
            model.wide = Arena(next(self._numbers), _REWRITTEN_NBYTES * largest(model.graph))
        memory, off = model.wide, _OFF[lowered.keeps]
        if largest(lowered.graph) > memory.nbytes:
            raise UnavailableError("the rewritten model needs more memory than is reserved for it")
        return _Model(lowered.graph, digest, model.packed, memory, model.inputs, whole=model, tolerance=off), lowered

    def _model(self, graph: Graph) -> _Model:
        # Models of one structure may have different weights, and be open at the same time.
        digest = self.digest(graph)
        key = (graph.digest, digest)
        if key not in self._models:
            inputs, packed = tensors.model_inputs(graph, INPUT_SEED), self._packed(graph)
            self._forget_models(largest(graph))
            memory = Arena(next(self._numbers), largest(graph))
            self._models[key] = model = _Model(graph, digest, packed, memory, inputs)
            self._ready(graph, packed, lambda: self._reference(model))
        self._models.move_to_end(key)
        return self._models[key]

    def _forget_models(self, nbytes: int) -> None:
        """Make room for another model: forget those that no candidate holds, the least recently used first."""
        total = nbytes + sum(memory.nbytes for model in self._models.values() for memory in model.arenas())
        for key, model in list(self._models.items()):
            if total <= self._stages.limit_nbytes:
                return
            if not model.users:
                del self._models[key]
                for memory in model.arenas():
                    total -= memory.nbytes
                    memory.give_back(self._workers)
                if all(other.packed != model.packed for other in self._models.values()):
                    self._holder.let_go(model.packed)

    def _candidate(self, model: _Model, plan: Plan, viewed: Viewed, *, fresh: bool, check: bool) -> LitertCandidate:
        graph, number, owner = model.graph, next(self._numbers), model.whole or model
        cut = [self._stages.cut(graph, model.content_digest, operators) for operators in viewed.operators]
        held = ExitStack()
        with ExitStack() as undo:
            owner.users += 1
            undo.callback(owner.let_go)
            memory = Arena(number, largest(graph)) if fresh else model.arena
            if fresh:
                undo.callback(memory.give_back, self._workers)
            source = StageSource(
                graph,
                model.content_digest,
                lambda group: usable_packed(model.packed, graph, owner.graph, group),
                f"candidate {number}" if fresh else "",
            )
            stages = self._stages.take_plan(source, viewed.plan, cut, viewed.operators)
            undo.callback(self._stages.give_back, *stages.entries)
            candidate = LitertCandidate(
                viewed.graph,
                viewed.plan,
                self.platform,
                stages,
                workers=self._workers,
                arena=memory,
                number=number,
                reference=(lambda: self._reference(model)) if check else None,
                first_outputs=(lambda: self._first_outputs(model, plan)) if graph.stateful else None,
                tolerance=max(self._tolerance(graph, list(plan.by_processor())), model.tolerance),
                explain=lambda processor, what: self._why(graph, viewed, processor, what),
                on_close=held.close,
            )
            held.push(undo.pop_all())
        return candidate

    def _why(self, graph: Graph, viewed: Viewed, processor: str, what: str) -> UnavailableError:
        """Return the error that names the operator for which a processor's stages failed."""
        stages = [o for s, o in zip(viewed.plan.stages, viewed.operators, strict=True) if s.processor == processor]
        if self.platform[processor].kind != "cpu":
            return UnavailableError(what)
        return failure(graph, sorted(o for stage in stages for o in stage), what)

    def _reference(self, model: _Model) -> Sequence[NDArray[np.generic]]:
        """Return the outputs of the whole model on the reference processor, computed once."""
        model = model.whole or model
        if not model.reference:
            model.reference = self._first_outputs(model)
        return model.reference

    def _first_outputs(self, model: _Model, plan: Plan | None = None) -> list[NDArray[np.generic]]:
        """Return what a plan, or the whole model, computes in its first run, before any state has changed."""
        with closing(self._unchecked(model, plan)) as candidate:
            candidate.set_inputs(model.inputs)
            candidate.run(1)
            return candidate.outputs()

    def _unchecked(self, model: _Model, plan: Plan | None = None) -> LitertCandidate:
        """Return a plan, or the whole model on the reference processor, whose outputs are not verified."""
        plan = plan or chain_plan(model.graph, (), [self._reference_processor.name])
        return self._candidate(model, plan, as_it_is(model.graph, plan), fresh=True, check=False)

    def close(self) -> None:
        """Release shared memory and packed weights; the caller closes the workers."""
        super().close()
        for model in self._models.values():
            for memory in model.arenas():
                memory.close()
        self._models.clear()
        self._holder.close()
