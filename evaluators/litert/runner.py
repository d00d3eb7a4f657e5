"""Run plans from Python, given their files alone: no search, no model.

::

    with PlanRunner("runs/vgg16/best/plan.json") as runner:
        outputs = runner.run(image)

    with WorkloadRunner("runs/robot/best") as runner:
        runner.set_inputs("detector 1", [image])
        outcome = runner.run()
        boxes = runner.outputs("detector 1")
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch
from evaluators.litert import tensors
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.deployment import (
    Deployment,
    read_deployment,
    read_workload_plan,
    started_for,
    with_custom_ops,
    with_inner_tensors,
)
from evaluators.litert.executor import Executor, InstanceBinding, Jobs
from evaluators.litert.packed import Holder, existing_packed_weights
from evaluators.litert.program import largest
from evaluators.litert.stages import StageCache, StageSource, compiled_together, failure_of_files
from evaluators.litert.workers import Arena, Workers
from evaluators.workload.outcome import Outcome
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.platform import Platform
from search_spaces.models.inputs import by_full_name, form, named_form, read_inputs
from search_spaces.rewrites.views import as_it_is

Arrays = NDArray[Any] | Sequence[NDArray[Any]] | Mapping[str, NDArray[Any]]


class _Runner:
    """Workers for a plan on disk, with the stages that they compile and the packed weights that they use."""

    def __init__(self, path: str | Path, platform: Platform, log: Path | None) -> None:
        self._closed = False
        with started_for(path):
            self._workers = Workers(platform, log)
        self._stages = StageCache(self._workers, platform)
        self._packed = Holder()

    def _weights(self, deployment: Deployment) -> Path | None:
        """Return the packed weights of a plan's model, if there are any."""
        packed = self._workers.own(self._packed.hold(existing_packed_weights(deployment.content_digest)))
        self._workers.charge(packed, *(stage.source.path for stage in deployment.stages))
        return packed

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the runner is closed", "make a new one")

    def close(self) -> None:
        """End the workers and give the memory back; a second call does nothing."""
        self._closed = True
        self._workers.close()
        self._packed.close()

    def processes(self) -> list[int]:
        """Return the process ids of the workers."""
        return self._workers.processes()

    @property
    def queued_s(self) -> float:
        """How long measurements have waited for those of other studies."""
        return self._workers.foreground.queued_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class PlanRunner(_Runner):
    """A plan's stages compiled on their processors, ready to run; close it, or use it in a ``with`` statement.

    Args:
        path: a ``plan.json`` or the folder that holds it, as ``optimize`` writes it to ``RUN/best/``.
        log: file for the runtime's own messages; none by default.
        custom_ops: a library with kernels of custom operators.

    Attributes:
        deployment: the plan as it was read.
        candidate: the loaded plan, for :func:`evaluators.sampling.measure`.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine lacks the plan's cores or accelerators, or the runtime cannot compile a stage.
    """

    def __init__(self, path: str | Path, log: Path | None = None, *, custom_ops: Path | None = None) -> None:
        self.deployment = deployment = with_custom_ops(read_deployment(Path(path)), custom_ops)
        groups = compiled_together(deployment.plan, deployment.platform, deployment.stages)
        graph, plan, stages = with_inner_tensors(deployment, groups)
        super().__init__(path, deployment.platform, log)
        self._arena: Arena | None = None
        self._streaming = False
        self._lock = threading.Lock()
        try:
            digest = deployment.content_digest
            packed = self._weights(deployment)
            operators = tuple(stage.operators for stage in plan.stages)
            source = StageSource(graph, digest, lambda _: packed)
            taken = self._stages.take_plan(source, plan, stages, operators)
            self._arena = Arena(1, largest(graph))
            self.candidate = LitertCandidate(
                graph,
                plan,
                deployment.platform,
                taken,
                workers=self._workers,
                arena=self._arena,
                number=1,
                explain=self._why,
            )
        except BaseException:
            self.close()
            raise

    def _why(self, processor: str, what: str) -> UnavailableError:
        """Return the error that names the operator for which a processor's stages failed."""
        found, deployed = UnavailableError(what), self.deployment
        if deployed.platform[processor].kind != "cpu":
            return found
        pairs = zip(deployed.stages, deployed.plan.stages, strict=True)
        return failure_of_files((model for model, stage in pairs if stage.processor == processor), found)

    @property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of each input by name; a repeated name is followed by ``:`` and its position."""
        return self._ports(self.deployment.graph.inputs)

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of each output by name."""
        return self._ports(self.deployment.graph.outputs)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Run once.

        Args:
            inputs: one array, or one per input, by position or by name, whose ``:0`` may be left out; of the shape and
                type that ``inputs`` says.

        Returns:
            Copies of the outputs by name.

        Raises:
            UsageError: an input is missing, unknown, or has another shape or type.
            UnavailableError: a stage failed or did not answer in time.
        """
        arrays = self._arrays(inputs)
        with self._lock:
            self._check_open()
            self.candidate.set_inputs(arrays)
            self.candidate.run(1)
            return dict(zip(self.outputs, self.candidate.outputs(), strict=True))

    def run_seeded(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Run once on the inputs that the search measures with."""
        deployed = self.deployment
        return self.run(list(deployed.inputs) or tensors.model_inputs(deployed.graph, seed))

    def read(self, path: Path) -> list[NDArray[Any]]:
        """Return the inputs in an ``.npy`` or ``.npz`` file.

        Raises:
            UsageError: they do not fit the plan.
        """
        graph = self.deployment.graph
        return read_inputs(path, [graph.tensors[t] for t in graph.inputs], graph.name)

    def stream(self, inputs: Iterable[Arrays]) -> Generator[dict[str, NDArray[Any]], None, None]:
        """Run an inference for each of the inputs; consecutive ones overlap, and their outputs come in the same order.

        The processors work on several inferences at once (``in_flight`` at most), so the first outputs come after
        several inputs have been taken. The runner can run nothing else meanwhile.

        Args:
            inputs: each as in :meth:`run`.

        Yields:
            Copies of the outputs by name.

        Raises:
            UsageError, UnavailableError: as in :meth:`run`.
        """
        with self._lock:
            self._check_open()
            self._streaming = True
        try:
            names = list(self.outputs)
            arrays = (self._arrays(each) for each in inputs)
            for outputs, _ in self.candidate.pipeline().stream(arrays):
                yield dict(zip(names, outputs, strict=True))
        finally:
            self._streaming = False

    @property
    def in_flight(self) -> int:
        """Largest number of inferences of a stream in progress at once."""
        return self.candidate.pipeline().how.frames

    def measure(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` times on the inputs of the last :meth:`run` (zeros before the first) and return the times (s)."""
        with self._lock:
            self._check_open()
            self.candidate.wake()
            return self.candidate.run(n, stop_above_s)

    def _check_open(self) -> None:
        super()._check_open()
        if self._streaming:
            raise UsageError("the runner runs a stream", "take all of its outputs, or close it, first")

    def _ports(self, indices: Sequence[int]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for position, index in enumerate(indices):
            tensor = self.deployment.graph.tensors[index]
            name = tensor.name if tensor.name not in found else f"{tensor.name}:{position}"
            found[name] = tensors.shape_and_dtype(tensor)
        return found

    def _arrays(self, inputs: Arrays) -> list[NDArray[Any]]:
        wanted = self.inputs
        if isinstance(inputs, Mapping):
            inputs = by_full_name(inputs, list(wanted))
            unknown = sorted(set(inputs) - set(wanted))
            missing = sorted(set(wanted) - set(inputs))
            if unknown or missing:
                raise UsageError(
                    f"inputs missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}",
                    f"the plan has: {', '.join(wanted)}",
                )
            arrays = [np.asarray(inputs[name]) for name in wanted]
        elif isinstance(inputs, np.ndarray):
            arrays = [inputs]
        elif isinstance(inputs, Sequence):
            arrays = [np.asarray(array) for array in inputs]
        else:
            raise UsageError(f"inputs are arrays, not {type(inputs).__name__}", f"the plan has: {', '.join(wanted)}")
        if len(arrays) != len(wanted):
            raise UsageError(f"{len(arrays)} inputs are given, the plan has {len(wanted)}: {', '.join(wanted)}")
        for array, (name, (shape, dtype)) in zip(arrays, wanted.items(), strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise UsageError(f"input {name!r} has shape {array.shape} and type {array.dtype}, not {shape} {dtype}")
        return arrays

    def close(self) -> None:
        """End the workers and release the memory; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._streaming:
                self.candidate.pipeline().stop()
            super().close()
            if self._arena is not None:
                self._arena.close()


class WorkloadRunner(_Runner):
    """A plan of several models on its processors, ready to run; close it, or use it in a ``with`` statement.

    A model that crashes or hangs fails alone; :attr:`failures` has the reason.

    Args:
        path: a ``plan.json`` or the folder that holds it, as ``optimize`` writes it to ``RUN/best/``.
        log: file for the runtime's own messages; none by default.
        custom_ops: client → a library with kernels of its custom operators.

    Attributes:
        files: the plan as it was read.
        names: of the instances, in order of precedence.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine lacks the plan's cores or accelerators, or the runtime cannot compile a job.
    """

    def __init__(
        self, path: str | Path, log: Path | None = None, *, custom_ops: Mapping[str, Path] | None = None
    ) -> None:
        self.files = files = read_workload_plan(Path(path))
        self.names = files.names
        super().__init__(path, files.platform, log)
        self._instances: list[InstanceBinding] = []
        numbers = count(1)
        try:
            for client, of, read in zip(files.setting.clients, files.clients, files.models, strict=True):
                library = (custom_ops or {}).get(of)
                deployment = with_custom_ops(read, library)
                together = [(deployment.plan.stages[0].processor, range(len(deployment.plan.stages)))]
                graph, plan, stages = with_inner_tensors(deployment, together)
                held = self._weights(deployment)
                digest = f"{deployment.content_digest} {deployment.graph.digest} {library}"
                source = StageSource(graph, digest, lambda _, packed=held: packed)  # type: ignore[misc]
                jobs = Jobs(source, tuple(s.operators for s in plan.stages), stages, as_it_is(graph, plan))
                self._instances.append(InstanceBinding(jobs, client, files.setting.processors, self._stages, numbers))
                self._instances[-1].set_inputs(list(deployment.inputs) or tensors.model_inputs(graph, 0))
            self._executor = Executor(files.setting, files.dispatch, self._instances, self._stages)
        except BaseException:
            self.close()
            raise

    @property
    def failures(self) -> dict[str, str]:
        """Instance → why it failed."""
        return {self.names[client]: reason for client, reason in self._executor.failures.items()}

    def set_inputs(self, name: str, arrays: Sequence[NDArray[Any]]) -> None:
        """Set the inputs of an instance's requests, one array per input, in the model's order.

        Raises:
            UsageError: there is no such instance, or an array does not fit.
        """
        instance = self._instance(name)
        graph = instance.jobs.source.graph
        ports = [graph.tensors[t] for t in graph.inputs]
        if [(a.shape, a.dtype) for a in arrays] != list(map(tensors.shape_and_dtype, ports)):
            given = ", ".join(map(form, arrays)) or "no inputs"
            raise UsageError(f"model {name!r} got {given}", f"it reads: {', '.join(map(named_form, ports))}")
        instance.set_inputs(arrays)

    def read(self, client: str, path: Path) -> None:
        """Set the inputs of all instances of a client from an ``.npy`` or ``.npz`` file.

        Raises:
            UsageError: they do not fit the model.
        """
        for of, instance in zip(self.files.clients, self._instances, strict=True):
            if of == client:
                graph = instance.jobs.source.graph
                instance.set_inputs(read_inputs(path, [graph.tensors[t] for t in graph.inputs], client))

    def run(self) -> Outcome:
        """Run the workload once: all requests of all instances, at their arrival times.

        Raises:
            UsageError: the runner is closed.
            UnavailableError: no request was answered.
        """
        self._check_open()
        return self._executor.run()

    def outputs(self, name: str) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of an instance's last request."""
        return self._instance(name).outputs()

    def _instance(self, name: str) -> InstanceBinding:
        if name not in self.names:
            raise UsageError(f"there is no instance {name!r}", f"the plan has: {', '.join(self.names)}")
        return self._instances[self.names.index(name)]

    def close(self) -> None:
        """End the workers and release the memory; a second call does nothing."""
        if not self._closed:
            for instance in self._instances:
                instance.close()
            super().close()
