"""Which of two runs' plans is faster: both run from their files, interleaved, over rebuilt instances."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Batch, Candidate
from evaluators.litert.deployment import read_deployment
from evaluators.litert.runner import PlanRunner
from evaluators.litert.workload_files import is_workload_plan
from evaluators.measurement.comparison import Comparison, compare
from evaluators.measurement.disturbance import TaskCounters, in_words
from evaluators.measurement.final import FinalPolicy, Ratio
from optimizer.console import interval_ms, slower_text
from optimizer.execute import plan_of
from search_spaces.errors import RunFolderError
from search_spaces.graph import Graph

_POLICY = FinalPolicy(max_s=20.0)


@dataclass(frozen=True, slots=True)
class _Loaded(Candidate):
    """A plan run from its files."""

    runner: PlanRunner
    running: list[PlanRunner]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        return self.runner.measure(n, stop_above_s)

    def close(self) -> None:
        self.runner.close()
        self.running.remove(self.runner)


def compare_runs(first: str, second: str, *, as_json: bool, progress: Callable[[str], None] = lambda _: None) -> str:
    """Compare the best plans of two run folders (or two ``plan.json``) and return what to print.

    Args:
        progress: told once a round.

    Raises:
        PlanError: a plan or a stage file is missing or damaged.
        RunFolderError: the plans are for different models (a model and its rewrites are one), or for several at once.
    """
    paths = [plan_of(first), plan_of(second)]
    for path in paths:
        if is_workload_plan(path):
            raise RunFolderError(f"{path}: is a plan of several models", "compare plans of one model")
    deployments = [read_deployment(path) for path in paths]
    rewritten = deployments[0].content_digest != deployments[1].content_digest
    if rewritten and _interface(deployments[0].graph) != _interface(deployments[1].graph):
        names = " and ".join(d.graph.name for d in deployments)
        raise RunFolderError(f"the two runs are of different models ({names})", "compare runs of one model")

    running: list[PlanRunner] = []

    def load(path: Path) -> _Loaded:
        runner = PlanRunner(path)
        runner.run_seeded()
        running.append(runner)
        return _Loaded(runner, running)

    counters = TaskCounters(os.sched_getaffinity(0), lambda: [p for r in running for p in r.candidate.lane_processes()])
    found = compare(
        lambda: load(paths[0]),
        lambda: load(paths[1]),
        _POLICY,
        np.random.default_rng(0),
        counters=counters.read if counters.works else None,
        progress=progress,
    )
    if as_json:
        return _document(first, second, found)
    told = ["their model files differ: operators of one are split, or have other weights"] if rewritten else []
    return "\n".join([_text(first, second, found), *told])


def _interface(graph: Graph) -> tuple[Any, ...]:
    """Return what a model has in common with its rewrites: its name, and what it takes and gives."""
    ends = ([(graph.tensors[t].shape, graph.tensors[t].dtype) for t in some] for some in (graph.inputs, graph.outputs))
    return graph.name, *ends


def _text(first: str, second: str, found: Comparison) -> str:
    lines = [f"{first}: {interval_ms(found.baseline)}", f"{second}: {interval_ms(found.candidate)}"]
    ratio = Ratio(found.speedup, *found.ci95)  # how many times as long the first one takes
    how = f"over {found.rounds} rebuilt pairs"
    if ratio.significant:
        faster, slower, by = (second, first, ratio) if ratio.value > 1.0 else (first, second, ratio.inverse)
        lines.append(f"significant: the plan of {slower} is {slower_text(by)} than that of {faster}, {how}")
    else:
        lines.append(f"not significant: the two plans are {slower_text(ratio)}, {how}")
    return "\n".join([*lines, *in_words(found.disturbance, found.repeated, os.cpu_count() or 1)])


def _document(first: str, second: str, found: Comparison) -> str:
    return json.dumps({"schema_version": 1, "first": first, "second": second, **found.to_json()}, indent=2)
