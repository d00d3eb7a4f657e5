"""Run a plan of several models from its files, as ``optimize execute`` does."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evaluators.litert.runner import WorkloadRunner
from evaluators.workload.outcome import Outcome
from search_spaces.errors import shown

FEWEST, MOST, LIMIT_S = 5, 200, 3.0
"""Runs of a workload at least and at most, and the seconds that they may take beyond the least."""

_FIGURES = ("mean_ms", "worst_ms", "longest_ms", "makespan_ms", "throughput_per_s", "misses", "rejected")


@dataclass(frozen=True, slots=True)
class Executed:
    """What to print of a plan that was run, and whether its outputs are as they should be, as far as was looked."""

    text: str
    accepted: bool = True


def execute_workload(path: Path, *, as_json: bool) -> str:
    """Run a workload from its files some times and return what to print: medians over the runs.

    A model that fails is told of, and the others go on.

    Raises:
        PlanError: the plan or a stage file is missing or damaged.
        UnavailableError: this machine cannot run it.
    """
    with WorkloadRunner(path) as runner:
        runner.run()
        outcomes: list[Outcome] = []
        begin_s = time.monotonic()
        while len(outcomes) < MOST and (len(outcomes) < FEWEST or time.monotonic() - begin_s < LIMIT_S):
            outcomes.append(runner.run())
        files, failures = runner.files, runner.failures
    return render(files.name, files.names, outcomes, failures, as_json=as_json)


def render(
    name: str,
    names: Sequence[str],
    outcomes: Sequence[Outcome],
    failures: Mapping[str, str],
    *,
    as_json: bool,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return what to print of some runs of a workload.

    Args:
        names: of the instances, those first that go first.
        failures: instance → why it failed.
        more: of the JSON document; ``outputs`` is told in words, too.
    """
    document: dict[str, Any] = {"schema_version": 1, "workload": name, "runs": len(outcomes)}
    figures = [o.to_json() for o in outcomes]
    for key in _FIGURES:
        known = [f[key] for f in figures if f[key] is not None]
        document[key] = statistics.median(known) if known else None
    each = zip(*(o.latencies_s for o in outcomes), strict=True)
    document["instances_ms"] = {n: statistics.median(t) * 1e3 for n, t in zip(names, each, strict=True)}
    document |= {"failures": dict(failures), **more}
    return json.dumps(document, indent=2) if as_json else "\n".join(_lines(document))


def _lines(document: dict[str, Any]) -> list[str]:
    # Names come from a file, and may hold what commands a terminal.
    name = document["workload"]
    told = (
        f"mean {document['mean_ms']:.4g} ms, worst {document['worst_ms']:.4g}, all done after "
        f"{document['makespan_ms']:.4g}; {document['throughput_per_s']:.4g} requests a second, "
        f"{document['misses']:.0f} missed; {document['runs']} runs"
    )
    lines = [f"{name if name.isprintable() else shown(name)}: {told}"]
    for instance, took_ms in document["instances_ms"].items():
        told = document["failures"].get(instance)
        shown_name = instance if instance.isprintable() else shown(instance)
        lines.append(f"{shown_name}: {told or f'{took_ms:.4g} ms'}")
    return [*lines, *outputs_lines(document)]


def outputs_lines(document: Mapping[str, Any]) -> list[str]:
    """Return in words what a document tells of ``outputs``: nothing where it does not look at them."""
    if "outputs" not in document:
        return []
    if (outputs := document["outputs"]) is None:
        predicted = document["predicted"]
        return ["all of this is predicted: nothing was run" if predicted else "the evaluator returns no outputs"]
    verdict = "as they should be" if outputs["accepted"] else "NOT what they should be"
    return [f"outputs are {verdict}: within {outputs['max_rel_error']:.1e} of the whole model's"]
