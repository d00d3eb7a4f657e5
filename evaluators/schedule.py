"""Timelines, the rules by which stages run on processors, and pipelines of inferences.

A processor runs one stage at a time (``slots`` of them), in the order of the plan. A stage is ready when every stage
that it reads from is done and its tensors are transferred. Processors that exclude each other take turns; the earlier
stage of the plan goes first. Processors that run at once may slow each other: a stage then progresses at ``1 / (product
of the factors of the busy processors)``.

A stream of inferences is pipelined in rounds (software pipelining: Rau and Glaeser 1981, with the plan's order as
schedule). In each round a processor runs each of its stages once, in the order of the plan, and each for another
inference: the lag of a stage, in rounds, is the number of changes of processors on the way to it. So no processor waits
for another one within a round, and the period of a full pipeline is the load of the busiest processor in a round.
Processors that exclude each other take turns within a round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, WrapSerializer

from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform

_WORK = ("queue", "wait", "wait for nothing")
TERMS = ("map in", "copy in", "give back in", *_WORK, "map out", "copy out", "give back out")
"""What a stage on an accelerator takes: to map its inputs, copy into them and give them back, to queue its kernels and
to wait for them, and the same for its outputs. A wait where nothing is queued does not count for the stage."""


@dataclass(frozen=True, slots=True)
class Event:
    """One stage on one processor, in seconds since the start of the inference.

    Attributes:
        terms_s: of a stage on an accelerator, what it takes beside its kernels (:data:`TERMS`), in seconds.
    """

    stage: int
    processor: str
    start_s: float
    end_s: float
    terms_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def copied_s(self) -> float:
        """The part of it that moved tensors between the accelerator's memory and the CPU's."""
        return sum(took for term, took in self.terms_s.items() if term not in _WORK)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one inference, ordered by start."""

    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    @property
    def terms_s(self) -> dict[str, float]:
        """The terms of all stages on accelerators, summed; empty where there are none."""
        found = dict.fromkeys(TERMS, 0.0) if any(e.terms_s for e in self.events) else {}
        return {term: sum(e.terms_s.get(term, 0.0) for e in self.events) for term in found}

    def slower(self, factor: float) -> Timeline:
        """Return the same events when all takes ``factor`` times as long."""
        return Timeline(
            tuple(
                replace(
                    e,
                    start_s=e.start_s * factor,
                    end_s=e.end_s * factor,
                    terms_s={term: took * factor for term, took in e.terms_s.items()},
                )
                for e in self.events
            )
        )


Events = Annotated[
    Timeline,
    BeforeValidator(lambda events: {"events": events}),
    WrapSerializer(lambda found, dumped: dumped(found)["events"]),
]
"""A timeline that a document holds as the list of its events."""

Span = tuple[float, float]
"""Start and end of a task, in seconds."""


@dataclass(frozen=True, slots=True)
class Law:
    """Which processors exclude each other, by index.

    Attributes:
        excluded: for each processor the others that cannot run while it does.
        slots: how many tasks a processor runs at once.
    """

    excluded: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]

    @classmethod
    def of(cls, platform: Platform) -> Law:
        """Return the law of a platform; processors are numbered in its order."""
        processors = platform.processors
        return cls(
            tuple(
                tuple(j for j, b in enumerate(processors) if j != i and a.excludes(b)) for i, a in enumerate(processors)
            ),
            tuple(processor.slots for processor in processors),
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One stage of one inference.

    Attributes:
        processor: its index.
        work_s: seconds without slowdown.
        needs: the earlier tasks that it reads from, and the seconds of the transfer from each.
        slowed: for each processor the factor on the task's time while that processor is busy; empty for no slowdown.
    """

    processor: int
    work_s: float
    needs: tuple[tuple[int, float], ...] = ()
    slowed: tuple[float, ...] = ()


def run_tasks(tasks: Sequence[Task], law: Law) -> list[Span]:
    """Return when each task runs.

    Raises:
        UnavailableError: a task can never start, or a time is not finite.
    """
    for index, task in enumerate(tasks):
        if not 0.0 <= task.work_s < math.inf:
            raise UnavailableError(f"stage {index} is predicted to take {task.work_s} s, which is not a time")
    spans = _in_order(tasks, law)
    # Tasks that never overlap do not slow each other.
    if not any(task.slowed for task in tasks) or not _overlap(spans):
        return spans
    return _Run(tasks, law).finish()


def _overlap(spans: Sequence[Span]) -> bool:
    end = 0.0
    for start, stop in sorted(spans):
        if start < end:
            return True
        end = max(end, stop)
    return False


def _in_order(tasks: Sequence[Task], law: Law) -> list[Span]:
    """Return when tasks run that do not slow each other, in one pass in their order."""
    free: list[list[float]] = [[0.0] * slots for slots in law.slots]
    last = [0.0] * len(law.slots)
    spans: list[Span] = []
    for task in tasks:
        processor = task.processor
        slots = free[processor]
        start = slots[0]
        for other in law.excluded[processor]:
            start = max(start, last[other])
        for before, delay_s in task.needs:
            start = max(start, spans[before][1] + delay_s)
        end = start + task.work_s
        slots[0] = end
        if len(slots) > 1:
            slots.sort()
        last[processor] = max(last[processor], end)
        spans.append((start, end))
    return spans


@dataclass(slots=True)
class _Run:
    """Simulation from event to event: a task ends or becomes ready, and the rates of all running ones change."""

    tasks: Sequence[Task]
    law: Law
    now_s: float = 0.0
    left: dict[int, float] = field(default_factory=dict)  # running task → work that is left
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    def finish(self) -> list[Span]:
        self.waiting = list(range(len(self.tasks)))
        while self.waiting or self.left:
            self._start()
            rates = {index: 1.0 / self._slowed(index) for index in self.left}
            ends = [self.left[i] / rate for i, rate in rates.items()]
            wakes = [at - self.now_s for i in self.waiting if (at := self._ready_s(i)) is not None and at > self.now_s]
            step_s = min(ends + wakes, default=math.inf)
            if step_s == math.inf:
                raise UnavailableError("stages wait for each other forever", "this order cannot be run")
            self._advance(step_s, rates)
        return [(self.started[i], self.ended[i]) for i in range(len(self.tasks))]

    def _advance(self, step_s: float, rates: dict[int, float]) -> None:
        self.now_s += step_s
        for index, rate in rates.items():
            self.left[index] -= step_s * rate
            # A remainder from rounding is not work.
            if self.left[index] <= 1e-12 * max(self.tasks[index].work_s, self.now_s):
                del self.left[index]
                self.ended[index] = self.now_s

    def _start(self) -> None:
        """Start tasks that can start now; a waiting one blocks later ones on its processor and those it excludes."""
        claimed: Counter[int] = Counter()
        busy = Counter(self.tasks[index].processor for index in self.left)
        for index in list(self.waiting):
            processor = self.tasks[index].processor
            free = self.law.slots[processor] - busy[processor] - claimed[processor]
            blocked = any(busy[o] or claimed[o] for o in self.law.excluded[processor])
            ready_s = self._ready_s(index)
            if free > 0 and not blocked and ready_s is not None and ready_s <= self.now_s:
                self.waiting.remove(index)
                self.started[index] = self.now_s
                self.left[index] = self.tasks[index].work_s
                busy[processor] += 1
            else:
                claimed[processor] += 1

    def _ready_s(self, index: int) -> float | None:
        task = self.tasks[index]
        at = 0.0
        for before, delay_s in task.needs:
            if before not in self.ended:
                return None
            at = max(at, self.ended[before] + delay_s)
        return at

    def _slowed(self, index: int) -> float:
        task = self.tasks[index]
        if not task.slowed:
            return 1.0
        processors = {self.tasks[other].processor for other in self.left if other != index} - {task.processor}
        return math.prod(task.slowed[processor] for processor in processors)


def timeline(
    spans: Sequence[Span],
    processors: Sequence[str],
    terms_s: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> Timeline:
    """Return spans as the events of one inference; span ``i`` is stage ``i``, on ``processors[i]``.

    Args:
        terms_s: stage → its terms, where they are known.
    """
    events = [
        Event(i, processor, start, end, terms_s.get(i, {}))
        for i, ((start, end), processor) in enumerate(zip(spans, processors, strict=True))
    ]
    events.sort(key=lambda e: (e.start_s, e.stage))
    return Timeline(tuple(events))


def busiest_s(tasks: Sequence[Task], law: Law) -> float:
    """Return the seconds of work of the busiest processor per inference, a lower bound of the period of a stream.

    A processor with several slots shares its work among them.
    """
    busy: dict[int, float] = {}
    for task in tasks:
        busy[task.processor] = busy.get(task.processor, 0.0) + task.work_s
    return max((work_s / law.slots[processor] for processor, work_s in busy.items()), default=0.0)


SPARE_FRAMES = 2
"""Inferences in flight beyond those that the lags need, so that a delayed processor can catch up."""

_STEADY = 8


@dataclass(frozen=True, slots=True)
class Rounds:
    """The pipeline schedule of a plan for a stream of inferences.

    Attributes:
        lag: of each stage: in round ``r`` it runs for inference ``r - lag``.
    """

    lag: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of rounds from the first stage of an inference to its last."""
        return max(self.lag)

    @property
    def frames(self) -> int:
        """Maximum number of inferences in flight; each has its own memory."""
        return self.depth + 1 + SPARE_FRAMES


@dataclass(frozen=True, slots=True)
class Arc:
    """A stage that waits for another one, in every round.

    Attributes:
        before, after: stages; ``after`` waits.
        tokens: ``after`` waits for the run of ``before`` that many rounds ago; not in the first rounds.
    """

    before: int
    after: int
    tokens: int


def needs_of(graph: Graph, plan: Plan) -> list[frozenset[int]]:
    """Return, for each stage, the other stages that it reads from."""
    place = {operator: i for i, stage in enumerate(plan.stages) for operator in stage.operators}
    return [
        frozenset(place[b] for o in stage.operators for b in graph.predecessors(o)) - {i}
        for i, stage in enumerate(plan.stages)
    ]


def rounds(plan: Plan, platform: Platform, needs: Sequence[Collection[int]]) -> Rounds:
    """Return the pipeline schedule of a plan; ``needs`` as :func:`needs_of` returns them."""
    processors = {name: platform[name] for name in plan.by_processor()}
    lag: list[int] = []
    for index, stage in enumerate(plan.stages):
        least = 0
        for other, before in enumerate(plan.stages[:index]):
            same = before.processor == stage.processor
            turns = not same and processors[before.processor].excludes(processors[stage.processor])
            if same or turns or other in needs[index]:
                least = max(least, lag[other] + (not same and not turns))
        lag.append(least)
    return Rounds(tuple(lag))


def arcs(plan: Plan, platform: Platform, needs: Sequence[Collection[int]], how: Rounds) -> list[Arc]:
    """Return the waits between stages on different processors: for inputs, for turns, and for an inference's memory."""
    lag, stages = how.lag, plan.stages
    found = [
        Arc(before, after, lag[after] - lag[before])
        for after in range(len(stages))
        for before in sorted(needs[after])
        if stages[before].processor != stages[after].processor
    ]
    processors = list(plan.by_processor())
    for number, one in enumerate(processors):
        for other in processors[number + 1 :]:
            if platform[one].excludes(platform[other]):
                turns = [i for i, s in enumerate(stages) if s.processor in (one, other)]
                found += [
                    Arc(a, b, int(b <= a))
                    for a, b in zip(turns, [*turns[1:], turns[0]], strict=True)
                    if stages[a].processor != stages[b].processor
                ]
    read = {before for each in needs for before in each}
    for last in (i for i in range(len(stages)) if i not in read):
        for first in (i for i in range(len(stages)) if not needs[i]):
            if stages[last].processor != stages[first].processor:
                found.append(Arc(last, first, how.frames - lag[last] + lag[first]))
    least: dict[tuple[int, int], int] = {}
    for arc in found:
        key = arc.before, arc.after
        least[key] = min(arc.tokens, least.get(key, arc.tokens))
    return [Arc(before, after, tokens) for (before, after), tokens in least.items()]


def in_rounds(tasks: Sequence[Task], how: Rounds, inferences: int) -> tuple[list[Task], list[int]]:
    """Return the tasks of several inferences in pipeline order, and the inference of each.

    Args:
        tasks: of one inference, task ``i`` for stage ``i``.
    """
    place: dict[tuple[int, int], int] = {}
    found: list[Task] = []
    whose: list[int] = []
    read = {before for task in tasks for before, _ in task.needs}
    sinks = [i for i in range(len(tasks)) if i not in read]
    for turn in range(inferences + how.depth):
        for index, task in enumerate(tasks):
            inference = turn - how.lag[index]
            if not 0 <= inference < inferences:
                continue
            needs = [(place[inference, before], delay) for before, delay in task.needs]
            if not task.needs and inference >= how.frames:
                needs += [(place[inference - how.frames, sink], 0.0) for sink in sinks]
            place[inference, index] = len(found)
            found.append(Task(task.processor, task.work_s, tuple(needs), task.slowed))
            whose.append(inference)
    return found, whose


def stream_period_s(tasks: Sequence[Task], law: Law, how: Rounds) -> float:
    """Return the seconds from one result to the next while the pipeline is full.

    Raises:
        UnavailableError: a task can never start, or a time is not finite.
    """
    count = how.frames + _STEADY
    # Inferences that drain the pipeline at the end are not counted.
    ordered, whose = in_rounds(tasks, how, 2 * count + how.depth)
    ends = [0.0] * (2 * count + how.depth)
    for inference, (_, end) in zip(whose, run_tasks(ordered, law), strict=True):
        ends[inference] = max(ends[inference], end)
    # With nearly equal loads, the simulation does not reach a steady state.
    return max((ends[2 * count - 1] - ends[count - 1]) / count, busiest_s(tasks, law))
