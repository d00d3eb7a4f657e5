"""Candidates of the search: optima of draws of the costs, and neighbours of the best known plans.

A region holds the measured plans; ``look`` returns plans without a measurement, with their times under each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.plans import all_chains
from optimizer.samplers.chains import ChainPricing, Chains, distinct, from_plan, joined, neighbours
from optimizer.samplers.draws import Draws, cheapest_chains
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import ChainSpace

_Seconds = NDArray[np.float64]

TOPS, WIDTH, PLACES, POOL = 4, 8, 6, 256
GENERATIONS, DRAWS_FOLLOWED = 6, 2
STARTS_AT_FIRST, STARTS = 4096, 512
MOST_LISTED = 8192  # chains; pricing them takes about 20 ms


@dataclass(frozen=True, slots=True)
class Found:
    """Plans without a measurement, and their times.

    Attributes:
        latency_s: shape ``(S, C)``, under each draw.
        best_s: shape ``(S,)``: of the measured plan with the best mean; None where nothing was measured.
        plan: returns plan ``c``, canonical.
        names: of the plans, as returned by ``name`` of a region.
    """

    latency_s: _Seconds
    best_s: _Seconds | None
    plan: Callable[[int], Plan]
    names: list[bytes]


class ChainRegion:
    """Chains of stages, many at a time.

    Where stages can only run one after another, dynamic programming gives the best plan under each draw. Where stages
    may overlap, that plan is a start; others are random chains with cuts where branches begin and end, and a beam
    search continues from the best of them. A wide search covers all chains of a small space, or uses the beam search.
    """

    def __init__(self, graph: Graph, platform: Platform, space: ChainSpace) -> None:
        self._graph, self._platform, self._most = graph, platform, space.max_stages
        self._small = space.cardinality() <= MOST_LISTED
        self._count, self._processors = len(graph.operators), len(platform.processors)
        self._pricing = ChainPricing(graph, platform)
        self._places = np.array(
            [o for o in range(1, self._count) if graph.predecessors(o) != {o - 1} or _forks(graph, o - 1)],
            dtype=np.int64,
        )
        self._added: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._names: set[bytes] = set()

    def name(self, plan: Plan) -> bytes | None:
        """Return a key that identifies a plan, or None for one outside of the region."""
        if not plan.is_chain or len(plan.stages) > self._most:
            return None
        return self._chains([from_plan(plan, self._platform)]).names()[0]

    def add(self, plan: Plan) -> None:
        """Add a plan of the region that was tried."""
        self._added.append(from_plan(plan, self._platform))
        self._names.update(self._chains(self._added[-1:]).names())

    def price(self, draws: Draws, which: Sequence[int]) -> _Seconds:
        """Return the times (s) of plans that were added under each draw, shape ``(S, len(which))``."""
        return self._pricing.latency_s(self._chains([self._added[i] for i in which]), draws)

    def look(self, draws: Draws, measured: Sequence[int], rng: np.random.Generator, *, wide: bool = False) -> Found:
        """Return plans that were not tried.

        Args:
            measured: positions (in order of ``add``) of the plans with a measurement.
            wide: search farther than usual, because all plans near the best ones are known.
        """
        mean, best_s = draws.only(0, 1), None
        best = cheapest_chains(mean, self._most)
        # Few draws have optima with more than twice the stages of the mean's, and time grows with the stages.
        most = min(self._most, 2 * len(best[0][1]) + 4)
        optima = self._chains(best + (cheapest_chains(draws.only(1, len(draws)), most) if len(draws) > 1 else []))
        starts = optima
        if measured:
            order = np.argsort(self.price(mean, measured)[0], kind="stable")
            tops = [measured[i] for i in order[:TOPS]]
            starts = starts + self._chains([self._added[i] for i in tops])
            best_s = self.price(draws, tops[:1])[:, 0]
        if wide and self._small:
            found = self._all()
        elif self._pricing.in_turn:
            found = starts + self._climb(starts, mean, GENERATIONS if wide else 1, rng)
        else:
            starts = starts + self._cut_at_branches(STARTS if measured else STARTS_AT_FIRST, rng)
            hopeful = np.argsort(self._pricing.latency_s(starts, draws).min(axis=0), kind="stable")[: 4 * WIDTH]
            found = optima + starts[hopeful] + self._climb(starts, mean, GENERATIONS, rng)
            for draw in range(1, min(1 + DRAWS_FOLLOWED, len(draws))):
                one = draws.only(draw, draw + 1)
                found = found + self._best(self._climb(starts, one, GENERATIONS, rng), one, WIDTH)
        found = distinct(found, self._platform)
        found = found[np.array([i for i, n in enumerate(found.names()) if n not in self._names], dtype=np.int64)]
        if len(found) > POOL:
            latency_s = self._pricing.latency_s(found, draws)
            likely = [np.argsort(s, kind="stable")[:POOL] for s in (latency_s[0], latency_s.min(axis=0))]
            found = found[np.unique(np.concatenate(likely))]
        latency_s = self._pricing.latency_s(found, draws) if len(found) else np.empty((len(draws), 0))
        return Found(latency_s, best_s, lambda c: self._plan(found, c), found.names())

    def _all(self) -> Chains:
        found = []
        for cuts, processors in all_chains(self._count, self._platform, self._most):
            size, parts = processors.shape
            chains = self._chains([((), ())] * size)
            chains.borders[:, 1:parts], chains.processors[:, :parts] = cuts, processors
            found.append(chains)
        return joined(found)

    def _chains(self, chains: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Chains:
        return Chains.of(chains, self._count, self._most)

    def _plan(self, chains: Chains, row: int) -> Plan:
        return Plan(self._graph.digest, chains.stages(row, self._platform))

    def _best(self, chains: Chains, draws: Draws, count: int) -> Chains:
        return chains[np.argsort(self._pricing.latency_s(chains, draws)[0], kind="stable")[:count]]

    def _climb(self, starts: Chains, draw: Draws, generations: int, rng: np.random.Generator) -> Chains:
        """Return all chains that a beam search visits under one draw."""
        last = starts
        met = []
        for _ in range(generations):
            top = self._best(last, draw, WIDTH)
            last = distinct(top + neighbours(top, self._processors, PLACES, rng), self._platform)
            met.append(last)
        return joined(met)

    def _cut_at_branches(self, count: int, rng: np.random.Generator) -> Chains:
        """Return random chains whose cuts lie where branches begin or end."""
        parts = rng.integers(1, self._most + 1, count)
        cuts = np.sort(rng.choice(self._places, (count, self._most - 1)), axis=1)
        keep = np.arange(self._most - 1) < parts[:, None] - 1
        keep[:, 1:] &= cuts[:, 1:] > cuts[:, :-1]
        cuts = np.sort(np.where(keep, cuts, self._count), axis=1)
        ends = np.full((count, 1), self._count)
        borders = np.concatenate((np.zeros((count, 1), dtype=np.int64), cuts, ends), axis=1)
        return distinct(Chains(borders, rng.integers(0, self._processors, (count, self._most))), self._platform)


def _forks(graph: Graph, operator: int) -> bool:
    return sum(len(graph.consumers.get(t, ())) for t in graph.operators[operator].outputs) > 1
