"""Target 4 of the cost model: random plans on this machine's lanes, predicted and measured.

``python -m tests.benchmarks.cost_model_plans measure DATA --minutes 3`` measures hand-overs, contention and random
plans (cuts, lanes, branches side by side, two models at once); ``… evaluate DATA CPU_DATA OUT.json`` compares with
predictions of profiles that never saw the plans' model families; ``CPU_DATA`` is what ``cost_model_cpu measure`` wrote.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from evaluators.cost_model.calibrate_fit import fit_processor
from evaluators.cost_model.calibrate_measure import reference_network, reference_s, warm, whole_plan
from evaluators.cost_model.calibrate_pairs import pairs, time_contention, time_link
from evaluators.cost_model.calibrate_time import Bench
from evaluators.cost_model.fit import errors_of
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import ContentionProfile, CostProfile, LinkProfile
from evaluators.cost_model.transfers import prices
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from optimizer.provenance import provenance
from search_spaces.graph import Graph
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.models.zoo.names import ZOO, parse_name
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform
from tests.benchmarks.cost_model_cpu import GENERATED, timed_models

LANES = ("cpu", "cpu0", "cpu1")
SINGLE = ("squeezenet1_1", "mobilenet_v1@0.5", "googlenet@0.5", "vgg16@0.25", "resnet18@0.5")
TWO = ("squeezenet1_1", "mobilenet_v1@0.5")
EACH = 34


def two_at_once() -> Draft:
    """Return two models in one file that share nothing."""
    net = Builder("two")
    outputs = []
    for name in TWO:
        spec = parse_name(name)
        build: Any = import_module(f"search_spaces.models.zoo.{ZOO[spec.name].module}").build
        outputs += build(net, spec)
    return net.finish(*outputs)


def models() -> dict[str, Draft]:
    """Return what plans are made for."""
    return {name: draft(name) for name in SINGLE} | {"two": two_at_once()}


def random_plan(graph: Graph, rng: np.random.Generator) -> Plan:
    """Cut the order at random; a part whose operators fall apart may run on both cores at once."""
    count = len(graph.operators)
    cuts = sorted(int(c) for c in rng.choice(count - 1, int(rng.integers(0, 5)), replace=False) + 1)
    network = graph.to_networkx()
    stages: list[Stage] = []
    for first, last in pairwise([0, *cuts, count]):
        pieces = [tuple(sorted(c)) for c in nx.weakly_connected_components(network.subgraph(range(first, last)))]
        if len(pieces) > 1 and rng.random() < 0.7:
            stages += [Stage(p, LANES[1 + i % 2]) for i, p in enumerate(sorted(pieces))]
        else:
            stages.append(Stage(tuple(range(first, last)), LANES[int(rng.integers(3))]))
    return Plan(graph.digest, tuple(stages))


def measure(data: Path, minutes: float) -> None:
    """Measure pairs of lanes, then plans of all models in turn, until the time is up."""
    end_s = time.monotonic() + 60 * minutes
    platform = Platform("here", tuple(make_processor(name) for name in LANES))
    evaluator = LitertEvaluator()
    rng = np.random.default_rng(0)
    with data.open("a") as file, evaluator.prepare(platform) as session, Bench(evaluator, session, platform) as bench:
        for one, other in pairs(platform):
            file.write(json.dumps({"link": asdict(time_link(session, bench.loaded, one, other))}) + "\n")
            if not one.excludes(other):
                found = time_contention(session, bench.loaded, one, other)
                file.write(json.dumps({"contention": asdict(found)}) + "\n")
        graph = bench.loaded(reference_network())
        graphs = {name: bench.loaded(d) for name, d in models().items()}
        with closing(session.load(graph, whole_plan(graph, "cpu0"))) as reference:
            beats = max(3, int(0.006 / warm(reference)))
            for _ in range(EACH):
                for name, model in graphs.items():
                    plan = random_plan(model, rng)
                    if time.monotonic() > end_s:
                        return
                    with closing(session.load(model, plan)) as candidate:
                        runs = int(np.clip(0.12 / warm(candidate), 4, 60))
                        before = reference_s(reference, beats)
                        batch = candidate.run(2 * runs)
                        clock = (before + reference_s(reference, beats)) / 2
                    row = {
                        "model": name,
                        "plan": plan.to_json(),
                        "latency_s": float(np.median(batch.latency_s)),
                        "stage_s": [float(s) for s in np.median(batch.stage_s, axis=0)],
                        "reference_s": clock,
                    }
                    file.write(json.dumps(row) + "\n")


def evaluate(data: Path, cpu_data: Path) -> dict[str, Any]:
    """Return how well plans are predicted, all together and by model."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    links = [LinkProfile(**r["link"]) for r in rows if "link" in r]
    contention = [ContentionProfile(**r["contention"]) for r in rows if "contention" in r]
    plans = [r for r in rows if "plan" in r]
    platform = Platform("here", tuple(make_processor(name) for name in LANES))
    likes = {"cpu0": platform["cpu0"].like, "cpu": platform["cpu"].like}
    timed = {lane: timed_models(cpu_data, lane) for lane in likes}
    tuned = {lane: fit_processor([m for m in of if m.family == GENERATED]).kernels for lane, of in timed.items()}
    usual_s = float(np.median([r["reference_s"] for r in json_rows(cpu_data) if r["lane"] == "cpu0"]))
    predicted, measured, table = [], [], []
    for name, made in models().items():
        families = {ZOO[parse_name(n).name].module for n in (TWO if name == "two" else (name,))}
        profile = CostProfile(
            "here",
            {
                like: fit_processor([m for m in timed[lane] if m.family not in families], tuned[lane])
                for lane, like in likes.items()
            },
            tuple(links),
            tuple(contention),
        )
        graph = made.graph()
        simulator = PlanSimulator(graph, platform, prices(profile, graph, platform, warn=False))
        for row in (r for r in plans if r["model"] == name):
            plan = Plan.from_json(row["plan"])
            factor = usual_s / row["reference_s"]
            predicted.append(simulator.latency_s(plan))
            measured.append(row["latency_s"] * factor)
            table.append([name, len(plan.stages), round(predicted[-1] * 1e3, 4), round(measured[-1] * 1e3, 4)])
    by_model = {
        name: errors_of([t[2] for t in table if t[0] == name], [t[3] for t in table if t[0] == name])
        for name in models()
        if sum(t[0] == name for t in table) > 1
    }
    return {
        "schema_version": 1,
        "made_by": "python -m tests.benchmarks.cost_model_plans evaluate DATA CPU_DATA OUT",
        **provenance(),
        "all": errors_of(predicted, measured),
        "by_model": by_model,
        "links": [asdict(link) for link in links],
        "contention": [asdict(c) for c in contention],
        "columns": ["model", "stages", "predicted_ms", "measured_ms"],
        "plans": table,
        "kept_out": f"the family of each plan's model; the fit holds {GENERATED} networks and the other families",
    }


def json_rows(data: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in data.read_text().splitlines()]


def main() -> None:
    """Measure or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "evaluate"))
    parser.add_argument("data", type=Path)
    parser.add_argument("cpu_data", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=3.0)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.data, options.minutes)
        return
    document = evaluate(options.data, options.cpu_data)
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(document["all"], document["by_model"], document["links"], document["contention"])  # noqa: T201


if __name__ == "__main__":
    main()
