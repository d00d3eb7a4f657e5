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
from dataclasses import dataclass
from typing import Any

from evaluators.litert.worker import wire
from evaluators.own_process import connected_process

_START_LIMIT_S = 60.0
_END_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A fork server, and this end of its channel; one session at a time has it.

    Attributes:
        how: runtime, whether it leads a session, and what the loader of libraries reads of the environment.
    """

    how: tuple[str, bool, Mapping[str, str]]
    control: socket.socket
    process: subprocess.Popen[bytes]

    def ask(self, head: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer (:mod:`evaluators.litert.worker.process`)."""
        try:
            wire.send(self.control, dict(head), fds=fds)
            return wire.receive(self.control)[0]
        except BaseException:  # an answer may still come, which is not that to the next request
            self.process.kill()
            self.process.wait()
            raise

    def close(self) -> None:
        """End it, and with it any workers that it has."""
        self.control.close()
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
    how = runtime, own_session, {name: value for name, value in os.environ.items() if name.startswith("LD_")}
    with _idle_lock:
        for server in _idle:
            if server.how == how and server.process.poll() is None:
                _idle.remove(server)
                return server
    module = "evaluators.litert.worker.process"
    process, control = connected_process(module, runtime, log=log, own_session=own_session)
    control.settimeout(_START_LIMIT_S)
    return ForkServer(how, control, process)


def give_back(server: ForkServer) -> None:
    """Keep a fork server that has no workers, in place of an older one, for the next session."""
    with _idle_lock:
        older = [other for other in _idle if other.how[:2] == server.how[:2]]
        _idle[:] = [*(other for other in _idle if other not in older), server]
    for other in older:
        other.close()


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()
