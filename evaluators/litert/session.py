"""Measure plans on this machine's processors: the evaluator ``litert``."""

from __future__ import annotations

import importlib.metadata
import os
import platform as host
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Candidate, Capabilities, Evaluator, EvaluatorCapabilities, Session
from evaluators.forwarding import LoweredCandidate
from evaluators.litert import arena, tensors
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.deployment import write_deployment
from evaluators.litert.lanes import Lanes
from evaluators.litert.packed import Holder, packed_weights, usable_packed
from evaluators.litert.processors import (
    check_is_here,
    computes_with_xnnpack,
    local_platform,
    make_processor,
    reduced_processors,
    with_reference,
)
from evaluators.litert.refusals import failure
from evaluators.litert.runner import PlanRunner
from evaluators.litert.runtimes import LITERT, PACKAGES, runtime_of, version
from evaluators.litert.settings import TOLERANCE_F32, packs_weights, tolerance
from evaluators.litert.shared import Arena
from evaluators.litert.stages import Entry, StageCache, compiled_together
from evaluators.machine import Conditions
from evaluators.measurement.disturbance import Counters, TaskCounters
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.shapes import needs_interpreter
from search_spaces.models.stages import cut_stage, packing_model
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor, with_cpu
from search_spaces.pools import lanes_of
from search_spaces.rewrites.lower import Keeps, Lowered, Lowering
from search_spaces.rewrites.views import Viewed, as_it_is

if TYPE_CHECKING:
    from evaluators.litert.workload import LitertWorkload
    from evaluators.workload.outcome import Objective
    from search_spaces.joined_graph import JoinedGraph
    from search_spaces.workload import Workload

_INPUT_SEED = 0
# Relative. A kernel may add up in another order where a side of a split has another shape than the whole, as other
# kernels do; networks that normalise by what they see make more of it: fast style transfer is off by 5e-5. What is
# further off than 1 approximates nothing; how near is near enough, others say.
_OFF: Mapping[Keeps, float] = {"bits": 0.0, "rounding": TOLERANCE_F32, "approximation": 1.0}
_REWRITTEN_NBYTES = 4  # times as large as a model's arena is that of the models that it was rewritten to


class LitertEvaluator(Evaluator):
    """See :class:`~evaluators.base.Evaluator`."""

    name = "litert"
    capabilities = EvaluatorCapabilities(names=True, reduced=True, workloads=True, sliced_lanes=True)

    def platform(self) -> Platform:
        """See :class:`~evaluators.base.Evaluator`."""
        return local_platform()

    def processor(self, name: str) -> Processor:
        """See :class:`~evaluators.base.Evaluator`; :mod:`evaluators.litert.processor_names` lists the names."""
        return make_processor(name)

    def own_placements(self, platform: Platform) -> tuple[Processor, ...]:
        """See :class:`~evaluators.base.Evaluator`: ``gpu+cpu``, ``npu+cpu``."""
        there = {p.like for p in platform.processors}
        firsts = [members[0] for members in platform.classes().values()]
        own = [with_cpu(p) for p in firsts if p.kind != "cpu" and runtime_of(p) == LITERT]
        return tuple(p for p in own if p.like not in there)

    def reduced(self) -> Sequence[Processor]:
        """See :class:`~evaluators.base.Evaluator`."""
        return reduced_processors()

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[LitertSession]:
        """See :class:`~evaluators.base.Evaluator`; the runtime's own messages go to ``scratch/runtime.log``."""
        check_is_here(platform)
        platform = with_reference(platform)
        lanes = Lanes(platform, scratch / "runtime.log" if scratch else None)
        session = LitertSession(platform, lanes)
        try:
            yield session
        finally:
            session.close()
            lanes.close()

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[LitertWorkload]:
        """See :class:`~evaluators.base.Evaluator`; messages go where those of :meth:`prepare` go."""
        from evaluators.litert.crew import Crew
        from evaluators.litert.workload import LitertWorkload

        lanes = replace(platform, processors=lanes_of(platform))
        check_is_here(lanes)
        crew = Crew(lanes, scratch / "runtime.log" if scratch else None)
        facts = {"evaluator": self.name, "versions": _versions(lanes), "platform": lanes.to_json()}
        try:
            with closing(LitertWorkload(workload, joined, platform, objective, crew, facts)) as session:
                yield session
        finally:
            crew.close()


@dataclass(slots=True)
class _Model:
    """What a session knows of one graph.

    Attributes:
        whole: of a rewritten graph, the model that it was made of.
        lowering: makes rewritten graphs of it.
        tolerance: of a rewritten graph: what it may be off beside what its processors are.
        wide: the arena that those share.
        users: candidates that hold it; it is not forgotten while there are any.
    """

    graph: Graph
    content_digest: str
    packed: Path | None
    arena: Arena
    inputs: list[NDArray[np.generic]]
    reference: list[NDArray[np.generic]] = field(default_factory=list)
    whole: _Model | None = None
    lowering: Lowering | None = None
    tolerance: float = 0.0
    wide: Arena | None = None
    users: int = 0

    def arenas(self) -> list[Arena]:
        """Return the memory that it shares with the lanes."""
        return [memory for memory in (self.arena, self.wide) if memory is not None]


def _versions(platform: Platform) -> dict[str, str]:
    """Return the versions of the runtimes in use."""
    used = dict.fromkeys((LITERT, *map(runtime_of, platform.processors)))
    return {PACKAGES[runtime].distribution: version(runtime) for runtime in used}


class LitertSession(Session):
    """See :class:`~evaluators.base.Session`; one per platform, for any number of models and plans.

    The outputs of every plan are compared with those of the whole model on the first lane that computes with XNNPACK.
    """

    def __init__(self, platform: Platform, lanes: Lanes, memory_limit_nbytes: int | None = None) -> None:
        self.platform = platform
        fitting = [p for p in platform.processors if computes_with_xnnpack(p)]
        self._reference_lane = next(filter(packs_weights, fitting), fitting[0])
        self._lanes = lanes
        self._stages = StageCache(lanes, platform, memory_limit_nbytes)
        self._models: OrderedDict[tuple[str, str], _Model] = OrderedDict()
        self._holder = Holder()
        self._numbers = 0
        self._closed = False
        self._generation = lanes.generation
        used = {core for p in platform.processors for core in p.cores}
        self._conditions = Conditions(used, lanes.processes, {"versions": _versions(platform)})
        self._counters = TaskCounters(used, lanes.processes)
        usual = Capabilities(conditions=True, deploy=True, unsupported=True, stream=True, pause=True, outputs=True)
        self.capabilities = replace(usual, rewrites=True, counters=self._counters.works)

    def inputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return the inputs that plans of a model are measured with."""
        return self._model(graph).inputs

    def placements(self, graph: Graph) -> dict[str, str]:
        """See :class:`~evaluators.base.Session`."""
        return self._stages.placements(graph)

    def conditions(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return self._conditions.now()

    def counters(self) -> Counters:
        """Return the kernel's counters of the worker processes."""
        return self._counters.read()

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {
            "evaluator": LitertEvaluator.name,
            "runtime": importlib.metadata.version("ai-edge-litert"),
            "versions": _versions(self.platform),
            "machine": host.machine(),
            "kernel": host.release(),
            "platform": self.platform.to_json(),
        }

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """See :class:`~evaluators.base.Session`."""
        if self._closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        plan.validate(graph, self.platform)
        model, lowered = self._lowered(self._model(graph), plan)
        viewed = lowered.viewed(self.platform)
        candidate = self._candidate(model, lowered.plan, viewed, fresh=fresh, check=True)
        candidate.set_inputs(model.inputs)
        if not lowered.rewritten:
            return candidate
        return LoweredCandidate(candidate, len(plan.stages), [lowered.stage_of[i] for i in viewed.stage_of])

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        """See :class:`~evaluators.base.Session`."""
        whole = self._model(graph)
        model, lowered = self._lowered(whole, plan)
        path = write_deployment(folder, model.graph, lowered.plan, self.platform, model.content_digest)
        with PlanRunner(path, custom_ops=graph.source.custom_ops if graph.source else None) as runner:
            outputs = list(runner.run(whole.inputs).values())
        return tensors.agreement(graph, outputs, self._reference(whole), self._tolerance(graph, plan, model.tolerance))

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """See :class:`~evaluators.base.Session`."""
        return self._stages.refused(graph, processor, range(len(graph.operators)))

    def _tolerance(self, graph: Graph, plan: Plan, rewritten: float = 0.0) -> float:
        used = {s.processor: self.platform[s.processor] for s in plan.stages}.values()
        return max(tolerance(used, self._reference_lane, graph), rewritten)

    def _lowered(self, model: _Model, plan: Plan) -> tuple[_Model, Lowered]:
        """Return a plan as it is run, and what is known of the model that it then runs."""
        model.lowering = model.lowering or Lowering(model.graph)
        lowered = model.lowering.lower(plan)
        if not lowered.rewritten:
            return model, lowered
        source = lowered.graph.source
        if source is None:
            raise UnavailableError(f"model {model.graph.name!r} has no file; LiteRT runs files")
        if model.wide is None:
            model.wide = Arena(self._number(), _REWRITTEN_NBYTES * arena.largest(model.graph))
        memory, off = model.wide, _OFF[lowered.keeps]
        if arena.largest(lowered.graph) > memory.nbytes:
            raise UnavailableError("what the plan rewrites needs more memory than is set aside for it")
        digest = source.content_digest()
        return _Model(lowered.graph, digest, model.packed, memory, model.inputs, whole=model, tolerance=off), lowered

    def _forget_dead_lanes(self) -> None:
        if self._generation != self._lanes.generation:
            # The lanes were started anew: what they had mapped is gone.
            self._generation = self._lanes.generation
            for model in self._models.values():
                for memory in model.arenas():
                    memory.known_to.clear()

    def _model(self, graph: Graph) -> _Model:
        self._forget_dead_lanes()
        if graph.source is None:
            raise UnavailableError(f"model {graph.name!r} has no file; LiteRT runs files")
        # Models of one structure may have other weights, and be open at the same time.
        digest = graph.source.content_digest()
        key = (graph.digest, digest)
        if key not in self._models:
            inputs = tensors.model_inputs(graph, _INPUT_SEED)
            whole = cut_stage(graph, range(len(graph.operators)))
            packs = packs_weights(self._reference_lane) and not needs_interpreter(whole.schema)
            packed = packed_weights(digest, lambda path: self._pack(graph, path)) if packs else None
            self._forget_dead_lanes()  # packing ends its lane where the disk is full
            self._forget_models(arena.largest(graph))
            memory = Arena(self._number(), arena.largest(graph))
            self._models[key] = _Model(graph, digest, self._holder.hold(packed), memory, inputs)
        self._models.move_to_end(key)
        return self._models[key]

    def _forget_models(self, nbytes: int) -> None:
        """Make room for another model: those that no candidate holds go, the least recently used first."""
        total = nbytes + sum(memory.nbytes for model in self._models.values() for memory in model.arenas())
        for key, model in list(self._models.items()):
            if total <= self._stages.limit_nbytes:
                return
            if not model.users:
                del self._models[key]
                for memory in model.arenas():
                    total -= memory.nbytes
                    memory.close(self._lanes)
                if all(other.packed != model.packed for other in self._models.values()):
                    self._holder.let_go(model.packed)

    def _pack(self, graph: Graph, path: Path) -> None:
        """Have the runtime write its packed weights of the whole model to ``path``."""
        self._stages.compile_once(self._reference_lane.name, packing_model(graph), path)

    def _candidate(self, model: _Model, plan: Plan, viewed: Viewed, *, fresh: bool, check: bool) -> LitertCandidate:
        graph = model.graph
        memory = Arena(self._number(), arena.largest(graph)) if fresh else model.arena
        generation = self._lanes.generation
        held: list[Entry] = []
        owner = model.whole or model
        owner.users += 1

        def release() -> None:
            owner.users -= 1
            try:
                for entry in held:
                    self._stages.give_back(entry)
            finally:
                if fresh:
                    memory.close(self._lanes if generation == self._lanes.generation else None)

        try:
            compiled: dict[int, tuple[int, int]] = {}
            ports: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
            stages = [self._stages.cut(graph, model.content_digest, operators) for operators in viewed.operators]
            for lane, indices in compiled_together(viewed.plan, self.platform, stages):
                group = tuple(viewed.operators[i] for i in indices)
                packed = usable_packed(model.packed, graph, owner.graph, group)
                entry = self._stages.take(graph, model.content_digest, lane, group, packed, fresh=fresh)
                held.append(entry)
                for signature, (index, stage) in enumerate(zip(indices, entry.models, strict=True)):
                    compiled[index] = (entry.number, signature)
                    ports[index] = (stage.inputs, stage.outputs)
            return LitertCandidate(
                viewed.graph,
                viewed.plan,
                self.platform,
                lanes=self._lanes,
                arena=memory,
                number=self._number(),
                compiled=compiled,
                ports=ports,
                reference=(lambda: self._reference(model)) if check else None,
                first_outputs=(lambda: self._first_outputs(model, plan)) if graph.stateful else None,
                tolerance=self._tolerance(graph, plan, model.tolerance),
                explain=lambda lane, what: self._why(graph, viewed, lane, what),
                on_close=release,
            )
        except BaseException:
            release()  # gives back the stages that were taken before one was refused
            raise

    def _why(self, graph: Graph, viewed: Viewed, lane: str, what: str) -> UnavailableError:
        """Return the error that names the operator for which a lane's stages failed."""
        stages = [o for s, o in zip(viewed.plan.stages, viewed.operators, strict=True) if s.processor == lane]
        if self.platform[lane].kind != "cpu":
            return UnavailableError(what)
        return failure(graph, sorted(o for stage in stages for o in stage), what)

    def _reference(self, model: _Model) -> Sequence[NDArray[np.generic]]:
        """Return the outputs of the whole model on the reference lane, computed once."""
        model = model.whole or model
        if not model.reference:
            everything = tuple(range(len(model.graph.operators)))
            whole = Plan(model.graph.digest, (Stage(everything, self._reference_lane.name),))
            model.reference = self._first_outputs(model, whole)
        return model.reference

    def _first_outputs(self, model: _Model, plan: Plan) -> list[NDArray[np.generic]]:
        """Return what a plan computes in its first run, before any state has changed."""
        viewed = as_it_is(model.graph, plan)
        with closing(self._candidate(model, plan, viewed, fresh=True, check=False)) as candidate:
            candidate.set_inputs(model.inputs)
            candidate.run(1)
            return candidate.outputs()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def close(self) -> None:
        """Give shared memory and packed weights back; the lanes are their owner's."""
        self._closed = True
        for model in self._models.values():
            for memory in model.arenas():
                os.close(memory.fd)
        self._models.clear()
        self._holder.close()
