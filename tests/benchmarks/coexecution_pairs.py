"""The best plan of each study of a campaign against named baselines, in pairs, on fresh instances.

``python -m tests.benchmarks.coexecution_pairs runs/seed_002_coexecution OUT.json``

A study compares its best plan with its best baseline only. Here it is compared with the model whole on one core, on two
threads, with CoDL's greedy chains, with operators split one by one or all of them, and with branches side by side,
where it has them. And chains of operators with operators split one by one, each as the model has them best.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import Comparison, FinalPolicy, compare
from optimizer.model.baselines import BRANCHES, CHAINS, EVERY, GREEDY, SINGLE
from optimizer.provenance import provenance
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.segment_space import SegmentSpace

OVER = (GREEDY, SINGLE, CHAINS, EVERY, BRANCHES)
CLOSE_S, CLOSE_ROUNDS = 20.0, 100  # chains gain a per cent or two where processors meet within microseconds
Row = dict[str, Any]


def shown(found: Comparison) -> Row:
    """Return what a comparison says, in milliseconds."""
    return {
        "baseline_ms": found.baseline.median * 1e3,
        "plan_ms": found.candidate.median * 1e3,
        "speedup": found.ratio.value,
        "ci95": list(found.ratio.ci95),
        "significant": found.ratio.significant,
        "rounds": found.final.rounds,
    }


def parts_of(graph: Graph, platform: Platform, plan: Plan) -> list[str]:
    """Return the parts of a plan in words."""
    found = SegmentSpace(graph, platform).parts(plan)
    return [
        f"{p.first}-{p.last - 1} {p.axis or 'whole'}{f' {p.cut}' if p.axis else ''} on {' and '.join(p.on)}"
        for p in found
    ]


def paired(session: LitertSession, graph: Graph, platform: Platform, result: Row, policy: FinalPolicy) -> Row:
    """Compare a study's best plan with its baselines, and chains with operators split one by one."""

    def compared(name: str, plan: Plan, candidate: Plan, policy: FinalPolicy = policy) -> Row:
        found = compare(
            lambda: session.load(graph, plan, fresh=True),
            lambda: session.load(graph, candidate, fresh=True),
            policy,
            np.random.default_rng(0),
        )
        tell(f"  {name}: {found.ratio.value:.3f} {found.ratio.ci95}")
        return shown(found)

    best = Plan.from_json(result["best"]["plan"])
    plans = {name: Plan.from_json(baseline["plan"]) for name, baseline in result["baselines"].items()}
    over = {n: p for n, p in plans.items() if p != best and (n in OVER or n.startswith("whole on "))}
    rows = {name: compared(name, plan, best) for name, plan in over.items()}
    chained = plans.get(CHAINS, plans.get(GREEDY))
    apart = plans.get(SINGLE)
    close = replace(policy, precision=0.002, max_s=CLOSE_S, max_rounds=CLOSE_ROUNDS)
    chains = None
    if apart and chained and apart != chained:
        chains = compared("chains over operators", apart, chained, close)
    return {
        "best": parts_of(graph, platform, best),
        "best_times_as_fast_as": rows,
        "chains_times_as_fast_as_operators_one_by_one": chains,
        "study_ms": {name: row["latency_ms"] and row["latency_ms"]["median"] for name, row in studied(result).items()},
    }


def studied(result: Row) -> Row:
    """Return the plans that a study names."""
    return {"best": result["best"], **result["baselines"]}


def main() -> None:
    """Compare all studies, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison, at least")
    given = parser.parse_args()
    policy = FinalPolicy(precision=0.005, max_s=given.seconds, min_rounds=given.rounds, max_rounds=12)
    document: Row = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.coexecution_pairs {given.runs.name} {given.out.name}"
        f" --seconds {given.seconds:g} --rounds {given.rounds}",
        "provenance": provenance(),
        "studies": {},
    }
    for path in sorted(given.runs.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        tell(path.parent.name)
        evaluator = LitertEvaluator()
        names = [p["name"] for p in result["platform"]["processors"]]
        platform = Platform("studied", tuple(evaluator.processor(name) for name in names))
        with evaluator.prepare(platform) as session:
            graph = load(result["model"]["name"])
            document["studies"][path.parent.name] = paired(session, graph, platform, result, policy)
        given.out.write_text(json.dumps(document, indent=1) + "\n")


def tell(text: str) -> None:
    """Say what is being done."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
