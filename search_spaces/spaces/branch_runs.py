"""Runs: the sequences of operators between the points where a model branches and joins.

A *run* is placed as a whole: the operators of a branch between the groups within it, or those of the model between its
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from search_spaces.core.graph import Graph
from search_spaces.spaces.branches import BranchGroup, branch_groups, walk


@dataclass(frozen=True)
class BranchRuns:
    """The runs of a model.

    Attributes:
        graph: the model.
        groups: its outermost parallel-branch groups.
        runs: the operators of each run, ascending; a run reads only from runs before it.
    """

    graph: Graph
    groups: tuple[BranchGroup, ...]
    runs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph) -> BranchRuns:
        """Return the runs of a model; one that has no branches is a single run."""
        groups = branch_groups(graph)
        return cls(graph, groups, _runs(graph, groups))

    @cached_property
    def run_of(self) -> tuple[int, ...]:
        """For each operator the run that it is in."""
        place = {operator: index for index, run in enumerate(self.runs) for operator in run}
        return tuple(place[o] for o in range(len(self.graph.operators)))

    def branches(self, group: BranchGroup) -> tuple[tuple[int, ...], ...]:
        """Return the runs of each branch of a group, groups within it included, ascending."""
        return tuple(tuple(sorted({self.run_of[o] for o in b.members()})) for b in group.branches)


def _runs(graph: Graph, groups: Sequence[BranchGroup]) -> tuple[tuple[int, ...], ...]:
    inside = {o for group in groups for o in group.members()}
    every = list(walk(groups))
    entries, exits = {g.entry for g in every}, {g.exit for g in every}
    trunk = tuple(o for o in range(len(graph.operators)) if o not in inside)
    found: list[tuple[int, ...]] = []
    for operators in (trunk, *(branch.operators for group in every for branch in group.branches)):
        begin = 0
        for i in range(1, len(operators) + 1):
            if i < len(operators):
                before, after = operators[i - 1], operators[i]
                # Operators that depend on neither may lie between two operators of the trunk.
                apart = operators is trunk and after != before + 1
                if before not in entries and after not in exits and not apart:
                    continue
            found.append(operators[begin:i])
            begin = i
    return tuple(sorted(run for run in found if run))
