"""Times many models in passes, because a machine's speed may drift by a tenth within a minute.

Each visit compiles a model and reports its time, the times of its kernels, and the time of a reference network just
then.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.cost_model.calibrate_kernels import Load, Loaded, loader, watching
from evaluators.litert.settings import compile_settings
from evaluators.litert.worker.runtimes import runtime_of
from evaluators.own_process import own_process
from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Processor

_VISIT_S, _SETTLE_S = 0.05, 0.01
_LEAST_RUNS, _MOST_RUNS = 3, 40


@dataclass(frozen=True, slots=True)
class Visit:
    """One visit to a model.

    Attributes:
        model: its name.
        number: of the pass.
        whole_s: usual latency of the whole model, from several runs.
        names: of its kernels, in execution order.
        kernel_s: usual time of each kernel.
        reference_s: time of the reference network just then.
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
    """Yield visits to models on a CPU processor for about ``seconds``, plus the time of loading the models.

    Args:
        models: name, file, and file of packed weights, which is written where it does not exist.
        reference: file of the reference network.
        seed: of the order within each pass.

    Raises:
        UnavailableError: the measuring process failed.
    """
    asked = {
        "models": [(name, str(path), compile_settings(processor, packed)) for name, path, packed in models],
        "seed": seed,
        "runtime": runtime_of(processor),
        "reference": (str(reference), compile_settings(processor, None)),
        "cores": list(processor.options["cores"]),
        "seconds": seconds,
    }
    command = own_process("tests.benchmarks.visits", json.dumps(asked))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        names: dict[str, tuple[str, ...]] = {}
        for line in process.stdout or ():
            row = json.loads(line)
            kernels = names.setdefault(row["model"], tuple(row["names"]))
            yield Visit(**row | {"names": kernels, "kernel_s": tuple(row["kernel_s"])})
    if process.returncode:
        raise UnavailableError(f"the process that times kernels failed: exit code {process.returncode}")


def main() -> None:
    """Measure as the argument says and print the visits as JSON, one a line; runs in a process of its own."""
    asked = json.loads(sys.argv[1])
    for line in _visited(asked, *loader(asked)):
        print(json.dumps(line), flush=True)  # noqa: T201 - the parent reads it


def _visited(asked: dict[str, Any], load: Load, reference: Loaded) -> Iterator[dict[str, Any]]:
    order, cores = asked["models"], asked["cores"]
    for _, path, settings in order:
        if "xnnpack" in settings and not Path(settings["xnnpack"]["weight_cache_file_path"]).exists():
            load(path, settings, cores).close()
    rng = random.Random(asked["seed"])
    end_s = time.monotonic() + asked["seconds"]
    number = 0
    while time.monotonic() < end_s:
        rng.shuffle(order)
        for name, path, settings in order:
            if time.monotonic() > end_s:
                break
            # Compiled again each time, since all models at once would take more memory than the machine has.
            with closing(load(path, watching(settings), cores)) as watched:
                once_s = watched.run()
                if once_s < _VISIT_S:  # the first run of a short model is slow: its caches are cold
                    once_s = max(1e-6, watched.run())
                runs = int(min(max(_VISIT_S / once_s, _LEAST_RUNS), _MOST_RUNS))
                settling = int(min(_SETTLE_S / once_s, _MOST_RUNS))
                for _ in range(settling):
                    watched.run()
                found = watched.kernels(runs)
            with closing(load(path, settings, cores)) as model:
                for _ in range(1 + settling):
                    model.run()
                whole_s = model.usual_s(runs)
            reference.run()
            yield {
                "model": name,
                "number": number,
                "whole_s": whole_s,
                "names": [kernel for kernel, _ in found] if number == 0 else [],
                "kernel_s": [float(f"{took:.4g}") for _, took in found],
                "reference_s": reference.run(),
            }
        number += 1
