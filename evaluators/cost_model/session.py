"""Plans priced by a calibrated model instead of a device: the evaluator ``cost-model``."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
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
    Session,
)
from evaluators.cost_model.chains import part_costs
from evaluators.cost_model.doubts import Told, doubts
from evaluators.cost_model.features import operator_features
from evaluators.cost_model.files import find_profile, profile_digest
from evaluators.cost_model.plans import Errors, PlanSimulator, by_origins
from evaluators.cost_model.profile import CostProfile
from evaluators.cost_model.transfers import prices, profile_key, slowed
from evaluators.prediction import Prediction
from evaluators.tabulated import PartCosts
from evaluators.timeline import Event, Timeline
from evaluators.workload.outcome import Objective
from evaluators.workload.predicted import PredictedSession, WorkloadSimulator
from evaluators.workload.simulate import JobCost
from search_spaces.arrangement import RankSet
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph
from search_spaces.joined_graph import JoinedGraph
from search_spaces.plan import Plan
from search_spaces.platform import Platform
from search_spaces.pools import lanes_of
from search_spaces.rewrites.lower import Lowered, Lowering
from search_spaces.states import State
from search_spaces.workload import Workload

_KEPT = 128  # simulators; rewritten models are many
_LOGGER = logging.getLogger("partition_optimizer")
_HINT = "give --platform with a profile's file or name; optimize calibrate --out FILE makes one of this machine"


class CostModelEvaluator(Evaluator):
    """See :class:`~evaluators.base.Evaluator`; predicts for the device that a profile describes.

    Args:
        profile: of the device.
        platform: its lanes; each must be known to the profile by its name or by what it is like.
    """

    name = "cost-model"
    capabilities = EvaluatorCapabilities(descriptions=True, workloads=True, sliced_lanes=True, measures_here=False)

    def __init__(self, profile: CostProfile | None = None, platform: Platform | None = None) -> None:
        self._profile = profile
        self._platform = platform

    def platform(self) -> Platform:
        """See :class:`~evaluators.base.Evaluator`.

        Raises:
            UnavailableError: nobody has said which device.
        """
        if self._platform is None:
            raise UnavailableError(
                "the cost model predicts for a device that a profile describes, and none is given",
                _HINT,
            )
        return self._platform

    def described(self, source: str | Path) -> Platform | None:
        """See :class:`~evaluators.base.Evaluator`."""
        found = find_profile(source)
        if found is None:
            return None
        self._profile, self._platform = found
        return self._platform

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[CostModelSession]:  # noqa: ARG002
        """See :class:`~evaluators.base.Evaluator`; nothing is written to ``scratch``.

        Raises:
            ProfileError: the profile is for another platform.
            UnavailableError: there is no profile.
        """
        if self._profile is None and (shipped := find_profile(platform.name)) is not None:
            self._profile = shipped[0]
        if self._profile is None:
            raise UnavailableError(
                f"there is no profile of platform {platform.name!r}",
                _HINT,
            )
        for lane in platform.processors:
            profile_key(self._profile, lane)
        session = CostModelSession(self._profile, platform)
        try:
            yield session
        finally:
            session.closed = True

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[PredictedSession]:
        """See :class:`~evaluators.base.Evaluator`; errors are those of :meth:`prepare`."""
        with self.prepare(replace(platform, processors=lanes_of(platform)), scratch) as session:

            def price(graph: Graph, lane: int, operators: tuple[int, ...], ranks: RankSet) -> JobCost:
                made, inside = session.lowering(graph).decomposed(ranks), set(operators)
                members = tuple(i for i, origin in enumerate(made.origins) if origin in inside)
                work_s, _, slowed = session.simulator(made.graph).stage(lane, members)
                return JobCost(work_s, slowed)

            simulator = WorkloadSimulator(workload, joined, platform, price, session.errors)
            made = PredictedSession(simulator, objective, session.fingerprint())
            try:
                yield made
            finally:
                made.closed = True


class CostModelSession(Session):
    """See :class:`~evaluators.base.Session`; loading a plan is simulating it.

    Args:
        state: of the platform; None for its usual one.
    """

    capabilities = Capabilities(unsupported=True, costs=True, powers=True, states=True, stream=True)

    def __init__(self, profile: CostProfile, platform: Platform, state: State | None = None) -> None:
        self._profile = profile
        self._platform = platform
        self._state = state
        self._simulators: OrderedDict[str, PlanSimulator] = OrderedDict()
        self._lowerings: dict[str, Lowering] = {}
        self._told: dict[str, Told] = {}
        self.closed = False

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        return {
            "evaluator": CostModelEvaluator.name,
            "contract_version": CONTRACT_VERSION,
            "profile": self._profile.name,
            "profile_digest": profile_digest(self._profile),
            "platform": self._platform.to_json(),
        }

    def simulator(self, graph: Graph) -> PlanSimulator:
        """Return the simulator of a graph's plans; what the profile cannot vouch for is told once, in a warning.

        Raises:
            ProfileError: the profile has nothing that resembles some operator.
        """
        if graph.digest not in self._simulators:
            self._simulators[graph.digest] = self._simulator(graph)
            if len(self._simulators) > _KEPT:
                self._simulators.popitem(last=False)
        self._simulators.move_to_end(graph.digest)
        return self._simulators[graph.digest]

    def lowering(self, graph: Graph) -> Lowering:
        """Return what lowers the plans of a graph."""
        key = graph.digest if graph.source is None else f"{graph.digest} {graph.source.path}"
        return self._lowerings.setdefault(key, Lowering(graph))

    def errors(self, graph: Graph, plan: Plan) -> Errors:
        """Return what a plan's prices may be wrong about, as :meth:`~evaluators.cost_model.plans.PlanSimulator.errors`.

        Raises:
            PlanError, RewriteError: the plan cannot be run.
        """
        return self._errors(graph, *self._lowered(graph, plan))

    def _errors(self, graph: Graph, simulator: PlanSimulator, lowered: Lowered) -> Errors:
        found = simulator.errors(lowered.plan)
        kinds = len(self._platform.classes())
        return by_origins(found, lowered.origins, len(graph.operators), kinds) if lowered.rewritten else found

    def _lowered(self, graph: Graph, plan: Plan) -> tuple[PlanSimulator, Lowered]:
        """Return a plan as it is run, and what simulates that; what moves nothing is free."""
        lowered = self.lowering(graph).lower(plan)
        simulator = self.simulator(lowered.graph)
        left = {operator for stage in lowered.viewed(self._platform).operators for operator in stage}
        if moves_nothing := [o for o in range(len(lowered.graph.operators)) if o not in left]:
            operator_s = np.array(simulator.prices.operator_s)
            operator_s[:, moves_nothing] = np.where(np.isfinite(operator_s[:, moves_nothing]), 0.0, np.inf)
            simulator = PlanSimulator(lowered.graph, self._platform, replace(simulator.prices, operator_s=operator_s))
        return simulator, lowered

    def _simulator(self, graph: Graph) -> PlanSimulator:
        table = prices(self._profile, graph, self._platform, warn=False)
        if self._state is not None:
            return PlanSimulator(graph, self._platform, slowed(table, self._state, self._platform))
        features = operator_features(graph)
        keys = {lane.name: profile_key(self._profile, lane) for lane in self._platform.processors}
        concerns = {name: self._profile.concerns(features, key) for name, key in keys.items()}
        doubtful = doubts(self._profile.name, concerns, self._told.setdefault(graph.name, set()))
        if doubtful is not None:  # of a model that is decomposed in many ways once, too
            _LOGGER.warning("%s: %s", graph.name, doubtful)
        return PlanSimulator(graph, self._platform, table)

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """See :class:`~evaluators.base.Session`."""
        lane = [p.name for p in self._platform.processors].index(processor)
        return [int(o) for o in np.flatnonzero(~np.isfinite(self.simulator(graph).prices.operator_s[lane]))]

    def powers_w(self) -> dict[str, float]:
        """See :class:`~evaluators.base.Session`."""
        found = ((p.name, self._profile[profile_key(self._profile, p)].power_w) for p in self._platform.processors)
        return {name: power for name, power in found if power is not None}

    def in_state(self, state: State) -> CostModelSession:
        """See :class:`~evaluators.base.Session`."""
        return CostModelSession(self._profile, self._platform, state)

    def part_costs(self, graph: Graph) -> PartCosts:
        """See :class:`~evaluators.base.Session`."""
        return part_costs(self.simulator(graph))

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SimulatedPlan:  # noqa: ARG002
        """See :class:`~evaluators.base.Session`; a rebuilt instance is predicted the same.

        Raises:
            PlanError: the plan is not for this graph or platform.
            ProfileError: the profile has nothing that resembles some operator.
            UnavailableError: a lane does not take an operator of its stage, or the session is over.
        """
        if self.closed:
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        plan.validate(graph, self._platform)
        simulator, lowered = self._lowered(graph, plan)
        spans = simulator.run(lowered.plan)
        events = (Event(lowered.stage_of[e.stage], e.lane, e.start_s, e.end_s, e.copied_s) for e in spans.events)
        timeline = Timeline(tuple(events)) if lowered.rewritten else spans
        errors = self._errors(graph, simulator, lowered)
        return SimulatedPlan(timeline, errors, lambda: simulator.stream_period_s(lowered.plan))


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
