"""How fast samplers converge: the figures in ``experiments/results/samplers_truth.json`` and ``samplers_model.json``.

``python -m tests.benchmarks.samplers truth OUT.json`` runs every sampler on the 60 instances of
:mod:`tests.benchmarks.instances`, whose truth is not the model. ``… model OUT.json`` runs them on models of the zoo and
three phones, where measuring gives what the shipped cost model says, without noise; the optimum is known from pricing
every plan. ``… table RESULT.json …`` prints a Markdown table of results.

Finished curves are kept beside OUT until all are there, so a run that was stopped goes on where it was; with
``--minutes`` it stops by itself. ``--jobs`` studies run at once; the curves are the same, but a trial takes longer.

A trial is a plan that was not tried before; where a sampler repeats itself too often, a random plan is drawn, as in a
study. Regret is what the recommended plan takes more than the known optimum, relative and without
noise. Recommended is the plan that looked fastest; ``auto`` recommends the measured plan that it believes to be the
fastest, and has a second line for the one that looked fastest.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from evaluators.cost_model.plans import part_costs
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.samples import Measurement, Samples
from optimizer.exact.least import chain_costs, least_chain
from optimizer.model.profile import profile
from optimizer.provenance import provenance
from optimizer.samplers import quiet_optuna, study_sampler
from optimizer.samplers.auto import AutoProposer, Problem
from optimizer.study.history import Trial
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace, chain_plan
from tests.benchmarks.instances import COUNT, instance

BUDGETS = (1, 5, 10, 25, 50, 100, 200)
ZOO = ("vgg16", "squeezenet1_1", "googlenet", "resnet50", "mobilenet_v2")
PHONES = {"pixel4": ("gpu", "1large", "3med"), "mi8se": ("gpu", "2large", "6small"), "s10": ("gpu", "2large", "4small")}
ZOO_STAGES, GP_SEEDS = 3, 3
ALL_INSTANCES = ("auto", "random", "reinforce")
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

    def run(self, name: str, seed: int, budget: int, first: Plan | None = None) -> Curve:
        """Run ``budget`` different plans, of which one may come before all that the sampler proposes."""
        quiet_optuna()
        study, space = optuna.create_study(), self.problem.space
        if not isinstance(space, ChainSpace):
            raise TypeError(type(space))
        sampler = study_sampler(name, seed, space, self.problem)
        judge = AutoProposer(self.problem, seed) if name == "auto" else None
        study.sampler, distributions = sampler, dict(space.distributions())
        if first is not None:
            study.enqueue_trial(space.encode(first))
        known: dict[str, Trial] = {}
        found: list[tuple[float, Plan]] = []
        believed: list[float] = []
        spent = 0.0
        while len(found) < budget:
            begin = time.perf_counter()
            number = len(study.get_trials(deepcopy=False))
            sampler.begin(number)
            asked = study.ask(distributions)
            plan = space.decode(asked.params)
            spent += time.perf_counter() - begin
            before = known.get(plan.digest)
            trial = Trial(number, plan, sampler.origin, asked.params, repeat_of=before.number if before else None)
            if before is None:
                latency_s, stage_s = self.measure(plan)
                measured = Measurement(Samples((latency_s,)), stage_s, (), "limit")
                trial = known[plan.digest] = replace(trial, measurement=measured)
                found.append((latency_s, plan))
                if judge is not None:
                    judge.observe(plan, measured)
                    if len(found) in BUDGETS:
                        believed.append(self.regret(judge.ranking()[0][0]))
            begin = time.perf_counter()
            study.tell(asked, known[plan.digest].median_s)
            sampler.update(trial)
            spent += time.perf_counter() - begin
        return Curve(self._looked(found), tuple(believed), spent / budget)

    def plan(self, cuts: Sequence[int], lanes: Sequence[str]) -> Plan:
        """Return a plan of the space."""
        return chain_plan(self.problem.graph, cuts, lanes)

    def _looked(self, found: list[tuple[float, Plan]]) -> tuple[float, ...]:
        return tuple(self.regret(min(found[:b], key=lambda entry: entry[0])[1]) for b in BUDGETS if b <= len(found))


def regret(takes: Callable[[Plan], float], best_s: float, plan: Plan) -> float:
    """Return what a plan takes more than the best, relative."""
    return takes(plan) / best_s - 1.0


class Kept:
    """Curves that are written down as they are made, so that a run that was stopped goes on where it was.

    Args:
        path: a file of JSON lines, which may exist.
        until: when to begin no more, by ``time.monotonic``.
    """

    def __init__(self, path: Path, until: float = math.inf) -> None:
        self._path, self._until = path, until
        lines = path.read_text().splitlines() if path.exists() else []
        self.curves = {key: Curve(tuple(c[0]), tuple(c[1]), c[2]) for key, c in map(json.loads, lines)}

    def get(self, wanted: Mapping[str, Callable[[], Curve]], jobs: int) -> dict[str, Curve]:
        """Return curves by name, made if need be, so many at once; ends the program where the time is up."""
        missing = {key: make for key, make in wanted.items() if key not in self.curves}
        if jobs == 1:
            for key, make in missing.items():
                self._check()
                self._add(key, make())
        elif missing:
            with ProcessPoolExecutor(jobs, get_context("spawn"), _quiet) as pool:
                waiting = {pool.submit(make): key for key, make in missing.items()}
                for done in as_completed(waiting):
                    self._add(waiting[done], done.result())
                    if time.monotonic() > self._until:
                        pool.shutdown(cancel_futures=True)
                        self._check()
        return {key: self.curves[key] for key in wanted}

    def _check(self) -> None:
        if time.monotonic() > self._until:
            raise SystemExit(f"{len(self.curves)} curves are in {self._path}: run it again to go on")

    def _add(self, key: str, made: Curve) -> None:
        self.curves[key] = made
        with self._path.open("a") as file:
            file.write(json.dumps([key, [made.looked, made.believed, made.seconds_each]]) + "\n")


def _quiet() -> None:
    """Say nothing of what a profile cannot vouch for: it is no matter here."""
    logging.disable(logging.WARNING)


def _truth_curve(number: int, name: str, budget: int) -> Curve:
    of = instance(number)
    study = Study(
        Problem(of.graph, of.model.platform, of.space, of.model),
        partial(of.measure, rng=np.random.default_rng([number, 1])),
        partial(regret, of.true_s, of.optimum_s),
    )
    return study.run(name, number, budget)


def truth(names: Sequence[str], budget: int, every: int, kept: Kept, jobs: int, *, finish: bool) -> dict[str, Any]:
    """Run the samplers on the instances, one seed each; the others on one instance of ``every``, or on those kept."""

    def key(number: int, name: str) -> str:
        return f"truth {number} {name} {budget}"

    numbers = {name: list(range(0, COUNT, 1 if name in ALL_INSTANCES else every)) for name in names}
    if finish:
        numbers = {name: [n for n in range(COUNT) if key(n, name) in kept.curves] for name in names}
    wanted = {key(n, name): partial(_truth_curve, n, name, budget) for name in names for n in numbers[name]}
    curves = kept.get(wanted, jobs)
    return {
        "samplers": {
            name: {"instances": numbers[name]} | summary([curves[key(n, name)] for n in numbers[name]])
            for name in names
        }
    }


def lanes_of(device: str) -> tuple[CostModelEvaluator, Platform]:
    """Return the cost model of a phone, and the lanes of it that are searched."""
    evaluator = CostModelEvaluator()
    described = evaluator.described(device)
    if described is None:
        raise ValueError(device)
    return evaluator, described.restrict(PHONES[device])


@cache
def zoo_study(source: str, device: str) -> Study:
    """Return a study of a model on a phone, where measuring gives what the cost model says.

    What samplers may know is what a study learns when it times the operators one by one. The optimum is proven by exact
    search.
    """
    graph = load(source)
    evaluator, platform = lanes_of(device)
    with evaluator.prepare(platform) as session:
        costs = profile(session, graph, platform).costs(platform)
        simulator = session.simulator(graph)
    least = chain_costs(platform, part_costs(simulator), least=True)
    found = least_chain(graph, least, simulator.latency_s, ZOO_STAGES)
    if not found.proven:
        raise ValueError(source)
    best_s = found.cost_s

    def measure(plan: Plan) -> tuple[float, tuple[float, ...]]:
        timeline = simulator.run(plan)
        events = sorted(timeline.events, key=lambda event: event.stage)
        return timeline.makespan_s, tuple(event.end_s - event.start_s for event in events)

    space = ChainSpace(graph, platform, ZOO_STAGES)
    return Study(Problem(graph, platform, space, costs), measure, partial(regret, simulator.latency_s, best_s))


def _zoo_curve(source: str, device: str, name: str, seed: int, budget: int) -> Curve:
    return zoo_study(source, device).run(name, seed, budget)


def model(names: Sequence[str], budget: int, seeds: int, kept: Kept, jobs: int) -> dict[str, Any]:
    """Run the samplers on models of the zoo, where the truth is the cost model."""
    wanted: dict[str, Callable[[], Curve]] = {}
    keys: dict[str, dict[str, list[str]]] = {}
    for seed, source, device, name in product(range(seeds), ZOO, PHONES, names):
        case = f"{source} on {device}"
        of = keys.setdefault(case, {}).setdefault(name, [])
        if name != "gp" or seed < GP_SEEDS:
            of.append(f"{case} {name} {seed} {budget}")
            wanted[of[-1]] = partial(_zoo_curve, source, device, name, seed, budget)
    curves = kept.get(wanted, jobs)
    found = {case: {name: [curves[k] for k in each] for name, each in of.items()} for case, of in keys.items()}
    return {
        "seeds": {name: len(next(iter(found.values()))[name]) for name in names},
        "lanes": {device: list(names) for device, names in PHONES.items()},
        "max_stages": ZOO_STAGES,
        "samplers": {name: summary([c for of in found.values() for c in of[name]]) for name in names},
        "cases": {case: {name: summary(curves) for name, curves in of.items()} for case, of in found.items()},
    }


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


def table(document: dict[str, Any]) -> str:
    """Return the mean regret of each sampler at each budget as a Markdown table."""
    rows: list[tuple[str, dict[str, float]]] = []
    for name, found in document["samplers"].items():
        rows.append((name, found["looked_fastest_percent"]))
        if "believed_fastest_percent" in found:
            rows[-1:] = [(name, found["believed_fastest_percent"]), (f"{name}, fastest as measured", rows[-1][1])]
    budgets = list(rows[0][1])
    lines = [f"| trials | {' | '.join(budgets)} |", "|---" * (len(budgets) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{r:.2f}' for r in of.values())} |" for name, of in rows]
    return "\n".join(lines)


def main() -> None:
    """Run one part and write the document, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["truth", "model", "table"])
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--samplers", default="auto,reinforce,random,tpe,nsga2,cmaes")
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="the other samplers take one instance of so many")
    parser.add_argument("--finish", action="store_true", help="begin no more studies: write down those that are there")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="studies at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no study after that: run it again")
    options = parser.parse_args()
    if options.part == "table":
        sys.stdout.write(
            "\n\n".join(f"`{path.name}`\n\n{table(json.loads(path.read_text()))}" for path in options.out) + "\n"
        )
        return
    names, out = options.samplers.split(","), options.out[0]
    command = f"python -m tests.benchmarks.samplers {options.part} {out.name} --samplers {options.samplers}"
    command += f" --budget {options.budget}"
    command += f" --every {options.every}" if options.part == "truth" else f" --seeds {options.seeds}"
    command += " --finish" if options.finish else ""
    partly = out.with_suffix(".partial")
    kept = Kept(partly, time.monotonic() + 60.0 * options.minutes)
    _quiet()
    if options.part == "truth":
        result = truth(names, options.budget, options.every, kept, options.jobs, finish=options.finish)
    else:
        result = model(names, options.budget, options.seeds, kept, options.jobs)
    document = {"schema_version": 1, "made_by": command, **provenance(), **result}
    out.write_text(json.dumps(document, indent=1) + "\n")
    partly.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
