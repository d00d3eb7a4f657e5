"""The service of an agent: it keeps models, loads plans, runs them, and reports conditions.

Requests come from the threads of a server (:mod:`evaluators.remote.server`) and are served one after another by the
thread that called :meth:`Agent.serve`: the main thread, so that a call that hangs can be interrupted, and so that
nothing else runs during a measurement.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from evaluators.base import Candidate, Evaluator, Session, unsupported_operators
from evaluators.machine import Conditions
from evaluators.remote import wire
from evaluators.remote.store import MAX_FILE_NBYTES, Store
from evaluators.workload.outcome import OBJECTIVES
from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import JoinedGraph, merge
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform, Processor, with_cpu
from search_spaces.core.plugins import foreign, time_limit
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import Workload
from search_spaces.models.files import file_digest, locked
from search_spaces.models.litert import read_model

LEASE_S = 30.0
_TICK_S = 0.5
_CLOSE_S = 60.0
_MOST_PAUSE_S = 60.0
_MAX_CANDIDATES = 256
_MAX_GRAPHS = 8
_PRICE_S = 900.0

Answer = dict[str, Any]


class BusyError(UnavailableError):
    """The device measures for another client, and will be free again."""


class LapsedError(UnavailableError):
    """The client's lease has ended."""


class Lease:
    """The right to measure on a device: held by one client at a time, and renewed while it is alive.

    Measurements that run at once on one device disturb each other, whatever cores they use, so there is one lease for
    the device and not one for each processor.

    Args:
        seconds: time after which a silent client loses it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._client = ""
        self._until_s = 0.0

    @property
    def held(self) -> bool:
        """Whether a client that is alive has it."""
        with self._lock:
            return bool(self._client) and time.monotonic() <= self._until_s

    def take(self, client: str) -> None:
        """Give the lease to a client, or renew it.

        Raises:
            BusyError: another client has it.
        """
        with self._lock:
            left_s = self._until_s - time.monotonic()
            if self._client not in ("", client) and left_s > 0.0:
                raise BusyError("busy with another study", "wait until it has ended, or take another device")
            self._client, self._until_s = client, time.monotonic() + self.seconds

    def renew(self, client: str) -> bool:
        """Renew the lease; return whether the client holds it."""
        with self._lock:
            if not client or client != self._client:
                return False
            self._until_s = time.monotonic() + self.seconds
            return True

    def end(self, client: str) -> None:
        """End the lease of a client."""
        with self._lock:
            if client == self._client:
                self._client = ""

    def lapsed(self) -> str:
        """Return the client whose lease has lapsed, or ""."""
        with self._lock:
            return self._client if self._client and time.monotonic() > self._until_s else ""


@dataclass(slots=True)
class _Open:
    """The session of the client that holds the lease."""

    client: str
    platform: Platform
    session: Session
    stack: ExitStack
    folder: Path
    conditions: Callable[[], Mapping[str, Any]]
    candidates: dict[int, Candidate] = field(default_factory=dict)
    joined: JoinedGraph | None = None
    graphs: dict[str, Graph] = field(default_factory=dict)
    numbers: int = 0


class Agent:
    """Measures for one client at a time with an evaluator of this machine.

    Args:
        name: of the device.
        evaluator: one that measures on this machine.
        folder: for models and files of measurements; made where it does not exist.
        lease_s: seconds after which a silent client loses its lease.

    Raises:
        OSError: the folder cannot be written.
        UnavailableError: the evaluator finds no processor.
    """

    def __init__(
        self,
        name: str,
        evaluator: Evaluator,
        folder: Path,
        *,
        lease_s: float = LEASE_S,
        max_file_nbytes: int = MAX_FILE_NBYTES,
    ) -> None:
        self.name = name
        self.lease = Lease(lease_s)
        self._evaluator = evaluator
        self._platform = evaluator.platform()
        self._folder = folder
        self.store = Store(folder / "models", max_file_nbytes)
        self._open: _Open | None = None
        self._jobs: queue.Queue[tuple[Callable[[], Answer], Future[Answer]]] = queue.Queue()
        self._ended = threading.Event()
        self.methods: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "Processor": self._processor,
            "Open": self._open_session,
            "Host": self._host,
            "Price": self._price,
            "DecomposedError": self._decomposed_error,
            "Leave": self._leave,
            "Load": self._load,
            "Run": self._run,
            "AfterPause": self._after_pause,
            "Verify": self._verify,
            "Close": self._close_candidate,
            "Unsupported": self._unsupported_operators,
            "Deploy": self._deploy,
        }

    def submit(self, method: str, data: Mapping[str, Any]) -> Future[Answer]:
        """Queue a request and return its future answer, which is cancelled at the end; callable from any thread."""
        future: Future[Answer] = Future()
        self._jobs.put((lambda: self.methods[method](data), future))
        if self._ended.is_set():
            future.cancel()
        return future

    @property
    def ended(self) -> bool:
        """Whether it serves no more requests."""
        return self._ended.is_set()

    def end(self) -> None:
        """Have :meth:`serve` return; callable from any thread and from a signal handler."""
        self._ended.set()

    def serve(self) -> None:
        """Serve requests until :meth:`end`; in the main thread, where a call that hangs can be interrupted."""
        try:
            while not self._ended.is_set():
                try:
                    job, future = self._jobs.get(timeout=_TICK_S)
                except queue.Empty:
                    self._look_for_silence()
                    continue
                if not future.set_running_or_notify_cancel():
                    continue  # the client has gone
                try:
                    future.set_result(job())
                except Exception as error:  # noqa: BLE001 - passed to the client; the agent goes on
                    future.set_exception(error)
                except BaseException:  # an interrupt; a thread of the server waits for the answer
                    future.set_exception(UnavailableError("the agent was ended"))
                    raise
        finally:
            self._ended.set()
            with suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()[1].cancel()
            self._let_go()

    def deployed_file(self, client: str, name: str) -> Path:
        """Return a file that ``Deploy`` wrote for the client.

        Raises:
            WireError: there is no such file.
            LapsedError: the client holds no lease.
        """
        if not wire.FILE_NAME.fullmatch(name):
            raise wire.WireError(f"{name[:80]!r} is not a name of a file to fetch")
        return self._held({"client": client}).folder / "deployed" / name

    def must_hold(self, data: Mapping[str, Any]) -> str:
        """Renew the lease of a request's client, and return the client.

        Raises:
            WireError: the request names no client.
            LapsedError: the client holds no lease.
        """
        client = wire.text(data, "client", wire.DIGEST)
        if not self.lease.renew(client):
            raise LapsedError("the device ended this study, or was restarted")
        return client

    def _look_for_silence(self) -> None:
        silent = self.lease.lapsed()
        if silent:
            self._let_go()
            self.lease.end(silent)

    def _let_go(self) -> None:
        """Close the session and its plans; one that cannot be closed is abandoned."""
        held, self._open = self._open, None
        if held is None:
            return
        plans = [(candidate.close, "closing a plan") for candidate in held.candidates.values()]
        for close, what in [*plans, (held.stack.close, "closing the session")]:
            with suppress(OptimizeError), foreign(what), time_limit(_CLOSE_S, what):
                close()

    def describe(self) -> Answer:
        """Return the processors, and whether a client measures now; callable from any thread, even during a run."""
        return {
            "version": wire.VERSION,
            "device": self.name,
            "platform": wire.platform_to_json(self._platform),
            "held": self.lease.held,
        }

    # Requests of clients; each is served in the thread of serve().

    def _processor(self, data: Mapping[str, Any]) -> Answer:
        found = self._named(wire.text(data, "name"))
        return {"platform": wire.platform_to_json(Platform("one", (found,)))}

    def _named(self, name: str) -> Processor:
        if not self._evaluator.capabilities.names:
            raise UsageError(f"evaluator {self._evaluator.name!r} names no processors")
        if name.startswith(("npu:", "npu+cpu:")):
            raise UsageError(
                f"processor {name!r}: a remote client may not choose a library", "configure it on the device"
            )
        return self._evaluator.processor(name)

    def _open_session(self, data: Mapping[str, Any]) -> Answer:
        client = wire.text(data, "client", wire.DIGEST)
        names = data.get("names", [])
        if not isinstance(names, list) or len(names) > 1024:
            raise wire.WireError("names is not a list of processors")
        known = list(self._platform.processors)
        known += [self._named(wire.text({"name": name}, "name")) for name in names]
        known += [with_cpu(p) for p in known if p.kind != "cpu"]
        platform = wire.platform_from_json(data.get("platform"), known)
        self.lease.take(client)
        self._let_go()
        try:
            self._open = self._prepared(client, platform)
            session = self._open.session
            return {
                "fingerprint": session.fingerprint(),
                "capabilities": asdict(session.capabilities),
                "powers_w": dict(session.powers_w()) if session.capabilities.powers else {},
                "lease_s": self.lease.seconds,
                "conditions": self._conditions(self._open),
            }
        except BaseException:
            self._let_go()
            self.lease.end(client)
            raise

    def _prepared(self, client: str, platform: Platform) -> _Open:
        with ExitStack() as stack:
            busy = BusyError("busy with another agent of this machine", "end one of the two")
            stack.enter_context(locked(self._folder / "measuring.lock", busy))
            scratch = self._folder / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)  # of an agent that was killed
            scratch.mkdir()
            folder = Path(mkdtemp(prefix="study-", dir=scratch))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            what = f"evaluator {self._evaluator.name!r}"
            with time_limit(2 * platform.limits.load_s, f"{what}: preparing it"):
                session = stack.enter_context(self._evaluator.prepare(platform, folder))
            here = Conditions(os.sched_getaffinity(0), list)
            conditions = session.conditions if session.capabilities.conditions else here.now
            return _Open(client, platform, session, stack.pop_all(), folder, conditions)

    def _host(self, data: Mapping[str, Any]) -> Answer:
        """Open a session for several models; later plans are of the joined graph."""
        held, workload = self._held(data), Workload.from_json(data.get("workload"))
        if not self._evaluator.capabilities.workloads:
            raise UsageError(
                f"evaluator {self._evaluator.name!r} there: it runs one model at a time", "give one --model"
            )
        models, objective = data.get("models"), data.get("objective")
        if not isinstance(models, list) or len(models) != len(workload.clients) or objective not in OBJECTIVES:
            raise wire.WireError("the models or the objective of a workload are damaged")
        graphs = [self._graph(held, {"model": m, "name": f"m{i}"}) for i, m in enumerate(models)]
        joined = merge(workload.name, [(each.name, graphs[each.client]) for each in workload.instances])
        hosted = self._evaluator.host(workload, joined, with_pools(held.platform), objective, held.folder)
        with time_limit(2 * held.platform.limits.load_s, "preparing a workload"):
            held.session = held.stack.enter_context(hosted)
        held.joined, held.platform = joined, with_pools(held.platform)
        return {
            "joined": joined.graph.digest,
            "structures": [graph.digest for graph in graphs],
            "capabilities": asdict(held.session.capabilities),
        }

    def _priced(self, data: Mapping[str, Any]) -> tuple[_Open, Any]:
        held = self._held(data)
        if held.joined is None:
            raise wire.WireError("there is no workload to be priced")
        return held, held.session

    def _price(self, data: Mapping[str, Any]) -> Answer:
        held, session = self._priced(data)
        asked = data.get("grids")
        if not isinstance(asked, dict) or not all(isinstance(rows, list) for rows in asked.values()):
            raise wire.WireError("grids are not lists of ranks")
        grids = {model: [wire.ranks_from_json(each) for each in rows] for model, rows in asked.items()}
        with time_limit(_PRICE_S + held.platform.limits.load_s, "pricing the jobs of a workload"):
            return {"prices": session.price(data.get("known"), lambda _: None, grids)}

    def _decomposed_error(self, data: Mapping[str, Any]) -> Answer:
        held, session = self._priced(data)
        graphs = {each.graph.digest: each.graph for each in held.joined.components} if held.joined else {}
        graph = graphs.get(wire.text(data, "structure", wire.DIGEST))
        if graph is None:
            raise wire.WireError("there is no such model in the workload")
        with time_limit(4 * held.platform.limits.load_s, "running a decomposed model"):
            return {"error": session.decomposed_error(graph, wire.ranks_from_json(data.get("ranks")))}

    def _leave(self, data: Mapping[str, Any]) -> Answer:
        self._held(data)
        self._let_go()
        self.lease.end(wire.text(data, "client", wire.DIGEST))
        return {}

    def _held(self, data: Mapping[str, Any]) -> _Open:
        client, held = self.must_hold(data), self._open
        if held is None or held.client != client:
            raise LapsedError("the device ended this study, or was restarted")
        return held

    def _graph(self, held: _Open, data: Mapping[str, Any]) -> Graph:
        digest = wire.text(data, "model", wire.DIGEST)
        if digest not in held.graphs:
            path = self.store.path(digest)
            if not self.store.has(digest) or file_digest(path) != digest:
                path.unlink(missing_ok=True)
                raise UnavailableError(f"model {digest[:12]}… is not here", "send it again")
            while len(held.graphs) >= _MAX_GRAPHS:
                held.graphs.pop(next(iter(held.graphs)))
            held.graphs[digest] = read_model(path, wire.text(data, "name"))
        return held.graphs[digest]

    def _load(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        graph = held.joined.graph if held.joined is not None else self._graph(held, data)
        plan = Plan.from_json(data.get("plan"))
        plan.validate(graph, held.platform)
        if len(held.candidates) >= _MAX_CANDIDATES:
            raise UnavailableError(f"{_MAX_CANDIDATES} plans are loaded", "close some")
        with time_limit(held.platform.limits.load_s * (1 + len(plan.stages)), "loading the plan"):
            candidate = held.session.load(graph, plan, fresh=data.get("fresh") is True)
        held.numbers += 1
        held.candidates[held.numbers] = candidate
        return {"candidate": held.numbers}

    def _candidate(self, held: _Open, data: Mapping[str, Any]) -> Candidate:
        number = wire.whole(data, "candidate", 1, 1 << 53)
        if number not in held.candidates:
            raise wire.WireError(f"there is no plan {number}: it was closed")
        return held.candidates[number]

    def _run(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        candidate, n = self._candidate(held, data), wire.whole(data, "n", 1, wire.MAX_RUNS)
        stop_above_s = wire.seconds(data, "stop_above_s")
        with time_limit(held.platform.limits.run_s * (n + 1), f"running the plan {n} times"):
            batch = candidate.stream(n) if data.get("stream") is True else candidate.run(n, stop_above_s)
        return {"batch": wire.batch_to_json(batch), "conditions": self._conditions(held)}

    def _after_pause(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        candidate, pause_s = self._candidate(held, data), min(wire.seconds(data, "pause_s"), _MOST_PAUSE_S)
        with time_limit(held.platform.limits.run_s + pause_s, "running the plan after a pause"):
            return {"seconds": candidate.after_pause(pause_s)}

    def _verify(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        with time_limit(4 * held.platform.limits.run_s, "comparing the plan's outputs"):
            return {"agreement": wire.agreement_to_json(self._candidate(held, data).verify())}

    def _close_candidate(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        candidate = self._candidate(held, data)
        del held.candidates[data["candidate"]]
        with time_limit(_CLOSE_S, "closing the plan"):
            candidate.close()
        return {}

    def _unsupported_operators(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        graph, name = self._graph(held, data), wire.text(data, "processor")
        with time_limit(held.platform.limits.load_s * len(graph.operators), "querying unsupported operators"):
            return {"operators": [int(o) for o in unsupported_operators(held.session, graph, name)]}

    def _deploy(self, data: Mapping[str, Any]) -> Answer:
        held = self._held(data)
        graph, plan = self._graph(held, data), Plan.from_json(data.get("plan"))
        if not held.session.capabilities.deploy:
            raise UsageError(f"evaluator {self._evaluator.name!r} writes no stage files")
        folder = held.folder / "deployed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with time_limit(held.platform.limits.load_s * (1 + len(plan.stages)), "writing the stage files"):
            agreement = held.session.deploy(folder, graph, plan)
        files = [
            {"name": path.name, "sha256": file_digest(path), "nbytes": path.stat().st_size}
            for path in sorted(folder.iterdir())
            if wire.FILE_NAME.fullmatch(path.name)
        ]
        return {"agreement": wire.agreement_to_json(agreement), "files": files}

    def _conditions(self, held: _Open) -> Answer:
        """Return the conditions of a measurement, with the device's name and clock."""
        clock = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {**held.conditions(), "device": self.name, "device_time_utc": clock}
