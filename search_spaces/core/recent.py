"""Caches that keep what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


def recent(known: OrderedDict[Key, Made], key: Key, make: Callable[[], Made], most: int) -> Made:
    """Return the value of a key, made where it is missing; the ``most`` values that were used last are kept."""
    if key not in known:
        known[key] = make()
        if len(known) > most:
            known.popitem(last=False)
    known.move_to_end(key)
    return known[key]
