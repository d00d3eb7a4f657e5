"""Workloads on the streams of a GPU: jobs as captured graphs, replayed from one process (seed 001)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Batch
from evaluators.cuda.bench import Bench, Loaded
from evaluators.cuda.prices import crowding
from evaluators.cuda.reference import References
from evaluators.cuda.settings import EXTRA, tolerance
from evaluators.litert import tensors
from evaluators.litert.workload_prices import PriceTable, measure_prices
from evaluators.workload.outcome import Objective, Outcome, outcome
from evaluators.workload.predicted import WorkloadSimulator
from evaluators.workload.setting import Setting, setting
from evaluators.workload.simulate import stage_means_s
from search_spaces.arrangement import jobs_of
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan
from search_spaces.platform import Platform, Processor
from search_spaces.pools import lanes_of, members
from search_spaces.workload import Workload

_INPUT_SEED = 0
_SHARED = ""  # whose weights instances have that share them


class CudaWorkload:
    """See :class:`~evaluators.workload.host.WorkloadSession`; one process runs all models.

    Instances whose client says ``own_weights`` have weights of their own on the device, as have all buffers.

    Args:
        platform: lanes and pools.
        bench: the computing process.
    """

    def __init__(
        self, workload: Workload, joined: JoinedGraph, platform: Platform, objective: Objective, bench: Bench
    ) -> None:
        self.workload, self.joined, self.platform, self.objective = workload, joined, platform, objective
        self._bench = bench
        self._lanes = lanes_of(platform)
        self._references = References()
        self._inputs: dict[str, list[NDArray[np.generic]]] = {}
        self._simulator: WorkloadSimulator | None = None

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {
            "evaluator": EXTRA,
            "platform": self.platform.to_json(),
            "runtime": self._bench.facts()["facts"],
            "workload": self.workload.digest,
            "objective": self.objective,
        }

    @property
    def simulator(self) -> WorkloadSimulator:
        """See :class:`~evaluators.workload.host.WorkloadSession`.

        Raises:
            UnavailableError: :meth:`price` was not called.
        """
        if self._simulator is None:
            raise UnavailableError("the workload's jobs have no prices yet")
        return self._simulator

    def price(self, known: Mapping[str, Any] | None, progress: Callable[[str], None]) -> Mapping[str, Any]:
        """See :class:`~evaluators.workload.host.WorkloadSession`."""
        each = [component.graph for component in self.joined.components]
        table = PriceTable.from_json(known) if known is not None else None
        if table is None:
            graphs = {graph.digest: graph for graph in each}
            table = measure_prices(
                list(graphs.values()),
                self._lanes,
                self.alone,
                progress,
                crowding=lambda whole_s: crowding(each, self._lanes, self.alone, whole_s, progress),
            )
        self._simulator = WorkloadSimulator(self.workload, self.joined, self.platform, table.price(self._lanes))
        return table.to_json()

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> CudaRun:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`.

        Args:
            graph: the joined one.
        """
        found = setting(self.workload, self.joined, plan, self.platform)
        jobs = jobs_of(plan, self.joined)
        with ExitStack() as undo:
            instances = []
            for index, stages in jobs.items():
                component = self.joined.components[index]
                made = [(component.own(plan.stages[s].operators), self._lane(plan.stages[s].processor)) for s in stages]
                weights = component.name if self.workload.client_of(index).own_weights else _SHARED
                taken = self._take(component.graph, made, component.name, weights)
                undo.callback(self._bench.give_back, taken)
                instances.append(taken)
            undo.pop_all()
        return CudaRun(self, found, plan, instances)

    def _lane(self, name: str) -> Processor:
        """Return a lane that takes what a plan gives to a processor; those of a pool are alike."""
        return self.platform[members(self.platform[name])[0]]

    def _take(self, graph: Graph, jobs: Sequence[tuple[Sequence[int], Processor]], owner: str, weights: str) -> Loaded:
        if graph.digest not in self._inputs:
            self._inputs[graph.digest] = tensors.seeded_inputs(graph, _INPUT_SEED)
        return self._bench.take(graph, jobs, owner, weights, self._inputs[graph.digest])

    def alone(self, found: Setting, parts: Sequence[tuple[Graph, Sequence[int]]], runs: int) -> list[Outcome]:
        """Run models beside their workload, for what their jobs cost.

        Args:
            parts: of each seat its model, and where it is cut.
        """
        names = [p.name for p in self._lanes]
        with ExitStack() as undo:
            instances = []
            for number, (seat, (graph, cuts)) in enumerate(zip(found.seats, parts, strict=True)):
                borders = [0, *cuts, len(graph.operators)]
                lanes = [self.platform[found.lanes[each[0]]] for each in seat.lanes]
                jobs = [(range(a, b), lane) for (a, b), lane in zip(pairwise(borders), lanes, strict=True)]
                # In a workload the components' own names, so that their weights serve both.
                before = sum(g.digest == graph.digest for g, _ in parts[:number])
                owner = self._owner(graph, before)
                weights = owner if self._own(graph) else _SHARED
                taken = self._take(graph, jobs, owner, weights)
                undo.callback(self._bench.give_back, taken)
                instances.append(taken)
            settled = Setting(found.seats, found.components, found.stages, tuple(names), found.excluded)
            run = partial(self._bench.run, settled, "fifo", instances)
            return [outcome(run()[0], found.stages, found.lanes) for _ in range(runs)]

    def _owner(self, graph: Graph, number: int) -> str:
        mine = [c.name for c in self.joined.components if c.graph.digest == graph.digest]
        return mine[number] if number < len(mine) else f"alone {number}"

    def _own(self, graph: Graph) -> bool:
        return any(
            c.graph.digest == graph.digest and self.workload.client_of(i).own_weights
            for i, c in enumerate(self.joined.components)
        )

    def run(self, found: Setting, plan: Plan, instances: Sequence[Loaded]) -> Outcome:
        """Run a loaded plan once."""
        (desk,) = self._bench.run(found, plan.dispatch, instances)
        return outcome(desk, found.stages, found.lanes)

    def agreement(self, loaded: Loaded, lanes: Sequence[Processor]) -> Agreement:
        """Compare an instance's outputs with LiteRT's, of the whole model on the CPU."""
        self._bench.ready(loaded)
        outputs = self._bench.outputs(loaded)
        return tensors.agreement(outputs, self._references.outputs(loaded.graph), tolerance(lanes))

    def give_back(self, instances: Sequence[Loaded]) -> None:
        """Let instances go."""
        for loaded in instances:
            self._bench.give_back(loaded)

    def facts(self) -> dict[str, Any]:
        """Return device and versions, and what kernels were timed."""
        return self._bench.facts()


class CudaRun:
    """A loaded plan of a workload; see :class:`~evaluators.workload.host.WorkloadCandidate`."""

    def __init__(self, session: CudaWorkload, found: Setting, plan: Plan, instances: Sequence[Loaded]) -> None:
        self._session, self._found, self._plan, self._instances = session, found, plan, tuple(instances)
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """What came of the last run; runs once if there was none."""
        if self._outcome is None:
            self.run(1)
        if self._outcome is None:
            raise UnavailableError("the workload was not run")
        return self._outcome

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`; a run is ended by nothing but its end.

        Raises:
            UnavailableError: a job failed: all models run in one process of CUDA, so the whole run has.
        """
        values, stages = [], []
        for _ in range(n):
            self._outcome = self._session.run(self._found, self._plan, self._instances)
            values.append(self._outcome.value_s(self._session.objective))
            stages.append(stage_means_s(self._outcome, len(self._plan.stages)))
            if values[-1] > stop_above_s:
                break
        return Batch(np.array(values), np.array(stages), self._outcome.timeline if self._outcome else None)

    def verify(self) -> Agreement | None:
        """See :class:`~evaluators.base.Candidate`: the worst agreement of all instances."""
        self.run(1)
        found = []
        for loaded, stages in zip(self._instances, self._found.stages, strict=True):
            lanes = [self._session.platform[self._plan.stages[s].processor] for s in stages]
            used = [self._session.platform[name] for lane in lanes for name in members(lane)]
            found.append(self._session.agreement(loaded, used))
        return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))

    def close(self) -> None:
        """See :class:`~evaluators.base.Candidate`."""
        self._session.give_back(self._instances)
