"""An instance of a model on the device: weights and buffers of its own, and each of its jobs captured as a graph.

All jobs of an instance share one pool of memory: they run one after another, in the order in which they were captured.
The first job begins with the copy of the inputs from pinned memory, and the last one ends with the copy of the outputs
to it, so a request is over when its result can be read by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evaluators.cuda.lowering import Choose, Job, lower
from evaluators.cuda.operators import as_in_file, held
from evaluators.cuda.settings import torch_module
from evaluators.cuda.tuning import captured, warm
from evaluators.cuda.weights import Weights

Arrays = Sequence[NDArray[np.generic]]


class Recorder(Protocol):
    """Makes of a function what streams start (:mod:`evaluators.cuda.streams`)."""

    def __call__(self, call: Callable[[], None]) -> Any:
        """Run a function once or twice, and return what does the same again."""
        ...


def as_function(call: Callable[[], None]) -> Any:
    """Return a function as what threads start."""
    call()
    return call


class Capturing:
    """Captures functions as CUDA graphs, all in one pool of memory.

    Args:
        stream: what is captured there uses the workspace that cuBLAS keeps for it. What may run at the same time must
            therefore have been captured on streams of its own.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch_module().cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], None]) -> Any:
        """See :class:`Recorder`."""
        warm(self._stream, call, 2)
        return captured(self._stream, call, self._pool)


class Instance:
    """See the module.

    Args:
        jobs: operators of each, and how its ways to compute are chosen (:func:`~evaluators.cuda.lowering.lower`).
        entered: called before a job is made and captured, with its number.
        recorder: what the jobs become.

    Raises:
        UnavailableError: an operator cannot be computed.
        ModelError: the model's file cannot be read.
    """

    def __init__(
        self,
        weights: Weights,
        jobs: Sequence[tuple[Sequence[int], Choose]],
        recorder: Recorder,
        entered: Callable[[int], None],
    ) -> None:
        graph, self._weights = weights.graph, weights
        gpu = weights.device != "cpu"
        self._outside = (
            [self._buffer(t, pinned=gpu) for t in graph.inputs],
            [self._buffer(t, pinned=gpu) for t in graph.outputs],
        )
        device = weights.device
        self._values: dict[int, Any] = {
            t: held(torch_module().zeros(graph.tensors[t].shape, device=device), len(graph.tensors[t].shape))
            for t in graph.inputs
        }
        self._jobs: list[Job] = []  # the constants that graphs read and nobody else has
        self.work: list[Any] = []
        """What streams start, job by job."""
        for place, (operators, choose) in enumerate(jobs):
            entered(place)
            job = lower(weights, operators, choose, gpu=gpu)
            self._jobs.append(job)
            self.work.append(recorder(self._call(job, first=place == 0, last=place == len(jobs) - 1)))

    def _buffer(self, tensor: int, *, pinned: bool) -> Any:
        return torch_module().zeros(self._weights.graph.tensors[tensor].shape, pin_memory=pinned)

    def _call(self, job: Job, *, first: bool, last: bool) -> Callable[[], None]:
        graph, values = self._weights.graph, self._values
        given, results = self._outside

        def call() -> None:
            if first:
                for tensor, array in zip(graph.inputs, given, strict=True):
                    as_in_file(values[tensor]).copy_(array, non_blocking=True)
            inside = {t: values[t] for t in job.inputs}
            job.run(inside)
            for tensor in job.outputs:
                values[tensor] = inside[tensor]
            if last:
                for tensor, array in zip(graph.outputs, results, strict=True):
                    array.copy_(as_in_file(values[tensor]), non_blocking=True)

        return call

    def set_inputs(self, arrays: Arrays) -> None:
        """Give it the inputs of its requests, and spoil its outputs."""
        for buffer, array in zip(self._outside[0], arrays, strict=True):
            buffer.numpy()[...] = array
        for buffer in self._outside[1]:
            buffer.numpy()[...] = np.nan

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of the last request."""
        return [buffer.numpy().copy() for buffer in self._outside[1]]
