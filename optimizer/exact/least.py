"""The fastest chain of a space by a session that computes its latencies, with a proof on the session's own tables.

Where each stage reads from the one before it, stages run one after another and the additive model of
:mod:`optimizer.exact.chain` with the least transfers is a bound; its plans are priced by the session in ascending
order until the bound passes the best price. The remaining plans have neighbouring stages that do not depend on each
other and may overlap. In most networks few triples of borders allow that, and all of them are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from operator import itemgetter

import numpy as np

from evaluators.base import PartCosts
from evaluators.cost_model.plans import processor_words
from optimizer.exact.bound import relax
from optimizer.exact.chain import chains_in_order
from optimizer.exact.chain_costs import ChainCosts, ChainObjective, CostedChain, Seconds
from optimizer.exact.chain_tables import Edges, part_costs
from optimizer.exact.solution import Solution
from search_spaces.core.errors import InfeasibleError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan

_MOST_PRICED = 400  # plans, with and without overlap each
_MOST_WEIGHED = 100  # plans of other objectives
_MOST_CUTS = 20_000  # ways to cut so that some stages may overlap
_MOST_LOOKED = 50_000  # choices of processors for them
_MOST_PARTS = 6  # stages of an overlapping plan for which all processors are tried
_HAIR = 1e-12

Price = Callable[[Plan], float]


def chain_costs(platform: Platform, tables: PartCosts, *, least: bool = False) -> ChainCosts:
    """Return a session's tables as an additive model.

    Args:
        least: with the least transfers, for a bound, instead of the usual ones.
    """
    return ChainCosts(
        platform,
        tables.operator_s,
        tables.overhead_s,
        tables.least_transfer_s if least else tables.transfer_s,
        tables.operator_nbytes,
        tables.memory_bytes,
        tables.beyond_s,
    )


def least_chain(
    graph: Graph, costs: ChainCosts, price: Price, max_stages: int, *, min_stages: int = 1, looks: float = math.inf
) -> Solution[Plan]:
    """Return the fastest chain of ``min_stages`` to ``max_stages`` stages, with a bound on all of them.

    Args:
        costs: with the least transfers.
        price: the session's seconds of a plan; infinite if the plan is not supported.
        looks: choices of processors to try for overlapping chains; the bound is lower if there are more.

    Raises:
        InfeasibleError: no chain fits.
    """
    chains = chains_in_order(costs, max_stages, _MOST_PRICED, min_stages=min_stages)
    best, bound_s = cheapest(_plans(graph, chains), price, _MOST_PRICED)
    if best is None or math.isinf(best[0]):
        raise InfeasibleError(f"no chain of at most {max_stages} stages runs on {costs.platform.name!r}")
    found, left_s = _Overlapping(graph, costs, price).best(min_stages, max_stages, best[0], looks)
    best = found or best
    return Solution(best[1], best[0], min(best[0], bound_s, left_s))


def least_plan(
    graph: Graph, costs: ChainCosts, price: Price, max_stages: int, objective: ChainObjective, stop_s: float
) -> Solution[Plan]:
    """Return the plan that an evaluator prices lowest; plans are priced in ascending order of their bounds.

    The whole graph on each processor is priced first, as the answer if time is up before the first chain is found.

    Args:
        costs: a bound on the evaluator's cost, by ``objective``: ``latency`` for a sum over the stages.
        price: the evaluator's cost of a plan; infinite if the plan is not supported.
        stop_s: the monotonic time at which to return the best plan that is known.

    Raises:
        InfeasibleError: no chain fits.
    """
    wholes = [chain_plan(graph, (), [processor.name]) for processor in costs.platform.processors]
    first = min(((price(plan), plan) for plan in wholes), key=itemgetter(0))
    chains = chains_in_order(costs, max_stages, _MOST_WEIGHED, objective=objective, stop_s=stop_s)
    best, bound = cheapest(_plans(graph, chains), price, _MOST_WEIGHED, first)
    if best is None or math.isinf(best[0]):
        raise InfeasibleError(f"no chain of at most {max_stages} stages runs on {costs.platform.name!r}")
    return Solution(best[1], best[0], min(best[0], bound))


def cheapest(
    ordered: Iterable[tuple[float, Plan]], price: Price, most: int, best: tuple[float, Plan] | None = None
) -> tuple[tuple[float, Plan] | None, float]:
    """Price plans until the bound of the next one reaches the best price.

    Args:
        ordered: plans with lower bounds of their prices, ascending; where it ends with UnavailableError, time is up.
        most: of so many plans, others may come behind the last one.
        best: a price and its plan that are known already.

    Returns:
        The least price with its plan, and a lower bound of the prices of all plans.
    """
    bound, taken = 0.0, 0
    try:
        for taken, (least, plan) in enumerate(ordered, 1):  # noqa: B007 - counts for what is returned
            if best is not None and least >= best[0] * (1 - _HAIR):
                return best, best[0]
            bound, value = least, price(plan)
            if best is None or value < best[0]:
                best = value, plan
    except UnavailableError:
        taken = most
    return best, bound if taken == most or best is None else best[0]


def _plans(graph: Graph, chains: Iterable[CostedChain]) -> Iterator[tuple[float, Plan]]:
    return ((chain.cost_s, chain.plan(graph)) for chain in chains)


class _Overlapping:
    """Chains in which two neighbouring stages do not depend on each other."""

    def __init__(self, graph: Graph, costs: ChainCosts, price: Price) -> None:
        self._graph, self._costs, self._price = graph, costs, price
        self._count = len(graph.operators)
        table = part_costs(costs)
        self._part_s: list[list[list[float]]] = table.tolist()
        self._least_s: Seconds = table.min(axis=0)
        self._edges = Edges(graph)
        self._transfer_s: list[list[float]] = costs.transfer_s[1:].min(axis=0, initial=np.inf).tolist()
        processors = costs.platform.processors
        self._turns = [
            [j for j, q in enumerate(processors) if (i == j and p.slots == 1) or p.excludes(q)]
            for i, p in enumerate(processors)
        ]

    def best(
        self, min_stages: int, max_stages: int, known_s: float, looks: float
    ) -> tuple[tuple[float, Plan] | None, float]:
        """Return the fastest chain that beats ``known_s``, or None, and a lower bound of those that were not priced."""
        best: tuple[float, Plan] | None = None
        priced = looked = 0
        seen: set[tuple[int, ...]] = set()
        for number, cuts in enumerate(self._cuts(min_stages, max_stages)):
            if number >= _MOST_CUTS or len(cuts) >= _MOST_PARTS:
                return best, relax(self._graph, self._costs).latency_s
            if cuts in seen or self._bound_s(cuts) >= known_s:
                continue
            seen.add(cuts)
            for word in processor_words(self._costs.platform, len(cuts) + 1):
                looked += 1
                if looked > looks:
                    return best, relax(self._graph, self._costs).latency_s
                if self._bound_s(cuts, word) >= known_s:
                    continue
                if priced >= _MOST_PRICED or looked >= _MOST_LOOKED:
                    return best, relax(self._graph, self._costs).latency_s
                priced += 1
                names = [self._costs.platform.processors[processor].name for processor in word]
                plan = chain_plan(self._graph, cuts, names)
                found_s = self._price(plan)
                if found_s < known_s:
                    known_s, best = found_s, (found_s, plan)
        return best, math.inf

    def _cuts(self, min_stages: int, max_stages: int) -> Iterator[tuple[int, ...]]:
        """Yield cuts that leave two neighbouring stages independent; some come more than once."""
        for first, middle, last in self._triples():
            own = {first, middle, last} - {0, self._count}
            others = [c for c in range(1, self._count) if c < first or c > last]
            for more in range(max(0, min_stages - 1 - len(own)), max_stages - len(own)):
                for extra in combinations(others, more):
                    yield tuple(sorted((*own, *extra)))

    def _triples(self) -> Iterator[tuple[int, int, int]]:
        """Yield the borders of two neighbouring stages of which the second reads nothing from the first."""
        for middle in range(1, self._count):
            for first in range(middle - 1, -1, -1):
                if self._edges.between(first, middle, middle, middle + 1):
                    break
                for last in range(middle + 1, self._count + 1):
                    if self._edges.between(first, middle, middle, last):
                        break
                    yield first, middle, last

    def _bound_s(self, cuts: tuple[int, ...], word: tuple[int, ...] | None = None) -> float:
        """Return a lower bound of a plan: each stage after those that it reads, and after those of its processor.

        Args:
            word: the processor of each stage; None for each stage on its fastest one, and no processor is ever busy.
        """
        parts = list(pairwise((0, *cuts, self._count)))
        ends: list[float] = []
        free: dict[int, float] = {}
        for index, (c, d) in enumerate(parts):
            start = 0.0
            for before, (a, b) in enumerate(parts[:index]):
                if self._edges.between(a, b, c, d):
                    transfer_s = self._transfer_s[word[before]][word[index]] if word else 0.0
                    start = max(start, ends[before] + transfer_s)
            if word is None:
                ends.append(start + float(self._least_s[c, d]))
                continue
            processor = word[index]
            ends.append(max(start, free.get(processor, 0.0)) + self._part_s[processor][c][d])
            for other in self._turns[processor]:
                free[other] = max(free.get(other, 0.0), ends[-1])
        return max(ends)
