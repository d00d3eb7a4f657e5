"""Target 4 of the cost model: random plans on this machine's processors, predicted and measured.

``python -m tests.benchmarks.cost_model_plans measure DATA --minutes 9`` visits in turns, again and again: 200 random
plans (cuts, processors, branches side by side, two models at once), whole models on each kind of processor, and pairs
of models beside each other and one after the other; now and then it calibrates transfers and contention. It adds to
what DATA holds.
``python -m tests.benchmarks.cost_model_plans evaluate DATA CPU_DATA OUT.json`` compares with predictions; ``CPU_DATA``
is what ``cost_model_cpu measure`` wrote (:mod:`tests.benchmarks.cost_model_plans_errors` says how).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from evaluators.base import Session
from evaluators.cost_model.calibrate_time import Bench, pairs, time_contention, time_link, whole_plan
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.models.zoo.names import ZOO, parse_name
from tests.support.strategies import followers

PROCESSORS = ("cpu", "cpu0", "cpu1")
KINDS = PROCESSORS[:2]
SINGLE = (
    "squeezenet1_1",
    "mobilenet_v1@0.5",
    "googlenet@0.5",
    "vgg16@0.25",
    "resnet18@0.5",
    "densenet121@0.5",
    "efficientnet_lite0@0.5",
    "inception_v3@0.25",
)
TWO = (
    ("squeezenet1_1", "mobilenet_v1@0.5"),
    ("vgg16@0.25", "googlenet@0.5"),
)
BESIDE = SINGLE[:5]
EACH = 20
CALIBRATED_EVERY = 3
_VISIT_S, _SETTLE_S = 0.015, 0.008
_LEAST_RUNS, _MOST_RUNS = 4, 40


def two_at_once(names: Sequence[str]) -> Draft:
    """Return two models in one file that share nothing, one behind the other."""
    net = Builder("-".join(names).replace("@", "_"))
    outputs = []
    for name in names:
        spec = parse_name(name)
        build: Any = import_module(f"search_spaces.models.zoo.{ZOO[spec.name].module}").build
        outputs += build(net, spec)
    return net.finish(*outputs)


def models() -> dict[str, tuple[str, ...]]:
    """Return what plans are made for: a name, and the models of the zoo that it holds."""
    return {name: (name,) for name in SINGLE} | {"+".join(names): names for names in TWO}


def made(names: Sequence[str]) -> Draft:
    """Return one model, or two in one file."""
    return draft(names[0]) if len(names) == 1 else two_at_once(names)


def random_plan(graph: Graph, rng: np.random.Generator) -> Plan:
    """Cut the order at random; a part whose operators fall apart may run on both cores at once."""
    count = len(graph.operators)
    cuts = sorted(int(c) for c in rng.choice(count - 1, int(rng.integers(0, 5)), replace=False) + 1)
    network = followers(graph)
    stages: list[Stage] = []
    for first, last in pairwise([0, *cuts, count]):
        pieces = [tuple(sorted(c)) for c in nx.weakly_connected_components(network.subgraph(range(first, last)))]
        if len(pieces) > 1 and rng.random() < 0.7:
            stages += [Stage(p, PROCESSORS[1 + i % 2]) for i, p in enumerate(sorted(pieces))]
        else:
            stages.append(Stage(tuple(range(first, last)), PROCESSORS[int(rng.integers(3))]))
    return Plan(graph.digest, tuple(stages))


def random_pair_plan(graph: Graph, rng: np.random.Generator) -> Plan:
    """Cut each of two models at random, and let their parts take turns: two processors work on two models at once."""
    chains = []
    for operators in sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(followers(graph))):
        count = len(operators)
        cuts = sorted(int(c) for c in rng.choice(count - 1, int(rng.integers(0, 3)), replace=False) + 1)
        processors = [PROCESSORS[int(processor)] for processor in rng.choice(3, len(cuts) + 1, p=(0.2, 0.4, 0.4))]
        parts = pairwise([0, *cuts, count])
        chains.append([Stage(operators[a:b], processor) for (a, b), processor in zip(parts, processors, strict=True)])
    stages: list[Stage] = []
    while any(chains):
        left = [chain for chain in chains if chain]
        stages.append(left[int(rng.integers(len(left)))].pop(0))
    return Plan(graph.digest, tuple(stages))


def drawn(graphs: Mapping[str, Graph]) -> Iterator[tuple[str, Plan]]:
    """Yield the random plans, each with the name of its model."""
    rng = np.random.default_rng(0)
    for _ in range(EACH):
        for name, graph in graphs.items():
            # Most plans for two models run both at once; the others cut one order of all operators, as for one.
            both = len(models()[name]) > 1 and rng.random() < 0.75
            yield name, (random_pair_plan if both else random_plan)(graph, rng)


def here() -> Platform:
    """Return the processors of this machine that plans use."""
    return Platform("here", tuple(make_processor(name) for name in PROCESSORS))


def beside_and_apart(graph: Graph) -> tuple[Plan, Plan]:
    """Return the plan of two models on two cores at once, and of one after the other on one core."""
    parts = sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(followers(graph)))
    stages = [
        [Stage(part, processor) for part, processor in zip(parts, processors, strict=True)]
        for processors in (PROCESSORS[1:], PROCESSORS[1:2] * 2)
    ]
    return Plan(graph.digest, tuple(stages[0])), Plan(graph.digest, tuple(stages[1]))


@dataclass(frozen=True, slots=True)
class Took:
    """What a plan took: the medians of its latency and of its stages, and when stages began in the last run."""

    latency_s: float
    stage_s: list[float]
    start_s: list[float]


def visit(session: Session, graph: Graph, plan: Plan) -> Took:
    """Compile a plan anew and run it for about 30 ms."""
    with closing(session.load(graph, plan, fresh=True)) as candidate:
        once_s = float(candidate.run(2).latency_s[1])
        candidate.run(int(np.clip(_SETTLE_S / once_s, 1, _MOST_RUNS)))
        batch = candidate.run(int(np.clip(_VISIT_S / once_s, _LEAST_RUNS, _MOST_RUNS)))
    events = sorted(batch.timeline.events, key=lambda e: e.stage) if batch.timeline else []
    stage_s = [float(s) for s in np.median(batch.stage_s, axis=0)]
    return Took(float(np.median(batch.latency_s)), stage_s, [e.start_s for e in events])


def visit_beside(session: Session, graph: Graph) -> list[float]:
    """Return how many times as long each of two models takes beside the other as on its own."""
    beside, apart = beside_and_apart(graph)
    took = [np.array(visit(session, graph, plan).stage_s) for plan in (apart, beside, apart)]
    return [float(r) for r in took[1] / (took[0] + took[2]) * 2]


def measure(data: Path, minutes: float) -> None:
    """Measure pairs of processors, then visit everything in turns until the time is up."""
    end_s = time.monotonic() + 60 * minutes
    platform, evaluator = here(), LitertEvaluator()
    begun = int(time.time())
    with data.open("a") as file, evaluator.prepare(platform) as session, Bench(evaluator, session, platform) as bench:

        def write(**row: Any) -> None:
            file.write(json.dumps(row | {"run": begun}) + "\n")
            file.flush()

        graphs = {name: bench.loaded(made(names)) for name, names in models().items()}
        plans = list(drawn(graphs))
        visits: list[Callable[[], None]] = []

        def add(visited: str, graph: Graph, plan: Plan, **reported: Any) -> None:
            def make() -> None:
                took = visit(session, graph, plan)
                stages = {n: [float(f"{s:.4g}") for s in getattr(took, n)] for n in ("stage_s", "start_s")}
                write(visit=visited, latency_s=took.latency_s, **stages, **reported)

            visits.append(make)

        for number, (name, plan) in enumerate(plans):
            add(f"plan {number}", graphs[name], plan)
        for name in SINGLE:
            for processor in KINDS:
                add(
                    f"whole {name} {processor}",
                    graphs[name],
                    whole_plan(graphs[name], processor),
                    model=name,
                    processor=processor,
                )
        for names in combinations(BESIDE, 2):
            pair = bench.loaded(two_at_once(names))
            visits.append(lambda names=names, pair=pair: write(beside=names, slowdown=visit_beside(session, pair)))  # type: ignore[misc]
        rng = np.random.default_rng(begun)
        count = 0
        while time.monotonic() < end_s:
            if count // len(visits) % CALIBRATED_EVERY == 0:
                for one, other in pairs(platform):
                    write(link=asdict(time_link(session, bench.loaded, one, other)))
                    if not one.excludes(other):
                        write(contention=asdict(time_contention(session, bench.loaded, one, other)))
            for index in rng.permutation(len(visits)):
                if time.monotonic() > end_s:
                    break
                visits[index]()
                count += 1
    print(f"{count} visits to {len(visits)} things, {len(plans)} of them plans")  # noqa: T201


def main() -> None:
    """Measure or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "evaluate"))
    parser.add_argument("data", type=Path)
    parser.add_argument("cpu_data", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.data, options.minutes)
        return
    if options.cpu_data is None:
        parser.error("evaluate needs CPU_DATA")
    from tests.benchmarks.cost_model_plans_errors import evaluate

    document = evaluate(options.data, options.cpu_data)
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    for what in ("all", "at_once", "by_model", "slowdown_by_contention", "machine_drift"):
        print(what, json.dumps(document[what]))  # noqa: T201


if __name__ == "__main__":
    main()
