"""Target 4 of the cost model: random plans on this machine's lanes, predicted and measured; and what choosing costs.

``python -m tests.benchmarks.cost_model_plans measure DATA --minutes 4`` measures hand-overs, contention, pairs of
models at once and one after the other, whole models that set the pace, and random plans (cuts, lanes, branches side by
side, two models at once), and goes on where it was stopped; ``… choose DATA CPU_DATA`` notes which plans are predicted
to be the fastest for three models; ``measure`` then measures these among others, and the chosen one and the fastest in
turns: that ratio is the regret; ``… evaluate DATA CPU_DATA OUT.json`` compares with predictions of profiles that never
saw the plans' model families; ``CPU_DATA`` is what ``cost_model_cpu measure`` wrote. The machine's pace differs from
run to run: what whole models of other families took on a lane, against CPU_DATA, says by how much.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from evaluators.base import Session
from evaluators.cost_model.calibrate_fit import TimedModel, fit_processor
from evaluators.cost_model.calibrate_measure import warm, whole_plan
from evaluators.cost_model.calibrate_pairs import pairs, time_contention, time_link
from evaluators.cost_model.calibrate_time import Bench
from evaluators.cost_model.chains import ChainSimulator, all_chains
from evaluators.cost_model.fit import errors_of
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import ContentionProfile, CostProfile, LinkProfile, ProcessorProfile
from evaluators.cost_model.transfers import prices
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from optimizer.provenance import provenance
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.models.zoo.names import ZOO, parse_name
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform
from tests.benchmarks.cost_model_cpu import GENERATED, family, timed_models

LANES = ("cpu", "cpu0", "cpu1")
SINGLE = ("squeezenet1_1", "mobilenet_v1@0.5", "googlenet@0.5", "vgg16@0.25", "resnet18@0.5")
PACE = ("efficientnet_lite0@0.5", "densenet121@0.5", "alexnet@0.25", "yolov2@0.25", "inception_v3@0.25")
CHOSEN = ("vgg16", "squeezenet1_1", "mobilenet_v1")
TWO = ("squeezenet1_1", "mobilenet_v1@0.5")
EACH = 34
SLOWED_ROUNDS, CHOSEN_ROUNDS, PAIRS = 5, 3, 15


def two_at_once(names: Sequence[str] = TWO) -> Draft:
    """Return two models in one file that share nothing."""
    net = Builder("-".join(names).replace("@", "_"))
    outputs = []
    for name in names:
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


def here() -> Platform:
    """Return the lanes of this machine that plans use."""
    return Platform("here", tuple(make_processor(name) for name in LANES))


def measure(data: Path, minutes: float) -> None:
    """Measure pairs of lanes, then plans of all models in turn, until the time is up."""
    end_s = time.monotonic() + 60 * minutes
    rows = json_rows(data) if data.exists() else []
    platform, evaluator = here(), LitertEvaluator()
    with data.open("a") as file, evaluator.prepare(platform) as session, Bench(evaluator, session, platform) as bench:

        def write(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        if not any("link" in row for row in rows):
            for one, other in pairs(platform):
                write(link=asdict(time_link(session, bench.loaded, one, other)))
                if not one.excludes(other):
                    write(contention=asdict(time_contention(session, bench.loaded, one, other)))
        for names in combinations(SINGLE, 2):
            if not any(row.get("beside") == list(names) for row in rows):
                write(beside=names, slowdown=slowdowns(session, bench.loaded(two_at_once(names))))
        for name in CHOSEN:
            noted = [row for row in rows if row.get("candidate_for") == name]
            if noted and not any(row.get("chosen_for") == name for row in rows):
                for row in measure_chosen(session, name, noted):
                    write(**row)
        graphs = {name: bench.loaded(d) for name, d in models().items()}
        done = sum("plan" in row for row in rows)
        for number, (name, plan) in enumerate(drawn(graphs)):
            if number < done:
                continue
            if time.monotonic() > end_s:
                return
            if number % 40 == done % 40:
                for pace in PACE:
                    graph = load(pace)
                    for lane in LANES[:2]:
                        write(pace=pace, lane=lane, latency_s=_times(session, graph, whole_plan(graph, lane))[0])
            latency_s, stage_s = _times(session, graphs[name], plan)
            write(model=name, plan=plan.to_json(), latency_s=latency_s, stage_s=stage_s)


def beside_and_apart(graph: Graph) -> tuple[Plan, Plan]:
    """Return the plan of two models on two cores at once, and of one after the other on one core."""
    parts = sorted(tuple(sorted(c)) for c in nx.weakly_connected_components(graph.to_networkx()))
    stages = [
        [Stage(part, lane) for part, lane in zip(parts, lanes, strict=True)] for lanes in (LANES[1:], LANES[1:2] * 2)
    ]
    return Plan(graph.digest, tuple(stages[0])), Plan(graph.digest, tuple(stages[1]))


def slowdowns(session: Session, graph: Graph) -> list[float]:
    """Return how many times as long each of two models takes beside the other as on its own."""
    beside, apart = beside_and_apart(graph)
    ratios = []
    with closing(session.load(graph, beside)) as crowded, closing(session.load(graph, apart)) as quiet:
        runs = int(np.clip(0.1 / warm(crowded), 4, 60))
        warm(quiet)
        for _ in range(SLOWED_ROUNDS):
            took = [np.median(candidate.run(runs).stage_s, axis=0) for candidate in (quiet, crowded, quiet)]
            ratios.append(took[1] / (took[0] + took[2]) * 2)
    return [float(r) for r in np.median(ratios, axis=0)]


def drawn(graphs: Mapping[str, Graph]) -> Iterator[tuple[str, Plan]]:
    """Yield the random plans, each with the name of its model."""
    rng = np.random.default_rng(0)
    for _ in range(EACH):
        for name, graph in graphs.items():
            yield name, random_plan(graph, rng)


def _times(session: Session, graph: Graph, plan: Plan) -> tuple[float, list[float]]:
    """Return the median latency of a plan, and of its stages."""
    with closing(session.load(graph, plan)) as candidate:
        runs = int(np.clip(0.1 / warm(candidate), 4, 60))
        candidate.run(max(2, runs // 4))
        batch = candidate.run(2 * runs)
    return float(np.median(batch.latency_s)), [float(s) for s in np.median(batch.stage_s, axis=0)]


@dataclass(frozen=True, slots=True)
class Fits:
    """Profiles of this machine, for each set of families that is kept out; see :func:`fits`."""

    platform: Platform
    timed: Mapping[str, Sequence[TimedModel]]
    generated: Mapping[str, ProcessorProfile]
    slower: Mapping[str, float]
    links: tuple[LinkProfile, ...]
    contention: tuple[ContentionProfile, ...]

    def simulator(self, graph: Graph, name: str) -> PlanSimulator:
        """Return a simulator that has seen none of a model's families, at the pace of the plans' run."""
        families = {family(n) for n in (TWO if name == "two" else (name,))}
        fitted = {
            like: fit_processor([m for m in of if m.family not in families], self.generated[like].kernels)
            for like, of in self.timed.items()
        }
        return self.simulator_of(graph, fitted)

    def simulator_of(self, graph: Graph, fitted: Mapping[str, ProcessorProfile]) -> PlanSimulator:
        """Return a simulator on some processors' profiles, at the pace of the plans' run."""
        profile = CostProfile("here", fitted, self.links, self.contention)
        table = prices(profile, graph, self.platform, warn=False)
        slower = np.array([[self.slower[lane.like]] for lane in self.platform.processors])
        table = replace(table, operator_s=table.operator_s * slower, invocation_s=table.invocation_s * slower[:, 0])
        return PlanSimulator(graph, self.platform, table)


def fits(rows: Sequence[dict[str, Any]], cpu_data: Path) -> Fits:
    """Return what predictions are made from."""
    platform = here()
    likes = {lane: platform[lane].like for lane in LANES[:2]}
    timed = {like: timed_models(cpu_data, lane) for lane, like in likes.items()}
    generated = {like: fit_processor([m for m in of if m.family == GENERATED]) for like, of in timed.items()}
    slower = {}
    for lane, like in likes.items():
        known = {m.name: m.whole_s for m in timed[like]}
        ratios = [r["latency_s"] / known[r["pace"]] for r in rows if r.get("lane") == lane and "pace" in r]
        slower[like] = float(np.median(ratios))
    links = tuple(LinkProfile(**r["link"]) for r in rows if "link" in r)
    contention = tuple(ContentionProfile(**r["contention"]) for r in rows if "contention" in r)
    return Fits(platform, timed, generated, slower, links, contention)


def choose(data: Path, cpu_data: Path) -> None:
    """Note, for some models, plans that are predicted to be fast."""
    fitted = fits(json_rows(data), cpu_data)
    rng = np.random.default_rng(1)
    with data.open("a") as file:
        for name in CHOSEN:
            simulator = fitted.simulator(draft(name).graph(), name)
            for plan in candidates(simulator, rng).values():
                row = {"candidate_for": name, "plan": plan.to_json(), "predicted_s": simulator.latency_s(plan)}
                file.write(json.dumps(row) + "\n")


def measure_chosen(session: Session, name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure what was noted for a model, then the plan that predictions choose and the fastest one in turns."""
    graph, rng = load(name), np.random.default_rng(2)
    plans = {plan.digest: plan for plan in (Plan.from_json(row["plan"]) for row in rows)}
    predicted_s = {Plan.from_json(row["plan"]).digest: row["predicted_s"] for row in rows}
    latency_s: dict[str, list[float]] = {digest: [] for digest in plans}
    for _ in range(CHOSEN_ROUNDS):
        for digest in rng.permutation(list(plans)):
            with closing(session.load(graph, plans[digest])) as candidate:
                runs = int(np.clip(0.1 / warm(candidate), 3, 30))
                latency_s[digest].append(float(np.median(candidate.run(runs).latency_s)))
    measured_s = {digest: float(np.median(each)) for digest, each in latency_s.items()}
    chosen, fastest = min(plans, key=predicted_s.__getitem__), min(plans, key=measured_s.__getitem__)
    ratios = in_turns(session, graph, plans[chosen], plans[fastest]) if chosen != fastest else []
    return [
        {
            "chosen_for": name,
            "stages": [[s.processor, len(s.operators)] for s in plan.stages],
            "predicted_s": predicted_s[digest],
            "measured_s": measured_s[digest],
            "over_fastest": ratios if digest == chosen else None,
        }
        for digest, plan in plans.items()
    ]


def candidates(simulator: PlanSimulator, rng: np.random.Generator) -> dict[str, Plan]:
    """Return plans that may be the fastest: the whole model on each lane, the best predicted of all, and of lanes."""
    graph, platform = simulator.graph, simulator.platform
    found = [(simulator.latency_s(p), p) for p in (random_plan(graph, rng) for _ in range(40))]
    for chains in all_chains(len(graph.operators), platform, 3):
        seconds = ChainSimulator(simulator).latency_s(chains)
        words = [tuple(word) for word in chains.lanes.tolist()]
        for word in dict.fromkeys(words):
            where = np.array([i for i, other in enumerate(words) if other == word])
            best = where[seconds[where].argsort()[:8]]
            found += [(float(seconds[i]), chains.plan(int(i), graph, platform)) for i in best]
    found.sort(key=lambda pair: pair[0])
    first: dict[str, Plan] = {}
    for _, plan in found:
        first.setdefault("+".join(sorted({stage.processor for stage in plan.stages})), plan)
    wholes = [whole_plan(graph, lane) for lane in LANES[:2]]
    return {p.digest: p for p in (*(p for _, p in found[:8]), *first.values(), *wholes)}


def in_turns(session: Session, graph: Graph, one: Plan, other: Plan) -> list[float]:
    """Return what one plan takes over what the other takes, in pairs of runs right after each other."""
    found = []
    with closing(session.load(graph, one)) as a, closing(session.load(graph, other)) as b:
        runs = int(np.clip(0.05 / warm(a), 2, 30))
        warm(b)
        for number in range(PAIRS):
            took = {}
            for candidate in (a, b) if number % 2 else (b, a):
                candidate.run(1)
                took[candidate] = float(np.median(candidate.run(runs).latency_s))
            found.append(took[a] / took[b])
    return found


def evaluate(data: Path, cpu_data: Path) -> dict[str, Any]:
    """Return how well plans are predicted, all together and by model."""
    rows = json_rows(data)
    fitted = fits(rows, cpu_data)
    table: list[list[Any]] = []
    for name, made in models().items():
        graph = made.graph()
        simulator = fitted.simulator(graph, name)
        for row in (r for r in rows if r.get("model") == name):
            plan = Plan.from_json(row["plan"])
            predicted, measured = simulator.latency_s(plan), row["latency_s"]
            lanes = "+".join(sorted({s.processor for s in plan.stages}))
            table.append([name, len(plan.stages), lanes, round(predicted * 1e3, 4), round(measured * 1e3, 4)])
    groups = {name: [t for t in table if t[0] == name] for name in models()}
    return {
        "schema_version": 1,
        "made_by": "python -m tests.benchmarks.cost_model_plans evaluate DATA CPU_DATA OUT",
        "protocol": (__doc__ or "").strip(),
        **provenance(),
        "all": _errors(table),
        "at_once": _errors([t for t in table if t[0] == "two"]),
        "slowdown_by_contention": _slowdowns(rows, fitted),
        "by_model": {name: _errors(of) for name, of in groups.items() if len(of) > 1},
        "choosing": _regrets(rows),
        "slower_than_in_cpu_data": {like: round(v, 4) for like, v in fitted.slower.items()},
        "links": [asdict(link) for link in fitted.links],
        "contention": [asdict(c) for c in fitted.contention],
        "columns": ["model", "stages", "lanes", "predicted_ms", "measured_ms"],
        "plans": table,
        "kept_out": f"the family of each plan's model; the fit holds {GENERATED} networks and the other families",
    }


def _errors(table: Sequence[Sequence[Any]]) -> dict[str, float]:
    return errors_of([t[3] for t in table], [t[4] for t in table])


def _slowdowns(rows: Sequence[dict[str, Any]], fitted: Fits) -> dict[str, Any]:
    """Return how well it is predicted how much longer each of two models takes beside the other."""
    table: list[list[Any]] = []
    for row in (r for r in rows if "beside" in r):
        graph = two_at_once(row["beside"]).graph()
        simulator = fitted.simulator_of(graph, fitted.generated)
        beside, apart = (
            {e.stage: e.end_s - e.start_s for e in simulator.run(p).events} for p in beside_and_apart(graph)
        )
        for stage, name in enumerate(row["beside"]):
            table.append([name, row["beside"][1 - stage], beside[stage] / apart[stage], row["slowdown"][stage]])
    if not table:
        return {}
    error = np.abs([t[2] / t[3] - 1.0 for t in table])
    return {
        "median": round(float(np.median(error)), 4),
        "most": round(float(error.max()), 4),
        "within_5": round(float(np.mean(error <= 0.05)), 4),
        "columns": ["model", "beside", "predicted", "measured"],
        "cases": [[a, b, round(p, 4), round(m, 4)] for a, b, p, m in table],
    }


def _regrets(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how much slower the plan is that predictions choose than the fastest one that was measured."""
    found = {}
    for name in CHOSEN:
        of = [r for r in rows if r.get("chosen_for") == name]
        if of:
            chosen = min(of, key=lambda r: r["predicted_s"])
            best = min(of, key=lambda r: r["measured_s"])
            ratios = np.array(chosen["over_fastest"] or [1.0])
            found[name] = {
                "regret": round(float(np.median(ratios)) - 1.0, 4),
                "pairs": len(ratios) if chosen is not best else 0,
                "middle_half": [round(float(np.percentile(ratios, q)) - 1.0, 4) for q in (25, 75)],
                "chosen": chosen["stages"],
                "fastest": best["stages"],
                "measured_plans": len(of),
            }
    return found


def json_rows(data: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in data.read_text().splitlines()]


def main() -> None:
    """Measure or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "choose", "evaluate"))
    parser.add_argument("data", type=Path)
    parser.add_argument("cpu_data", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=3.0)
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.data, options.minutes)
        return
    if options.what == "choose":
        choose(options.data, options.cpu_data)
        return
    document = evaluate(options.data, options.cpu_data)
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    for what in ("all", "at_once", "by_model", "slowdown_by_contention", "choosing"):
        print(what, document[what])  # noqa: T201


if __name__ == "__main__":
    main()
