"""How fast samplers converge: the figures in ``experiments/results/samplers_truth.json`` and ``samplers_model.json``.

``python -m tests.benchmarks.samplers truth OUT.json`` runs every sampler on the 60 instances of
:mod:`tests.benchmarks.instances`, whose truth is not the model. ``… model OUT.json`` runs them on models of the zoo and
three platforms, where measuring gives what the model says, without noise.

A trial is a plan that was not tried before; a sampler that repeats itself gets 50 repeats in a row, then a random plan
is drawn, as in a study. Regret is what the recommended plan takes more than the known optimum, relative and without
noise. Recommended is the plan that looked fastest; ``auto`` recommends the measured plan that it believes to be the
fastest, and has a second line for the one that looked fastest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from evaluators.samples import Measurement, Samples
from evaluators.testing import HAND_OVER_S, LINK_BYTES_PER_S, schedule
from optimizer.exact.chain import ChainCosts, best_chains, chain_cost
from optimizer.provenance import provenance
from optimizer.samplers import make_proposer, make_sampler, quiet_optuna
from optimizer.samplers.auto import AutoProposer, Problem
from search_spaces.chain import ChainSpace, chain_plan
from search_spaces.cuts import cut_points
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor
from tests.benchmarks.instances import COUNT, instance

BUDGETS = (1, 5, 10, 25, 50, 100, 200)
REPEATS = 50
ZOO = ("vgg16", "squeezenet1_1", "googlenet", "resnet50", "mobilenet_v2")
Measure = Callable[[Plan], tuple[float, tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Curve:
    """What one study came to: regret at each budget, by what looked fastest and by what was believed."""

    looked: tuple[float, ...]
    believed: tuple[float, ...]
    seconds_each: float


class Study:
    """A study without device, log or racing.

    Args:
        problem: the model may be used by samplers that know the problem.
        measure: what a trial sees of a plan.
        regret: of a plan, without noise.
    """

    def __init__(self, problem: Problem, measure: Measure, regret: Callable[[Plan], float]) -> None:
        self.problem, self.measure, self.regret = problem, measure, regret

    def run(self, name: str, seed: int, budget: int) -> Curve:
        """Run ``budget`` different plans."""
        if proposer := make_proposer(name, seed, self.problem):
            return self._propose(proposer, seed, budget)
        return self._ask(name, seed, budget)

    def _propose(self, proposer: Any, seed: int, budget: int) -> Curve:
        rng = np.random.default_rng([seed, 5])
        found: list[tuple[float, Plan]] = []
        believed, spent = [], 0.0
        for trial in range(budget):
            begin = time.perf_counter()
            plan = proposer.propose() or self._unseen({p.digest for _, p in found}, rng)
            spent += time.perf_counter() - begin
            latency_s, stage_s = self.measure(plan)
            begin = time.perf_counter()
            proposer.observe(plan, Measurement(Samples((latency_s,)), stage_s, (), "limit"))
            spent += time.perf_counter() - begin
            found.append((latency_s, plan))
            if trial + 1 in BUDGETS and isinstance(proposer, AutoProposer):
                believed.append(self.regret(proposer.ranking()[0][0]))
        return Curve(self._looked(found), tuple(believed), spent / budget)

    def _ask(self, name: str, seed: int, budget: int) -> Curve:
        quiet_optuna()
        rng = np.random.default_rng([seed, 5])
        study, space = optuna.create_study(), self.problem.space
        distributions = dict(space.distributions())
        known: dict[str, float] = {}
        found: list[tuple[float, Plan]] = []
        number = repeats = 0
        begin = time.perf_counter()
        while len(found) < budget:
            if repeats >= REPEATS:
                study.enqueue_trial(space.encode(self._unseen(set(known), rng)))
            study.sampler = make_sampler(name, seed, number, self.problem)
            asked = study.ask(distributions)
            plan = space.decode(asked.params)
            number, repeats = number + 1, repeats + 1
            if plan.digest not in known:
                known[plan.digest] = self.measure(plan)[0]
                found.append((known[plan.digest], plan))
                repeats = 0
            study.tell(asked, known[plan.digest])
        return Curve(self._looked(found), (), (time.perf_counter() - begin) / budget)

    def _looked(self, found: list[tuple[float, Plan]]) -> tuple[float, ...]:
        return tuple(self.regret(min(found[:b], key=lambda entry: entry[0])[1]) for b in BUDGETS if b <= len(found))

    def _unseen(self, known: set[str], rng: np.random.Generator) -> Plan:
        space = self.problem.space
        if not isinstance(space, ChainSpace):
            raise TypeError(type(space))
        while (plan := space.plan_at(int(rng.random() * space.cardinality()))).digest in known:
            pass
        return plan


def regret(takes: Callable[[Plan], float], best_s: float, plan: Plan) -> float:
    """Return what a plan takes more than the best, relative."""
    return takes(plan) / best_s - 1.0


class Kept:
    """Curves that are written down as they are made, so that a run that was stopped goes on where it was.

    Args:
        path: a file of JSON lines, which may exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._curves = {key: Curve(tuple(c[0]), tuple(c[1]), c[2]) for key, c in map(json.loads, lines)}

    def get(self, key: str, make: Callable[[], Curve]) -> Curve:
        """Return the curve of that name, made if need be."""
        if key not in self._curves:
            made = self._curves[key] = make()
            with self._path.open("a") as file:
                file.write(json.dumps([key, [made.looked, made.believed, made.seconds_each]]) + "\n")
        return self._curves[key]


def truth(names: Sequence[str], budget: int, every: int, kept: Kept) -> dict[str, Any]:
    """Run the samplers on the instances, one seed each."""
    curves: dict[str, list[Curve]] = {name: [] for name in names}
    numbers = range(0, COUNT, every)
    for number in numbers:
        of = instance(number)
        optimum_s = of.optimum_s
        for name in names:
            study = Study(
                Problem(of.graph, of.model.platform, of.space, of.model),
                partial(of.measure, rng=np.random.default_rng([number, 1])),
                partial(regret, of.true_s, optimum_s),
            )
            key = f"truth {number} {name} {budget}"
            curves[name].append(kept.get(key, partial(study.run, name, number, budget)))
    return {"instances": list(numbers), "samplers": {name: summary(found) for name, found in curves.items()}}


def platforms() -> list[Platform]:
    """Return three platforms: two lanes, three, and four of which two are alike."""

    def lane(name: str, kind: Any, like: str, cores: float) -> Processor:
        return Processor(name, kind, {f"{name}{i}": 1.0 for i in range(int(cores))}, like)

    cpu, gpu, npu = lane("cpu", "cpu", "cpu", 2), lane("gpu", "gpu", "gpu", 4), lane("npu", "npu", "npu", 3)
    cores = [lane(f"core{i}", "cpu", "core", 1) for i in range(2)]
    return [
        Platform("two lanes", (cpu, gpu)),
        Platform("three lanes", (cpu, gpu, npu)),
        Platform("four lanes", (*cores, gpu, npu)),
    ]


def costs_of(graph: Graph, platform: Platform) -> ChainCosts:
    """Return the law of :mod:`evaluators.testing` as an additive model: what crosses a cut is handed over there."""
    lanes, count = platform.processors, len(graph.operators)
    operator_s = np.empty((len(lanes), count))
    for row, lane in enumerate(lanes):
        plan = chain_plan(graph, range(1, count), [lane.name] * count)
        timeline = schedule(graph, plan, platform)
        reads = [len([t for t in graph.boundary(s.operators).inputs if t in graph.producer]) for s in plan.stages]
        took = {event.stage: event.end_s - event.start_s for event in timeline.events}
        operator_s[row] = [took[i] - reads[i] * HAND_OVER_S for i in range(count)]
    hand_over_s = np.zeros((count, len(lanes), len(lanes)))
    for point in cut_points(graph):
        hand_over_s[point.position] = HAND_OVER_S * len(point.tensors)
        hand_over_s[point.position] += (1 - np.eye(len(lanes))) * point.nbytes / LINK_BYTES_PER_S
    return ChainCosts(platform, operator_s, np.zeros(len(lanes)), hand_over_s)


def model(names: Sequence[str], budget: int, seeds: int, kept: Kept) -> dict[str, Any]:
    """Run the samplers on models of the zoo, where the truth is the model."""
    found: dict[str, Any] = {}
    for source in ZOO:
        graph = load(source)
        for platform in platforms():
            costs = costs_of(graph, platform)
            space = ChainSpace(graph, platform, 4)
            best = best_chains(costs, 4)[0].cost_s

            def measure(plan: Plan, costs: ChainCosts = costs) -> tuple[float, tuple[float, ...]]:
                parts = [chain_cost(costs, Plan(plan.graph_digest, (stage,))) for stage in plan.stages]
                return chain_cost(costs, plan), tuple(parts)

            study = Study(
                Problem(graph, platform, space, costs), measure, partial(regret, partial(chain_cost, costs), best)
            )
            case = f"{source} on {platform.name}"
            found[case] = {
                name: summary(
                    [
                        kept.get(f"{case} {name} {seed} {budget}", partial(study.run, name, seed, budget))
                        for seed in range(seeds if name != "gp" else min(seeds, 3))
                    ]
                )
                for name in names
            }
    return {"seeds": seeds, "cases": found}


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return means over studies, in per cent, and each study's regret at the end."""
    looked = np.array([c.looked for c in curves])
    budgets = [str(b) for b in BUDGETS][: looked.shape[1]]

    def mean(regrets: np.ndarray[Any, Any]) -> dict[str, float]:
        return {b: round(float(m) * 100, 4) for b, m in zip(budgets, regrets.mean(axis=0), strict=True)}

    found: dict[str, Any] = {"looked_fastest_percent": mean(looked)}
    last = looked[:, -1]
    if curves[0].believed:
        believed = np.array([c.believed for c in curves])
        found["believed_fastest_percent"] = mean(believed)
        last = believed[:, -1]
    found["last_each_percent"] = [round(float(r) * 100, 3) for r in last]
    found["sampler_ms_per_trial"] = round(float(np.mean([c.seconds_each for c in curves])) * 1e3, 3)
    return found


def main() -> None:
    """Run one part and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["truth", "model"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--samplers", default="auto,reinforce,random,tpe,nsga2,cmaes")
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="take one instance of so many")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    names = options.samplers.split(",")
    command = f"python -m tests.benchmarks.samplers {options.part} {options.out} --samplers {options.samplers}"
    command += f" --budget {options.budget}"
    command += f" --every {options.every}" if options.part == "truth" else f" --seeds {options.seeds}"
    partly = options.out.with_suffix(".partial")
    if options.part == "truth":
        result = truth(names, options.budget, options.every, Kept(partly))
    else:
        result = model(names, options.budget, options.seeds, Kept(partly))
    document = {"schema_version": 1, "made_by": command, **provenance(), **result}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    partly.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
