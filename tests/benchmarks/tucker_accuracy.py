"""What Tucker-2 costs in accuracy, on networks that are trained: ``experiments/results/tucker_accuracy.json``.

``python -m tests.benchmarks.tucker_accuracy OUT.json`` trains a VGG-like and a ResNet-like network on scikit-learn's
digits, decomposes them at two shares of the channels, trains what comes out on, and beside it an undecomposed network
of as many multiply-accumulates (the comparison of seed 001), for as many epochs as both trainings together. Each seed
draws another split of the images, other weights and another order; intervals are 95 % of Student's t over the seeds.
Needs the extra ``train``. Takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from optimizer.provenance import provenance
from search_spaces.rewrites.tucker import Layer, Ranks
from search_spaces.rewrites.tucker_ranks import ratio
from tests.benchmarks.tucker_training import (
    Data,
    Network,
    accuracy,
    decompose,
    digits,
    equal_macs,
    macs,
    resnet,
    train,
    vgg,
)

NETWORKS: dict[str, Callable[[int], Network]] = {"vgg-like": vgg, "resnet-like": resnet}
WIDTH = 16
SHARES = (0.5, 0.25)
MULTIPLE = 4
TRAIN_SHARE = 0.3  # of the images: with more of them all networks tell nearly all digits right
EPOCHS, MORE_EPOCHS = 20, 10
RATE, LOWER_RATE = 2e-3, 1e-3


def share_of(share: float) -> Callable[[Layer], Ranks | None]:
    """Return the rule: a share of the channels on both sides, in multiples of 4, where that saves anything."""
    rule = ratio(share, share)

    def choose(layer: Layer) -> Ranks | None:
        wanted = rule.ranks(layer, lambda: iter(())) or layer.full
        ranks = Ranks(
            *(min(c, max(r // MULTIPLE * MULTIPLE, MULTIPLE)) for r, c in zip(wanted, layer.full, strict=True))
        )
        return ranks if layer.macs(ranks) < layer.macs() else None

    return choose


def one(build: Callable[[int], Network], data: Data, seed: int) -> dict[str, Any]:
    """Return what one seed tells of a network."""
    torch.manual_seed(seed)
    network = build(WIDTH)
    train(network, data, EPOCHS, RATE, seed)
    found: dict[str, Any] = {"macs": macs(network), "accuracy": accuracy(network, data), "tucker": {}}
    for share in SHARES:
        cut = Network(deepcopy(network.modules), network.adds)
        decompose(cut, share_of(share))
        fewer, at_once = macs(cut), accuracy(cut, data)
        train(cut, data, MORE_EPOCHS, LOWER_RATE, seed + 1)
        torch.manual_seed(seed)
        small = equal_macs(build, fewer, WIDTH)
        train(small, data, EPOCHS + MORE_EPOCHS, RATE, seed)
        found["tucker"][f"{share:g}"] = {
            "macs": fewer,
            "accuracy_decomposed": at_once,
            "accuracy_retrained": accuracy(cut, data),
            "small_macs": macs(small),
            "small_accuracy": accuracy(small, data),
        }
    return found


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean and its 95 % interval."""
    mean, half = float(np.mean(values)), 0.0
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": mean, "ci95": [mean - half, mean + half], "values": list(values)}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all seeds tell of a network."""
    found: dict[str, Any] = {
        "macs": runs[0]["macs"],
        "accuracy": interval([run["accuracy"] for run in runs]),
        "tucker": {},
    }
    for share in runs[0]["tucker"]:
        rows = [run["tucker"][share] for run in runs]
        kept = [row["accuracy_retrained"] for row in rows]
        found["tucker"][share] = {
            "macs": rows[0]["macs"],
            "macs_reduction": 1 - rows[0]["macs"] / runs[0]["macs"],
            "accuracy_decomposed": interval([row["accuracy_decomposed"] for row in rows]),
            "accuracy_retrained": interval(kept),
            "small_macs": rows[0]["small_macs"],
            "small_accuracy": interval([row["small_accuracy"] for row in rows]),
            "retrained_less_before": interval([a - run["accuracy"] for a, run in zip(kept, runs, strict=True)]),
            "retrained_less_small": interval([a - row["small_accuracy"] for a, row in zip(kept, rows, strict=True)]),
        }
    return found


def main() -> None:
    """Train everything and write the document, after every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "scikit-learn")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NETWORKS}
    for seed in range(options.seeds):
        data = digits(seed, TRAIN_SHARE)
        for name, build in NETWORKS.items():
            runs[name].append(one(build, data, seed))
        document = {
            "schema_version": 1,
            "made_by": f"python -m tests.benchmarks.tucker_accuracy {options.out} --seeds {options.seeds}",
            "data": {"name": "scikit-learn digits", "train": len(data.train[0]), "test": len(data.test[0])},
            "width": WIDTH,
            "epochs": {"before": EPOCHS, "after": MORE_EPOCHS, "small": EPOCHS + MORE_EPOCHS},
            "seeds": seed + 1,
            "networks": {name: summary(found) for name, found in runs.items()},
            "provenance": provenance() | {"training": versions},
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
