"""Seed 000's tables on a graphics adapter, for VGG16 and for every CNN of the zoo.

``python -m tests.benchmarks.seed_000_gpu OUT.json --processor gpu --models vgg16,resnet50 --minutes 9``

For each model: whole, every layer, layer length and parameter count with K = 2 to 4, and layer type. Each plan is
compared with the whole model in interleaved pairs; both stay loaded, since loading takes a GPU seconds, so the interval
covers chance between runs but not between instances. A latency ends when the result can be read. Models for which no
time is left are named as left out.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import FinalPolicy, compare
from evaluators.sampling import SamplingPolicy, measure
from optimizer.model.baselines import baselines
from optimizer.provenance import provenance
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan

CNNS = (
    "vgg16,alexnet,vgg11,vgg19,squeezenet1_1,mobilenet_v1,resnet50,googlenet,mobilenet_v2,resnet18,squeezenet1_0,"
    "inception_v3,mobilenet_v3_large,efficientnet_lite0,densenet121,resnet101,resnet152,posenet,yolov2,regnet_y_32gf,"
    "retinaface,fast_style_transfer"
)
ALONE = SamplingPolicy(precision=0.002, max_s=1.0, min_runs=20, max_runs=400)
PAIRED = FinalPolicy(precision=0.003, max_s=1.5, min_rounds=5, max_rounds=20)


def criteria(session: LitertSession, graph: Graph, platform: Platform, processor: str) -> dict[str, Any]:
    """Measure a model's criteria on one processor."""
    whole = chain_plan(graph, (), [processor])
    rows: dict[str, Any] = {}
    for baseline in baselines(graph, platform, processor):
        begin = time.perf_counter()
        try:
            with closing(session.load(graph, baseline.plan)) as candidate:
                found = measure(candidate, ALONE)
                agreement = candidate.verify()
            row: dict[str, Any] = {
                "stages": len(baseline.plan.stages),
                "median_ms": found.latency_s.median * 1e3,
                "mean_ms": float(np.mean(found.latency_s.values_s)) * 1e3,
                "ci95_ms": [x * 1e3 for x in found.latency_s.ci95],
                "runs": len(found.latency_s.values_s),
                "relative_error": agreement.max_rel_error if agreement else None,
                "accepted": agreement.accepted if agreement else None,
            }
            if baseline.plan != whole:
                against = compare(
                    lambda: session.load(graph, whole),
                    lambda plan=baseline.plan: session.load(graph, plan),  # type: ignore[misc]
                    PAIRED,
                    np.random.default_rng(0),
                )
                row |= {
                    "times_as_fast_as_whole": against.ratio.value,
                    "ci95": list(against.ratio.ci95),
                    "significant": against.ratio.significant,
                }
        except OptimizeError as error:
            row = {"failed": str(error)}
        rows[baseline.name] = row | {"spent_s": time.perf_counter() - begin}
    return rows


def main() -> None:
    """Measure as many models as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processor", default="gpu")
    parser.add_argument("--models", default=CNNS)
    parser.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    platform = Platform("device", (make_processor(options.processor),))
    document: dict[str, Any] = {
        "schema_version": 1,
        "made_by": f"python -m tests.benchmarks.seed_000_gpu OUT --processor {options.processor} "
        f"--models {options.models}",
        **provenance(),
        "platform": platform.to_json(),
        "models": {},
        "left_out": [],
    }
    for name in options.models.split(","):
        if time.monotonic() > end:
            document["left_out"].append(name)
            continue
        try:
            # A session of its own: what earlier models hold on the device must not be in the way.
            with LitertEvaluator().prepare(platform) as session:
                document["models"][name] = criteria(session, load(name), platform, options.processor)
        except OptimizeError as error:
            document["models"][name] = {"failed": str(error)}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        rows = document["models"][name]
        print(name, {k: round(v["median_ms"], 3) for k, v in rows.items() if "median_ms" in v}, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
