"""Sessions and candidates around others: all methods and capabilities are those of the inner one.

A wrapper subclasses these and overrides what it changes. One that makes something impossible, or possible, sets
``capabilities`` anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from evaluators.base import Candidate, Capabilities, Session, capabilities_of

Given = ParamSpec("Given")
Found = TypeVar("Found")
Method = Callable[Concatenate[Any, Given], Found]


class Forwarding:
    """An object around another one, ``inner``."""

    inner: Any

    def call(self, method: Method[Given, Found], /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        """Call the inner object's method of that name; to be overridden by what guards calls."""
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
    unsupported_operators = forwarded(Session.unsupported_operators)
    part_costs = forwarded(Session.part_costs)
    powers_w = forwarded(Session.powers_w)
    in_state = forwarded(Session.in_state)
    decomposed_error = forwarded(Session.decomposed_error)
