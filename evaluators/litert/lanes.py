"""The parent's end: starts lanes, asks them, and survives their death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.litert import wire
from evaluators.litert.runtimes import PACKAGES
from evaluators.litert.settings import lane_starts
from evaluators.own_process import own_process
from search_spaces.errors import UnavailableError
from search_spaces.platform import Platform

_START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a lane."""

    head: Mapping[str, Any]
    payload: bytes = b""
    fds: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    channel: socket.socket
    runtime: str


@dataclass(frozen=True, slots=True)
class _ForkServer:
    """A fork server and our end of its channel."""

    control: socket.socket
    process: subprocess.Popen[bytes]

    def ask(self, head: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        wire.send(self.control, dict(head), fds=fds)
        return wire.receive(self.control)[0]


class LaneError(UnavailableError):
    """A lane refused, died, or did not answer in time.

    Attributes:
        lane: its name.
        reason: what it did, as a verb and its object.
        fatal: whether the lanes are gone.
        silent: the lanes that had not answered; who waits for whom tells which of them failed.
        stopped: those of them that the system had stopped, as by a signal; they are to blame whatever they had done.
        told: whether the lane itself gave the reason, with the stage.
    """

    def __init__(
        self,
        lane: str,
        reason: str,
        *,
        fatal: bool,
        silent: Sequence[str] = (),
        stopped: Sequence[str] = (),
        told: bool = False,
    ) -> None:
        super().__init__(f"processor {lane!r} {reason}" if fatal else f"{lane}: {reason}")
        self.lane = lane
        self.reason = reason
        self.fatal = fatal
        self.silent = tuple(silent) or (lane,)
        self.stopped = tuple(stopped)
        self.told = told


class Lanes:
    """The processes of a platform's lanes.

    A lane that dies or does not answer in time takes all lanes with it, since the others may wait for it for ever; the
    next question starts new ones. ``generation`` counts the starts, so that callers know when what they had compiled
    is gone.

    Raises:
        UnavailableError: this machine lacks what a lane needs: a core, an adapter, a library.
    """

    def __init__(self, platform: Platform, log: Path | None = None) -> None:
        self.generation = 0
        self._closed = False
        self._starts = lane_starts(platform)
        self._log = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lanes: dict[str, _Process] = {}
        self._fork_servers: dict[str, _ForkServer] = {}
        try:
            for runtime in sorted({start.runtime for start in self._starts.values()}):
                self._fork_servers[runtime] = self._start(runtime)
        except BaseException:
            self.close()
            raise

    def _start(self, runtime: str) -> _ForkServer:
        """Start the fork server of a runtime."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_LIMIT_S)
        try:
            with theirs:
                fork_server = subprocess.Popen(
                    own_process("evaluators.litert.fork_server", str(theirs.fileno()), runtime),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                )
        except BaseException:
            ours.close()
            raise
        return _ForkServer(ours, fork_server)

    def ask(self, lane: str, request: Request, limit_s: float) -> dict[str, Any]:
        """Ask one lane and wait for its answer.

        Raises:
            UnavailableError: the lane refused, died, or did not answer within ``limit_s``.
        """
        return self.ask_all({lane: request}, limit_s)[lane]

    def ask_all(
        self, requests: Mapping[str, Request], limit_s: float, progress: Callable[[], int] = lambda: 0
    ) -> dict[str, dict[str, Any]]:
        """Ask several lanes at once and wait for all answers.

        Args:
            progress: grows while the lanes work; they have ``limit_s`` from each time that it has grown.

        Raises:
            UnavailableError: one of them refused, died, or did nothing for ``limit_s``.
        """
        try:
            return self._exchange(requests, limit_s, progress)
        except UnavailableError:
            raise
        except BaseException:
            # Interrupted half-way: some lanes may wait for others that were not asked, and answers are still to come.
            self._kill()
            raise

    def _exchange(
        self, requests: Mapping[str, Request], limit_s: float, progress: Callable[[], int]
    ) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + limit_s
        reached = progress()
        waiting: dict[int, str] = {}
        answers: dict[str, dict[str, Any]] = {}
        lanes = {name: self._lane(name) for name in requests}
        try:
            for name, request in requests.items():
                wire.send(lanes[name].channel, dict(request.head), request.payload, request.fds)
                waiting[lanes[name].channel.fileno()] = name
        except OSError as error:
            raise self._failed(name, "died" if isinstance(error, ConnectionError) else str(error)) from error
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            left_s = deadline - time.monotonic()
            ready = poll.poll(max(0.0, left_s) * 1e3)
            if not ready and progress() > reached:
                reached, deadline = progress(), time.monotonic() + limit_s
                continue
            if not ready:
                silent = list(waiting.values())
                raise self._failed(silent[0], f"gave no answer within {limit_s:.0f} s", silent)
            for fd, _ in ready:
                name = waiting.pop(fd)
                poll.unregister(fd)
                try:
                    answers[name], _, _ = wire.receive(lanes[name].channel)
                except (EOFError, OSError) as error:
                    raise self._failed(name, "died") from error
                if "error" in answers[name]:
                    # The others may be waiting for this lane's next stage: nobody will come.
                    if waiting:
                        raise self._failed(name, str(answers[name]["error"]), told=True)
                    raise LaneError(name, str(answers[name]["error"]), fatal=False, told=True)
        return answers

    def processes(self) -> list[int]:
        """Return the numbers of the processes of the lanes that are running."""
        return [process.pid for process in self._lanes.values()]

    def _lane(self, name: str) -> _Process:
        if self._closed:  # a fork server that was started now would have nobody to end it
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        if name not in self._lanes:
            runtime = self._starts[name].runtime
            fork_server = self._fork_servers[runtime]
            if fork_server.process.poll() is not None:  # something killed it, and its lanes died with it
                fork_server.control.close()
                fork_server = self._fork_servers[runtime] = self._start(runtime)
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    head = {"op": "lane", "start": self._starts[name].to_json()}
                    answer = fork_server.ask(head, [theirs.fileno(), self._log])
            except (EOFError, OSError) as error:
                ours.close()
                hint = f"python -c 'import {PACKAGES[runtime].module}' shows why"
                raise UnavailableError(f"the runtime {runtime} cannot be started", hint) from error
            self._lanes[name] = _Process(answer["pid"], ours, runtime)
        return self._lanes[name]

    def _failed(self, name: str, reason: str, silent: Sequence[str] = (), *, told: bool = False) -> LaneError:
        process = self._lanes[name]
        stopped = [lane for lane in silent if _is_stopped(self._lanes[lane].pid)]
        if reason == "died":
            with contextlib.suppress(EOFError, OSError):
                os.kill(process.pid, signal.SIGKILL)  # changes nothing about one that is ending already
                status = self._fork_servers[process.runtime].ask({"op": "reap", "pid": process.pid})["status"]
                reason = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"
            process.channel.close()
            del self._lanes[name]
        self._kill()
        return LaneError(name, reason, fatal=True, silent=silent, stopped=stopped, told=told)

    def _kill(self) -> None:
        for process in list(self._lanes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.channel.close()
            with contextlib.suppress(EOFError, OSError):
                self._fork_servers[process.runtime].ask({"op": "reap", "pid": process.pid})
        self._lanes.clear()
        self.generation += 1

    def close(self) -> None:
        """End all lanes and the fork servers."""
        self._closed = True
        self._kill()
        for fork_server in self._fork_servers.values():
            fork_server.control.close()
        for fork_server in self._fork_servers.values():
            try:
                fork_server.process.wait(5)
            except subprocess.TimeoutExpired:
                fork_server.process.kill()
                fork_server.process.wait()
        os.close(self._log)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in {"T", "t"}
