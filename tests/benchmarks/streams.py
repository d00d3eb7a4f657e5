"""How near a searched pipeline comes to its limit: half the time that one core takes, on two cores, measured in turns.

::

    python -m tests.benchmarks.streams OUT.json vgg16 squeezenet1_1 mobilenet_v1 --runs FOLDER

For each model the plan is searched with ``optimize --objective throughput`` (or taken from its run folder, where that
is finished); then one core, two threads and the pipeline are run in turns, each on fresh instances in every round. The
limit of a pipeline is half the time of one core; that of LiteRT with two threads is 1, by its own scaling
``one core / two threads``. What the memory allows is told by two copies of the model, each on a core of its own, that
run at the same time and know nothing of each other: what they give, no pipeline of the whole model can be blamed for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Candidate
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.provenance import provenance
from optimizer.report.console import ProgressWatcher
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan

_ROUNDS, _RUNS = 15, 3


def searched(model: str, folder: Path, budget: int) -> Plan:
    """Return the plan with the least period, from a study in ``folder``."""
    config = StudyConfig.model_validate(
        {"model": model, "budget": budget, "objective": "throughput", "max_stages": 4, "out": folder / model}
    )
    with ProgressWatcher(budget, quiet=True, verbose=False) as watcher:
        result = run_study(config, watcher, ["python", "-m", "tests.benchmarks.streams"])
    if result.verdict is None or result.verdict.challenger is None:
        raise SystemExit(f"{model}: nothing was found")
    return result.verdict.challenger


def measured(session: LitertSession, beside: LitertSession, graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return the seconds of each round: one core, two threads, the period of the pipeline, and that of two copies.

    Args:
        beside: another session on the same machine.
    """
    one, both = chain_plan(graph, (), ["cpu0"]), chain_plan(graph, (), ["cpu"])
    rows = []
    for _ in range(_ROUNDS):
        with ExitStack() as stack:
            made = []
            for each in (one, both, plan):
                candidate = session.load(graph, each, fresh=True)
                if not isinstance(candidate, LitertCandidate):
                    raise SystemExit("plans without splits only")
                made.append(stack.enter_context(closing(candidate)))
            for candidate in made:
                candidate.run(3)
            made[2].stream(1)
            copy = stack.enter_context(closing(beside.load(graph, chain_plan(graph, (), ["cpu1"]), fresh=True)))
            copy.run(3)
            turns = [
                (_median(made[0]), _median(made[1]), float(made[2].stream(1).latency_s[0]), _period(made[0], copy))
                for _ in range(3)
            ]
            rows.append([statistics.median(column) for column in zip(*turns, strict=True)])
            agreement = made[2].verify()
            if agreement is None or not agreement.identical:
                raise SystemExit("the pipeline computes something else than the model")
    table = np.array(rows)
    share = table[:, 0] / 2.0 / table[:, 2]
    scaling = table[:, 0] / table[:, 1]
    return {
        "plan": plan.to_json(),
        "one_core_ms": (table[:, 0] * 1e3).round(4).tolist(),
        "two_threads_ms": (table[:, 1] * 1e3).round(4).tolist(),
        "period_ms": (table[:, 2] * 1e3).round(4).tolist(),
        "two_copies_period_ms": (table[:, 3] * 1e3).round(4).tolist(),
        "two_copies_share_of_limit": float(np.median(table[:, 0] / 2.0 / table[:, 3])),
        "share_of_limit": float(np.median(share)),
        "share_of_limit_rounds": share.round(4).tolist(),
        "two_threads_scaling": float(np.median(scaling)),
        "pipeline_over_two_threads": float(np.median(table[:, 1] / table[:, 2])),
        "limit_over_two_threads": float(np.median(2.0 / scaling)),
        "identical": True,
    }


def _period(*copies: Candidate) -> float:
    """Return the seconds from one result to the next where candidates of two sessions run at the same time."""
    runs = 2 * _RUNS
    with ThreadPoolExecutor(len(copies)) as pool:
        batches = list(pool.map(lambda each: each.run(runs), copies))
    return float(1.0 / sum(1.0 / np.median(b.latency_s) for b in batches))


def _median(candidate: LitertCandidate) -> float:
    return float(np.median(candidate.run(_RUNS).latency_s))


def main() -> None:
    """Search, measure, and add to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=24)
    options = parser.parse_args()
    platform = local_platform()
    known = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    for model in options.models:
        plan = searched(model, options.runs, options.budget)
        with LitertEvaluator().prepare(platform) as session, LitertEvaluator().prepare(platform) as beside:
            known["models"][model] = measured(session, beside, load(model, ()), plan)
        found = known["models"][model]
        print(  # noqa: T201
            f"{model}: {found['share_of_limit']:.1%} of the limit; {found['pipeline_over_two_threads']:.3f} times as "
            f"many results as two threads, whose limit is {found['limit_over_two_threads']:.3f}; two copies at once: "
            f"{found['two_copies_share_of_limit']:.1%}"
        )
        known = {"schema_version": 1, "provenance": provenance(), **{k: known[k] for k in ("models",)}}
        options.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
