"""The space of workloads (seed 001): job boundaries and ranks per model, a lane per job, and who goes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import comb, factorial, prod
from typing import TYPE_CHECKING, Any

from search_spaces.arrangement import Arrangement, RankSet, arrangement
from search_spaces.chain import combination
from search_spaces.errors import PlanError, UsageError
from search_spaces.joined_graph import JoinedGraph
from search_spaces.lane_words import count_words, word_at
from search_spaces.plan import Dispatch, Plan
from search_spaces.platform import Platform
from search_spaces.rank_sets import RankSets
from search_spaces.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

_MOST_SIZES = 1 << 16
_RANKS_MOVE = 0.2  # of all moves, where models may be decomposed


class WorkloadSpace:
    """All ways to cut the models of a workload into jobs and to give these to lanes and pools.

    Parameters (fixed for the study): ``dispatch``; ``jobs_C`` and ``cut_C_i``, for the client C (from 1) the number of
    its jobs and the operators before which to cut; ``first_K``, which makes instance K (from 1) come sooner the smaller
    it is; ``on_K_J``, the lane of job J of instance K. Equal values of ``first_K`` keep the order of the workload.
    Where a model may be decomposed ``ranks_C``: 0 leaves it as it is, other numbers are its rank sets, from 1.

    Args:
        joined: the models, a component for each instance.
        platform: its lanes and pools (:mod:`search_spaces.pools`).
        max_jobs: of a model at most; models with fewer operators have fewer.
        rank_sets: of each client the sets of ranks that all its instances may get, none of them empty; () for none.

    Raises:
        UsageError: there are fewer than one job, or too many clients to count the plans.
    """

    def __init__(
        self,
        workload: Workload,
        joined: JoinedGraph,
        platform: Platform,
        max_jobs: int,
        rank_sets: Sequence[Sequence[RankSet]] = (),
    ) -> None:
        if max_jobs < 1:
            raise UsageError(f"--max-stages {max_jobs}: a model has at least 1 job")
        self._joined, self._platform = joined, platform
        self._client = [instance.client for instance in workload.instances]
        self._operators = [
            len(joined.components[self._client.index(c)].graph.operators) for c in range(len(workload.clients))
        ]
        self._most = [min(max_jobs, count) for count in self._operators]
        if prod(self._most) > _MOST_SIZES:
            raise UsageError(
                f"--max-stages {max_jobs}: {len(self._most)} models with so many jobs each make too many combinations",
                "allow fewer",
            )
        self._counts = [client.count for client in workload.clients]
        self._places = [p.name for p in platform.processors]
        self._classes = [tuple(p.name for p in group) for group in platform.classes().values()]
        self.ranks = RankSets(rank_sets, self._client)
        self.dispatches: tuple[Dispatch, ...] = ("fifo", "priority", *(("edf",) if workload.deadlines else ()))

    @property
    def joined(self) -> JoinedGraph:
        """The models."""
        return self._joined

    @property
    def platform(self) -> Platform:
        """The lanes and pools."""
        return self._platform

    def distributions(self) -> dict[str, BaseDistribution]:
        """See :class:`~search_spaces.space.SearchSpace`."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {"dispatch": CategoricalDistribution(self.dispatches)}
        for c, (most, count) in enumerate(zip(self._most, self._operators, strict=True), 1):
            found[f"jobs_{c}"] = IntDistribution(1, most)
            found |= {f"cut_{c}_{i}": IntDistribution(1, count - 1) for i in range(1, most)}
        for k, c in enumerate(self._client, 1):
            found[f"first_{k}"] = IntDistribution(1, len(self._client))
            found |= {f"on_{k}_{j}": CategoricalDistribution(self._places) for j in range(1, self._most[c] + 1)}
        return {**found, **self.ranks.distributions()}

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """See :class:`~search_spaces.space.SearchSpace`; a cut proposed twice moves to the next free place."""
        cuts = []
        for c, count in enumerate(self._operators, 1):
            chosen: set[int] = set()
            for i in range(1, int(params[f"jobs_{c}"])):
                cut = int(params[f"cut_{c}_{i}"])
                while cut in chosen:
                    cut = cut % (count - 1) + 1
                chosen.add(cut)
            cuts.append(tuple(sorted(chosen)))
        every = range(len(self._client))
        order = sorted(every, key=lambda k: (int(params[f"first_{k + 1}"]), k))
        lanes = [
            tuple(str(params[f"on_{k}_{j}"]) for j in range(1, len(cuts[c]) + 2)) for k, c in enumerate(self._client, 1)
        ]
        mine = tuple(cuts[c] for c in self._client)
        ranks = self.ranks.decode(params)
        return self.plan(Arrangement(params["dispatch"], tuple(order), mine, tuple(lanes), ranks))

    def plan(self, found: Arrangement) -> Plan:
        """Return the canonical plan of an arrangement."""
        return found.canonical(self._client, self._platform).plan(self._joined)

    def arrangement(self, plan: Plan) -> Arrangement:
        """Return what a plan of the space says.

        Raises:
            PlanError: the plan is not in the space.
        """
        plan.validate(self._joined.graph, self._platform)
        found = arrangement(plan, self._joined)
        if found.dispatch not in self.dispatches:
            raise PlanError(f"the plan goes by {found.dispatch!r}, which is the same as 'fifo' without deadlines")
        for c, most in enumerate(self._most):
            cuts = {found.cuts[k] for k, client in enumerate(self._client) if client == c}
            if len(cuts) > 1:
                raise PlanError(f"instances of model {c + 1} are cut in different ways")
            if len(next(iter(cuts))) >= most:
                raise PlanError(f"model {c + 1} has {len(next(iter(cuts))) + 1} jobs, the space at most {most}")
        self.ranks.which(found)
        return found

    def encode(self, plan: Plan) -> dict[str, Any]:
        """See :class:`~search_spaces.space.SearchSpace`; a plan that is not canonical gets those of its canonical form.

        Raises:
            PlanError: the plan is not in the space.
        """
        found = self.arrangement(plan).canonical(self._client, self._platform)
        params: dict[str, Any] = {"dispatch": found.dispatch}
        for c, most in enumerate(self._most):
            cuts = found.cuts[self._client.index(c)]
            params[f"jobs_{c + 1}"] = len(cuts) + 1
            params |= {f"cut_{c + 1}_{i + 1}": cuts[i] if i < len(cuts) else 1 for i in range(most - 1)}
        for place, k in enumerate(found.order, 1):
            params[f"first_{k + 1}"] = place
            lanes, most = found.lanes[k], self._most[self._client[k]]
            params |= {f"on_{k + 1}_{j + 1}": lanes[j] if j < len(lanes) else self._places[0] for j in range(most)}
        return {**params, **self.ranks.encode(found)}

    def cardinality(self) -> int:
        """See :class:`~search_spaces.space.SearchSpace`."""
        return len(self.ranks) * len(self.dispatches) * self._orders() * sum(size for _, size in self._sizes())

    def plan_at(self, index: int) -> Plan:
        """Return the plan number ``index`` of 0 … ``cardinality() - 1``.

        Raises:
            IndexError: there is no such number.
        """
        if not 0 <= index < self.cardinality():
            raise IndexError(index)
        index, ranks = divmod(index, len(self.ranks))
        index, dispatch = divmod(index, len(self.dispatches))
        index, place = divmod(index, self._orders())
        jobs: Sequence[int] = ()
        for jobs, size in self._sizes():  # noqa: B007 - the one that the number falls into is wanted
            if index < size:
                break
            index -= size
        index, rank = divmod(index, self._words(jobs))
        cuts = []
        for count, parts in zip(self._operators, jobs, strict=True):
            index, which = divmod(index, comb(count - 1, parts - 1))
            cuts.append(tuple(combination(count - 1, parts - 1, which)))
        order = _order_at(place, self._counts, self._client)
        word = iter(word_at(rank, self._length(jobs), self._classes))
        lanes = {k: tuple(next(word) for _ in range(jobs[self._client[k]])) for k in order}
        return Arrangement(
            self.dispatches[dispatch],
            tuple(order),
            tuple(cuts[c] for c in self._client),
            tuple(lanes[k] for k in range(len(order))),
            self.ranks.at(ranks),
        ).plan(self._joined)

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: of an instance in the order, of jobs to lanes, of a cut, of ranks.

        Args:
            plan: of this space.
        """
        found = arrangement(plan, self._joined)
        if self.ranks and rng.random() < _RANKS_MOVE:
            return self.plan(replace(found, ranks=self.ranks.neighbour(found, rng)))
        move = int(rng.integers(6))
        if move == 0:
            others = [d for d in self.dispatches if d != found.dispatch]
            return self.plan(replace(found, dispatch=others[int(rng.integers(len(others)))]))
        if move <= 2:
            order = list(found.order)
            moved = order.pop(int(rng.integers(len(order))))
            order.insert(int(rng.integers(len(order) + 1)), moved)
            return self.plan(replace(found, order=tuple(order)))
        if move <= 4:
            return self.plan(self._elsewhere(found, rng))
        return self.plan(self._cut_otherwise(found, rng))

    def _elsewhere(self, found: Arrangement, rng: np.random.Generator) -> Arrangement:
        """Move a job, all jobs of an instance, or all instances of a client to a lane or a pool."""
        lane = self._places[int(rng.integers(len(self._places)))]
        lanes = [list(each) for each in found.lanes]
        k, reach = int(rng.integers(len(lanes))), int(rng.integers(3))
        if reach == 0:
            lanes[k][int(rng.integers(len(lanes[k])))] = lane
        else:
            for other, client in enumerate(self._client):
                if other == k or (reach == 2 and client == self._client[k]):
                    lanes[other] = [lane] * len(lanes[other])
        return replace(found, lanes=tuple(map(tuple, lanes)))

    def _cut_otherwise(self, found: Arrangement, rng: np.random.Generator) -> Arrangement:
        """Take a cut away, or move it, or cut once more; a new job runs where the one before it does."""
        c = int(rng.integers(len(self._most)))
        cuts = list(found.cuts[self._client.index(c)])
        lanes = {k: list(found.lanes[k]) for k, client in enumerate(self._client) if client == c}
        free = [i for i in range(1, self._operators[c]) if i not in cuts]
        if cuts and (len(cuts) + 1 == self._most[c] or not free or rng.random() < 0.6):
            gone = int(rng.integers(len(cuts)))
            del cuts[gone]
            for each in lanes.values():
                del each[gone + 1]
        if len(cuts) + 1 < self._most[c] and free and rng.random() < 0.6:
            cut = free[int(rng.integers(len(free)))]
            after = sum(other < cut for other in cuts)
            cuts.insert(after, cut)
            for each in lanes.values():
                each.insert(after + 1, each[after])
        changed = {k: tuple(each) for k, each in lanes.items()}
        return replace(
            found,
            cuts=tuple(tuple(cuts) if k in changed else old for k, old in enumerate(found.cuts)),
            lanes=tuple(changed.get(k, old) for k, old in enumerate(found.lanes)),
        )

    def _sizes(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield the jobs of each client, and how many plans there are of one dispatch and one order."""
        for jobs in product(*(range(1, most + 1) for most in self._most)):
            ways = prod(comb(count - 1, parts - 1) for count, parts in zip(self._operators, jobs, strict=True))
            yield jobs, ways * self._words(jobs)

    def _length(self, jobs: Sequence[int]) -> int:
        return sum(count * parts for count, parts in zip(self._counts, jobs, strict=True))

    def _words(self, jobs: Sequence[int]) -> int:
        return count_words(self._length(jobs), self._classes)

    def _orders(self) -> int:
        return factorial(len(self._client)) // prod(map(factorial, self._counts))


def _order_at(rank: int, counts: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return order number ``rank`` of the instances, in which those of a client come by their number.

    Args:
        counts: instances of each client.
        clients: of each instance its client.
    """
    left = list(counts)
    following = [clients.index(c) for c in range(len(left))]
    order = []
    for _ in clients:
        for c, count in enumerate(left):
            if not count:
                continue
            left[c] -= 1
            ways = factorial(sum(left)) // prod(map(factorial, left))
            if rank < ways:
                break
            rank -= ways
            left[c] += 1
        order.append(following[c])
        following[c] += 1
    return order
