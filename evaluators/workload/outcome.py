"""The outcome of one run of a workload, and its objectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from evaluators.schedule import Event, Events, Timeline
from evaluators.workload.scheduler import FAILED, REJECTED, Scheduler
from search_spaces.core.errors import UnavailableError, damage

Objective = Literal["mean", "worst", "makespan", "misses", "throughput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
TIMES = ("mean_ms", "worst_ms", "longest_ms", "makespan_ms")
"""The times among the figures of a run."""


class Request(NamedTuple):
    """One request of an instance.

    Attributes:
        came_s: arrival time, from the beginning of the run.
        latency_s: from its arrival to its end; None where it was rejected or failed.
        rejected: whether its instance's queue was full.
        missed: whether it ended after its deadline, or not at all.
    """

    came_s: float
    latency_s: float | None
    rejected: bool
    missed: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run of a workload.

    Attributes:
        requests: of each instance, in their order.
        makespan_s: from the first answered request's arrival to the last end of a job.
        timeline: every job of every request; ``stage`` is that of the plan.
        deadline_s: the longest deadline of an instance; 0 where none has one.
    """

    requests: tuple[tuple[Request, ...], ...]
    makespan_s: float
    timeline: Events
    deadline_s: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong with a run that a device or a plug-in reports, or ""."""
        times = [r.latency_s for each in self.requests for r in each if r.latency_s is not None]
        if not (self.requests and all(self.requests)):
            return "a run without requests"
        if not (math.isfinite(self.makespan_s) and self.makespan_s > 0.0):
            return f"a run of {self.makespan_s} s"
        wrong = [s for s in times if not (math.isfinite(s) and s > 0.0)]
        return f"a request of {wrong[0]} s" if wrong else "" if times else "a run in which no request was answered"

    @property
    def latencies_s(self) -> tuple[float, ...]:
        """The mean latency of each instance; an unanswered request counts with the makespan."""
        return tuple(
            statistics.fmean(self.makespan_s if r.latency_s is None else r.latency_s for r in each)
            for each in self.requests
        )

    @property
    def request_s(self) -> list[float]:
        """The latency of each request; an unanswered one counts with the makespan."""
        return [self.makespan_s if r.latency_s is None else r.latency_s for each in self.requests for r in each]

    @property
    def misses(self) -> int:
        """Number of requests that missed their deadline, were rejected, or failed."""
        return sum(r.missed for each in self.requests for r in each)

    @property
    def count(self) -> int:
        """Number of all requests."""
        return sum(map(len, self.requests))

    @property
    def answered(self) -> int:
        """Number of requests that ended."""
        return sum(r.latency_s is not None for each in self.requests for r in each)

    def value_s(self, objective: Objective) -> float:
        """Return the objective, in seconds.

        ``mean``: of the instances' mean latencies; ``worst``: the largest of them; ``makespan``; ``misses``: the mean,
        in which a missed request counts with the longest deadline, plus this deadline for each of them: requests in
        time take no longer, so fewer misses come first; ``throughput``: seconds per answered request.
        """
        mean_s = statistics.fmean(self.latencies_s)
        if objective == "mean":
            return mean_s
        if objective == "worst":
            return max(self.latencies_s)
        if objective == "makespan":
            return self.makespan_s
        if objective == "misses":
            late_s = self.deadline_s or self.makespan_s
            means_s = [
                statistics.fmean(late_s if r.missed or r.latency_s is None else r.latency_s for r in each)
                for each in self.requests
            ]
            return statistics.fmean(means_s) + self.misses * late_s
        return self.makespan_s / max(1, self.answered)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        latencies = [r.latency_s for each in self.requests for r in each if r.latency_s is not None]
        return {
            "mean_ms": statistics.fmean(self.latencies_s) * 1e3,
            "worst_ms": max(self.latencies_s) * 1e3,
            "longest_ms": max(latencies) * 1e3 if latencies else None,
            "makespan_ms": self.makespan_s * 1e3,
            "throughput_per_s": self.answered / self.makespan_s,
            "requests": self.count,
            "answered": self.answered,
            "rejected": sum(r.rejected for each in self.requests for r in each),
            "misses": self.misses,
            "instances_ms": [s * 1e3 for s in self.latencies_s],
        }


def typical_figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what :meth:`Outcome.to_json` returned for some runs of a plan, in one set of figures; {} of no runs.

    Times are means over the half of the runs whose mean latency is nearest the median, so that the models' figures go
    with those of all; counts are those of the run in the middle.
    """
    if not found:
        return {}
    runs = sorted(found, key=lambda each: float(each["mean_ms"]))
    rest = len(runs) // 4
    typical, middle = runs[rest : len(runs) - rest], runs[len(runs) // 2]

    def mean(key: str) -> float | None:
        values = [each[key] for each in typical if each[key] is not None]
        return statistics.fmean(values) if values else None

    figures = {key: mean(key) if key in TIMES else value for key, value in middle.items()}
    figures["throughput_per_s"] = mean("throughput_per_s")
    figures["instances_ms"] = [
        statistics.fmean(times) for times in zip(*(r["instances_ms"] for r in typical), strict=True)
    ]
    return figures


def read_figures(found: Any) -> dict[str, Any]:
    """Return the figures of :func:`typical_figures` from plain values, checked; {} stays {}.

    Raises:
        ValueError: they are damaged.
    """
    if not found:
        return {}
    try:
        keys = [key for key in (*TIMES, "throughput_per_s") if key != "longest_ms" or found[key] is not None]
        times, instances = {key: float(found[key]) for key in keys}, [float(ms) for ms in found["instances_ms"]]
        counts = {key: int(found[key]) for key in ("requests", "answered", "rejected", "misses")}
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(damage(error)) from error
    if not (instances and all(0.0 < value < math.inf for value in (*times.values(), *instances))):
        raise ValueError("a figure of a run of several models is no positive number")
    return {"longest_ms": None, **times, "instances_ms": instances, **counts}


def outcome(scheduler: Scheduler, stages: Sequence[Sequence[int]], processors: Sequence[str]) -> Outcome:
    """Return the outcome of a finished run.

    Args:
        stages: for each client of the scheduler, the stages of the plan that its jobs belong to.
        processors: names.

    Raises:
        UnavailableError: no request was answered.
    """
    begin_ns = scheduler.store[0]
    found = []
    for k, client in enumerate(scheduler.clients):
        mine = []
        for came_ns, ended_ns in scheduler.requests(k):
            took_s = (ended_ns - came_ns) * 1e-9 if ended_ns not in {REJECTED, FAILED} else None
            late = took_s is None or (client.deadline_ns > 0 and ended_ns - came_ns > client.deadline_ns)
            mine.append(Request((came_ns - begin_ns) * 1e-9, took_s, ended_ns == REJECTED, late))
        found.append(tuple(mine))
    events = [
        Event(stages[k][job], processors[processor], (start - begin_ns) * 1e-9, (end - begin_ns) * 1e-9)
        for k in range(len(scheduler.clients))
        for row in scheduler.runs(k)
        for job, (start, end, processor) in enumerate(row)
        if end
    ]
    if not events:
        raise UnavailableError("no request of the workload was answered")
    first_s = min(r.came_s for each in found for r in each if r.latency_s is not None)
    makespan_s = max(e.end_s for e in events) - first_s
    if not (math.isfinite(makespan_s) and makespan_s > 0.0):
        raise UnavailableError(f"the workload took {makespan_s} s, which is not a time")
    timeline = Timeline(tuple(sorted(events, key=lambda e: (e.start_s, e.stage))))
    return Outcome(tuple(found), makespan_s, timeline, max(c.deadline_ns for c in scheduler.clients) * 1e-9)
