"""Plans predicted by a calibrated model of a device: the evaluator ``cost-model``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from evaluators.base import CONTRACT_VERSION, Evaluator, EvaluatorCapabilities, PartCosts, Session
from evaluators.cost_model.features import operator_features
from evaluators.cost_model.plans import part_costs
from evaluators.cost_model.profile import CostProfile, extrapolation_warning, find_profile, profile_digest
from evaluators.cost_model.transfers import Prices, prices, profile_key, slowed
from evaluators.forwarding import ForwardingSession
from evaluators.simulated import Prediction, SimulatedSession
from evaluators.workload.apart import Apart, on_cores
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective
from evaluators.workload.predicted import PredictedSession, WorkloadSimulator
from evaluators.workload.simulate import JobCost
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors
from search_spaces.core.states import Robust, State
from search_spaces.core.workload import Workload
from search_spaces.rewrites.lower import Lowered

if TYPE_CHECKING:
    from evaluators.objectives import Priced, Pricing

_LOGGER = logging.getLogger("partition_optimizer")
_HINT = "give --platform with a profile's file or name; optimize calibrate --out FILE makes one of this machine"


class CostModelEvaluator(Evaluator):
    """Predicts plans for the device that a profile describes.

    Args:
        profile: of the device.
        platform: its processors; the profile must have each by its name or by its kind.
    """

    name = "cost-model"
    capabilities = EvaluatorCapabilities(
        descriptions=True, workloads=True, apart=True, measures_here=False, predicts=True
    )

    def __init__(self, profile: CostProfile | None = None, platform: Platform | None = None) -> None:
        self._profile = profile
        self._platform = platform

    def platform(self) -> Platform:
        """Return the platform of the profile.

        Raises:
            UsageError: no device was chosen.
        """
        if self._platform is None:
            raise UsageError("the cost model requires a profile of the device", _HINT)
        return self._platform

    def described(self, source: str | Path) -> Platform | None:
        """Return the platform in a profile's file, or of a shipped name, and use its profile from now on."""
        found = find_profile(source)
        if found is None:
            return None
        self._profile, self._platform = found
        return self._platform

    def apart(self, platform: Platform, count: int) -> list[Apart]:
        """Return the ways to run models in processes of their own, for baselines."""
        return on_cores(platform, count, threads=False)

    def prepare(self, platform: Platform, scratch: Path | None = None) -> AbstractContextManager[CostModelSession]:  # noqa: ARG002
        """Open a session on a platform; leaving the context closes it.

        Nothing is written to ``scratch``.

        Raises:
            ProfileError: the profile is for another platform.
            UnavailableError: there is no profile.
        """
        if self._profile is None and (shipped := find_profile(platform.name)) is not None:
            self._profile = shipped[0]
        if self._profile is None:
            raise UnavailableError(f"there is no profile of platform {platform.name!r}", _HINT)
        for processor in platform.processors:
            profile_key(self._profile, processor)
        return closing(CostModelSession(self._profile, platform))

    @contextmanager
    def host(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        objective: Objective,
        scratch: Path | None = None,
    ) -> Iterator[PredictedSession]:
        """Open a session for one workload; errors as in :meth:`prepare`."""
        lowerings = Lowerings(workload, joined, platform)
        with self.prepare(replace(platform, processors=single_processors(platform)), scratch) as session:

            def simulator_of(of: CostModelSession) -> WorkloadSimulator:
                def price(model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:  # noqa: ARG001
                    work_s, _, slowed = of.simulator_of(lowered).stage(processor, operators)
                    return JobCost(work_s, slowed)

                return WorkloadSimulator(lowerings, price, of.errors)

            with closing(PredictedSession(session, simulator_of, objective)) as found:
                yield found


class CostModelSession(SimulatedSession):
    """A simulated session whose prices come from a profile.

    Args:
        state: of the platform; None for its usual one.
    """

    capabilities = replace(SimulatedSession.capabilities, unsupported=True, costs=True, powers=True, states=True)

    def __init__(self, profile: CostProfile, platform: Platform, state: State | None = None) -> None:
        super().__init__(platform)
        self._profile = profile
        self._state = state
        self._reported = set[str]()

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {
            "evaluator": CostModelEvaluator.name,
            "contract_version": CONTRACT_VERSION,
            "profile": self._profile.name,
            "profile_digest": profile_digest(self._profile),
            "platform": self.platform.to_json(),
        }

    def prices(self, lowered: Lowered) -> Prices:
        """Return the costs of the operators of a lowered plan's graph, of calls and of transfers.

        Extrapolation is reported once for each model.
        """
        graph = lowered.graph
        table = prices(self._profile, graph, self.platform, lowered.shares)
        if self._state is not None:
            return slowed(table, self._state, self.platform)
        if graph.name not in self._reported:  # once also for a model that is split or decomposed in many ways
            self._reported.add(graph.name)
            features = operator_features(graph)
            keys = {processor.name: profile_key(self._profile, processor) for processor in self.platform.processors}
            concerns = {name: self._profile.concerns(features, key) for name, key in keys.items()}
            if (warning := extrapolation_warning(self._profile.name, concerns)) is not None:
                _LOGGER.warning("%s: %s", graph.name, warning)
        return table

    def unsupported_operators(self, graph: Graph, processor: str) -> list[int]:
        """Return the operators that a processor does not support, ascending."""
        number = [p.name for p in self.platform.processors].index(processor)
        return [int(o) for o in np.flatnonzero(~np.isfinite(self.simulator(graph).prices.operator_s[number]))]

    def powers_w(self) -> dict[str, float]:
        """Return the power (W) of processors while they run, where it is known."""
        found = ((p.name, self._profile[profile_key(self._profile, p)].power_w) for p in self.platform.processors)
        return {name: power for name, power in found if power is not None}

    def in_state(self, state: State) -> CostModelSession:
        """Return a session on the platform in that state."""
        return CostModelSession(self._profile, self.platform, state)

    def part_costs(self, graph: Graph) -> PartCosts:
        """Return the costs that latencies are computed from, on the session's platform."""
        return part_costs(self.simulator(graph))


class StatesSession(ForwardingSession):
    """A session whose values are those of the worst state, or the mean over all states.

    Args:
        inner: a session that predicts plans on the platform in each state.
    """

    def __init__(self, inner: Session, states: Sequence[State], robust: Robust) -> None:
        super().__init__(inner)
        self.states, self.robust = tuple(states), robust
        self.capabilities = replace(self.capabilities, states=False, stream=False, pause=False)
        self._each = [inner.in_state(state) for state in states]
        self._share = np.array([s.weight for s in states]) / sum(s.weight for s in states)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        states = [[s.name, s.weight, dict(s.slower)] for s in self.states]
        return super().fingerprint() | {"states": states, "robust": self.robust}

    def value_s(self, seconds: Sequence[float]) -> float:
        """Return the worst or the mean of the times (s) in each state, as ``robust`` says."""
        return max(seconds) if self.robust == "worst" else float(self._share @ np.array(seconds))

    def tables(self, graph: Graph) -> list[PartCosts]:
        """Return the costs of consecutive stages in each state."""
        return [session.part_costs(graph) for session in self._each]

    def part_costs(self, graph: Graph) -> PartCosts:
        """Return the costs of consecutive stages.

        They are means over the states, and so a lower bound of the worst state's latency.
        """
        tables = self.tables(graph)
        means = {
            name: np.einsum("s,s...->...", self._share, np.array([getattr(t, name) for t in tables]))
            for name in ("operator_s", "overhead_s", "beyond_s", "transfer_s", "least_transfer_s")
        }
        return replace(tables[0], **means)

    @property
    def how(self) -> tuple[Pricing, ...]:
        """How plans are measured, by the objective and by further figures; the inner session must be ``Priced``."""
        return cast("Priced", self.inner).how

    def only(self, which: int) -> StatesSession:
        """Return a session of the same plans for one of the objectives.

        The inner session must be ``Priced``.
        """
        return StatesSession(cast("Priced", self.inner).only(which), self.states, self.robust)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Prediction:
        """Predict a plan; ``fresh`` is passed on to each state's session.

        The timeline is that of the worst state.

        Raises:
            PlanError: the plan is not for this graph or platform.
            UnavailableError: a processor does not support an operator of its stage.
        """
        each, figures = [], []
        for session in self._each:
            with closing(session.load(graph, plan, fresh=fresh)) as candidate:
                each.append(candidate.run(1))
                figures.append(candidate.figures() if self.capabilities.figures else {})
        worst = max(range(len(each)), key=lambda i: float(each[i].latency_s[0]))
        value_s = self.value_s([float(batch.latency_s[0]) for batch in each])
        stage_s = each[worst].stage_s[0]
        if self.robust == "expected":
            stage_s = self._share @ np.array([batch.stage_s[0] for batch in each])
        found = {name: self.value_s([each[name] for each in figures]) for name in figures[0]}
        return Prediction(replace(each[worst], latency_s=np.array([value_s]), stage_s=stage_s[None]), found)
