"""Sessions that simulate plans from costs of operators: the base of the cost model and of measured profiles."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate, Capabilities, ClosableSession
from evaluators.cost_model.plans import UNSURE, Errors, PlanSimulator, by_origins
from evaluators.cost_model.transfers import Prices
from evaluators.schedule import Timeline
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import Cost, operator_costs
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.recent import recent
from search_spaces.rewrites.lower import Lowered, lowering
from search_spaces.rewrites.tucker import Ranks, tucker_layers


class Prediction(Candidate):
    """A candidate without outputs whose runs take no time and all return ``one``.

    Args:
        figures: medians of further objectives.
    """

    def __init__(self, one: Batch, figures: Mapping[str, float] | None = None) -> None:
        self.one, self._figures = one, dict(figures or {})

    def figures(self) -> dict[str, float]:
        """Return medians of further objectives, by name."""
        return dict(self._figures)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``."""
        runs = 1 if self.one.latency_s[0] > stop_above_s else n
        latency_s, stage_s = np.tile(self.one.latency_s, runs), np.tile(self.one.stage_s, (runs, 1))
        return replace(self.one, latency_s=latency_s, stage_s=stage_s)


_KEPT = 128  # simulators, one per rewritten model


class SimulatedSession(ClosableSession, ABC):
    """A session that loads a plan by lowering and simulating it.

    Attributes:
        platform: the processors.
    """

    capabilities = Capabilities(computed=True, stream=True, rewrites=True)

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._simulators: OrderedDict[tuple[str, frozenset[int]], PlanSimulator] = OrderedDict()

    @abstractmethod
    def prices(self, lowered: Lowered) -> Prices:
        """Return the costs of the operators of a lowered plan's graph, of calls and of transfers.

        Raises:
            ProfileError: the profile has nothing similar to some operator.
        """

    def simulator(self, graph: Graph) -> PlanSimulator:
        """Return the simulator of a graph's plans without rewrites. Raises as :meth:`prices`."""
        return self.simulator_of(lowering(graph).lower(Plan(graph.digest, ())))

    def errors(self, graph: Graph, plan: Plan) -> Errors:
        """Return the errors of a plan's costs, as :meth:`~evaluators.cost_model.plans.PlanSimulator.errors` does.

        Raises:
            PlanError, RewriteError: the plan cannot be run.
        """
        lowered = lowering(graph).lower(plan).in_place(self.platform)
        return self._errors(graph, self.simulator_of(lowered), lowered)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SimulatedPlan:  # noqa: ARG002
        """Compile a plan; with ``fresh``, share nothing that is already loaded (a rebuilt instance).

        A rebuilt instance is predicted the same.

        Raises:
            PlanError, RewriteError: the plan is not for this graph or platform, or cannot be run.
            ProfileError: as of :meth:`prices`.
            UnavailableError: a processor does not support an operator of its stage, or the session is over.
        """
        self.check_open()
        plan.validate(graph, self.platform)
        lowered = lowering(graph).lower(plan).in_place(self.platform)
        simulator = self.simulator_of(lowered)
        timeline = simulator.run(lowered.plan)
        if lowered.rewritten:
            timeline = Timeline(tuple(replace(e, stage=lowered.stage_of[e.stage]) for e in timeline.events))
        errors = self._errors(graph, simulator, lowered)
        return SimulatedPlan(timeline, errors, lambda: simulator.stream_period_s(lowered.plan))

    def _errors(self, graph: Graph, simulator: PlanSimulator, lowered: Lowered) -> Errors:
        found = simulator.errors(lowered.plan)
        kinds = len(self.platform.classes())
        return by_origins(found, lowered.origins, len(graph.operators), kinds) if lowered.rewritten else found

    def simulator_of(self, lowered: Lowered) -> PlanSimulator:
        """Return the simulator of a lowered plan's graph. Raises as :meth:`prices`."""

        def make() -> PlanSimulator:
            return PlanSimulator(lowered.graph, self.platform, self.prices(lowered))

        found = recent(self._simulators, (lowered.graph.digest, lowered.left_out), make, _KEPT)
        return PlanSimulator(found.graph, found.platform, found.prices, lowered.held) if lowered.held else found


class SimulatedPlan(Prediction):
    """A plan with a predicted timeline.

    Args:
        errors: as of :class:`~evaluators.base.Batch`, from the fit of the profile; None where costs are exact.
        period_s: returns the period of a stream, in seconds.
    """

    def __init__(self, timeline: Timeline, errors: Errors | None, period_s: Callable[[], float]) -> None:
        # The join of a split is one more event of the first side.
        took_s = np.array([e.end_s - e.start_s for e in timeline.events])
        stage_s = np.asarray(np.bincount([e.stage for e in timeline.events], took_s), np.float64)
        super().__init__(Batch(np.array([timeline.makespan_s]), stage_s[None], timeline, errors))
        self._period_s = period_s

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline; every observation is the same."""
        return replace(self.run(n), latency_s=np.full(n, self._period_s()))


COPY_S_PER_BYTE = 1.0 / 8e9
"""Seconds per byte of a slice or a concatenation on one core, where it was not measured."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPrices:
    """Measured times of one model with n operators on P processors.

    Attributes:
        operator_s: shape ``(P, n)``; infinite where a processor does not support an operator.
        call_s: overhead of each stage, shape ``(P,)``.
        transfer_s: from a stage to one that reads from it on another processor, ``[from, to]``, shape ``(P, P)``.
        triple_s: convolution and ranks → seconds of its triple on each processor, shape ``(P,)``.
    """

    operator_s: NDArray[np.float64]
    call_s: NDArray[np.float64]
    transfer_s: NDArray[np.float64]
    triple_s: Mapping[tuple[int, Ranks], NDArray[np.float64]] = field(default_factory=dict)


class ProfiledSession(SimulatedSession):
    """A simulated session whose prices are the measured times of one model's operators on these processors.

    The times of rewritten operators follow from :func:`rewritten_s`.

    Args:
        powers: watts of processors, where known.
    """

    def __init__(self, platform: Platform, graph: Graph, known: MeasuredPrices, powers: Mapping[str, float]) -> None:
        super().__init__(platform)
        self._graph, self._known, self._powers = graph, known, dict(powers)
        self.capabilities = replace(self.capabilities, powers=bool(powers))

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {"evaluator": "profile", "platform": self.platform.to_json()}

    def powers_w(self) -> dict[str, float]:
        """Return the watts of processors while they run, where known."""
        return dict(self._powers)

    def prices(self, lowered: Lowered) -> Prices:
        """Return the costs of the operators of a lowered plan's graph, of calls and of transfers."""
        processors, count = len(self.platform.processors), len(lowered.graph.operators)
        nothing, alike = np.zeros(processors), np.ones((processors, processors))
        return Prices(
            operator_s=self._operator_s(lowered),
            sigma=np.full((processors, count), UNSURE),
            traffic=np.full(count, 0.5),
            invocation_s=self._known.call_s,
            io_s_per_byte=nothing,
            latency_s=self._known.transfer_s,
            byte_s=np.zeros((processors, processors)),
            slow_compute=alike,
            slow_memory=alike,
            capacity_bytes=nothing,
            pressure_per_byte=nothing,
            power_w=np.array([self._powers.get(p.name, np.nan) for p in self.platform.processors]),
        )

    def _operator_s(self, lowered: Lowered) -> NDArray[np.float64]:
        if not lowered.rewritten:
            return self._known.operator_s
        timed = self._known.triple_s
        return rewritten_s(self._graph, lowered, self._known.operator_s, lambda o, ranks: timed.get((o, ranks)))


def rewritten_s(
    graph: Graph,
    lowered: Lowered,
    operator_s: NDArray[np.float64],
    triple_s: Callable[[int, Ranks], NDArray[np.float64] | None],
) -> NDArray[np.float64]:
    """Return the seconds of a lowered plan's m operators on P processors, from those of the original n; ``(P, m)``.

    A side of a split takes its share of the operator's multiply-accumulates; slices and joins take time by their bytes.
    A triple that was not timed takes time in proportion to its multiply-accumulates.

    Args:
        operator_s: shape ``(P, n)``.
        triple_s: returns the seconds of a convolution's triple with some ranks, shape ``(P,)``, or None.
    """
    layers = {x.operator: x for x in tucker_layers(graph)} if lowered.ranks else {}
    costs = operator_costs(graph)
    found = np.empty((len(operator_s), len(lowered.origins)))
    for index, cost in enumerate(operator_costs(lowered.graph)):
        origin, place = lowered.origins[index]
        before, ranks = costs[origin], lowered.ranks.get(origin)
        own_s = operator_s[:, origin]
        timed = triple_s(origin, ranks) if ranks is not None else None
        if ranks is not None and cost.macs:
            tripled = layers[origin].macs(ranks)
            whole_s = own_s * (tripled / max(before.macs, 1)) if timed is None else timed
            found[:, index] = whole_s * (cost.macs / max(tripled, 1))
        elif lowered.graph.operators[index].kind == graph.operators[origin].kind and not place:
            work = (cost.macs, before.macs) if before.macs else (_moved(cost), _moved(before))
            found[:, index] = own_s * (work[0] / max(work[1], 1))
        else:
            found[:, index] = _moved(cost) * COPY_S_PER_BYTE
    return found


def _moved(cost: Cost) -> int:
    return cost.read_bytes + cost.written_bytes
