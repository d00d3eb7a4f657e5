"""What choosing a plan by the cost model alone costs: the figures of ``experiments/results/cost_model_choice.json``.

::

    optimize calibrate --processors cpu,cpu0,cpu1 --minutes 6 --out here.json
    python -m tests.benchmarks.cost_model_choice OUT.json --platform here.json

For each model one study asks the profile and another one measures; both search chains of up to three parts. The plan
that the profile calls the best is compared with the best measured one, in pairs over rebuilt instances.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import FinalPolicy, compare
from optimizer.provenance import provenance
from optimizer.report.console import ProgressWatcher
from optimizer.study.config import parse_config
from optimizer.study.course import run_study
from optimizer.study.result import Result
from search_spaces.core.plan import Plan
from search_spaces.models import load

MODELS = "vgg16,squeezenet1_1,mobilenet_v1"
STAGES, PREDICTED, MEASURED = 3, 30, 60
POLICY = FinalPolicy(precision=0.004, max_s=15.0, min_rounds=8)


def study(model: str, processors: str, budget: int, platform: str | None) -> tuple[Plan, Result]:
    """Return the best plan of a study, by the profile of a platform or measured."""
    values = {"model": model, "processors": processors, "budget": budget, "max_stages": STAGES}
    if platform is not None:
        values |= {"evaluator": "cost-model", "platform": platform}
    with TemporaryDirectory() as folder:
        config = parse_config(values | {"out": str(Path(folder) / "run")})
        with ProgressWatcher(config.budget, quiet=True, verbose=False) as watcher:
            result = run_study(config, watcher, ["python", "-m", "tests.benchmarks.cost_model_choice"])
    if result.best is None:
        raise SystemExit(f"{model}: no plan was found")
    return result.best, result


def chosen(model: str, processors: str, platform: str) -> dict[str, Any]:
    """Return both plans, and how many times as fast the measured one is."""
    predicted, by_model = study(model, processors, PREDICTED, platform)
    measured, _ = study(model, processors, MEASURED, None)
    graph, evaluator = load(model), LitertEvaluator()
    found: dict[str, Any] = {
        "predicted_plan": predicted.to_json(),
        "measured_plan": measured.to_json(),
        "predicted_ms": by_model.to_json()["best"]["latency_ms"]["median"],
    }
    if predicted == measured:
        return found | {"same": True, "regret": 0.0}
    used = {s.processor for plan in (predicted, measured) for s in plan.stages}
    with evaluator.prepare(evaluator.platform().restrict(sorted(used))) as session:
        found_pair = compare(
            lambda: session.load(graph, predicted, fresh=True),
            lambda: session.load(graph, measured, fresh=True),
            POLICY,
            np.random.default_rng(0),
        )
    low, high = found_pair.ratio.ci95
    return found | {
        "same": False,
        "regret": found_pair.ratio.value - 1.0,
        "ci95": [low - 1.0, high - 1.0],
        "predicted_plan_ms": found_pair.baseline.median * 1e3,
        "measured_plan_ms": found_pair.candidate.median * 1e3,
    }


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--processors", default="cpu,cpu0,cpu1")
    given = parser.parse_args()
    command = f"python -m tests.benchmarks.cost_model_choice {given.out.name} --platform {Path(given.platform).name}"
    document = {"schema_version": 1, "made_by": command, **provenance(), "models": {}}
    for model in given.models.split(","):
        document["models"][model] = chosen(model, given.processors, given.platform)
        sys.stdout.write(f"{model}: {document['models'][model]['regret']:.2%}\n")
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
