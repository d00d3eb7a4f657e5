"""Do two runtimes beat the better one? Whole models on LiteRT and on OpenVINO, and searched plans, measured in turns.

::

    python -m tests.benchmarks.runtimes OUT.json --runs FOLDER
    python -m tests.benchmarks.runtimes OUT.json --runs FOLDER --only vgg16 --processors cpu,cpu:openvino
    python -m tests.benchmarks.runtimes OUT.json --runs FOLDER --cores 4 6
    python -m tests.benchmarks.runtimes OUT.json --runs FOLDER --kernels

The studies are those of ``experiments/runtimes.yaml``, in the folders that ``optimize run`` gives them; what is
finished there is not searched again. Then LiteRT whole, OpenVINO whole (with its own choice of kernels, and with
``blocked`` ones), OpenVINO's own placements (``AUTO``, ``HETERO``), the plan and the best plan on more than one
processor are measured in one final: interleaved, on instances that are rebuilt.
``--cores A B`` takes two cores of a machine with more: A in place of core 0, both in place of all.
``--calibrated FILE`` adds the plan that the cost model of ``optimize calibrate`` chooses, without measuring any, where
no error is allowed; rows that OUT.json holds already get it, too, measured beside the plan that was found then and
beside whole models.

``--kernels`` adds to rows what a sequence of LiteRT's and OpenVINO's own kernels could gain by their times inside the
whole model, where they are fused, if each change of runtime cost so many microseconds. Where one runtime's time of an
operator is not known, the other's counts for both.

OUT.json holds for each study by how much each takes longer than the plan, with its 95 % interval; the plan's error; and
what mixing could gain if transfers were free (each operator on the faster runtime), beside what stages cost.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.base import conditions_of, counters_of
from evaluators.cost_model.calibrate_kernels import profile_kernels
from evaluators.cost_model.calibrate_time import openvino_seconds, operator_seconds, reference_network
from evaluators.cost_model.features import fused, operator_features
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import FinalComparison, FinalPolicy
from optimizer.campaign.file import read_campaign
from optimizer.campaign.studies import Planned, plan_studies
from optimizer.files import write_atomic
from optimizer.model.profile import Profile
from optimizer.provenance import provenance
from optimizer.report.console import ProgressWatcher
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.folder import LOG
from optimizer.study.limits import keeps, limits_of
from optimizer.study.log import read_log
from optimizer.study.result import Result
from search_spaces.core.errors import OptimizeError
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor, tell_apart
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan

CAMPAIGN = Path(__file__).parents[2] / "experiments" / "runtimes.yaml"
LITERT, OPENVINO, BF16, BLOCKED, AUTO, HETERO = "LiteRT", "OpenVINO", "OpenVINO bf16", "blocked", "AUTO", "HETERO"
OURS, MIXED, CALIBRATED = "plan", "mixed", "calibrated"
SINGLE = (LITERT, OPENVINO, BF16)
POLICY = FinalPolicy(max_s=60.0, disturbed_s=20.0, min_rounds=4)


def placed_by_openvino(whole: Processor, device: str) -> Processor:
    """Return a processor on which OpenVINO chooses the device, among the CPU alone."""
    options = {**whole.options, "device": f"{device}:CPU"}
    return replace(whole, name=device, like=f"{whole.like}:{device}", options=options)


def searched(config: StudyConfig) -> Result:
    """Return the result of a study; a finished one is read."""
    with ProgressWatcher(config.budget, quiet=True, verbose=False) as watcher:
        return run_study(config, watcher, ["python", "-m", "tests.benchmarks.runtimes"])


def moved(name: str, cores: Sequence[int] | None) -> str:
    """Return a processor's name on two cores: the first in place of one core, both in place of two or of all."""
    head, *rest = name.partition(":")
    if cores is None:
        return name
    return "".join((f"cpu{cores[0]}+{cores[1]}" if head == "cpu" or "+" in head else f"cpu{cores[0]}", *rest))


def moved_plan(plan: Plan, cores: Sequence[int] | None) -> Plan:
    """Return a plan on two cores, as :func:`moved` names them."""
    return replace(plan, stages=tuple(replace(s, processor=moved(s.processor, cores)) for s in plan.stages))


def by_cost_model(config: StudyConfig, profile: Path, cores: Sequence[int] | None) -> Plan:
    """Return the plan that a cost model chooses for ``cores``; it was calibrated on cores 0 and 1."""
    with TemporaryDirectory() as folder:
        asked = {"evaluator": "cost-model", "platform": profile, "out": Path(folder) / "run", "study": None}
        calibrated = on_cores(config, None if cores is None else (0, 1))
        plan = searched(calibrated.model_copy(update=asked)).best
    if plan is None:
        raise SystemExit(f"{config.model}: nothing was found")
    return moved_plan(plan, cores)


def mixed_plan(config: StudyConfig, result: Result) -> Plan | None:
    """Return the plan on more than one processor that took least and keeps the limit."""
    kept = [t.plan for t in result.history.ranking() if keeps(limits_of(config), t, "latency")]
    return next((plan for plan in kept if len({s.processor for s in plan.stages}) > 1), None)


def reason(result: Result) -> dict[str, Any]:
    """Return what a study's profile says of mixing: the gain if it were free, and what stages and transfers cost."""
    record = next(r for r in read_log(result.run_dir / LOG).records if r.kind == "profile")
    known = Profile.from_json(record.data)
    operator_s = np.array([known.operator_s[p.like] for p in result.platform.processors])
    fastest = operator_s.argmin(axis=0)
    whole_s = min(known.whole_s.values())
    return {
        "free_mixing_gain": whole_s / float(operator_s.min(axis=0).sum()),
        "changes_of_runtime": int(sum(a != b for a, b in pairwise(fastest.tolist()))),
        "whole_us": whole_s * 1e6,
        "stage_us": {p.name: known.overhead_s[p.like] * 1e6 for p in result.platform.processors},
        "transfer_us": {pair: seconds * 1e6 for pair, seconds in known.transfer_s.items()},
    }


def kernel_gains(model: str, names: Sequence[str]) -> dict[str, Any]:
    """Return by how much the best sequence of two runtimes' kernels would beat the better runtime's, by changes' cost.

    Args:
        names: LiteRT's processor and OpenVINO's.
    """
    graph, found = load(model), [make_processor(name) for name in names]
    assert graph.source is not None
    seconds = []
    with TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.tflite"
        reference_network().write(reference)
        for processor, own in zip(found, (False, True), strict=True):
            features = operator_features(graph)
            features = fused(features) if own else features
            packed = None if own else Path(folder) / "packed.xnnpack"
            timed = profile_kernels(graph.source.path, reference, processor, packed, seconds=2.0)
            each = (
                openvino_seconds(features, timed.names, timed.kernel_s)
                if own
                else operator_seconds(features, timed.names, timed.kernel_s, graph)
            )
            seconds.append((each, sum(timed.kernel_s)))
    # Where one runtime's time is not known, it takes what the other does.
    filled = [np.nan_to_num(np.where(np.isnan(a), b, a)) for (a, _), (b, _) in (seconds, seconds[::-1])]
    sums = [float(each.sum()) for each in filled]
    gains = {}
    for change_us in (0, 20, 50, 100):
        ends = np.zeros(2)
        for own_s in zip(*filled, strict=True):
            ends = np.minimum(ends, ends[::-1] + change_us * 1e-6) + own_s
        gains[str(change_us)] = min(sums) / float(ends.min())
    attributed = [float(np.nansum(each)) / total_s for each, total_s in seconds]
    return {"ms": [1e3 * s for s in sums], "attributed": attributed, "gain_by_change_us": gains}


def measured(config: StudyConfig, others: Mapping[str, Plan | None], base: str = OURS) -> dict[str, Any]:
    """Return the milliseconds of each way to run a model, and how many times as long as the plan ``base`` it takes."""
    graph, names = load(config.model), list(config.processors or ())
    found = [make_processor(name) for name in names]
    labels = [LITERT, OPENVINO, *(BLOCKED if "blocked" in name else BF16 for name in names[2:])]
    if config.max_error is None:
        labels += (AUTO, HETERO)
        found += [placed_by_openvino(found[1], device) for device in (AUTO, HETERO)]
    platform = Platform("runtimes", tell_apart(found))
    plans = {label: chain_plan(graph, (), [p.name]) for label, p in zip(labels, platform.processors, strict=True)}
    same: dict[str, str] = {}
    for label, plan in others.items():
        if plan is None:
            continue
        twin = next((other for other, known in plans.items() if known.digest == plan.digest), None)
        if twin is None:
            plans[label] = plan
        else:
            same[label] = twin
    with LitertEvaluator().prepare(platform) as session:
        errors = {}
        for label, plan in list(plans.items()):
            try:
                with closing(session.load(graph, plan)) as candidate:
                    agreement = candidate.verify()
            except OptimizeError:
                del plans[label]
                continue
            errors[label] = None if agreement is None else agreement.max_rel_error
        final = FinalComparison(
            [partial(session.load, graph, plan, fresh=True) for plan in plans.values()],
            POLICY,
            np.random.default_rng(0),
            conditions=conditions_of(session),
            counters=counters_of(session),
            watched=lambda _: range(len(plans)),
            computed=False,
        ).run()
    standings = dict(zip(plans, final.standings, strict=True))
    order = list(plans)
    over = order.index(same.get(base, base))
    ratios = {label: final.ratio(order.index(label), over) for label, s in standings.items() if not s.failure}
    return {
        "same": same,
        "ms": {label: s.samples.median * 1e3 for label, s in standings.items() if s.samples is not None},
        "failures": {label: s.failure for label, s in standings.items() if s.failure},
        f"over_the_{base}": {label: [r.value, r.low, r.high] for label, r in ratios.items()},
        "max_rel_error": errors,
    }


def study_row(config: StudyConfig) -> dict[str, Any]:
    """Search, then return what is measured of the plan, of the other ways, and why mixing pays or does not."""
    result = searched(config)
    if result.best is None:
        raise SystemExit(f"{config.model}: nothing was found")
    others = {OURS: result.best, MIXED: mixed_plan(config, result)}
    return {
        "plan": result.best.to_json(),
        "stages": len(result.best.stages),
        **measured(config, others),
        "top1": result.deployed.top1 if result.deployed is not None else None,
        "mixing": reason(result),
    }


def calibrated_row(config: StudyConfig, found: Plan, chosen: Plan) -> dict[str, Any]:
    """Return the calibrated choice, measured beside the plan that an earlier study found and beside whole models."""
    return {"plan": chosen.to_json(), **measured(config, {OURS: found, CALIBRATED: chosen}, CALIBRATED)}


def _geometric(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the rows of one group say together; ratios of a whole model over the plan."""
    best, whole = [best_single(row) for row in rows], [best_single(row, BLOCKED) for row in rows]
    regrets = {row["model"]: regret(row) for row in rows if CALIBRATED in row}
    return {
        "networks": len(rows),
        "litert_over_plan": _geometric(row["over_the_plan"][LITERT][0] for row in rows),
        "best_single_over_plan": _geometric(value for value, *_ in best),
        "significantly_slower_than_best_single": [r["model"] for r, b in zip(rows, best, strict=True) if b[2] < 1.0],
        "significantly_faster_than_best_single": [r["model"] for r, b in zip(rows, best, strict=True) if b[1] > 1.0],
        "most_over_best_single": max(value for value, *_ in best),
        "best_whole_over_plan": _geometric(value for value, *_ in whole),
        "significantly_faster_than_best_whole": [r["model"] for r, b in zip(rows, whole, strict=True) if b[1] > 1.0],
        "plans_on_two_processors": [r["model"] for r in rows if len({s["processor"] for s in r["plan"]["stages"]}) > 1],
        "free_mixing_gain": _geometric(row["mixing"]["free_mixing_gain"] for row in rows),
        "largest_error": max((_error(row) or 0.0 for row in rows), default=None),
        "regret_of_calibration": regrets,
        "mean_regret_of_calibration": float(np.mean([r["regret"][0] for r in regrets.values()])) if regrets else None,
    }


def best_single(row: Mapping[str, Any], *more: str) -> list[float]:
    """Return ratio and interval over the plan of the fastest whole model that keeps the limit, chosen afterwards.

    Args:
        more: ways to run it whole beside those that a runtime chooses itself.
    """
    most = row["max_error"]
    ways = [label for label in (*SINGLE, *more) if label in row["ms"]]
    singles = [(row["over_the_plan"][label], row["max_rel_error"].get(label)) for label in ways]
    found: list[float] = min(ratio for ratio, error in singles if most is None or (error or 0.0) <= most)
    return found


def regret(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much the calibrated choice takes longer than the best beside it in the limit, with its interval.

    OpenVINO's own placements are left out: on one CPU they are OpenVINO's whole model once more.
    """
    beside = row[CALIBRATED]
    most, errors = row["max_error"], beside["max_rel_error"]
    ratios = {
        label: ratio
        for label, ratio in beside["over_the_calibrated"].items()
        if label in {*SINGLE, BLOCKED, OURS, CALIBRATED} and (most is None or (errors.get(label) or 0.0) <= most)
    }
    best = min(ratios, key=lambda label: ratios[label][0])
    value, low, high = (1.0 / ratio - 1.0 for ratio in ratios[best])
    error = errors.get(beside["same"].get(CALIBRATED, CALIBRATED))
    return {"regret": [value, high, low], "best": best, "error": error}


def _error(row: Mapping[str, Any]) -> float | None:
    found: float | None = row["max_rel_error"].get(row["same"].get(OURS, OURS))
    return found


def group_of(row: Mapping[str, Any]) -> str:
    """Return what a row is summed up with."""
    kind = "int8" if ":int8" in row["model"] else f"error {row['max_error'] or 0:g}"
    return f"{kind}, {row['threads']} threads" + (", blocked kernels, too" if BLOCKED in row["ms"] else "")


def write(out: Path, rows: Mapping[str, Any]) -> None:
    """Write rows and summaries, whole or not at all."""
    groups: dict[str, list[Any]] = {}
    for row in rows.values():
        groups.setdefault(group_of(row), []).append(row)
    document = {
        "schema_version": 1,
        "made_by": shlex.join(["python", "-m", "tests.benchmarks.runtimes", *sys.argv[1:]]),
        **provenance(),
        "summary": {name: summary(members) for name, members in groups.items()},
        "rows": rows,
    }
    write_atomic(out, (json.dumps(document, indent=1) + "\n").encode())


def on_cores(config: StudyConfig, cores: Sequence[int] | None) -> StudyConfig:
    """Return a study on two cores of a machine with more."""
    return config.model_copy(update={"processors": tuple(moved(name, cores) for name in config.processors or ())})


def chosen(options: argparse.Namespace) -> list[Planned]:
    """Return the studies that the words ask for, in the campaign's order."""
    studies = plan_studies(read_campaign(CAMPAIGN))
    return [
        study
        for study in studies
        if (not options.only or study.axes["model"] in options.only)
        and (not options.processors or study.axes["processors"] == options.processors)
        and (options.error is None or (study.axes["max_error"] or 0.0) == options.error)
    ]


def main() -> None:
    """Search, measure, and add to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", action="append")
    parser.add_argument("--processors")
    parser.add_argument("--error", type=float)
    parser.add_argument("--calibrated", type=Path)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--cores", type=int, nargs=2, metavar="CORE")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    for study in chosen(options):
        row = rows.get(study.name)
        choice = options.calibrated is not None and study.axes["max_error"] is None  # a cost model knows no errors
        kernels = options.kernels and study.axes["max_error"] is None and ":int8" not in study.axes["model"]
        if row is not None and (not choice or CALIBRATED in row) and (not kernels or "kernels" in row):
            continue
        config = study.config.model_copy(update={"out": options.runs / study.folder, "study": study.folder})
        if row is None:
            threads = 2 if study.axes["processors"].startswith("cpu,") else 1
            about = {"model": study.axes["model"], "threads": threads, "max_error": study.axes["max_error"]}
            row = rows[study.name] = about | study_row(on_cores(config, options.cores))
        if choice:
            plan = by_cost_model(config, options.calibrated, options.cores)
            found = moved_plan(Plan.from_json(row["plan"]), options.cores)
            row[CALIBRATED] = calibrated_row(on_cores(config, options.cores), found, plan)
        print(study.name, row["ms"], row["over_the_plan"], row.get(CALIBRATED, {}).get("over_the_calibrated"))  # noqa: T201
        write(options.out, rows)
        if kernels:
            row["kernels"] = kernel_gains(row["model"], (on_cores(config, options.cores).processors or ())[:2])
            write(options.out, rows)


if __name__ == "__main__":
    main()
