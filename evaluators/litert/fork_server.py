"""The parent's side of fork servers: processes that have loaded a runtime, so that a worker starts in milliseconds.

One that a session no longer needs is kept for the next session that would start it the same way, until this process
ends: loading a runtime takes a quarter of a second.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluators.litert.worker import wire
from evaluators.own_process import connected_process

_START_LIMIT_S = 60.0
_END_LIMIT_S = 5.0
_UNREAD = "PYTEST_CURRENT_TEST"  # of the environment: it changes from test to test, and no runtime reads it


class ForkServer:
    """A fork server, and this end of its channel; one session at a time has it.

    Attributes:
        how: runtime, whether it leads a session of its own, and the environment that it was started with.
    """

    def __init__(self, how: tuple[str, bool, Mapping[str, str]], log: int) -> None:
        self.how = how
        module = "evaluators.litert.worker.process"
        self.process, self._control = connected_process(module, how[0], log=log, own_session=how[1])
        self._control.settimeout(_START_LIMIT_S)
        self._workers = 0

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    @property
    def unused(self) -> bool:
        """Whether its process runs and has no workers, so that another session may have it."""
        return self.alive and not self._workers

    def fork(self, start: Mapping[str, Any], channel: int, log: int) -> int:
        """Start a worker, and return its process id; ``channel`` and ``log`` are file descriptors of its."""
        self._workers += 1
        pid: int = self._ask({"op": "fork", "start": start, "folder": _folder()}, [channel, log])["pid"]
        return pid

    def reap(self, pid: int) -> int:
        """Return how a worker ended that was killed, or is ending: an exit code, or less a signal's number."""
        status: int = self._ask({"op": "reap", "pid": pid})["status"]
        self._workers -= 1
        return status

    def _ask(self, head: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        try:
            wire.send(self._control, head, fds=fds)
            return wire.receive(self._control)[0]
        except BaseException:  # an answer may still come, which is not that to the next request
            self.process.kill()
            self.process.wait()
            raise

    def close(self) -> None:
        """End it, and with it any workers that it has."""
        with suppress(OSError):  # processes that were forked meanwhile may hold the channel, too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_idle: list[ForkServer] = []
_idle_lock = threading.Lock()


def fork_server(runtime: str, *, own_session: bool, log: int) -> ForkServer:
    """Return a fork server of a runtime: an idle one, else a new one, which writes to the file descriptor ``log``.

    Args:
        own_session: whether it leads a session of its own, so that its priority is that of its workers alone.
    """
    how = runtime, own_session, {name: value for name, value in os.environ.items() if name != _UNREAD}
    with _idle_lock:
        for server in _idle:
            if server.how == how and server.alive:
                _idle.remove(server)
                return server
    return ForkServer(how, log)


def give_back(server: ForkServer) -> None:
    """Keep a fork server for the next session, in place of an older one; close one that still has workers."""
    if not server.unused:
        server.close()
        return
    with _idle_lock:
        older = [other for other in _idle if other.how[:2] == server.how[:2]]
        _idle[:] = [*(other for other in _idle if other not in older), server]
    for other in older:
        other.close()


def _folder() -> str | None:
    """Return the current folder; None where it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


os.register_at_fork(after_in_child=_idle.clear)  # they serve the parent
