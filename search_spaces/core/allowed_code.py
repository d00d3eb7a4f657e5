"""Code that the user allowed this process to load; a name that only a file or a shared study gives loads nothing.

The command line allows what is typed there; a program that uses the product as a library calls :func:`allow`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_allowed: set[str] = set()


def allow(*names: str) -> None:
    """Allow code by the name that loads it: ``module:Class`` of a sampler, or the folder of a library."""
    _allowed.update(filter(None, names))


def allow_libraries(texts: Iterable[str]) -> None:
    """Allow libraries given as ``FILE`` or ``MODEL=FILE``; both may contain ``=``, so each possible file is allowed."""
    for text in texts:
        parts = text.split("=")
        allow(*(str(Path("=".join(parts[first:])).absolute()) for first in range(len(parts))))


def is_allowed(name: str) -> bool:
    """Return whether the user of this process has named this code."""
    return name in _allowed
