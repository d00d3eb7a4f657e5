"""A model compiled in a measuring process, with buffers of its own; its latency, and its kernels' by the profiler."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from evaluators.litert.worker.execution import pinned_pool
from search_spaces.errors import UnavailableError

PROFILING = {"runtime_options_string": {"enable_profiling": True}}

_KERNEL_EVENTS = {2, 8}  # litert_profiler_event.h: an operator of the interpreter, one of a delegate
_DELEGATE = "TfLiteXNNPackDelegate"
_ALIGNMENT, _SLACK = 64, 192


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_size_t), ("used", c_size_t), ("private", c_size_t))


class _Event(ctypes.Structure):
    # litert_profiler_event.h
    _fields_ = (
        ("tag", c_char_p),
        ("type", c_int),
        ("start_us", c_uint64),
        ("elapsed_us", c_uint64),
        ("before", _Memory),
        ("after", _Memory),
        ("index", c_uint64),
        ("subgraph", c_uint64),
        ("source", c_int),
    )


class Loaded:
    """A compiled model with buffers of its own.

    Args:
        runtime: :class:`~evaluators.litert.worker.capi.Runtime`, started.
        cores: what its threads are pinned to.
        settings: as :func:`~evaluators.litert.settings.compile_settings` returns them; with :data:`PROFILING`,
            :meth:`events` tells of its kernels.
    """

    def __init__(self, runtime: Any, path: str, settings: dict[str, Any], cores: Sequence[int]) -> None:
        self._runtime = runtime
        with Path(path).open("rb") as file, pinned_pool(cores, settings["xnnpack"]["num_threads"]):
            self._compiled = runtime.compile(b"", [file.fileno()], 1, settings)
        self._profiler: c_void_p | None = None
        self._kept: list[Any] = []
        self._bound: list[c_void_p] = []
        self._inputs = self._buffers(self._compiled.ports[0][0])
        self._outputs = self._buffers(self._compiled.ports[0][1])

    def _buffers(self, kinds: Any) -> Any:
        found = []
        for kind in kinds:
            count = 8
            for place in range(kind.layout.bits & 127):
                count *= kind.layout.dimensions[place]
            memory = ctypes.create_string_buffer(count + _SLACK)
            address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
            self._kept.append(memory)
            self._bound.append(self._runtime.bind(kind, address, _nbytes(kind)))
            found.append(self._bound[-1].value)
        return (c_void_p * len(found))(*found)

    def run(self) -> float:
        """Run once and return what it took, in seconds."""
        begin = time.perf_counter()
        inputs, outputs = self._inputs, self._outputs
        status = self._compiled.run(self._compiled.handle, 0, len(inputs), inputs, len(outputs), outputs)
        took_s = time.perf_counter() - begin
        if status:
            raise UnavailableError(f"LiteRT failed: status {status}")
        return took_s

    def usual_s(self, runs: int) -> float:
        """Return what a run usually takes, from some of them."""
        return middle([[self.run()] for _ in range(runs)])[0]

    def close(self) -> None:
        """Give back what was compiled, and its buffers."""
        for buffer in self._bound:
            self._runtime.unbind(buffer)
        self._runtime.release(self._compiled)
        self._kept.clear()

    def events(self) -> list[tuple[str, float]]:
        """Run once and return the kernels that ran with their seconds."""
        call = self._runtime.call
        if self._profiler is None:
            self._profiler = c_void_p()
            call("LiteRtCompiledModelGetProfiler", self._compiled.handle, byref(self._profiler))
            if not self._profiler:
                raise UnavailableError("the runtime has no profiler")
        call("LiteRtResetProfiler", self._profiler)
        call("LiteRtStartProfiler", self._profiler)
        self.run()
        call("LiteRtStopProfiler", self._profiler)
        count = c_int()
        call("LiteRtGetNumProfilerEvents", self._profiler, byref(count))
        array = (_Event * count.value)()
        call("LiteRtGetProfilerEvents", self._profiler, count, array)
        return [
            ((e.tag or b"").decode(), e.elapsed_us * 1e-6)
            for e in array
            if e.type in _KERNEL_EVENTS and e.tag != _DELEGATE.encode()
        ]


def middle(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of the runs that are neither among the quickest quarter nor among the slowest, by their sums.

    Of three runs or more one at least is left out at either end: it may have been disturbed.

    A model and its kernels are averaged alike, so that the kernels' means add up to the model's whatever the number of
    runs; the least of each kernel, or the upper of two runs, would be off by a tenth where runs are few.

    Args:
        runs: of each what its kernels took, or what it took alone.
    """
    left_out = max(len(runs) // 4, min(1, (len(runs) - 1) // 2))
    kept = sorted(runs, key=sum)[left_out : len(runs) - left_out]
    return [sum(values) / len(kept) for values in zip(*kept, strict=True)]


def _nbytes(kind: Any) -> int:
    size = {1: 4, 2: 4, 4: 8, 6: 1, 7: 2, 9: 1, 10: 2}.get(kind.element_type, 4)  # litert_model_types.h
    for place in range(kind.layout.bits & 127):
        size *= kind.layout.dimensions[place]
    return size
