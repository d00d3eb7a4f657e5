"""Simulation of a workload: jobs in the scheduler's queue, on processors that slow each other down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evaluators.workload.outcome import Outcome, outcome
from evaluators.workload.scheduler import NEVER_NS, Scheduler
from evaluators.workload.setting import SLICED, Setting, demand
from search_spaces.core.errors import UnavailableError
from search_spaces.core.plan import Dispatch
from search_spaces.core.platform import Platform
from search_spaces.core.pools import single_processors

_BEGIN_NS = 1  # 0 means no time in the scheduler
_ROUNDING_NS = 0.5
_MOST_KNOWN = 1 << 14


@dataclass(frozen=True, slots=True)
class JobCost:
    """One job on one processor.

    Attributes:
        work_s: seconds without slowdown.
        slowed: for each processor the factor while that processor is busy; empty for no slowdown.
        transfer_s: operator of another job that it reads from → seconds of the transfer from each processor, which this
            job spends.
    """

    work_s: float
    slowed: tuple[float, ...] = ()
    transfer_s: Mapping[int, Sequence[float]] = field(default_factory=dict)


Costs = Sequence[Sequence[Mapping[int, JobCost]]]
"""For each client and job: processor → cost."""


class Crowd:
    """Slowdown of processors that share resources.

    Processors whose demands on a resource add up to more than 1 share it fairly; the scheduler prevents that except for
    time-sliced processors. The factors of :attr:`JobCost.slowed` are in addition.
    """

    def __init__(self, platform: Platform) -> None:
        self._demands = [demand(processor) for processor in single_processors(platform)]
        self._sliced = any(SLICED in processor.options for processor in single_processors(platform))
        self._known: dict[tuple[int, tuple[int, ...], tuple[float, ...]], float] = {}

    def factor(self, processor: int, busy: tuple[int, ...], slowed: tuple[float, ...]) -> float:
        """Return the factor on a job's time while the processors ``busy``, its own included, run."""
        if (found := self._known.get(key := (processor, busy, slowed))) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._factor(processor, busy, slowed)
        return found

    def _factor(self, processor: int, busy: tuple[int, ...], slowed: tuple[float, ...]) -> float:
        others = [slowed[other] for other in busy if other != processor] if slowed else []
        if not self._sliced:
            return math.prod(others)
        mine = self._demands[processor]
        crowded = [sum(self._demands[other].get(name, 0.0) for other in busy) for name in mine]
        # Of processors that take turns on a resource, only one at a time slows a job on another resource.
        at_once = round(sum(min(1.0, c) for c in crowded) / max(sum(mine.values()), 1e-9)) - 1
        at_once = min(len(others), max(1, at_once))
        slow = math.prod(others) ** (at_once / len(others)) if others else 1.0
        return slow * max(1.0, *crowded)


def simulate(found: Setting, dispatch: Dispatch, costs: Costs, crowd: Crowd) -> Outcome:
    """Simulate one run of a workload.

    Args:
        costs: for each client and job of ``found``, on each processor that may run the job.

    Raises:
        UnavailableError: a time is not finite, or jobs wait for each other forever.
    """
    for client, jobs in zip(found.clients, costs, strict=True):
        for processors, cost in zip(client.processors, jobs, strict=True):
            for processor in processors:
                if not 0.0 <= (work_s := cost[processor].work_s) < math.inf:
                    name = found.processors[processor]
                    raise UnavailableError(
                        f"{name} cannot run a job" if work_s == math.inf else f"a job on {name} takes {work_s} s"
                    )
    scheduler = Scheduler(found.clients, found.excluded, dispatch)
    every = [job for jobs in costs for job in jobs]
    scheduler.begin(_BEGIN_NS)
    left: dict[int, float] = {}  # processor → nanoseconds of work left in its job
    slowed: dict[int, tuple[float, ...]] = {}
    factors: list[tuple[int, float]] = []  # of the processors that are busy
    now_ns, arrival_ns = float(_BEGIN_NS), scheduler.next_arrival_ns()
    while True:
        at_ns = round(now_ns)
        if at_ns >= arrival_ns:
            scheduler.arrive(at_ns)
            arrival_ns = scheduler.next_arrival_ns()
        started = scheduler.start(at_ns)
        for job, processor in started:
            own = every[job][processor]
            moved_s = _transfers_s(own, found, scheduler, job) if own.transfer_s else 0.0
            left[processor], slowed[processor] = (own.work_s + moved_s) * 1e9, own.slowed
        if not left and scheduler.over:
            return outcome(scheduler, found.stages, found.processors)
        if started or len(factors) != len(left):  # other processors are busy
            busy = tuple(left)
            factors = [(processor, crowd.factor(processor, busy, slowed[processor])) for processor in busy]
        next_ns = float(arrival_ns) if arrival_ns < NEVER_NS else math.inf
        for processor, factor in factors:
            next_ns = min(next_ns, now_ns + left[processor] * factor)
        if next_ns == math.inf:
            raise UnavailableError("the jobs of the workload wait for each other for ever")
        passed_ns, now_ns = next_ns - now_ns, next_ns
        for processor, factor in factors:
            left[processor] -= passed_ns / factor
            if left[processor] <= _ROUNDING_NS:
                del left[processor]
                scheduler.finish(processor, round(now_ns))


def _transfers_s(cost: JobCost, found: Setting, scheduler: Scheduler, job: int) -> float:
    """Return the transfer seconds of a job that starts now, from the processors on which the jobs before it ran."""
    client, own = scheduler.whose(job)
    place = {o: job - own + other for other, each in enumerate(found.models[client].operators) for o in each}
    return math.fsum(from_s[scheduler.ran_on(place[o])] for o, from_s in cost.transfer_s.items())


def stage_means_s(found: Outcome, setting: Setting, stages: int) -> list[float]:
    """Return the mean seconds of each stage of the plan, all its jobs together; 0 where it did not run."""
    events = found.timeline.events
    number = [e.stage for e in events]
    total = np.bincount(number, [e.end_s - e.start_s for e in events], stages)
    jobs = np.bincount([s for each in setting.stages for s in each], minlength=stages)
    runs = np.bincount(number, minlength=stages) / np.maximum(1, jobs)
    return [float(s) for s in total / np.maximum(1.0, runs)]
