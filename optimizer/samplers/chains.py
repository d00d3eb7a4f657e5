"""Many chains of stages as arrays: their neighbours, and their times under draws of the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_tables import Edges
from optimizer.samplers.draws import Draws
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform

_Ints = NDArray[np.int64]
_Seconds = NDArray[np.float64]
STEPS = np.array((-8, -5, -3, -2, -1, 1, 2, 3, 5, 8))
_FACTORS = np.random.default_rng(2026).integers(-(2**62), 2**62, 4096) * 2 + 1


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """C chains of at most K stages.

    Attributes:
        borders: shape ``(C, K + 1)``: stage ``j`` holds the operators ``borders[j] … borders[j + 1] - 1``; missing
            stages are empty and at the end.
        processors: shape ``(C, K)``: the processor (index in the platform) of each stage, 0 for empty ones.
    """

    borders: _Ints
    processors: _Ints

    @classmethod
    def of(cls, chains: Sequence[tuple[Sequence[int], Sequence[int]]], count: int, most: int) -> Self:
        """Return chains of ``count`` operators and at most ``most`` stages, given as cuts and processors."""
        borders = np.full((len(chains), most + 1), count)
        processors = np.zeros((len(chains), most), dtype=np.int64)
        borders[:, 0] = 0
        for row, (cuts, used) in enumerate(chains):
            borders[row, 1 : 1 + len(cuts)] = cuts
            processors[row, : len(used)] = used
        return cls(borders, processors)

    @property
    def parts(self) -> _Ints:
        """Number of stages of each chain, shape ``(C,)``."""
        found: _Ints = (np.diff(self.borders, axis=1) > 0).sum(axis=1)
        return found

    def __len__(self) -> int:
        return len(self.processors)

    def __getitem__(self, rows: _Ints | slice) -> Chains:
        """Return some of the chains."""
        return Chains(self.borders[rows], self.processors[rows])

    def __add__(self, other: Chains) -> Chains:
        """Return these chains and others of the same K."""
        return joined((self, other))

    def stages(self, row: int, platform: Platform) -> tuple[Stage, ...]:
        """Return the stages of one chain."""
        borders, processors = self.borders[row].tolist(), self.processors[row].tolist()
        return tuple(
            Stage(tuple(range(borders[j], borders[j + 1])), platform.processors[processor].name)
            for j, processor in enumerate(processors)
            if borders[j] < borders[j + 1]
        )

    def names(self) -> list[bytes]:
        """Return a key for each chain, unique among those of the same K."""
        rows = np.concatenate((self.borders[:, 1:-1], self.processors), axis=1)
        return [row.tobytes() for row in rows]


def joined(chains: Sequence[Chains]) -> Chains:
    """Return all chains of several groups of the same K."""
    return Chains(np.concatenate([c.borders for c in chains]), np.concatenate([c.processors for c in chains]))


def from_plan(plan: Plan, platform: Platform) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cuts and processors of a plan of consecutive stages."""
    names = [p.name for p in platform.processors]
    return tuple(s.operators[0] for s in plan.stages[1:]), tuple(names.index(s.processor) for s in plan.stages)


def distinct(chains: Chains, platform: Platform) -> Chains:
    """Return the chains in canonical form, without repeats: alike processors appear in the order of first use."""
    processors = chains.processors.copy()
    index = {p.name: i for i, p in enumerate(platform.processors)}
    groups = [[index[p.name] for p in group] for group in platform.classes().values()]
    rows = np.arange(len(chains))
    if any(len(group) > 1 for group in groups):
        group_of = np.array([next(g for g, group in enumerate(groups) if i in group) for i in range(len(index))])
        members = np.array([group + [-1] * (len(index) - len(group)) for group in groups])
        used = np.zeros((len(chains), len(groups)), dtype=np.int64)
        name = np.full((len(chains), len(index)), -1)
        for j in range(processors.shape[1]):
            on, there = chains.processors[:, j], chains.borders[:, j] < chains.borders[:, j + 1]
            new = there & (name[rows, on] < 0)
            group = group_of[on]
            name[rows[new], on[new]] = members[group[new], used[rows[new], group[new]]]
            used[rows[new], group[new]] += 1
            processors[:, j] = np.where(there, name[rows, on], 0)
    else:
        processors[chains.borders[:, :-1] >= chains.borders[:, 1:]] = 0
    # A random hash into 64 bits: sorting the rows themselves would take most of the time of a proposal.
    every = np.concatenate((chains.borders, processors), axis=1)
    with np.errstate(over="ignore"):
        hashed = every @ _FACTORS[: every.shape[1]]
    _, first = np.unique(hashed ^ (hashed >> 31), return_index=True)
    first.sort()
    return Chains(chains.borders[first], processors[first])


def neighbours(chains: Chains, processors: int, places: int, rng: np.random.Generator) -> Chains:
    """Return the neighbours of some chains: a border shifted or set anew, a stage moved, merged or split.

    Args:
        chains: at least one.
        processors: number of processors.
        places: number of random operators at which each chain is split and borders are set.
        rng: draws them.
    """
    found = [_shifted(chains, rng, places), _moved(chains, processors), _merged(chains)]
    if chains.processors.shape[1] > 1:
        found.append(_split(chains, processors, places, rng))
    return joined(found)


def _repeat(chains: Chains, *counts: int) -> tuple[Chains, list[_Ints]]:
    """Return each chain once for each combination of indices, and the indices, flat."""
    grid = np.indices((len(chains), *counts)).reshape(1 + len(counts), -1)
    return chains[grid[0]], list(grid[1:])


def _shifted(chains: Chains, rng: np.random.Generator, places: int) -> Chains:
    count = int(chains.borders[0, -1])
    new, (which, how) = _repeat(chains, chains.processors.shape[1] - 1, len(STEPS) + places)
    rows, which = np.arange(len(new)), which + 1
    to = np.where(
        how < len(STEPS),
        new.borders[rows, which] + STEPS[np.minimum(how, len(STEPS) - 1)],
        rng.integers(1, max(count, 2), len(new)),
    )
    fits = (new.borders[rows, which] < count) & (to > new.borders[rows, which - 1])
    fits &= to < new.borders[rows, which + 1]
    borders = new.borders.copy()
    borders[rows, which] = to
    return Chains(borders, new.processors)[np.flatnonzero(fits)]


def _moved(chains: Chains, processors: int) -> Chains:
    new, (which, on) = _repeat(chains, chains.processors.shape[1], processors)
    rows = np.arange(len(new))
    fits = (which < new.parts) & (new.processors[rows, which] != on)
    moved = new.processors.copy()
    moved[rows, which] = on
    return Chains(new.borders, moved)[np.flatnonzero(fits)]


def _merged(chains: Chains) -> Chains:
    most = chains.processors.shape[1]
    new, (which, right) = _repeat(chains, most - 1, 2)
    which = which + 1  # this border is removed, with the processor to its right or left
    fits = np.flatnonzero(which < new.parts)
    new, which, right = new[fits], which[fits], right[fits]
    rows = np.arange(len(new))[:, None]
    columns = np.arange(most + 1)
    borders = new.borders[rows, np.minimum(columns + (columns >= which[:, None]), most)]
    columns = columns[:-1]
    processors = new.processors[rows, np.minimum(columns + (columns >= (which - right)[:, None]), most - 1)]
    return Chains(borders, processors)


def _split(chains: Chains, processors: int, places: int, rng: np.random.Generator) -> Chains:
    most, count = chains.processors.shape[1], int(chains.borders[0, -1])
    new, (_, on, right) = _repeat(chains, places, processors, 2)
    at = np.repeat(rng.integers(1, max(count, 2), len(chains) * places), processors * 2)
    fits = np.flatnonzero((new.parts < most) & ~(new.borders == at[:, None]).any(axis=1))
    new, at, on, right = new[fits], at[fits], on[fits], right[fits]
    rows = np.arange(len(new))
    which = (new.borders < at[:, None]).sum(axis=1) - 1  # the stage that is split
    borders = np.sort(np.concatenate((new.borders[:, :-1], at[:, None]), axis=1), axis=1)
    columns = np.arange(most)
    split = new.processors[rows[:, None], columns - (columns > which[:, None])]
    split[rows, np.minimum(which + right, most - 1)] = on
    return Chains(borders, split)


class ChainPricing:
    """Times of chains by the runner's rule: a stage starts when its processor is free and its inputs are there.

    Args:
        graph, platform: of the chains.

    Attributes:
        in_turn: whether every operator reads the one before it, so that stages can only run one after another.
    """

    def __init__(self, graph: Graph, platform: Platform) -> None:
        self._blocked = np.array([[p is q or p.excludes(q) for q in platform.processors] for p in platform.processors])
        self._edges = Edges(graph)
        self.in_turn = self._edges.in_turn

    def latency_s(self, chains: Chains, draws: Draws) -> _Seconds:
        """Return the latency of each chain under each draw, shape ``(S, C)``."""
        inside = draws.operator_s + draws.together_s
        total = np.concatenate((np.zeros((*inside.shape[:2], 1)), inside.cumsum(axis=2)), axis=2)
        parts = int(chains.parts.max())
        rows = np.arange(len(chains))
        ends: list[_Seconds] = []
        free = np.zeros((len(inside), len(chains), len(self._blocked)))
        for j in range(parts):
            first, last, processor = chains.borders[:, j], chains.borders[:, j + 1], chains.processors[:, j]
            there = first < last
            first = np.minimum(first, inside.shape[2] - 1)
            took = total[:, processor, last] - total[:, processor, first] - draws.together_s[:, processor, first]
            took += draws.overhead_s[:, processor]
            if j:
                took += draws.entering_s[:, first, chains.processors[:, j - 1], processor]
            if self.in_turn:
                if j:
                    took += draws.transfer_s[:, first, chains.processors[:, j - 1], processor]
                ends.append(np.where(there, took, 0.0))
                continue
            start = free[:, rows, processor]
            for i in range(j):
                ready = ends[i] + draws.transfer_s[:, first, chains.processors[:, i], processor]
                start = np.where(self._reads(chains, i, j), np.maximum(start, ready), start)
            ends.append(np.where(there, start + took, 0.0))
            busy = self._blocked[processor] & there[:, None]
            free = np.where(busy, ends[-1][:, :, None], free)
        found: _Seconds = sum(ends[1:], ends[0]) if self.in_turn else np.max(ends, axis=0)
        return found

    def _reads(self, chains: Chains, i: int, j: int) -> NDArray[np.bool_]:
        """Return for each chain whether stage ``j`` reads from stage ``i``."""
        first, last = chains.borders[:, i], chains.borders[:, i + 1]
        begin, end = chains.borders[:, j], chains.borders[:, j + 1]
        found: NDArray[np.bool_] = self._edges.between(first, last, begin, end) > 0
        return found
