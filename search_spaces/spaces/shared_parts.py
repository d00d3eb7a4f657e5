"""Parts: consecutive operators whole on a processor, split between two, or with their branches side by side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from search_spaces.core.graph import Graph
from search_spaces.core.recent import recent
from search_spaces.rewrites.splits import Axis
from search_spaces.spaces.shared_chains import LONGEST, ChainCuts, chain_cuts

How = Axis | Literal["branches"]
"""How processors share a part."""

_MOST_CHAINS = 2048
_CHAINS: OrderedDict[tuple[str, int, Axis], ChainCuts] = OrderedDict()  # a campaign's studies have the same models


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive operators and the processors that compute them.

    Attributes:
        first, last: the operators, half-open.
        on: the processor; the two that share the work; or, of branches, the processor of each run of the segment.
        axis: how the part is shared; None where it is not.
        cut: the index where it is split, as of :class:`~search_spaces.rewrites.splits.Split`.
    """

    first: int
    last: int
    on: tuple[str, ...]
    axis: How | None = None
    cut: int = 0


class SharedParts:
    """The chains of a model that can be split, each computed once, also for several spaces of the model."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._chains: dict[tuple[int, Axis], ChainCuts] = {}
        self._cuts: dict[tuple[int, int, Axis], Mapping[int, int]] = {}

    def chains(self, last: int, axis: Axis) -> ChainCuts:
        """Return where the chains that end before operator ``last`` can be split in two."""
        if (last, axis) not in self._chains:
            key = self.graph.digest, last, axis
            self._chains[last, axis] = recent(_CHAINS, key, partial(chain_cuts, self.graph, last, axis), _MOST_CHAINS)
        return self._chains[last, axis]

    def cuts(self, first: int, last: int, axis: Axis) -> Mapping[int, int]:
        """Return step of the grid → cut for each place where a chain can be split in two.

        There are none where it is longer than :data:`~search_spaces.spaces.shared_chains.LONGEST`.
        """
        if not 0 < last - first <= LONGEST:
            return {}
        key = first, last, axis
        if key not in self._cuts:
            self._cuts[key] = self.chains(last, axis).of(last - first)
        return self._cuts[key]

    def step(self, part: Part) -> int | None:
        """Return the step of the grid at which a part is split, or None where there is none."""
        if part.axis is None or part.axis == "branches":
            return None
        found = self.cuts(part.first, part.last, part.axis)
        return next((step for step, cut in found.items() if cut == part.cut), None)
