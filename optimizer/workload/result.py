"""Result of a study of several models: each model's latency under each plan, beside the study's result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluators.workload.outcome import Outcome
from optimizer.study.result import Result
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.workload import Workload


@dataclass(frozen=True, slots=True)
class WorkloadResult(Result):
    """The result of a study of several models; its latencies are the objective's values.

    Attributes:
        outcomes: ``best`` and the name of each baseline → what :func:`summary` returns.
        tucker: model that may be decomposed → what became of it in the best plan (:mod:`optimizer.workload.ranks`).
    """

    workload: Workload = field(kw_only=True)
    joined: JoinedGraph = field(kw_only=True)
    outcomes: Mapping[str, Any] = field(kw_only=True)
    tucker: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        # Not super(): a dataclass with slots is another class than the one that this body knows.
        document = Result.to_json(self)
        document["workload"] = {
            **self.workload.to_json(),
            "instances": [i.name for i in self.workload.instances],
            "outcomes": dict(self.outcomes),
            **({"tucker": dict(self.tucker)} if self.tucker else {}),
        }
        return document


def summary(
    workload: Workload,
    outcomes: Sequence[Outcome],
    predicted: tuple[Outcome, float] | None,
    plan: Plan,
    joined: JoinedGraph,
) -> dict[str, Any]:
    """Return the medians over some runs of a plan as plain values, and what was predicted.

    Every instance stands under its name, with its mean latency; those of a plan come in its order.

    Args:
        predicted: a run, and its objective.
    """
    figures = [o.to_json() for o in outcomes]
    found: dict[str, Any] = {key: _median([f[key] for f in figures]) for key in figures[0]}
    names = [i.name for i in workload.instances]
    order = list(jobs_of(plan, joined))
    each = zip(*(o.latencies_s for o in outcomes), strict=True)
    found["instances_ms"] = {names[k]: statistics.median(times) * 1e3 for k, times in zip(order, each, strict=True)}
    found["runs"] = len(outcomes)
    if predicted is not None:
        run, value = predicted
        found["predicted"] = {
            "objective": value * 1e3,
            "mean_ms": run.value_s("mean") * 1e3,
            "makespan_ms": run.makespan_s * 1e3,
        }
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
