"""The picture of the README: several models at once on a GPU against processes, from committed results.

``python -m tests.benchmarks.readme_picture experiments/results/several_models.svg``
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.report.plots import forest
from optimizer.report.svg import standalone
from tests.benchmarks.seed_001_gpu import MPS_GRAPHS, OURS, PROCESSES, T95

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "seed_001_gpu.json"
SETS = {
    "8 VGG16": "8 VGG16",
    "8 ResNet152": "8 ResNet152",
    "8 Inception v3": "8 Inception v3",
    "7 RegNetY-32GF": "7 RegNetY-32GF",
    "3 VGG16, 1 ResNet152, 2 Inception v3, 2 RegNetY-32GF": "8 of these four",
}
AGAINST = {PROCESSES: "a process each", MPS_GRAPHS: "the same graphs in processes, MPS"}


def speedup(ways: Mapping[str, Any], other: str) -> tuple[float, float, float]:
    """Return how many times as fast our plan is, with its 95 % interval, over the rounds that both ran in."""
    logs = [math.log(a / b) for a, b in zip(ways[other]["rounds_ms"], ways[OURS]["rounds_ms"], strict=True)]
    middle, half = statistics.fmean(logs), statistics.stdev(logs) / len(logs) ** 0.5 * T95[len(logs)]
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def picture() -> str:
    """Return the picture as SVG."""
    runs = json.loads(RESULTS.read_text())["runs"]
    sets = runs["tf32_mps"]["sets"]["tf32"] | runs["tf32_mps_2"]["sets"]["tf32"]
    rows = [
        (f"{title} over {name}", *speedup(sets[which]["mps"][MPS_GRAPHS], other))
        for other, name in AGAINST.items()
        for which, title in SETS.items()
    ]
    return standalone(forest(rows, "mean latency of several models at once on an H100: times as fast, 95 % intervals"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
