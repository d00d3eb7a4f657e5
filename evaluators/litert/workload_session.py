"""What all sessions that measure workloads have in common: prices of jobs, and a simulator that goes by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from evaluators.base import Session
from evaluators.litert.workload_prices import PriceTable
from evaluators.litert.workload_triples import with_triples
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import Grids, WorkloadSimulator
from evaluators.workload.setting import Setting
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.platform import Platform
from search_spaces.pools import lanes_of
from search_spaces.workload import Workload


class MeasuredWorkload(Session, ABC):
    """See :class:`~evaluators.workload.host.WorkloadSession`.

    Attributes:
        lowerings: make the models that plans run.

    Args:
        platform: lanes, pools, and lanes that only baselines use.
    """

    def __init__(self, workload: Workload, joined: JoinedGraph, platform: Platform, objective: Objective) -> None:
        self.workload, self.joined, self.platform, self.objective = workload, joined, platform, objective
        self.lowerings = Lowerings(joined, platform)
        self._lanes = lanes_of(platform)
        self._simulator: WorkloadSimulator | None = None

    @property
    def simulator(self) -> WorkloadSimulator:
        """See :class:`~evaluators.workload.host.WorkloadSession`.

        Raises:
            UnavailableError: :meth:`price` was not called.
        """
        if self._simulator is None:
            raise UnavailableError("the workload's jobs have no prices yet")
        return self._simulator

    def price(
        self,
        known: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        grids: Grids = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        """See :class:`~evaluators.workload.host.WorkloadSession`; of ``grids`` only what ``known`` lacks is timed."""
        graphs = list({c.graph.digest: c.graph for c in self.joined.components}.values())
        table = self.measured(graphs, progress) if known is None else PriceTable.from_json(known)
        table = with_triples(table, graphs, grids, self.lowerings, self._lanes, self.alone, progress, self.forget)
        price = table.price(self._lanes)
        self._simulator = WorkloadSimulator(self.workload, self.joined, self.platform, price, lowerings=self.lowerings)
        return table.to_json()

    @abstractmethod
    def measured(self, graphs: Sequence[Graph], progress: Callable[[str], None]) -> PriceTable:
        """Measure what jobs of some models cost; see :func:`~evaluators.litert.workload_prices.measure_prices`."""

    @abstractmethod
    def alone(self, found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        """Run models beside their workload, for what their jobs cost.

        Args:
            parts: of each seat its model, and where it is cut.
        """

    @abstractmethod
    def forget(self, graph: Graph) -> None:
        """Let go of what was made to run a decomposed model that was only looked at."""
