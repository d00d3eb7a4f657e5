"""The front of all chains over several objectives, by dynamic programming over labels; exact in the model.

A label is a chain up to a cut, with its cost so far by each criterion. A label is dropped if another one at the same
cut, on the same processor and with no more stages dominates it (multi-criteria shortest paths: Martins 1984,
doi:10.1016/0377-2217(84)90077-8). The remaining labels include the best plan under every limit on the other objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evaluators.objectives import most_alive_nbytes
from optimizer.exact.chain_costs import ChainCosts, exclusive_groups
from optimizer.exact.chain_tables import ChainStates, part_costs
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform

_Table = NDArray[np.float64]
_Labels = NDArray[np.float64]

MOST_LABELS = 200_000
_DIGITS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One component of a label.

    Attributes:
        cost: of operators ``first … last-1`` as one stage, ``[processor, first, last]``; infinite where they cannot be
            one.
        transfer: added by a cut before an operator, ``[operator, from, to]``; None for nothing.
        joined: whether the costs of stages are summed, or the largest counts.
    """

    cost: _Table
    transfer: _Table | None = None
    joined: Literal["sum", "most"] = "sum"


@dataclass(frozen=True, slots=True, eq=False)
class Criterion:
    """An objective.

    Attributes:
        parts: the components of a label that it is computed from.
        value: its values, shape ``(labels,)``, from these components, shape ``(labels, parts)``.
    """

    parts: tuple[Part, ...]
    value: Callable[[_Labels], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class FrontChain:
    """A chain of the front, with its objectives in the order of the criteria."""

    cuts: tuple[int, ...]
    processors: tuple[str, ...]
    values: tuple[float, ...]


def summed(costs: ChainCosts) -> Criterion:
    """Return a criterion that is a sum over stages: latency, energy, processor time."""
    return Criterion((Part(part_costs(costs), costs.transfer_s),), lambda labels: labels[:, 0])


def busiest(costs: ChainCosts) -> Criterion:
    """Return the criterion of the busiest processor's load; exclusive processors count as one."""
    table = part_costs(costs)
    parts = []
    for group in exclusive_groups(costs.platform):
        inside = np.zeros(len(table), bool)
        inside[list(group)] = True
        own = np.where(inside[:, None, None], table, np.where(np.isfinite(table), 0.0, np.inf))
        parts.append(Part(own, costs.transfer_s * inside))
    return Criterion(tuple(parts), lambda labels: labels.max(axis=1))


def memory(graph: Graph, platform: Platform) -> Criterion:
    """Return the criterion of gigabytes of weights and peak activations."""
    count, processors = len(graph.operators), len(platform.processors)
    peaks = np.full((count + 1, count + 1), np.inf)
    for first in range(count):
        for last in range(first + 1, count + 1):
            peaks[first, last] = most_alive_nbytes(graph, tuple(range(first, last))) / 1e9
    constants = {t for o in range(count) for t in graph.boundary((o,)).constants}
    weights = sum(graph.tensors[t].nbytes for t in constants) / 1e9
    parts = []
    for processor in range(processors):
        own = np.where(np.isfinite(peaks), 0.0, np.inf) * np.ones((processors, 1, 1))
        own[processor] = peaks
        parts.append(Part(own, None, "most"))
    return Criterion(tuple(parts), lambda labels: weights + labels.sum(axis=1))


def pareto_chains(criteria: Sequence[Criterion], platform: Platform, max_stages: int) -> list[FrontChain]:
    """Return the front of chains of at most ``max_stages`` stages, ascending by the first objective.

    Of chains that are equal in all objectives one is returned.

    Raises:
        InfeasibleError: no chain fits.
        UnavailableError: there are too many labels to hold.
    """
    return _Search(criteria, platform, max_stages).front()


def undominated(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the indices, ascending, of rows that no other row dominates; of equal rows the first."""
    if not len(values):
        return np.empty(0, np.intp)
    rows: NDArray[np.intp] = np.lexsort(values.T[::-1])  # no later row beats an earlier one
    if values.shape[1] == 2:
        second = values[rows, 1]
        least = np.concatenate(([np.inf], np.minimum.accumulate(second)[:-1]))
        return np.sort(rows[second < least])
    kept = []
    while len(rows):
        kept.append(rows[0])
        rows = rows[1:][(values[rows[1:]] < values[rows[0]]).any(axis=1)]
    return np.sort(np.array(kept, np.intp))


_Key = tuple[int, int, int]
"""Number of stages, the operator before which they end, and the state of :class:`ChainStates`."""


@dataclass(slots=True)
class _Bucket:
    """Labels at one cut in one state, with the bucket and row of their predecessors."""

    labels: _Labels
    parents: list[tuple[_Key, int]]


_Waiting = dict[tuple[int, int], list[tuple[_Labels, _Key, bool]]]
"""By cut and state: labels, the bucket that they continue (row by row), and whether they begin a chain."""


class _Search:
    def __init__(self, criteria: Sequence[Criterion], platform: Platform, max_stages: int) -> None:
        self._criteria, self._platform = criteria, platform
        self._most = max_stages
        self._processors = ChainStates(platform, max_stages)
        self._parts = [part for criterion in criteria for part in criterion.parts]
        self._count = self._parts[0].cost.shape[1] - 1
        self._sum = np.array([part.joined == "sum" for part in self._parts])
        self._cost = np.stack([part.cost for part in self._parts], axis=-1)  # [processor, first, last, part]
        zero = np.zeros((self._count, len(platform.processors), len(platform.processors)))
        transfers = [zero if part.transfer is None else part.transfer for part in self._parts]
        self._transfers = np.stack(transfers, axis=-1)
        self._held = 0

    def front(self) -> list[FrontChain]:
        found: dict[_Key, _Bucket] = {}
        waiting = self._from_start()
        for parts in range(1, self._most + 1):
            level = {(parts, *place): self._pruned(rows, *place, found) for place, rows in waiting.items()}
            found |= {key: bucket for key, bucket in level.items() if len(bucket.labels)}
            self._held = sum(len(b.labels) for b in found.values())
            if self._held > MOST_LABELS:
                raise UnavailableError(
                    f"the front needs more than {MOST_LABELS:,} partial plans", "allow fewer --max-stages"
                )
            if parts < self._most:
                waiting = self._continued(level)
        return self._ends(found)

    def _from_start(self) -> _Waiting:
        waiting: _Waiting = {}
        for state in self._processors.after[-1]:
            cost = self._cost[self._processors.of[state], 0]
            for at in range(1, self._count + 1):
                if np.isfinite(cost[at]).all():
                    waiting.setdefault((at, state), []).append((cost[at][None], (0, 0, 0), True))
        return waiting

    def _continued(self, level: Mapping[_Key, _Bucket]) -> _Waiting:
        waiting: _Waiting = {}
        for key, bucket in level.items():
            _, first, state = key
            if first == self._count or not len(bucket.labels):
                continue
            source = self._processors.of[state]
            for follow in self._processors.after[state]:
                processor = self._processors.of[follow]
                entered = bucket.labels + self._transfers[first, source, processor]
                cost = self._cost[processor, first]
                together = np.where(self._sum, entered + cost[:, None], np.maximum(bucket.labels, cost[:, None]))
                for last in range(first + 1, self._count + 1):
                    if np.isfinite(cost[last]).all():
                        waiting.setdefault((last, follow), []).append((together[last], key, False))
        return waiting

    def _pruned(
        self, rows: Sequence[tuple[_Labels, _Key, bool]], at: int, state: int, found: Mapping[_Key, _Bucket]
    ) -> _Bucket:
        """Return the labels that no other one with as many or fewer stages dominates."""
        fewer = [b.labels for parts in range(1, self._most) if (b := found.get((parts, at, state))) is not None]
        labels = np.concatenate([*fewer, *(each for each, *_ in rows)])
        known = sum(map(len, fewer))
        parents = [(key, -1 if begins else i) for each, key, begins in rows for i in range(len(each))]
        kept = [int(i) - known for i in undominated(labels) if i >= known]
        return _Bucket(labels[known:][kept], [parents[i] for i in kept])

    def _ends(self, found: Mapping[_Key, _Bucket]) -> list[FrontChain]:
        ends = [(key, row) for key, b in found.items() if key[1] == self._count for row in range(len(b.labels))]
        if not ends:
            raise InfeasibleError(f"no chain of at most {self._most} stages runs on {self._platform.name!r}")
        labels = np.array([found[key].labels[row] for key, row in ends])
        values, first = [], 0
        for criterion in self._criteria:
            values.append(criterion.value(labels[:, first : first + len(criterion.parts)]))
            first += len(criterion.parts)
        table = np.stack(values, axis=1)
        # Sums of the same stages differ by rounding; of chains that are equal up to rounding the shortest comes first.
        scale = np.abs(table).max(axis=0)
        chains = []
        for i in undominated(np.round(table / np.where(scale > 0.0, scale, 1.0), _DIGITS)):
            key, row = ends[i]
            chains.append(self._chain(found, key, row, tuple(float(v) for v in table[i])))
        return sorted(chains, key=lambda chain: chain.values)

    def _chain(self, found: Mapping[_Key, _Bucket], key: _Key, row: int, values: tuple[float, ...]) -> FrontChain:
        borders: list[int] = []
        names: list[str] = []
        while key[0]:
            borders.append(key[1])
            names.append(self._platform.processors[self._processors.of[key[2]]].name)
            key, row = found[key].parents[row]
        return FrontChain(tuple(reversed(borders[1:])), tuple(reversed(names)), values)
