"""Sessions and candidates around others: all methods and capabilities are those of the inner one.

A wrapper subclasses these and overrides what it changes. One that adds or removes a capability sets ``capabilities``
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from evaluators.base import Agreement, Batch, Candidate, Capabilities, Session, capabilities_of
from evaluators.schedule import Timeline

Given = ParamSpec("Given")
Found = TypeVar("Found")
Method = Callable[Concatenate[Any, Given], Found]


class Forwarding:
    """A wrapper of an object ``inner``."""

    inner: Any

    def call(self, method: Method[Given, Found], /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        """Call the inner object's method of that name; may be overridden to guard calls."""
        bound: Callable[Given, Found] = getattr(self.inner, method.__name__)
        return bound(*arguments, **options)


def forwarded(method: Method[Given, Found]) -> Method[Given, Found]:
    """Return a method of :class:`Forwarding` that calls the inner object's."""

    @wraps(method)
    def forward(self: Forwarding, /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        return self.call(method, *arguments, **options)

    return forward


class ForwardingCandidate(Forwarding, Candidate):
    """A candidate whose methods are those of another one."""

    inner: Candidate

    def __init__(self, inner: Candidate) -> None:
        self.inner = inner

    run = forwarded(Candidate.run)
    verify = forwarded(Candidate.verify)
    close = forwarded(Candidate.close)
    stream = forwarded(Candidate.stream)
    after_pause = forwarded(Candidate.after_pause)
    figures = forwarded(Candidate.figures)
    traffic = forwarded(Candidate.traffic)


class LoweredCandidate(ForwardingCandidate):
    """A candidate of a lowered plan, reported in the stages of the original plan.

    The join of a split counts as part of the first side.

    Args:
        stages: number of stages of the original plan.
        stage_of: for each stage that runs, the original stage that it belongs to.
        comparable: whether the inner candidate compares outputs with those of the original model.
    """

    def __init__(self, inner: Candidate, stages: int, stage_of: Sequence[int], *, comparable: bool = True) -> None:
        super().__init__(inner)
        self._comparable = comparable
        self._stages, self._stage_of = stages, np.asarray(stage_of, np.int64)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """Run ``n`` inferences, fewer where one takes longer than ``stop_above_s``."""
        return self._folded(super().run(n, stop_above_s))

    def stream(self, n: int) -> Batch:
        """Return ``n`` observations of the period of a full pipeline."""
        return self._folded(super().stream(n))

    def verify(self) -> Agreement | None:
        """Compare the outputs of the last run with the whole model's; runs once if none was made."""
        return super().verify() if self._comparable else None

    def _folded(self, found: Batch) -> Batch:
        stage_s = np.zeros((len(found.latency_s), self._stages))
        for column, stage in enumerate(self._stage_of):
            stage_s[:, stage] += np.asarray(found.stage_s)[:, column]
        timeline = found.timeline
        if timeline is not None:
            timeline = Timeline(tuple(replace(e, stage=int(self._stage_of[e.stage])) for e in timeline.events))
        return replace(found, stage_s=stage_s, timeline=timeline)


class ForwardingSession(Forwarding, Session):
    """A session whose methods but ``load`` are those of another one."""

    inner: Session

    def __init__(self, inner: Session) -> None:
        self.inner = inner
        self.capabilities = capabilities_of(inner, Capabilities)

    fingerprint = forwarded(Session.fingerprint)
    conditions = forwarded(Session.conditions)
    counters = forwarded(Session.counters)
    deploy = forwarded(Session.deploy)
    placements = forwarded(Session.placements)
    unsupported_operators = forwarded(Session.unsupported_operators)
    part_costs = forwarded(Session.part_costs)
    powers_w = forwarded(Session.powers_w)
    in_state = forwarded(Session.in_state)
    decomposed_error = forwarded(Session.decomposed_error)
