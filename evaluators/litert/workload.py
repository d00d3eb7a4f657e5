"""Workloads measured on this machine's processors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Capabilities
from evaluators.litert import tensors
from evaluators.litert.deployment import write_workload
from evaluators.litert.executor import Executor, InstanceBinding, Jobs
from evaluators.litert.packed import usable_packed
from evaluators.litert.runner import WorkloadRunner
from evaluators.litert.session import INPUT_SEED, LocalSession
from evaluators.litert.workers import Workers
from evaluators.workload.host import HostedRun, MeasuredWorkload, Outputs, Parts, worst
from evaluators.workload.lowered import LoweredModel
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.scheduler import QueueClient
from evaluators.workload.setting import HOST, Setting, setting
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Dispatch, Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.workload import Workload
from search_spaces.rewrites.lower import Lowering
from search_spaces.rewrites.views import as_it_is


@dataclass(slots=True)
class _Model:
    """One model, shared by all of its instances."""

    packed: Path | None
    inputs: list[NDArray[np.generic]]
    reference: Outputs = ()


class LitertWorkload(LocalSession, MeasuredWorkload[InstanceBinding]):
    """A session of several models on workers that belong to the caller.

    Args:
        platform: processors, pools, and processors that only baselines use.
        facts: of the evaluator, for the fingerprint.
    """

    def __init__(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        workers: Workers,
        facts: Mapping[str, Any],
    ) -> None:
        MeasuredWorkload.__init__(self, workload, joined, platform, objective)
        LocalSession.__init__(self, platform, workers, facts)
        self._facts = dict(facts)
        self._models: dict[int, _Model] = {}
        works = self._counters.works
        self.capabilities = Capabilities(conditions=True, counters=works, deploy=True, decompose=True, outputs=True)

    def close(self) -> None:
        """Release packed weights; no worker reads them any more."""
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

    def hosted(self, found: Setting, plan: Plan, instances: Sequence[InstanceBinding]) -> WorkloadRun:
        """Return a loaded plan, which holds the instances."""
        return WorkloadRun(self, found, plan, instances)

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
        jobs = Jobs(graph, operators, cut, model.viewed, digest, packed, name if threads or own else "")
        bound = InstanceBinding(jobs, client, found.processors, self._stages, self._numbers)
        bound.set_inputs(whole.inputs)
        return bound

    def _in_a_row(self, graph: Graph, cuts: Sequence[int]) -> LoweredModel:
        """Return a model of the workload, or a decomposed one, cut into jobs that wait for each other."""
        borders = [0, *cuts, len(graph.operators)]
        stages = tuple(Stage(tuple(range(a, b)), self._reference_processor.name) for a, b in pairwise(borders))
        lowered = Lowering(graph).lower(Plan(graph.digest, stages))
        return LoweredModel(graph, lowered, as_it_is(graph, lowered.plan), tuple(range(len(stages))), ())

    def _model(self, graph: Graph) -> _Model:
        """Return a model of the workload."""
        if id(graph) not in self._models:
            self._models[id(graph)] = _Model(self._packed(graph), tensors.model_inputs(graph, INPUT_SEED))
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
        with _named(", ".join(dict.fromkeys(graph.name for graph, _ in parts))), ExitStack() as undo:
            instances = []
            for number, (client, (graph, cuts)) in enumerate(zip(found.clients, parts, strict=True)):
                instances.append(self._bound(found, client, self._in_a_row(graph, cuts), f"alone {number}"))
                undo.callback(instances[-1].close)
            executor = self.executor(found, "fifo", instances)
            outcomes = [executor.run() for _ in range(runs)]
            if executor.failures:
                raise UnavailableError(next(iter(executor.failures.values())))
            return outcomes, [instance.outputs() for instance in instances] if outputs else []

    def agreement(self, graph: Graph, outputs: Outputs, processors: Sequence[Processor], off: float = 0.0) -> Agreement:
        """Compare outputs of a model with those of the whole model on the reference processor."""
        model = self._model(graph)
        if not model.reference:
            model.reference = self.whole_outputs(graph)
        names = [processor.name for processor in processors]
        return tensors.agreement(graph, outputs, model.reference, self._tolerance(graph, names) + off)

    def process(self, processor: str) -> int | None:
        """Return the process id of a processor's worker; None where it is not running."""
        return self._workers.process_of(self._stages.process(processor))

    def inputs(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return the inputs with which a model is measured, decomposed or not."""
        return self._model(self.lowerings.origin(graph)).inputs

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:  # noqa: ARG002
        """Write ``plan.json`` and the stage files to ``folder``, run them, and compare outputs."""
        write_workload(folder, self.workload, self.joined, plan, self.platform, self.lowerings)
        names = [component.name for component in self.joined.components]
        libraries = {c.name: Path(c.custom_ops) for c in self.workload.clients if c.custom_ops}
        with WorkloadRunner(folder, custom_ops=libraries) as runner:
            for name, component in zip(names, self.joined.components, strict=True):
                runner.set_inputs(name, self.inputs(component.graph))
            runner.run()
            found = setting(self.workload, self.joined, plan, self.platform, self.lowerings)
            return worst(self.agreements(found, [runner.outputs(names[index]) for index in found.components]))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the model, or models, in errors raised meanwhile."""
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(f"{name}: {error.what}", error.hint) from error


class WorkloadRun(HostedRun[InstanceBinding]):
    """A loaded plan of a workload."""

    def __init__(
        self, session: LitertWorkload, found: Setting, plan: Plan, instances: Sequence[InstanceBinding]
    ) -> None:
        super().__init__(session, found, plan, instances)
        self.executor = session.executor(found, plan.dispatch, instances)

    def once(self) -> Outcome:
        """Run the workload once."""
        found = self.executor.run()
        if self.executor.failures:
            client, reason = next(iter(self.executor.failures.items()))
            name = self._session.joined.components[self._found.components[client]].name
            raise UnavailableError(f"{name}: {reason}")
        return found
