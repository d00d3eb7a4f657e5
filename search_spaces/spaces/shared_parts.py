"""What of a model two processors can share: chains of operators, split; groups of branches, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from search_spaces.core.graph import Graph
from search_spaces.rewrites.splits import Axis, Sides, Split, divide
from search_spaces.spaces.branches import branch_groups, walk
from search_spaces.spaces.shared_chains import LONGEST, ChainCuts, chain_cuts

How = Axis | Literal["branches"]
"""How two processors share a part."""

_MOST_BRANCHES = 4  # of a group that is a part: what goes where is then one of 14, and fits among the shares


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive operators, and who computes them.

    Attributes:
        first, last: the operators, half-open.
        on: the processors: one, or two that share the work.
        axis, cut: how it is shared, and where; see :class:`~search_spaces.rewrites.splits.Split`. Of branches, ``cut``
            tells which ones the second processor runs, as a bit set.
    """

    first: int
    last: int
    on: tuple[str, ...]
    axis: How | None = None
    cut: int = 0


Mode = tuple[Literal["whole"], str] | tuple[How, int, str, str]
"""How a part is run: whole on a processor; or shared, by a step of the grid or a set of branches, on two."""


class SharedParts:
    """The parts of a model that can be shared, each worked out once."""

    def __init__(self, graph: Graph, *, branches: bool = True) -> None:
        self.graph = graph
        self._branches = branches
        self._chains: dict[tuple[int, Axis], ChainCuts] = {}
        self._sides: dict[Split, Sides] = {}

    @cached_property
    def groups(self) -> Mapping[tuple[int, int], tuple[tuple[int, ...], ...]]:
        """Parallel branches that can be a part, by its first and last operator: the operators of each branch.

        These are the groups of at most four branches, and of consecutive operators; what a plan makes of them is told
        by one number. The space of branches knows no such limits.
        """
        found: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        for group in walk(branch_groups(self.graph)) if self._branches else ():
            members = group.members()
            first, last = members[0], members[-1] + 1
            if len(members) == last - first and len(group.branches) <= _MOST_BRANCHES:
                found[first, last] = tuple(branch.members() for branch in group.branches)
        return found

    def branch_sets(self, first: int, last: int) -> range:
        """Return which sets of branches a second processor may run, as bit sets; none where a part is no group."""
        return range(1, 2 ** len(self.groups.get((first, last), ())) - 1)

    def side_operators(self, part: Part) -> tuple[tuple[int, ...], ...]:
        """Return the operators of each side of a part: all of them on each, but for branches."""
        every = tuple(range(part.first, part.last))
        if part.axis != "branches":
            return (every,) * len(part.on)
        second = {o for i, b in enumerate(self.groups[part.first, part.last]) if part.cut >> i & 1 for o in b}
        return tuple(o for o in every if o not in second), tuple(sorted(second))

    def chains(self, last: int, axis: Axis) -> ChainCuts:
        """Return where the chains that end before operator ``last`` can be split in two."""
        if (last, axis) not in self._chains:
            self._chains[last, axis] = chain_cuts(self.graph, last, axis)
        return self._chains[last, axis]

    def cuts(self, first: int, last: int, axis: Axis) -> Mapping[int, int]:
        """Return, for a chain, the steps of the grid at which it can be split in two, and the cuts there.

        There are none where it is longer than :data:`~search_spaces.spaces.shared_chains.LONGEST`.
        """
        return self.chains(last, axis).of(last - first) if 0 < last - first <= LONGEST else {}

    def steps(self, first: int, last: int, axis: Axis) -> Mapping[int, Sides]:
        """Return, for a chain, the steps of the grid at which it can be split in two, and the sides there."""
        found = self.cuts(first, last, axis)
        return {step: self.sides(Split(first, last, axis, (cut,))) for step, cut in found.items()}

    def sides(self, split: Split) -> Sides:
        """Return the sides of a split; each is worked out once.

        Raises:
            RewriteError: it cannot be split like that.
        """
        if split not in self._sides:
            self._sides[split] = divide(self.graph, split)
        return self._sides[split]

    def step(self, part: Part) -> int | None:
        """Return at which step of the grid a part is split, or None where it is at none."""
        if part.axis is None or part.axis == "branches":
            return None
        found = self.cuts(part.first, part.last, part.axis)
        return next((step for step, cut in found.items() if cut == part.cut), None)
