"""Time the kernels of models within the whole models, by the runtime's own profiler; on CPUs.

A model that is cut at every operator behaves differently: paddings are no longer fused with the convolutions behind
them, and sums are no longer computed in place. XNNPACK and OpenVINO report the times of their kernels within the whole
model. They are measured in a separate process, pinned to the processor's cores, between runs of a reference network.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evaluators.litert.settings import compile_settings
from evaluators.litert.worker.execution import pinned_pool
from evaluators.litert.worker.runtimes import OPENVINO, runtime_of
from evaluators.own_process import output_of, own_process
from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Processor

PROFILING = {"runtime_options_string": {"enable_profiling": True}}

TIMING = 4
"""Version of how kernels and transfers are timed; increase it when times differ from those in a log."""

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
        cores: its threads are pinned to these.
        settings: as :func:`~evaluators.litert.settings.compile_settings` returns them; with :data:`PROFILING`,
            :meth:`kernels` returns its kernels.
    """

    blocks = 4
    """In how many blocks kernels are best timed, each between runs of the reference network."""

    def __init__(self, runtime: Any, path: str, settings: dict[str, Any], cores: Sequence[int]) -> None:
        self._runtime = runtime
        with Path(path).open("rb") as file:
            self._compiled = self._compile(file.fileno(), settings, cores)
        self._profiler: c_void_p | None = None
        self._kept: list[Any] = []
        self._bound: list[c_void_p] = []
        self._inputs = self._buffers(self._compiled.ports[0][0])
        self._outputs = self._buffers(self._compiled.ports[0][1])

    def _compile(self, file: int, settings: dict[str, Any], cores: Sequence[int]) -> Any:
        with pinned_pool(cores, settings["xnnpack"]["num_threads"]):
            return self._runtime.compile(b"", [file], 1, settings)

    def _buffers(self, kinds: Any) -> Any:
        found = []
        for kind in kinds:
            nbytes = self._nbytes(kind)
            memory = ctypes.create_string_buffer(2 * nbytes + _SLACK)
            address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
            self._kept.append(memory)
            self._bound.append(self._runtime.bind(kind, address, nbytes))
            found.append(self._bound[-1].value)
        return (c_void_p * len(found))(*found)

    def _nbytes(self, kind: Any) -> int:
        size = {1: 4, 2: 4, 4: 8, 6: 1, 7: 2, 9: 1, 10: 2}.get(kind.element_type, 4)  # litert_model_types.h
        return int(size * math.prod(kind.layout.dimensions[: kind.layout.bits & 127]))

    def run(self) -> float:
        """Run once and return the latency (s)."""
        begin = time.perf_counter()
        inputs, outputs = self._inputs, self._outputs
        status = self._compiled.run(self._compiled.handle, 0, len(inputs), inputs, len(outputs), outputs)
        took_s = time.perf_counter() - begin
        if status:
            raise UnavailableError(f"the runtime failed: status {status}")
        return took_s

    def usual_s(self, runs: int) -> float:
        """Return the usual latency (s) from ``runs`` runs (:func:`middle`)."""
        return middle([[self.run()] for _ in range(runs)])[0]

    def close(self) -> None:
        """Release the compiled model and its buffers."""
        for buffer in self._bound:
            self._runtime.unbind(buffer)
        self._runtime.release(self._compiled)
        self._kept.clear()

    def kernels(self, runs: int) -> list[tuple[str, float]]:
        """Run and return name and usual time (s) of each kernel, in execution order."""
        each = [self._events() for _ in range(runs)]
        took_s = middle([[took for _, took in run] for run in each])
        return [(name, took + RESOLUTION_S / 2) for (name, _), took in zip(each[0], took_s, strict=True)]

    def _events(self) -> list[tuple[str, float]]:
        """Run once and return name and time (s) of each kernel that ran."""
        call = self._runtime.call
        if self._profiler is None:
            self._profiler = self._runtime.made("LiteRtCompiledModelGetProfiler", self._compiled.handle)
            if not self._profiler:
                raise UnavailableError("the runtime has no profiler")
        call("LiteRtResetProfiler", self._profiler)
        call("LiteRtStartProfiler", self._profiler)
        self.run()
        call("LiteRtStopProfiler", self._profiler)
        count = self._runtime.made("LiteRtGetNumProfilerEvents", self._profiler, kind=c_int)
        array = (_Event * count.value)()
        call("LiteRtGetProfilerEvents", self._profiler, count, array)
        return [
            ((e.tag or b"").decode(), e.elapsed_us * 1e-6)
            for e in array
            if e.type in _KERNEL_EVENTS and e.tag != _DELEGATE.encode()
        ]


class LoadedOpenVino(Loaded):
    """A float32 model compiled by OpenVINO; its kernels have OpenVINO's type names, and fused ones the time 0."""

    blocks = 1  # a report's rounding counts less in one long block
    _runs = 0

    def _compile(self, file: int, settings: dict[str, Any], cores: Sequence[int]) -> Any:  # noqa: ARG002
        return self._runtime.compile(b"", [file], 1, settings)

    def _nbytes(self, kind: Any) -> int:
        return int(4 * math.prod(kind.shape))

    def run(self) -> float:
        """Run once and return the latency (s)."""
        self._runs += 1
        return super().run()

    def kernels(self, runs: int) -> list[tuple[str, float]]:
        """Return kernels and times, as :meth:`Loaded.kernels`; those that ran take at least a microsecond.

        OpenVINO reports means over all runs since it compiled the model, the slow first one included, so that those of
        the last ``runs`` follow from two reports. What disturbed runs is taken from all kernels alike. Times and their
        means are rounded down to whole microseconds.
        """
        before, first = self._runtime.kernels(self._compiled), self._runs
        each = [self.run() for _ in range(runs)]
        after, share = self._runtime.kernels(self._compiled), middle([[took] for took in each])[0] / math.fsum(each)
        return [
            (name, max(0.0, self._runs * last_s - first * first_s) * share + RESOLUTION_S if first_s + last_s else 0.0)
            for (name, last_s), (_, first_s) in zip(after, before, strict=True)
        ]


def middle(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each kernel over the runs, without the fastest and slowest quarter of runs (by their sums).

    Of three runs or more at least one is left out at either end: it may have been disturbed.

    A model and its kernels are averaged alike, so that the kernels' means add up to the model's whatever the number of
    runs; with few runs, the minimum of each kernel, or the slower of two runs, would be off by a tenth.

    Args:
        runs: for each run the times of its kernels, or its total time alone.
    """
    left_out = max(len(runs) // 4, min(1, (len(runs) - 1) // 2))
    kept = sorted(runs, key=sum)[left_out : len(runs) - left_out]
    return [sum(values) / len(kept) for values in zip(*kept, strict=True)]


Load = Callable[[str, dict[str, Any], Sequence[int]], Loaded]
_LIMIT_S = 120.0
RESOLUTION_S = 1e-6  # the runtime reports whole microseconds, rounded down
_REFERENCE_S = 0.006


@dataclass(frozen=True, slots=True)
class Kernels:
    """Times of a model's kernels within the model.

    Attributes:
        names: the runtime's names of the kernels, in execution order.
        kernel_s: mean time of each (s).
        reference_s: time of the reference network meanwhile.
    """

    names: tuple[str, ...]
    kernel_s: tuple[float, ...]
    reference_s: float


def profile_kernels(
    model: Path, reference: Path, processor: Processor, packed: Path | None = None, *, seconds: float = 0.25
) -> Kernels:
    """Return the times of a model file's kernels on a CPU processor, measured for about ``seconds``.

    Args:
        reference: file of the reference network.
        packed: file of the model's packed weights, written where it does not exist; without it they stay in the
            process's own memory, unlike where plans run.

    Raises:
        UnavailableError: the runtime refuses the model, or its process failed.
    """
    asked = {
        "model": [str(model), compile_settings(processor, packed)],
        "pack": packed is not None and not packed.exists(),
        "runtime": runtime_of(processor),
        "reference": [str(reference), compile_settings(processor, None)],
        "cores": list(processor.options["cores"]),
        "seconds": seconds,
    }
    command = own_process("evaluators.cost_model.calibrate_kernels", json.dumps(asked))
    try:
        found = json.loads(output_of(command, _LIMIT_S).splitlines()[-1])
    except UnavailableError as error:
        raise UnavailableError(f"{model}: its kernels cannot be timed: {error.what}") from error
    return Kernels(tuple(found["names"]), tuple(found["kernel_s"]), found["reference_s"])


def main() -> None:
    """Measure as the argument says and print the result as JSON; runs in a process of its own."""
    asked = json.loads(sys.argv[1])
    print(json.dumps(_measured(asked, *loader(asked))), flush=True)  # noqa: T201 - the parent reads it


def loader(asked: dict[str, Any]) -> tuple[Load, Loaded]:
    """Pin this process, and return a function that loads models on the runtime, and the reference network."""
    os.sched_setaffinity(0, asked["cores"])
    path, settings = asked["reference"]
    load: Load
    if asked.get("runtime") == OPENVINO:
        from evaluators.litert.worker.openvino import OpenVino

        load = partial(LoadedOpenVino, OpenVino())
    else:
        from evaluators.litert.worker.capi import Runtime

        runtime = Runtime()
        runtime.start(settings["accelerators"])
        load = partial(Loaded, runtime)
    return load, load(path, settings, asked["cores"])


def watching(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with which the runtime also reports the times of its kernels."""
    if "properties" in settings:
        return settings | {"properties": settings["properties"] | {"PERF_COUNT": "YES"}}
    return settings | PROFILING


def _measured(asked: dict[str, Any], load: Load, reference: Loaded) -> dict[str, Any]:
    path, settings = asked["model"]
    if asked["pack"]:
        load(path, settings, asked["cores"])
    watched = load(path, watching(settings), asked["cores"])
    watched.run()
    beats = max(3, int(_REFERENCE_S / reference.usual_s(3)))
    least, most = (count // watched.blocks for count in (8, 240))
    runs = int(min(max(asked["seconds"] / watched.blocks / max(1e-6, watched.usual_s(3)), least), most))
    clocks: list[float] = []
    rounds = []
    for _ in range(watched.blocks):
        before = reference.usual_s(beats)
        watched.run()
        found = watched.kernels(runs)
        after = reference.usual_s(beats)
        clocks += [before, after]
        rounds.append([took / (before + after) * 2 for _, took in found])
    clock_s = statistics.median(clocks)
    return {
        "names": [name for name, _ in found],
        "kernel_s": [statistics.fmean(took) * clock_s for took in zip(*rounds, strict=True)],
        "reference_s": clock_s,
    }
