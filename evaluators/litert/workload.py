"""Workloads measured on this machine's processors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Candidate, Capabilities
from evaluators.litert import tensors
from evaluators.litert.deployment import write_workload
from evaluators.litert.executor import Executor, InstanceBinding, Jobs
from evaluators.litert.packed import usable_packed
from evaluators.litert.runner import WorkloadRunner
from evaluators.litert.session import INPUT_SEED, LocalSession
from evaluators.litert.stages import StageSource
from evaluators.litert.workers import Workers
from evaluators.workload.host import MeasuredWorkload, Outputs, Parts, worst
from evaluators.workload.lowered import LoweredModel, Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.scheduler import QueueClient
from evaluators.workload.setting import HOST, Setting, setting
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch, Plan
from search_spaces.core.platform import Processor
from search_spaces.rewrites.lower import lowering
from search_spaces.rewrites.views import as_it_is
from search_spaces.spaces.chain import chain_plan


@dataclass(slots=True)
class _Model:
    """One model, shared by all of its instances."""

    packed: Path | None
    inputs: list[NDArray[np.generic]]
    reference: Outputs = ()


class LitertWorkload(LocalSession, MeasuredWorkload[InstanceBinding]):
    """A session of several models on workers that belong to the caller.

    Args:
        facts: of the evaluator, for the fingerprint.
    """

    def __init__(self, lowerings: Lowerings, objective: Objective, workers: Workers, facts: Mapping[str, Any]) -> None:
        MeasuredWorkload.__init__(self, lowerings, objective)
        LocalSession.__init__(self, lowerings.platform, workers, facts)
        self._facts = dict(facts)
        self._models: dict[int, _Model] = {}
        works = self._counters.works
        self.capabilities = Capabilities(conditions=True, counters=works, deploy=True, decompose=True, outputs=True)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        """Compile a plan; every candidate has memory of its own."""
        return self.in_turn(lambda: super(LitertWorkload, self).load(graph, plan, fresh=fresh))

    def close(self) -> None:
        """Release packed weights; no worker reads them any more."""
        super().close()
        self._holder.close()

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {**self._facts, "workload": self.workload.digest, "objective": self.objective}

    def bound(self, found: Setting, client: int) -> InstanceBinding:
        """Return a client's model, bound to the processes that may run its jobs, with inputs."""
        index = found.components[client]
        name, own = self.joined.components[index].name, self.workload.client_of(index).own_weights
        with _named(name):
            return self._bound(found, found.clients[client], found.models[client], name, own=own)

    def outputs(self, instance: InstanceBinding) -> list[NDArray[np.generic]]:
        """Return the outputs of an instance's last request."""
        return instance.outputs()

    def release(self, instance: InstanceBinding) -> None:
        """Release an instance; a second call does nothing."""
        instance.close()

    def _bound(
        self, found: Setting, client: QueueClient, model: LoweredModel, name: str, *, own: bool = False
    ) -> InstanceBinding:
        """Return an instance of a model of the workload, or of a rewritten one, with inputs.

        Args:
            own: whether the instance has weights of its own.
        """
        graph, operators = model.graph, model.operators
        # Threads of one process must not run one compiled model at the same time.
        threads = any(
            HOST in self.platform[found.processors[processor]].options
            for processors in client.processors
            for processor in processors
        )
        whole, digest = self._model(self.lowerings.origin(model.model)), self._key(graph)
        packed = None if own else usable_packed(whole.packed, graph, self.lowerings.origin(model.model), operators)
        cut = tuple(self._stages.cut(graph, digest, each) for each in operators)
        source = StageSource(graph, digest, lambda _: packed, name if threads or own else "")
        jobs = Jobs(source, operators, cut, model.viewed)
        bound = InstanceBinding(jobs, client, found.processors, self._stages, self._numbers)
        bound.set_inputs(whole.inputs)
        return bound

    def _in_a_row(self, graph: Graph, cuts: Sequence[int]) -> LoweredModel:
        """Return a model of the workload, or a decomposed one, cut into jobs that wait for each other."""
        plan = chain_plan(graph, cuts, [self._reference_processor.name] * (len(cuts) + 1))
        lowered = lowering(graph).lower(plan)
        return LoweredModel(graph, lowered, as_it_is(graph, lowered.plan), tuple(range(len(plan.stages))), ())

    def _model(self, graph: Graph) -> _Model:
        """Return a model of the workload."""
        if id(graph) not in self._models:
            packed = self._packed(graph)
            self._models[id(graph)] = _Model(packed, tensors.model_inputs(graph, INPUT_SEED))
            self._ready(graph, packed, lambda: self._reference(graph))
        return self._models[id(graph)]

    def _key(self, graph: Graph) -> str:
        """Return the key of compiled stages: the model's file, and the library with its kernels."""
        return f"{self.digest(graph)} {graph.source.custom_ops if graph.source is not None else ''}"

    def forget(self, graph: Graph) -> None:
        """Forget the stages of a decomposed model that ran only for its error."""
        self._stages.forget_cut(self._key(graph))

    def executor(self, found: Setting, dispatch: Dispatch, instances: Sequence[InstanceBinding]) -> Executor:
        """Return the executor of a setting."""
        return Executor(found, dispatch, instances, self._stages)

    def run_alone(
        self, found: Setting, parts: Parts, runs: int, *, outputs: bool = False
    ) -> tuple[list[Outcome], list[Outputs]]:
        """Run models outside their workload."""
        with _named(", ".join(dict.fromkeys(graph.name for graph, _ in parts))):
            return super().run_alone(found, parts, runs, outputs=outputs)

    def bound_alone(self, found: Setting, parts: Parts) -> Iterator[InstanceBinding]:
        """Yield models outside the workload, bound to processes, with inputs."""
        for number, (client, (graph, cuts)) in enumerate(zip(found.clients, parts, strict=True)):
            yield self._bound(found, client, self._in_a_row(graph, cuts), f"alone {number}")

    def agreement(self, graph: Graph, outputs: Outputs, processors: Sequence[Processor], off: float = 0.0) -> Agreement:
        """Compare outputs of a model with those of the whole model on the reference processor."""
        names = [processor.name for processor in processors]
        return tensors.agreement(graph, outputs, self._reference(graph), self._tolerance(graph, names) + off)

    def _reference(self, graph: Graph) -> Outputs:
        """Return the outputs of the whole model on the reference processor, computed once."""
        model = self._model(graph)
        if not model.reference:
            model.reference = self.whole_outputs(graph)
        return model.reference

    def process(self, processor: str) -> int | None:
        """Return the process id of a processor's worker; None where it is not running."""
        return self._workers.process_of(self._stages.process(processor))

    def inputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return the inputs with which a model is measured, decomposed or not."""
        return self._model(self.lowerings.origin(graph)).inputs

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:  # noqa: ARG002
        """Write ``plan.json`` and the stage files to ``folder``, run them, and compare outputs."""
        write_workload(folder, plan, self.lowerings)
        names = [component.name for component in self.joined.components]
        libraries = {c.name: Path(c.custom_ops) for c in self.workload.clients if c.custom_ops}
        with WorkloadRunner(folder, custom_ops=libraries) as runner:
            for name, component in zip(names, self.joined.components, strict=True):
                runner.set_inputs(name, self.inputs(component.graph))
            runner.run()
            found = setting(plan, self.lowerings)
            return worst(self.agreements(found, [runner.outputs(names[index]) for index in found.components]))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the model, or models, in errors raised meanwhile."""
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{name}: {error.what}", error.hint) from error
