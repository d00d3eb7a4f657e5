"""What holds of every timeline of processors with one slot each."""

from __future__ import annotations

from itertools import pairwise

from evaluators.schedule import Timeline


def one_at_a_time(timeline: Timeline) -> bool:
    """Return whether no two events of one processor overlap."""
    events = sorted(timeline.events, key=lambda e: (e.processor, e.start_s))
    return all(a.processor != b.processor or a.end_s <= b.start_s for a, b in pairwise(events))
