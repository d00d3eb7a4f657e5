"""Words of lanes in which lanes that are alike stand for each other: counted, and found by number.

A word gives each part of a plan a lane. Of the words that differ only in the names of alike lanes one is canonical: in
it, the lanes of a class appear in the order of the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

Classes = Sequence[Sequence[str]]


def count_words(length: int, classes: Classes) -> int:
    """Return how many canonical words of ``length`` lanes there are, given the lanes of each class."""
    sizes = tuple(len(c) for c in classes)
    return _counts(length, sizes)[-1][tuple(0 for _ in sizes)]


def word_at(rank: int, length: int, classes: Classes) -> list[str]:
    """Return canonical word number ``rank`` of 0 … ``count_words(length, classes) - 1``."""
    sizes = tuple(len(c) for c in classes)
    counts = _counts(length, sizes)
    used = tuple(0 for _ in sizes)
    word: list[str] = []
    for left in range(length - 1, -1, -1):
        for which, lane, after in _next(used, sizes):
            count = counts[left][after]
            if rank < count:
                word.append(classes[which][lane])
                used = after
                break
            rank -= count
    return word


def _next(used: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the lanes that may follow, as class and place in it, and how many of each class are then in use."""
    return [
        (which, lane, tuple(max(u, lane + 1) if i == which else u for i, u in enumerate(used)))
        for which, size in enumerate(sizes)
        for lane in range(min(used[which] + 1, size))
    ]


@cache
def _counts(length: int, sizes: tuple[int, ...]) -> list[dict[tuple[int, ...], int]]:
    """Return for 0 … ``length`` lanes to come, and each number of lanes of each class in use, how many words go on."""
    states: list[tuple[int, ...]] = [()]
    for size in sizes:
        states = [(*state, used) for state in states for used in range(size + 1)]
    found: list[dict[tuple[int, ...], int]] = [dict.fromkeys(states, 1)]
    for _ in range(length):
        found.append({state: sum(found[-1][after] for _, _, after in _next(state, sizes)) for state in states})
    return found
