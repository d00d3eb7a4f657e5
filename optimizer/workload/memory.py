"""Memory of a workload's models, as they are and decomposed, and the ranks that need little of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search_spaces.core.constraints import Violation
from search_spaces.core.decoded_plan import RankSet, ranks_by_component
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.workload import Workload
from search_spaces.rewrites.tucker import outline, ranks_of

LEVER = "raise memory_limit_mb, let instances share weights, or take fewer of them"
"""What to change if the limit is too low."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Bytes of a model's weights, and the lower bound of its peak activation memory."""

    weights: int
    moment: int


class Memory:
    """The memory that a workload takes: weights, once if they are shared, and an arena for each instance.

    Results for a model with some ranks are kept: a search needs them with every plan.
    """

    def __init__(self, workload: Workload, joined: JoinedGraph) -> None:
        self._workload, self._joined = workload, joined
        self._clients = [instance.client for instance in workload.instances]
        self._known: dict[tuple[int, RankSet], _Taken] = {}

    def nbytes(self, ranks: Sequence[RankSet] = ()) -> int:
        """Return the least memory that the workload takes.

        Args:
            ranks: of each instance, where models are decomposed.
        """
        shared: dict[object, int] = {}
        total = 0
        for number, c in enumerate(self._clients):
            client, own = self._workload.clients[c], ranks[number] if ranks else ()
            taken = self._taken(number, own)
            total += taken.moment
            if client.own_weights:
                total += taken.weights
            else:
                shared[client.source, own] = taken.weights
        return total + sum(shared.values())

    def of_plan(self, plan: Plan) -> int:
        """Return the least memory that the workload takes with a plan."""
        return self.nbytes(ranks_by_component(plan, self._joined))

    def violations(self, plan: Plan) -> tuple[Violation, ...]:
        """Return a plan's violation of the workload's memory limit, or ()."""
        limit = self._workload.memory_limit_nbytes
        if limit is None:
            return ()
        demand = self.of_plan(plan)
        return (violation(demand, limit),) if demand > limit else ()

    def bound_nbytes(self, sets: Sequence[Sequence[RankSet]] = ()) -> int:
        """Return a lower bound of all choices of ranks: each instance and each model has the best ranks for itself.

        Args:
            sets: of each client the ranks that it may get beside none.
        """
        shared: dict[object, int] = {}
        total = 0
        for number, c in enumerate(self._clients):
            client = self._workload.clients[c]
            each = [self._taken(number, ranks) for ranks in ((), *(sets[c] if sets else ()))]
            total += min(taken.moment for taken in each)
            weights = min(taken.weights for taken in each)
            if client.own_weights:
                total += weights
            else:
                shared[client.source] = min(weights, shared.get(client.source, weights))
        return total + sum(shared.values())

    def sparing(self, sets: Sequence[Sequence[RankSet]]) -> dict[int, int]:
        """Return client → the number of its set, from 1, or 0 for none, with which the workload takes little memory.

        Clients of one model share weights, and one that is decomposed alone adds its own. So all get the same ranks
        where they may, then each in turn the best for it; the best result over all such first ranks is returned.
        """
        offered = [((), *each) for each in sets]
        chosen = [0] * len(offered)
        for source in dict.fromkeys(client.source for client in self._workload.clients):
            group = [c for c, client in enumerate(self._workload.clients) if client.source == source]
            begins = dict.fromkeys(ranks for c in group for ranks in offered[c])
            tries = [self._settled(offered, chosen, group, ranks) for ranks in begins]
            chosen = min(tries, key=lambda each: self._chosen_nbytes(offered, each))
        return dict(enumerate(chosen))

    def _settled(
        self, offered: Sequence[Sequence[RankSet]], chosen: Sequence[int], group: Sequence[int], ranks: RankSet
    ) -> list[int]:
        """Return a choice that gives a group these ranks where they may, then each client the best for it."""
        found = list(chosen)
        for c in group:
            found[c] = offered[c].index(ranks) if ranks in offered[c] else 0
        for c in group:
            others = [[*found[:c], number, *found[c + 1 :]] for number in range(len(offered[c]))]
            found = min(others, key=lambda each: self._chosen_nbytes(offered, each))
        return found

    def _chosen_nbytes(self, offered: Sequence[Sequence[RankSet]], chosen: Sequence[int]) -> int:
        return self.nbytes([offered[c][chosen[c]] for c in self._clients])

    def _taken(self, number: int, ranks: RankSet) -> _Taken:
        """Return the bytes of an instance's model with some ranks."""
        graph = self._joined.components[number].graph
        key = id(graph), ranks  # graphs of one structure may have other weights, of which some are shared
        if key not in self._known:
            made = decomposed(graph, ranks)
            self._known[key] = _Taken(sum(t.nbytes for t in made.tensors if t.constant), largest_moment(made))
        return self._known[key]


def violation(demand: int, limit: int) -> Violation:
    """Return the violation of a workload that needs more memory than the limit."""
    return Violation("memory of the workload", demand, limit, "B", LEVER)


def decomposed(graph: Graph, ranks: RankSet) -> Graph:
    """Return a model's structure with some convolutions as triples; their own weights are no longer in it."""
    if not ranks:
        return graph
    made = outline(graph, ranks_of(Plan(graph.digest, (), ranks=ranks)))
    read = {t for operator in made.operators for t in operator.inputs}
    tensors = tuple(t if i in read or not t.constant else replace(t, nbytes=0) for i, t in enumerate(made.tensors))
    return replace(made, tensors=tensors)


def largest_moment(graph: Graph) -> int:
    """Return the most bytes that one operator reads and writes: a lower bound of the peak activation memory."""
    found = 0
    for operator in graph.operators:
        touched = {t for t in (*operator.inputs, *operator.outputs) if t != -1 and not graph.tensors[t].constant}
        found = max(found, sum(graph.tensors[t].nbytes for t in touched))
    return found
