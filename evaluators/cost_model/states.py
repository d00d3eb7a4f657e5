"""Plans priced in several states of a platform at once: by the worst of them, or by what is to be expected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from evaluators.base import PartCosts, Session
from evaluators.forwarding import ForwardingSession
from evaluators.simulated import Prediction
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.states import Robust, State

if TYPE_CHECKING:
    from evaluators.objectives import Priced, Pricing


class StatesSession(ForwardingSession):
    """See :class:`~evaluators.base.Session`; numbers are those of the worst state, or the mean over all states.

    Args:
        inner: prices plans on the platform as it is, and in each state.
    """

    def __init__(self, inner: Session, states: Sequence[State], robust: Robust) -> None:
        super().__init__(inner)
        self.states, self.robust = tuple(states), robust
        self.capabilities = replace(self.capabilities, states=False, stream=False, pause=False)
        self._each = [inner.in_state(state) for state in states]
        self._share = np.array([s.weight for s in states]) / sum(s.weight for s in states)

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`~evaluators.base.Session`."""
        told = [[s.name, s.weight, dict(s.slower)] for s in self.states]
        return super().fingerprint() | {"states": told, "robust": self.robust}

    def value_s(self, seconds: Sequence[float]) -> float:
        """Return what is made small, of the seconds in each state."""
        return max(seconds) if self.robust == "worst" else float(self._share @ np.array(seconds))

    def tables(self, graph: Graph) -> list[PartCosts]:
        """Return the costs of consecutive parts in each state."""
        return [session.part_costs(graph) for session in self._each]

    def part_costs(self, graph: Graph) -> PartCosts:
        """See :class:`~evaluators.base.Session`: the mean over the states, which the worst is never below."""
        tables = self.tables(graph)
        means = {
            name: np.einsum("s,s...->...", self._share, np.array([getattr(t, name) for t in tables]))
            for name in ("operator_s", "overhead_s", "beyond_s", "hand_over_s", "least_hand_over_s")
        }
        return replace(tables[0], **means)

    @property
    def how(self) -> tuple[Pricing, ...]:
        """See :class:`~evaluators.objectives.Priced`, which the inner session then is."""
        return cast("Priced", self.inner).how

    def only(self, which: int) -> StatesSession:
        """See :class:`~evaluators.objectives.Priced`, which the inner session then is."""
        return StatesSession(cast("Priced", self.inner).only(which), self.states, self.robust)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> Prediction:
        """See :class:`~evaluators.base.Session`; the timeline is that of the worst state.

        Raises:
            PlanError: the plan is not for this graph or platform.
            UnavailableError: a lane does not take an operator of its stage.
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
