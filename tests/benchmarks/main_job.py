"""The whole job against the loop that one would write in an afternoon, and their two plans against each other.

``python -m tests.benchmarks.main_job vgg16 200`` runs both for 200 trials, ours first, on an otherwise quiet machine
(the plain loop takes a quarter of an hour), then compares the two plans interleaved. ``--plain-trials N`` runs fewer
trials of the plain loop and scales its time up, which is fair since each of its trials costs the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Candidate
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import Comparison, FinalPolicy, compare
from search_spaces.core.plan import Plan
from search_spaces.models import load


def ours(model: str, budget: int, folder: Path) -> tuple[float, Plan]:
    """Run ``optimize`` and return its wall time and its plan."""
    command = [sys.executable, "-m", "optimizer.cli", "--model", model, "--budget", str(budget), "--json", "-q"]
    begin = time.perf_counter()
    done = subprocess.run([*command, "--out", str(folder)], capture_output=True, check=True)
    wall_s = time.perf_counter() - begin
    return wall_s, Plan.from_json(json.loads(done.stdout)["best"]["plan"])


def plain(model: str, trials: int) -> tuple[float, Plan]:
    """Run the plain loop and return the seconds of a trial and its plan."""
    source = load(model).source
    if source is None:
        raise ValueError(model)
    command = [sys.executable, "-m", "tests.benchmarks.plain_loop", str(source.path), str(trials), "0"]
    done = subprocess.run(command, capture_output=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document["wall_s"] / trials, Plan.from_json(document["plan"])


def versus(model: str, baseline: Plan, candidate: Plan, max_s: float) -> Comparison:
    """Compare two plans, interleaved over rebuilt instances."""
    graph, evaluator = load(model), LitertEvaluator()
    with evaluator.prepare(evaluator.platform()) as session:

        def loaded(plan: Plan) -> Candidate:
            return session.load(graph, plan, fresh=True)

        policy = FinalPolicy(max_s=max_s)
        return compare(lambda: loaded(baseline), lambda: loaded(candidate), policy, np.random.default_rng(0))


def main() -> None:
    """Run both and print both times and both plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("budget", type=int)
    parser.add_argument("--plain-trials", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours_s, our_plan = ours(options.model, options.budget, Path(folder) / "run")
    trials = options.plain_trials or options.budget
    each_s, plain_plan = plain(options.model, trials)
    found = versus(options.model, plain_plan, our_plan, max_s=20.0)
    scaled = "" if trials == options.budget else f" (scaled from {trials} trials)"
    low, high = found.ratio.ci95
    verdict = "significant" if found.ratio.significant else "not significant"
    lines = [
        f"ours:  {ours_s:.1f} s for {options.budget} plans",
        f"plain: {each_s * options.budget:.1f} s for {options.budget} trials{scaled}, {each_s:.2f} s each",
        f"ratio: {each_s * options.budget / ours_s:.1f}",
        f"our plan:   {json.dumps(our_plan.to_json()['stages'])}",
        f"plain plan: {json.dumps(plain_plan.to_json()['stages'])}",
        f"our plan is {found.ratio.value:.4f} times as fast [{low:.4f}, {high:.4f}], {verdict}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
