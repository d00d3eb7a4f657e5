"""Plans priced in several states of a platform at once: by the worst of them, or by what is to be expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluators.base import Agreement, Batch
from evaluators.cost_model.chains import part_costs
from evaluators.cost_model.plans import PlanSimulator
from evaluators.tabulated import PartCosts
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.rewrites.lowering import is_split
from search_spaces.states import Robust, State

if TYPE_CHECKING:
    from evaluators.cost_model.session import CostModelSession


class StatesSession:
    """See :class:`~evaluators.base.Session`; latencies are those of the worst state, or the mean over all states.

    Args:
        session: prices plans on the platform as it is.
    """

    def __init__(self, session: CostModelSession, platform: Platform, states: Sequence[State], robust: Robust) -> None:
        self.states, self.robust = tuple(states), robust
        self._session, self._platform = session, platform
        self._simulators: dict[str, list[PlanSimulator]] = {}

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        told = [[s.name, s.weight, dict(s.slower)] for s in self.states]
        return self._session.fingerprint() | {"states": told, "robust": self.robust}

    def simulators(self, graph: Graph) -> list[PlanSimulator]:
        """Return a simulator for each state."""
        if graph.digest not in self._simulators:
            usual = self._session.simulator(graph)
            found = []
            for state in self.states:
                factor = np.array([state.factor(p.name) for p in self._platform.processors])
                prices = usual.prices
                slower = replace(
                    prices,
                    operator_s=prices.operator_s * factor[:, None],
                    invocation_s=prices.invocation_s * factor,
                    io_s_per_byte=prices.io_s_per_byte * factor,
                    alone_s=None if prices.alone_s is None else prices.alone_s * factor[:, None],
                )
                found.append(PlanSimulator(graph, self._platform, slower))
            self._simulators[graph.digest] = found
        return self._simulators[graph.digest]

    def latencies_s(self, graph: Graph, plan: Plan) -> list[float]:
        """Return the seconds of a plan in each state."""
        return [simulator.latency_s(plan) for simulator in self.simulators(graph)]

    def value_s(self, seconds: Sequence[float]) -> float:
        """Return what is made small, of the seconds in each state."""
        if self.robust == "worst":
            return max(seconds)
        weight = sum(s.weight for s in self.states)
        return math.fsum(t * s.weight for t, s in zip(seconds, self.states, strict=True)) / weight

    def tables(self, graph: Graph) -> list[PartCosts]:
        """Return the costs of consecutive parts in each state."""
        return [part_costs(simulator) for simulator in self.simulators(graph)]

    def part_costs(self, graph: Graph) -> PartCosts:
        """See :class:`~evaluators.tabulated.Tabulated`: the mean over the states, which the worst is never below."""
        tables = self.tables(graph)
        share = np.array([s.weight for s in self.states]) / sum(s.weight for s in self.states)
        means = {
            name: np.einsum("s,s...->...", share, np.array([getattr(t, name) for t in tables]))
            for name in ("operator_s", "overhead_s", "beyond_s", "hand_over_s", "least_hand_over_s")
        }
        return replace(tables[0], **means)

    def refused(self, graph: Graph, processor: str) -> list[int]:
        """See :class:`~evaluators.base.Refuser`."""
        return self._session.refused(graph, processor)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> StatesPrediction:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`.

        Raises:
            PlanError: the plan is not for this graph or platform.
            UnavailableError: a lane does not take an operator of its stage, or the plan has split stages.
        """
        plan.validate(graph, self._platform)
        if is_split(plan):
            raise UnavailableError("plans with split stages are not priced in states")
        return StatesPrediction(self, graph, plan)


class StatesPrediction:
    """See :class:`~evaluators.base.Candidate`; the timeline is that of the worst state."""

    def __init__(self, session: StatesSession, graph: Graph, plan: Plan) -> None:
        seconds = session.latencies_s(graph, plan)
        worst = seconds.index(max(seconds))
        simulators = session.simulators(graph)
        self._value_s = session.value_s(seconds)
        self._timeline = simulators[worst].run(plan)
        share = [1.0 if i == worst else 0.0 for i in range(len(seconds))]
        if session.robust == "expected":
            weight = sum(s.weight for s in session.states)
            share = [s.weight / weight for s in session.states]
        stage_s = np.zeros(len(plan.stages))
        for part, simulator in zip(share, simulators, strict=True):
            if part:
                for event in simulator.run(plan).events:
                    stage_s[event.stage] += part * (event.end_s - event.start_s)
        self._stage_s = stage_s
        self.errors = simulators[worst].errors(plan)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`; takes no time, and every run is the same."""
        runs = 1 if self._value_s > stop_above_s else n
        stages = np.tile(self._stage_s, (runs, 1))
        return Batch(np.full(runs, self._value_s), stages, self._timeline, self.errors)

    def verify(self) -> Agreement | None:
        """Return None: there are no outputs."""
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
