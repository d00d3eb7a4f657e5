"""Whether verdicts are right: ``python -m tests.benchmarks.verdicts OUT.json [--part PART …] [--condition NAME …]``.

``traces``   records interleaved turns of equal plans, and of plans 2 and 5 % apart, beside each kind of neighbour, and
             resamples comparisons from them through the product's decision code
``live``     makes the same comparisons on the machine as it is then
``studies``  runs whole studies beside neighbours, then compares their plans at length on the quiet machine
``cost``     times whole studies, interleaved with those of an older command where there is one
``gpu``      runs studies over a CPU and a graphics adapter, and compares each network's best plans at length

Sections of OUT.json that are complete are skipped, and rows of those that are not are kept; ``--again`` makes them
anew. Traces are kept in OUT.traces; ``--again --reuse`` resamples those that are there.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import compare
from search_spaces.core.plan import Plan
from tests.benchmarks.verdicts import accelerated, cost, networks, replay, studies
from tests.benchmarks.verdicts.document import Document
from tests.benchmarks.verdicts.neighbours import CONDITIONS, describe, neighbour
from tests.benchmarks.verdicts.trace import Trace, ratio, record

_LOADING_S = 20.0  # what loading two instances of each plan of a long comparison takes on a graphics adapter, about
_GPU_SECONDS = 520.0
_SPARE_RUNS = 2  # of a recorded turn, since the final asks for more runs when plans get faster
PARTS = ("traces", "live", "studies", "cost", "gpu")


def tell(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201


def calibrated(document: Document, options: argparse.Namespace) -> dict[str, Any]:
    """Return the calibration of the pairs, made where there is none; on the quiet machine."""
    section = document.begin("calibration", "pairs", again=options.recalibrate)
    if section is not None:
        made = networks.calibrate(options.work, options.calibrate_minutes, lambda text: tell(f"calibration: {text}"))
        document.finish(section, **made)
    options.recalibrate = False
    found = document.section("calibration", "pairs") or {}
    if not (found["known"] and found["near"]):
        tell(f"calibration: not good enough: {found['pairs']}; use --recalibrate when the machine is quiet")
    return found


def truths(calibration: dict[str, Any]) -> dict[str, float]:
    """Return pair → by how much the first plan takes longer."""
    return {replay.EQUAL: 0.0} | {name: pair["truth"] for name, pair in calibration["pairs"].items()}


def traces(document: Document, options: argparse.Namespace) -> None:
    """Record and resample the traces of each condition."""
    calibration = calibrated(document, options)
    folder = document.path.with_suffix(".traces")
    for condition in options.condition or CONDITIONS:
        section = document.begin("traces", condition, again=options.again)
        if section is None:
            continue
        path = folder / f"{condition}.npz"
        if not (options.reuse and path.exists()):
            tell(f"traces: recording beside {describe(condition)} for {options.minutes:g} minutes")
            platform = networks.two_threads()
            with LitertEvaluator().prepare(platform) as session, neighbour(condition):
                names, loads = networks.slots(calibration, options.work, session)
                rng = np.random.default_rng(CONDITIONS.index(condition))
                record(loads, names, session.counters, 60.0 * options.minutes, rng, spare_runs=_SPARE_RUNS).save(path)
        trace = Trace.read(path)
        tell(f"traces: resampling {options.comparisons} comparisons")
        known = truths(calibration)
        rows = replay.resample(path, list(known), options.comparisons)
        section["rows"] = []  # thousands of rows, which the trace gives again
        document.finish(
            section,
            neighbour=describe(condition),
            trace=trace_summary(trace),
            independent=len(trace.run_s) / float(np.mean([row["rounds"] for row in rows])),
            reused_turns=sum(r["reused"] for r in rows) / max(1, sum(r["turns"] for r in rows)),
            pairs=replay.judge(condition, rows, known),
        )


def trace_summary(trace: Trace) -> dict[str, Any]:
    """Return how long and how disturbed a trace is, and the ratios that it shows by itself."""
    shares = {f"lost_more_than_{level:.0%}": float(np.mean(trace.lost > level)) for level in (0.01, 0.03, 0.10)}
    shown = {name: ratio(trace, i, 0) for i, name in enumerate(trace.names) if i}
    return {
        "rounds": len(trace.run_s),
        "blocks": trace.run_s.shape[1],
        "latency_ms": float(trace.typical_s[0]) * 1e3,
        **shares,
        "ratios": {name: {"slower": math.expm1(value), "half": half} for name, (value, half) in shown.items()},
    }


def live(document: Document, options: argparse.Namespace) -> None:
    """Make live comparisons in each condition."""
    calibration = calibrated(document, options)
    known = truths(calibration)
    for condition in options.condition or CONDITIONS:
        section = document.begin("live", condition, again=options.again, rows=options.live)
        if section is None:
            continue
        tell(f"live: {options.live} comparisons beside {describe(condition)}")
        with LitertEvaluator().prepare(networks.two_threads()) as session, neighbour(condition):
            names, loads = networks.slots(calibration, options.work, session)
            for index in range(len(section["rows"]), options.live):
                rng = np.random.default_rng([CONDITIONS.index(condition), index])
                pair = list(known)[index % len(known)]
                slower, faster = replay.plans_of(names, pair, rng)
                begin_s = time.monotonic()
                found = compare(loads[slower], loads[faster], replay.POLICY, rng, counters=session.counters)
                row = replay.outcome(pair, found) | {"wall_s": round(time.monotonic() - begin_s, 2)}
                document.add(section, row)
        found_all = replay.judge(condition, section["rows"], known)
        document.finish(section, neighbour=describe(condition), pairs=found_all)


def run_studies(document: Document, options: argparse.Namespace) -> None:
    """Run studies in each condition, then the long comparisons of all of them."""
    section = document.begin("calibration", "cut", again=options.recalibrate)
    if section is not None:
        tell("studies: what a cut costs")
        price, half = studies.price_of_a_cut(options.work, 60.0 * options.calibrate_minutes / 5)
        document.finish(section, price=price, half=half)
    end_s = time.monotonic() + (math.inf if options.seconds is None else options.seconds)
    longest_s = dict.fromkeys(options.cases, options.least_seconds)
    price = (document.section("calibration", "cut") or {})["price"]
    cases = [studies.case_of(name, options.work, price) for name in options.cases]
    for condition in options.condition or studies.CONDITIONS:
        wished = options.repetitions * len(cases)
        section = document.begin("studies", condition, again=options.again, rows=wished)
        if section is None:
            continue
        done = {(row["case"], row["repetition"]) for row in section["rows"]}
        wanted = [(n, c) for n, c in itertools.product(range(options.repetitions), cases) if (c.name, n) not in done]
        with neighbour(condition):
            for repetition, case in wanted:
                if time.monotonic() + longest_s[case.name] > end_s:
                    tell("studies: too little time is left; run this again to go on")
                    return
                tell(f"studies: {condition}, {case.name}, repetition {repetition}")
                row = studies.run_study(case, options.budget, repetition)
                longest_s[case.name] = max(longest_s[case.name], row["wall_s"])
                document.add(section, {"case": case.name, "repetition": repetition, **row})
        document.finish(section, neighbour=describe(condition))
    compare_at_length(document, cases, options)


def compare_at_length(document: Document, cases: Sequence[studies.Case], options: argparse.Namespace) -> None:
    """Compare the plans of each case where studies brought new ones, and judge each condition."""
    sections = {name: s for name, s in document.sections("studies").items() if s.get("complete")}
    for case in cases:
        rows = [row for s in sections.values() for row in s["rows"] if row["case"] == case.name]
        wanted = sorted({Plan.from_json(row[n]).digest for row in rows if "best" in row for n in ("best", "reference")})
        known = document.section("long", case.name)
        if not wanted or (known is not None and set(wanted) <= {entry["plan"] for entry in known["plans"]}):
            continue
        section = document.begin("long", case.name, again=True)
        if section is not None:
            tell(f"studies: long comparison of {case.name} for {options.long_minutes:g} minutes")
            document.finish(section, **studies.compare_case(case, rows, 60.0 * options.long_minutes))
    for condition, section in sections.items():
        rows = []
        for row in section["rows"]:
            long = document.section("long", row["case"])
            rows.append(studies.with_regret(row, long) if long is not None else row)
        section["rows"] = rows
        document.finish(section, summary=studies.judge(condition, rows))


def run_cost(document: Document, options: argparse.Namespace) -> None:
    """Time studies."""
    section = document.begin("cost", "quiet", again=options.again)
    if section is None:
        return
    done = {(row["study"], row["seed"]) for row in section["rows"]}
    names = [name for name in cost.STUDIES if name.split()[0] in options.cases]
    for seed, name in itertools.product(range(options.repetitions), names):
        if (name, seed) not in done:
            tell(f"cost: {name}, repetition {seed}")
            document.add(section, cost.run(name, seed, options.before, options.cost_budget))
    document.finish(section, summary=cost.judge(section["rows"]))


def run_gpu(document: Document, options: argparse.Namespace) -> None:
    """Run studies with a graphics adapter and compare their plans, until the time is up; a later call goes on."""
    end_s = time.monotonic() + (_GPU_SECONDS if options.seconds is None else options.seconds)
    section = document.begin("gpu", "quiet", again=options.again)
    if section is None:
        return
    processors = options.processors.split(",")
    section["platform"] = accelerated.platform_of(processors).to_json()
    done = {row["study"] for row in section["rows"]}
    longest_s = 0.0
    wanted = accelerated.wanted(options.only.split(",") if options.only else [])
    for name in wanted:
        left_s = end_s - time.monotonic()
        if name in done:
            continue
        if left_s < max(longest_s, options.least_seconds):
            tell(f"gpu: {left_s:.0f} s are left, too few for {name}; run this again to go on")
            break
        tell(f"gpu: {name}")
        begin_s = time.monotonic()
        row = accelerated.run(name, processors, options.gpu_budget)
        longest_s = max(longest_s, time.monotonic() - begin_s)
        document.add(section, row)
    models = dict.fromkeys(name.split("/")[0] for name in wanted)
    compare_on_gpu(document, section["rows"], list(models), options, end_s)
    check_claims(document, section["rows"], list(models), options, end_s)
    rows = []
    for row in section["rows"]:
        long = document.section("gpu_long", row["study"].split("/")[0])
        rows.append(row | long["studies"].get(row["study"], {}) if long is not None else row)
    section["rows"] = rows
    section["summary"] = accelerated.judge(section["rows"])
    section["complete"] = {row["study"] for row in section["rows"] if "regret" in row} >= set(accelerated.STUDIES)
    document.save()


def compare_on_gpu(
    document: Document,
    rows: Sequence[dict[str, Any]],
    models: Sequence[str],
    options: argparse.Namespace,
    end_s: float,
) -> None:
    """Compare the plans of each network whose studies are done, where that has not been done with all of them."""
    of = {model: [row for row in rows if row["study"].split("/")[0] == model] for model in models}
    for model, own in of.items():
        wanted = {Plan.from_json(row[n]).digest for row in own if "best" in row for n in ("best", "reference")}
        known = document.section("gpu_long", model)
        found = {entry["plan"] for entry in known["plans"]} if known is not None else set()
        if len(own) < accelerated.MODELS[model] or not wanted or wanted <= found:
            continue
        if (left_s := end_s - time.monotonic()) < options.long_seconds + _LOADING_S:
            tell(f"gpu: {left_s:.0f} s are left, too few to compare {model}; run this again to go on")
            break
        section = document.begin("gpu_long", model, again=True)
        if section is not None:
            tell(f"gpu: long comparison of {model} for {options.long_seconds:g} s")
            processors = options.processors.split(",")
            document.finish(section, **accelerated.compare(model, own, processors, options.long_seconds))


def check_claims(
    document: Document,
    rows: Sequence[dict[str, Any]],
    models: Sequence[str],
    options: argparse.Namespace,
    end_s: float,
) -> None:
    """Check what was claimed of two plans of a network, once studies have measured both."""
    for model in models:
        plans = accelerated.claimed(model, [row for row in rows if row["study"].split("/")[0] == model])
        if not plans or end_s - time.monotonic() < options.claim_seconds + _LOADING_S:
            continue
        section = document.begin("gpu_claim", model, again=options.again)
        if section is not None:
            tell(f"gpu: {' against '.join(accelerated.CLAIMS[model])} of {model} for {options.claim_seconds:g} s")
            processors = options.processors.split(",")
            document.finish(section, **accelerated.check_claim(model, plans, processors, options.claim_seconds))


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path)
    add("--part", nargs="+", choices=PARTS, default=["traces", "live", "studies", "cost"])
    add("--condition", nargs="+", choices=CONDITIONS, help="default: all that the part has")
    add("--again", action="store_true", help="make complete sections anew")
    add("--recalibrate", action="store_true", help="make the calibration anew")
    add("--calibrate-minutes", type=float, default=8.0, help="on the quiet machine, once (default 8)")
    add("--minutes", type=float, default=20.0, help="of each trace (default 20)")
    add("--reuse", action="store_true", help="resample traces that are there instead of recording them")
    add("--comparisons", type=int, default=6000, help="resampled from each trace, over three pairs (default 6000)")
    add("--live", type=int, default=60, help="live comparisons of each condition (default 60)")
    add("--repetitions", type=int, default=10, help="of studies (default 10)")
    add("--cases", nargs="+", choices=studies.CASES, default=list(studies.CASES), help="of the studies and their cost")
    add("--budget", type=int, default=40, help="of studies (default 40)")
    add("--long-minutes", type=float, default=4.0, help="of each long comparison (default 4)")
    add("--before", metavar="COMMAND", help="the command optimize of an older checkout, to be timed as well")
    add("--cost-budget", type=int, help="of the timed studies (default 200 and 40)")
    add("--only", metavar="MODEL,…", help="of the part gpu: mobilenet_v2, densenet121/1, …")
    add("--seconds", type=float, help="begin no study that may end later (default 520 for the part gpu)")
    add("--least-seconds", type=float, default=90.0, help="a study takes so long at least, where none has been made")
    add("--beside", default="", help="what else the machine does meanwhile, and on which cores: noted in the results")
    add("--long-seconds", type=float, default=40.0, help="of the part gpu: each network's long comparison (default 40)")
    add("--claim-seconds", type=float, default=45.0, help="of the part gpu: each check of a claim (default 45)")
    add("--processors", default=",".join(accelerated.PROCESSORS), help="of the part gpu (default cpu,gpu)")
    add("--gpu-budget", type=int, default=30)
    return parser


def main() -> None:
    """Run the parts that are asked for."""
    options = arguments().parse_args()
    options.work = options.out.with_suffix(".models").absolute()
    document = Document(options.out, sys.argv[2:], options.beside)
    parts = {"traces": traces, "live": live, "studies": run_studies, "cost": run_cost, "gpu": run_gpu}
    for part in options.part:
        parts[part](document, options)


if __name__ == "__main__":
    main()
