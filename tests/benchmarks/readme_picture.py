"""The picture of the README: several models at once on a GPU against processes, from committed results.

``python -m tests.benchmarks.readme_picture experiments/results/several_models.svg``
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from evaluators.cuda.devices import APART, GRAPHS, KERNELS
from optimizer.report.plots import forest
from optimizer.report.svg import standalone

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "seed_001_gpu.csv"
SETS = {
    "vgg16": "8 VGG16",
    "resnet152": "8 ResNet152",
    "inception_v3": "8 Inception v3",
    "regnet_y_32gf": "7 RegNetY-32GF",
    "mix": "8 of these four",
}
AGAINST = {APART[KERNELS]: "a process each", APART[GRAPHS]: "a process each with CUDA graphs"}


def picture() -> str:
    """Return the picture as SVG."""
    with RESULTS.open() as file:
        found = {(row["study"], row["plan"]): row for row in csv.DictReader(file)}
    ends = ("over_best", "over_best_low", "over_best_high")
    rows = []
    for other, name in AGAINST.items():
        for which, title in SETS.items():
            middle, low, high = (float(found[which, other][end]) for end in ends)
            rows.append((f"{title} over {name}", middle, low, high))
    return standalone(forest(rows, "mean latency of several models at once on an H200: times as fast, 95 % intervals"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
