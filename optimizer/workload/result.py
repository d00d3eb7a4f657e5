"""Result of a study of several models: each model's latency under each plan, beside the study's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evaluators.workload.outcome import TIMES, Outcome
from optimizer.study.result import Result
from optimizer.study.verdict import shown_scale
from search_spaces.core.decoded_plan import jobs_of
from search_spaces.core.errors import RunFolderError
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.workload import Workload


@dataclass(frozen=True, slots=True, repr=False)
class WorkloadResult(Result):
    """The result of a study of several models; its latencies are the objective's values.

    Attributes:
        predictions: digest of a plan → the simulator's run, and the objective's value.
        tucker: model that may be decomposed → its result, of :func:`optimizer.workload.ranks.rank_summary`.
    """

    workload: Workload = field(kw_only=True)
    joined: JoinedGraph = field(kw_only=True)
    predictions: Mapping[str, tuple[Outcome, float]] = field(default_factory=dict, kw_only=True)
    tucker: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return each model's own figures under the recommended plan and each baseline that was measured; {} before.

        They are of the final's runs, or else of the search's, scaled to the machine's state in the final.
        """
        if self.verdict is None:
            return {}
        found = {}
        for name, plan in {"best": self.verdict.best, **self.baselines}.items():
            standing, trial = self.verdict.standing(plan), self.history.known.get(plan.digest)
            measured = standing or (trial.measurement if trial is not None else None)
            samples = self.samples(plan)
            if measured is not None and samples is not None and measured.outcome:
                scale = shown_scale(self.verdict, trial) if standing is None and trial is not None else 1.0
                found[name] = self._figures(plan, measured.outcome, samples.median, scale)
        return found

    def _figures(self, plan: Plan, typical: Mapping[str, Any], value_s: float, scale: float) -> dict[str, Any]:
        """Return figures of runs of a plan, scaled to the verdict's value of the objective; by ``scale`` without one.

        Raises:
            RunFolderError: the log has figures of another number of models.
        """
        value_ms = {**typical, "throughput_ms": 1e3 / typical["throughput_per_s"]}.get(f"{self.objective.name}_ms")
        scale = value_s * 1e3 / value_ms if value_ms else scale
        found = {key: value * scale if key in TIMES and value is not None else value for key, value in typical.items()}
        found["throughput_per_s"] /= scale
        names = [i.name for i in self.workload.instances]
        order = list(jobs_of(plan, self.joined))
        if len(order) != len(typical["instances_ms"]):
            raise RunFolderError("the log is damaged: a run of several models has figures of another number of models")
        found["instances_ms"] = {names[k]: ms * scale for k, ms in zip(order, typical["instances_ms"], strict=True)}
        if plan.digest in self.predictions:
            run, predicted = self.predictions[plan.digest]
            found["predicted"] = {
                "objective": predicted * 1e3,
                "mean_ms": run.value_s("mean") * 1e3,
                "makespan_ms": run.makespan_s * 1e3,
            }
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        # Not super(): @dataclass(slots=True) makes a new class, which super() here does not know.
        document = Result.to_json(self)
        document["workload"] = {
            **self.workload.to_json(),
            "instances": [i.name for i in self.workload.instances],
            "outcomes": self.outcomes,
            **({"tucker": dict(self.tucker)} if self.tucker else {}),
        }
        return document
