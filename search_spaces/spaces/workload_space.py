"""The space of workloads (seed 001): cuts and ranks of each model, the processors of jobs, the order of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import comb, factorial, prod
from typing import TYPE_CHECKING, Any

from search_spaces.core.decoded_plan import DecodedPlan, RankSet, decoded_plan, in_runs
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Dispatch, Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.core.workload import Workload
from search_spaces.spaces.chain import combination, consecutive_cuts, distinct_cuts
from search_spaces.spaces.processor_words import count_words, located, word_at
from search_spaces.spaces.rank_sets import RankSets

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

_MOST_SIZES = 1 << 16
Row = tuple[Stage, ...]
"""The stages of one instance, with operator indices of its own model."""

_RANKS_MOVE = 0.2  # of all moves, where models may be decomposed
_SHIFT, _JOIN, _SHIFT_NEAR = 0.5, 0.65, 0.8  # of moves of cuts
_STEPS = tuple(sign * step for step in (1, 1, 1, 2, 2, 3, 5, 8) for sign in (1, -1))


class WorkloadSpace:
    """All ways to cut the models of a workload into jobs on processors and pools.

    Parameters (fixed for the study): ``dispatch``; ``jobs_C`` and ``cut_C_i``, for client C (from 1) the number of its
    jobs and the operators before which to cut; ``first_K``, the rank of instance K (from 1) in the order, the smallest
    first; ``on_K_J``, the processor of job J of instance K. Equal values of ``first_K`` keep the order of the workload.
    Where a model may be decomposed ``ranks_C``, the number of its rank set from 1; 0 leaves the model as it is.

    Args:
        joined: the models, a component for each instance.
        platform: its processors and pools (:mod:`search_spaces.core.pools`).
        max_jobs: maximum number of jobs of a model; models with fewer operators have fewer.
        rank_sets: the rank sets of each client, for all its instances, none of them empty; () for no ranks.

    Attributes:
        counts: how many instances each client has.

    Raises:
        UsageError: ``max_jobs`` is below 1, or there are too many clients to count the plans.
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
        self.joined, self.platform = joined, platform
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
        self.counts = tuple(client.count for client in workload.clients)
        self._places = [p.name for p in platform.processors]
        self._classes = [tuple(p.name for p in group) for group in platform.classes().values()]
        self.ranks = RankSets(rank_sets, self._client)
        self.dispatches: tuple[Dispatch, ...] = ("fifo", "priority", *(("edf",) if workload.deadlines else ()))

    @property
    def freedoms(self) -> tuple[str, ...]:
        """The freedoms of its plans besides ranks."""
        return ("cuts",)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the parameters; the same ones for the whole study."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {"dispatch": CategoricalDistribution(self.dispatches)}
        found |= {f"first_{k}": IntDistribution(1, len(self._client)) for k in range(1, len(self._client) + 1)}
        return {**found, **self._row_distributions(), **self.ranks.distributions()}

    def _row_distributions(self) -> dict[str, BaseDistribution]:
        """Return the parameters of :meth:`_rows`."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        found: dict[str, BaseDistribution] = {}
        for c, (most, count) in enumerate(zip(self._most, self._operators, strict=True), 1):
            found[f"jobs_{c}"] = IntDistribution(1, most)
            found |= {f"cut_{c}_{i}": IntDistribution(1, count - 1) for i in range(1, most)}
        for k, c in enumerate(self._client, 1):
            found |= {f"on_{k}_{j}": CategoricalDistribution(self._places) for j in range(1, self._most[c] + 1)}
        return found

    def decode(self, params: Mapping[str, Any]) -> Plan:
        """Return the canonical plan of any parameters within the distributions; a pure function.

        A cut proposed twice moves to the next free place.
        """
        every = range(len(self._client))
        order = sorted(every, key=lambda k: (int(params[f"first_{k + 1}"]), k))
        ranks = self.ranks.decode(params)
        return self.plan(DecodedPlan(params["dispatch"], tuple(order), self._rows(params), ranks))

    def _rows(self, params: Mapping[str, Any]) -> tuple[Row, ...]:
        """Return the stages of each instance, from parameters."""
        cuts = [
            distinct_cuts((int(params[f"cut_{c}_{i}"]) for i in range(1, int(params[f"jobs_{c}"]))), count - 1)
            for c, count in enumerate(self._operators, 1)
        ]
        return tuple(
            in_runs(self._operators[c], cuts[c], [str(params[f"on_{k}_{j}"]) for j in range(1, len(cuts[c]) + 2)])
            for k, c in enumerate(self._client, 1)
        )

    def plan(self, found: DecodedPlan) -> Plan:
        """Return the canonical plan of a decoded plan."""
        return self._canonical(found).plan(self.joined)

    def _canonical(self, found: DecodedPlan) -> DecodedPlan:
        """Return the canonical form of a plan of the space, which lies in the space too."""
        return found.canonical(self._client, self.platform)

    def decoded_plan(self, plan: Plan) -> DecodedPlan:
        """Return the decoded plan.

        Raises:
            PlanError: the plan is not in the space.
        """
        plan.validate(self.joined.graph, self.platform)
        found = decoded_plan(plan, self.joined)
        if found.dispatch not in self.dispatches:
            raise PlanError(f"the plan's dispatch {found.dispatch!r} is the same as 'fifo' without deadlines")
        self._row_params(found.stages)
        self.ranks.which(found)
        return found

    def encode(self, plan: Plan) -> dict[str, Any]:
        """Return parameters with ``decode(encode(plan)) == plan`` where the plan is canonical.

        Raises:
            PlanError: the plan is not in the space.
        """
        found = self._canonical(self.decoded_plan(plan))
        params: dict[str, Any] = {"dispatch": found.dispatch}
        params |= {f"first_{k + 1}": place for place, k in enumerate(found.order, 1)}
        return {**params, **self._row_params(found.stages), **self.ranks.encode(found)}

    def _row_params(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the parameters of the stages of each instance.

        Raises:
            PlanError: the stages are not in the space.
        """
        params: dict[str, Any] = {}
        for c, most in enumerate(self._most):
            each = {consecutive_cuts(rows[k]) for k, client in enumerate(self._client) if client == c}
            if len(each) > 1:
                raise PlanError(f"instances of model {c + 1} are cut in different ways")
            (cuts,) = each
            if len(cuts) >= most:
                raise PlanError(f"model {c + 1} has {len(cuts) + 1} jobs, the space at most {most}")
            params[f"jobs_{c + 1}"] = len(cuts) + 1
            params |= {f"cut_{c + 1}_{i + 1}": cuts[i] if i < len(cuts) else 1 for i in range(most - 1)}
        for k, c in enumerate(self._client):
            processors = [stage.processor for stage in rows[k]] + [self._places[0]] * (self._most[c] - len(rows[k]))
            params |= {f"on_{k + 1}_{j}": processor for j, processor in enumerate(processors, 1)}
        return params

    def cardinality(self) -> int:
        """Return the number of different canonical plans."""
        return len(self.ranks) * len(self.dispatches) * self._orders() * self._count_rows()

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
        order = _order_at(place, self.counts, self._client)
        rows = self._rows_at(index, order)
        return self.plan(DecodedPlan(self.dispatches[dispatch], tuple(order), rows, self.ranks.at(ranks)))

    def _count_rows(self) -> int:
        """Return the number of choices of all instances' stages, for one order of the instances."""
        return sum(size for _, size in self._sizes)

    def _rows_at(self, index: int, order: Sequence[int]) -> tuple[Row, ...]:
        """Return the stages of all instances, by their number."""
        jobs, index = located(index, self._sizes)
        index, rank = divmod(index, self._words(jobs))
        cuts = []
        for count, parts in zip(self._operators, jobs, strict=True):
            index, which = divmod(index, comb(count - 1, parts - 1))
            cuts.append(tuple(combination(count - 1, parts - 1, which)))
        word = iter(word_at(rank, self._length(jobs), self._classes))
        processors = {k: tuple(next(word) for _ in range(jobs[self._client[k]])) for k in order}
        return tuple(in_runs(self._operators[c], cuts[c], processors[k]) for k, c in enumerate(self._client))

    def neighbour(self, plan: Plan, rng: np.random.Generator) -> Plan:
        """Return the plan after one random move: the order of instances, the processors of jobs, a cut or ranks.

        Args:
            plan: of this space.
        """
        found = decoded_plan(plan, self.joined)
        if self.ranks and rng.random() < _RANKS_MOVE:
            return self.plan(replace(found, ranks=self.ranks.neighbour(found, rng)))
        move = int(rng.integers(16))
        if move == 0:
            others = [d for d in self.dispatches if d != found.dispatch]
            return self.plan(replace(found, dispatch=others[int(rng.integers(len(others)))]))
        if move <= 2:
            order = list(found.order)
            moved = order.pop(int(rng.integers(len(order))))
            order.insert(int(rng.integers(len(order) + 1)), moved)
            return self.plan(replace(found, order=tuple(order)))
        if move <= 6:
            return self.plan(replace(found, stages=self._elsewhere(found.stages, rng)))
        return self.plan(replace(found, stages=self._cut_otherwise(found.stages, rng)))

    def _elsewhere(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Move a job, all jobs of an instance, or all instances of a client to a processor or a pool."""
        processor = self._any_place(rng)
        k, reach = int(rng.integers(len(rows))), int(rng.integers(3))
        if reach == 0:
            job = int(rng.integers(len(rows[k])))
            moved = tuple(replace(s, processor=processor) if j == job else s for j, s in enumerate(rows[k]))
            return (*rows[:k], moved, *rows[k + 1 :])
        return tuple(
            tuple(replace(s, processor=processor) for s in row)
            if other == k or (reach == 2 and self._client[other] == self._client[k])
            else row
            for other, row in enumerate(rows)
        )

    def _cut_otherwise(self, rows: tuple[Row, ...], rng: np.random.Generator) -> tuple[Row, ...]:
        """Move a cut, merge two jobs, or add a cut and place one side of it anywhere."""
        c = int(rng.integers(len(self._most)))
        count, cuts = self._operators[c], list(consecutive_cuts(rows[self._client.index(c)]))
        processors = {k: [s.processor for s in rows[k]] for k, client in enumerate(self._client) if client == c}
        which = int(rng.integers(len(cuts))) if cuts else 0
        move = rng.random()
        if cuts and move < _SHIFT:
            to = cuts[which] + int(rng.choice(_STEPS)) if rng.random() < _SHIFT_NEAR else int(rng.integers(1, count))
            if 0 < to < count and to not in cuts:
                cuts = sorted({*cuts, to} - {cuts[which]})
        elif cuts and (move < _JOIN or len(cuts) + 1 == self._most[c]):
            del cuts[which]
            gone = which + int(rng.integers(2))
            for each in processors.values():
                del each[gone]
        elif len(cuts) + 1 < self._most[c] and (cut := int(rng.integers(1, count))) not in cuts:
            cuts = sorted([*cuts, cut])
            at = cuts.index(cut) + int(rng.integers(2))
            together = self._any_place(rng) if rng.random() < 0.5 else None
            for each in processors.values():
                each.insert(at, together or self._any_place(rng))
        return tuple(in_runs(count, cuts, processors[k]) if k in processors else row for k, row in enumerate(rows))

    def _any_place(self, rng: np.random.Generator) -> str:
        return self._places[int(rng.integers(len(self._places)))]

    @cached_property
    def _sizes(self) -> list[tuple[Sequence[int], int]]:
        """The numbers of jobs of the clients, and the number of plans with them for one dispatch and order."""
        found: list[tuple[Sequence[int], int]] = []
        for jobs in product(*(range(1, most + 1) for most in self._most)):
            ways = prod(comb(count - 1, parts - 1) for count, parts in zip(self._operators, jobs, strict=True))
            found.append((jobs, ways * self._words(jobs)))
        return found

    def _length(self, jobs: Sequence[int]) -> int:
        return sum(count * parts for count, parts in zip(self.counts, jobs, strict=True))

    def _words(self, jobs: Sequence[int]) -> int:
        return count_words(self._length(jobs), self._classes)

    def _orders(self) -> int:
        return factorial(len(self._client)) // prod(map(factorial, self.counts))


def _order_at(rank: int, counts: Sequence[int], clients: Sequence[int]) -> list[int]:
    """Return order number ``rank`` of the instances; those of one client stay in ascending order.

    Args:
        counts: instances of each client.
        clients: the client of each instance.
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
