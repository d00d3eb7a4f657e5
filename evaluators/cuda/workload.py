"""Workloads on the streams of a GPU: jobs as captured graphs, replayed from one process, and their costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, Capabilities
from evaluators.cuda.client import Bench, Loaded
from evaluators.cuda.devices import EXTRA, tolerance
from evaluators.cuda.session import References, fed
from evaluators.litert import tensors
from evaluators.workload.host import Execution, MeasuredWorkload, Outputs, Parts
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Objective, Outcome, outcome
from evaluators.workload.prices import JobTimer, PriceTable, kind_of
from evaluators.workload.setting import Setting, closed_loops
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Dispatch
from search_spaces.core.platform import Processor
from search_spaces.core.pools import members

_TIMED_S, _FEWEST, _MOST = 0.2, 6, 200


def crowding(
    graphs: Sequence[Graph], timer: JobTimer, whole_s: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return for each model the factor by which its jobs slow down for each other processor that is busy.

    All instances run in closed loops, each on a stream of its own, as far as there are streams. One that takes ``r``
    times as long beside ``k - 1`` others is slowed by ``r ** (1 / (k - 1))`` by each of them. Where there are
    processors of several precisions, all of one precision are timed, and mixed pairs get the larger factor.

    Args:
        graphs: one for each instance.
        whole_s: model → kind of processor → seconds of the model alone.
    """
    groups: dict[str, list[int]] = {}
    for number, processor in enumerate(timer.processors):
        groups.setdefault(kind_of(processor), []).append(number)
    found: dict[str, dict[str, float]] = {graph.digest: {} for graph in graphs}
    for kind, numbers in groups.items():
        together = min(len(numbers), len(graphs))
        if together < 2:
            continue
        timer.progress(f"timing {together} models at once on {kind}")
        chosen = [graphs[i * len(graphs) // together] for i in range(together)]
        alone_s = [whole_s[graph.digest][kind] for graph in chosen]
        wanted_s = max(_TIMED_S, _FEWEST * max(alone_s))  # the same for all
        counts = [int(np.clip(wanted_s / max(s, 1e-6) / together, _FEWEST, _MOST)) for s in alone_s]
        setting = closed_loops(numbers[:together], counts, timer.processors)
        outcome = timer.alone(setting, [(graph, ()) for graph in chosen], 2)[-1]
        ratios: dict[str, list[float]] = {}
        for graph, requests, own_s in zip(chosen, outcome.requests, alone_s, strict=True):
            # In the second half of the fastest one's requests, others may have finished.
            times = [r.latency_s for r in requests[: len(requests) // 2 + 1] if r.latency_s is not None]
            ratios.setdefault(graph.digest, []).append(statistics.fmean(times) / own_s)
        for digest, factors in found.items():
            known = ratios.get(digest) or [r for each in ratios.values() for r in each]
            slow = max(1.0, statistics.fmean(known)) ** (1.0 / (together - 1))
            for other in groups:
                key, back = f"{kind}|{other}", f"{other}|{kind}"
                if other == kind or slow > factors.get(key, 1.0):
                    factors |= {key: slow, back: slow}
    return found


@dataclass(frozen=True, slots=True)
class _Execution:
    """Instances that one CUDA process runs, so that a job which fails makes the whole run fail."""

    bench: Bench
    found: Setting
    dispatch: Dispatch
    instances: Sequence[Loaded]
    failures: Mapping[int, str] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Run the workload once."""
        (scheduler,) = self.bench.run(self.found, self.dispatch, self.instances)
        return outcome(scheduler, self.found.stages, self.found.processors)


_INPUT_SEED = 0
_SHARED = ""  # name of the weights of instances that share them


class CudaWorkload(MeasuredWorkload[Loaded]):
    """A session of several models, all run by one process.

    Instances whose client sets ``own_weights`` have weights of their own on the device; all have buffers of their own.

    Args:
        bench: the computing process.
    """

    capabilities = Capabilities(decompose=True, outputs=True)
    keeps_outputs = False

    def __init__(self, lowerings: Lowerings, objective: Objective, bench: Bench) -> None:
        super().__init__(lowerings, objective)
        self._bench = bench
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
        return self._bench.take(model.graph, jobs, name, weights, self._fed(model.graph), model.after)

    def executor(self, found: Setting, dispatch: Dispatch, instances: Sequence[Loaded]) -> Execution:
        """Return what runs instances in a setting."""
        return _Execution(self._bench, found, dispatch, instances)

    def outputs(self, instance: Loaded) -> list[NDArray[np.generic]]:
        """Return the outputs of an instance's last request."""
        self._bench.ready(instance)
        return self._bench.outputs(instance)

    def release(self, instance: Loaded) -> None:
        """Release an instance; a second call does nothing."""
        self._bench.give_back(instance)

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
            yield self._bench.take(graph, jobs, owner, weights, self._fed(graph))

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
        self._bench.forget(graph)
        self._inputs.pop(fed(graph), None)

    def facts(self) -> dict[str, Any]:
        """Return device, versions, timings of kernels, and memory in use."""
        return self._bench.facts()
