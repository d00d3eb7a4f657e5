"""What plans of any parts take under draws of the costs, and what a measured one waited for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import Objective as Law
from optimizer.exact.chain_costs import exclusive_groups
from optimizer.samplers.draws import Draws
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Stage
from search_spaces.core.platform import Platform

_Seconds = NDArray[np.float64]


class Timing:
    """The law of the runner: parts are dispatched in order, each starts when its lane and all that it reads are ready.

    Args:
        graph, platform: of the plans.
        law: where something else than the latency is told: ``latency`` for the sum over all parts, whenever they run,
            ``period`` for the load of the busiest of the lanes that exclude each other.
    """

    def __init__(self, graph: Graph, platform: Platform, law: Law | None = None) -> None:
        self._law = law
        self._groups = exclusive_groups(platform) if law == "period" else []
        self._lane = {p.name: i for i, p in enumerate(platform.processors)}
        self._blocked = [
            [j for j, q in enumerate(platform.processors) if i == j or p.excludes(q)]
            for i, p in enumerate(platform.processors)
        ]
        self._count = len(graph.operators)
        self._before = [sorted(graph.predecessors(o)) for o in range(self._count)]

    def latency_s(self, stages: Sequence[Stage], draws: Draws) -> _Seconds:
        """Return the latency of a plan under each draw, shape ``(S,)``."""
        took = self.stage_s(stages, draws)
        lanes = [self._lane[s.processor] for s in stages]
        if self._law is not None:
            groups = self._groups or [tuple(self._lane.values())]
            loads = [np.sum([t for t, lane in zip(took, lanes, strict=True) if lane in g], axis=0) for g in groups]
            busiest: _Seconds = np.maximum.reduce([np.broadcast_to(load, took[0].shape) for load in loads])
            return busiest
        ends: list[_Seconds] = []
        free: dict[int, _Seconds] = {}
        for j, needs in enumerate(self._needs(stages)):
            first = stages[j].operators[0]
            waits = [ends[i] + draws.hand_over_s[:, first, lanes[i], lanes[j]] for i in needs]
            if lanes[j] in free:
                waits.append(free[lanes[j]])
            ends.append(np.maximum.reduce(waits) + took[j] if waits else took[j])
            for other in self._blocked[lanes[j]]:
                free[other] = ends[j]
        found: _Seconds = np.maximum.reduce(ends)
        return found

    def stage_s(self, stages: Sequence[Stage], draws: Draws) -> list[_Seconds]:
        """Return the time of each part under each draw."""
        found, before = [], -1
        for stage in stages:
            lane, operators = self._lane[stage.processor], np.array(stage.operators)
            follow = operators[1:][np.diff(operators) == 1]
            took = draws.overhead_s[:, lane] + draws.operator_s[:, lane, operators].sum(axis=1)
            took = took + draws.together_s[:, lane, follow].sum(axis=1)
            if before >= 0:
                took = took + draws.entering_s[:, operators[0], before, lane]
            found.append(took)
            before = lane
        return found

    def waits(
        self, stages: Sequence[Stage], stage_s: Sequence[float], latency_s: float, hand_over_s: _Seconds
    ) -> tuple[list[tuple[int, int]], float]:
        """Return the hand-overs that a measured plan waited for, and the seconds that they took together.

        Where something else than the latency is told, nothing waits.

        They are those on the longest path through the parts; what that path took beyond its parts is theirs.

        Args:
            stages, stage_s, latency_s: the plan, what its parts took, and what it took as a whole.
            hand_over_s: what hand-overs are believed to take, ``[operator, from, to]``; decides which path is longest.
        """
        if self._law is not None:
            return [], 0.0
        lanes = [self._lane[s.processor] for s in stages]
        ends: list[float] = []
        reasons: list[tuple[int, bool] | None] = []
        free: dict[int, int] = {}
        for j, needs in enumerate(self._needs(stages)):
            start, reason = 0.0, None
            if lanes[j] in free:
                start, reason = ends[free[lanes[j]]], (free[lanes[j]], False)
            for i in needs:
                ready = ends[i] + float(hand_over_s[stages[j].operators[0], lanes[i], lanes[j]])
                if ready >= start:
                    start, reason = ready, (i, True)
            ends.append(start + stage_s[j])
            reasons.append(reason)
            for other in self._blocked[lanes[j]]:
                free[other] = j
        last = ends.index(max(ends))
        path, found = [last], []
        while (reason := reasons[path[-1]]) is not None:
            if reason[1]:
                found.append((reason[0], path[-1]))
            path.append(reason[0])
        return found, latency_s - sum(stage_s[j] for j in path)

    def _needs(self, stages: Sequence[Stage]) -> list[list[int]]:
        """Return for each part the parts that it reads, ascending."""
        place = [0] * self._count
        for index, stage in enumerate(stages):
            for operator in stage.operators:
                place[operator] = index
        return [
            sorted({place[b] for o in stage.operators for b in self._before[o]} - {j}) for j, stage in enumerate(stages)
        ]
