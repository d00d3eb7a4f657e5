"""The evaluator ``table``: plans timed by a table that a person typed in; it brings its own graph and devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import (
    CONTRACT_VERSION,
    Batch,
    Capabilities,
    Evaluator,
    EvaluatorCapabilities,
    PartCosts,
    Session,
)
from evaluators.schedule import Law, Task, Timeline, needs_of, rounds, run_tasks, stream_period_s, timeline
from evaluators.table.table import Table, read_table
from evaluators.testing import Noise, SyntheticCandidate
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform

_EXACT = Noise(run=0.0, instance=0.0, spike_share=0.0, cold=0.0)
_HINT = "give the table as the model: --model FILE.yaml --evaluator table"
_LEAST_S = 1e-12  # what takes no time by the table takes this long, for a run cannot take none


class TableEvaluator(Evaluator):
    """Times plans by a table; see :class:`~evaluators.base.Evaluator`.

    Args:
        table: as :func:`~evaluators.table.table.read_table` returns it; None until :meth:`described` is asked.
    """

    name = "table"
    capabilities = EvaluatorCapabilities(descriptions=True, graphs=True, measures_here=False)

    def __init__(self, table: Table | None = None) -> None:
        self._table = table

    def described(self, source: str | Path) -> Platform:
        """Read the table, and return its devices; see :class:`~evaluators.base.Evaluator`."""
        path = Path(source)
        self._table = read_table(path)
        if self._table.objective != "latency":
            raise UsageError(
                f"{path}: a study minimises latency, and the table's objective is {self._table.objective}",
                f"use optimize solve {path}, or let the table's objective be latency",
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
        """Read the table, and return its operators as a graph; see :class:`~evaluators.base.Evaluator`."""
        self.described(source)
        return self.table.graph()

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[TableSession]:  # noqa: ARG002
        """Open a session on devices of the table; nothing is written to ``scratch``."""
        kinds = {device.kind for device in self.table.devices}
        strange = next((p.name for p in platform.processors if p.like not in kinds), None)
        if strange is not None:
            raise UnavailableError(
                f"the table has no times for processor {strange!r}", f"it has {', '.join(sorted(kinds))}"
            )
        session = TableSession(self.table, platform)
        try:
            yield session
        finally:
            session.closed = True


class TablePlan(SyntheticCandidate):
    """A plan with the times of a table.

    Args:
        period_s: returns the period of a stream.
    """

    def __init__(self, one: Timeline, period_s: Callable[[], float]) -> None:
        super().__init__(one, _EXACT, np.random.default_rng(0))
        self._period_s = period_s

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline; every observation is the same."""
        return replace(self.run(n), latency_s=np.full(n, self._period_s()))


class TableSession(Session):
    """A session of :class:`TableEvaluator`; see :class:`~evaluators.base.Session`."""

    capabilities = Capabilities(unsupported=True, costs=True, stream=True)

    def __init__(self, table: Table, platform: Platform) -> None:
        self._table, self._platform, self._graph = table, platform, table.graph()
        self._operator_s = table.operator_s(platform)
        self._overhead_s = table.overhead_s(platform)
        self._transfer_s = table.transfer_s(platform)
        self._memory_bytes = table.memory_bytes(platform)
        self.closed = False

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values.

        All numbers of the table.
        """
        return {
            "evaluator": TableEvaluator.name,
            "contract_version": CONTRACT_VERSION,
            "platform": self._platform.to_json(),
            "operator_s": [[s if math.isfinite(s) else None for s in row] for row in self._operator_s.tolist()],
            "overhead_s": self._overhead_s.tolist(),
            "transfer_s": self._transfer_s.tolist(),
            "memory_bytes": [m if math.isfinite(m) else None for m in self._memory_bytes.tolist()],
        }

    def unsupported_operators(self, graph: Graph, processor: str) -> Sequence[int]:
        """Return the operators that a processor does not take, ascending; the operators with ``never``."""
        self._check(graph)
        number = [p.name for p in self._platform.processors].index(self._platform[processor].name)
        return np.flatnonzero(~np.isfinite(self._operator_s[number])).tolist()

    def part_costs(self, graph: Graph) -> PartCosts:
        """Return the costs that latencies are computed from, on the session's platform."""
        self._check(graph)
        processors, count = self._operator_s.shape
        transfer_s, least_s = np.zeros((2, count, processors, processors))
        last = [max((r for r in range(count) if o in graph.predecessors(r)), default=o) for o in range(count)]
        for first in range(1, count):
            # A cut moves what is read beyond it, as far as one cut can know; surely what the next operator reads.
            transfer_s[first] = self._transfer_s[[o for o in range(first) if last[o] >= first]].sum(axis=0)
            if first - 1 in graph.predecessors(first):
                least_s[first] = self._transfer_s[first - 1]
        limited = bool(np.isfinite(self._memory_bytes).any())
        return PartCosts(
            operator_s=self._operator_s,
            overhead_s=self._overhead_s,
            beyond_s=np.zeros((processors, count + 1, count + 1)),
            transfer_s=transfer_s,
            least_transfer_s=least_s,
            operator_nbytes=np.array([o.memory_bytes for o in self._table.operators]) if limited else None,
            memory_bytes=self._memory_bytes if limited else None,
        )

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> TablePlan:  # noqa: ARG002
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        Raises:
            PlanError: the plan is not for this graph.
            UnavailableError: the graph is not the table's, a device refuses an operator or lacks memory for what it
                holds, or the session is over.
        """
        if self.closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        plan.validate(graph, self._platform)
        self._check(graph)
        processors = {p.name: i for i, p in enumerate(self._platform.processors)}
        kept = np.zeros(len(processors))
        for stage in plan.stages:
            kept[processors[stage.processor]] += sum(self._table.operators[o].memory_bytes for o in stage.operators)
        for name, processor in processors.items():
            if kept[processor] > self._memory_bytes[processor]:
                raise UnavailableError(
                    f"{name!r} has {self._memory_bytes[processor]:g} B of memory, not {kept[processor]:g}"
                )
        tasks = self._tasks(graph, plan, processors)
        law = Law.of(self._platform)
        ran = timeline(run_tasks(tasks, law), [stage.processor for stage in plan.stages])
        how = rounds(plan, self._platform, needs_of(graph, plan))
        return TablePlan(ran, lambda: stream_period_s(tasks, law, how))

    def _tasks(self, graph: Graph, plan: Plan, processors: dict[str, int]) -> list[Task]:
        """Return the stages; a transfer to a stage takes its own processor's time."""
        place = {operator: index for index, stage in enumerate(plan.stages) for operator in stage.operators}
        tasks = []
        for index, stage in enumerate(plan.stages):
            processor = processors[stage.processor]
            work_s = float(self._overhead_s[processor] + self._operator_s[processor, list(stage.operators)].sum())
            if not math.isfinite(work_s):
                raise UnavailableError(f"{stage.processor!r} cannot run stage {index}: the table says `never`")
            writers = {b for o in stage.operators for b in graph.predecessors(o)} - set(stage.operators)
            for writer in writers:
                work_s += float(self._transfer_s[writer, processors[plan.stages[place[writer]].processor], processor])
            needs = tuple((before, 0.0) for before in sorted({place[w] for w in writers}))
            tasks.append(Task(processor, max(work_s, _LEAST_S), needs))
        return tasks

    def _check(self, graph: Graph) -> None:
        if graph.digest != self._graph.digest:
            raise UnavailableError(f"the table has no times for the model {graph.name!r}", _HINT)
