"""Costs of a workload's jobs: operators and triples on each kind of processor, and slowdowns between processors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, permutations
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from evaluators.simulated import rewritten_s
from evaluators.workload.lowered import Lowerings
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import Grids, Price, WorkloadSimulator
from evaluators.workload.setting import HOST, RUNS_AS, SLICED, Setting, closed_loops, demand
from evaluators.workload.simulate import JobCost
from search_spaces.core.bounded import built
from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.errors import RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import LayerRanks
from search_spaces.core.platform import Processor
from search_spaces.core.pools import single_processors
from search_spaces.core.wording import plural
from search_spaces.rewrites.lower import Lowered, lowering
from search_spaces.rewrites.tucker import Ranks

_RUNS, _TIMED_S, _FEWEST, _MOST = 2, 0.12, 4, 60
_LEAST_S = 1e-7
_MOST_REWRITTEN = 256
_PARTNERS = 2  # models that run beside a timed one; on time-sliced processors, it runs beside itself

Size = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]
"""A finite number that is not negative: seconds, a factor, an error."""

Alone = Callable[[Setting, Sequence[tuple[Graph, Sequence[int]]], int], list[Outcome]]
"""Runs models, cut as given, in a setting for a number of runs."""


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Measured costs in seconds; kinds of processors are those of :func:`kind_of`.

    Attributes:
        whole_s: model (digest) → kind → the model as one job.
        operator_s: model → kind → each operator; their sum and one ``job_s`` are ``whole_s``.
        job_s: kind → overhead of a job, for its call and the scheduler.
        slowed: model → ``victim|other`` (kinds) → factor on its time while the other processor runs as well, beyond
            the fair share of time slices.
        triple_s: model → kind → convolution and ranks, as ``4: 16x24`` → its triple, as ``operator_s``.
    """

    whole_s: Mapping[str, Mapping[str, Size]]
    operator_s: Mapping[str, Mapping[str, Sequence[Size]]]
    job_s: Mapping[str, Size]
    slowed: Mapping[str, Mapping[str, Size]]
    triple_s: Mapping[str, Mapping[str, Mapping[str, Size]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values."""
        found = asdict(self)
        if not self.triple_s:
            del found["triple_s"]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PriceTable:
        """Build a table from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            RunFolderError: a field is missing or has the wrong structure, or a value is not a time.
        """
        return built(cls, data, "the job times in the trial log are", RunFolderError)

    def check(self, graphs: Iterable[Graph]) -> None:
        """Check that the costs of models and of all their operators are complete.

        Raises:
            RunFolderError: some are missing.
        """
        for graph in graphs:
            name, count, found = graph.name, len(graph.operators), self.operator_s.get(graph.digest)
            if found is None or graph.digest not in self.whole_s or graph.digest not in self.slowed:
                raise _damaged(f"there are none of {name!r}")
            for kind, each in found.items():
                if len(each) != count:
                    what = f"{name!r} has {plural(count, 'operator')}, but there are times of {len(each)} on {kind}"
                    raise _damaged(what)
                if kind not in self.whole_s[graph.digest] or kind not in self.job_s:
                    raise _damaged(f"some of processor kind {kind} are missing for {name!r}")

    def simulator(self, lowerings: Lowerings) -> WorkloadSimulator:
        """Return what predicts plans by these costs.

        Raises:
            RunFolderError: some costs are missing.
        """
        self.check(c.graph for c in lowerings.joined.components)
        return WorkloadSimulator(lowerings, self.price(single_processors(lowerings.platform)))

    def price(self, processors: Sequence[Processor]) -> Price:
        """Return the function that computes the cost of a job on one of these processors."""
        kinds = [kind_of(processor) for processor in processors]
        apart = [[a is b or a.excludes(b) for b in processors] for a in processors]
        rewritten: dict[tuple[str, str, str], NDArray[np.float64]] = {}

        def operators_of(model: Graph, lowered: Lowered, kind: str) -> Sequence[float] | NDArray[np.float64]:
            each = self.operator_s[model.digest][kind]
            if not lowered.rewritten:
                return each
            key = (model.digest, lowered.graph.digest, kind)
            if key not in rewritten:
                triples = self.triple_s.get(model.digest, {}).get(kind, {})

                def triple_s(operator: int, ranks: Ranks) -> NDArray[np.float64]:
                    return np.array([triples.get(str(LayerRanks(operator, ranks.inputs, ranks.outputs)), math.inf)])

                rewritten[key] = rewritten_s(model, lowered, np.array([each]), triple_s)[0]
                if len(rewritten) > _MOST_REWRITTEN:
                    rewritten.pop(next(iter(rewritten)))
            return rewritten[key]

        def cost(model: Graph, lowered: Lowered, processor: int, operators: tuple[int, ...]) -> JobCost:
            kind = processors[processor].timed_as
            if kind not in self.operator_s[model.digest]:
                return JobCost(math.inf)
            if len(operators) == len(model.operators) and not lowered.rewritten:
                work_s = self.whole_s[model.digest][kind]
            else:
                each = operators_of(model, lowered, kind)
                work_s = max(float(sum(each[o] for o in operators)) + self.job_s[kind], _LEAST_S)
            known = self.slowed[model.digest]
            slowed = tuple(
                1.0 if apart[processor][other] else known.get(f"{kinds[processor]}|{kinds[other]}", 1.0)
                for other in range(len(processors))
            )
            return JobCost(work_s, slowed)

        return cost


def _damaged(what: str) -> RunFolderError:
    return RunFolderError(f"the job times in the trial log are damaged: {what}", "run the study again in a new folder")


def kind_of(processor: Processor) -> str:
    """Return the kind of a processor; processors of one kind have the same costs."""
    options = processor.options
    apart = options.get(RUNS_AS) or (options.get(HOST, "process") if SLICED in options else "")
    return f"{processor.like}~{apart}" if apart else processor.like


def first_of_kinds(processors: Sequence[Processor]) -> dict[str, int]:
    """Return kind → number of the processor to time: the first, or the first that differs from none beside busy ones.

    Processors that only baselines use are left out.
    """
    found: dict[str, int] = {}
    for number, processor in enumerate(processors):
        known = found.get(processor.timed_as)
        plain = processor.like == processor.timed_as
        if processor.resources and (known is None or (plain and processors[known].like != processor.timed_as)):
            found[processor.timed_as] = number
    return found


@dataclass(frozen=True, slots=True)
class JobTimer:
    """Times jobs outside their workload.

    Attributes:
        processors: those of a workload, without pools.
        alone: runs models.
        progress: called with what is timed now.
    """

    processors: Sequence[Processor]
    alone: Alone
    progress: Callable[[str], None]

    def prices(
        self,
        graphs: Sequence[Graph],
        crowding: Callable[[Mapping[str, Mapping[str, float]]], Mapping[str, Mapping[str, float]]] | None = None,
    ) -> PriceTable:
        """Measure a table of costs.

        Args:
            crowding: returns :attr:`PriceTable.slowed`, given ``whole_s``; by default models are timed in pairs.

        Raises:
            UnavailableError: a processor failed, or does not support a model.
        """
        whole: dict[str, dict[str, float]] = {}
        each: dict[str, dict[str, list[float]]] = {}
        extra: dict[str, list[float]] = {}
        slowed: dict[str, dict[str, float]] = {}
        kinds = first_of_kinds(self.processors)
        for graph in graphs:
            whole[graph.digest], each[graph.digest] = {}, {}
            for kind, processor in kinds.items():
                self.progress(f"timing the operators of {graph.name} on {self.processors[processor].name}")
                each[graph.digest][kind], extra_s, whole[graph.digest][kind] = self._operators_s(graph, processor)
                extra.setdefault(kind, []).append(extra_s)
        for graph in graphs if crowding is None else ():
            self.progress(f"timing {graph.name} beside others")
            slowed[graph.digest] = self._contention(graph, graphs[:_PARTNERS], whole)
        known = slowed if crowding is None else crowding(whole)
        return PriceTable(whole, each, {k: statistics.median(v) for k, v in extra.items()}, known)

    def with_triples(
        self,
        table: PriceTable,
        graphs: Sequence[Graph],
        grids: Grids,
        forget: Callable[[Graph], None],
    ) -> PriceTable:
        """Return a table with the times of all triples of some rank sets added; times that it has are kept.

        A model is decomposed by each set as a whole, and run operator by operator. If a kind of processor does not run
        it, the table has no times of the set's triples there, which means that it cannot.

        Args:
            forget: called with each decomposed model once it was timed.

        Raises:
            RewriteError, ModelError: the weights cannot be read.
        """
        found = {model: {kind: dict(of) for kind, of in each.items()} for model, each in table.triple_s.items()}
        for graph in graphs:
            known = table.triple_s.get(graph.digest, {})
            for number, ranks in enumerate(grids.get(graph.digest, ()), 1):
                # All kinds that can run it were timed together.
                if all(any(str(layer) in times for times in known.values()) for layer in ranks):
                    continue
                self.progress(
                    f"timing {plural(len(ranks), 'decomposed convolution')} of {graph.name}, rank set {number}"
                )
                made = lowering(graph).decomposed_to_time(ranks)
                for kind, processor in first_of_kinds(self.processors).items():
                    try:
                        each, _, _ = self._operators_s(made.graph, processor)
                    except UnavailableError as error:
                        name = self.processors[processor].name
                        self.progress(f"rank set {number} of {graph.name} does not run on {name}: {error.what}")
                        continue
                    times = found.setdefault(graph.digest, {}).setdefault(kind, {})
                    for layer, took_s in _by_layer(ranks, each, made.origins).items():
                        times.setdefault(layer, took_s)
                forget(made.graph)
        return replace(table, triple_s=found)

    def _operators_s(self, graph: Graph, processor: int) -> tuple[list[float], float, float]:
        """Return the seconds of each operator, the cost of a job, and the seconds of the model as one job.

        The operators' are scaled to those of the whole model less one job overhead.

        Raises:
            UnavailableError: the processor failed.
        """
        whole_s, count = self._median_s([processor], [graph]), len(graph.operators)
        found = closed_loops([processor], [_requests(whole_s)], self.processors, count)
        stage_s, gap_s = _stages(self.alone(found, [(graph, range(1, count))], 2)[-1], count)
        job_s = max(0.0, (float(stage_s.sum()) - whole_s) / max(1, count - 1)) if count > 1 else 0.0
        own = np.maximum(stage_s - job_s, 0.02 * stage_s)
        return [float(t) for t in own * max(1e-9, whole_s - job_s) / own.sum()], job_s + gap_s, whole_s

    def _contention(
        self, graph: Graph, partners: Sequence[Graph], whole: Mapping[str, Mapping[str, float]]
    ) -> dict[str, float]:
        """Return the factor on a model's time beside another one, for each pair of kinds of processors."""
        processors = self.processors
        pairs: dict[str, tuple[int, int]] = {}
        # Processors without a demand only provide a process.
        running = [number for number, processor in enumerate(processors) if demand(processor)]
        for a, b in permutations(running, 2):
            one, other = processors[a], processors[b]
            sliced = SLICED in one.options
            alike = kind_of(one) == kind_of(other) or not sliced
            if sliced == (SLICED in other.options) and alike and not one.excludes(other):
                pairs.setdefault(f"{kind_of(one)}|{kind_of(other)}", (a, b))
        found = {}
        for name, (a, b) in pairs.items():
            factors = []
            mine, theirs = demand(processors[a]), demand(processors[b])
            fair = max(1.0, *(share + theirs.get(resource, 0.0) for resource, share in mine.items()))
            for partner in partners if SLICED not in processors[a].options else (graph,):
                took_s = self._median_s([a, b], [graph, partner], whole)
                factors.append(took_s / (whole[graph.digest][processors[a].timed_as] * fair))
            found[name] = max(1.0, statistics.fmean(factors))
        return found

    def _median_s(
        self, on: Sequence[int], graphs: Sequence[Graph], known: Mapping[str, Mapping[str, float]] | None = None
    ) -> float:
        """Return the median latency of the first of several models that run at once in closed loops, each on its own.

        If several run, the first sends enough requests, and the others send theirs for as long as that may take.
        """
        parts = [(graph, ()) for graph in graphs]
        if known is None:
            first = self.alone(closed_loops(on, [2] * len(on), self.processors), parts, 1)[0]
            guess_s = min(r.latency_s or math.inf for r in first.requests[0])
            counts = [_requests(guess_s)] * len(on)
        else:
            times = [known[g.digest][self.processors[n].timed_as] for g, n in zip(graphs, on, strict=True)]
            counts = [max(_FEWEST, math.ceil(_requests(times[0]) * times[0] / t * 1.3)) for t in times]
            counts[0] = _requests(times[0])
        outcomes = self.alone(closed_loops(on, counts, self.processors), parts, _RUNS)[1:]
        return statistics.median(r.latency_s for o in outcomes for r in o.requests[0] if r.latency_s is not None)


def _by_layer(ranks: RankSet, each: Sequence[float], origins: Sequence[int]) -> dict[str, float]:
    """Return the seconds of each triple, the sum of its operators."""
    return {
        str(layer): sum(t for t, origin in zip(each, origins, strict=True) if origin == layer.operator)
        for layer in ranks
    }


def _requests(took_s: float) -> int:
    return int(np.clip(_TIMED_S / max(took_s, 1e-6), _FEWEST, _MOST))


def _stages(found: Outcome, count: int) -> tuple[Any, float]:
    """Return each stage's median seconds, and the median gap between two jobs of one model."""
    times: list[list[float]] = [[] for _ in range(count)]
    for event in found.timeline.events:
        times[event.stage].append(event.end_s - event.start_s)
    if not all(times):
        raise UnavailableError("a job was not run")
    events = sorted(found.timeline.events, key=lambda e: e.start_s)
    gaps = [b.start_s - a.end_s for a, b in pairwise(events)]
    return np.array([statistics.median(t) for t in times]), statistics.median(gaps) if gaps else 0.0
