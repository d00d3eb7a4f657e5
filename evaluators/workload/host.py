"""The seam for evaluators that run workloads, beside :mod:`evaluators.base`, and what those that measure share."""

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

    A run of a candidate is a run of the whole workload, its latency the objective's value.
    """

    @property
    def simulator(self) -> WorkloadSimulator:
        """What predicts plans, once :meth:`price` was called."""
        ...

    def price(
        self, known: Mapping[str, Any] | None, progress: Callable[[str], None], grids: Grids = ...
    ) -> Mapping[str, Any]:
        """Learn what jobs cost, and return it as plain values.

        Args:
            known: what an earlier session returned, to be used instead of measuring again; what it lacks is measured.
            grids: triples that plans may have, and whose costs are to be learnt, too.
        """
        ...


def came_of(batch: Batch) -> Outcome:
    """Return what came of the requests of a batch's last run.

    Raises:
        UnavailableError: the evaluator does not report it.
    """
    if batch.outcome is None:
        raise UnavailableError("the evaluator reports nothing about the requests of a run")
    return batch.outcome


class HostedRun(Candidate, ABC):
    """A loaded plan of a workload, run by subclasses.

    Args:
        found: the plan's setting.
        objective: what latencies are.
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
        """Return how the outputs of each instance, which has run, compare with its whole model's."""

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``.

        A run is ended by nothing but its end.

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
        return Batch(np.array(values), np.array(stages), last.timeline if last else None, outcome=last)

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; runs once if none was made.

        The worst agreement of all instances.
        """
        if self._outcome is None:
            self._outcome = self.once()
        return worst(self.agreements())


def worst(found: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements: one that is not accepted, then the one that is off most."""
    return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))


class PricedWorkload(Session):
    """A session of one workload whose plans are predicted by prices of jobs; see :class:`WorkloadSession`.

    Attributes:
        lowerings: make the models that plans run.

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
        """What predicts plans, once :meth:`price` was called.

        Raises:
            UnavailableError: there are no prices yet.
        """
        if self._simulator is None:
            raise UnavailableError("the workload's jobs have no prices yet")
        return self._simulator

    def predict_by(self, table: PriceTable) -> None:
        """Predict plans by these prices from now on.

        Raises:
            RunFolderError: some are missing.
        """
        table.check(c.graph for c in self.joined.components)
        price = table.price(self._processors)
        self._simulator = WorkloadSimulator(self.workload, self.joined, self.platform, price, lowerings=self.lowerings)


class MeasuredWorkload(PricedWorkload, ABC):
    """A session that measures the prices itself."""

    def price(
        self,
        known: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        grids: Grids = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        """Learn what jobs cost, and return it as plain values.

        Of ``grids`` only what ``known`` lacks is timed.
        """
        graphs = list({c.graph.digest: c.graph for c in self.joined.components}.values())
        table = self.measured(graphs, progress) if known is None else PriceTable.from_json(known)
        table = with_triples(table, graphs, grids, self.lowerings, self._processors, self.alone, progress, self.forget)
        self.predict_by(table)
        return table.to_json()

    @abstractmethod
    def measured(self, graphs: Sequence[Graph], progress: Callable[[str], None]) -> PriceTable:
        """Measure what jobs of some models cost; see :func:`~evaluators.workload.prices.measure_prices`."""

    @abstractmethod
    def alone(self, found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        """Run models beside their workload, for what their jobs cost.

        Args:
            parts: of each client its model, and where it is cut.
        """

    @abstractmethod
    def forget(self, graph: Graph) -> None:
        """Let go of what was made to run a decomposed model that was only looked at."""
