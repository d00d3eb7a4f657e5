"""Seed 001, Table 1, on the Xavier profile: models alone, and six at once as processes, by the simulator of workloads.

``python -m tests.benchmarks.seed_001_xavier ../shared/reference OUT.json``: six at once are left out of the profile's
fit. They are predicted twice: from the published time of one alone, and from the profile's own.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.workload.lowered import Lowerings
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.simulate import JobCost
from optimizer.workload.baselines import workload_baselines
from search_spaces.core.errors import UnavailableError
from search_spaces.core.joined_graph import merge
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import workload_of
from search_spaces.models.zoo import draft
from search_spaces.spaces.workload_space import WorkloadSpace

MODELS = {"alexnet": "alexnet", "squeezenet": "squeezenet1_0", "vgg16": "vgg16", "regnet_y_32gf": "regnet_y_32gf"}


def main(reference: Path, out: Path) -> None:
    """Predict and write."""
    published = yaml.safe_load((reference / "published.yaml").read_text())["seed_001_xavier"]["alone_and_six_at_once"]
    evaluator = CostModelEvaluator()
    platform = evaluator.described("xavier")
    if platform is None:
        raise UnavailableError("there is no profile of the Xavier")
    rows = {}
    for name, model in MODELS.items():
        alone_ms, six_ms = published[name]
        graph = draft(model).graph()
        workload = workload_of(f"{model}×6")
        joined = merge(model, [(i.name, graph) for i in workload.instances])
        space = WorkloadSpace(workload, joined, with_pools(platform), 1)
        named, processors = workload_baselines(space, threads=False)
        processes = named[0].plan
        with evaluator.host(workload, joined, processors, "mean") as session:
            fitted = session.simulator.run(processes).value_s("mean") * 1e3
            fitted_alone = session.simulator.prices(graph)(0, range(len(graph.operators))) * 1e3

        def price(*_: object, took_s: float = alone_ms * 1e-3) -> JobCost:
            return JobCost(took_s)

        reported = (
            WorkloadSimulator(Lowerings(workload, joined, processors), price).run(processes).value_s("mean") * 1e3
        )
        rows[name] = {
            "alone_ms": {"published": alone_ms, "fitted": round(fitted_alone, 2)},
            "six_ms": {
                "published": six_ms,
                "from_published_alone": round(reported, 2),
                "from_profile": round(fitted, 2),
            },
            "six_error": {
                "from_published_alone": round(reported / six_ms - 1, 4),
                "from_profile": round(fitted / six_ms - 1, 4),
            },
        }
    errors: dict[str, Any] = {
        how: round(statistics.median(abs(r["six_error"][how]) for r in rows.values()), 4)
        for how in ("from_published_alone", "from_profile")
    }
    document = {
        "schema_version": 1,
        "command": "python -m tests.benchmarks.seed_001_xavier ../shared/reference OUT.json",
        "fit": "profile xavier: fitted to the four models alone; six at once are left out of it",
        "models": rows,
        "median_error_of_six": errors,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
