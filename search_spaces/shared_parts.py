"""What of a model two processors can share: chains of operators, split; groups of branches, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from search_spaces.branches import branch_groups, walk
from search_spaces.errors import RewriteError
from search_spaces.graph import Graph
from search_spaces.rewrites.splits import Axis, Sides, Split, divide, extent, is_flat

GRID = 16
"""Into how many equal steps a share is told."""

How = Axis | Literal["branches"]
"""How two processors share a part."""

_MOST_BRANCHES = 4  # of a group that is a part: what goes where is then one of 14, and fits among the shares

_TILE: Mapping[Axis, int] = {"height": 1, "channels": 8}  # of a kernel: channels are computed in blocks


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
"""How a part is run: whole on a processor; or shared, by a step of :data:`GRID` or a set of branches, on two."""


class SharedParts:
    """The parts of a model that can be shared, each worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._steps: dict[tuple[int, int, Axis], dict[int, Sides]] = {}
        self._step_of: dict[tuple[int, int, Axis], dict[int, int]] = {}
        self._dead: dict[tuple[int, Axis], int] = {}

    @cached_property
    def groups(self) -> Mapping[tuple[int, int], tuple[tuple[int, ...], ...]]:
        """Parallel branches that can be a part, by its first and last operator: the operators of each branch.

        These are the groups of at most four branches, and of consecutive operators; what a plan makes of them is told
        by one number. The space of branches knows no such limits.
        """
        found: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        for group in walk(branch_groups(self.graph)):
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

    def steps(self, first: int, last: int, axis: Axis) -> Mapping[int, Sides]:
        """Return, for a chain, the steps of :data:`GRID` at which it can be split in two, and the sides there.

        Cuts along channels lie between two tiles of the kernels, where there are enough channels.
        """
        key = (first, last, axis)
        if key not in self._steps:
            self._steps[key] = self._find_steps(first, last, axis)
        return self._steps[key]

    def _find_steps(self, first: int, last: int, axis: Axis) -> dict[int, Sides]:
        # What no longer goes with one operator more does not go with others behind it either.
        if last >= self._dead.get((first, axis), last + 1):
            return {}
        found: dict[int, Sides] = {}
        try:
            length = extent(self.graph, first, last, axis)
        except RewriteError:
            length = 0
        tile = _TILE[axis] if length >= 2 * _TILE[axis] else 1
        cuts = {step: round(step * length / GRID / tile) * tile for step in range(1, GRID)}
        seen: set[int] = set()
        for step in (GRID // 2, *(s for s in cuts if s != GRID // 2)):
            if 0 < cuts[step] < length and cuts[step] not in seen:
                seen.add(cuts[step])
                with suppress(RewriteError):
                    found[step] = divide(self.graph, Split(first, last, axis, (cuts[step],)))
        if not found and not self._goes_on(first, last, axis):
            self._dead[first, axis] = min(last, self._dead.get((first, axis), last))
        return dict(sorted(found.items()))

    def _goes_on(self, first: int, last: int, axis: Axis) -> bool:
        """Return whether a chain may only be too short: what each side computes for itself is read behind it."""
        made = (tensor for index in range(first, last) for tensor in self.graph.operators[index].outputs)
        return any(
            is_flat(self.graph, t, axis) and any(c >= last for c in self.graph.consumers.get(t, ())) for t in made
        )

    def step(self, part: Part) -> int | None:
        """Return at which step of :data:`GRID` a part is split, or None where it is at none."""
        if part.axis is None or part.axis == "branches":
            return None
        key = (part.first, part.last, part.axis)
        if key not in self._step_of:
            self._step_of[key] = {sides.split.cuts[0]: step for step, sides in self.steps(*key).items()}
        return self._step_of[key].get(part.cut)
