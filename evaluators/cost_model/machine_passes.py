"""Time many models in turns, whole and kernel by kernel: what the machine does meanwhile, it does to all of them.

A machine whose speed drifts by a tenth within a minute cannot be asked for one model after the other. Here all models
are visited again and again in passes; each visit compiles a model and tells what it took, what its kernels took, and
what a reference network took just then.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.cost_model.machine_model import PROFILING, Loaded, middle
from evaluators.litert.settings import compile_settings
from evaluators.own_process import own_process
from search_spaces.errors import UnavailableError
from search_spaces.platform import Processor

_VISIT_S, _SETTLE_S = 0.05, 0.01
_LEAST_RUNS, _MOST_RUNS = 3, 40
_ROUNDED_S = 5e-7


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit to a model.

    Attributes:
        model: its name.
        number: of the pass.
        whole_s: what the whole model usually takes, from some runs.
        names: of its kernels, in the order in which they run.
        kernel_s: the same of each kernel; in whole microseconds they are rounded down by the runtime, which is made
            good on average.
        reference_s: of the reference network just then.
    """

    model: str
    number: int
    whole_s: float
    names: tuple[str, ...]
    kernel_s: tuple[float, ...]
    reference_s: float


def visits(
    models: Sequence[tuple[str, Path, Path]], reference: Path, processor: Processor, seconds: float, seed: int = 0
) -> Iterator[Visit]:
    """Yield visits to models on a CPU lane for about so many seconds, beside what loading them takes.

    Args:
        models: name, file, and the file of its packed weights, which is made where it is not there.
        reference: file of the reference network.
        seed: of the order within each pass.

    Raises:
        UnavailableError: the measuring process failed.
    """
    asked = {
        "models": [(name, str(path), compile_settings(processor, packed)) for name, path, packed in models],
        "reference": [str(reference), compile_settings(processor, None)],
        "cores": list(processor.options["cores"]),
        "seconds": seconds,
        "seed": seed,
    }
    command = own_process("evaluators.cost_model.machine_passes", json.dumps(asked))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        names: dict[str, tuple[str, ...]] = {}
        for line in process.stdout or ():
            row = json.loads(line)
            kernels = names.setdefault(row["model"], tuple(row["names"]))
            yield Visit(
                row["model"], row["number"], row["whole_s"], kernels, tuple(row["kernel_s"]), row["reference_s"]
            )
    if process.returncode:
        raise UnavailableError(f"the process that times kernels failed: exit code {process.returncode}")


@dataclass(frozen=True, slots=True)
class _Visited:
    """A model to visit: it is compiled anew each time, since all of them at once take more than a machine has."""

    name: str
    path: str
    settings: dict[str, Any]

    def visit(self, number: int, runtime: Any, cores: Sequence[int], reference: Loaded) -> dict[str, Any]:
        with closing(Loaded(runtime, self.path, {**self.settings, **PROFILING}, cores)) as watched:
            once_s = watched.run()
            if once_s < _VISIT_S:  # else what coming from elsewhere costs the first run is little
                once_s = max(1e-6, watched.run())
            runs = int(min(max(_VISIT_S / once_s, _LEAST_RUNS), _MOST_RUNS))
            for _ in range(int(min(_SETTLE_S / once_s, _MOST_RUNS))):
                watched.run()
            each = [watched.events() for _ in range(runs)]
        with closing(Loaded(runtime, self.path, self.settings, cores)) as model:
            model.run()
            for _ in range(int(min(_SETTLE_S / once_s, _MOST_RUNS))):
                model.run()
            whole_s = model.usual_s(runs)
        reference.run()
        return {
            "model": self.name,
            "number": number,
            "whole_s": whole_s,
            "names": [name for name, _ in each[0]] if number == 0 else [],
            "kernel_s": [float(f"{s + _ROUNDED_S:.4g}") for s in middle([[s for _, s in run] for run in each])],
            "reference_s": reference.run(),
        }


def main() -> None:
    """Measure as the argument asks and print each visit; this is the measuring process."""
    asked = json.loads(sys.argv[1])
    cores = asked["cores"]
    os.sched_setaffinity(0, cores)
    from evaluators.litert.worker.capi import Runtime

    runtime = Runtime()
    path, settings = asked["reference"]
    runtime.start(settings["accelerators"])
    reference = Loaded(runtime, path, settings, cores)
    order = [_Visited(name, path, settings) for name, path, settings in asked["models"]]
    for visited in order:
        if not Path(visited.settings["xnnpack"]["weight_cache_file_path"]).exists():
            Loaded(runtime, visited.path, visited.settings, cores).close()
    rng = random.Random(asked["seed"])  # noqa: S311 - an order, no secret
    end_s = time.monotonic() + asked["seconds"]
    number = 0
    while time.monotonic() < end_s:
        rng.shuffle(order)
        for visited in order:
            if time.monotonic() > end_s:
                break
            told = visited.visit(number, runtime, cores, reference)
            print(json.dumps(told), flush=True)  # noqa: T201 - the parent reads it
        number += 1
