"""Time the operators of a model inside the whole of it, by the runtime's own profiler; on CPUs.

A model that is cut at every operator is not the model: paddings are no longer part of the convolutions behind them, and
sums are no longer made in place. XNNPACK tells what each of its kernels takes within the whole. That is measured in a
process of its own, pinned to the lane's cores, in rounds between runs of a reference network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.cost_model.machine_model import PROFILING, Loaded, middle
from evaluators.litert.settings import compile_settings
from evaluators.own_process import own_process
from search_spaces.errors import UnavailableError
from search_spaces.platform import Processor

_LIMIT_S = 120.0
_RESOLUTION_S = 1e-6  # times are given in whole microseconds, rounded down


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
    command = own_process("evaluators.cost_model.machine", json.dumps(asked))
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


def main() -> None:
    """Measure as the argument asks and print the result; this is the measuring process."""
    asked = json.loads(sys.argv[1])
    os.sched_setaffinity(0, asked["cores"])
    from evaluators.litert.worker.capi import Runtime

    runtime = Runtime()
    runtime.start(asked["settings"]["accelerators"])
    path, settings, cores = asked["model"], asked["settings"], asked["cores"]
    if asked["pack"]:
        Loaded(runtime, path, settings, cores)
    model = Loaded(runtime, path, settings, cores)
    reference = Loaded(runtime, asked["reference"], asked["reference_settings"], cores)
    watched = Loaded(runtime, path, {**settings, **PROFILING}, cores)
    print(json.dumps(_measure(model, watched, reference, asked["seconds"])))  # noqa: T201 - the parent reads it


def _measure(model: Loaded, watched: Loaded, reference: Loaded, seconds: float, rounds: int = 4) -> dict[str, Any]:
    model.run()
    watched.run()
    once_s = max(1e-6, model.usual_s(3))
    beats = max(3, int(0.006 / reference.usual_s(3)))
    runs = int(min(max(seconds / rounds / once_s, 2), 200))
    watches = int(min(max(seconds / rounds / once_s, 2), 60))
    wholes, clocks, names = [], [], []
    totals: list[float] = []
    profiled = []
    for _ in range(rounds):
        before = reference.usual_s(beats)
        model.run()
        whole = model.usual_s(runs)
        between = reference.usual_s(beats)
        watched.run()
        begin = time.perf_counter()
        each = [watched.events() for _ in range(watches)]
        profiled.append((time.perf_counter() - begin) / watches)
        after = reference.usual_s(beats)
        wholes.append(whole / (before + between) * 2)
        clocks += [before, between, after]
        names = [name for name, _ in each[0]]
        usual = [took / (between + after) * 2 for took in middle([[took for _, took in run] for run in each])]
        totals = [a + b for a, b in zip(totals, usual, strict=True)] if totals else usual
    clock_s = sorted(clocks)[len(clocks) // 2]
    return {
        "names": names,
        "kernel_s": [t / rounds * clock_s + _RESOLUTION_S / 2 for t in totals],
        "whole_s": sum(sorted(wholes)[rounds // 2 - 1 : rounds // 2 + 1]) / 2 * clock_s,
        "profiled_s": _mean(profiled),
        "reference_s": clock_s,
        "rounds_s": [w * clock_s for w in wholes],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
