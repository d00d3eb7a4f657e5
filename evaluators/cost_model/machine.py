"""Time the operators of a model inside the whole of it, by the runtime's own profiler; on CPUs.

A model that is cut at every operator is not the model: paddings are no longer part of the convolutions behind them, and
sums are no longer made in place. XNNPACK tells what each of its kernels takes within the whole. That is measured in a
process of its own, pinned to the lane's cores, in rounds between runs of a reference network.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.litert.settings import compile_settings
from search_spaces.errors import UnavailableError
from search_spaces.platform import Processor

_ROOT = str(Path(__file__).parents[2])
_PROGRAM = """
import sys
root = sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
from evaluators.cost_model.machine import main
main()
"""
_LIMIT_S = 120.0
_KERNEL_EVENTS = {2, 8}  # litert_profiler_event.h: an operator of the interpreter, one of a delegate
_DELEGATE = "TfLiteXNNPackDelegate"
_RESOLUTION_S = 1e-6  # times are given in whole microseconds, rounded down
_ALIGNMENT, _SLACK = 64, 192


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model's kernels take within it.

    Attributes:
        names: of the kernels as the runtime calls them, in the order in which they run.
        kernel_s: mean seconds of each.
        whole_s: of the whole model without the profiler.
        profiled_s: of the whole model with it.
        reference_s: of the reference network meanwhile.
        rounds_s: ``whole_s`` of each round, as multiples of the reference times ``reference_s``.
    """

    names: tuple[str, ...]
    kernel_s: tuple[float, ...]
    whole_s: float
    profiled_s: float
    reference_s: float
    rounds_s: tuple[float, ...]


def profile_kernels(
    model: Path, reference: Path, processor: Processor, packed: Path | None = None, *, seconds: float = 0.25
) -> Kernels:
    """Return what the kernels of a model file take on a CPU lane, in about ``2 * seconds``.

    Args:
        reference: file of the reference network.
        packed: where the model's packed weights lie, or are to lie; without it they stay in the process's own memory,
            which is not how plans run.

    Raises:
        UnavailableError: the runtime refuses the model, or its process failed.
    """
    asked = {
        "model": str(model),
        "reference": str(reference),
        "cores": list(processor.options["cores"]),
        "settings": compile_settings(processor, packed),
        "reference_settings": compile_settings(processor, None),
        "seconds": seconds,
        "pack": packed is not None and not packed.exists(),
    }
    command = [sys.executable, "-P", "-c", _PROGRAM, _ROOT, json.dumps(asked)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{model}: was not timed within {_LIMIT_S:g} s") from error
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise UnavailableError(f"{model}: its kernels cannot be timed: {reason}")
    found = json.loads(lines[-1])
    return Kernels(
        tuple(found["names"]),
        tuple(found["kernel_s"]),
        found["whole_s"],
        found["profiled_s"],
        found["reference_s"],
        tuple(found["rounds_s"]),
    )


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


class _Loaded:
    """A compiled model with buffers of its own, in the measuring process."""

    def __init__(self, runtime: Any, path: str, settings: dict[str, Any]) -> None:
        self._runtime = runtime
        with Path(path).open("rb") as file:
            self._compiled = runtime.compile(b"", [file.fileno()], 1, settings)
        self._kept: list[Any] = []
        self._inputs = self._buffers(self._compiled.ports[0][0])
        self._outputs = self._buffers(self._compiled.ports[0][1])
        self._call = runtime.function("LiteRtRunCompiledModel")
        self._call.argtypes = [c_void_p, c_size_t, c_size_t, c_void_p, c_size_t, c_void_p]

    def _buffers(self, kinds: Any) -> Any:
        found = []
        for kind in kinds:
            count = 8
            for place in range(kind.layout.bits & 127):
                count *= kind.layout.dimensions[place]
            memory = ctypes.create_string_buffer(count + _SLACK)
            address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
            self._kept.append(memory)
            found.append(self._runtime.bind(kind, address, _nbytes(kind)).value)
        return (c_void_p * len(found))(*found)

    def run(self) -> float:
        begin = time.perf_counter()
        inputs, outputs = self._inputs, self._outputs
        status = self._call(self._compiled.handle, 0, len(inputs), inputs, len(outputs), outputs)
        took_s = time.perf_counter() - begin
        if status:
            raise UnavailableError(f"LiteRT failed: status {status}")
        return took_s

    def median_s(self, runs: int) -> float:
        return sorted(self.run() for _ in range(runs))[runs // 2]

    def profiler(self) -> c_void_p:
        found = c_void_p()
        self._runtime.call("LiteRtCompiledModelGetProfiler", self._compiled.handle, byref(found))
        if not found:
            raise UnavailableError("the runtime has no profiler")
        return found

    def events(self, profiler: c_void_p) -> list[tuple[str, float]]:
        """Run once and return the kernels that ran with their seconds."""
        call = self._runtime.call
        call("LiteRtResetProfiler", profiler)
        call("LiteRtStartProfiler", profiler)
        self.run()
        call("LiteRtStopProfiler", profiler)
        count = c_int()
        call("LiteRtGetNumProfilerEvents", profiler, byref(count))
        array = (_Event * count.value)()
        call("LiteRtGetProfilerEvents", profiler, count, array)
        return [
            ((e.tag or b"").decode(), e.elapsed_us * 1e-6)
            for e in array
            if e.type in _KERNEL_EVENTS and e.tag != _DELEGATE.encode()
        ]


def _nbytes(kind: Any) -> int:
    size = {1: 4, 2: 4, 4: 8, 6: 1, 7: 2, 9: 1, 10: 2}.get(kind.element_type, 4)  # litert_model_types.h
    for place in range(kind.layout.bits & 127):
        size *= kind.layout.dimensions[place]
    return size


def main() -> None:
    """Measure as the argument asks and print the result; this is the measuring process."""
    asked = json.loads(sys.argv[1])
    os.sched_setaffinity(0, asked["cores"])
    from evaluators.litert.capi import Runtime

    runtime = Runtime()
    runtime.start(asked["settings"]["accelerators"])
    if asked["pack"]:
        _Loaded(runtime, asked["model"], asked["settings"])
    model = _Loaded(runtime, asked["model"], asked["settings"])
    reference = _Loaded(runtime, asked["reference"], asked["reference_settings"])
    watched = _Loaded(
        runtime, asked["model"], {**asked["settings"], "runtime_options_string": {"enable_profiling": True}}
    )
    print(json.dumps(_measure(model, watched, reference, asked["seconds"])))  # noqa: T201 - the parent reads it


def _measure(model: _Loaded, watched: _Loaded, reference: _Loaded, seconds: float, rounds: int = 4) -> dict[str, Any]:
    profiler = watched.profiler()
    model.run()
    watched.run()
    once_s = max(1e-6, model.median_s(3))
    beats = max(3, int(0.006 / reference.median_s(3)))
    runs = int(min(max(seconds / rounds / once_s, 2), 200))
    watches = int(min(max(seconds / rounds / once_s, 2), 60))
    wholes, clocks, names = [], [], []
    totals: list[float] = []
    profiled = []
    for _ in range(rounds):
        before = reference.median_s(beats)
        model.run()
        whole = model.median_s(runs)
        between = reference.median_s(beats)
        watched.run()
        begin = time.perf_counter()
        each = [watched.events(profiler) for _ in range(watches)]
        profiled.append((time.perf_counter() - begin) / watches)
        after = reference.median_s(beats)
        wholes.append(whole / (before + between) * 2)
        clocks += [before, between, after]
        names = [name for name, _ in each[0]]
        sums = [sorted(run[k][1] for run in each) for k in range(len(names))]
        trimmed = [_mean(values[: max(1, len(values) * 9 // 10)]) / (between + after) * 2 for values in sums]
        totals = [a + b for a, b in zip(totals, trimmed, strict=True)] if totals else trimmed
    usual = sorted(clocks)[len(clocks) // 2]
    return {
        "names": names,
        "kernel_s": [t / rounds * usual + _RESOLUTION_S / 2 for t in totals],
        "whole_s": sorted(wholes)[rounds // 2 - 1] / 2 * usual + sorted(wholes)[rounds // 2] / 2 * usual,
        "profiled_s": _mean(profiled),
        "reference_s": usual,
        "rounds_s": [w * usual for w in wholes],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
