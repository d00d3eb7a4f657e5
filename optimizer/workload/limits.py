"""Limits of a workload that no plan can keep: memory, deadlines, and processors for periodic requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evaluators.workload.predicted import WorkloadSimulator
from optimizer.exact.bound import Relaxation, longest_path_s
from optimizer.model.bounds import Bounds
from optimizer.study.limits import TRUST
from search_spaces.core.constraints import Violation, infeasible
from search_spaces.core.decoded_plan import RankSet, ranks_by_component
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph
from search_spaces.core.plan import Plan
from search_spaces.core.pools import single_processors
from search_spaces.core.workload import Arrival, Workload
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
        own = ranks or [()] * len(self._clients)
        return self._total([self._taken(k, each) for k, each in enumerate(own)], own)

    def _total(self, taken: Sequence[_Taken], of: Sequence[object]) -> int:
        """Return the bytes of all instances: weights once for each model and ``of`` that share them, the fewest."""
        shared: dict[object, int] = {}
        total = 0
        for c, each, which in zip(self._clients, taken, of, strict=True):
            client = self._workload.clients[c]
            total += each.moment
            if client.own_weights:
                total += each.weights
            else:
                key = client.source, which
                shared[key] = min(each.weights, shared.get(key, each.weights))
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
        taken = []
        for k, c in enumerate(self._clients):
            each = [self._taken(k, ranks) for ranks in ((), *(sets[c] if sets else ()))]
            taken.append(_Taken(min(one.weights for one in each), min(one.moment for one in each)))
        return self._total(taken, [()] * len(taken))

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


_LATE = "allow a longer deadline, or use a smaller model"
_LATE_TOGETHER = "allow longer deadlines, space the requests out, or run fewer instances or smaller models"
_MOST_BEGINS, _MOST_DUE = 100, 2000
_BUSY = "lower the request rate, or run fewer instances or smaller models"

Seconds = NDArray[np.float64]
JobPrice = Callable[[range], float]


@dataclass(frozen=True, slots=True)
class Least:
    """Lower bounds of one inference of a model, by the prices; infinite if no processor supports it.

    Attributes:
        latency_s: from its start to its end.
        work_s: the sum of its jobs.
    """

    latency_s: float
    work_s: float


def least(
    simulator: WorkloadSimulator, graph: Graph, ranks: RankSet = (), *, runs: bool = True, splits: bool = False
) -> Least:
    """Return the bounds of an inference of a model.

    If jobs are runs of operators, in any number and on any processors, dynamic programming over the operators finds the
    quickest plan: each operator joins the job of the one before it, or begins a job on any processor. The seconds that
    it adds to a job are those of the job of the two, less the first one's. Measured prices of longer jobs may not add
    up like this; the result is the least of this additive model. If the longest job of a processor takes less than its
    operators add up to, as without traffic between branches, all of the processor's costs are scaled down to it. If not
    all operators wait for the one before them, processors may share the work, but an operator follows its inputs.

    Args:
        ranks: of the model.
        runs: whether each job is a run of operators; else the least seconds of each operator are added up.
        splits: whether operators may be split.
    """
    count = len(graph.operators)
    whole_s, processors = math.inf, dict[str, tuple[Seconds, Seconds]]()
    price = simulator.prices(graph, ranks)
    for number, processor in enumerate(single_processors(simulator.platform)):
        if not processor.resources or processor.like in processors:  # only baselines use it, or it is known already
            continue
        job_s = partial(price, number)
        processors[processor.like] = operator_costs(job_s, count)
        whole_s = min(whole_s, job_s(range(count)))
    if not processors:
        return Least(math.inf, math.inf)
    each_s = np.min([np.minimum(begun_s, added_s) for begun_s, added_s in processors.values()], axis=0)
    work_s = min(whole_s, _quickest_s(list(processors.values())) if runs else float(each_s.sum()))
    if runs and all(o - 1 in graph.predecessors(o) for o in range(1, count)):
        return Least(work_s, work_s)
    path_s = 0.0 if splits else longest_path_s(graph, each_s)
    return Least(min(whole_s, max(path_s, work_s / _at_once(simulator))), work_s)


def operator_costs(job_s: JobPrice, count: int) -> tuple[Seconds, Seconds]:
    """Return each operator's seconds as the first of a job, and those that it adds to the job of the one before it."""
    begun_s = np.array([job_s(range(o, o + 1)) for o in range(count)])
    added_s = np.full(count, np.inf)
    for o in range(1, count):
        if np.isfinite(begun_s[o - 1]):
            added_s[o] = min(begun_s[o], job_s(range(o - 1, o + 1)) - begun_s[o - 1])
    run = _longest_run(np.isfinite(begun_s))
    if len(run) > 1:
        chain_s = begun_s[run.start] + added_s[run.start + 1 : run.stop].sum()
        if 0.0 < (took_s := job_s(run)) < chain_s:
            return begun_s * (took_s / chain_s), added_s * (took_s / chain_s)
    return begun_s, added_s


def call_s(begun_s: Seconds, added_s: Seconds) -> float:
    """Return the seconds of beginning a job, from :func:`operator_costs`; 0 where they are not known."""
    both = np.isfinite(begun_s) & np.isfinite(added_s)
    return float(np.median(begun_s[both] - added_s[both])) if both.any() else 0.0


def _longest_run(taken: NDArray[np.bool_]) -> range:
    """Return the longest run of operators that a processor supports."""
    borders = np.flatnonzero(np.diff(np.concatenate(([0], taken, [0]))))
    runs = [range(int(a), int(b)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    return max(runs, key=len, default=range(0))


def _quickest_s(processors: Sequence[tuple[Seconds, Seconds]]) -> float:
    begun_s, added_s = (np.array(each) for each in zip(*processors, strict=True))
    done_s = begun_s[:, 0]
    for o in range(1, begun_s.shape[1]):
        done_s = np.minimum(done_s + added_s[:, o], done_s.min() + begun_s[:, o])
    return float(done_s.min())


def check(
    simulator: WorkloadSimulator,
    memory: Memory,
    sets: Sequence[Sequence[RankSet]] = (),
    freedoms: AbstractSet[str] = frozenset(),
) -> Mapping[str, Least]:
    """Check that some plan may keep the workload's limits; return the bounds of each client's inference.

    Args:
        sets: of each client the ranks that it may get beside none.
        freedoms: of the plans.

    Raises:
        InfeasibleError: none can; the violations have demand, bound, gap and what to change.
        UnavailableError: no processor supports a model.
    """
    workload = simulator.workload
    clients = [i.client for i in workload.instances]
    runs = not freedoms & {"branches", "splits"}
    found: dict[str, Least] = {}
    for c, client in enumerate(workload.clients):
        graph = simulator.joined.components[clients.index(c)].graph
        every = ((), *(sets[c] if sets else ()))
        each = [least(simulator, graph, ranks, runs=runs, splits="splits" in freedoms) for ranks in every]
        found[client.name] = Least(min(e.latency_s for e in each), min(e.work_s for e in each))
        if not np.isfinite(found[client.name].work_s):
            raise UnavailableError(
                f"no processor supports all operators of {client.model!r}", "name others with --processors"
            )
    broken = list(_broken(simulator, memory, found, sets))
    if broken:
        raise infeasible(*broken)
    return found


def bound_of(objective: str, simulator: WorkloadSimulator, bounds: Mapping[str, Least], *, own: bool) -> Bounds | None:
    """Return the lower bounds of an objective; None for an objective without one.

    Args:
        bounds: of each client, by its name.
        own: whether the prices are the evaluator's own.
    """
    workload = simulator.workload
    each_s = [bounds[client.name].latency_s for client in workload.clients for _ in range(client.count)]
    run_s = max(_run_s(client.arrival, bounds[client.name].latency_s) for client in workload.clients)
    least_s = {"mean": sum(each_s) / len(each_s), "worst": max(each_s), "makespan": run_s}.get(objective)
    if least_s is None:
        return None
    work_s = 0.0
    if objective == "makespan" and all(
        client.arrival.kind == "burst" and client.arrival.requests == 1 for client in workload.clients
    ):
        work_s = sum(client.count * bounds[client.name].work_s for client in workload.clients) / _at_once(simulator)
    return Bounds(max(least_s, work_s), proven=False, all_plans=Relaxation(least_s, work_s), own=own)


def _run_s(arrival: Arrival, latency_s: float) -> float:
    """Return how long a run lasts at least from a model's first request; its last one may be rejected when it comes."""
    if arrival.kind == "closed":
        return arrival.requests * latency_s
    return max(latency_s, (arrival.requests - 1) * arrival.period_s if arrival.kind == "periodic" else 0.0)


def _broken(
    simulator: WorkloadSimulator, memory: Memory, bounds: Mapping[str, Least], sets: Sequence[Sequence[RankSet]]
) -> Iterator[Violation]:
    workload = simulator.workload
    if workload.memory_limit_nbytes is not None:
        demand = memory.bound_nbytes(sets)
        if demand > workload.memory_limit_nbytes:
            yield violation(demand, workload.memory_limit_nbytes)
    busy = 0.0
    late: list[Violation] = []
    for client in workload.clients:
        bound = bounds[client.name]
        if client.deadline_s is not None and bound.latency_s > TRUST * client.deadline_s:
            what = f"one inference of {client.name!r}"
            sentence = f"{what} takes at least {{demand}}; its deadline is {{bound}}"
            late.append(Violation(what, bound.latency_s, client.deadline_s, "s", _LATE, sentence))
        if client.arrival.kind == "periodic" and client.deadline_s is not None:
            busy += client.count * bound.work_s / client.arrival.period_s
    processors = _at_once(simulator)
    yield from late or _late_together(workload, bounds, processors)
    if busy > TRUST * processors:
        sentence = "the periodic models need {demand}; the device has {bound}"
        what, busy = "processors for the periodic models", float(f"{busy:.3g}")
        yield Violation(what, busy, processors, "processors", _BUSY, sentence)


def _late_together(workload: Workload, bounds: Mapping[str, Least], processors: int) -> Iterator[Violation]:
    """Yield the first interval in which more work arrives and is due than all processors can do.

    Random arrivals are left out: only a sample of their times is known.
    """
    due = sorted(
        (release_s + client.deadline_s, release_s, client.count * bounds[client.name].work_s)
        for client in workload.clients
        if client.deadline_s is not None and client.arrival.kind != "poisson"
        for release_s in client.arrival.releases_s(workload.seed)
    )[:_MOST_DUE]
    for begin_s in sorted({release_s for _, release_s, _ in due})[:_MOST_BEGINS]:
        needed_s = 0.0
        for end_s, release_s, work_s in due:
            if release_s < begin_s:
                continue
            needed_s += work_s / processors
            if needed_s > TRUST * (end_s - begin_s):
                what = f"requests that arrive from {1e3 * begin_s:g} ms on and are due by {1e3 * end_s:g} ms"
                sentence = f"{what} need at least {{demand}} of all processors; they have {{bound}}"
                yield Violation(what, needed_s, end_s - begin_s, "s", _LATE_TOGETHER, sentence)
                return


def _at_once(simulator: WorkloadSimulator) -> int:
    """Return how many of the space's processors can run at once, at most."""
    processors = [processor for processor in single_processors(simulator.platform) if processor.resources]
    chosen: list[int] = []
    for i in sorted(range(len(processors)), key=lambda i: sum(processors[i].resources.values())):
        if not any(processors[i].excludes(processors[j]) for j in chosen):
            chosen.append(i)
    return len(chosen)
