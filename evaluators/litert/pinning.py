"""Give each thread of a lane's pool a core of its own.

A pool of as many threads as there are cores needs all of them at once, yet the system may put two of its threads on one
core and leave them there for seconds, in which the lane is half as fast. It happens sooner the more pools a process has
(one for each compiled model): the threads of a pool that has just worked poll for a while, and a core that one of them
keeps busy repels those of the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def pinned_pool(cores: Sequence[int], threads: int) -> Iterator[None]:
    """Pin this thread, and those that are made meanwhile, to one of the cores each; the caller computes on the first.

    Nothing is pinned where there are fewer threads than cores, so that the system may choose among these.
    """
    if threads < 2 or threads != len(cores):
        yield
        return
    os.sched_setaffinity(0, {cores[0]})
    before = _threads()
    yield
    for index, thread in enumerate(sorted(_threads() - before)):
        with suppress(ProcessLookupError):  # it is over
            os.sched_setaffinity(thread, {cores[1 + index % (threads - 1)]})


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}  # noqa: PTH208 - names are all that is wanted
