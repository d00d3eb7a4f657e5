"""Counting and numbering of sequences of processors, some of which are interchangeable.

A word gives each stage of a plan a processor. Of words that differ only in the names of interchangeable processors, the
canonical one uses the processors of each class in the order of the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TypeVar

Classes = Sequence[Sequence[str]]
T = TypeVar("T")


def located(number: int, sizes: Iterable[tuple[T, int]]) -> tuple[T, int]:
    """Return the group that holds member number ``number`` of all groups in turn, and its number within that group.

    Args:
        sizes: the groups and how many members each has.

    Raises:
        IndexError: the groups have fewer members.
    """
    for group, size in sizes:
        if number < size:
            return group, number
        number -= size
    raise IndexError(number)


def count_words(length: int, classes: Classes) -> int:
    """Return how many canonical words of ``length`` processors there are, given the processors of each class."""
    sizes = tuple(len(c) for c in classes)
    return _counts(length, sizes)[-1][tuple(0 for _ in sizes)]


def word_at(rank: int, length: int, classes: Classes) -> list[str]:
    """Return canonical word number ``rank`` of 0 … ``count_words(length, classes) - 1``."""
    sizes = tuple(len(c) for c in classes)
    counts = _counts(length, sizes)
    used = tuple(0 for _ in sizes)
    word: list[str] = []
    for left in range(length - 1, -1, -1):
        options = following(used, sizes)
        (which, place, used), rank = located(rank, ((option, counts[left][option[2]]) for option in options))
        word.append(classes[which][place])
    return word


@cache
def following(used: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the processors that may follow, as class and place in it, and how many of each class are then in use."""
    return [
        (which, place, tuple(max(u, place + 1) if i == which else u for i, u in enumerate(used)))
        for which, size in enumerate(sizes)
        for place in range(min(used[which] + 1, size))
    ]


@cache
def _counts(length: int, sizes: tuple[int, ...]) -> list[dict[tuple[int, ...], int]]:
    """Return the number of words for 0 … ``length`` processors to come and each number in use of each class."""
    states: list[tuple[int, ...]] = [()]
    for size in sizes:
        states = [(*state, used) for state in states for used in range(size + 1)]
    found: list[dict[tuple[int, ...], int]] = [dict.fromkeys(states, 1)]
    for _ in range(length):
        found.append({state: sum(found[-1][after] for _, _, after in following(state, sizes)) for state in states})
    return found
