"""Run a plan from Python: three lines, no search and no model needed.

::

    with PlanRunner("runs/vgg16/best/plan.json") as runner:
        outputs = runner.run(image)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch
from evaluators.litert import arena, tensors
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.compiling import compile_stages
from evaluators.litert.deployment import Deployment, read_deployment, started_for, with_custom_ops
from evaluators.litert.inner import opened, told_apart
from evaluators.litert.lanes import Lanes
from evaluators.litert.packed import Holder, existing_packed_weights
from evaluators.litert.refusals import failure
from evaluators.litert.shared import Arena
from evaluators.litert.stages import compiled_together
from search_spaces.errors import UnavailableError, UsageError
from search_spaces.graph import Graph
from search_spaces.models.inputs import read_inputs
from search_spaces.models.litert import graph_of
from search_spaces.models.stages import StageModel
from search_spaces.plan import Plan

Arrays = NDArray[Any] | Sequence[NDArray[Any]] | Mapping[str, NDArray[Any]]


class PlanRunner:
    """A plan's stages compiled on their processors, ready to run; close it, or use it in a ``with``.

    Args:
        path: a ``plan.json`` or the folder that holds it, as ``optimize`` writes it to ``RUN/best/``.
        log: where the runtime's own messages go; nowhere by default.
        custom_ops: a library with kernels of custom operators.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine lacks the plan's cores or accelerators, or the runtime refuses a stage.
    """

    def __init__(self, path: str | Path, log: Path | None = None, *, custom_ops: Path | None = None) -> None:
        self._deployment = deployment = with_custom_ops(read_deployment(Path(path)), custom_ops)
        lanes = compiled_together(deployment.plan, deployment.platform, deployment.stages)
        graph, plan, stages = told_apart(deployment, lanes)
        with started_for(path):
            self._lanes = Lanes(deployment.platform, log)
        self._packed = Holder()
        self._arena: Arena | None = None
        self._closed = self._streaming = False
        self._lock = threading.Lock()
        try:
            compiled, ports = self._compile(graph, plan, stages, lanes)
            memory = self._arena = Arena(1, arena.largest(graph))
            self._candidate = LitertCandidate(
                graph,
                plan,
                deployment.platform,
                lanes=self._lanes,
                arena=memory,
                number=1,
                compiled=compiled,
                ports=ports,
                explain=self._why,
            )
        except BaseException:
            self.close()
            raise

    def _compile(
        self, graph: Graph, plan: Plan, stages: Sequence[StageModel], lanes: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[Sequence[int], Sequence[int]]]]:
        """Compile the stages of each lane together, as the search does; return what each is there, and its tensors."""
        deployment = self._deployment
        packed = self._packed.hold(existing_packed_weights(deployment.content_digest))
        compiled: dict[int, tuple[int, int]] = {}
        ports: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        for number, (lane, indices) in enumerate(lanes, 1):
            processor = deployment.platform[lane]
            models = opened(graph, processor, [plan.stages[i].operators for i in indices], [stages[i] for i in indices])
            compile_stages(self._lanes, processor, number, models, packed)
            for signature, (index, model) in enumerate(zip(indices, models, strict=True)):
                compiled[index] = (number, signature)
                ports[index] = (model.inputs, model.outputs)
        return compiled, ports

    def _why(self, lane: str, what: str) -> UnavailableError:
        """Return the error that names the operator for which a lane's stages failed."""
        deployed = self._deployment
        for index, stage in enumerate(deployed.stages):
            if deployed.plan.stages[index].processor == lane and deployed.platform[lane].kind == "cpu":
                part = graph_of(stage.source, f"stage {index}")
                found = failure(part, range(len(part.operators)), "")
                if found.hint:
                    return UnavailableError(f"stage {index}: {found.what}", found.hint)
        return UnavailableError(what)

    @property
    def deployment(self) -> Deployment:
        """The plan as it was read."""
        return self._deployment

    @property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of each input by name; a name that occurs twice is followed by ``:`` and its position."""
        return self._ports(self._deployment.graph.inputs)

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of each output by name."""
        return self._ports(self._deployment.graph.outputs)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Run once.

        Args:
            inputs: one array, or one per input, by position or by name; of the shape and type that ``inputs`` says.

        Returns:
            Copies of the outputs by name.

        Raises:
            UsageError: an input is missing, unknown, or has another shape or type.
            UnavailableError: a stage failed or did not answer in time.
        """
        arrays = self._arrays(inputs)
        with self._lock:
            self._check_open()
            self._candidate.set_inputs(arrays)
            self._candidate.run(1)
            return dict(zip(self.outputs, self._candidate.outputs(), strict=True))

    def run_seeded(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Run once on the inputs that the search measures with."""
        deployed = self._deployment
        return self.run(list(deployed.inputs) or tensors.model_inputs(deployed.graph, seed))

    def read(self, path: Path) -> list[NDArray[Any]]:
        """Return the inputs that an ``.npy`` or ``.npz`` file holds.

        Raises:
            UsageError: it holds no inputs that fit the plan.
        """
        graph = self._deployment.graph
        return read_inputs(path, [graph.tensors[t] for t in graph.inputs])

    def stream(self, inputs: Iterable[Arrays]) -> Generator[dict[str, NDArray[Any]], None, None]:
        """Run an inference for each of the inputs; consecutive ones overlap, and their outputs come in order.

        The plan's lanes work on as many inferences as they can hold (``in_flight``), so the first outputs come after
        some more inputs were taken. Nothing else can be run meanwhile.

        Args:
            inputs: each as :meth:`run` takes it.

        Yields:
            Copies of the outputs by name.

        Raises:
            UsageError, UnavailableError: as :meth:`run`.
        """
        with self._lock:
            self._check_open()
            self._streaming = True
        try:
            names = list(self.outputs)
            arrays = (self._arrays(each) for each in inputs)
            for outputs, _ in self._candidate.pipeline().stream(arrays):
                yield dict(zip(names, outputs, strict=True))
        finally:
            self._streaming = False

    @property
    def in_flight(self) -> int:
        """How many inferences of a stream are under way at most."""
        return self._candidate.pipeline().how.frames

    def measure(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` times on the inputs of the last :meth:`run` (zeros before any) and return the times."""
        with self._lock:
            self._check_open()
            self._candidate.wake()
            return self._candidate.run(n, stop_above_s)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the runner is closed", "make a new one")
        if self._streaming:
            raise UsageError("the runner runs a stream", "take all of its outputs, or close it, first")

    @property
    def candidate(self) -> LitertCandidate:
        """The loaded plan, for :func:`evaluators.sampling.measure`."""
        return self._candidate

    def _ports(self, indices: Sequence[int]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for position, index in enumerate(indices):
            tensor = self._deployment.graph.tensors[index]
            name = tensor.name if tensor.name not in found else f"{tensor.name}:{position}"
            place = tensors.shape_and_dtype(tensor)
            found[name] = place
        return found

    def _arrays(self, inputs: Arrays) -> list[NDArray[Any]]:
        wanted = self.inputs
        if isinstance(inputs, Mapping):
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
        """End the lanes and give the memory back; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._streaming:
                self._candidate.pipeline().stop()
            self._lanes.close()
            self._packed.close()
            if self._arena is not None:
                self._arena.close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
