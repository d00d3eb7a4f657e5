"""Seed 003's figures under the procedure it describes: SqueezeNet on a ZCU102, 202.72 to 180.18 ms, 4 of 8 groups.

``python -m tests.benchmarks.seed_003_zcu102 REFERENCE OUT.json`` prices the model with three numbers, as many as the
seed has figures: a multiply-accumulate of the NPU's k x k convolutions, one of anything else (the NPU's 1 x 1
convolutions, and the CPU), and a transfer. The first two follow from the two times, if the small branch of the groups
that run in parallel hides behind the large one; that the four largest gain and no other bounds the transfer to within
4 %, of which the middle is taken. So the figures are met, not predicted; what is found out is whether they are
consistent with the procedure at all, and what placing all runs jointly gives on the same numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from evaluators.base import Session
from evaluators.cost_model.features import KERNELS, operator_features
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.profile import CostProfile, LinkProfile, ProcessorProfile
from evaluators.cost_model.session import CostModelEvaluator
from optimizer.model.bounds import price_of
from optimizer.model.profile import known_profile
from optimizer.model.segments import SEED_003, segment_baselines, segment_estimate
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Link, Platform, Processor
from search_spaces.models.zoo import draft
from search_spaces.spaces.branches import branch_groups
from search_spaces.spaces.segment_space import SegmentSpace

LARGE = ("conv", "winograd")


def fitted(graph: Graph, published: Mapping[str, Any]) -> tuple[CostProfile, Platform, dict[str, float]]:
    """Return the profile of three prices, its platform, and the prices: seconds a MAC, and of a transfer."""
    features = operator_features(graph)
    small = sorted((features[g.branches[0].members()[0]].macs for g in branch_groups(graph)), reverse=True)
    gaining = int(published["groups_run_in_parallel"])
    whole_s, saved_s = published["sequential"] * 1e-3, (published["sequential"] - published["branch_parallel"]) * 1e-3
    large = sum(f.macs for f in features if f.kernel in LARGE)
    rest = sum(f.macs for f in features) - large
    # The small branches of the groups that gain are hidden: that is all that is saved.
    rest_s = saved_s / sum(small[:gaining])
    large_s = (whole_s - rest * rest_s) / large
    # 1 x 1 and 3 x 3 of a group have the same channels: 9 times the work. A group gains if the CPU's branch, handed
    # there and back, ends before both would on the NPU; it gains all of the small one if it ends before the large one.
    least, most = 9 * small[gaining] * large_s, small[gaining - 1] * (9 * large_s - rest_s)
    hand_s = (least + most) / 4
    slow, quick = (KernelModel({"macs": price}, sigma=0.3) for price in (rest_s, large_s))
    npu = ProcessorProfile({k: quick if k in LARGE else slow for k in KERNELS})
    profiles = {"cpu": ProcessorProfile(dict.fromkeys(KERNELS, slow)), "npu": npu}
    profile = CostProfile("zcu102", profiles, (LinkProfile("npu", "cpu", hand_s),))
    processors = (Processor("cpu", "cpu", {"cpu": 1.0}, "cpu"), Processor("npu", "npu", {"npu": 1.0}, "npu"))
    platform = Platform("zcu102", processors, (Link(("npu", "cpu"), 1e12, hand_s),))
    prices = {
        "npu_conv_s_per_mac": large_s,
        "other_s_per_mac": rest_s,
        "transfer_s": hand_s,
        "transfer_least_s": least / 2,
        "transfer_most_s": most / 2,
    }
    return profile, platform, prices


def outcome(graph: Graph, session: Session, platform: Platform) -> dict[str, Any]:
    """Return what the model says of running whole, of the seed's procedure, and of the joint plan."""
    if not session.capabilities.costs:
        raise SystemExit("the cost model tells no tables")
    space = SegmentSpace(graph, platform, splits=False)
    known = known_profile(session.part_costs(graph), platform)
    estimate = segment_estimate(graph, known.costs(platform), space)
    price = price_of(graph, session)
    plans = {b.name: b.plan for b in segment_baselines(graph, platform, space, estimate.costs, known.fastest(platform))}
    plans["joint"] = estimate.optima[0]
    found: dict[str, Any] = {name: {"ms": price(plan) * 1e3} for name, plan in plans.items()}
    for name in (SEED_003, "joint"):
        parts = space.parts(plans[name])
        found[name]["groups_in_parallel"] = sum(part.axis == "branches" for part in parts)
    found["bound_all_plans_ms"] = estimate.bounds.space_s * 1e3
    return found


def main(reference: Path, out: Path) -> None:
    """Fit, place, and write the results."""
    published = yaml.safe_load((reference / "published.yaml").read_text(encoding="utf-8"))["seed_003_squeezenet_zcu102"]
    graph = draft("squeezenet1_0").graph()
    profile, platform, prices = fitted(graph, published)
    with CostModelEvaluator(profile, platform).prepare(platform) as session:
        found = outcome(graph, session, platform)
    document = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.seed_003_zcu102 ../shared/reference {out.name}",
        "provenance": provenance(),
        "published": dict(published),
        "free_parameters": 3,
        "prices": prices,
        "outcome": found,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"prices": prices, "outcome": found}, indent=1))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
