"""The evaluator ``table``: plans timed by a table from a file, which also defines the graph and the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import (
    CONTRACT_VERSION,
    Capabilities,
    ClosableSession,
    Evaluator,
    EvaluatorCapabilities,
    PartCosts,
)
from evaluators.samples import MOST_S
from evaluators.schedule import Law, Task, needs_of, rounds, run_tasks, stream_period_s, timeline
from evaluators.simulated import SimulatedPlan
from evaluators.table.table import Table, read_table
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.predicted import PredictedSession, WorkloadSimulator
from evaluators.workload.simulate import JobCost
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.states import State
from search_spaces.core.workload import Workload
from search_spaces.rewrites.lower import Lowered

_HINT = "give the table as the model: --model FILE.yaml --evaluator table"
_LEAST_S = 1e-9  # the scheduler counts nanoseconds, and 0 means no time


class TableEvaluator(Evaluator):
    """Times plans by a table.

    Args:
        table: as :func:`~evaluators.table.table.read_table` returns it; None until :meth:`described` is called.
    """

    name = "table"
    capabilities = EvaluatorCapabilities(
        descriptions=True, graphs=True, workloads=True, measures_here=False, predicts=True
    )

    def __init__(self, table: Table | None = None) -> None:
        self._table = table
        self._known: dict[str, Table] = {}  # by the digest of the graph

    def described(self, source: str | Path) -> Platform:
        """Read the table, and return its devices as a platform."""
        path = Path(source)
        self._table = read_table(path)
        if self._table.objective != "latency":
            raise UsageError(
                f"{path}: a study minimises latency, and the table's objective is {self._table.objective}",
                f"use optimize solve {path}, or let the table's objective be latency",
            )
        most, least = _extremes(self._table)
        if most > MOST_S or least < _LEAST_S:
            wrong = f"its operators take {most:g} s" if most > MOST_S else f"an operator takes {least:g} s"
            raise UsageError(
                f"{path}: a study counts from 1 ns to {MOST_S:g} s, and {wrong}",
                f"give times in another unit, or use optimize solve {path}",
            )
        if self._table.one_part_per_device:
            raise UsageError(f"{path}: a study has no rule one_part_per_device", f"use optimize solve {path}")
        return self._table.platform()

    @property
    def table(self) -> Table:
        """The table.

        Raises:
            UsageError: none was given.
        """
        if self._table is None:
            raise UsageError("the evaluator 'table' has no table", _HINT)
        return self._table

    def platform(self) -> Platform:
        """Return the devices of the table."""
        return self.table.platform()

    def graph_of(self, source: str) -> Graph:
        """Read the table, and return its operators as a graph."""
        self.described(source)
        graph = self.table.graph()
        if self._known.setdefault(graph.digest, self.table).operators != self.table.operators:
            raise UsageError(f"{source}: another table has operators of these names", "rename the network")
        return graph

    def prepare(self, platform: Platform, scratch: Path | None = None) -> AbstractContextManager[TableSession]:  # noqa: ARG002
        """Open a session on devices of the table; nothing is written to ``scratch``."""
        return self._opened({self.table.graph().digest: self.table}, platform)

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,  # noqa: ARG002
    ) -> Iterator[PredictedSession]:
        """Open a session for one workload, as :meth:`prepare` does."""
        tables = {c.graph.digest: self._known[c.graph.digest] for c in joined.components}
        processors = replace(platform, processors=single_processors(platform))
        with self._opened(tables, processors) as session:
            made = PredictedSession(session, partial(_Simulator, workload, joined, platform), objective)
            with closing(made) as found:
                yield found

    def _opened(self, tables: Mapping[str, Table], platform: Platform) -> AbstractContextManager[TableSession]:
        devices = self.table.devices
        if (other := next((t for t in tables.values() if t.devices != devices), None)) is not None:
            raise UsageError(
                f"tables {self.table.name!r} and {other.name!r} have different devices", "give both the same"
            )
        kinds = {device.kind for device in devices}
        strange = next((p.name for p in platform.processors if p.like not in kinds), None)
        if strange is not None:
            raise UnavailableError(
                f"the table has no times for processor {strange!r}", f"it has {', '.join(sorted(kinds))}"
            )
        return closing(TableSession(tables, platform))


class TableSession(ClosableSession):
    """A session of :class:`TableEvaluator`.

    Args:
        tables: digest of the graph → table; all tables have the same devices.
        state: of the platform; None for the usual one.
    """

    capabilities = Capabilities(computed=True, unsupported=True, costs=True, powers=True, states=True, stream=True)

    def __init__(self, tables: Mapping[str, Table], platform: Platform, state: State | None = None) -> None:
        self._tables, self._platform = tables, platform
        factor = np.array([state.factor(p.name) if state is not None else 1.0 for p in platform.processors])
        self._operator_s = {digest: t.operator_s(platform) * factor[:, None] for digest, t in tables.items()}
        self._transfer_s = {digest: t.transfer_s(platform) for digest, t in tables.items()}
        one = next(iter(tables.values()))
        self._overhead_s = one.overhead_s(platform) * factor
        self._memory_bytes = one.memory_bytes(platform)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values.

        It contains all numbers of the tables.
        """
        return {
            "evaluator": TableEvaluator.name,
            "contract_version": CONTRACT_VERSION,
            "platform": self._platform.to_json(),
            "operator_s": {digest: _finite(each) for digest, each in self._operator_s.items()},
            "overhead_s": self._overhead_s.tolist(),
            "transfer_s": {digest: each.tolist() for digest, each in self._transfer_s.items()},
            "memory_bytes": _finite(self._memory_bytes),
        }

    def powers_w(self) -> dict[str, float]:
        """Return {}: a table has no powers."""
        return {}

    def in_state(self, state: State) -> TableSession:
        """Return a session on the platform in that state, which does not change the times of transfers."""
        return TableSession(self._tables, self._platform, state)

    def unsupported_operators(self, graph: Graph, processor: str) -> Sequence[int]:
        """Return the operators with ``never`` on a processor, ascending."""
        self._table(graph)
        number = [p.name for p in self._platform.processors].index(self._platform[processor].name)
        return np.flatnonzero(~np.isfinite(self._operator_s[graph.digest][number])).tolist()

    def part_costs(self, graph: Graph) -> PartCosts:
        """Return the costs that latencies are computed from, on the session's platform."""
        table = self._table(graph)
        operator_s, moved_s = self._operator_s[graph.digest], self._transfer_s[graph.digest]
        processors, count = operator_s.shape
        transfer_s, least_s = np.zeros((2, count, processors, processors))
        last = [max((r for r in range(count) if o in graph.predecessors(r)), default=o) for o in range(count)]
        for first in range(1, count):
            # A cut usually moves all that is read beyond it, and surely what the next operator reads.
            transfer_s[first] = moved_s[[o for o in range(first) if last[o] >= first]].sum(axis=0)
            if first - 1 in graph.predecessors(first):
                least_s[first] = moved_s[first - 1]
        limited = bool(np.isfinite(self._memory_bytes).any())
        return PartCosts(
            operator_s=operator_s,
            overhead_s=self._overhead_s,
            beyond_s=np.zeros((processors, count + 1, count + 1)),
            transfer_s=transfer_s,
            least_transfer_s=least_s,
            operator_nbytes=np.array([o.memory_bytes for o in table.operators]) if limited else None,
            memory_bytes=self._memory_bytes if limited else None,
        )

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SimulatedPlan:  # noqa: ARG002
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Raises:
            PlanError: the plan is not for this graph.
            UnavailableError: the graph is not the table's, a device does not support an operator or has too little
                memory, or the session is over.
        """
        self.check_open()
        plan.validate(graph, self._platform)
        numbers = {p.name: i for i, p in enumerate(self._platform.processors)}
        on = [numbers[stage.processor] for stage in plan.stages]
        self.check_memory((graph, stage.operators, (p,)) for stage, p in zip(plan.stages, on, strict=True))
        tasks = self._tasks(graph, plan, on)
        law = Law.of(self._platform)
        ran = timeline(run_tasks(tasks, law), [stage.processor for stage in plan.stages])
        how = rounds(plan, self._platform, needs_of(graph, plan))
        return SimulatedPlan(ran, None, lambda: stream_period_s(tasks, law, how))

    def check_memory(self, stages: Iterable[tuple[Graph, Sequence[int], Sequence[int]]]) -> None:
        """Check that processors have enough memory for what they run.

        Args:
            stages: graph, operators, and the processors that may run them; each of these keeps them in memory.

        Raises:
            UnavailableError: one has too little memory.
        """
        kept = np.zeros(len(self._memory_bytes))
        for graph, operators, processors in stages:
            known = self._table(graph).operators
            kept[list(processors)] += sum(known[o].memory_bytes for o in operators)
        for processor, limit, needed in zip(self._platform.processors, self._memory_bytes, kept, strict=True):
            if needed > limit:
                raise UnavailableError(f"{processor.name!r} has {limit:g} B of memory, not {needed:g}")

    def cost(self, graph: Graph, operators: Sequence[int], processor: int) -> JobCost:
        """Return the cost of operators as one stage, infinite where the processor does not support one.

        Transfers take time of the reading stage's processor.
        """
        self._table(graph)
        work_s = float(self._overhead_s[processor] + self._operator_s[graph.digest][processor, list(operators)].sum())
        work_s = max(work_s, _LEAST_S)
        inside = set(operators)
        writers = {b for o in operators for b in graph.predecessors(o)} - inside
        moved_s = self._transfer_s[graph.digest]
        return JobCost(work_s, transfer_s={w: moved_s[w, :, processor].tolist() for w in sorted(writers)})

    def _tasks(self, graph: Graph, plan: Plan, on: Sequence[int]) -> list[Task]:
        """Return the stages as tasks; ``on`` is the processor of each."""
        place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
        tasks = []
        for stage, processor in zip(plan.stages, on, strict=True):
            self.check_takes(graph, stage.operators, processor)
            cost = self.cost(graph, stage.operators, processor)
            work_s = cost.work_s + sum(from_s[on[place[w]]] for w, from_s in cost.transfer_s.items())
            needs = tuple((before, 0.0) for before in sorted({place[w] for w in cost.transfer_s}))
            tasks.append(Task(processor, max(work_s, _LEAST_S), needs))
        return tasks

    def check_takes(self, graph: Graph, operators: Sequence[int], processor: int) -> None:
        """Check that a processor supports operators.

        Raises:
            UnavailableError: it does not support one of them.
        """
        for operator in operators:
            if not math.isfinite(self._operator_s[graph.digest][processor, operator]):
                raise UnavailableError(
                    f"{self._platform.processors[processor].name!r} cannot run operator {operator} of {graph.name!r}: "
                    "the table says `never`"
                )

    def _table(self, graph: Graph) -> Table:
        if graph.digest not in self._tables:
            raise UnavailableError(f"the table has no times for the model {graph.name!r}", _HINT)
        return self._tables[graph.digest]


class _Simulator(WorkloadSimulator):
    """Simulates plans of tables that run at the same time."""

    def __init__(self, workload: Workload, joined: JoinedGraph, platform: Platform, session: TableSession) -> None:
        def price(model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:  # noqa: ARG001
            return session.cost(model, operators, processor)

        super().__init__(Lowerings(workload, joined, platform), price)
        self._session = session

    def run(self, plan: Plan, *, known: bool = False) -> Outcome:
        """Return the predicted outcome of a plan; each processor that may run a job keeps it in memory."""
        found = self.setting(plan, known=known)
        jobs = [
            (model.model, operators, processors)
            for model, client in zip(found.models, found.clients, strict=True)
            for operators, processors in zip(model.operators, client.processors, strict=True)
        ]
        self._session.check_memory(jobs)
        for graph, operators, processors in jobs:
            for processor in processors:
                self._session.check_takes(graph, operators, processor)
        return super().run(plan, known=known)


def _extremes(table: Table) -> tuple[float, float]:
    """Return the sum of all finite times, and the shortest one of an operator (s), 0 s left aside."""
    each = [s for o in table.operators for s in o.seconds.values() if 0.0 < s < math.inf]
    return sum(each), min(each, default=1.0)


def _finite(table: NDArray[np.float64]) -> Any:
    """Return a table as plain values, with None for infinite entries."""
    found = table.astype(object)
    found[~np.isfinite(table)] = None
    return found.tolist()
