"""What ran where and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One stage on one lane, in seconds since the start of the inference.

    Attributes:
        copied_s: the part of it in which tensors were copied between an accelerator's memory and that of the CPU.
    """

    stage: int
    lane: str
    start_s: float
    end_s: float
    copied_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain values."""
        return {
            "stage": self.stage,
            "lane": self.lane,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "copied_s": self.copied_s,
        }


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one inference, ordered by start."""

    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def overlaps(self) -> list[tuple[Event, Event]]:
        """Return the pairs of events that overlap on one lane; a lawful timeline has none."""
        found = []
        last: dict[str, Event] = {}
        for event in sorted(self.events, key=lambda e: e.start_s):
            before = last.get(event.lane)
            if before is not None and before.end_s > event.start_s:
                found.append((before, event))
            last[event.lane] = event
        return found
