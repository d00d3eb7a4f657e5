"""``optimize pretrain``: a policy for the sampler ``reinforce``, trained on cost models of devices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.cost_model.session import CostModelEvaluator
from optimizer.devices import choose_platform
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import Seconds, chain_cost
from optimizer.model.profile import Profiler, profile
from optimizer.samplers.auto import Problem
from optimizer.samplers.critic import ERROR
from optimizer.samplers.policy.features import Choices
from optimizer.samplers.policy.network import Weights
from optimizer.samplers.policy.reinforce import task_of
from optimizer.samplers.policy.training import TrainingTask, pretrain
from search_spaces.core.errors import UsageError, reason_of
from search_spaces.core.wording import plural
from search_spaces.models import load
from search_spaces.spaces.chain import ChainSpace

SCHEMA_VERSION = 1
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training.

    Attributes:
        path: of the policy.
        tasks: names of the training tasks, in turn.
        batches: number of batches of plans drawn.
        first, last: ratio of the drawn plans' mean time to that of the fastest plan met, geometric mean over the tasks:
            in the first batch of each training task, and in the last one.
    """

    path: Path
    tasks: tuple[str, ...]
    batches: int
    first: float
    last: float

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "policy": str(self.path),
            "tasks": list(self.tasks),
            "batches": self.batches,
            "slower_than_best_first": self.first,
            "slower_than_best_last": self.last,
        }


def train(
    models: Sequence[str], devices: Sequence[Path], out: Path, *, max_stages: int = 4, batches: int = 0, seed: int = 0
) -> Trained:
    """Train a policy on every model on every device, in turns, and write it.

    Args:
        models: names or files, as for ``--model``.
        devices: profiles, as files or shipped names, as for ``--platform`` of the evaluator ``cost-model``.
        out: file of the policy, ``.npz``.
        max_stages: most stages of a plan.
        batches: number of batches of plans to draw; 0 for 40 for each training task.
        seed: the same seed gives the same policy.

    Raises:
        UsageError: a model, a device or a number is wrong, or the file cannot be written.
        ProfileError: a device's profile does not cover the operators of a model.
    """
    if max_stages < 1:
        raise UsageError(f"--max-stages {max_stages}: a plan has at least 1 stage")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UsageError(f"--out {out}: is a directory")
    names, tasks = [], []
    for model, device in product(models, devices):
        names.append(f"{model} on {device}")
        tasks.append(training_task(model, device, max_stages))
    count = batches or 40 * len(tasks)
    if count < _FEWEST * len(tasks):
        least = _FEWEST * len(tasks)
        raise UsageError(f"--batches {batches}: must be at least {least}, {_FEWEST} for each model on each device")
    batches_of: list[list[tuple[float, float]]] = [[] for _ in tasks]
    weights = pretrain(
        Weights.new(seed),
        tasks,
        count,
        seed,
        lambda n, mean_s, best_s: batches_of[n % len(batches_of)].append((mean_s, best_s)),
    )
    if not all(batches_of):
        raise UsageError(f"no drawn plan of {names[batches_of.index([])]} runs", "give another model or device")
    best = [min(best_s for _, best_s in of) for of in batches_of]
    first, last = (
        math.exp(sum(math.log(of[which][0] / b) for of, b in zip(batches_of, best, strict=True)) / len(batches_of))
        for which in (0, -1)
    )
    try:
        weights.save(out)
    except OSError as error:
        raise UsageError(f"--out {out}: {reason_of(error)}") from error
    return Trained(out, tuple(names), count, first, last)


def training_task(model: str, device: Path, max_stages: int) -> TrainingTask:
    """Return a network on a device as a training task; the policy sees costs with errors like a calibration's.

    Raises:
        UsageError: the model or the device is unknown.
        ProfileError: the profile does not cover an operator of the model.
    """
    graph = load(model)
    evaluator = CostModelEvaluator()
    platform = choose_platform(evaluator, None, device)
    with evaluator.prepare(platform) as session:
        costs = profile(Profiler(session, graph, platform)).costs(platform)
    most = min(max_stages, len(graph.operators))
    rng = np.random.default_rng(zlib.crc32(f"{graph.digest} {platform.name}".encode()))

    def wrong(values: Seconds) -> Seconds:
        found: Seconds = values * np.exp(ERROR * rng.standard_normal(values.shape))
        return found

    seen = replace(
        costs,
        operator_s=wrong(costs.operator_s),
        overhead_s=wrong(costs.overhead_s),
        transfer_s=wrong(costs.transfer_s),
    )
    best = best_chains(seen, most)[0]
    optimum = best.plan(graph)
    problem = Problem(graph, platform, ChainSpace(graph, platform, most), seen, optima=(optimum,))
    return TrainingTask(Choices(task_of(problem)), partial(chain_cost, costs))


def render(trained: Trained) -> str:
    """Return the text that the command prints."""
    return (
        f"{trained.path}: {trained.batches} batches of plans on {plural(len(trained.tasks), 'training task')}; its "
        f"draws were {trained.first:.2f} times as slow as the best plan found, and are {trained.last:.2f} times\n"
        f"use it with --sampler reinforce@{trained.path}"
    )
