"""Which of two runs' plans is faster: both run from their files, interleaved, over rebuilt instances."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Agreement, Batch
from evaluators.comparison import Comparison, ComparisonPolicy, compare
from evaluators.litert.deployment import read_deployment
from evaluators.litert.runner import PlanRunner
from optimizer.console import interval_ms
from optimizer.decide import settled
from optimizer.execute import plan_of
from search_spaces.errors import RunFolderError, UnstableError
from search_spaces.graph import Graph

_POLICY = ComparisonPolicy(max_s=20.0)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A plan run from its files, as a :class:`~evaluators.base.Candidate`."""

    runner: PlanRunner

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        return self.runner.measure(n, stop_above_s)

    def verify(self) -> Agreement | None:
        return None

    def close(self) -> None:
        self.runner.close()


def compare_runs(first: str, second: str, *, as_json: bool) -> str:
    """Compare the best plans of two run folders (or two ``plan.json``) and return what to print.

    Raises:
        PlanError: a plan or a stage file is missing or damaged.
        RunFolderError: the plans are for different models; a model and its rewrites are one.
        UnstableError: the ratio of the two changed too much to tell.
    """
    paths = [plan_of(first), plan_of(second)]
    deployments = [read_deployment(path) for path in paths]
    rewritten = deployments[0].content_digest != deployments[1].content_digest
    if rewritten and _interface(deployments[0].graph) != _interface(deployments[1].graph):
        names = " and ".join(d.graph.name for d in deployments)
        raise RunFolderError(f"the two runs are of different models ({names})", "compare runs of one model")

    def load(path: Path) -> _Loaded:
        loaded = _Loaded(PlanRunner(path))
        loaded.runner.run_seeded()
        return loaded

    rng = np.random.default_rng(0)
    try:
        found = settled(lambda: compare(lambda: load(paths[0]), lambda: load(paths[1]), _POLICY, rng), "the two plans")
    except UnstableError as error:
        raise UnstableError(error.what, "repeat it when the machine is quiet") from None
    if as_json:
        return _document(first, second, found)
    told = ["their files differ: operators of one are split, or of other weights"] if rewritten else []
    return "\n".join([_text(first, second, found), *told])


def _interface(graph: Graph) -> tuple[Any, ...]:
    """Return what a model has in common with its rewrites: its name, and what it takes and gives."""
    ends = ([(graph.tensors[t].shape, graph.tensors[t].dtype) for t in some] for some in (graph.inputs, graph.outputs))
    return graph.name, *ends


def _text(first: str, second: str, found: Comparison) -> str:
    ratio, (low, high) = found.speedup, found.ci95
    lines = [f"{first}: {interval_ms(found.baseline)}", f"{second}: {interval_ms(found.candidate)}"]
    one, other = second, first
    if found.significant and ratio < 1.0:
        one, other, ratio, low, high = first, second, 1.0 / ratio, 1.0 / high, 1.0 / low
    verdict = f"significant: {one} is faster" if found.significant else "not significant"
    how = f"{ratio:.4f} times [{low:.4f}, {high:.4f}] as fast as that of {other}"
    lines.append(f"the plan of {one} is {how}, over {found.rounds} rebuilt pairs: {verdict}")
    if found.unstable:
        lines.append(f"the machine's speed changed by {found.drift:+.1%} meanwhile, for both alike")
    return "\n".join(lines)


def _document(first: str, second: str, found: Comparison) -> str:
    return json.dumps({"schema_version": 1, "first": first, "second": second, **found.to_json()}, indent=2)
