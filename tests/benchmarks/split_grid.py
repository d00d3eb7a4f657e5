"""How near the split that is found is to the best of the full grid, and how much of the grid is measured for it.

``python -m tests.benchmarks.split_grid OUT.json --processors cpu0,cpu1 --operators vgg16:1,vgg16:9,mobilenet_v1:2``
measures this machine; with ``--platform pixel4 --processors gpu,1large`` the cost model of that device tells the times.

An operator is cut out of a model, and every split of it is measured: along height and along output channels, at every
step of the grid, in both orders of unlike processors. Then what a study does is replayed on these times: the operator
whole on each processor gives the model, and the sampler proposes, and learns from, a tenth of the grid's points.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.cost_model.session import CostModelEvaluator, CostModelSession
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import FinalPolicy, compare
from evaluators.samples import Measurement
from evaluators.sampling import SamplingPolicy, measure
from optimizer.model.profile import Profiler, known_profile, profile
from optimizer.provenance import provenance
from optimizer.samplers.auto import Problem
from optimizer.samplers.segments import SegmentProposer
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.spaces.segment_space import SegmentSpace

SHARE = 0.10
WANTED = 0.97
EACH = SamplingPolicy(precision=0.01, max_s=0.25, min_runs=8, max_runs=60)
PAIRS = FinalPolicy(precision=0.005, max_s=5.0, min_rounds=15, max_rounds=60)
Row = dict[str, Any]
AnySession = LitertSession | CostModelSession


def every_plan(space: SegmentSpace) -> list[Plan]:
    """Return every plan of an operator, whole ones too; those that only name alike processors otherwise are one."""
    return list({p.digest: p for p in map(space.plan_at, range(space.cardinality()))}.values())


def replayed(
    space: SegmentSpace, graph: Graph, platform: Platform, session: AnySession, known: Mapping[str, Measurement]
) -> list[Plan]:
    """Return the splits that a study measures, in order; the times are those that are known."""
    if session.capabilities.costs:
        operators = known_profile(session.part_costs(graph), platform)
    else:
        operators = profile(Profiler(session, graph, platform))
    proposer = SegmentProposer(Problem(graph, platform, space, operators.costs(platform)), space, 0)
    most = math.floor(SHARE * sum(plan.is_split for plan in every_plan(space)))
    tried: list[Plan] = []
    while len(tried) < most:
        plan = proposer.propose()
        if plan is None:
            break
        if plan.is_split:
            tried.append(plan)
        proposer.observe(plan, known.get(plan.digest))
    return tried


def found(session: AnySession, graph: Graph, platform: Platform) -> Row:
    """Measure the grid of a model of one operator, and replay the search."""
    space = SegmentSpace(graph, platform)
    known: dict[str, Measurement] = {}
    for plan in every_plan(space):
        with closing(session.load(graph, plan)) as candidate:
            known[plan.digest] = measure(candidate, EACH)
    plans = [plan for plan in every_plan(space) if plan.is_split]
    tried = replayed(space, graph, platform, session, known)
    ordered = sorted(plans, key=lambda p: known[p.digest].latency_s.median)
    chosen = min(tried, key=lambda p: known[p.digest].latency_s.median)
    best, as_good = ordered[0], known[ordered[0].digest].latency_s.median / known[chosen.digest].latency_s.median
    by_grid, interval = as_good, [as_good, as_good]
    if session.capabilities.outputs:
        # The best of many that were measured once each was in part lucky: the chosen one in pairs with the first three.
        as_good, interval = 1.0, [1.0, 1.0]
        for plan in ordered[:3]:
            ratio, ends = (1.0, [1.0, 1.0]) if plan == chosen else _in_pairs(session, graph, plan, chosen)
            if ratio <= as_good:
                best, as_good, interval = plan, ratio, ends
    return {
        "grid": len(plans),
        "measured": len(tried),
        "share": len(tried) / len(plans),
        "chosen": named(space, chosen),
        "chosen_ms": known[chosen.digest].latency_s.median * 1e3,
        "best": named(space, best),
        "best_ms": known[best.digest].latency_s.median * 1e3,
        "as_good": as_good,
        "as_good_ci95": interval,
        "as_good_by_the_grid_alone": by_grid,
        "grid_ms": {named(space, p): round(known[p.digest].latency_s.median * 1e3, 5) for p in plans},
    }


def _in_pairs(session: AnySession, graph: Graph, plan: Plan, chosen: Plan) -> tuple[float, list[float]]:
    """Return how good the chosen split is beside another one, and the interval of that."""
    ours = compare(
        lambda: session.load(graph, plan, fresh=True),
        lambda: session.load(graph, chosen, fresh=True),
        PAIRS,
        np.random.default_rng(0),
    )
    return ours.ratio.value, list(ours.ratio.ci95)


def named(space: SegmentSpace, plan: Plan) -> str:
    """Return a split in a few words."""
    (part,) = space.parts(plan)
    return f"{part.axis} {part.cut} on {' and '.join(part.on)}"


def main() -> None:
    """Measure all operators and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processors", default="cpu0,cpu1")
    parser.add_argument("--platform")
    parser.add_argument("--operators", default="vgg16:1,vgg16:7,vgg16:15,mobilenet_v1:1,mobilenet_v1:4,squeezenet1_1:4")
    given = parser.parse_args()
    local, model = LitertEvaluator(), CostModelEvaluator()
    where = f"{given.platform}: {given.processors}" if given.platform else given.processors
    described = model.described(Path(given.platform)) if given.platform else None
    names = given.processors.split(",")
    platform = described.restrict(names) if described is not None else None
    platform = platform or Platform("two", tuple(local.processor(name) for name in names))
    evaluator = local if described is None else model
    document: Row = json.loads(given.out.read_text()) if given.out.exists() else {"schema_version": 1, "on": {}}
    document |= {
        "command": f"python -m tests.benchmarks.split_grid {given.out.name} --processors LANES [--platform NAME]",
        "provenance": provenance(),
    }
    rows: Row = document["on"].setdefault(where, {})
    with TemporaryDirectory() as folder, evaluator.prepare(platform) as session:
        for name in given.operators.split(","):
            whole, number = name.rsplit(":", 1)
            graph = alone(load(whole), int(number), Path(folder) / f"{whole}_{number}.tflite")
            rows[name] = {"kind": graph.operators[0].kind} | found(session, graph, platform)
            tell(f"{name} {graph.operators[0].kind} { {k: v for k, v in rows[name].items() if k != 'grid_ms'} }")
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    every: Sequence[Row] = [row for each in document["on"].values() for row in each.values()]
    document["least_as_good"] = min(row["as_good"] for row in every)
    document["most_measured"] = max(row["share"] for row in every)
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    tell(f"at least {min(r['as_good'] for r in every):.3f} as good, of {max(r['share'] for r in every):.1%} measured")


def alone(graph: Graph, operator: int, path: Path) -> Graph:
    """Return an operator of a model as a model of its own."""
    cut_stage(graph, [operator]).write(path)
    return read_model(path)


def tell(text: str) -> None:
    """Say what was found."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
