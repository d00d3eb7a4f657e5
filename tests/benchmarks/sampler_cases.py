"""Samplers where the best plan has two stages or more on two kinds of processors.

``python -m tests.benchmarks.sampler_cases OUT.json`` looks for such cases among networks of the zoo and pairs of
processors of phones and boards, whose operators' times are those of the profiles that ship, fitted to published
measurements. All chains are priced, so that the optimum is known; cases whose best plan gains less than 1 % on a single
processor, or needs one kind alone, are left out. A sampler is given a model that is off as calibrations are: each
operator, overhead and hand-over by 20 % (sd of the logarithm), drawn anew for each seed.

A generic sampler runs twice, by itself and from the first plan of ``auto``. Regret is what the plan that looked fastest
takes more than the optimum; intervals are of the mean over cases and seeds. Finished curves are kept beside OUT until
all are there; with ``--minutes`` the program stops by itself, and goes on when it is run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.plans import part_costs
from evaluators.cost_model.session import CostModelEvaluator
from optimizer.exact.least import chain_costs, least_chain
from optimizer.model.profile import known_profile
from optimizer.provenance import provenance
from optimizer.samplers.auto import AutoProposer, Problem
from search_spaces.core.plan import Plan
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace
from tests.benchmarks.instances import MODEL_ERROR
from tests.benchmarks.samplers import BUDGETS, Curve, Kept, Study, _quiet, regret

NETWORKS = ("alexnet", "alexnet@0.75", "alexnet@0.5", "vgg11@0.5", "vgg16@0.5", "vgg19@0.5/128", "densenet121@0.5")
DEVICES = ("mi8se", "pixel4", "s10")  # on the others that ship no such case was found
LEAST_GAIN, MOST_STAGES = 0.01, 3
GENERIC = ("random", "tpe", "nsga2", "cmaes")


@dataclass(frozen=True, slots=True)
class Case:
    """A network on two processors; ``gain`` is how much less the best plan takes than one processor."""

    network: str
    device: str
    processors: tuple[str, ...]
    gain: float

    def __str__(self) -> str:
        return f"{self.network} on {self.device}: {'+'.join(self.processors)}"

    def seed(self, number: int) -> int:
        """Return a seed of the case's own: in spaces of one size the same one would draw the same plans."""
        return zlib.crc32(f"{self} {number}".encode())


def study_of(network: str, device: str, processors: Sequence[str], seed: int) -> tuple[Study, Plan]:
    """Return a study of a case, with a model that is wrong, and the best plan."""
    graph = load(network)
    evaluator = CostModelEvaluator()
    described = evaluator.described(device)
    if described is None:
        raise ValueError(device)
    platform = described.restrict(list(processors))
    with evaluator.prepare(platform) as session:
        costs = known_profile(session.part_costs(graph), platform).costs(platform)
        simulator = session.simulator(graph)
    least = chain_costs(platform, part_costs(simulator), least=True)
    found = least_chain(graph, least, simulator.latency_s, MOST_STAGES)
    if not found.proven:
        raise ValueError(network)
    best_s, best = found.cost_s, found.plan

    def measure(plan: Plan) -> tuple[float, tuple[float, ...]]:
        timeline = simulator.run(plan)
        events = sorted(timeline.events, key=lambda event: event.stage)
        return timeline.makespan_s, tuple(event.end_s - event.start_s for event in events)

    rng = np.random.default_rng([seed, 11])
    wrong = replace(
        costs,
        operator_s=costs.operator_s * np.exp(MODEL_ERROR * rng.standard_normal(costs.operator_s.shape)),
        overhead_s=costs.overhead_s * np.exp(MODEL_ERROR * rng.standard_normal(costs.overhead_s.shape)),
        hand_over_s=costs.hand_over_s * np.exp(MODEL_ERROR * rng.standard_normal(costs.hand_over_s.shape[1:])),
    )
    space = ChainSpace(graph, platform, MOST_STAGES)
    return Study(Problem(graph, platform, space, wrong), measure, partial(regret, simulator.latency_s, best_s)), best


def cases() -> Iterator[Case]:
    """Yield the cases whose best plan uses two kinds of processors, and gains something by that."""
    evaluator = CostModelEvaluator()
    for network, device in itertools.product(NETWORKS, DEVICES):
        described = evaluator.described(device)
        for pair in itertools.combinations(described.processors if described is not None else (), 2):
            if pair[0].kind == pair[1].kind:
                continue
            names = tuple(p.name for p in pair)
            study, best = study_of(network, device, names, 0)
            whole = [study.problem.space.decode(study.problem.space.encode(study.plan((), [name]))) for name in names]
            gain = min(study.regret(plan) for plan in whole)
            if gain >= LEAST_GAIN and len({stage.processor for stage in best.stages}) == 2:
                yield Case(network, device, names, gain)


@cache
def _cached(case: Case, seed: int) -> Study:
    return study_of(case.network, case.device, case.processors, case.seed(seed))[0]


def curve(case: Case, name: str, seed: int, budget: int, *, started: bool) -> Curve:
    """Return what a sampler came to, by itself or started from the first plan of ``auto``."""
    study, own = _cached(case, seed), case.seed(seed)
    return study.run(name, own, budget, AutoProposer(study.problem, own).propose() if started else None)


def summary(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return mean regret and half its 95 % interval, in per cent, after so many plans."""
    looked = 100.0 * np.array([c.looked for c in curves])
    half = 1.96 * looked.std(axis=0, ddof=1) / math.sqrt(len(looked)) if len(looked) > 1 else looked[0] * np.nan
    return {
        str(b): [round(float(m), 3), round(float(h), 3)]
        for b, m, h in zip(BUDGETS, looked.mean(axis=0), half, strict=False)
    }


def main() -> None:
    """Find the cases, run the samplers and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samplers", default="auto,reinforce,random,tpe,nsga2,cmaes")
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    _quiet()
    kept = Kept(options.out.with_suffix(".partial"), time.monotonic() + 60.0 * options.minutes)
    found = sorted(cases(), key=lambda c: (-c.gain, str(c)))[: options.cases]
    names = options.samplers.split(",")
    rows = [(name, started) for name in names for started in (False, True)[: 1 + (name in GENERIC)]]
    key = "{} {} {} {}".format
    wanted = {
        key(case, name, started, seed): partial(curve, case, name, seed, options.budget, started=started)
        for case, seed, (name, started) in itertools.product(found, range(options.seeds), rows)
    }
    curves = kept.get(wanted, 1)
    document = {
        "schema_version": 1,
        "made_by": f"python -m tests.benchmarks.sampler_cases {options.out.name} --samplers {options.samplers} "
        f"--budget {options.budget} --seeds {options.seeds} --cases {options.cases}",
        **provenance(),
        "cases": {str(case): round(case.gain, 4) for case in found},
        "seeds": options.seeds,
        "regret_percent": {
            f"{name}{', from the first plan of auto' if started else ''}": summary(
                [curves[key(case, name, started, seed)] for case in found for seed in range(options.seeds)]
            )
            for name, started in rows
        },
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".partial").unlink(missing_ok=True)
    sys.stdout.write(f"{len(found)} cases: {options.out}\n")


if __name__ == "__main__":
    main()
