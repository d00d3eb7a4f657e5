"""The seam for evaluators that run workloads, beside :mod:`evaluators.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from evaluators.base import Candidate, Session
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import Grids, WorkloadSimulator
from search_spaces.graph import Graph
from search_spaces.plan import Plan


class WorkloadCandidate(Candidate, Protocol):
    """A loaded plan of a workload; a run is a run of the whole workload, its latency the objective's value."""

    @property
    def outcome(self) -> Outcome:
        """What came of the last run."""
        ...


class WorkloadSession(Session, Protocol):
    """A session whose candidates are plans of one workload, and whose graph is the joined one."""

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

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> WorkloadCandidate:
        """See :class:`~evaluators.base.Session`; ``graph`` is the joined one."""
        ...
