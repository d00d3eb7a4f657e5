"""What a policy for ``reinforce`` carries over: the figures in ``experiments/results/samplers_policy.json``.

``python -m tests.benchmarks.policy OUT.json`` leaves out one model and one phone at a time: a policy is trained on the
other models on the other phones (cost models; no device time), then draws plans of the model that it has not seen on
the phone that it has not seen. Its draws are compared with those of a policy that has learned nothing (the number of
parts, the cuts and the lanes uniform), by how much slower they are than the best plan of the space. On most phones the
GPU alone is the best; so the same is done for the generated instances, whose best plans have several parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.provenance import provenance
from optimizer.samplers.auto import Problem
from optimizer.samplers.policy.network import Weights, roll_out
from optimizer.samplers.policy.pretrain import lesson_of
from optimizer.samplers.policy.reinforce import lesson
from optimizer.samplers.policy.training import Lesson, pretrain
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.instances import Instance, instance
from tests.benchmarks.samplers import PHONES, ZOO, ZOO_STAGES, zoo_study

BATCHES_EACH, DRAWS, FIRST = 40, 1000, 10
LEARNED_ON, UNSEEN = tuple(range(1, 24, 3)), tuple(range(30, 60, 3))


def lessons(model: str, device: str) -> dict[str, Lesson]:
    """Return what is left to learn on without a model and a phone."""
    return {
        f"{source} on {phone}": lesson_of(source, Path(phone), ZOO_STAGES, PHONES[phone])
        for source in ZOO
        for phone in PHONES
        if source != model and phone != device
    }


def drawn(weights: Weights, model: str, device: str) -> NDArray[np.float64]:
    """Return how much slower than the optimum the plans are that a policy draws, relative."""
    unseen = lesson_of(model, Path(device), ZOO_STAGES, PHONES[device])
    study = zoo_study(model, device)
    platform = study.problem.platform
    names = [p.name for p in platform.processors]
    chains = roll_out(weights, unseen.seen, DRAWS, np.random.default_rng(1)).chains()
    return np.array([study.regret(study.plan(cuts, [names[lane] for lane in lanes])) for cuts, lanes in chains])


def generated() -> dict[str, Any]:
    """Train on some of the generated instances, draw plans of others, and price them by their truth."""
    learned_on = [lesson(problem_of(instance(number))) for number in LEARNED_ON]
    learned = pretrain(Weights.new(0), learned_on, BATCHES_EACH * len(learned_on), 0)
    found: dict[str, list[NDArray[np.float64]]] = {"uniform_percent": [], "trained_percent": []}
    for number in UNSEEN:
        of = instance(number)
        names = [p.name for p in of.model.platform.processors]
        for name, weights in zip(found, (Weights.new(0), learned), strict=True):
            seen = lesson(problem_of(of)).seen
            chains = roll_out(weights, seen, DRAWS // 5, np.random.default_rng([1, number])).chains()
            plans = [chain_plan(of.graph, cuts, [names[lane] for lane in lanes]) for cuts, lanes in chains]
            found[name].append(np.array([of.true_s(plan) / of.optimum_s - 1.0 for plan in plans]))
    return {name: said(np.concatenate(regrets)) for name, regrets in found.items()} | {
        "trained_on": list(LEARNED_ON),
        "unseen": list(UNSEEN),
        "batches": BATCHES_EACH * len(learned_on),
    }


def problem_of(of: Instance) -> Problem:
    """Return what a sampler may know of an instance."""
    return Problem(of.graph, of.model.platform, of.space, of.model)


def said(regrets: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean, the median, and the mean of the best of the first draws, in per cent."""
    best = regrets.reshape(-1, FIRST).min(axis=1).mean()
    values = {"mean": regrets.mean(), "median": np.median(regrets), f"best_of_{FIRST}": best}
    return {name: round(float(value) * 100, 2) for name, value in values.items()}


def main() -> None:
    """Train, draw, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    cases: dict[str, Any] = {}
    for number, model in enumerate(ZOO):
        device = list(PHONES)[number % len(PHONES)]
        learned_on = lessons(model, device)
        batches = BATCHES_EACH * len(learned_on)
        learned = pretrain(Weights.new(0), list(learned_on.values()), batches, 0)
        cases[f"{model} on {device}"] = {
            "uniform_percent": said(drawn(Weights.new(0), model, device)),
            "trained_percent": said(drawn(learned, model, device)),
            "trained_on": list(learned_on),
            "batches": batches,
        }
        sys.stderr.write(f"{model} on {device}: {json.dumps(cases[f'{model} on {device}'])}\n")
    made_by = f"python -m tests.benchmarks.policy {out.name}"
    document = {"schema_version": 1, "made_by": made_by, **provenance(), "draws": DRAWS}
    document |= {"cases": cases, "generated": generated()}
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
