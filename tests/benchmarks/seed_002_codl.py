"""Seed 002's table: CoDL's plans priced, and better ones, for five models on three Snapdragons.

``python -m tests.benchmarks.seed_002_codl ../shared/reference OUT.json``

A plan of CoDL takes, in its own words, T = transform + map + sync + max(sides) for each operator. What is fitted, and
to what: a device's profile tells how a model's time is made up of its operators; for each model it is brought to the
published times on the CPU and on the GPU (a factor each), and the operators are made to suit the one or the other by
so much that splitting each of them ideally, for nothing, takes the published ``ideal_bound``. Where CoDL's chains begin
and end is not published; so every convolution counts as split at its best step of the grid, and what sharing one takes,
chains taken together, is one number for a device. It is fitted to CoDL's published times of the *other four* models:
CoDL's time of a model is left out of all that prices it.

Our plans are exact on the same numbers: first operators one by one, where every one that is shared pays that number,
so that all that can be gained is to leave some whole; then with chains, which pay it once. No plan takes less than the
ideal column.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from evaluators.cost_model.profile import find_profile
from evaluators.cost_model.transfers import prices
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.provenance import provenance
from search_spaces.core.platform import Platform
from search_spaces.models.zoo import draft
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part

DEVICES = ("snapdragon855", "snapdragon865", "snapdragon888")
WITHIN = 0.10
SHARED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")
AXES: tuple[Axis, ...] = ("height", "channels")
Array = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model on a device.

    Attributes:
        operator_s: shape ``(2, n)``: on the CPU and on the GPU, as published together.
        codl_s, ideal_s: published.
        spread: by what factor half of the operators suit the CPU better than the other half.
        sides_s: what all operators take if each that can be is split at its best step, without sharing.
        shared: how many are split.
    """

    space: SegmentSpace
    platform: Platform
    operator_s: Array
    codl_s: float
    ideal_s: float
    spread: float
    sides_s: float
    shared: int

    def priced_s(self, sharing_s: float) -> float:
        """Return what CoDL's plan takes where sharing an operator takes so long."""
        return self.sides_s + self.shared * sharing_s


def model_of(space: SegmentSpace, platform: Platform, operator_s: Array, sharing_s: float) -> SegmentModel:
    """Return the model in which sharing, there and back, takes so long."""
    count = operator_s.shape[1]
    between = np.broadcast_to(np.where(np.eye(2) > 0, 0.0, sharing_s / 2), (count, 2, 2))
    return SegmentModel(space, ChainCosts(platform, operator_s, np.zeros(2), between), copy_s_per_byte=0.0)


def split_each(model: SegmentModel) -> tuple[float, int]:
    """Return what operators take if each convolution is split at its best step, and how many those are."""
    total_s, shared = 0.0, 0
    space = model.space
    for i, operator in enumerate(space.graph.operators):
        ways = [Part(i, i + 1, (processor,)) for processor in space.processors]
        if operator.kind in SHARED:
            split = [
                Part(i, i + 1, pair, axis, cut)
                for axis in AXES
                for cut in space.cuts(i, i + 1, axis).values()
                for pair in space.pairs
            ]
            shared += bool(split)
            ways = split or ways
        total_s += min(max(model.sides_s(part)) for part in ways)
    return total_s, shared


def ideal(operator_s: Array) -> float:
    """Return what is taken if each operator is shared at its best ratio, for nothing."""
    cpu, gpu = operator_s
    both = cpu + gpu
    return float(np.divide(cpu * gpu, both, out=np.zeros_like(both), where=both > 0).sum())


def spread_to(table: Array, totals_s: Sequence[float], ideal_s: float) -> tuple[Array, float]:
    """Return operators' times that add up to the totals and, split ideally, take a published time.

    The half of the work that the profile takes to suit the CPU better is made quicker there and slower on the GPU, the
    other half the other way round, by one factor.
    """
    used = (table > 0).all(axis=0)
    mean, ratio = np.log(table[:, used]).mean(axis=0), np.log(table[0, used] / table[1, used])
    order = np.argsort(ratio, kind="stable")
    work = np.exp(mean)[order].cumsum()
    side = np.empty(len(order))
    side[order] = np.where(work <= work[-1] / 2.0, -1.0, 1.0)

    def made(spread: float) -> Array:
        found = np.zeros_like(table)
        for row, (sign, total_s) in enumerate(zip((1.0, -1.0), totals_s, strict=True)):
            part = np.exp(mean + sign * spread / 2.0 * side)
            found[row, used] = part * (total_s / part.sum())
        return found

    low, high = 0.0, 6.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if ideal(made(middle)) > ideal_s else (low, middle)
    return made(high), high


def cases(device: str, published: Mapping[str, Any]) -> dict[str, Case]:
    """Return the models on a device."""
    found = find_profile(device)
    if found is None:
        raise SystemExit(f"there is no profile of {device}")
    profile, platform = found
    made = {}
    for index, name in enumerate(published["models"]):
        graph = draft(name).graph()
        table = prices(profile, graph, platform).operator_s
        row = {kind: published[device][kind][index] * 1e-3 for kind in ("cpu", "gpu", "codl", "ideal_bound")}
        operator_s, spread = spread_to(table, (row["cpu"], row["gpu"]), row["ideal_bound"])
        space = SegmentSpace(graph, platform)
        sides_s, shared = split_each(model_of(space, platform, operator_s, 0.0))
        known = row["codl"], row["ideal_bound"]
        made[name] = Case(space, platform, operator_s, *known, float(np.exp(spread)), sides_s, shared)
    return made


def fitted(others: Sequence[Case]) -> float:
    """Return what sharing an operator takes so that the squares of the plans' relative errors are least."""
    weight = np.array([c.shared / c.codl_s for c in others])
    missing = np.array([1.0 - c.sides_s / c.codl_s for c in others])
    return max(0.0, float(weight @ missing / (weight @ weight)))


def priced(case: Case, sharing_s: float) -> Row:
    """Return CoDL's plan and ours of a model, and how far they are from what is ideal."""
    model = model_of(case.space, case.platform, case.operator_s, sharing_s)
    codl_s, single, chains = case.priced_s(sharing_s), model.best(chains=False, branches=False), model.best()
    error = codl_s / case.codl_s - 1.0
    return {
        "codl_published_ms": case.codl_s * 1e3,
        "codl_priced_ms": codl_s * 1e3,
        "error": error,
        "within_10_percent": abs(error) <= WITHIN,
        "sharing_one_operator_ms": sharing_s * 1e3,
        "operators_shared": case.shared,
        "ours_one_by_one": {
            "ms": single.cost_s * 1e3,
            "shared": sum(p.axis is not None for p in single.parts),
            "over_codls": single.cost_s / codl_s,
        },
        "ours_with_chains": {
            "ms": chains.cost_s * 1e3,
            "shared": sum(p.axis is not None for p in chains.parts),
            "over_codls": chains.cost_s / codl_s,
            "gap_to_ideal": chains.cost_s / case.ideal_s - 1.0,
        },
        "ideal_published_ms": case.ideal_s * 1e3,
        "suits_by": case.spread,
    }


def main(reference: Path, out: Path) -> None:
    """Price all models on all devices, and write the results."""
    published = yaml.safe_load((reference / "published.yaml").read_text(encoding="utf-8"))["seed_002_codl"]
    document: Row = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.seed_002_codl ../shared/reference {out.name}",
        "provenance": provenance(),
        "fitted": {
            "for each model": "its times on the CPU, on the GPU and split ideally: two factors and a spread",
            "for each device": "what sharing an operator takes, to CoDL's times of the other four models",
        },
        "left_out": "CoDL's time of the model that is priced",
        "devices": {},
    }
    for device in DEVICES:
        made = cases(device, published)
        rows = {}
        for name, case in made.items():
            sharing_s = fitted([other for key, other in made.items() if key != name])
            rows[name] = priced(case, sharing_s)
            rows[name]["error_if_not_left_out"] = case.priced_s(fitted(list(made.values()))) / case.codl_s - 1.0
            print(device, name, json.dumps(rows[name]), flush=True)  # noqa: T201
        document["devices"][device] = rows
    every = [row for rows in document["devices"].values() for row in rows.values()]
    document["within_10_percent"] = f"{sum(r['within_10_percent'] for r in every)} of {len(every)}"
    document["worst_error"] = max((r["error"] for r in every), key=abs)
    document["worst_error_if_none_is_left_out"] = max((r["error_if_not_left_out"] for r in every), key=abs)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
