"""The seam for evaluators that run workloads, beside :mod:`evaluators.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evaluators.base import Agreement, Batch
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import Grids, WorkloadSimulator
from search_spaces.arrangement import RankSet
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.workload import Workload


class WorkloadCandidate(Protocol):
    """A loaded plan of a workload; a run is a run of the whole workload, its latency the objective's value."""

    @property
    def outcome(self) -> Outcome:
        """What came of the last run."""
        ...

    def run(self, n: int, stop_above_s: float = ...) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        ...

    def verify(self) -> Agreement | None:
        """See :class:`~evaluators.base.Candidate`."""
        ...

    def close(self) -> None:
        """See :class:`~evaluators.base.Candidate`."""
        ...


class WorkloadSession(Protocol):
    """A session whose candidates are plans of one workload."""

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

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        ...

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> WorkloadCandidate:
        """See :class:`~evaluators.base.Session`; ``graph`` is the joined one."""
        ...


@runtime_checkable
class Decomposer(Protocol):
    """A session that takes plans with ranks, as far as :meth:`WorkloadSession.price` was told of their triples."""

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:
        """Return how far outputs of a decomposed model are from its own, relative to its largest one.

        None where nothing is computed.

        Raises:
            UnavailableError: the model cannot be run.
            RewriteError, ModelError: it cannot be decomposed.
        """
        ...


@runtime_checkable
class WorkloadDeployer(Protocol):
    """A session that can write a plan so that it runs without the search."""

    def deploy(self, folder: Path, plan: Plan) -> Agreement | None:
        """Write files to an existing folder, run them once, and tell how outputs compare with the whole models'."""
        ...


@runtime_checkable
class Host(Protocol):
    """An evaluator that runs workloads."""

    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> AbstractContextManager[WorkloadSession]:
        """Open a session for one workload; see :meth:`~evaluators.base.Evaluator.prepare`.

        Args:
            platform: lanes, pools, and lanes that only baselines use.
            objective: what a candidate's latencies are.
        """
        ...
