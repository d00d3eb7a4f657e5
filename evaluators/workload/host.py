"""The protocol of sessions for workloads, in addition to :mod:`evaluators.base`, and base classes of measuring ones."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Batch, Candidate, Session
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import Grids, WorkloadSimulator
from evaluators.workload.prices import JobTimer, PriceTable
from evaluators.workload.setting import Setting, closed_loops, setting
from evaluators.workload.simulate import stage_means_s
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch, Plan
from search_spaces.core.platform import Processor
from search_spaces.core.pools import members, single_processors
from search_spaces.rewrites.lower import lowering


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


Instance = TypeVar("Instance")
"""A loaded model, of one kind for each evaluator."""

Outputs = Sequence[NDArray[np.generic]]
Parts = Sequence[tuple[Graph, Sequence[int]]]
"""Models, and where each is cut."""


class Execution(Protocol):
    """What runs a loaded plan of a workload."""

    @property
    def failures(self) -> Mapping[int, str]:
        """Client → why its model failed."""
        ...

    def run(self) -> Outcome:
        """Run the workload once."""
        ...


class HostedRun(Candidate, Generic[Instance]):
    """A loaded plan of a workload.

    Attributes:
        executor: what runs it.

    Args:
        found: the plan's setting.
        instances: one for each client of ``found``; they are released with the plan.
    """

    def __init__(
        self, session: MeasuredWorkload[Instance], found: Setting, plan: Plan, instances: Sequence[Instance]
    ) -> None:
        self._session, self._found, self._plan, self._instances = session, found, plan, tuple(instances)
        self.executor = session.executor(found, plan.dispatch, instances)
        self._outcome: Outcome | None = None

    def _once(self) -> Outcome:
        """Run the workload once."""
        found = self.executor.run()
        if self.executor.failures:
            client, reason = next(iter(self.executor.failures.items()))
            name = self._session.joined.components[self._found.components[client]].name
            raise UnavailableError(f"{name}: {reason}")
        return found

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``.

        Runs are never interrupted.

        Raises:
            UnavailableError: a model failed.
        """
        values, stages = [], []
        for _ in range(n):
            self._outcome = found = self._once()
            values.append(found.value_s(self._session.objective))
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
        if self._outcome is None or not self._session.keeps_outputs:
            self._outcome = self._once()
        return worst(self._session.agreements(self._found, map(self._session.outputs, self._instances)))

    def close(self) -> None:
        """Release what only this candidate holds; a second call does nothing."""
        for instance in self._instances:
            self._session.release(instance)


def worst(found: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements: one that is not accepted, then the one with the largest error."""
    return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))


class PricedWorkload(Session):
    """A session of one workload whose plans are predicted from costs of jobs.

    Attributes:
        lowerings: of the models, for all plans.

    Args:
        lowerings: their platform has processors, pools, and processors that only baselines use.
    """

    def __init__(self, lowerings: Lowerings, objective: Objective) -> None:
        self.workload, self.joined, self.platform = lowerings.workload, lowerings.joined, lowerings.platform
        self.lowerings, self.objective = lowerings, objective
        self._processors = single_processors(self.platform)
        self._simulator: WorkloadSimulator | None = None

    @property
    def simulator(self) -> WorkloadSimulator:
        """The simulator that predicts plans.

        Raises:
            UnavailableError: :meth:`price` was not called yet.
        """
        if self._simulator is None:
            raise UnavailableError("the workload's job times are not known yet")
        return self._simulator

    def predict_by(self, table: PriceTable) -> None:
        """Predict plans by these costs from now on.

        Raises:
            RunFolderError: some costs are missing.
        """
        self._simulator = table.simulator(self.lowerings)


class MeasuredWorkload(PricedWorkload, ABC, Generic[Instance]):
    """A session that measures the costs itself; a subclass sets the processor on which it runs whole models.

    Attributes:
        keeps_outputs: whether outputs of a run are there until the next one; else its process may have ended meanwhile.
    """

    keeps_outputs = True
    _reference_processor: Processor

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Candidate:  # noqa: ARG002
        """Compile a plan; with ``fresh``, share nothing with what is loaded already (a rebuilt instance).

        Every candidate has memory of its own.

        Args:
            graph: the joined graph.
        """
        found = setting(plan, self.lowerings)
        with ExitStack() as undo:
            instances = []
            for client in range(len(found.clients)):
                instances.append(self.bound(found, client))
                undo.callback(self.release, instances[-1])
            run = HostedRun(self, found, plan, instances)
            undo.pop_all()
            return run

    @abstractmethod
    def bound(self, found: Setting, client: int) -> Instance:
        """Return a client's model, loaded, with inputs."""

    @abstractmethod
    def executor(self, found: Setting, dispatch: Dispatch, instances: Sequence[Instance]) -> Execution:
        """Return what runs instances in a setting."""

    @abstractmethod
    def outputs(self, instance: Instance) -> Outputs:
        """Return the outputs of an instance's last request."""

    @abstractmethod
    def release(self, instance: Instance) -> None:
        """Release an instance; a second call does nothing."""

    def agreements(self, found: Setting, outputs: Iterable[Outputs]) -> Iterator[Agreement]:
        """Compare the outputs of each instance of a plan with those of its whole model."""
        for index, model, mine in zip(found.components, found.models, outputs, strict=True):
            used = [self.platform[each] for name in model.processors for each in members(self.platform[name])]
            off = model.may_be_off(self.workload.client_of(index).tucker or 0.0)
            yield self.agreement(model.model, mine, used, off)

    @abstractmethod
    def agreement(self, graph: Graph, outputs: Outputs, processors: Sequence[Processor], off: float = 0.0) -> Agreement:
        """Compare outputs of a model with those of the whole model on a CPU.

        Args:
            processors: that computed the outputs.
            off: relative error that is accepted beyond the processors' tolerance.
        """

    def decomposed_error(self, graph: Graph, ranks: RankSet) -> float | None:
        """Return the largest error of a decomposed model's outputs, relative to the largest value of that output."""
        made = lowering(graph).decomposed(ranks).graph
        try:
            outputs = self.whole_outputs(made)
        finally:
            self.forget(made)
        return self.agreement(graph, outputs, [self._reference_processor]).max_rel_error

    def whole_outputs(self, graph: Graph) -> Outputs:
        """Return the outputs of a whole model on the reference processor."""
        processor = [p.name for p in self._processors].index(self._reference_processor.name)
        found = closed_loops([processor], [1], self._processors)
        return self.run_alone(found, [(graph, ())], 1, outputs=True)[1][0]

    def price(
        self,
        known: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        grids: Grids = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        """Measure the costs of jobs that are not ``known``, and return all as plain values."""
        graphs = list({c.graph.digest: c.graph for c in self.joined.components}.values())
        timer = JobTimer(self._processors, self.alone, progress)
        table = self.measured(graphs, timer) if known is None else PriceTable.from_json(known)
        table = timer.with_triples(table, graphs, grids, self.forget)
        self.predict_by(table)
        return table.to_json()

    def measured(self, graphs: Sequence[Graph], timer: JobTimer) -> PriceTable:
        """Measure the costs of jobs of some models."""
        return timer.prices(graphs)

    def alone(self, found: Setting, parts: Parts, runs: int) -> list[Outcome]:
        """Run models outside the workload, to measure the costs of their jobs."""
        return self.run_alone(found, parts, runs)[0]

    def run_alone(
        self, found: Setting, parts: Parts, runs: int, *, outputs: bool = False
    ) -> tuple[list[Outcome], list[Outputs]]:
        """Run models outside the workload; return the outcome of each run, and the outputs of each model.

        Args:
            found: the setting, with one client for each model.
            parts: model of each client, and where it is cut.
            runs: number of runs.
            outputs: whether to return any; a device's outputs take a while to read.
        """
        with ExitStack() as undo:
            instances = []
            for instance in self.bound_alone(found, parts):
                undo.callback(self.release, instance)
                instances.append(instance)
            executor = self.executor(found, "fifo", instances)
            outcomes = [executor.run() for _ in range(runs)]
            if executor.failures:
                raise UnavailableError(next(iter(executor.failures.values())))
            return outcomes, [self.outputs(instance) for instance in instances] if outputs else []

    @abstractmethod
    def bound_alone(self, found: Setting, parts: Parts) -> Iterator[Instance]:
        """Yield models outside the workload, each loaded, with inputs; arguments as of :meth:`run_alone`."""

    @abstractmethod
    def forget(self, graph: Graph) -> None:
        """Release what was made to run a decomposed model that was only timed."""
