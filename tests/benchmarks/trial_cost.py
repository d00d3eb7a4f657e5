"""What a trial costs beside its measurement: the figures in ``experiments/results/samplers_trial_cost.json``.

``python -m tests.benchmarks.trial_cost OUT.json`` runs sampler, loop and durable log together over a model of 60
operators cut into up to 50 parts on 3 processors: 100 parameters, 1,000 trials. What is measured takes next to no time.
The time of the disk (one ``fsync`` a record) is told apart, since it is the machine's, and so is that of the synthetic
device, which is not counted. ``added_ms`` is processor time beyond that of Optuna's own ``ask`` and ``tell`` in memory,
by a sampler that does nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line has it

import argparse
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import optuna

from evaluators.base import Candidate
from evaluators.forwarding import ForwardingSession
from evaluators.sampling import SamplingPolicy
from evaluators.testing import Noise, SyntheticEvaluator
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.provenance import provenance
from optimizer.samplers import quiet_optuna
from optimizer.samplers.auto import Problem
from optimizer.study.history import History
from optimizer.study.log import TrialLog
from optimizer.study.loop import Loop
from optimizer.study.subjects import Search
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace

TRIALS, PARAMETERS = 1000, 100
SAMPLERS = ("auto", "random")
KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "ADD")


@dataclass
class Disk:
    """Counts what is synced to the disk, and how long that takes."""

    sync: Callable[[int], None]
    syncs: int = 0
    seconds: float = 0.0

    def __call__(self, descriptor: int) -> None:
        begin = time.perf_counter()
        self.sync(descriptor)
        self.seconds += time.perf_counter() - begin
        self.syncs += 1


class Device(ForwardingSession):
    """A synthetic session that counts the seconds that its simulation takes, by the clock and of the processor."""

    seconds, busy_s = 0.0, 0.0

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:
        begin, busy = time.perf_counter(), time.process_time()
        candidate = self.inner.load(graph, plan, fresh=fresh)
        self.seconds += time.perf_counter() - begin
        self.busy_s += time.process_time() - busy
        return candidate


def graph(count: int) -> Graph:
    """Return a chain of operators."""
    tensors = tuple(Tensor(f"t{i}", (1, 64, 64, 16), "float32", 64 * 64 * 16 * 4) for i in range(count + 1))
    kinds = itertools.islice(itertools.cycle(KINDS), count)
    return Graph("chain", tensors, tuple(Operator(k, (i,), (i + 1,)) for i, k in enumerate(kinds)), (0,), (count,))


MODEL = graph(60)
PLATFORM = Platform("p", tuple(Processor(name, "cpu", {}, name) for name in ("cpu", "gpu", "npu")))
SPACE = ChainSpace(MODEL, PLATFORM, PARAMETERS // 2)


def plain(trials: int) -> float:
    """Return the processor time of a trial of Optuna alone, in milliseconds."""
    quiet_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called experimental
        fixed, other = SPACE.encode(SPACE.plan_at(0)), optuna.samplers.RandomSampler(seed=0)
        idle = optuna.samplers.PartialFixedSampler(fixed, other)
    study = optuna.create_study(sampler=idle)
    distributions = SPACE.distributions()
    begin = time.process_time()
    for _ in range(trials):
        study.tell(study.ask(distributions), 1.0)
    return round((time.process_time() - begin) / trials * 1e3, 3)


def run(folder: Path, sampler: str, trials: int) -> dict[str, float]:
    """Run a study in a folder; return what a trial took, in milliseconds, and how many records and syncs it was."""
    if len(SPACE.distributions()) != PARAMETERS:
        raise ValueError(len(SPACE.distributions()))
    rng = np.random.default_rng(0)
    operator_s = 1e-4 * np.exp(0.5 * rng.standard_normal((3, 60)))
    costs = ChainCosts(PLATFORM, operator_s, np.full(3, 1e-5), np.full((60, 3, 3), 2e-5))
    log, _ = TrialLog.open(folder / "trials.jsonl")
    policy = SamplingPolicy(max_s=1e-6, min_runs=1, max_runs=3, warmup_max=1)
    disk = Disk(os.fsync)
    with (
        mock.patch.object(os, "fsync", disk),
        closing(log),
        SyntheticEvaluator(noise=Noise(run=0.03)).prepare(PLATFORM) as session,
    ):
        device = Device(session)
        loop = Loop(
            graph=MODEL,
            space=SPACE,
            search=Search(
                device,
                lambda plan: chain_cost(costs, plan),
                (),
                lambda _: (),
                policy,
                policy,
                Problem(MODEL, PLATFORM, SPACE, costs),
            ),
            history=History(SPACE.distributions()),
            log=log,
            sampler=sampler,
            seed=0,
            budget=trials,
            queue=(),
        )
        begin, busy = time.perf_counter(), time.process_time()
        loop.run()
        spent_s, busy_s = time.perf_counter() - begin, time.process_time() - busy
    own_ms, processor_ms = plain(trials), (busy_s - device.busy_s) / trials * 1e3
    return {
        "trials": trials,
        "ms_per_trial": round((spent_s - device.seconds) / trials * 1e3, 3),
        "of_which_processor_ms": round(processor_ms, 3),
        "of_which_optuna_ms": own_ms,
        "added_ms": round(processor_ms - own_ms, 3),
        "of_which_disk_ms": round(disk.seconds / trials * 1e3, 3),
        "records": len(loop.history.trials),
        "syncs": disk.syncs,
    }


def main() -> None:
    """Run the samplers and write the document, or print it for ``-``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    found = {}
    for sampler in options.samplers.split(","):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be no disk
            found[sampler] = run(Path(folder), sampler, options.trials)
    made_by = f"python -m tests.benchmarks.trial_cost {Path(options.out).name}"
    document = {"schema_version": 1, "made_by": made_by, **provenance(), "parameters": PARAMETERS, "samplers": found}
    text = json.dumps(document, indent=1) + "\n"
    if options.out == "-":
        sys.stdout.write(text)
    else:
        Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
