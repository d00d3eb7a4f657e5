"""Seed 002 on a machine with a graphics adapter: CPU and GPU share operators of zoo models, through LiteRT, measured.

``python -m tests.benchmarks.seed_002_gpu OUT.json --processors gpu,cpu --minutes 9``

For each model a study in the space of co-execution, on the adapter and all cores: the model whole on either, chains of
parts, CoDL's greedy chains, operators split one by one, and what the search finds. The best plan is compared with the
best baseline in pairs; where sharing does not pay, the best plan is one processor alone, and the result says so. Two
plans that share are measured in any case, and in pairs with the first processor alone: the first chain in proportion to
the speeds of both, and the cheapest by the model that shares a short chain or a group of branches. A study of a model
whose stages an adapter takes seconds to load may be cut short before its final comparison (``--study-s``): its best
plan is then the one of the least median. Models for which no time is left are named as left out; a command that is cut
short keeps what was found until then. A software adapter (``--processors gpu:swiftshader:f32,cpu --models
squeezenet1_1@0.5/64``) shows that everything runs; its times say nothing of a real one.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np

from evaluators.base import Agreement
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import FinalPolicy, compare
from evaluators.samples import Measurement
from evaluators.sampling import SamplingPolicy, measure
from optimizer.exact.segment_model import SegmentModel
from optimizer.model.profile import Profile
from optimizer.provenance import provenance
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.ends import Interrupted
from optimizer.study.folder import LOG, RunFolder
from optimizer.study.history import History, Trial
from optimizer.study.log import read_log
from optimizer.study.result import Result
from search_spaces.core.errors import OptimizeError, PlanError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_chains import GRID
from search_spaces.spaces.shared_parts import Part

MODELS = "squeezenet1_1,resnet50,vgg16,mobilenet_v1,googlenet,fast_style_transfer,yolov2"
LENGTHS = (1, 2, 4, 8, 16)
AXES: tuple[Axis, ...] = ("height", "channels")
Row = dict[str, Any]


class Teller:
    """Tells how a study goes on standard error; see :class:`~optimizer.study.ends.Watcher`."""

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


def described(space: SegmentSpace, plan: Plan) -> list[str]:
    """Return what each part of a plan is, and where it runs."""
    try:
        parts = space.parts(plan)
    except PlanError:
        return [f"{stage.operators[0]}-{stage.operators[-1]} on {stage.processor}" for stage in plan.stages]
    return [f"{p.first}-{p.last - 1} {p.axis or 'whole'} {p.cut or ''} on {' and '.join(p.on)}" for p in parts]


def shares(space: SegmentSpace, plan: Plan) -> bool:
    """Return whether two processors work at the same part in a plan."""
    try:
        return any(len(part.on) > 1 for part in space.parts(plan))
    except PlanError:
        return False


def verdict_on(space: SegmentSpace, best: Plan) -> str:
    """Return in words how many processors the best plan uses."""
    if shares(space, best):
        return "sharing pays"
    processors = sorted({stage.processor for stage in best.stages})
    return (
        f"{processors[0]} alone is the best plan"
        if len(processors) == 1
        else "parts on both, one after the other, are best"
    )


def agreed(agreement: Agreement | None) -> Row:
    """Return how outputs compare with the whole model's on the CPU."""
    if agreement is None:
        return {}
    return {
        "accepted": agreement.accepted,
        "relative_error": agreement.max_rel_error,
        "tolerance": agreement.tolerance,
    }


def measured(space: SegmentSpace, trial: Trial, took: Measurement) -> Row:
    """Return what a plan was measured at during the search."""
    return {
        "origin": trial.origin,
        "parts": described(space, trial.plan),
        "median_ms": took.latency_s.median * 1e3,
        "ci95_ms": [s * 1e3 for s in took.latency_s.ci95],
        **agreed(took.agreement),
    }


def summary(result: Result) -> Row:
    """Return what a study found."""
    document = result.to_json()
    space = SegmentSpace(result.graph, result.platform)
    rows = {
        name: {"median_ms": row["latency_ms"]["median"], "ci95_ms": row["latency_ms"]["ci95"]}
        if row["latency_ms"]
        else {"failed": row["failure"]}
        for name, row in document["baselines"].items()
    }
    best, verdict = result.best, result.verdict
    took = result.measurement(best) if best else None
    found = [(t, t.measurement) for t in result.history.trials if t.measurement is not None and t.repeat_of is None]
    sharing = sorted((p for p in found if shares(space, p[0].plan)), key=lambda p: p[0].median_s)
    failures = sorted({t.failure for t in result.history.trials if t.failure})
    return {
        "complete": document["complete"],
        "best": described(space, best) if best else None,
        "best_ms": document["best"]["latency_ms"]["median"] if document["best"] else None,
        "best_outputs": agreed(result.deployed or (took.agreement if took else None)),
        "verdict": verdict_on(space, best) if best else "nothing was measured",
        "against_the_best_baseline": document["speedup"]
        and {k: v for k, v in document["speedup"].items() if k != "plan"}
        | {"parts": described(space, verdict.challenger) if verdict and verdict.challenger else None},
        "baselines": rows,
        "fastest_that_shares": measured(space, *sharing[0]) if sharing else None,
        "plans_measured": document["unique_plans"],
        "plans_that_share": len(sharing),
        "failures": [text[:300] for text in failures[:5]],
        "wall_s": document["wall_s"],
    }


def proportional(result: Result) -> Plan:
    """Return a plan whose first chain that can be is split in proportion to the two processors' speeds."""
    graph, platform = result.graph, result.platform
    space = SegmentSpace(graph, platform)
    first, second = (p.name for p in platform.processors)
    whole_s = [s.median for p in (first, second) if (s := result.samples(result.baselines[f"whole on {p}"]))]
    share = whole_s[1] / sum(whole_s) if len(whole_s) == 2 else 0.5
    chains = [(a, b) for a in range(min(8, len(graph.operators))) for b in range(a + 1, len(graph.operators))]
    begin, end = max((c for c in chains if space.steps(*c, "height")), key=lambda c: (c[1] - c[0], -c[0]))
    step = min(space.steps(begin, end, "height"), key=lambda s: abs(s / GRID - share))
    cut = space.steps(begin, end, "height")[step].split.cuts[0]
    return space.plan(amid(graph, Part(begin, end, (first, second), "height", cut), first))


def amid(graph: Graph, part: Part, processor: str) -> tuple[Part, ...]:
    """Return the parts of a plan that runs everything but one part whole on one processor."""
    count = len(graph.operators)
    before = (Part(0, part.first, (processor,)),) if part.first else ()
    return (*before, part, *((Part(part.last, count, (processor,)),) if part.last < count else ()))


def cheapest_that_shares(result: Result) -> Plan:
    """Return, of the plans that share one short chain or one group of branches, the cheapest by the study's model."""
    graph, platform = result.graph, result.platform
    space = SegmentSpace(graph, platform)
    records = read_log(result.run_dir / LOG).records
    profile = Profile.from_json(next(r.data for r in records if r.kind == "profile"))
    model = SegmentModel(space, profile.costs(platform))
    count = len(graph.operators)
    shared = [
        Part(first, last, pair, axis, sides.split.cuts[0])
        for first in range(count)
        for last in (first + length for length in LENGTHS if first + length <= count)
        for axis in AXES
        for sides in space.steps(first, last, axis).values()
        for pair in space.pairs
    ]
    shared += [
        Part(segment.first, segment.joint, on, "branches")
        for segment in space.branching
        for on in product(space.pairs[0], repeat=len(segment.runs))
        if len(set(on)) > 1
    ]
    plans = (amid(graph, part, processor) for part in shared for processor in space.processors)
    return space.plan(min(plans, key=model.cost_s))


def in_pairs(session: LitertSession, result: Result) -> Row:
    """Compare plans that share in any case, and the best one, in pairs with the model whole on the first processor."""
    space = SegmentSpace(result.graph, result.platform)
    first, second = (result.baselines[f"whole on {p.name}"] for p in result.platform.processors)
    plans = {
        f"whole on {result.platform.processors[1].name}": second,
        "first chain, shared in proportion": proportional(result),
    }
    if space.pairs:  # a software adapter needs the very cores of the other processor: the model knows no sharing then
        plans["cheapest that shares, by the model"] = cheapest_that_shares(result)
    if result.best is not None and result.best != second:
        plans["best of the study"] = result.best
    return {name: against(session, space, plan, first) for name, plan in plans.items() if plan != first}


def against(session: LitertSession, space: SegmentSpace, plan: Plan, first: Plan) -> Row:
    """Measure a plan alone, and in pairs with the model whole on the first processor."""
    row: Row = {"parts": described(space, plan)}
    try:
        with closing(session.load(space.graph, plan)) as candidate:
            found = measure(candidate, SamplingPolicy(precision=0.01, max_s=1.0, min_runs=10, max_runs=200))
            row |= agreed(candidate.verify())
        # Stages stay loaded between the rounds: loading takes an adapter seconds.
        compared = compare(
            lambda: session.load(space.graph, first),
            lambda: session.load(space.graph, plan),
            FinalPolicy(precision=0.005, max_s=1.5, min_rounds=5, max_rounds=20),
            np.random.default_rng(0),
        )
    except OptimizeError as error:
        return row | {"failed": str(error)}
    return row | {
        "median_ms": found.latency_s.median * 1e3,
        "ci95_ms": [s * 1e3 for s in found.latency_s.ci95],
        "stage_ms": [s * 1e3 for s in found.stage_s],
        "times_as_fast_as_the_first_processor": compared.speedup,
        "ci95": list(compared.ci95),
        "significant": compared.significant,
        "median_ms_in_turns": [compared.baseline.median * 1e3, compared.candidate.median * 1e3],
    }


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt what runs longer, as a person would with Ctrl-C."""

    def end(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def studied(config: StudyConfig, limit_s: float) -> Result:
    """Return what a study found, or what it knew when its time was up.

    Raises:
        OptimizeError: it found nothing.
    """
    try:
        with at_most(limit_s):
            return run_study(config, Teller(), ["optimize"])
    except Interrupted as interrupted:
        if interrupted.result is None:
            raise UnavailableError(f"nothing was measured within {limit_s:g} s") from None
        return interrupted.result


def main() -> None:
    """Study as many models as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processors", default="gpu,cpu")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--budget", type=int, default=14)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--study-s", type=float, default=600.0, help="cut a study short after these seconds")
    given = parser.parse_args()
    begin_s = time.monotonic()
    document: Row = {
        "schema_version": 1,
        "command": f"python -m tests.benchmarks.seed_002_gpu {given.out.name} --processors {given.processors} "
        f"--models {given.models} --budget {given.budget} --study-s {given.study_s:g}",
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
                allow="cuts,branches,splits",
                processors=tuple(given.processors.split(",")),
                out=Path(folder) / "run",
            )
            try:
                result = studied(config, given.study_s)
                document["platform"] = result.platform.to_json()
                document["models"][name] = summary(result)
                given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                with LitertEvaluator().prepare(result.platform) as session:
                    document["models"][name]["in_pairs"] = in_pairs(session, result)
            except OptimizeError as error:
                document["models"].setdefault(name, {})["failed"] = str(error)
        spent_s = time.monotonic() - one_s
        document["models"][name]["spent_s"] = spent_s
        longest_s = max(longest_s, spent_s)
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
