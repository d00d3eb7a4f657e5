"""What the jobs of a workload cost on this machine: each operator on each kind of lane, and lanes that run at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.simulated import rewritten_s
from evaluators.workload.desk import Seat
from evaluators.workload.outcome import Outcome
from evaluators.workload.predicted import Price
from evaluators.workload.setting import HOST, SLICED, Setting, demand
from evaluators.workload.simulate import JobCost
from search_spaces.errors import RunFolderError, UnavailableError
from search_spaces.graph import Graph
from search_spaces.plan import LayerRanks
from search_spaces.platform import Processor
from search_spaces.rewrites.lower import Lowered
from search_spaces.rewrites.tucker import Ranks

_RUNS, _TIMED_S, _FEWEST, _MOST = 2, 0.12, 4, 60
_LEAST_S = 1e-7
_MOST_REWRITTEN = 256
_PARTNERS = 2  # others that a model is timed beside; lanes that the system slices are timed with the model itself

Alone = Callable[[Setting, Sequence[tuple[Graph, Sequence[int]]], int], list[Outcome]]
"""Runs models, cut as told, on a setting some times."""


@dataclass(frozen=True, slots=True)
class PriceTable:
    """What was measured; kinds of lanes are told by :func:`kind_of`.

    Attributes:
        whole_s: model (digest) → kind → the model as one job.
        operator_s: the same, each operator, adding up to ``whole_s`` with one job's ``job_s``.
        job_s: kind → what a job costs beside its operators: to be called, and to be taken from the desk.
        slowed: model → ``victim|other`` (kinds) → factor on its time while the other lane runs as well, beyond what two
            lanes that the system slices take from each other.
        triple_s: model → kind → convolution and ranks, as ``4: 16x24`` → the triple in its place, as ``operator_s``.
    """

    whole_s: Mapping[str, Mapping[str, float]]
    operator_s: Mapping[str, Mapping[str, Sequence[float]]]
    job_s: Mapping[str, float]
    slowed: Mapping[str, Mapping[str, float]]
    triple_s: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "whole_s": {m: dict(each) for m, each in self.whole_s.items()},
            "operator_s": {m: {k: list(v) for k, v in each.items()} for m, each in self.operator_s.items()},
            "job_s": dict(self.job_s),
            "slowed": {m: dict(each) for m, each in self.slowed.items()},
            **({"triple_s": dict(self.triple_s)} if self.triple_s else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PriceTable:
        """Build a table from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            RunFolderError: a field is missing, is not nested as it should be, or holds what is no time.
        """
        try:
            operators = _mapping(data["operator_s"])
            triples = _mapping(data.get("triple_s", {}))
            return cls(
                {model: _times(each) for model, each in _mapping(data["whole_s"]).items()},
                {m: {k: _row(row) for k, row in _mapping(each).items()} for m, each in operators.items()},
                _times(data["job_s"]),
                {model: _times(each) for model, each in _mapping(data["slowed"]).items()},
                {m: {k: _times(of) for k, of in _mapping(each).items()} for m, each in triples.items()},
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunFolderError(f"the prices in the trial log are damaged: {error!r}") from error

    def price(self, lanes: Sequence[Processor]) -> Price:
        """Return what tells the cost of a job on one of some lanes."""
        kinds = [kind_of(lane) for lane in lanes]
        apart = [[a is b or _apart(a, b) for b in lanes] for a in lanes]
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

        def cost(model: Graph, lowered: Lowered, lane: int, operators: tuple[int, ...]) -> JobCost:
            kind = lanes[lane].like
            if kind not in self.operator_s[model.digest]:
                return JobCost(math.inf)
            if len(operators) == len(model.operators) and not lowered.rewritten:
                work_s = self.whole_s[model.digest][kind]
            else:
                each = operators_of(model, lowered, kind)
                work_s = max(float(sum(each[o] for o in operators)) + self.job_s[kind], _LEAST_S)
            known = self.slowed[model.digest]
            slowed = tuple(
                1.0 if apart[lane][other] else known.get(f"{kinds[lane]}|{kinds[other]}", 1.0)
                for other in range(len(lanes))
            )
            return JobCost(work_s, slowed)

        return cost


def kind_of(lane: Processor) -> str:
    """Return what lanes with the same costs have in common."""
    sliced = f"~{lane.options.get(HOST, 'process')}" if SLICED in lane.options else ""
    return f"{lane.like}{sliced}"


def first_of_kinds(lanes: Sequence[Processor]) -> dict[str, int]:
    """Return for each kind of lane the number of the first one; those that only baselines use are none."""
    found: dict[str, int] = {}
    for number, processor in enumerate(lanes):
        if processor.resources:
            found.setdefault(processor.like, number)
    return found


def one_seat(lane: int, requests: int, lanes: Sequence[Processor], jobs: int = 1) -> Setting:
    """Return a setting in which one model asks in a closed loop, all on one lane."""
    return _seats([lane], requests, lanes, jobs)


def measure_prices(
    graphs: Sequence[Graph],
    lanes: Sequence[Processor],
    alone: Alone,
    progress: Callable[[str], None],
    crowding: Callable[[Mapping[str, Mapping[str, float]]], Mapping[str, Mapping[str, float]]] | None = None,
) -> PriceTable:
    """Measure a table.

    Args:
        crowding: returns :attr:`PriceTable.slowed`, given ``whole_s``; by default models are timed in pairs.

    Raises:
        UnavailableError: a lane failed, or none takes a model.
    """
    whole: dict[str, dict[str, float]] = {}
    each: dict[str, dict[str, list[float]]] = {}
    extra: dict[str, list[float]] = {}
    slowed: dict[str, dict[str, float]] = {}
    kinds = first_of_kinds(lanes)
    for graph in graphs:
        whole[graph.digest], each[graph.digest] = {}, {}
        for kind, lane in kinds.items():
            progress(f"timing the operators of {graph.name} on {lanes[lane].name}")
            whole_s = whole_s_on(graph, lane, lanes, alone)
            each[graph.digest][kind], extra_s = operators_s(graph, lane, lanes, alone, whole_s)
            whole[graph.digest][kind] = whole_s
            extra.setdefault(kind, []).append(extra_s)
    for graph in graphs if crowding is None else ():
        progress(f"timing {graph.name} beside others")
        slowed[graph.digest] = _contention(graph, graphs[:_PARTNERS], lanes, alone, whole)
    known = slowed if crowding is None else crowding(whole)
    return PriceTable(whole, each, {k: statistics.median(v) for k, v in extra.items()}, known)


def operators_s(
    graph: Graph, lane: int, lanes: Sequence[Processor], alone: Alone, whole_s: float
) -> tuple[list[float], float]:
    """Return what each operator takes, all adding up to the whole model less one job's own time; and what a job costs.

    Raises:
        UnavailableError: the lane failed.
    """
    count = len(graph.operators)
    cut = alone(one_seat(lane, _requests(whole_s), lanes, count), [(graph, range(1, count))], 2)[-1]
    stage_s, gap_s = _stages(cut, count)
    job_s = max(0.0, (float(stage_s.sum()) - whole_s) / max(1, count - 1)) if count > 1 else 0.0
    own = np.maximum(stage_s - job_s, 0.02 * stage_s)
    return [float(t) for t in own * max(1e-9, whole_s - job_s) / own.sum()], job_s + gap_s


def whole_s_on(graph: Graph, lane: int, lanes: Sequence[Processor], alone: Alone) -> float:
    """Return what a model takes as one job, alone on a lane; errors as :func:`operators_s`."""
    return _median_s(alone, [lane], [graph], lanes)[0]


def _contention(
    graph: Graph,
    partners: Sequence[Graph],
    lanes: Sequence[Processor],
    alone: Alone,
    whole: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Return how much longer a model takes beside another one, for each pair of kinds of lanes that run at once."""
    pairs: dict[str, tuple[int, int]] = {}
    for a, one in enumerate(lanes):
        for b, other in enumerate(lanes):
            sliced = SLICED in one.options, SLICED in other.options
            if a != b and not _apart(one, other) and sliced[0] == sliced[1] and _runs(one) and _runs(other):
                if all(sliced) and kind_of(one) != kind_of(other):
                    continue
                pairs.setdefault(f"{kind_of(one)}|{kind_of(other)}", (a, b))
    found = {}
    for name, (a, b) in pairs.items():
        factors = []
        for partner in partners if SLICED not in lanes[a].options else (graph,):
            took_s = _median_s(alone, [a, b], [graph, partner], lanes, whole)[0]
            fair = max(1.0, *(demand(lanes[a]).get(r, 0.0) + demand(lanes[b]).get(r, 0.0) for r in demand(lanes[a])))
            factors.append(took_s / (whole[graph.digest][lanes[a].like] * fair))
        found[name] = max(1.0, statistics.fmean(factors))
    return found


def _runs(lane: Processor) -> bool:
    """Return whether jobs are given to a lane; one that only lends its process to others has no demands."""
    return bool(demand(lane))


def _apart(one: Processor, other: Processor) -> bool:
    return one.excludes(other)


def _median_s(
    alone: Alone,
    on: Sequence[int],
    graphs: Sequence[Graph],
    lanes: Sequence[Processor],
    known: Mapping[str, Mapping[str, float]] | None = None,
) -> list[float]:
    """Return the median latency of models that ask in closed loops on lanes of their own, at the same time.

    Where several run, the first asks some times, and the others for as long as it may take.
    """
    if known is None:
        first = alone(_seats(on, 2, lanes, 1), [(g, ()) for g in graphs], 1)[0]
        guess_s = min(r.latency_s or math.inf for r in first.requests[0])
        counts = [_requests(guess_s)] * len(on)
    else:
        times = [known[g.digest][lanes[lane].like] for g, lane in zip(graphs, on, strict=True)]
        counts = [max(_FEWEST, math.ceil(_requests(times[0]) * times[0] / t * 1.3)) for t in times]
        counts[0] = _requests(times[0])
    outcomes = alone(_seats(on, counts, lanes, 1), [(g, ()) for g in graphs], _RUNS)[1:]
    return [
        statistics.median(r.latency_s for o in outcomes for r in o.requests[k] if r.latency_s is not None)
        for k in range(len(on))
    ]


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


def _seats(on: Sequence[int], requests: int | Sequence[int], lanes: Sequence[Processor], jobs: int) -> Setting:
    counts = [requests] * len(on) if isinstance(requests, int) else list(requests)
    seats = tuple(Seat(((lane,),) * jobs, (0,), n, closed=True) for lane, n in zip(on, counts, strict=True))
    excluded = tuple(sum(1 << j for j, b in enumerate(lanes) if i == j or a.excludes(b)) for i, a in enumerate(lanes))
    stages = tuple(tuple(range(k * jobs, (k + 1) * jobs)) for k in range(len(on)))
    return Setting(seats, tuple(range(len(on))), stages, tuple(p.name for p in lanes), excluded)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.40} is no mapping")
    return value


def _times(value: Any) -> dict[str, float]:
    return {name: _time(each) for name, each in _mapping(value).items()}


def _row(value: Any) -> list[float]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r:.40} is no list")
    return [_time(each) for each in value]


def _time(value: Any) -> float:
    """Return seconds, or a factor."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{value!r:.40} is no time")
    return float(value)
