"""Seed 003 on this machine: branches on two cores, compared with all on one core and with LiteRT's 2 threads.

``python -m tests.benchmarks.seed_003_branches OUT.json --models squeezenet1_1,googlenet,inception_v3``

The bound counts what was measured: each run of a branch as a stage, what starting a stage costs, and what a join costs
(:mod:`optimizer.model.branch_profile`); on these the best plan is proven. What is reached of it is the gain of the
best plan, measured in pairs against the whole model on one core, over the gain that the bound allows. Where the bound
allows no more than such a comparison can tell, "sequential" is the right answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.litert.processors import usable_cores
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import Comparison, FinalPolicy, compare
from optimizer import optimize
from optimizer.model.branch_profile import branch_profile
from optimizer.model.profile import profile
from optimizer.model.segments import segment_baselines, segment_estimate, segment_price
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace

Row = dict[str, Any]
JOINT = "joint"
SEED_MODEL, SEED_GROUPS = "squeezenet1_0", "the seed's four groups"
PRECISION = 0.003


def tell(text: str) -> None:
    """Say what is being done."""
    print(text, file=sys.stderr)  # noqa: T201


def shown(found: Comparison) -> Row:
    """Return what a comparison says, in milliseconds."""
    return {
        "whole_ms": found.baseline.median * 1e3,
        "plan_ms": found.candidate.median * 1e3,
        "speedup": found.speedup,
        "ci95": list(found.ci95),
        "rounds": found.rounds,
    }


def against(session: LitertSession, graph: Graph, whole: Plan, plan: Plan, seconds: float) -> Comparison:
    """Compare a plan with another one in pairs, on fresh instances."""
    return compare(
        lambda: session.load(graph, whole, fresh=True),
        lambda: session.load(graph, plan, fresh=True),
        FinalPolicy(precision=PRECISION, max_s=seconds, max_rounds=30),
        np.random.default_rng(0),
    )


def seed_plan(platform: Platform) -> Plan:
    """Return the plan of the seed's board, whose groups of branches the seed chose, on two cores in place of it."""
    with TemporaryDirectory() as folder:
        known = {"evaluator": "cost-model", "platform": "zcu102", "allow": "cuts,branches", "out": folder + "/run"}
        found = optimize(SEED_MODEL, budget=60, **known).plan  # type: ignore[arg-type]
    cores = dict(zip(("npu", "cpu"), (p.name for p in platform.processors), strict=True))
    return replace(found, stages=tuple(replace(s, processor=cores[s.processor]) for s in found.stages))


def measured(session: LitertSession, graph: Graph, platform: Platform, threads: str, seconds: float) -> Row:
    """Return what one model gains from its branches on two cores."""
    space = SegmentSpace(graph, platform, splits=False)
    known = branch_profile(
        session, graph, platform, space, profile(session, graph, platform, tell), lambda text: tell(f"  {text}")
    )
    estimate = segment_estimate(graph, known.costs(platform), space)
    home = known.fastest(platform)
    plans = {b.name: b.plan for b in segment_baselines(graph, platform, space, estimate.costs, home)}
    plans[JOINT] = estimate.optima[0]
    if graph.name == SEED_MODEL:
        plans[SEED_GROUPS] = seed_plan(platform)
    whole = chain_plan(graph, (), [platform.processors[0].name])
    price = segment_price(space, estimate.costs)
    like = platform.processors[0].like
    whole_s, bound_s = price(whole), estimate.bounds.space_s
    allowed = 1.0 - bound_s / whole_s
    others = {name: plan for name, plan in plans.items() if plan != whole}
    rows: Row = {}
    for name, plan in others.items():
        tell(f"  {name}")
        rows[name] = shown(against(session, graph, whole, plan, seconds)) | {
            "model_ms": price(plan) * 1e3,
            "stages": len(plan.stages),
            "groups_side_by_side": side_by_side(space, plan),
        }
    both = chain_plan(graph, (), [threads])
    rows["whole on two threads"] = shown(against(session, graph, whole, both, seconds))
    found: Row = {
        "groups": len(space.branching),
        "runs": sum(len(segment.runs) for segment in space.branching),
        "measured": {
            "whole_ms": known.whole_s[like] * 1e3,
            "stage_us": known.overhead_s[like] * 1e6,
            "join_us": known.transfer_s[f"{like}|{like}"] * 1e6,
        },
        "bound": {"ms": bound_s * 1e3, "gain": allowed, "proven": estimate.bounds.proven},
        "plans": rows,
    }
    if JOINT in rows:
        gain = 1.0 - 1.0 / rows[JOINT]["speedup"]
        found["reached"] = gain / allowed if allowed > PRECISION else "sequential: there is nothing to be had"
        direct = against(session, graph, both, plans[JOINT], seconds)
        found["joint over two threads"] = {"speedup": direct.speedup, "ci95": list(direct.ci95)}
    else:
        found["reached"] = "sequential is the best plan by the model"
    return found


def side_by_side(space: SegmentSpace, plan: Plan) -> int:
    """Return how many segments have runs on more than one processor."""
    return sum(part.axis == "branches" for part in space.parts(plan))


def main() -> None:
    """Measure all models and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="squeezenet1_1,googlenet,inception_v3")
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    evaluator = LitertEvaluator()
    cores = usable_cores()[:2]
    names = [f"cpu{core}" for core in cores]
    threads = f"cpu{cores[0]}+{cores[1]}"
    every = Platform("this machine", tuple(evaluator.processor(name) for name in (*names, threads)))
    pair = every.restrict(names)
    document: Row = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.seed_003_branches {given.out.name} --models {given.models}",
        "provenance": provenance(),
        "models": json.loads(given.out.read_text())["models"] if given.out.exists() else {},
    }
    with evaluator.prepare(every) as session:
        for name in given.models.split(","):
            tell(name)
            document["models"][name] = measured(session, load(name), pair, threads, given.seconds)
            given.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
