"""The parent's side of the worker processes: starts them, sends requests, and survives their death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from evaluators.litert.fork_server import ForkServer, fork_server, give_back
from evaluators.litert.memory_group import MemoryGroup, forget_pages, own_copy
from evaluators.litert.settings import worker_starts
from evaluators.litert.worker import wire
from evaluators.litert.worker.runtimes import PACKAGES
from evaluators.litert.worker.shared_memory import Semaphores, SharedMemory
from evaluators.machine import kernel_text, major_faults
from evaluators.measurement.foreground import Foreground
from search_spaces.core.errors import UnavailableError
from search_spaces.core.platform import Platform, memory_limit_nbytes

SETUP_LIMIT_S = 60.0
# A worker may make no progress for this long and some latencies (candidate.py).
SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a worker."""

    head: Mapping[str, Any]
    payload: bytes = b""
    fds: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    channel: socket.socket
    runtime: str


class WorkerError(UnavailableError):
    """A worker refused, died, or did not answer in time.

    Attributes:
        worker: its processor.
        reason: a predicate: a verb and its object.
        fatal: whether its process has ended, and those of the others that got a request with it.
        silent: the workers that had not answered; their edges show which of them failed.
        stopped: those of them that the system had stopped, as by a signal; they are the cause whatever they had done.
        reported: whether the worker itself gave the reason, with the stage.
    """

    def __init__(
        self,
        worker: str,
        reason: str,
        *,
        fatal: bool,
        silent: Sequence[str] = (),
        stopped: Sequence[str] = (),
        reported: bool = False,
    ) -> None:
        super().__init__(f"processor {worker!r} {reason}" if fatal else f"{worker}: {reason}")
        self.worker = worker
        self.reason = reason
        self.fatal = fatal
        self.silent = tuple(silent) or (worker,)
        self.stopped = tuple(stopped)
        self.reported = reported


class Workers:
    """The worker processes of a platform's processors; each is started by the first request to it.

    Workers that got a request together end together when one of them dies or does not answer in time, since they may
    wait for each other for ever. The next request starts them again. ``ends`` counts how often each has ended, so that
    callers know when stages that they compiled there are gone; ``foreground`` keeps measurements of studies apart.

    Raises:
        UnavailableError: this machine lacks what a worker needs: a core, an adapter, a library.
    """

    def __init__(self, platform: Platform, log: Path | None = None) -> None:
        self.ends: Counter[str] = Counter()
        self._closed = False
        self._starts = worker_starts(platform)
        limit_nbytes = memory_limit_nbytes(p for p in platform.processors if p.kind == "cpu")
        self.memory: MemoryGroup | None = None
        self._copies: dict[Path, IO[bytes]] = {}
        self._waits = 0  # of processes that have ended
        self._log = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._running: dict[str, _Process] = {}
        self._unlimited: set[str] = set()
        self._short = 0  # processes that the kernel has ended so far
        self._fork_servers: dict[str, ForkServer] = {}
        self._resources = {p.name: tuple(p.resources) for p in platform.processors}
        servers = self._fork_servers
        self.foreground = Foreground(lambda: [s.process.pid for s in servers.values() if s.alive])
        try:
            self.memory = None if limit_nbytes is None else MemoryGroup(limit_nbytes)
            for runtime in sorted({start.runtime for start in self._starts.values()}):
                self._fork_servers[runtime] = self._start(runtime)
        except BaseException:
            self.close()
            raise

    def _start(self, runtime: str) -> ForkServer:
        return fork_server(runtime, own_session=self.foreground.preferred, log=self._log)

    def measuring(self, names: Iterable[str], *, first: bool) -> AbstractContextManager[None]:
        """Measure on some workers, once no other study measures on their processors.

        Args:
            first: raise their priority above that of all other processes (:mod:`evaluators.measurement.foreground`).
        """
        return self.foreground.holding((each for name in names for each in self._resources[name]), first=first)

    def ask(self, worker: str, request: Request, limit_s: float) -> dict[str, Any]:
        """Ask one worker and wait for its answer.

        Raises:
            UnavailableError: the worker refused, died, or did not answer within ``limit_s``.
        """
        return self.ask_all({worker: request}, limit_s)[worker]

    def ask_all(
        self, requests: Mapping[str, Request], limit_s: float, progress: Callable[[], int] = lambda: 0
    ) -> dict[str, dict[str, Any]]:
        """Send requests to several workers at once and wait for all answers.

        Args:
            progress: returns a number that grows while they work; each growth gives them another ``limit_s``.

        Raises:
            UnavailableError: one of them refused, died, or made no progress for ``limit_s``.
        """
        try:
            return self._exchange(requests, limit_s, progress)
        except UnavailableError:
            raise
        except BaseException:
            # Interrupted half-way: some may wait for others that got no request, and answers are still to come.
            self._end_all(requests)
            raise

    def _exchange(
        self, requests: Mapping[str, Request], limit_s: float, progress: Callable[[], int]
    ) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + limit_s
        reached = progress()
        channels = {name: self._process(name).channel for name in requests}
        waiting: list[str] = []
        answers: dict[str, dict[str, Any]] = {}

        def failed(name: str, reason: str, *, silent: Sequence[str] = (), reported: bool = False) -> WorkerError:
            stopped = [each for each in silent if _is_stopped(self._running[each].pid)]
            ended = self._end_all(requests)
            reason = ended[name] if reason == "died" else reason
            return WorkerError(name, reason, fatal=True, silent=silent, stopped=stopped, reported=reported)

        for name, request in requests.items():
            try:
                wire.send(channels[name], dict(request.head), request.payload, request.fds)
            except OSError as error:
                raise failed(name, "died" if isinstance(error, ConnectionError) else str(error)) from error
            waiting.append(name)
        while waiting:
            found = self.answers(waiting, deadline - time.monotonic())
            if not found and progress() > reached:
                reached, deadline = progress(), time.monotonic() + limit_s
            elif not found:
                raise failed(waiting[0], f"gave no answer within {limit_s:.3g} s", silent=waiting)
            for name, answer in found.items():
                waiting.remove(name)
                if answer is None:
                    raise failed(name, "died")
                if "error" in answer:
                    # The others may be waiting for this worker's next stage, which will not come.
                    if waiting:
                        raise failed(name, str(answer["error"]), reported=True)
                    raise WorkerError(name, str(answer["error"]), fatal=False, reported=True)
                answers[name] = answer
        return answers

    def ask_each(
        self, requests: Mapping[str, Request], limit_s: float
    ) -> tuple[dict[str, dict[str, Any]], dict[str, WorkerError]]:
        """Send requests to independent workers at once; return the answers, and the errors of those that failed."""
        answers: dict[str, dict[str, Any]] = {}
        errors: dict[str, WorkerError] = {}
        deadline = time.monotonic() + limit_s
        try:
            for name, request in requests.items():
                channel = self._process(name).channel
                try:
                    wire.send(channel, dict(request.head), request.payload, request.fds)
                except OSError as error:
                    how = self.end(name)
                    reason = how if isinstance(error, ConnectionError) else str(error)
                    errors[name] = WorkerError(name, reason, fatal=True)
            for name in [name for name in requests if name not in errors]:
                found = self.answers([name], deadline - time.monotonic())
                answer = found.get(name)
                if answer is None:
                    how = self.end(name)
                    reason = how if found else f"gave no answer within {limit_s:.3g} s"
                    errors[name] = WorkerError(name, reason, fatal=True)
                elif "error" in answer:
                    errors[name] = WorkerError(name, str(answer["error"]), fatal=False, reported=True)
                else:
                    answers[name] = answer
        except BaseException:  # answers are still to come
            self._end_all(requests)
            raise
        return answers, errors

    def ends_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return how often each of some workers has ended, for :meth:`check`, and for :func:`notify`."""
        return {name: self.ends[name] for name in names}

    def check(self, ends: Mapping[str, int]) -> None:
        """Check that workers have not ended since :meth:`ends_of` returned ``ends``.

        Raises:
            UnavailableError: a worker has ended.
        """
        if ends != self.ends_of(ends):
            raise UnavailableError("a worker process was restarted since the plan was loaded", "load the plan again")

    def send(self, name: str, request: Request) -> None:
        """Send a request without waiting for the answer, which :meth:`answers` returns.

        Raises:
            UnavailableError: the worker died.
        """
        channel = self._process(name).channel
        try:
            wire.send(channel, dict(request.head), request.payload, request.fds)
        except OSError as error:
            raise UnavailableError(f"processor {name!r} {self.end(name)}") from error

    def answers(self, names: Sequence[str], limit_s: float) -> dict[str, dict[str, Any] | None]:
        """Return the answers so far, None for a worker that died; waits up to ``limit_s`` for the first."""
        poll = select.poll()
        names_of = {self._running[name].channel.fileno(): name for name in names}
        for fd in names_of:
            poll.register(fd, select.POLLIN)
        found: dict[str, dict[str, Any] | None] = {}
        for fd, _ in poll.poll(max(0.0, limit_s) * 1e3):
            try:
                found[names_of[fd]], _, _ = wire.receive(self._running[names_of[fd]].channel)
            except (EOFError, OSError):
                found[names_of[fd]] = None
        return found

    def own(self, path: Path | None) -> Path | None:
        """Return a file, or where memory is limited a copy of it, which counts for the worker that reads it."""
        if self.memory is None or path is None:
            return path
        if path not in self._copies:
            self._copies[path] = own_copy(path)
        return Path(f"/proc/{os.getpid()}/fd/{self._copies[path].fileno()}")

    @property
    def page_faults(self) -> int:
        """How often workers whose memory is limited, also those that have ended, waited for the disk."""
        return self._waits + sum(major_faults(p.pid) for n, p in self._running.items() if self._starts[n].limited)

    def charge(self, *paths: Path | None) -> None:
        """Where memory is limited, let files that others have read count for the worker that reads them next."""
        if self.memory is not None:
            forget_pages(*filter(None, paths))

    def end_limited(self) -> None:
        """End the workers whose memory is limited, so that the next ones have all of it."""
        if self.memory is not None:
            self._end_all([name for name in self._running if self._starts[name].limited])

    @contextmanager
    def without_limit(self, name: str) -> Iterator[None]:
        """Let a worker, started anew, have as much memory as it needs meanwhile."""
        if self.memory is None:
            yield
            return
        self._end_all([name])
        self._unlimited.add(name)
        try:
            yield
        finally:
            self._unlimited.discard(name)
            self._end_all([name])

    def processes(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [process.pid for process in self._running.values()]

    def process_of(self, name: str) -> int | None:
        """Return the process id of a worker, or None where it is not running."""
        return self._running[name].pid if name in self._running else None

    def _process(self, name: str) -> _Process:
        if self._closed:  # nobody would end a fork server that starts now
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        if name not in self._running:
            runtime = self._starts[name].runtime
            server = self._fork_servers[runtime]
            if not server.alive:  # it was killed, and its workers died with it
                server.close()
                server = self._fork_servers[runtime] = self._start(runtime)
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = server.fork(asdict(self._starts[name]), theirs.fileno(), self._log)
            except (EOFError, OSError) as error:
                ours.close()
                hint = f"python -c 'import {PACKAGES[runtime].module}' shows why"
                raise UnavailableError(f"the runtime {runtime} cannot be started", hint) from error
            self._running[name] = _Process(pid, ours, runtime)
            if self.memory is not None and self._starts[name].limited and name not in self._unlimited:
                try:
                    self.memory.add(pid)
                except BaseException:
                    self.end(name)
                    raise
        return self._running[name]

    def end(self, name: str) -> str:
        """End a worker's process, if it still runs, and return how it ended, as a predicate."""
        process = self._running.pop(name)
        self.ends[name] += 1
        if self._starts[name].limited:
            self._waits += major_faults(process.pid)
        how = "died"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # no effect on one that is already ending
        with contextlib.suppress(EOFError, OSError):
            status = self._fork_servers[process.runtime].reap(process.pid)
            how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"
        process.channel.close()
        return self._ran_out() or how

    def _ran_out(self) -> str:
        """Return a predicate where the kernel has ended workers for want of memory since the last call, else ""."""
        before, self._short = self._short, self.memory.ended if self.memory is not None else 0
        return "ran out of its memory" if self._short > before else ""

    def _end_all(self, names: Iterable[str]) -> dict[str, str]:
        """End some workers, and those whose fork server has died, since they died with it."""
        servers, ran_out = self._fork_servers, self._ran_out()
        orphans = [n for n, p in self._running.items() if not servers[p.runtime].alive]
        ended = [name for name in dict.fromkeys((*names, *orphans)) if name in self._running]
        return {name: ran_out or how for name, how in zip(ended, map(self.end, ended), strict=True)}

    def close(self) -> None:
        """End all workers, and give the fork servers back."""
        if self._closed:
            return
        self._closed = True
        self._end_all(list(self._running))
        self.foreground.close()
        if self.memory is not None:
            self.memory.close()
        for copy in self._copies.values():
            copy.close()
        while self._fork_servers:
            give_back(self._fork_servers.popitem()[1])
        os.close(self._log)


def _is_stopped(pid: int) -> bool:
    # The name, in brackets, may hold anything; the state follows it.
    return kernel_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].lstrip()[:1] in {"T", "t"}


class Arena(SharedMemory):
    """Shared memory for tensors, with a number that identifies it to the workers."""

    def __init__(self, number: int, nbytes: int) -> None:
        super().__init__(f"arena-{number}", nbytes)
        self.number = number
        self._known_to: dict[str, int] = {}

    def introduce(self, workers: Workers, names: Iterable[str]) -> None:
        """Have workers map it, unless they have done so since they started."""
        new = [name for name in names if self._known_to.get(name) != workers.ends[name]]
        head = {"op": "arena", "id": self.number, "nbytes": self.nbytes}
        workers.ask_all({name: Request(head, fds=[self.fd]) for name in new}, SETUP_LIMIT_S)
        self._known_to |= workers.ends_of(new)

    def give_back(self, workers: Workers) -> None:
        """Have the workers unmap it, and release it."""
        try:
            notify(workers, self._known_to, {"op": "arena", "id": self.number, "nbytes": 0})
        finally:
            self.close()


def notify(workers: Workers, known_to: Mapping[str, int], head: Mapping[str, Any]) -> None:
    """Send a request to those workers that have not ended since they received what it refers to.

    Args:
        known_to: worker → how often it had ended then.
    """
    alive = [name for name, ends in known_to.items() if workers.ends[name] == ends]
    workers.ask_all({name: Request(head) for name in alive}, SETUP_LIMIT_S)


def bind_program(
    workers: Workers, number: int, arena: Arena, semaphores: Semaphores, programs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Have workers bind their stages of a plan to an arena and to semaphores.

    Args:
        number: identifies the program to them.
        programs: worker → its program (:meth:`evaluators.litert.worker.process.Worker.program`).
    """
    shared = {"op": "program", "id": number, "arena": arena.number, "semaphores_nbytes": semaphores.nbytes}
    requests = {name: Request({**shared, **program}, fds=[semaphores.fd]) for name, program in programs.items()}
    workers.ask_all(requests, SETUP_LIMIT_S)
