"""Seed 002 on a machine with a graphics adapter: CPU and GPU share operators of zoo models, through LiteRT, measured.

``python -m tests.benchmarks.seed_002_gpu OUT.json --lanes gpu,cpu --minutes 9``

For each model a study in the space of co-execution, on the adapter and all cores: the model whole on either, chains of
parts, CoDL's greedy chains, operators split one by one, and what the search finds. The best plan is compared with the
best baseline in pairs; where sharing does not pay, the best plan is the adapter alone, and the result says so. One
plan that shares the model's first chain in proportion to the two processors' speeds is measured in any case. Models
for which no time is left are named as left out. A software adapter (``--lanes gpu:swiftshader:f32,cpu --models
squeezenet1_1@0.5/64``) shows that everything runs; its times say nothing of a real one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.sampling import SamplingPolicy, measure
from optimizer.config import StudyConfig
from optimizer.history import History, Trial
from optimizer.provenance import provenance
from optimizer.result import Result
from optimizer.run import RunFolder
from optimizer.study import run_study
from search_spaces.coexecution import GRID, CoexecutionSpace, Part
from search_spaces.errors import OptimizeError

MODELS = "vgg16,squeezenet1_1,resnet50,fast_style_transfer,googlenet,yolov2,mobilenet_v1"
Row = dict[str, Any]


class Teller:
    """Tells how a study goes on standard error; see :class:`~optimizer.study.Watcher`."""

    def message(self, text: str) -> None:
        """See there."""
        print(f"  {text}", file=sys.stderr, flush=True)  # noqa: T201

    warn = message

    def opened(self, run: RunFolder, history: History, space_size: int) -> None:
        """See there."""

    def trial(self, trial: Trial) -> None:
        """See there."""
        took = trial.measurement
        self.message(f"{trial.origin}: {took.latency_s.median * 1e3:.3f} ms" if took else f"failed: {trial.failure}")


def summary(result: Result) -> Row:
    """Return what a study found."""
    document = result.to_json()
    space = CoexecutionSpace(result.graph, result.platform)
    rows = {
        name: {"median_ms": row["latency_ms"]["median"], "ci95_ms": row["latency_ms"]["ci95"]}
        if row["latency_ms"]
        else {"failed": row["failure"]}
        for name, row in document["baselines"].items()
    }
    best = result.best
    shared = best is not None and len({s.processor for s in best.stages}) > 1
    return {
        "best": None
        if best is None
        else [
            f"{p.first}-{p.last - 1} {p.axis or 'whole'} {p.cut or ''} on {' and '.join(p.on)}"
            for p in space.parts(best)
        ],
        "best_ms": document["best"]["latency_ms"]["median"] if document["best"] else None,
        "verdict": "sharing pays" if shared else "one processor alone is the best plan",
        "against_the_best_baseline": document["speedup"]
        and {k: v for k, v in document["speedup"].items() if k != "plan"},
        "baselines": rows,
        "plans_measured": document["unique_plans"],
        "wall_s": document["wall_s"],
    }


def shared_anyway(session: LitertSession, result: Result) -> Row:
    """Measure a plan whose first chain that can be is split in proportion to the processors' speeds."""
    graph, platform = result.graph, result.platform
    space = CoexecutionSpace(graph, platform)
    first, second = (p.name for p in platform.processors)
    whole_s = [s.median for p in (first, second) if (s := result.samples(result.baselines[f"whole on {p}"]))]
    share = whole_s[1] / sum(whole_s) if len(whole_s) == 2 else 0.5
    chains = [(a, b) for a in range(min(8, len(graph.operators))) for b in range(a + 1, len(graph.operators))]
    begin, end = max((c for c in chains if space.steps(*c, "height")), key=lambda c: (c[1] - c[0], -c[0]))
    step = min(space.steps(begin, end, "height"), key=lambda s: abs(s / GRID - share))
    cut = space.steps(begin, end, "height")[step].split.cuts[0]
    rest = [Part(a, b, (first,)) for a, b in ((0, begin), (end, len(graph.operators))) if a < b]
    plan = space.plan([*rest[: begin > 0], Part(begin, end, (first, second), "height", cut), *rest[begin > 0 :]])
    with closing(session.load(graph, plan)) as candidate:
        found = measure(candidate, SamplingPolicy(precision=0.01, max_s=1.0, min_runs=10, max_runs=200))
        agreement = candidate.verify()
    return {
        "operators": [begin, end],
        "share_of_the_first": step / GRID,
        "median_ms": found.latency_s.median * 1e3,
        "ci95_ms": [s * 1e3 for s in found.latency_s.ci95],
        "stage_ms": [s * 1e3 for s in found.stage_s],
        "accepted": agreement.accepted if agreement else None,
        "relative_error": agreement.max_rel_error if agreement else None,
    }


def main() -> None:
    """Study as many models as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lanes", default="gpu,cpu")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budget", type=int, default=14)
    parser.add_argument("--minutes", type=float, default=9.0)
    given = parser.parse_args()
    begin_s = time.monotonic()
    document: Row = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.seed_002_gpu {given.out.name} --lanes {given.lanes} "
        f"--models {given.models} --budget {given.budget}",
        "provenance": provenance(),
        "models": {},
        "left_out": [],
    }
    longest_s = 0.0
    for name in given.models.split(","):
        left_s = given.minutes * 60 - (time.monotonic() - begin_s)
        if left_s < longest_s:
            document["left_out"].append(name)
            continue
        one_s = time.monotonic()
        print(name, file=sys.stderr, flush=True)  # noqa: T201
        with TemporaryDirectory() as folder:
            config = StudyConfig(
                model=name,
                budget=given.budget,
                space="coexecution",
                processors=tuple(given.lanes.split(",")),
                out=Path(folder) / "run",
            )
            try:
                result = run_study(config, Teller(), ["optimize"])
                document["models"][name] = summary(result)
                with LitertEvaluator().prepare(result.platform) as session:
                    document["models"][name]["shared_anyway"] = shared_anyway(session, result)
            except OptimizeError as error:
                document["models"].setdefault(name, {})["failed"] = str(error)
        longest_s = max(longest_s, time.monotonic() - one_s)
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
