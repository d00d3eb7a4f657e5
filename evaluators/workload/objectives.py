"""Objectives of several models at once, and how a loaded plan is measured by each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate
from evaluators.objectives import (
    Objective,
    Placed,
    PlacedModel,
    Pricing,
    find_objective,
    metered_j,
    powers_or_meter,
)
from evaluators.workload.host import WorkloadSession, came_of
from evaluators.workload.outcome import OBJECTIVES as OF_OUTCOMES
from evaluators.workload.outcome import Objective as OfOutcome
from evaluators.workload.outcome import Outcome
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.workload import Workload

_TAIL_REQUESTS = (20, 100)
_TAIL_S = 0.25


def find_workload_objective(name: str) -> Objective:
    """Return the objective of a name; ``latency`` is the mean of the models' latencies.

    Raises:
        UsageError: there is none.
    """
    return _OWN.get("mean" if name == "latency" else name) or find_objective(name)


_OF_RUNS: dict[str, OfOutcome] = {name: name for name in OF_OUTCOMES}
_OWN = {
    name: Objective(name, title, "s", "ms", "path", "latency_ms", scales=name != "misses")
    for name, title in (
        ("mean", "mean of the models' latencies"),
        ("worst", "largest of the models' latencies"),
        ("makespan", "time until all is done"),
        ("misses", "missed deadlines, then the mean latency"),
    )
}


@dataclass(frozen=True, slots=True)
class WorkloadPricing(Pricing):
    """How an objective of a workload's plans is measured.

    Attributes:
        models: returns the models of a plan as they are run.
    """

    models: Callable[[Plan], Sequence[PlacedModel]] = lambda _: ()

    def value(self, plan: Plan, outcome: Outcome) -> float:
        """Return the objective of a run of a plan, in its unit."""
        objective = self.objective
        if not outcome.timeline.events:
            raise UnavailableError("no request was answered")
        match objective.aggregation:
            case "path" if objective.quantile is not None:
                return float(np.quantile(outcome.request_s, objective.quantile))
            case "path" | "busiest":
                return outcome.value_s(self.of_run)
            case "plan":
                return objective.value_of_plan(self.models(plan))
            case "run":
                stages, took_s = zip(*((e.stage, e.end_s - e.start_s) for e in outcome.timeline.events), strict=True)
                runs = np.bincount(stages, minlength=len(plan.stages))
                stage_s = np.bincount(stages, took_s, len(plan.stages)) / np.maximum(runs, 1)
                weights = self._shares(outcome, len(plan.stages)) / np.where(runs, stage_s, 1.0)
                return objective.value_of_run(outcome.value_s("mean"), stage_s, weights)
            case "sum":
                return objective.positive(float(self._shares(outcome, len(plan.stages)).sum()))

    @property
    def of_run(self) -> OfOutcome:
        """The objective of the session's runs: this one, or ``mean`` where this one is computed from outcomes."""
        if self.objective.aggregation == "busiest":
            return "throughput"
        return _OF_RUNS.get(self.objective.name, "mean")

    def _batch(
        self,
        plan: Plan,
        candidate: Candidate,
        n: int,
        stop_above: float,
        placed: Placed,  # noqa: ARG002
    ) -> Batch:
        """Run a plan and return the objective of each run, and each stage's share of it (of latencies, its time).

        Raises:
            UnavailableError: a model failed, or the meter cannot be read.
        """
        values: list[float] = []
        stages: list[NDArray[np.float64]] = []
        while True:
            before_j = self.meter.joules() if self.meter is not None else 0.0
            last = candidate.run(1)
            outcome = came_of(last)
            value = self.value(plan, outcome)
            if self.meter is not None:
                value = metered_j(self.meter, before_j, max(1, outcome.answered))
            elif self.objective.quantile is not None and last.errors is None:
                value = self._tail(candidate, outcome, self.objective.quantile)
            values.append(value)
            summed = self.objective.aggregation == "sum"
            stages.append(self._shares(outcome, len(plan.stages)) if summed else last.stage_s[0])
            if len(values) == n or value > stop_above:
                break
        errors = None if self.objective.aggregation == "plan" else last.errors
        return Batch(np.array(values), np.array(stages), last.timeline, errors, outcome)

    def _shares(self, outcome: Outcome, stages: int) -> NDArray[np.float64]:
        """Return the contribution of each stage to an objective that is a sum, per request."""
        events, by = outcome.timeline.events, self.counts
        each = [by.get(e.processor, 1.0) * (e.end_s - e.start_s) / max(1, outcome.answered) for e in events]
        return np.asarray(np.bincount([e.stage for e in events], each, stages), np.float64)

    def _tail(self, candidate: Candidate, first: Outcome, quantile: float) -> float:
        """Return a quantile over the requests of a run, and of further runs if these are few."""
        times, end_s = list(first.request_s), time.monotonic() + _TAIL_S
        while len(times) < _TAIL_REQUESTS[0] or (len(times) < _TAIL_REQUESTS[1] and time.monotonic() < end_s):
            times += came_of(candidate.run(1)).request_s
        return float(np.quantile(times, quantile))


def workload_pricing(
    objective: Objective, workload: Workload, platform: Platform, session: WorkloadSession
) -> WorkloadPricing:
    """Return how an objective is measured in a session.

    Args:
        platform: processors and pools of the space.

    Raises:
        UsageError: the objective depends on powers, and there are neither these nor a meter of the energy.
    """
    processors = Platform(platform.name, single_processors(platform))
    powers, meter = powers_or_meter(objective, processors, session)

    def models(plan: Plan) -> Sequence[PlacedModel]:
        setting = session.simulator.setting(plan, known=True)
        found = []
        for component, model in zip(setting.components, setting.models, strict=True):
            client = workload.client_of(component)
            shared = None if client.own_weights else (client.source, model.lowered.graph.digest)
            found.append(PlacedModel(model.lowered.graph, model.lowered.plan, shared))
        return found

    return WorkloadPricing(objective, processors, powers, meter, models)
