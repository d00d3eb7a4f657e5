"""Many chain plans at once: the simulator's law for consecutive parts, vectorised over plans.

A part's time is looked up in a table over lane, first operator and operator after the last; what passes between parts
comes from sums over the rectangle (writers of the one, readers of the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.plans import PlanSimulator, readers_of_merged
from evaluators.cost_model.profile import COLD_BYTES
from evaluators.tabulated import PartCosts
from search_spaces.chain import chain_plan
from search_spaces.cuts import cut_points
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

Whole = NDArray[np.int64]
Seconds = NDArray[np.float64]

_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """N plans of K parts each.

    Attributes:
        cuts: the operators before which to cut, ascending, shape ``(N, K-1)``.
        lanes: the lane of each part as its index in the platform, shape ``(N, K)``.
    """

    cuts: Whole
    lanes: Whole

    def __len__(self) -> int:
        return len(self.lanes)

    def plan(self, index: int, graph: Graph, platform: Platform) -> Plan:
        """Return one of them as a plan."""
        names = [platform.processors[lane].name for lane in self.lanes[index]]
        return chain_plan(graph, [int(c) for c in self.cuts[index]], names)


def all_chains(operators: int, platform: Platform, max_stages: int) -> Iterator[Chains]:
    """Yield every canonical chain plan of 1, 2, … ``max_stages`` parts, one batch a number of parts.

    Of lanes that are alike only those are named that come first, as in :func:`search_spaces.plan.canonical`.
    """
    for parts in range(1, min(max_stages, operators) + 1):
        words = np.array(list(lane_words(platform, parts)), np.int64).reshape(-1, parts)
        chosen = list(combinations(range(1, operators), parts - 1))
        cuts = np.array(chosen, np.int64).reshape(len(chosen), parts - 1)
        yield Chains(np.repeat(cuts, len(words), axis=0), np.tile(words, (len(cuts), 1)))


def lane_words(platform: Platform, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the lanes of each canonical chain of so many parts; alike ones appear in the order of first use."""
    index = {p.name: i for i, p in enumerate(platform.processors)}
    groups = [tuple(index[p.name] for p in members) for members in platform.classes().values()]
    place = {lane: (which, rank) for which, group in enumerate(groups) for rank, lane in enumerate(group)}
    for word in product(range(len(index)), repeat=parts):
        used = [0] * len(groups)
        for lane in word:
            which, rank = place[lane]
            if rank > used[which]:
                break
            used[which] = max(used[which], rank + 1)
        else:
            yield word


class ChainSimulator:
    """Latencies of chain plans in batches; equal to :class:`PlanSimulator` plan by plan.

    Where two parts of a chain run at once and slow each other, the plan is simulated on its own.
    """

    def __init__(self, simulator: PlanSimulator) -> None:
        self._one = simulator
        graph, prices = simulator.graph, simulator.prices
        self._count = len(graph.operators)
        self._part_s = _part_table(simulator)
        edges = np.zeros((self._count + 1, self._count + 1))
        arcs = np.zeros((self._count + 1, self._count + 1))
        cold = np.zeros((self._count + 1, self._count + 1))
        self._later: list[tuple[int, tuple[int, ...], int, int]] = []
        for tensor, writer in graph.producer.items():
            readers, nbytes = graph.consumers.get(tensor, ()), graph.tensors[tensor].nbytes
            if readers:
                edges[writer + 1, readers[0] + 1] += nbytes
                cold[writer + 1, readers[0] + 1] += _cold(nbytes)
            for number, reader in enumerate(readers):
                arcs[writer + 1, reader + 1] += 1
                if number:
                    self._later.append((writer, readers[:number], reader, nbytes))
        self._bytes = edges.cumsum(axis=0).cumsum(axis=1)
        self._arcs = arcs.cumsum(axis=0).cumsum(axis=1)
        self._colds = cold.cumsum(axis=0).cumsum(axis=1)
        self._latency, self._byte = prices.latency_s, prices.byte_s
        self._cold, self._asleep = prices.cold_s, prices.asleep_s
        lanes = len(simulator.platform.processors)
        self._excluded = np.eye(lanes, dtype=bool)
        for lane, others in enumerate(simulator.law.excluded):
            self._excluded[lane, list(others)] = True
        slow = (prices.slow_compute > 1.0) | (prices.slow_memory > 1.0)
        self._crowded = slow | slow.T
        self._slots = max(simulator.law.slots)

    def latency_s(self, chains: Chains) -> Seconds:
        """Return the latency of each plan, shape ``(N,)``; infinite where a lane does not take an operator."""
        found = np.empty(len(chains))
        for first in range(0, len(chains), _CHUNK):
            rows = slice(first, first + _CHUNK)
            found[rows] = self._chunk(chains.cuts[rows], chains.lanes[rows])
        return found

    def _chunk(self, cuts: Whole, lanes: Whole) -> Seconds:
        plans, parts = lanes.shape
        edge = np.zeros((plans, 1), np.int64)
        borders = np.hstack([edge, cuts, edge + self._count])
        if self._slots > 1:
            return self._one_by_one(cuts, lanes, np.arange(plans), np.empty(plans))
        extra = self._extra(cuts, lanes)
        ends = np.zeros((parts, plans))
        starts = np.zeros((parts, plans))
        for k in range(parts):
            here, a, b = lanes[:, k], borders[:, k], borders[:, k + 1]
            work = self._part_s[here, a, b].copy()
            start = np.zeros(plans)
            asleep = self._sleeping(lanes, k)
            for j in range(k):
                there, c, d = lanes[:, j], borders[:, j], borders[:, j + 1]
                reads = _rectangle(self._arcs, c, d, a, b) > 0
                other = there != here
                nbytes = _rectangle(self._bytes, c, d, a, b)
                if extra is not None:
                    nbytes = nbytes + extra[0][j][k]
                handed_s = nbytes * self._byte[there, here]
                if self._cold is not None:
                    colds = _rectangle(self._colds, c, d, a, b) + (extra[1][j][k] if extra is not None else 0.0)
                    handed_s = handed_s + colds * self._cold[there, here]
                work += np.where(other, handed_s, 0.0)
                turn = self._excluded[there, here]
                latency_s = self._latency[there, here]
                if self._asleep is not None:
                    latency_s = np.where(asleep | (turn & ~reads), self._asleep[there, here], latency_s)
                    late = ends[j] + np.where((reads | turn) & other, latency_s, 0.0)
                else:
                    late = ends[j] + np.where(reads & other, latency_s, 0.0)
                start = np.maximum(start, np.where(reads | turn, late, 0.0))
            starts[k], ends[k] = start, start + work
        found: Seconds = ends.max(axis=0) - starts.min(axis=0)
        if self._crowded.any():
            found = self._one_by_one(cuts, lanes, self._overlapping(starts, ends, lanes), found)
        return found

    def _sleeping(self, lanes: Whole, part: int) -> NDArray[np.bool_]:
        """Return in which plans the lane of a part sleeps before it: others needed its cores since its part before."""
        found = np.zeros(len(lanes), bool)
        if self._asleep is not None:
            here = lanes[:, part]
            for j in range(part):
                there = lanes[:, j]
                found = (found | self._excluded[there, here]) & (there != here)
        return found

    def _extra(self, cuts: Whole, lanes: Whole) -> tuple[list[list[Seconds]], list[list[Seconds]]] | None:
        """Return what parts read of tensors that another part reads first: bytes, and what of them is cold."""
        if not self._later:
            return None
        plans, parts = lanes.shape
        found = [[np.zeros(plans) for _ in range(parts)] for _ in range(parts)]
        colds = [[np.zeros(plans) for _ in range(parts)] for _ in range(parts)]
        rows = np.arange(plans)
        stage = {
            o: (cuts <= o).sum(axis=1) for entry in self._later for o in (entry[0], *entry[1], entry[2])
        }  # operator → its part in each plan
        for writer, earlier, reader, nbytes in self._later:
            source, target = stage[writer], stage[reader]
            lane = lanes[rows, target]
            copies = lanes[rows, source] != lane
            for before in earlier:
                copies &= lanes[rows, stage[before]] != lane
            if copies.any():
                for j, k in combinations(range(parts), 2):
                    where = copies & (source == j) & (target == k)
                    found[j][k] += np.where(where, float(nbytes), 0.0)
                    colds[j][k] += np.where(where, _cold(nbytes), 0.0)
        return found, colds

    def _overlapping(self, starts: Seconds, ends: Seconds, lanes: Whole) -> NDArray[np.intp]:
        """Return the plans in which two parts that slow each other run at once."""
        both = np.zeros(lanes.shape[0], bool)
        for j, k in combinations(range(lanes.shape[1]), 2):
            at_once = (starts[k] < ends[j]) & (starts[j] < ends[k])
            both |= at_once & self._crowded[lanes[:, j], lanes[:, k]]
        return np.flatnonzero(both)

    def _one_by_one(self, cuts: Whole, lanes: Whole, rows: NDArray[np.intp], found: Seconds) -> Seconds:
        chains = Chains(cuts, lanes)
        for row in rows:
            plan = chains.plan(int(row), self._one.graph, self._one.platform)
            borders = [0, *cuts[row], self._count]
            refused = any(
                not np.isfinite(self._part_s[lane, a, b])
                for lane, (a, b) in zip(lanes[row], pairwise(borders), strict=True)
            )
            found[row] = np.inf if refused else self._one.latency_s(plan)
        return found


def _cold(nbytes: int) -> float:
    return min(1.0, nbytes / COLD_BYTES)


def _rectangle(sums: Seconds, c: Whole, d: Whole, a: Whole, b: Whole) -> Seconds:
    """Return sums over writers ``c … d-1`` and readers ``a … b-1``, from a table of running sums."""
    found: Seconds = sums[d, b] - sums[c, b] - sums[d, a] + sums[c, a]
    return found


def _part_table(simulator: PlanSimulator) -> Seconds:
    """Return what operators ``first … last-1`` take as one part on a lane, ``[P, first, last]``, transfers apart."""
    p = simulator.prices
    return _operators_s(simulator) + p.invocation_s[:, None, None] + _beyond_s(simulator)


def _operators_s(simulator: PlanSimulator) -> Seconds:
    """Return what operators ``first … last-1`` take together, ``[P, first, last]``; infinite where there are none."""
    lanes, count = simulator.prices.operator_s.shape
    inside = np.triu(np.ones((count, count), bool))
    table = np.full((lanes, count + 1, count + 1), np.inf)
    sums = np.cumsum(np.where(inside, simulator.prices.operator_s[:, None, :], 0.0), axis=2)
    table[:, :-1, 1:] = np.where(inside, sums, np.inf)
    return table


def _beyond_s(simulator: PlanSimulator) -> Seconds:
    """Return what operators ``first … last-1`` as one part take beside operators and invocation, ``[P, first, last]``.

    It is 0 where a lane does not take some of them.
    """
    p = simulator.prices
    operators_s = _operators_s(simulator)
    finite = np.isfinite(operators_s)
    found = np.zeros_like(operators_s)
    if p.capacity_bytes.any():
        over = np.maximum(0.0, _weight_bytes(simulator.graph)[None] - p.capacity_bytes[:, None, None])
        share = np.where(p.capacity_bytes > 0, p.pressure_per_byte, 0.0)[:, None, None] * over
        found += np.where(finite, operators_s, 0.0) * share
    if p.io_s_per_byte.any():
        found += np.where(finite, p.io_s_per_byte[:, None, None] * _border_bytes(simulator.graph), 0.0)
    for merged, reader in readers_of_merged(simulator.graph, p).items():
        if p.alone_s is not None:  # parts that hold it without its reader
            found[:, : merged + 1, merged + 1 : reader + 1] += p.alone_s[:, merged, None, None]
    return found


def part_costs(simulator: PlanSimulator) -> PartCosts:
    """Return what consecutive parts cost; what tensors that skip a part cost is not in the least hand-overs.

    Surely handed over, whichever parts lie beside a cut, is what the operator after it reads of the one before it.
    """
    graph, p = simulator.graph, simulator.prices
    lanes, count = p.operator_s.shape
    crossing, sure, colds = np.zeros((count, 1, 1)), np.zeros((count, 1, 1)), np.zeros((count, 1, 1))
    for point in cut_points(graph):
        after = set(graph.operators[point.position].inputs)
        for tensor in point.tensors:
            nbytes, writer = graph.tensors[tensor].nbytes, graph.producer.get(tensor)
            crossing[point.position] += nbytes if writer is not None else 0
            colds[point.position] += _cold(nbytes) if writer is not None else 0
            sure[point.position] += nbytes if writer == point.position - 1 and tensor in after else 0
    apart = 1.0 - np.eye(lanes)
    cold_s = 0.0 if p.cold_s is None else colds * p.cold_s
    return PartCosts(
        operator_s=p.operator_s,
        overhead_s=p.invocation_s,
        beyond_s=_beyond_s(simulator),
        hand_over_s=apart * ((crossing > 0) * p.latency_s + crossing * p.byte_s + cold_s),
        least_hand_over_s=apart * (p.latency_s + sure * p.byte_s),
    )


def _border_bytes(graph: Graph) -> Seconds:
    """Return the bytes that cross the border of operators ``first … last-1``, ``[first, last]``."""
    count = len(graph.operators)
    steps = np.zeros((count + 2, count + 2))

    def add(rows: range, columns: range, nbytes: int) -> None:
        if len(rows) and len(columns):
            steps[rows.start, columns.start] += nbytes
            steps[rows.stop, columns.start] -= nbytes
            steps[rows.start, columns.stop] -= nbytes
            steps[rows.stop, columns.stop] += nbytes

    for tensor in graph.activation_tensors:
        nbytes, readers = graph.tensors[tensor].nbytes, graph.consumers.get(tensor, ())
        writer = graph.producer.get(tensor, -1)
        # Read by a part that begins after the writer and holds a reader: the next one from its first operator on.
        for before, reader in pairwise((writer, *readers)):
            add(range(before + 1, reader + 1), range(reader + 1, count + 1), nbytes)
        if writer >= 0 and (readers or tensor in graph.outputs):
            end = count + 1 if tensor in graph.outputs else readers[-1] + 1
            add(range(writer + 1), range(writer + 1, end), nbytes)
    found: Seconds = steps.cumsum(axis=0).cumsum(axis=1)[: count + 1, : count + 1]
    return found


def _weight_bytes(graph: Graph) -> Seconds:
    """Return the bytes of constants that operators ``first … last-1`` read, each once, ``[first, last]``."""
    count = len(graph.operators)
    steps = np.zeros((count + 2, count + 2))
    readers: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for tensor in {t for t in operator.inputs if t != -1 and graph.tensors[t].constant}:
            readers.setdefault(tensor, []).append(index)
    for tensor, at in readers.items():
        nbytes = graph.tensors[tensor].nbytes
        for before, reader in pairwise((-1, *at)):
            # Parts that begin after the reader before and hold this one.
            steps[before + 1, reader + 1] += nbytes
            steps[reader + 1, reader + 1] -= nbytes
    found: Seconds = steps.cumsum(axis=0).cumsum(axis=1)[: count + 1, : count + 1]
    return found
