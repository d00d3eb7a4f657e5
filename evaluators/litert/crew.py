"""Lanes none of which waits for another one: what happens to one is no matter to the others."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from evaluators.litert import wire
from evaluators.litert.lanes import LaneError, Lanes, Request
from search_spaces.errors import UnavailableError


class Crew(Lanes):
    """See the module, and :class:`~evaluators.litert.lanes.Lanes` for what is the same.

    A lane that died, or was ended, is started anew by the next question to it. ``births`` counts how often each was
    started, so that callers know when what they had compiled there is gone.
    """

    @property
    def births(self) -> Mapping[str, int]:
        """How often each lane has ended so far."""
        return self._ended

    def __init__(self, *arguments: Any) -> None:
        self._ended: dict[str, int] = {}
        super().__init__(*arguments)

    def send(self, name: str, request: Request) -> None:
        """Ask a lane without waiting for its answer, which :meth:`answers` returns.

        Raises:
            UnavailableError: it died.
        """
        process = self._lane(name)
        try:
            wire.send(process.channel, dict(request.head), request.payload, request.fds)
        except OSError as error:
            raise UnavailableError(f"processor {name!r} {self.end(name)}") from error

    def answers(self, names: Sequence[str], limit_s: float) -> dict[str, dict[str, Any] | None]:
        """Return what lanes have answered, None for one that died; waits ``limit_s`` for the first to do so."""
        poll = select.poll()
        fds = {self._lanes[name].channel.fileno(): name for name in names}
        for fd in fds:
            poll.register(fd, select.POLLIN)
        found: dict[str, dict[str, Any] | None] = {}
        for fd, _ in poll.poll(max(0.0, limit_s) * 1e3):
            try:
                found[fds[fd]], _, _ = wire.receive(self._lanes[fds[fd]].channel)
            except (EOFError, OSError):
                found[fds[fd]] = None
        return found

    def end(self, name: str) -> str:
        """End a lane's process, if it has not ended itself, and return how it did, as a predicate."""
        process = self._lanes.pop(name)
        status = 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # changes nothing about one that is ending already
        with contextlib.suppress(EOFError, OSError):
            status = self._fork_servers[process.runtime].ask({"op": "reap", "pid": process.pid})["status"]
        process.channel.close()
        self._ended[name] = self._ended.get(name, 0) + 1
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"

    def process_of(self, name: str) -> int | None:
        """Return the number of a lane's process, or None where it is not running."""
        return self._lanes[name].pid if name in self._lanes else None

    def _failed(self, name: str, reason: str, silent: Sequence[str] = (), *, told: bool = False) -> LaneError:
        for each in dict.fromkeys((name, *silent)):
            if each in self._lanes:
                ended = self.end(each)
                reason = ended if each == name and reason == "died" else reason
        return LaneError(name, reason, fatal=True, silent=silent, told=told)
