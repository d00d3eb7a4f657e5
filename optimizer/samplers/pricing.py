"""Times of plans of any stages under draws of the costs, and the transfers for which a measured plan waited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import busy_with
from optimizer.samplers.draws import Draws
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Stage
from search_spaces.core.platform import Platform

_Seconds = NDArray[np.float64]


class Timing:
    """The runner's rule: stages are dispatched in order; each starts when its processor is free and its inputs ready.

    Args:
        graph, platform: of the plans.
    """

    def __init__(self, graph: Graph, platform: Platform) -> None:
        self._processor = {p.name: i for i, p in enumerate(platform.processors)}
        self._blocked = busy_with(platform)
        self._count = len(graph.operators)
        self._before = [sorted(graph.predecessors(o)) for o in range(self._count)]

    def latency_s(self, stages: Sequence[Stage], draws: Draws) -> _Seconds:
        """Return the latency of a plan under each draw, shape ``(S,)``."""
        took = self.stage_s(stages, draws)
        processors = [self._processor[s.processor] for s in stages]
        ends: list[_Seconds] = []
        free: dict[int, _Seconds] = {}
        for j, needs in enumerate(self._needs(stages)):
            first = stages[j].operators[0]
            waits = [ends[i] + draws.transfer_s[:, first, processors[i], processors[j]] for i in needs]
            if processors[j] in free:
                waits.append(free[processors[j]])
            ends.append(np.maximum.reduce(waits) + took[j] if waits else took[j])
            for other in self._blocked[processors[j]]:
                free[other] = ends[j]
        found: _Seconds = np.maximum.reduce(ends)
        return found

    def stage_s(self, stages: Sequence[Stage], draws: Draws) -> list[_Seconds]:
        """Return the time of each stage under each draw, each of shape ``(S,)``."""
        found, before = [], -1
        for stage in stages:
            processor, operators = self._processor[stage.processor], np.array(stage.operators)
            follow = operators[1:][np.diff(operators) == 1]
            took = draws.overhead_s[:, processor] + draws.operator_s[:, processor, operators].sum(axis=1)
            took = took + draws.together_s[:, processor, follow].sum(axis=1)
            if before >= 0:
                took = took + draws.entering_s[:, operators[0], before, processor]
            found.append(took)
            before = processor
        return found

    def waits(
        self, stages: Sequence[Stage], stage_s: Sequence[float], latency_s: float, transfer_s: _Seconds
    ) -> tuple[list[tuple[int, int]], float]:
        """Return the transfers for which a measured plan waited, and their total time (s).

        They are those on the longest path through the stages; their time is the path's time beyond its stages.

        Args:
            stages, stage_s, latency_s: the plan, its stages' times, and its latency.
            transfer_s: estimated times of transfers, ``[operator, from, to]``; they decide which path is longest.
        """
        processors = [self._processor[s.processor] for s in stages]
        ends: list[float] = []
        reasons: list[tuple[int, bool] | None] = []
        free: dict[int, int] = {}
        for j, needs in enumerate(self._needs(stages)):
            start, reason = 0.0, None
            if processors[j] in free:
                start, reason = ends[free[processors[j]]], (free[processors[j]], False)
            for i in needs:
                ready = ends[i] + float(transfer_s[stages[j].operators[0], processors[i], processors[j]])
                if ready >= start:
                    start, reason = ready, (i, True)
            ends.append(start + stage_s[j])
            reasons.append(reason)
            for other in self._blocked[processors[j]]:
                free[other] = j
        last = ends.index(max(ends))
        path, found = [last], []
        while (reason := reasons[path[-1]]) is not None:
            if reason[1]:
                found.append((reason[0], path[-1]))
            path.append(reason[0])
        return found, latency_s - sum(stage_s[j] for j in path)

    def _needs(self, stages: Sequence[Stage]) -> list[list[int]]:
        """Return for each stage the stages that it reads from, ascending."""
        place = [0] * self._count
        for index, stage in enumerate(stages):
            for operator in stage.operators:
                place[operator] = index
        return [
            sorted({place[b] for o in stage.operators for b in self._before[o]} - {j}) for j, stage in enumerate(stages)
        ]
