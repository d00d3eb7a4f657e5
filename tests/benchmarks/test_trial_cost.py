"""What a trial costs beside its measurement: sampler, loop and durable log together, 100 parameters, 1,000 trials."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from evaluators.sampling import SamplingPolicy
from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.exact.chain import ChainCosts, chain_cost
from optimizer.history import History
from optimizer.loop import Loop
from optimizer.samplers.auto import Problem
from optimizer.storage import TrialLog
from search_spaces.chain import ChainSpace
from search_spaces.graph import Graph, Operator, Tensor
from search_spaces.platform import Platform, Processor

TRIALS, PARAMETERS, LIMIT_S = 1000, 100, 0.003
KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "ADD")


def graph(count: int) -> Graph:
    tensors = tuple(Tensor(f"t{i}", (1, 64, 64, 16), "float32", 64 * 64 * 16 * 4) for i in range(count + 1))
    kinds = itertools.islice(itertools.cycle(KINDS), count)
    return Graph("chain", tensors, tuple(Operator(k, (i,), (i + 1,)) for i, k in enumerate(kinds)), (0,), (count,))


@pytest.mark.benchmark
@pytest.mark.parametrize("sampler", ["auto", "random"])
def test_a_trial(
    tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    seconds, syncs = run(tmp_path, sampler, TRIALS, monkeypatch)
    record_property("ms_per_trial", round(seconds * 1e3, 3))
    assert syncs <= TRIALS + 5
    if sampler == "auto":
        assert seconds <= LIMIT_S


def run(folder: Path, sampler: str, trials: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Return the seconds of a trial, and how often the log was synced to the disk."""
    model = graph(60)
    platform = Platform("p", tuple(Processor(name, "cpu", {}, name) for name in ("cpu", "gpu", "npu")))
    space = ChainSpace(model, platform, PARAMETERS // 2)
    assert len(space.distributions()) == PARAMETERS
    rng = np.random.default_rng(0)
    operator_s = 1e-4 * np.exp(0.5 * rng.standard_normal((3, 60)))
    costs = ChainCosts(platform, operator_s, np.full(3, 1e-5), np.full((60, 3, 3), 2e-5))
    log, _ = TrialLog.open(folder / "trials.jsonl")
    syncs: list[int] = []

    def counted(descriptor: int, sync: Callable[[int], None]) -> None:
        syncs.append(descriptor)
        sync(descriptor)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, partial(counted, sync=getattr(os, name)))
    policy = SamplingPolicy(max_s=1e-6, min_runs=1, max_runs=3, warmup_max=1)
    with closing(log), SyntheticEvaluator(noise=Noise(run=0.03)).prepare(platform) as session:
        loop = Loop(
            graph=model,
            space=space,
            session=session,
            history=History(space.distributions()),
            log=log,
            named=policy,
            policy=policy,
            sampler=sampler,
            seed=0,
            budget=trials,
            queue=(),
            predict=lambda plan: chain_cost(costs, plan),
            problem=Problem(model, platform, space, costs),
        )
        begin = time.perf_counter()
        loop.run()
        return (time.perf_counter() - begin) / trials, len(syncs)
