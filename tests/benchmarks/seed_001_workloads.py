"""Seed 001 on this machine: SqueezeNets and a mix at once, searched, against each baseline, and against the simulator.

``python -m tests.benchmarks.seed_001_workloads run FOLDER WORD…`` studies the cases whose names are made of these words
(``burst``, ``closed``, ``poisson``, ``4``, ``8``, ``mix``) and compares each best plan with every baseline in pairs;
``… collect FOLDER OUT.json`` puts what was found into one file, beside the other cases that it holds. A study that is
in FOLDER is gone on with.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np

from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import FinalPolicy, compare
from optimizer.provenance import provenance
from optimizer.report.console import ProgressWatcher
from optimizer.study.config import parse_config
from optimizer.study.course import run_study
from optimizer.study.log import read_log
from optimizer.study.result import WorkloadResult
from optimizer.study.several_models import SeveralModels
from search_spaces.core.plan import Plan

COMMAND = "python -m tests.benchmarks.seed_001_workloads"
SETS = {
    "4": "  - {model: squeezenet1_1, count: 4%s}\n",
    "mix": "".join(f"  - {{model: {m}%s}}\n" for m in ("mobilenet_v1", "squeezenet1_1", "resnet50", "googlenet")),
    "8": "  - {model: squeezenet1_1, count: 8%s}\n",
}
REQUESTS = {"4": 6, "8": 4, "mix": 3}
# Requests a second of each model: 0.7 to 0.9 of what two cores can do, a Xeon's for the SqueezeNets, an EPYC's for the
# mix.
RATES = {"4": 60.0, "8": 30.0, "mix": 25.0}
POLICY = FinalPolicy(precision=0.01, max_s=2.0, min_rounds=3, max_rounds=6, min_blocks=2)
BUDGET = "14"


def cases() -> dict[str, str]:
    """Return the workloads' files by name."""
    found = {}
    for name, models in SETS.items():
        for kind in ("burst", "closed", "poisson"):
            arrival = {
                "burst": "",
                "closed": f", arrival: {{kind: closed, requests: {REQUESTS[name]}}}",
                "poisson": f", arrival: {{kind: poisson, rate_per_s: {RATES[name]}, requests: {2 * REQUESTS[name]}}}",
            }[kind]
            found[f"{name}-{kind}"] = f"name: {name}-{kind}\nmodels:\n" + models.replace("%s", arrival)
    return found


def run(folder: Path, words: list[str]) -> None:
    """Study the cases and compare."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in cases().items():
        if not set(words) >= set(name.split("-")) or (folder / f"{name}.json").exists():
            continue
        begin_s = time.monotonic()
        path = folder / f"{name}.yaml"
        path.write_text(text)
        config = parse_config({"model": str(path), "budget": BUDGET, "out": str(folder / name)})
        with ProgressWatcher(config.budget, quiet=True, verbose=False) as watcher:
            result = cast("WorkloadResult", run_study(config, watcher, [COMMAND, "run"]))
        studied_s = time.monotonic() - begin_s
        document = {"case": name, "provenance": provenance(), **summary(result)}
        document["pairs"] = pairs(config, folder / name, result)
        document |= {"studied_s": round(studied_s, 1), "wall_s": round(time.monotonic() - begin_s, 1)}
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1))
        reductions = {n: p["reduction"] for n, p in document["pairs"].items()}
        sys.stdout.write(f"{name} {document['wall_s']} s {reductions}\n")


def summary(result: WorkloadResult) -> dict[str, Any]:
    """Return the best plan, and each plan's figures beside what was predicted."""
    best = result.best
    if best is None:
        raise SystemExit("no plan was measured")
    return {"best": best.to_json(), "outcomes": dict(result.outcomes)}


def pairs(config: Any, folder: Path, result: WorkloadResult) -> dict[str, Any]:
    """Compare the best plan with each baseline, in pairs over rebuilt instances."""
    evaluator, rng = LitertEvaluator(), np.random.default_rng(1)
    problem = SeveralModels.read(config.model_copy(update={"space": "workload"}), evaluator)
    prices = next(r.data for r in read_log(folder / "trials.jsonl").records if r.kind == "prices")
    found = {}
    arguments = problem.workload, problem.joined, problem.platform, problem.objective
    with evaluator.host(*arguments) as session:
        session.price(prices, lambda _: None)

        def load(plan: Plan) -> Any:
            return lambda: session.load(problem.joined.graph, plan, fresh=True)

        for baseline in problem.baselines:
            if result.best is None or baseline.plan.digest == result.best.digest:
                continue
            compared = compare(load(baseline.plan), load(result.best), POLICY, rng)
            low, high = compared.ratio.ci95
            found[baseline.name] = {
                "reduction": round(1.0 - 1.0 / compared.ratio.value, 4),
                "ci95": [round(1.0 - 1.0 / low, 4), round(1.0 - 1.0 / high, 4)],
                "significant": compared.ratio.significant,
                "rounds": compared.final.rounds,
                "baseline_ms": round(compared.baseline.median * 1e3, 3),
                "best_ms": round(compared.candidate.median * 1e3, 3),
            }
        with closing(session.load(problem.joined.graph, result.best or problem.baselines[0].plan)) as candidate:
            candidate.run(1)
    return found


def collect(folder: Path, out: Path) -> None:
    """Write one file of all cases, with the simulator's error over all plans that were told of.

    A case that ``out`` holds already and ``folder`` does not is kept.
    """
    held = json.loads(out.read_text())["cases"] if out.exists() else []
    found = {c["case"]: c for c in [*held, *(json.loads(p.read_text()) for p in folder.glob("*.json"))]}
    each = [found[name] for name in sorted(found)]
    errors = [
        entry["predicted"]["makespan_ms"] / entry["makespan_ms"] - 1.0
        for case in each
        for entry in case["outcomes"].values()
        if entry.get("predicted")
    ]
    document = {
        "schema_version": 1,
        "command": f"{COMMAND} run FOLDER 4 8 mix burst closed poisson; … collect FOLDER OUT.json",
        "cases": each,
        "makespan_error": {
            "plans": len(errors),
            "median": round(statistics.median(map(abs, errors)), 4),
            "bias": round(statistics.median(errors), 4),
            "within_10": round(statistics.fmean(abs(e) <= 0.1 for e in errors), 3),
        },
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(f"{document['makespan_error']}\n")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        collect(Path(sys.argv[2]), Path(sys.argv[3]))
