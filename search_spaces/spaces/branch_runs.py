"""The runs that a model falls into at its branches, and the stages that they make once each has a lane.

A *run* is what is placed as a whole: the operators of a branch between the groups within it, or those of the model
between its groups. Runs on one lane become one stage wherever nobody has to wait longer for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

from search_spaces.core.graph import Graph, Operator
from search_spaces.core.plan import Stage
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

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """For each run the others that it reads from."""
        found = [{self.run_of[b] for o in run for b in self.graph.predecessors(o)} for run in self.runs]
        return tuple(frozenset(before - {index}) for index, before in enumerate(found))

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """For each run all that must be over when it begins, as a bit set."""
        found: list[int] = []
        for reads in self.reads:
            found.append(_bits(reads) | _union(found[r] for r in reads))
        return tuple(found)

    def branches(self, group: BranchGroup) -> tuple[tuple[int, ...], ...]:
        """Return the runs of each branch of a group, groups within it included, ascending."""
        return tuple(tuple(sorted({self.run_of[o] for o in b.members()})) for b in group.branches)

    def as_graph(self) -> Graph:
        """Return the graph whose operators are the runs; its tensors are the model's."""
        borders = [self.graph.boundary(run) for run in self.runs]
        operators = tuple(Operator("RUN", border.inputs, border.outputs) for border in borders)
        return Graph(self.graph.name, self.graph.tensors, operators, self.graph.inputs, self.graph.outputs)

    def stages(self, lanes: Sequence[str]) -> list[Stage]:
        """Return the stages, by their first operators, where run ``i`` is on ``lanes[i]``.

        A run joins the last stage on its lane if it waits for nothing that this stage has not waited for, and nobody
        on another lane waits for the stage who need not wait for the run as well. So joining delays nothing.
        """
        readers: list[list[int]] = [[] for _ in self.runs]
        for run, reads in enumerate(self.reads):
            for before in reads:
                readers[before].append(run)
        last: dict[str, int] = {}
        made: list[list[int]] = []
        known: list[int] = []  # for each stage its runs and all that is over when it begins
        for run, lane in enumerate(lanes):
            at = last.get(lane)
            if at is not None and not self._before[run] & ~known[at]:
                waiting = (r for member in made[at] for r in readers[member] if lanes[r] != lane)
                if all(self._before[r] >> run & 1 for r in waiting):
                    made[at].append(run)
                    known[at] |= 1 << run
                    continue
            last[lane] = len(made)
            made.append([run])
            known.append(self._before[run] | 1 << run)
        return [Stage(tuple(sorted(o for r in stage for o in self.runs[r])), lanes[stage[0]]) for stage in made]


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
                # Others may lie between two operators of the trunk that do not need the first one, nor the second them.
                apart = operators is trunk and after != before + 1
                if before not in entries and after not in exits and not apart:
                    continue
            found.append(operators[begin:i])
            begin = i
    return tuple(sorted(run for run in found if run))


def _bits(runs: frozenset[int]) -> int:
    return _union(1 << run for run in runs)


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)
