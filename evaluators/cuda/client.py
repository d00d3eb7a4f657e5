"""The parent's end of the computing process: starts it, asks it within a time limit, and survives its death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluators.cuda.settings import HINT
from evaluators.litert.worker import wire
from evaluators.own_process import own_process
from search_spaces.errors import UnavailableError

START_LIMIT_S = 120.0
_LAST_S = 0.5
_GONE = "the session is closed"


class Client:
    """A process of :mod:`evaluators.cuda.worker`; a new one takes its place where it died or did not answer.

    Attributes:
        generation: counts the processes, so that callers know when what they had loaded is gone.
        chosen: the quickest way of each kernel that was timed so far; a new process is told.

    Args:
        device: ``cuda`` or ``cpu``.
        busy: how many streams compute at once while ways are timed.
        chosen: what is known already, and added to; None: kernels are PyTorch's ordinary ones.
        log: where PyTorch's own messages go; nowhere by default.
    """

    def __init__(self, device: str, busy: int, chosen: dict[str, str] | None, log: Path | None = None) -> None:
        self.generation = 0
        self.chosen = chosen
        self._device, self._busy = device, busy
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def ask(self, head: Mapping[str, Any], limit_s: float, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Ask and wait for the answer.

        Raises:
            UnavailableError: it refused, died, or gave no answer in time.
        """
        if self._closed:
            raise UnavailableError(_GONE, "load candidates inside the `with` block of prepare()")
        if self._channel is None:
            self._start()
        answer, data = self._exchange(head, limit_s, payload)
        if "error" in answer:
            if answer.get("fatal"):
                self._end()
            raise UnavailableError(str(answer["error"]), str(answer.get("hint", "")))
        if self.chosen is not None:
            self.chosen.update(answer.get("chosen", {}))
        return answer, data

    def _exchange(self, head: Mapping[str, Any], limit_s: float, payload: bytes) -> tuple[dict[str, Any], bytes]:
        channel = self._channel
        if channel is None:
            raise UnavailableError(_GONE)
        try:
            channel.settimeout(limit_s)
            wire.send(channel, dict(head), payload)
            answer, data, _ = wire.receive(channel)
        except TimeoutError as error:
            self._end()
            raise UnavailableError(f"the GPU's process gave no answer within {limit_s:.0f} s") from error
        except (EOFError, OSError, json.JSONDecodeError) as error:
            raise UnavailableError(f"the GPU's process {self._end()}", "its messages are in runtime.log") from error
        except BaseException:
            self._end()  # the answer is still to come, and nobody waits for it
            raise
        return answer, data

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        log = os.open(self._log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    own_process("evaluators.cuda.worker", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # an interrupt is for the parent, which ends this process
                )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(log)
        self._channel = ours
        hello = {"device": self._device, "busy": self._busy, "known": self.chosen}
        answer, _ = self._exchange(hello, START_LIMIT_S, b"")
        if "error" in answer:
            self._end()
            raise UnavailableError(str(answer["error"]), HINT)

    def _end(self) -> str:
        """End the process, and return what became of it."""
        self.generation += 1
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return "is not there"
        try:
            code = process.wait(_LAST_S)  # one that died by itself tells why
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "was ended"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end()


def joined(arrays: Sequence[Any]) -> bytes:
    """Return arrays as one row of bytes, in C order."""
    return b"".join(a.tobytes() for a in arrays)
