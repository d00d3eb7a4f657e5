"""Search problems with a known optimum whose truth is not the model: what samplers are compared on.

An instance is a graph, a platform, the space of its chains, what everything truly takes, and a model of it that is
wrong. Its 60 members follow from their number alone (:data:`COUNT`, :func:`instance`): two in three are chains of 22 to
200 operators, the third a graph with branches whose parts may overlap; 2 to 4 processors, some of them alike.

What is true (all times of an instance are scaled to about one second for the whole model on the best processor):

- An operator's time on a processor: its size, times how well the processor suits its kind and its region of the
  network, times a factor of its own.
- Hidden from the model: an operator takes 10 % (sd) more or less where its predecessor in the order is in the same
  part, and up to 25 % more as the first of a part, depending on where the part before it ran.
- A part starts when its processor is free and all parts that it reads have transferred their outputs.

The model knows operators, overheads and transfers, each wrong by 20 % (sd of the logarithm), and no interaction. A
trial returns the time of each part and of each transfer with 3 % of noise.

The optimum of a chain comes from :func:`optimizer.exact.chain.best_chains` on the true costs, into which the
interactions fold without loss. Of a graph with branches all plans are enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.chain import ChainSpace

COUNT = 60
MODEL_ERROR, INTERACTION, NOISE = 0.2, 0.1, 0.03
_KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD")
_LIKES = {2: ("cpu", "gpu"), 3: ("cpu", "gpu", "npu"), -3: ("core", "core", "gpu"), 4: ("core", "core", "gpu", "npu")}
_Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What things truly take, in seconds, by processor in platform order.

    Attributes:
        operator_s, overhead_s, transfer_s: as in :class:`~optimizer.exact.chain.ChainCosts`.
        together_s: shape ``(P, n)``: what an operator takes more where its predecessor in the order is in its part.
        entering_s: shape ``(n, P, P)``: what it takes more as the first of a part, ``[operator, from, to]``.
    """

    operator_s: _Seconds
    overhead_s: _Seconds
    transfer_s: _Seconds
    together_s: _Seconds
    entering_s: _Seconds


@dataclass(frozen=True, eq=False)
class Instance:
    """A search problem: a graph, a space of plans, and their drawn costs.

    Attributes:
        number: which of the :data:`COUNT` it is.
        model: what a sampler may know.
        truth: what it may not.
    """

    number: int
    graph: Graph
    space: ChainSpace
    max_stages: int
    model: ChainCosts
    truth: Truth

    @property
    def is_chain(self) -> bool:
        """Whether parts can only run one after another."""
        return all(self.graph.predecessors(o) == {o - 1} for o in range(1, len(self.graph.operators)))

    def true_s(self, plan: Plan) -> float:
        """Return what a plan takes, without noise."""
        return self._schedule(plan, *self._parts(plan))

    def measure(self, plan: Plan, rng: np.random.Generator) -> tuple[float, tuple[float, ...]]:
        """Return what one trial sees: the latency and the time of each part."""
        stage_s, transfer_s = self._parts(plan)
        noisy = stage_s * np.exp(NOISE * rng.standard_normal(stage_s.shape))
        latency_s = self._schedule(plan, noisy, transfer_s * np.exp(NOISE * rng.standard_normal(transfer_s.shape)))
        return latency_s, tuple(float(s) for s in noisy)

    @cached_property
    def optimum_s(self) -> float:
        """The least that any plan of the space takes."""
        if self.is_chain:
            return best_chains(_folded(self.model.platform, self.truth), self.max_stages)[0].cost_s
        return min(
            float(_all_latencies(self.graph, self.truth, parts).min()) for parts in range(1, self.max_stages + 1)
        )

    def _processors(self, plan: Plan) -> list[int]:
        names = [p.name for p in self.model.platform.processors]
        return [names.index(stage.processor) for stage in plan.stages]

    def _parts(self, plan: Plan) -> tuple[_Seconds, _Seconds]:
        """Return the time of each part, and of the transfer to part ``j`` from part ``i``, ``[i, j]``."""
        truth, processors = self.truth, self._processors(plan)
        stage_s, transfer_s = np.zeros(len(processors)), np.zeros((len(processors), len(processors)))
        for j, (stage, processor) in enumerate(zip(plan.stages, processors, strict=True)):
            first, *rest = stage.operators
            stage_s[j] = truth.overhead_s[processor] + truth.operator_s[processor, list(stage.operators)].sum()
            stage_s[j] += truth.together_s[processor, rest].sum()
            if j:
                stage_s[j] += truth.entering_s[first, processors[j - 1], processor]
            transfer_s[:, j] = truth.transfer_s[first, processors, processor]
        return stage_s, transfer_s

    def _schedule(self, plan: Plan, stage_s: _Seconds, transfer_s: _Seconds) -> float:
        place = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
        ends = np.zeros(len(plan.stages))
        free: dict[int, float] = {}
        for j, (stage, processor) in enumerate(zip(plan.stages, self._processors(plan), strict=True)):
            needs = {place[p] for o in stage.operators for p in self.graph.predecessors(o)} - {j}
            start = max([free.get(processor, 0.0), *(ends[i] + transfer_s[i, j] for i in needs)])
            ends[j] = free[processor] = start + stage_s[j]
        return float(ends.max())


def instance(number: int) -> Instance:
    """Return instance ``number`` of 0 … ``COUNT - 1``."""
    rng = np.random.default_rng([2026, number])
    branches = number % 3 == 2
    processors = 2 + (number // 3) % 3
    likes = _LIKES[-3 if processors == 3 and number % 2 else processors]
    platform = Platform(f"p{number}", tuple(Processor(f"{like}{i}", "cpu", {}, like) for i, like in enumerate(likes)))
    # Where all plans are enumerated, they must not be more than a few million.
    count = int(np.exp(rng.uniform(np.log(22), np.log(200))))
    few = 4 if count**3 / 6 * processors**4 < 3e6 else 3
    parts = few if branches else int(rng.integers(4, 9))
    graph = _branching(count, rng) if branches else _chain(count, rng)
    truth = _truth(graph, likes, rng)
    kinds = list(dict.fromkeys(likes))
    kind = [kinds.index(like) for like in likes]
    pairs = np.ix_(kind, kind)

    def wrong(size: tuple[int, ...]) -> _Seconds:
        return np.exp(MODEL_ERROR * rng.standard_normal(size))

    nodes = len(graph.operators)
    model = ChainCosts(
        platform,
        truth.operator_s * wrong((len(kinds), nodes))[kind],
        truth.overhead_s * wrong((len(kinds),))[kind],
        truth.transfer_s * wrong((nodes, len(kinds), len(kinds)))[:, pairs[0], pairs[1]],
    )
    return Instance(number, graph, ChainSpace(graph, platform, parts), parts, model, truth)


def _truth(graph: Graph, processors: Sequence[str], rng: np.random.Generator) -> Truth:
    likes = list(dict.fromkeys(processors))
    of = [likes.index(like) for like in processors]
    count = len(graph.operators)
    kinds = [_KINDS.index(o.kind) for o in graph.operators]
    size = np.exp(rng.standard_normal(count))
    suits = np.exp(0.5 * rng.standard_normal((len(likes), len(_KINDS))))
    regions = 0.4 * np.array([_drift(count, rng) for _ in likes])
    operator_s = size * suits[:, kinds] * np.exp(regions + 0.3 * rng.standard_normal((len(likes), count)))
    operator_s *= np.exp(0.1 * rng.standard_normal((len(likes), 1))) / operator_s.sum(axis=1, keepdims=True)
    operator_s /= operator_s.sum(axis=1).min()
    nbytes = np.exp(0.5 * rng.standard_normal(count))
    link = np.exp(0.3 * rng.standard_normal((len(likes), len(likes))))
    apart = 0.004 + 0.008 * nbytes[:, None, None] * link
    same = np.array([[i == j for j in range(len(processors))] for i in range(len(processors))])
    entering = rng.uniform(0.0, 0.25, (count, len(likes), len(likes))) * operator_s.T[:, None, :]
    together = INTERACTION * rng.standard_normal((len(likes), count)) * operator_s
    together[:, 0] = 0.0
    pairs = np.ix_(of, of)
    return Truth(
        operator_s[of],
        rng.uniform(0.002, 0.008, len(likes))[of],
        np.where(same, 0.0005, apart[:, pairs[0], pairs[1]]),
        together[of],
        entering[:, pairs[0], pairs[1]],
    )


def _drift(count: int, rng: np.random.Generator) -> _Seconds:
    """Return a stationary random walk of variance 1 that forgets where it was within a quarter of the way."""
    keep = float(np.exp(-4.0 / count))
    steps, found = rng.standard_normal(count), np.zeros(count)
    found[0] = steps[0]
    for i in range(1, count):
        found[i] = keep * found[i - 1] + np.sqrt(1.0 - keep**2) * steps[i]
    return found


def _folded(platform: Platform, truth: Truth) -> ChainCosts:
    """Return costs in which the interactions are part of operators and transfers: a part's first has none before."""
    return ChainCosts(
        platform,
        truth.operator_s + truth.together_s,
        truth.overhead_s,
        truth.transfer_s + truth.entering_s - truth.together_s.T[:, None, :],
    )


def _all_latencies(graph: Graph, truth: Truth, parts: int) -> _Seconds:
    """Return the time of every plan of ``parts`` parts, alike processors distinguished: ``(names^parts, cuts)``."""
    processors, count = truth.operator_s.shape
    edges = np.zeros((count + 1, count + 1), dtype=np.int64)
    for operator in range(count):
        for before in graph.predecessors(operator):
            edges[before + 1, operator + 1] += 1
    edges = edges.cumsum(axis=0).cumsum(axis=1)
    cuts = list(combinations(range(1, count), parts - 1))
    inner = np.array(cuts, dtype=np.int64).reshape(len(cuts), parts - 1)
    borders = np.concatenate((np.zeros((len(inner), 1), np.int64), inner, np.full((len(inner), 1), count)), axis=1)
    firsts, lasts = borders[:, :-1].T, borders[:, 1:].T
    reads = {
        (i, j): edges[lasts[i], lasts[j]]
        - edges[firsts[i], lasts[j]]
        - edges[lasts[i], firsts[j]]
        + edges[firsts[i], firsts[j]]
        > 0
        for i in range(parts)
        for j in range(i + 1, parts)
    }
    plain = np.concatenate((np.zeros((processors, 1)), (truth.operator_s + truth.together_s).cumsum(axis=1)), axis=1)
    found = []
    for word in product(range(processors), repeat=parts):
        ends: list[_Seconds] = []
        free = {processor: np.zeros(len(inner)) for processor in word}
        for j, processor in enumerate(word):
            took = plain[processor][lasts[j]] - plain[processor][firsts[j]] - truth.together_s[processor][firsts[j]]
            took = (
                took + truth.overhead_s[processor] + (truth.entering_s[firsts[j], word[j - 1], processor] if j else 0.0)
            )
            start = free[processor]
            for i in range(j):
                ready = ends[i] + truth.transfer_s[firsts[j], word[i], processor]
                start = np.where(reads[i, j], np.maximum(start, ready), start)
            ends.append(start + took)
            free[processor] = ends[-1]
        found.append(np.max(ends, axis=0))
    return np.array(found)


def _chain(count: int, rng: np.random.Generator) -> Graph:
    return _graph([[i - 1] for i in range(count)], rng)


def _branching(count: int, rng: np.random.Generator) -> Graph:
    """Return about ``count`` operators: a trunk on which groups of two or three branches open and close."""
    reads: list[list[int]] = [[-1]]
    while len(reads) < count:
        reads += [[len(reads) - 1 + i] for i in range(int(rng.integers(1, 4)))]
        fork, ends = len(reads) - 1, []
        for _ in range(int(rng.integers(2, 4))):
            before = fork
            for _ in range(int(rng.integers(2, 7))):
                reads.append([before])
                before = len(reads) - 1
            ends.append(before)
        reads.append(ends)
    return _graph(reads, rng)


def _graph(reads: list[list[int]], rng: np.random.Generator) -> Graph:
    tensors = tuple(Tensor(f"t{i}", (1, 16), "float32", 64) for i in range(len(reads) + 1))
    kinds = rng.integers(0, len(_KINDS), len(reads))
    operators = tuple(
        Operator(_KINDS[kind], tuple(b + 1 for b in before), (i + 1,))
        for i, (kind, before) in enumerate(zip(kinds, reads, strict=True))
    )
    return Graph("instance", tensors, operators, (0,), (len(reads),))
