"""Workers of a shared study within this process: each has a storage of its own, closed at the end of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optuna.storages import BaseStorage

from optimizer.shared.storage import close_storage, open_storage
from optimizer.shared.study import SharedStudy

_open: list[tuple[SharedStudy, BaseStorage]] = []


@contextmanager
def closed_at_the_end() -> Iterator[None]:
    """Close whoever joined meanwhile."""
    yield
    while _open:
        study, storage = _open.pop()
        study.close()
        close_storage(storage)


def joined(url: str, worker: str) -> SharedStudy:
    """Return a worker of the study ``s``, which signs as alive each second."""
    storage = open_storage(url, 1)
    _open.append((SharedStudy(storage, "s", worker, 1), storage))
    return _open[-1][0]


def record(digest: str, value_s: float | None = 1.0) -> dict[str, object]:
    """Return what a worker writes of a plan that it measured."""
    return {"digest": digest, "values": None if value_s is None else [value_s]}
