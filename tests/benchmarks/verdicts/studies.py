"""Whole studies through the command line, and how far their recommended plans are from the best, by a long comparison.

The long comparison is made on the quiet machine after all studies, and does not use the product's final.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Session, counters_of
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import Load
from optimizer.study.folder import LOG
from optimizer.study.log import read_log
from optimizer.study.verdict import Verdict
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.verdicts.document import judged
from tests.benchmarks.verdicts.networks import cores, network
from tests.benchmarks.verdicts.slowed import LEFT, NAME, RIGHT, SlowedEvaluator, SlowedSession, best_plan, installed
from tests.benchmarks.verdicts.trace import Trace, ratio, record

CONDITIONS = ("quiet", "bursts", "compiler")
GAINS = {"gain3": 0.03, "gain6": 0.06, "gain10": 0.10}
MODELS = {"small": "squeezenet1_1", "medium": "resnet18", "vgg16": "vgg16"}  # of below 5 ms, 10 to 30 ms, and 200 ms
CASES = (*MODELS, *GAINS)
REGRET = 0.02
_ROWS, _MOST_PLANS = 4, 5  # finalists kept of each study; plans of a long comparison beside the recommended ones
_BLOCKS = 5  # of a round of a long comparison
_UNDECIDED = 5

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A network and the evaluator that runs it.

    Attributes:
        model: as the command line takes it.
        gain: how much longer the best one-stage plan takes than the best plan, where that is known.
        slower: what the slowed evaluator reports, so that the price of the cut is made up for.
    """

    name: str
    model: str
    gain: float | None = None
    slower: float = 0.0

    def command(self, budget: int, seed: int) -> list[str]:
        """Return the arguments of ``optimize``."""
        on = ["--processors", ",".join(p.name for p in cores().processors)]
        how = ["--evaluator", NAME] if self.gain is not None else on
        return ["--model", self.model, "--budget", str(budget), "--seed", str(seed), *how]


def case_of(name: str, folder: Path, cut: float) -> Case:
    """Return a case by its name; ``cut`` is what a cut in the middle costs, relative to the latency."""
    if name in MODELS:
        return Case(name, MODELS[name])
    graph = network(0, folder)
    if graph.source is None:
        raise ValueError(graph.name)
    gain = GAINS[name]
    return Case(name, str(graph.source.path), gain, (1.0 + gain) * (1.0 + cut) - 1.0)


def price_of_a_cut(folder: Path, seconds: float) -> tuple[float, float]:
    """Return how much longer the known network takes when it is cut in the middle, and the interval's half width."""
    graph, rng = network(0, folder), np.random.default_rng(0)
    evaluator = SlowedEvaluator()
    with evaluator.prepare(evaluator.platform()) as session:
        plain = SlowedSession(session.inner, 0.0)
        loads = _loads(plain, graph, [best_plan(graph), chain_plan(graph, (), (LEFT,))])
        trace = record(loads, ["cut", "whole"], counters_of(plain), seconds, rng, blocks=4)
    value, half = ratio(trace, 0, 1)
    return math.expm1(value), half


def study(command: Sequence[str], environment: Mapping[str, str]) -> Row:
    """Run one study and return its end: exit code, wall time, recommended plan, reference, verdict, finalists."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        begin_s = time.monotonic()
        words = [sys.executable, "-m", "optimizer.cli", *command, "--json", "-q", "--out", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(environment))
        row: Row = {"exit": done.returncode, "wall_s": round(time.monotonic() - begin_s, 2)}
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1]
            row["said"] = said.replace(folder, "FOLDER").replace(str(Path.home()), "HOME")
        records = read_log(out / LOG).records if (out / LOG).exists() else ()
        verdicts = [record.data for record in records if record.kind == "verdict"]
    return row | (ending(Verdict.from_json(verdicts[-1])) if verdicts else {})


def ending(verdict: Verdict) -> Row:
    """Return what a verdict says: the recommended plan, its ratio to the reference, and the fastest finalists."""
    final, speedup = verdict.final, verdict.speedup
    best = next(i for i, plan in enumerate(verdict.plans) if plan == verdict.best)
    ranked = sorted(final.measured, key=lambda i: final.effect(i, final.fastest))
    figures = [
        {"plan": verdict.plans[i].to_json(), "name": verdict.names[i], "to_best": math.exp(final.effect(i, best))}
        | {"ms": (samples.median if (samples := final.standings[i].samples) else math.nan) * 1e3}
        | {"left": i in final.racing, "levels": _rounded(final.standings[i].levels)}
        | {"instances": list(final.standings[i].instances)}
        for i in ranked
    ]
    faster = verdict.best != verdict.reference.plan and speedup is not None and speedup.low > 1.0
    return {
        "best": verdict.best.to_json(),
        "stages": len(verdict.best.stages),
        "reference": verdict.reference.plan.to_json(),
        "speedup": [speedup.value, speedup.low, speedup.high] if speedup is not None else None,
        "says_faster": faster,
        "precision": verdict.precision,
        "rounds": final.rounds,
        "repeated": final.repeated,
        "finalists": len(verdict.plans),
        "table": [f for i, f in zip(ranked, figures, strict=True) if f["left"] or f["name"] or i in ranked[:_ROWS]],
        "undecided": verdict.undecided,
    }


def _rounded(levels: Sequence[float | None]) -> list[float | None]:
    return [None if level is None else round(level, 5) for level in levels]


def plans_to_compare(rows: Sequence[Row], more: Sequence[Plan] = ()) -> list[Plan]:
    """Return the recommended plans and references of studies, and the rows of their tables that look best."""
    found = {plan.digest: plan for plan in more}
    looks: dict[str, list[float]] = {}
    others: dict[str, Plan] = {}
    for row in rows:
        if "best" not in row:
            continue
        for name in ("best", "reference"):
            plan = Plan.from_json(row[name])
            found[plan.digest] = plan
        for entry in row.get("table", ()):  # left out of results that are kept
            plan = Plan.from_json(entry["plan"])
            others[plan.digest] = plan
            looks.setdefault(plan.digest, []).append(float(entry["to_best"]))
    ranked = sorted((d for d in others if d not in found), key=lambda d: float(np.median(looks[d])))
    return [*found.values(), *(others[digest] for digest in ranked[:_MOST_PLANS])]


def _loads(session: Session, graph: Graph, plans: Sequence[Plan]) -> list[Load]:
    return [partial(session.load, graph, plan, fresh=True) for plan in plans]


def long_trace(session: Session, graph: Graph, plans: Sequence[Plan], seconds: float) -> Trace:
    """Measure every plan in every round, for so many seconds."""
    names, rng = [plan.digest for plan in plans], np.random.default_rng(0)
    loads, groups = _loads(session, graph, plans), [_accelerated(plan) for plan in plans]
    return record(loads, names, counters_of(session), seconds, rng, blocks=_BLOCKS, groups=groups)


def _accelerated(plan: Plan) -> bool:
    return any(not stage.processor.startswith(("cpu", LEFT, RIGHT)) for stage in plan.stages)


def long_comparison(session: Session, graph: Graph, plans: Sequence[Plan], seconds: float) -> Row:
    """Return what plans take relative to the fastest one, measured in every round."""
    return compared(long_trace(session, graph, plans, seconds), plans)


def compared(trace: Trace, plans: Sequence[Plan]) -> Row:
    """Return latency, ratio to the fastest, and interval of each plan of a long comparison."""
    typical_s = trace.typical_s
    works = [i for i in range(len(plans)) if math.isfinite(typical_s[i])]
    hub = min(works, key=lambda i: typical_s[i])
    fastest = min(works, key=lambda i: ratio(trace, i, hub)[0])
    table = []
    for i in works:
        value, half = ratio(trace, i, fastest)
        entry = {"plan": plans[i].digest, "stages": len(plans[i].stages), "ms": typical_s[i] * 1e3}
        table.append(entry | {"slower": math.expm1(value), "half": half if i != fastest else 0.0})
    return {"rounds": len(trace.run_s), "fastest": plans[fastest].digest, "plans": table}


def compare_case(case: Case, rows: Sequence[Row], seconds: float) -> Row:
    """Return the long comparison of the plans that the studies of a case recommended or nearly did."""
    graph = load(case.model)
    if case.gain is None:
        with LitertEvaluator().prepare(cores()) as session:
            return long_comparison(session, graph, plans_to_compare(rows), seconds)
    slowed = SlowedEvaluator()
    known = [best_plan(graph), chain_plan(graph, (), (LEFT,)), chain_plan(graph, (), (RIGHT,))]
    with slowed.prepare(slowed.platform()) as plain:
        slow = SlowedSession(plain.inner, case.slower)
        found = long_comparison(slow, graph, plans_to_compare(rows, known), seconds)
    slower = {entry["plan"]: entry["slower"] for entry in found["plans"]}
    best_whole = min(slower.get(plan.digest, math.inf) for plan in known[1:])
    return found | {"true_gain": (1.0 + best_whole) / (1.0 + slower[known[0].digest]) - 1.0}


def run_study(case: Case, budget: int, seed: int) -> Row:
    """Run a study of a case."""
    if case.gain is None:
        return study(case.command(budget, seed), os.environ)
    with installed(case.slower) as environment:
        return study(case.command(budget, seed), environment)


def with_regret(row: Row, long: Row) -> Row:
    """Return a study's row with what the long comparison says of its recommended plan."""
    if "best" not in row:
        return row
    known = {entry["plan"]: entry for entry in long["plans"]}
    best, reference = (known.get(Plan.from_json(row[name]).digest) for name in ("best", "reference"))
    if best is None or reference is None:
        return row
    speedup = (1.0 + reference["slower"]) / (1.0 + best["slower"])
    false = bool(row["says_faster"]) and speedup <= 1.0
    known_to = math.hypot(best["half"], reference["half"])
    figures = {"true_speedup": speedup, "known_to": known_to, "false_claim": false}
    return row | {"regret": best["slower"], "half": best["half"]} | figures


def holds_truth(row: Row, known_to: float) -> bool:
    """Return whether the interval of a gain that a study told holds that of the long comparison, known to a share."""
    _, low, high = row["speedup"]
    return bool(low / (1.0 + known_to) <= row["true_speedup"] <= high * (1.0 + known_to))


def judge(condition: str, rows: Sequence[Row]) -> Row:
    """Return the summary of a condition's studies, each with its regret, against the limits."""
    known = [row for row in rows if "regret" in row]
    gains = [row for row in rows if row["case"] in GAINS]
    found: Row = {"studies": len(rows), "recommended": len(known)}
    limits: Row = {}
    if known:
        regrets = [row["regret"] for row in known]
        found |= {"regret_median": float(np.median(regrets)), "regret_most": max(regrets)}
        near = sum(r <= REGRET for r in regrets) / len(rows)
        limits["within_2_percent"] = judged(near, 0.95, most=False)
        limits["false_claims"] = judged(sum(r["false_claim"] for r in known) / len(known), 0.05, most=True)
        told = [r for r in known if r["says_faster"]]
        found["gains_told"] = len(told)
        found["of_them_with_the_truth_outside"] = sum(not holds_truth(r, r["known_to"]) for r in told)
        found["or_taken_as_exact"] = sum(not holds_truth(r, 0.0) for r in told)
    if gains:
        hits = sum(bool(r.get("says_faster")) and not r.get("false_claim", False) for r in gains) / len(gains)
        limits["gains_found"] = judged(hits, 0.90 if condition == "quiet" else 0.60, most=False)
        found["gains_found_of"] = {
            name: [sum(bool(r.get("says_faster")) for r in gains if r["case"] == name), own]
            for name in GAINS
            if (own := sum(r["case"] == name for r in gains))
        }
    undecided = sum(row["exit"] == _UNDECIDED for row in rows) / len(rows) if rows else 0.0
    found["undecided"] = undecided
    found["failed"] = sum(row["exit"] not in {0, _UNDECIDED} for row in rows)
    if condition == "quiet":
        limits["undecided"] = judged(undecided, 0.05, most=True)
    return found | {"limits": limits}
