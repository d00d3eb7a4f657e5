"""A plan of a workload that really runs, and its models as it runs them: what all evaluators that measure share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from evaluators.base import Agreement, Batch, Candidate
from evaluators.workload.outcome import Objective, Outcome
from evaluators.workload.setting import Setting
from evaluators.workload.simulate import stage_means_s
from search_spaces.plan import Plan


class HostedRun(Candidate, ABC):
    """See :class:`~evaluators.workload.host.WorkloadCandidate`.

    Args:
        found: the plan's setting.
        objective: what latencies are.
    """

    def __init__(self, found: Setting, plan: Plan, objective: Objective) -> None:
        self._found, self._plan, self._objective = found, plan, objective
        self._outcome: Outcome | None = None

    @abstractmethod
    def once(self) -> Outcome:
        """Run the workload once.

        Raises:
            UnavailableError: a model failed.
        """

    @abstractmethod
    def agreements(self) -> Iterable[Agreement]:
        """Return how the outputs of each instance, which has run, compare with its whole model's."""

    @property
    def outcome(self) -> Outcome:
        """What came of the last run; runs once if there was none."""
        if self._outcome is None:
            self._outcome = self.once()
        return self._outcome

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`; a run is ended by nothing but its end.

        Raises:
            UnavailableError: a model failed.
        """
        values, stages = [], []
        for _ in range(n):
            self._outcome = found = self.once()
            values.append(found.value_s(self._objective))
            stages.append(stage_means_s(found, self._found, len(self._plan.stages)))
            if values[-1] > stop_above_s:
                break
        return Batch(np.array(values), np.array(stages), self._outcome.timeline if self._outcome else None)

    def verify(self) -> Agreement | None:
        """See :class:`~evaluators.base.Candidate`: the worst agreement of all instances."""
        if self._outcome is None:
            self._outcome = self.once()
        return worst(self.agreements())


def worst(found: Iterable[Agreement]) -> Agreement:
    """Return the worst of some agreements: one that is not accepted, then the one that is off most."""
    return max(found, key=lambda a: (not a.accepted, a.max_rel_error, not a.identical))
