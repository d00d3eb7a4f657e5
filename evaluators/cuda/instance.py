"""An instance of a model on the device: its jobs captured as CUDA graphs, its kernels chosen by timing.

Jobs that run one after another, in the order in which they were captured, share one memory pool; where some may run in
parallel, each has its own. A job that is the first to read some inputs begins with their copy from pinned memory, and
one that writes outputs ends with their copy to it, so a request is over when the host can read its result.

For each convolution and matrix product the fastest variant on this GPU is found by timing it, on as many streams as
will be busy. A variant that fails, or whose error exceeds what the precision explains, is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cuda.devices import torch_module
from evaluators.cuda.kernels import PLAIN, Call, Conv, Dense
from evaluators.cuda.lowering import Choose, Job, Weights, as_in_file, held, lower
from evaluators.cuda.streamed import Staging
from search_spaces.core.errors import UnavailableError

_REPEATS, _ROUNDS = 6, 3
_OFF = 2e-2  # relative to the largest value, TF32 compared with TF32


class Tuning:
    """Chooses the fastest variants of kernels, and remembers its choices.

    Args:
        precision: part of the key of a choice.
        busy: number of streams that compute the same at once while a variant is timed.
        known: signature → variant, from an earlier session on this device.
    """

    def __init__(self, precision: str, busy: int, known: Mapping[str, str] | None = None) -> None:
        self._key = f"{precision} x{busy} "
        self._busy = max(1, busy)
        self._streams: list[Any] = []
        self.chosen: dict[str, str] = dict(known or {})
        self.times_s: dict[str, dict[str, float]] = {}
        """Signature → variant → seconds, of those timed here."""

    def __call__(self, site: Conv | Dense) -> str:
        """Return the fastest variant's name (:data:`~evaluators.cuda.lowering.Choose`)."""
        key = self._key + site.signature
        ways = site.variants(gpu=True)
        if self.chosen.get(key) in ways:
            return self.chosen[key]
        times = self._timed(site, ways)
        self.times_s[key] = times
        self.chosen[key] = min(times, key=lambda way: times[way]) if times else PLAIN
        return self.chosen[key]

    def _timed(self, site: Conv | Dense, ways: Mapping[str, Call]) -> dict[str, float]:
        given = _example(site)
        wanted = ways[PLAIN](*given)
        largest = float(wanted.abs().max())
        times: dict[str, float] = {}
        for name, call in ways.items():
            try:
                off = float((call(*given) - wanted).abs().max())
                if not off <= _OFF * max(largest, 1e-30):
                    continue
                times[name] = self._seconds(lambda call=call: call(*given))  # type: ignore[misc]
            except Exception:  # noqa: BLE001, S112 - PyTorch and Triton raise many types where a kernel does not exist
                continue
        return times

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Return the time of one call (s) while ``busy`` streams make it at once."""
        torch = torch_module()
        streams = self._streams = self._streams or [torch.cuda.Stream() for _ in range(self._busy)]
        graphs = []
        for stream in streams:
            warm(stream, call)
            graphs.append(captured(stream, lambda: [call() for _ in range(_REPEATS)]))
        found = []
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(2):
                for stream, graph in zip(streams, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begin) / (2 * _REPEATS * self._busy))
        return min(found)


def warm(stream: Any, call: Callable[[], Any], times: int = 1) -> None:
    """Run a function on a stream before it is captured, so that libraries load and select their kernels."""
    torch = torch_module()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(stream: Any, call: Callable[[], Any], pool: Any = None) -> Any:
    """Capture the kernels that a function launches as a CUDA graph; the function must have run on this stream before.

    PyTorch's own context manager empties its memory cache each time, which takes as long as everything else.

    Args:
        pool: memory pool, from :func:`torch.cuda.graph_pool_handle`.
    """
    torch = torch_module()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _example(site: Conv | Dense) -> tuple[Any, ...]:
    """Return arguments for one call: an image, and a value to add where the site adds one; or vectors."""
    torch = torch_module()
    device = site.weight.device
    if isinstance(site, Dense):
        return (torch.randn((site.rows, site.weight.shape[1]), device=device),)
    image = torch.randn(site.image, device=device).contiguous(memory_format=torch.channels_last)
    if not site.adds:
        return (image,)
    shape = (site.image[0], site.weight.shape[0], *site.output)
    return image, torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)


Arrays = Sequence[NDArray[np.generic]]


def joined(arrays: Arrays) -> bytes:
    """Return the bytes of arrays, concatenated, each in C order."""
    return b"".join(a.tobytes() for a in arrays)


def apart(data: bytes, shapes: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Return the float32 arrays that :func:`joined` concatenated, without a copy."""
    found, begin = [], 0
    for shape in shapes:
        count = int(np.prod(shape))
        found.append(np.frombuffer(data, np.float32, count, begin).reshape(shape))
        begin += 4 * count
    return found


Recorder = Callable[[Callable[[], None]], Any]
"""Runs a function once or twice, and returns an object that repeats it when a stream starts it."""


def as_function(call: Callable[[], None]) -> Any:
    """Run a function once and return it: threads start functions as they are."""
    call()
    return call


class Launched:
    """Repeats a function that launches kernels, one by one; it was run once."""

    def __init__(self, call: Callable[[], None]) -> None:
        call()
        torch_module().cuda.synchronize()
        self.replay = call


class Capturing:
    """Captures functions as CUDA graphs, all in one memory pool.

    Args:
        stream: the graphs use the workspace that cuBLAS keeps for this stream; graphs that may run at the same time
            must therefore be captured on different streams.
    """

    def __init__(self, stream: Any) -> None:
        torch = torch_module()
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        # PyTorch refuses a pool whose graphs are all gone.
        self._kept = captured(stream, lambda: torch.zeros(1, device="cuda"), self._pool)

    def __call__(self, call: Callable[[], None]) -> Any:
        """Capture a function (:data:`Recorder`)."""
        warm(self._stream, call, 2)
        return captured(self._stream, call, self._pool)


class Instance:
    """A model whose jobs are captured as CUDA graphs.

    Args:
        jobs: operators of each, and the function that chooses its kernels (:func:`~evaluators.cuda.lowering.lower`).
        entered: called with a job's number before the job is made and captured.
        recorder: returns the recorder for a job, given its number.
        after: for each job a bit set of the jobs that it waits for; () where each waits for the one before it.
        plain: whether values are NCHW in memory, and kernels PyTorch's own.

    Raises:
        UnavailableError: an operator cannot be computed.
        ModelError: the model's file cannot be read.
    """

    def __init__(
        self,
        weights: Weights,
        jobs: Sequence[tuple[Sequence[int], Choose]],
        recorder: Callable[[int], Recorder],
        entered: Callable[[int], None],
        after: Sequence[int] = (),
        *,
        plain: bool = False,
    ) -> None:
        graph, self._weights = weights.graph, weights
        gpu = weights.device != "cpu"
        self._outside = (
            [self._buffer(t, pinned=gpu) for t in graph.inputs],
            [self._buffer(t, pinned=gpu) for t in graph.outputs],
        )
        device = weights.device
        self._staging = Staging(device) if weights.streams else None
        if self._staging is not None and after:
            raise UnavailableError(
                "branches and splits do not run side by side where memory is limited", "use --allow cuts"
            )
        self._values: dict[int, Any] = {
            t: held(torch_module().zeros(graph.tensors[t].shape, device=device), len(graph.tensors[t].shape))
            for t in graph.inputs
        }
        if plain:
            self._values = {t: value.contiguous() for t, value in self._values.items()}
        self._jobs: list[Job] = []  # keeps the constants alive whose addresses the graphs hold
        self.work: list[Any] = []
        """For each job the object that a stream starts."""
        copied: list[set[int]] = []  # for each job the inputs that are on the device once it has begun
        for place, (operators, choose) in enumerate(jobs):
            entered(place)
            job = lower(weights, operators, choose, gpu=gpu and not plain, first=plain, staging=self._staging)
            self._jobs.append(job)
            needs = after[place] if after else (1 << place) - 1
            there = {t for other, known in enumerate(copied) if needs >> other & 1 for t in known}
            reads = set(job.inputs).intersection(graph.inputs) - there
            copied.append(there | reads)
            writes = [t for t in graph.outputs if t in job.outputs or (t in graph.inputs and t in reads)]
            self.work.append(recorder(place)(self._call(job, sorted(reads), writes)))

    def _buffer(self, tensor: int, *, pinned: bool) -> Any:
        return torch_module().zeros(self._weights.graph.tensors[tensor].shape, pin_memory=pinned)

    def _call(self, job: Job, reads: Sequence[int], writes: Sequence[int]) -> Callable[[], None]:
        """Return the function that runs a job.

        Args:
            reads, writes: inputs that it copies to the device first, outputs that it copies back at the end.
        """
        graph, values = self._weights.graph, self._values
        given = [(t, self._outside[0][graph.inputs.index(t)]) for t in reads]
        results = [(t, self._outside[1][i]) for i, t in enumerate(graph.outputs) if t in writes]

        def call() -> None:
            if self._staging is not None:
                self._staging.begin()
            for tensor, array in given:
                as_in_file(values[tensor]).copy_(array, non_blocking=True)
            inside = {t: values[t] for t in job.inputs}
            job.run(inside)
            for tensor in job.outputs:
                values[tensor] = inside[tensor]
            for tensor, array in results:
                array.copy_(as_in_file(values[tensor]), non_blocking=True)

        return call

    def set_inputs(self, arrays: Arrays) -> None:
        """Set the inputs of its requests, and overwrite its outputs."""
        for buffer, array in zip(self._outside[0], arrays, strict=True):
            buffer.numpy()[...] = array
        for buffer in self._outside[1]:
            buffer.numpy()[...] = np.nan

    def outputs(self) -> list[NDArray[np.generic]]:
        """Return copies of the outputs of the last request."""
        return [buffer.numpy().copy() for buffer in self._outside[1]]
