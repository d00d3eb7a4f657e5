"""Branches and parallel-branch groups of a model (seed 003): operators that can run at the same time.

The seed's definitions: a *branch* is a sequential run of operators, with no path to another branch; a *parallel-branch
group* is a set of branches with the same input node and the same output node. Where they leave a choice, this
module decides:

- A run may hold groups in place of operators, so groups nest: a branch that splits and joins again is one branch.
  One that splits and does not join before the group's exit (Inception v3's 3x3 into 1x3 and 3x1) is one too, and its
  inner group has the exit of the outer one.
- An empty run is not a branch. So a residual block with an identity shortcut is not a group; one with a projection
  shortcut is a group of two.
- Nodes are operators. Branches whose first operator reads no other (but the caller's inputs) share the entry ``None``,
  those whose last operator feeds no other the exit ``None``. An activation that later operators read stays within its
  branch though the caller gets it too.

Found by series-parallel reduction (Valdes, Tarjan and Lawler 1982, doi:10.1137/0211023), in time linear in operators
and edges except for sorting. What does not reduce, such as blocks in which every layer reads all earlier ones, is not
a sequential run and has no branches by this definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from search_spaces.core.graph import Graph

_SOURCE = -1  # stands for the model's inputs, as the number of operators does for its outputs


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of operators and groups, each of which feeds the next.

    Attributes:
        operators: those of the run itself, ascending; at least one.
        groups: parallel-branch groups that are parts of the run, in order; their operators are not in ``operators``.
    """

    operators: tuple[int, ...]
    groups: tuple[BranchGroup, ...] = ()

    def members(self) -> tuple[int, ...]:
        """Return all operators of the branch, those of groups within groups included, ascending."""
        inner = (o for group in walk(self.groups) for branch in group.branches for o in branch.operators)
        return tuple(sorted((*self.operators, *inner)))


@dataclass(frozen=True, slots=True)
class BranchGroup:
    """Independent branches between two operators.

    Attributes:
        entry: the operator that every branch reads; None where they begin at the model's inputs.
        exit: the operator that reads every branch; None where they end at the model's outputs.
        branches: two or more, by their first operator.
    """

    entry: int | None
    exit: int | None
    branches: tuple[Branch, ...]

    def members(self) -> tuple[int, ...]:
        """Return the operators of all branches, ascending; entry and exit are not among them."""
        return tuple(sorted(o for group in walk([self]) for branch in group.branches for o in branch.operators))


def branch_groups(graph: Graph) -> tuple[BranchGroup, ...]:
    """Return the outermost parallel-branch groups by their first operator; :func:`walk` reaches those within."""
    count = len(graph.operators)
    network = _Network(count)
    ends = set(range(count))
    for operator in range(count):
        before = graph.predecessors(operator)
        for origin in before or (_SOURCE,):
            network.connect(origin, operator)
        ends -= before
    for operator in ends:
        network.connect(operator, count)
    network.reduce()
    groups = [
        group for (start, end), runs in network.links.items() for group in network.joined(start, end, runs).groups
    ]
    return tuple(sorted(groups, key=_first_operator))


def walk(groups: Iterable[BranchGroup]) -> Iterator[BranchGroup]:
    """Yield each group, and after it the groups within its branches, at any depth."""
    waiting = [iter(groups)]
    while waiting:
        group = next(waiting[-1], None)
        if group is None:
            waiting.pop()
            continue
        yield group
        waiting.extend(iter(branch.groups) for branch in reversed(group.branches))


@dataclass(slots=True)
class _Run:
    """A branch under construction; ``first`` is its first operator, those in groups included."""

    operators: list[int] = field(default_factory=list)
    groups: list[BranchGroup] = field(default_factory=list)
    first: int = -1


class _Network:
    """Operators and the links between them; a link holds the runs that lie between its ends, none for a plain edge."""

    def __init__(self, sink: int) -> None:
        self.links: dict[tuple[int, int], list[_Run]] = {}
        self._before: dict[int, set[int]] = {node: set() for node in range(_SOURCE, sink + 1)}
        self._after: dict[int, set[int]] = {node: set() for node in range(_SOURCE, sink + 1)}
        self._sink = sink

    def connect(self, start: int, end: int, run: _Run | None = None) -> bool:
        """Add an edge, or a run between two nodes; return whether a link was there already."""
        known = (start, end) in self.links
        runs = self.links.setdefault((start, end), [])
        if run is not None:
            runs.append(run)
        self._after[start].add(end)
        self._before[end].add(start)
        return known

    def reduce(self) -> None:
        """Replace each node with one predecessor and one successor by a run, until there is none."""
        waiting = list(range(self._sink))[::-1]
        while waiting:
            node = waiting.pop()
            if len(self._before[node]) != 1 or len(self._after[node]) != 1:
                continue
            start, end = self._before[node].pop(), self._after[node].pop()
            head = self.joined(start, node, self.links.pop((start, node)))
            tail = self.joined(node, end, self.links.pop((node, end)))
            self._after[start].remove(node)
            self._before[end].remove(node)
            head.first = head.first if head.first >= 0 else node
            head.operators.append(node)
            head.operators += tail.operators
            head.groups += tail.groups
            if self.connect(start, end, head):  # the ends have one neighbour less and may be reducible now
                waiting += [n for n in (end, start) if _SOURCE < n < self._sink]

    def joined(self, start: int, end: int, runs: list[_Run]) -> _Run:
        """Return what lies between two nodes as one run; several runs become a group."""
        if len(runs) < 2:
            return runs[0] if runs else _Run()
        runs.sort(key=lambda run: run.first)
        group = BranchGroup(
            start if start > _SOURCE else None,
            end if end < self._sink else None,
            tuple(Branch(tuple(run.operators), tuple(run.groups)) for run in runs),
        )
        return _Run(groups=[group], first=runs[0].first)


def _first_operator(group: BranchGroup) -> int:
    return min(group.members())
