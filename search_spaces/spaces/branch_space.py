"""The space of branches (seed 003): a lane for each branch of a model, and for each run of operators between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.lane_words import count_words, word_at

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class BranchSpace:
    """All ways to give each run of a model a lane; branches on different lanes run at the same time.

    Parameters (fixed for the study): ``processor_1`` …, of each run of
    :class:`~search_spaces.spaces.branch_runs.BranchRuns`. The stages follow from the lanes. A group whose branches are
    all on one lane runs one branch after another.

    Args:
        max_stages: parts that a plan may have at most; there must be room for all runs.

    Raises:
        UsageError: the model has no parallel branches, no two processors can run at once, or plans may not have as many
            parts as there are runs.
    """

    def __init__(self, graph: Graph, platform: Platform, max_stages: int) -> None:
        self._runs = BranchRuns.of(graph)
        self._platform = platform
        self._names = [p.name for p in platform.processors]
        if not self._runs.groups:
            raise UsageError(f"{graph.name!r} has no parallel branches", "leave branches out of --allow")
        if all(a.excludes(b) for a, b in combinations(platform.processors, 2)):
            raise UsageError(
                f"branches require two processors that run at once; {', '.join(self._names)} "
                f"{'exclude each other' if len(self._names) > 1 else 'is the only one'}",
                "name others with --processors",
            )
        if max_stages < len(self._runs.runs):
            raise UsageError(
                f"--max-stages {max_stages}: the branches of {graph.name!r} make {len(self._runs.runs)} runs",
                "leave it out: with branches, a plan has as many stages as they need",
            )
        self._classes = [tuple(p.name for p in group) for group in platform.classes().values()]

    @property
    def runs(self) -> BranchRuns:
        """The runs that are placed."""
        return self._runs

    freedoms = ("cuts", "branches")

    def distributions(self) -> dict[str, BaseDistribution]:
        """See :class:`~search_spaces.spaces.space.SearchSpace`."""
        from optuna.distributions import CategoricalDistribution

        return {f"processor_{i}": CategoricalDistribution(self._names) for i in range(1, len(self._runs.runs) + 1)}

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """See :class:`~search_spaces.spaces.space.SearchSpace`."""
        return self.plan([str(params[f"processor_{i}"]) for i in range(1, len(self._runs.runs) + 1)])

    def plan(self, lanes: Sequence[str]) -> Plan:
        """Return the canonical plan that has run ``i`` on ``lanes[i]``."""
        graph = self._runs.graph
        return canonical(Plan(graph.digest, tuple(self._runs.stages(lanes))), graph, self._platform)

    def lanes(self, plan: Plan) -> list[str]:
        """Return the lane of each run.

        Raises:
            PlanError: the plan is not for this model or platform, or divides a run.
        """
        plan.validate(self._runs.graph, self._platform)
        lane = {o: stage.processor for stage in plan.stages for o in stage.operators}
        for number, run in enumerate(self._runs.runs, 1):
            if len({lane[o] for o in run}) > 1:
                raise PlanError(f"the plan divides run {number} (operators {run[0]} to {run[-1]}) among processors")
        return [lane[run[0]] for run in self._runs.runs]

    def encode(self, plan: Plan) -> dict[str, Any]:
        """See :class:`~search_spaces.spaces.space.SearchSpace`; any plan gets those of its canonical form.

        Raises:
            PlanError: the plan does not fit the model or the platform, divides a run, or has other stages than the
                lanes of its runs make.
        """
        found = self.plan(self.lanes(plan))
        if found != canonical(plan, self._runs.graph, self._platform):
            raise PlanError("the plan cuts where no branch on another processor begins or ends, or does not cut there")
        return {f"processor_{i}": lane for i, lane in enumerate(self.lanes(found), 1)}

    def cardinality(self) -> int:
        """See :class:`~search_spaces.spaces.space.SearchSpace`."""
        return count_words(len(self._runs.runs), self._classes)

    def plan_at(self, index: int) -> Plan:
        """Return the plan number ``index`` of 0 … ``cardinality() - 1``.

        Raises:
            IndexError: there is no such number.
        """
        if not 0 <= index < self.cardinality():
            raise IndexError(index)
        return self.plan(word_at(index, len(self._runs.runs), self._classes))

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: a run, a branch or a whole group goes to other lanes.

        Args:
            plan: of this space.
        """
        lanes = self.lanes(plan)
        group = self._runs.groups[int(rng.integers(len(self._runs.groups)))]
        branches = self._runs.branches(group)
        move = int(rng.integers(4))
        if move == 0:  # a single run
            self._place(lanes, [int(rng.integers(len(lanes)))], rng)
        elif move == 1:  # a branch as a whole
            self._place(lanes, branches[int(rng.integers(len(branches)))], rng)
        elif move == 2:  # each branch of a group somewhere
            for branch in branches:
                self._place(lanes, branch, rng)
        else:  # a group in sequence, on the lane of what it reads
            home = lanes[self._runs.run_of[group.entry]] if group.entry is not None else self._any(rng)
            for run in (r for branch in branches for r in branch):
                lanes[run] = home
        return self.plan(lanes)

    def _place(self, lanes: list[str], runs: Sequence[int], rng: np.random.Generator) -> None:
        name = self._any(rng)
        for run in runs:
            lanes[run] = name

    def _any(self, rng: np.random.Generator) -> str:
        return self._names[int(rng.integers(len(self._names)))]
