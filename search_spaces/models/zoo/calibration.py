"""Value ranges of a float model's tensors, from runs in a separate process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.models.resize import answer_of

SEEDS = (0, 1)  # of the inputs, uniform in [-1, 1)

TINY = 1e-30

Range = tuple[float, float]


def calibrated(path: Path, graph: Graph) -> Mapping[int, Range]:
    """Return tensor index → the smallest and the largest value of each float32 activation of a model.

    Limits are rounded outward to three digits, so that machines that round sums differently agree. Takes seconds.

    Args:
        path: the model's file.

    Raises:
        UnavailableError: the runtime does not run the model here.
    """
    ports = [graph.tensors[t] for t in graph.inputs]
    floats = [int(t) for t in graph.activation_tensors if graph.tensors[t].dtype == "float32"]
    question = {"path": str(path), "shapes": {}, "tensors": 0, "values": (), "ranges": floats}
    found: dict[int, list[float]] = {t: [] for t in floats}
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        inputs = [random.uniform(-1, 1, port.shape).astype(port.dtype).tobytes().hex() for port in ports]
        answer = answer_of({**question, "inputs": inputs})
        if "error" in answer:
            why = answer["error"]
            raise UnavailableError(f"the runtime cannot calibrate {path.name}: {why}", "take the float32 model or :f16")
        for tensor, seen in answer["ranges"].items():
            found[int(tensor)] += seen
    if not all(math.isfinite(value) for seen in found.values() for value in seen):
        raise UnavailableError(f"{path.name} computes numbers that are not finite", "take the float32 model")
    return {tensor: (_outward(min(seen)), _outward(max(seen))) for tensor, seen in found.items()}


def _outward(value: float) -> float:
    if abs(value) < TINY:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return math.copysign(math.ceil(abs(value) / unit) * unit, value)
