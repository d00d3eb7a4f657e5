"""The picture of the README: how much faster several models run than in a process for each, from committed results.

``python -m tests.benchmarks.readme_picture experiments/results/several_models.svg``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optimizer.report.plots import forest
from optimizer.report.svg import standalone

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "seed_001_workloads.json"
CASES = {"4-burst": "4 SqueezeNets", "8-burst": "8 SqueezeNets", "mix-burst": "4 different networks"}
THREADS = ("1 thread each", "2 threads each")


def picture() -> str:
    """Return the picture as SVG."""
    found = {case["case"]: case["pairs"] for case in json.loads(RESULTS.read_text())["cases"]}
    rows = []
    for case, name in CASES.items():
        for threads in THREADS:
            pair = found[case][f"one process per model, {threads}"]
            low, high = pair["ci95"]
            rows.append((f"{name}, {threads}", 1.0 / (1.0 - pair["reduction"]), 1.0 / (1.0 - low), 1.0 / (1.0 - high)))
    return standalone(forest(rows, "mean latency: times as fast as a process for each model, with 95 % intervals"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
