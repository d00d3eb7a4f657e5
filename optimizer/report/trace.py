"""Timelines for Perfetto (ui.perfetto.dev) and Chrome: a process for each timeline, a thread for each processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.report.data import Bar


def trace(bars: Sequence[Bar], platform: Sequence[str]) -> dict[str, Any]:
    """Return the Trace Event Format document of timelines.

    Args:
        platform: names of the processors, in their order.
    """
    events: list[dict[str, Any]] = []
    for process, bar in enumerate(bars, 1):
        events.append(_name("process_name", process, 0, f"{bar.name}, {bar.source}"))
        start_s = min(e.start_s for e in bar.timeline.events)
        for thread, lane in enumerate(platform, 1):
            if any(e.lane == lane for e in bar.timeline.events):
                events.append(_name("thread_name", process, thread, lane))
        for event, inference in zip(
            bar.timeline.events, bar.inferences or (0,) * len(bar.timeline.events), strict=True
        ):
            operators = bar.plan.stages[event.stage].operators
            # Both ends on one grid of nanoseconds, which is Perfetto's: spans that follow each other cannot overlap.
            begin_ns, end_ns = (round((at_s - start_s) * 1e9) for at_s in (event.start_s, event.end_s))
            events.append(
                {
                    "name": f"stage {event.stage}",
                    "cat": bar.source,
                    "ph": "X",
                    "ts": begin_ns / 1e3,
                    "dur": (end_ns - begin_ns) / 1e3,
                    "pid": process,
                    "tid": platform.index(event.lane) + 1,
                    "args": {
                        "inference": inference,
                        "operators": f"{operators[0]} to {operators[-1]}",
                        "copied_us": event.copied_s * 1e6,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema_version": 1}}


def _name(what: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
