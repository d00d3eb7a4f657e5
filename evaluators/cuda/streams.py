"""What runs jobs at once: the streams of a GPU, or threads of a CPU, which stand in for them in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from evaluators.cuda.settings import torch_module

_NAP_S = 20e-6


class Streams(Protocol):
    """Lanes by number; each runs one piece of work at a time."""

    def start(self, lane: int, work: Any) -> None:
        """Begin work on a lane that is free."""
        ...

    def finished(self, lane: int) -> bool:
        """Return whether the work on a lane is done and what it computed can be read.

        Raises:
            RuntimeError: it failed.
        """
        ...

    def idle(self) -> None:
        """Called where nothing has ended since the last look."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class CudaStreams:
    """Streams of the GPU; work is a captured graph, and an event behind it tells its end."""

    def __init__(self, count: int) -> None:
        torch = torch_module()
        self._torch = torch
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._events = [torch.cuda.Event() for _ in range(count)]

    def start(self, lane: int, work: Any) -> None:
        """See :class:`Streams`."""
        self._torch.cuda.set_stream(self._streams[lane])
        work.replay()
        self._events[lane].record(self._streams[lane])

    def finished(self, lane: int) -> bool:
        """See :class:`Streams`."""
        return bool(self._events[lane].query())

    def idle(self) -> None:
        """See :class:`Streams`; looking again at once is what makes an end known soon."""

    def close(self) -> None:
        """See :class:`Streams`."""
        self._torch.cuda.synchronize()


class Threads:
    """Threads of this process; work is a function."""

    def __init__(self, count: int) -> None:
        self._pools = [ThreadPoolExecutor(1, f"stream{i}") for i in range(count)]
        self._running: list[Future[Any] | None] = [None] * count

    def start(self, lane: int, work: Callable[[], Any]) -> None:
        """See :class:`Streams`."""
        self._running[lane] = self._pools[lane].submit(work)

    def finished(self, lane: int) -> bool:
        """See :class:`Streams`."""
        running = self._running[lane]
        if running is None or not running.done():
            return False
        running.result()
        return True

    def idle(self) -> None:
        """See :class:`Streams`; threads want the core that we look from."""
        time.sleep(_NAP_S)

    def close(self) -> None:
        """See :class:`Streams`."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
