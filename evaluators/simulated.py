"""Plans priced by tables and simulated instead of run: what the cost model and measured profiles have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from evaluators.base import Batch, Capabilities, Session
from evaluators.cost_model.plans import Errors, PlanSimulator, by_origins
from evaluators.cost_model.transfers import Prices
from evaluators.prediction import Prediction
from evaluators.timeline import Timeline
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.rewrites.lower import Lowered, Lowering

_KEPT = 128  # simulators; rewritten models are many


class SimulatedSession(Session, ABC):
    """See :class:`~evaluators.base.Session`; loading a plan is lowering and simulating it.

    Attributes:
        platform: the processors.
        closed: whether the session is over.
    """

    capabilities = Capabilities(stream=True)

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.closed = False
        self._simulators: OrderedDict[str, PlanSimulator] = OrderedDict()
        self._lowerings: dict[str, Lowering] = {}

    @abstractmethod
    def prices(self, lowered: Lowered) -> Prices:
        """Return what the operators of a lowered plan's graph, calls and transfers cost.

        Raises:
            ProfileError: nothing is known that resembles some operator.
        """

    def simulator(self, graph: Graph) -> PlanSimulator:
        """Return the simulator of a graph's plans that rewrite nothing; errors as of :meth:`prices`."""
        return self.simulator_of(self.lowering(graph).lower(Plan(graph.digest, ())))

    def lowering(self, graph: Graph) -> Lowering:
        """Return what lowers the plans of a graph."""
        key = graph.digest if graph.source is None else f"{graph.digest} {graph.source.path}"
        return self._lowerings.setdefault(key, Lowering(graph))

    def errors(self, graph: Graph, plan: Plan) -> Errors:
        """Return what a plan's prices may be wrong about, as :meth:`~evaluators.cost_model.plans.PlanSimulator.errors`.

        Raises:
            PlanError, RewriteError: the plan cannot be run.
        """
        lowered = self.lowering(graph).lower(plan)
        return self._errors(graph, self._freed(lowered), lowered)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SimulatedPlan:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`; a rebuilt instance is predicted the same.

        Raises:
            PlanError, RewriteError: the plan is not for this graph or platform, or cannot be run.
            ProfileError: see :meth:`prices`.
            UnavailableError: a processor does not take an operator of its stage, or the session is over.
        """
        if self.closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        plan.validate(graph, self.platform)
        lowered = self.lowering(graph).lower(plan)
        simulator = self._freed(lowered)
        timeline = simulator.run(lowered.plan)
        if lowered.rewritten:
            timeline = Timeline(tuple(replace(e, stage=lowered.stage_of[e.stage]) for e in timeline.events))
        errors = self._errors(graph, simulator, lowered)
        return SimulatedPlan(timeline, errors, lambda: simulator.stream_period_s(lowered.plan))

    def _errors(self, graph: Graph, simulator: PlanSimulator, lowered: Lowered) -> Errors:
        found = simulator.errors(lowered.plan)
        kinds = len(self.platform.classes())
        return by_origins(found, lowered.origins, len(graph.operators), kinds) if lowered.rewritten else found

    def _freed(self, lowered: Lowered) -> PlanSimulator:
        """Return what simulates a lowered plan; what moves nothing is free."""
        simulator = self.simulator_of(lowered)
        left = {operator for stage in lowered.viewed(self.platform).operators for operator in stage}
        moves_nothing = [o for stage in lowered.plan.stages for o in stage.operators if o not in left]
        if not moves_nothing:
            return simulator
        operator_s = np.array(simulator.prices.operator_s)
        operator_s[:, moves_nothing] = np.where(np.isfinite(operator_s[:, moves_nothing]), 0.0, np.inf)
        return PlanSimulator(lowered.graph, self.platform, replace(simulator.prices, operator_s=operator_s))

    def simulator_of(self, lowered: Lowered) -> PlanSimulator:
        """Return the simulator of a lowered plan's graph; errors as of :meth:`prices`."""
        key = lowered.graph.digest
        if key not in self._simulators:
            self._simulators[key] = PlanSimulator(lowered.graph, self.platform, self.prices(lowered))
            if len(self._simulators) > _KEPT:
                self._simulators.popitem(last=False)
        self._simulators.move_to_end(key)
        return self._simulators[key]


class SimulatedPlan(Prediction):
    """A plan with a predicted timeline.

    Args:
        errors: see :class:`~evaluators.base.Batch`, as the profile's fit knows its own errors.
        period_s: returns the period of a stream.
    """

    def __init__(self, timeline: Timeline, errors: Errors, period_s: Callable[[], float]) -> None:
        # Where the sides of a split meet is one more event of the first side.
        took_s = np.array([e.end_s - e.start_s for e in timeline.events])
        stage_s = np.asarray(np.bincount([e.stage for e in timeline.events], took_s), np.float64)
        super().__init__(Batch(np.array([timeline.makespan_s]), stage_s[None], timeline, errors))
        self._period_s = period_s

    def stream(self, n: int) -> Batch:
        """See :class:`~evaluators.base.Candidate`; every observation is the same."""
        return replace(self.run(n), latency_s=np.full(n, self._period_s()))
