"""The protocol of sessions for workloads, in addition to :mod:`evaluators.base`, and base classes of measuring ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from evaluators.base import Agreement, Batch, Candidate, Session
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import Grids, WorkloadSimulator
from evaluators.workload.prices import PriceTable, with_triples
from evaluators.workload.setting import Setting
from evaluators.workload.simulate import stage_means_s
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.workload import Workload


class WorkloadSession(Session, Protocol):
    """A session whose candidates are plans of one workload, and whose graph is the joined one.

    A run of a candidate is a run of the whole workload; its latency is the value of the objective.
    """

    @property
    def simulator(self) -> WorkloadSimulator:
        """The simulator that predicts plans; available after :meth:`price`."""
        ...

    def price(
        self, known: Mapping[str, Any] | None, progress: Callable[[str], None], grids: Grids = ...
    ) -> Mapping[str, Any]:
        """Measure or compute the costs of jobs, and return them as plain values.

        Args:
            known: costs that an earlier session returned, which are not measured again; missing ones are.
            grids: rank sets of plans, whose triples are measured too.
        """
        ...


def came_of(batch: Batch) -> Outcome:
    """Return the outcome of a batch's last run.

    Raises:
        UnavailableError: the evaluator does not report one.
    """
    if batch.outcome is None:
        raise UnavailableError("the evaluator reports nothing about the requests of a run")
    return batch.outcome


class HostedRun(Candidate, ABC):
    """A loaded plan of a workload, run by subclasses.

    Args:
        found: the plan's setting.
        objective: the quantity that runs return as latency.
    """

    def __init__(self, found: Setting, plan: Plan, objective: Objective) -> None:
        self._found, self._plan, self._objective = found, plan, objective
        self._outcome: Outcome | None = None

    @abstractmethod
    def once(self) -> Outcome:
        """Run the workload once.

        Raises:
            UnavailableError: a model failed.
        """

    @abstractmethod
    def agreements(self) -> Iterable[Agreement]:
        """Return how the outputs of each instance compare with its whole model's, after a run."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``.

        Runs are never interrupted.

        Raises:
            UnavailableError: a model failed.
        """
        values, stages = [], []
        for _ in range(n):
            self._outcome = found = self.once()
            values.append(found.value_s(self._objective))
            stages.append(stage_means_s(found, self._found, len(self._plan.stages)))
            if values[-1] > stop_above_s:
                break
        last = self._outcome
        timeline, run_s = (last.timeline, last.makespan_s) if last else (None, None)
        return Batch(np.array(values), np.array(stages), timeline, outcome=last, run_s=run_s)

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; runs once if none was made.

        Returns the worst agreement of all instances.
        """
        if self._outcome is None:
            self._outcome = self.once()
        return worst(self.agreements())


def worst(found: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements: one that is not accepted, then the one with the largest error."""
    return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))


class PricedWorkload(Session):
    """A session of one workload whose plans are predicted from costs of jobs.

    Attributes:
        lowerings: of the models, for all plans.

    Args:
        platform: processors, pools, and processors that only baselines use.
    """

    def __init__(self, workload: Workload, joined: JoinedGraph, platform: Platform, objective: Objective) -> None:
        self.workload, self.joined, self.platform, self.objective = workload, joined, platform, objective
        self.lowerings = Lowerings(joined, platform)
        self._processors = single_processors(platform)
        self._simulator: WorkloadSimulator | None = None

    @property
    def simulator(self) -> WorkloadSimulator:
        """The simulator that predicts plans.

        Raises:
            UnavailableError: :meth:`price` was not called yet.
        """
        if self._simulator is None:
            raise UnavailableError("the workload's jobs have no prices yet")
        return self._simulator

    def predict_by(self, table: PriceTable) -> None:
        """Predict plans by these costs from now on.

        Raises:
            RunFolderError: some costs are missing.
        """
        table.check(c.graph for c in self.joined.components)
        price = table.price(self._processors)
        self._simulator = WorkloadSimulator(self.workload, self.joined, self.platform, price, lowerings=self.lowerings)


class MeasuredWorkload(PricedWorkload, ABC):
    """A session that measures the costs itself."""

    def price(
        self,
        known: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        grids: Grids = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        """Measure the costs of jobs that are not ``known``, and return all as plain values."""
        graphs = list({c.graph.digest: c.graph for c in self.joined.components}.values())
        table = self.measured(graphs, progress) if known is None else PriceTable.from_json(known)
        table = with_triples(table, graphs, grids, self.lowerings, self._processors, self.alone, progress, self.forget)
        self.predict_by(table)
        return table.to_json()

    @abstractmethod
    def measured(self, graphs: Sequence[Graph], progress: Callable[[str], None]) -> PriceTable:
        """Measure the costs of some models' jobs with :func:`~evaluators.workload.prices.measure_prices`."""

    @abstractmethod
    def alone(self, found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        """Run models outside the workload, to measure the costs of their jobs.

        Args:
            found: the setting, with one client for each model.
            parts: model of each client, and where it is cut.
            runs: number of runs.
        """

    @abstractmethod
    def forget(self, graph: Graph) -> None:
        """Release what was made to run a decomposed model that was only timed."""
