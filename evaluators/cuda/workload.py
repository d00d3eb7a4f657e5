"""Workloads on the streams of a GPU: jobs as captured graphs, replayed from one process, and their costs.

As baselines, models also run apart, each in a process or a thread of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise, product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Capabilities
from evaluators.cuda.client import Bench, Loaded
from evaluators.cuda.devices import EXTRA, GRAPHS, THREADS, priority_of, tolerance, under_mps
from evaluators.cuda.session import References, fed
from evaluators.litert import tensors
from evaluators.workload.host import Execution, MeasuredWorkload, Outputs, Parts
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome, outcome
from evaluators.workload.prices import JobTimer, PriceTable, kind_of
from evaluators.workload.scheduler import Scheduler
from evaluators.workload.setting import RUNS_AS, Setting, alone, closed_loops
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch
from search_spaces.core.platform import Processor
from search_spaces.core.pools import members

Found = TypeVar("Found")
_NEVER = 1e6  # factor of what does not run
_TIMED_S, _FEWEST, _MOST = 0.2, 6, 200
_LONGER = 4  # times as many requests of models with priority, which are answered sooner


def crowding(
    graphs: Sequence[Graph], timer: JobTimer, whole_s: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return for each model the factor by which its jobs slow down for each other processor that is busy.

    All instances run in closed loops, each on a stream of its own, as far as there are streams. One that takes ``r``
    times as long beside ``k - 1`` others is slowed by ``r ** (1 / (k - 1))`` by each of them. Where there are
    processors of several precisions, all of one precision are timed, and mixed pairs get the larger factor, whatever
    their priorities; of several priorities of one precision, two are timed beside each other
    (:func:`_over_each_other`). Models that run apart are a kind, too.

    Args:
        graphs: one for each instance.
        whole_s: model → kind of processor → seconds of the model alone.
    """
    groups: dict[str, list[int]] = {}
    levels: dict[str, dict[int, str]] = {}  # of processors that are timed as one kind: priority → kind
    for number, processor in enumerate(timer.processors):
        kind = kind_of(processor)
        groups.setdefault(kind, []).append(number)
        levels.setdefault(kind.replace(processor.like, processor.timed_as), {})[priority_of(processor)] = kind
    found: dict[str, dict[str, float]] = {graph.digest: {} for graph in graphs}
    for alike in levels.values():
        kind = max(alike.values(), key=lambda kind: len(groups[kind]))
        numbers = groups[kind]
        together = min(len(numbers), len(graphs))
        if together > 1:
            timer.progress(f"timing {together} models at once on {kind}")
            chosen = [graphs[i * len(graphs) // together] for i in range(together)]
            try:
                ratios = _slowed(chosen, numbers[:together], timer, whole_s)
            except UnavailableError as error:
                if RUNS_AS not in timer.processors[numbers[0]].options:
                    raise
                timer.progress(f"models do not run apart: {error}")
                for factors in found.values():
                    factors[f"{kind}|{kind}"] = _NEVER
                continue
            for digest, factors in found.items():
                slow = _mean(ratios, chosen, digest) ** (1.0 / (together - 1))
                for one, other in product(alike.values(), groups):
                    key, back = f"{one}|{other}", f"{other}|{one}"
                    if other == one or slow > factors.get(key, 1.0):
                        factors |= {key: slow, back: slow}
        if len(alike) > 1:
            _over_each_other(alike, groups, graphs, timer, whole_s, found)
    return found


def _slowed(
    graphs: Sequence[Graph],
    on: Sequence[int],
    timer: JobTimer,
    whole_s: Mapping[str, Mapping[str, float]],
    longer: int = 0,
) -> list[float]:
    """Return how many times as long as alone each of some models takes while all run, each on its own processor.

    Args:
        longer: so many of them, the first, send several times as many requests.
    """
    alone_s = [whole_s[g.digest][timer.processors[number].timed_as] for g, number in zip(graphs, on, strict=True)]
    wanted_s = max(_TIMED_S, _FEWEST * max(alone_s)) / len(graphs)  # the same for all
    wanted = [wanted_s * (_LONGER if k < longer else 1) / max(s, 1e-6) for k, s in enumerate(alone_s)]
    counts = np.clip(wanted, _FEWEST, _MOST).astype(int).tolist()
    found = timer.alone(closed_loops(on, counts, timer.processors), [(graph, ()) for graph in graphs], 2)[-1]
    answered = [np.array([r.latency_s for r in each if r.latency_s is not None]) for each in found.requests]
    until_s = min(float(times.sum()) for times in answered)  # afterwards some have finished
    during = [times[: max(1, int((times.cumsum() <= until_s).sum()))] for times in answered]
    return [float(times.mean()) / s for times, s in zip(during, alone_s, strict=True)]


def _mean(ratios: Sequence[float], graphs: Sequence[Graph], digest: str) -> float:
    """Return the mean ratio of a model's instances, at least 1; where none of them ran, of all."""
    own = [ratio for ratio, graph in zip(ratios, graphs, strict=True) if graph.digest == digest]
    return max(1.0, statistics.fmean(own or ratios))


def _over_each_other(
    alike: Mapping[int, str],
    groups: Mapping[str, Sequence[int]],
    graphs: Sequence[Graph],
    timer: JobTimer,
    whole_s: Mapping[str, Mapping[str, float]],
    found: Mapping[str, dict[str, float]],
) -> None:
    """Set the factors between processors of several priorities.

    Every second instance runs with the highest priority and the others with the lowest, and then the other way round.
    Any two other priorities are taken for as far apart.

    Args:
        alike: priority → kind of processor.
        groups: kind → its processors.
        found: the factors of each model, so far those of equal priority.
    """
    kind = alike[min(alike)]
    low, high = groups[kind], groups[alike[max(alike)]]
    half = min(len(low), len(high), len(graphs) // 2)
    if not half:
        return
    timer.progress(f"timing {2 * half} models at once, half of them with priority")
    over, under = graphs[0::2][:half], graphs[1::2][:half]
    on = [*high[:half], *low[:half]]
    one = _slowed([*over, *under], on, timer, whole_s, longer=half)
    other = _slowed([*under, *over], on, timer, whole_s, longer=half)
    graphs = [*over, *under]
    for digest, factors in found.items():
        same = factors.get(f"{kind}|{kind}", 1.0)
        beside = same ** (half - 1)
        faster = max(1.0, _mean([*one[:half], *other[:half]], graphs, digest) / beside) ** (1.0 / half)
        slower = max(same, (_mean([*other[half:], *one[half:]], graphs, digest) / beside) ** (1.0 / half))
        for (mine, victim), (theirs, busy) in product(alike.items(), repeat=2):
            factors[f"{victim}|{busy}"] = same if mine == theirs else faster if mine > theirs else slower


@dataclass(frozen=True, slots=True)
class _Execution:
    """Instances in one CUDA process, or in several that begin at once; a job that fails makes the whole run fail."""

    found: Setting
    dispatch: Dispatch
    instances: Sequence[Loaded]
    failures: Mapping[int, str] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Run the workload once."""
        mine: dict[int, list[int]] = {}
        for client, instance in enumerate(self.instances):
            instance.bench.ready(instance)
            mine.setdefault(id(instance.bench), []).append(client)
        groups = list(mine.values())
        if len(groups) == 1:
            scheduler, processors = self._ran(groups[0], 0)
            return outcome(scheduler, self.found.stages, [self.found.processors[p] for p in processors])
        ran = self._in_processes(groups)
        whole = Scheduler(self.found.clients, self.found.excluded, self.dispatch)
        whole.begin(min(scheduler.store[0] for scheduler, _ in ran))
        for clients, (scheduler, processors) in zip(groups, ran, strict=True):
            for number, client in enumerate(clients):
                whole.copy(client, scheduler, number, processors)
        return outcome(whole, self.found.stages, self.found.processors)

    def _in_processes(self, groups: Sequence[Sequence[int]]) -> list[tuple[Scheduler, Sequence[int]]]:
        """Run the clients of several processes, which begin at once; where one was late, all run again."""
        benches = [self.instances[clients[0]].bench for clients in groups]
        ahead_ns = int(len(groups) * _AHEAD_NS)
        for _ in range(_TRIES):
            begin_ns = time.perf_counter_ns() + ahead_ns
            ran = _at_once(benches, [partial(self._ran, clients, begin_ns) for clients in groups], len(groups))
            if max(scheduler.store[0] for scheduler, _ in ran) <= begin_ns + _AHEAD_NS:
                break
            ahead_ns *= 2
        return ran

    def _ran(self, clients: Sequence[int], begin_ns: int) -> tuple[Scheduler, Sequence[int]]:
        """Run the clients of one process; return the scheduler's state there, and the processors that it numbers."""
        found, processors = alone(self.found, clients)
        instances = [self.instances[client] for client in clients]
        (scheduler,) = instances[0].bench.run(found, self.dispatch, instances, begin_ns=begin_ns)
        return scheduler, processors


def _at_once(benches: Iterable[Bench], calls: Sequence[Callable[[], Found]], most: int) -> list[Found]:
    """Call functions that wait for processes, in ``most`` threads; Ctrl-C ends the processes instead of waiting."""
    with ThreadPoolExecutor(most) as pool:
        asked = [pool.submit(call) for call in calls]
        try:
            return [each.result() for each in asked]
        except KeyboardInterrupt:
            for bench in benches:
                bench.client.close()
            raise


_AHEAD_NS = 1e6  # for each process, from the request to run until it begins; one that is later than this is late
_TRIES = 4
_AT_ONCE = 8  # processes that start at the same time
_INPUT_SEED = 0
_SHARED = ""  # name of the weights of instances that share them


class CudaWorkload(MeasuredWorkload[Loaded]):
    """A session of several models, run by one process, and where they run apart by others, which start when needed.

    Instances whose client sets ``own_weights`` have weights of their own on the device; all have buffers of their own.

    Args:
        another: makes a computing process, given how models run apart in it.
    """

    capabilities = Capabilities(decompose=True, outputs=True)
    keeps_outputs = False

    def __init__(self, lowerings: Lowerings, objective: Objective, another: Callable[[str], Bench]) -> None:
        super().__init__(lowerings, objective)
        self._another, self._bench = another, another("")
        self._apart: dict[str, Bench] = {}  # of a processor, or of a kind of them where threads share a process
        self._reference_processor = self._processors[0]
        self._references = References()
        self._inputs: dict[tuple[str, int], list[NDArray[np.generic]]] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Return all that may change a number (machine, processors, versions, settings), as plain values."""
        return {
            "evaluator": EXTRA,
            "platform": self.platform.to_json(),
            "runtime": self._bench.facts()["facts"],
            "workload": self.workload.digest,
            "objective": self.objective,
        }

    def measured(self, graphs: Sequence[Graph], timer: JobTimer) -> PriceTable:
        """Measure the costs of jobs of some models."""
        return timer.prices(graphs, partial(crowding, [component.graph for component in self.joined.components], timer))

    def bound(self, found: Setting, client: int) -> Loaded:
        """Return a client's model, loaded, with inputs."""
        index, model = found.components[client], found.models[client]
        name = self.joined.components[index].name
        each = zip(count(), model.lowered.plan.stages, model.processors, strict=False)
        jobs = [(stage.operators, self._processor(processor, job)) for job, stage, processor in each]
        weights = name if self.workload.client_of(index).own_weights else _SHARED
        return self._taken(model.graph, jobs, name, weights, model.after)

    def executor(self, found: Setting, dispatch: Dispatch, instances: Sequence[Loaded]) -> Execution:
        """Return what runs instances in a setting."""
        return _Execution(found, dispatch, instances)

    def outputs(self, instance: Loaded) -> list[NDArray[np.generic]]:
        """Return the outputs of an instance's last request."""
        instance.bench.ready(instance)
        return instance.bench.outputs(instance)

    def release(self, instance: Loaded) -> None:
        """Release an instance; a second call does nothing."""
        instance.bench.give_back(instance)

    def close(self) -> None:
        """End the processes."""
        with ExitStack() as stack:
            for bench in (self._bench, *self._apart.values()):
                stack.callback(bench.close)

    def _taken(
        self,
        graph: Graph,
        jobs: Sequence[tuple[Sequence[int], Processor]],
        owner: str,
        weights: str,
        after: Sequence[int] = (),
    ) -> Loaded:
        """Load an instance in the process that its processors tell.

        Raises:
            UnavailableError: they tell several.
        """
        benches = {id(bench): bench for bench in (self._bench_of(processor) for _, processor in jobs)}
        if len(benches) > 1:
            raise UnavailableError("a model that runs apart has one processor", "give all of its stages the same")
        (bench,) = benches.values()
        if bench.client.apart == GRAPHS:  # its kernels are chosen where nothing else runs
            self._bench.give_back(self._bench.take(graph, jobs, owner, weights, self._fed(graph), after))
        return bench.take(graph, jobs, owner, weights, self._fed(graph), after)

    def _bench_of(self, processor: Processor) -> Bench:
        """Return the process that runs a processor's jobs; those of one kind start at the same time."""
        how = processor.options.get(RUNS_AS, "")
        if not how:
            return self._bench
        alike = [p.name for p in self._processors if kind_of(p) == kind_of(processor)]
        mine = {name: kind_of(processor) if how == THREADS else name for name in alike}
        if mine[processor.name] not in self._apart:
            made = {key: self._another(how) for key in dict.fromkeys(mine.values())}
            self._apart |= made
            _at_once(made.values(), [each.facts for each in made.values()], 1 if under_mps() else _AT_ONCE)
        return self._apart[mine[processor.name]]

    def _processor(self, name: str, job: int) -> Processor:
        """Return a processor of the name that a plan gives a job; those of a pool are alike, so its first serves."""
        processors = members(self.platform[name])
        processor = self.platform[processors[0]]
        return processor if len(processors) == 1 else replace(processor, name=f"{name} {job}")

    def _fed(self, graph: Graph) -> list[NDArray[np.generic]]:
        """Return the inputs of a model, drawn once."""
        key = fed(graph)
        if key not in self._inputs:
            self._inputs[key] = tensors.model_inputs(graph, _INPUT_SEED)
        return self._inputs[key]

    def bound_alone(self, found: Setting, parts: Parts) -> Iterator[Loaded]:
        """Yield models outside the workload, loaded, with inputs; at most as many as there are instances."""
        owners = self._owners([graph for graph, _ in parts])
        for client, (graph, cuts), owner in zip(found.clients, parts, owners, strict=True):
            borders = pairwise([0, *cuts, len(graph.operators)])
            processors = (self.platform[found.processors[each[0]]] for each in client.processors)
            jobs = [(range(a, b), processor) for (a, b), processor in zip(borders, processors, strict=True)]
            weights = owner if self._own(graph) else _SHARED
            yield self._taken(graph, jobs, owner, weights)

    def _owners(self, graphs: Sequence[Graph]) -> list[str]:
        """Return the owner of each of some models: where possible an instance of the same model, to share its weights.

        All are different, and all are instances of the workload, so that graphs which run at the same time are captured
        on different streams.
        """
        free = {c.name: c.graph.digest for c in self.joined.components}
        if len(graphs) > len(free):
            raise UnavailableError(f"{len(graphs)} models beside a workload of {len(free)}")
        found: list[str | None] = []
        for graph in graphs:
            found.append(next((name for name, digest in free.items() if digest == graph.digest), None))
            free.pop(found[-1] or "", None)
        left = iter(free)
        return [name or next(left) for name in found]

    def _own(self, graph: Graph) -> bool:
        return any(
            c.graph.digest == graph.digest and self.workload.client_of(i).own_weights
            for i, c in enumerate(self.joined.components)
        )

    def agreement(self, graph: Graph, outputs: Outputs, processors: Sequence[Processor], off: float = 0.0) -> Agreement:
        """Compare outputs of a model with those of the whole model, computed by LiteRT on the CPU."""
        return tensors.agreement(graph, outputs, self._references.outputs(graph), tolerance(processors) + off)

    def forget(self, graph: Graph) -> None:
        """Release a decomposed model that ran only for its error."""
        for bench in (self._bench, *self._apart.values()):
            bench.forget(graph)
        self._inputs.pop(fed(graph), None)

    def facts(self) -> dict[str, Any]:
        """Return device, versions, timings of kernels, and memory in use."""
        return self._bench.facts()
