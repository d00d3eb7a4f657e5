"""Memory traffic of an inference, counted by the GPU itself: a process of its own runs under NVIDIA's ``ncu``."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evaluators.cuda.devices import torch_module
from evaluators.own_process import own_process
from search_spaces.core.errors import UnavailableError
from search_spaces.models.litert import read_model

_NCU = "ncu"
_LIMIT_S = 300.0
_COUNTERS = {
    "dram__bytes_read.sum": ("memory_mb", 1),
    "dram__bytes_write.sum": ("memory_mb", 1),
    "lts__t_sectors_srcunit_tex.sum": ("second_level_mb", 32),
}
"""Counter → the figure that it is part of, and the bytes of one; sectors of the second-level cache have 32."""
_OPTIONS = "--profile-from-start off --cache-control none --clock-control none --csv --print-units base --metrics"
_REQUEST = "request.json"


def counts_here() -> bool:
    """Return whether the program is installed."""
    return shutil.which(_NCU) is not None


def counted(request: Mapping[str, Any]) -> dict[str, float]:
    """Return the megabytes that an inference moves: to and from memory, and between the caches; and its kernels.

    Caches are as the inference before leaves them.

    Args:
        request: ``path`` and ``name`` of the model, its ``jobs`` (operators and precision of each), ``chosen`` variants
            of kernels, and ``room_nbytes`` for weights, or None.

    Raises:
        UnavailableError: the program fails, or may not read the counters.
    """
    with TemporaryDirectory(prefix="cuda-traffic-") as folder:
        (Path(folder) / _REQUEST).write_text(json.dumps(dict(request)))
        command = [_NCU, *_OPTIONS.split(), ",".join(_COUNTERS), *own_process(__name__, folder)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{_NCU} counted nothing: {error}") from error
    rows = list(csv.DictReader(line for line in run.stdout.splitlines() if line.startswith('"')))
    found = dict.fromkeys((name for name, _ in _COUNTERS.values()), 0.0)
    try:
        for row in rows:
            name, nbytes = _COUNTERS[row["Metric Name"]]
            found[name] += float(row["Metric Value"].replace(",", "")) * nbytes / 1e6
    except (KeyError, ValueError):
        rows = []
    if not rows:
        said = next((line for line in run.stdout.splitlines() if "ERR" in line), "").removeprefix("==ERROR== ")
        said = said or (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise UnavailableError(f"{_NCU} counted nothing: {said}", "programs may need permission to read the counters")
    return {name: round(value, 3) for name, value in found.items()} | {"kernels": len({row["ID"] for row in rows})}


def main() -> None:
    """Run a model twice, the second time with counters; the first argument is the folder of the request."""
    from evaluators.cuda.instance import Instance, Tuning, as_function
    from evaluators.cuda.lowering import Weights

    torch = torch_module()
    request = json.loads((Path(sys.argv[1]) / _REQUEST).read_text())
    tunings = {precision: Tuning(precision, 1, request["chosen"]) for _, precision in request["jobs"]}

    def entered(place: int) -> None:
        allowed = request["jobs"][place][1] == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed

    with torch.inference_mode():
        jobs = [(operators, tunings[precision]) for operators, precision in request["jobs"]]
        graph = read_model(Path(request["path"]), request["name"])
        weights = Weights(graph, "cuda", room_nbytes=request["room_nbytes"])
        work = Instance(weights, jobs, lambda _: as_function, entered).work
        for run in range(2):
            if run:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            for place, job in enumerate(work):
                entered(place)
                job()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
