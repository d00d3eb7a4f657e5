"""States of a platform, such as cool, throttled or busy, and how much slower its processors are in each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from search_spaces.core.errors import UsageError
from search_spaces.core.platform import Platform

Robust = Literal["worst", "expected"]
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_HINT = "write NAME:PROCESSOR=FACTOR,…, for example hot:cpu=1.6,gpu=1.2, or NAME@WEIGHT:… (default weight 1)"


@dataclass(frozen=True, slots=True)
class State:
    """A state of a platform: how much longer its processors take.

    Attributes:
        name: for tables.
        slower: processor → factor on all its times; 1 for processors that are not named.
        weight: how likely it is, relative to the others.
    """

    name: str
    slower: tuple[tuple[str, float], ...]
    weight: float = 1.0

    def factor(self, processor: str) -> float:
        """Return how many times as long a processor takes."""
        return dict(self.slower).get(processor, 1.0)


def parse_states(words: Sequence[str], platform: Platform) -> tuple[State, ...]:
    """Return the states of texts such as ``hot@0.3:cpu=1.6``; ``cool:`` is the platform as it is.

    Raises:
        UsageError: a text is not a state, a processor is unknown, or interchangeable processors have different factors.
    """
    found = []
    names = {p.name for p in platform.processors}
    for word in words:
        head, colon, rest = word.partition(":")
        name, at, weight = head.partition("@")
        if not colon or not name or (at and not _positive(weight)):
            raise UsageError(f"--state {word}: is not a state", _HINT)
        slower = []
        for part in filter(None, rest.split(",")):
            processor, _, factor = part.rpartition("=")
            if processor not in names:
                raise UsageError(
                    f"--state {word}: unknown processor {processor!r}", f"there are: {', '.join(sorted(names))}"
                )
            if not _positive(factor):
                raise UsageError(f"--state {word}: {factor!r} is not a factor", _HINT)
            slower.append((processor, float(factor)))
        state = State(name, tuple(slower), float(weight) if at else 1.0)
        for members in platform.classes().values():
            other = next((p.name for p in members if state.factor(p.name) != state.factor(members[0].name)), None)
            if other is not None:  # canonical plans name interchangeable processors by first use
                raise UsageError(
                    f"--state {word}: {members[0].name} and {other} are alike, so they take equally long",
                    "give both the same factor",
                )
        found.append(state)
    if len({s.name for s in found}) != len(found):
        raise UsageError("--state: two states have one name", _HINT)
    return tuple(found)


def _positive(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and 0.0 < float(text) < 1e6
