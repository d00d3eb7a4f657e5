"""Do two runtimes beat the better one? Whole models on LiteRT and on OpenVINO, and searched plans, measured in turns.

::

    python -m tests.benchmarks.runtimes OUT.json squeezenet1_1 vgg16 … --runs FOLDER
    python -m tests.benchmarks.runtimes OUT.json squeezenet1_1 … --runs FOLDER --max-error 0.05

For each model and each number of threads the plan is searched with ``optimize --processors`` (or taken from its run
folder, where that is finished). Then LiteRT whole, OpenVINO whole, OpenVINO's own placements (``AUTO``, ``HETERO``),
and the plan are measured in one final: interleaved, on instances that are rebuilt. The file holds how many times as
long as the plan each takes, with its 95 % interval, the plan's error, and the geometric means over all models.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import conditions_of, counters_of
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import FinalPolicy, run_final
from optimizer.provenance import provenance
from optimizer.report.console import ProgressWatcher
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor, tell_apart
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan

LITERT, OPENVINO, AUTO, HETERO, OURS = "LiteRT", "OpenVINO", "AUTO", "HETERO", "plan"


def lanes(threads: int, *, reduced: bool) -> list[str]:
    """Return the names of the processors that a plan may use."""
    cores = {1: "cpu0", 2: "cpu"}[threads]
    words = ["", ":openvino", *([":openvino-bf16"] if reduced else [])]
    return [cores + word for word in words]


def placed_by_openvino(whole: Processor, device: str) -> Processor:
    """Return a processor on which OpenVINO chooses the device, among the CPU alone."""
    options = {**whole.options, "device": f"{device}:CPU"}
    return replace(whole, name=device, like=f"{whole.like}:{device}", options=options)


def searched(model: str, names: list[str], max_error: float | None, out: Path, budget: int) -> Plan:
    """Return the best plan of a study in ``out``."""
    config = StudyConfig.model_validate(
        {"model": model, "budget": budget, "processors": names, "max_error": max_error, "out": out}
    )
    with ProgressWatcher(budget, quiet=True, verbose=False) as watcher:
        result = run_study(config, watcher, ["python", "-m", "tests.benchmarks.runtimes"])
    if result.verdict is None:
        raise SystemExit(f"{model}: nothing was found")
    return result.verdict.best if result.verdict.challenger is None else result.verdict.challenger


def measured(model: str, names: list[str], plan: Plan) -> dict[str, Any]:
    """Return the milliseconds of each way to run a model, and how many times as long as the plan it takes."""
    graph = load(model)
    found = [make_processor(name) for name in names]
    extra = [placed_by_openvino(found[1], device) for device in (AUTO, HETERO)]
    platform = Platform("runtimes", tell_apart((*found, *extra)))
    whole = {LITERT: names[0], OPENVINO: names[1], AUTO: AUTO, HETERO: HETERO}
    plans = {OURS: plan, **{label: chain_plan(graph, (), [name]) for label, name in whole.items()}}
    with LitertEvaluator().prepare(platform) as session:
        final = run_final(
            [partial(session.load, graph, each, fresh=True) for each in plans.values()],
            FinalPolicy(),
            np.random.default_rng(0),
            conditions=conditions_of(session),
            counters=counters_of(session),
            watched=lambda _: range(len(plans)),
            computed=False,
        )
        with closing(session.load(graph, plan)) as candidate:
            agreement = candidate.verify()
        conditions = session.conditions()
    standings = dict(zip(plans, final.standings, strict=True))
    ratios = {label: final.ratio(place, 0) for place, label in enumerate(plans) if not standings[label].failure}
    return {
        "plan": plan.to_json(),
        "ms": {label: s.samples.median * 1e3 for label, s in standings.items() if s.samples is not None},
        "failures": {label: s.failure for label, s in standings.items() if s.failure},
        "over_the_plan": {label: [r.value, r.low, r.high] for label, r in ratios.items() if label != OURS},
        "max_rel_error": None if agreement is None else agreement.max_rel_error,
        "conditions": conditions,
    }


def means(models: dict[str, Any]) -> dict[str, float]:
    """Return the geometric means over all measured rows, of LiteRT and of the better runtime, over the plan."""
    rows = [row["over_the_plan"] for row in models.values()]
    best = [min(row[LITERT][0], row[OPENVINO][0]) for row in rows]
    return {
        "litert_over_plan": math.exp(sum(math.log(row[LITERT][0]) for row in rows) / len(rows)),
        "better_runtime_over_plan": math.exp(sum(map(math.log, best)) / len(best)),
    }


def main() -> None:
    """Search, measure, and add to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--threads", type=int, choices=(1, 2), action="append")
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--budget", type=int, default=60)
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    for model in options.models:
        for threads in options.threads or (1, 2):
            names = lanes(threads, reduced=options.max_error is not None)
            key = f"{model}, {threads} threads, error {options.max_error or 0:g}"
            out = options.runs / key.replace(", ", "-").replace(" ", "_").replace(":", "-")
            plan = searched(model, names, options.max_error, out, options.budget)
            known[key] = {"model": model, "threads": threads, "max_error": options.max_error}
            known[key] |= measured(model, names, plan)
            print(key, known[key]["ms"], known[key]["over_the_plan"])  # noqa: T201
            document = {"schema_version": 1, "provenance": provenance(), "rows": known, "means": means(known)}
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
