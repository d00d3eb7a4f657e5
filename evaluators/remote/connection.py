"""A client's side: calls with time limits, and a lease on one of several devices that are alike.

A lease is taken, kept alive, lost, and taken again.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from evaluators.base import Capabilities
from evaluators.energy import OPTION
from evaluators.remote import wire
from evaluators.remote.credentials import channel_to, grpc_module, metadata_of
from evaluators.remote.devices import Device
from evaluators.remote.store import receive_file
from search_spaces.core.errors import DeviceLostError, OptimizeError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage

_LOGGER = logging.getLogger("partition_optimizer")
SHORT_S = 10.0
_ASKED_S = 3.0
SLACK_S = 30.0
_POLL_S = 0.5
_NO_ANSWER = (
    "start `optimize agent` there, and check that its port can be reached; where it has a certificate, devices.yaml "
    "must name authority, certificate and key, and a host that the certificate was made for"
)
_MOVES = 3
_UNLIKE = "name boards together only where CPU, runtime and versions are the same"
_BUSY = "wait for it, or raise its wait_s in devices.yaml"

Found = TypeVar("Found")
_OPTIONS = (
    *wire.OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_STALLED_S = 60.0
_MOST_FETCHED_NBYTES = 16 << 30


class BusyElsewhereError(UnavailableError):
    """The device measures for another client, or is not like the one that a study began on."""


class Connection:
    """A channel to a device's agent; the first call connects.

    Raises:
        UnavailableError: gRPC is not installed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._grpc = grpc_module()
        self._channel = channel_to(self._grpc, device.address, device.credentials, _OPTIONS)
        self._metadata = metadata_of(device.credentials)

    def close(self) -> None:
        """Close the channel; calls in flight end."""
        with suppress(Exception):
            self._channel.close()

    def call(self, method: str, data: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Call a method and return the answer.

        Raises:
            DeviceLostError: the device did not answer in time, or has ended this client's session.
            BusyElsewhereError: the device measures for another client.
            UsageError, UnavailableError: an error on the device, or it refused access.
        """
        ask = self._channel.unary_unary(f"/{wire.SERVICE}/{method}")
        with self._reached():
            content = ask(wire.packed(data), timeout=limit_s, metadata=self._metadata)
        return self._answer(content)

    def send(self, path: Path, announced: Mapping[str, Any]) -> None:
        """Send a model.

        Raises:
            DeviceLostError: the device was lost meanwhile.
            UnavailableError: the device refuses the model.
        """
        nbytes = path.stat().st_size

        def messages() -> Iterator[bytes]:
            yield wire.packed({**announced, "nbytes": nbytes})
            yield from wire.pieces_of(path)

        ask = self._channel.stream_unary(f"/{wire.SERVICE}/Store")
        with self._reached():
            content = ask(messages(), timeout=_transfer_limit_s(nbytes), metadata=self._metadata)
        self._answer(content)

    def fetch(self, folder: Path, client: str, announced: Mapping[str, Any]) -> Path:
        """Fetch a file that the device has deployed, and check its name, size and digest.

        Raises:
            DeviceLostError: the device was lost meanwhile.
            UnavailableError: the file differs from its announcement.
            UsageError: the folder cannot be written.
        """
        name, digest = wire.text(announced, "name", wire.FILE_NAME), wire.text(announced, "sha256", wire.DIGEST)
        nbytes = wire.whole(announced, "nbytes", 1, _MOST_FETCHED_NBYTES)
        ask = self._channel.unary_stream(f"/{wire.SERVICE}/Fetch")
        request = wire.packed({"client": client, "name": name})

        def pieces() -> Iterator[bytes]:
            for piece in ask(request, timeout=_transfer_limit_s(nbytes), metadata=self._metadata):
                if not piece.startswith(b"F"):
                    try:
                        self._answer(piece[1:])
                    except wire.WireError as error:
                        raise UnavailableError(f"{self.device.name}: {error.what}") from error
                yield piece[1:]

        try:
            with self._reached():
                receive_file(folder / name, digest, nbytes, pieces())
        except wire.WireError as error:
            raise UnavailableError(f"{self.device.name}: {name} differs from its announcement") from error
        return folder / name

    def _answer(self, content: bytes) -> dict[str, Any]:
        answer = wire.unpacked(content)
        if answer.get("lapsed") is True:
            raise DeviceLostError(f"device {self.device.name}: it ended this study, or was restarted")
        try:
            wire.raise_reported(answer, f"device {self.device.name}")
        except UnavailableError as error:
            raise BusyElsewhereError(error.what, _BUSY) if answer.get("busy") is True else error from None
        return answer

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn errors of gRPC into errors that say what to do."""
        try:
            yield
        except self._grpc.RpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: Any) -> UnavailableError:
        """Return the error for a failed call: the device is lost, or refuses this client."""
        code, name, where = error.code(), self.device.name, self.device.address
        status = self._grpc.StatusCode
        details = " ".join(str(error.details()).split())[:200]
        if code == status.UNAUTHENTICATED:
            return UnavailableError(f"device {name} refused access: {details}", "check the token and the certificate")
        if code == status.UNIMPLEMENTED:
            return UnavailableError(f"{where} is not an agent of this version", "install the same version there")
        if code == status.UNAVAILABLE and any(word in details.lower() for word in ("ssl", "certificate", "handshake")):
            return UnavailableError(
                f"device {name}: the certificates do not match: {details}", "check authority, certificate and key"
            )
        return DeviceLostError(f"device {name} at {where} does not answer ({code.name.lower().replace('_', ' ')})")


def _transfer_limit_s(nbytes: int) -> float:
    return _STALLED_S + nbytes / 1e5  # anything slower than 100 kB/s counts as stalled


@dataclass(frozen=True, slots=True)
class Sendable:
    """A file that holds a graph.

    Attributes:
        path: the file.
        digest: its SHA-256.
        name: of the model, reduced to characters that messages allow.
        structure: digest of the graph as it is read from the file.
    """

    path: Path
    digest: str
    name: str
    structure: str

    def plan(self, plan: Plan) -> Plan:
        """Return a plan for the graph in the file, which has the same operators."""
        return replace(plan, graph_digest=self.structure)


def sendable(graph: Graph, folder: Path) -> Sendable:
    """Return a file that holds a graph: its own, or one in ``folder`` where sizes were given or operators rewritten.

    Raises:
        ModelError: the model's file is gone or has changed.
        UnavailableError: the graph has no file, or cannot be written as one.
        UsageError: the folder cannot be written.
    """
    if graph.source is None:
        raise UnavailableError(f"model {graph.name!r} has no file, and devices are sent files", "measure it here")
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-@") else "_" for c in graph.name)[:80]
    name = name if name[:1].isalnum() else f"m{name}"
    if not graph.source.fixed:
        return Sendable(graph.source.path, graph.source.content_digest(), name, graph.digest)
    path = folder / f"{graph.digest}.tflite"
    digest = cut_stage(graph, range(len(graph.operators))).write(path)
    written = read_model(path, graph.name)
    if [o.kind for o in written.operators] != [o.kind for o in graph.operators]:
        raise UnavailableError(f"model {graph.name!r}, as it was rewritten, is not a file that a device could be sent")
    return Sendable(path, digest, name, written.digest)


class Link:
    """A connection that holds a device's lease.

    Args:
        devices: alike, in order of preference.
        platform: the processors to measure on; every device must have them.
        names: processor names that were resolved on a device.

    Attributes:
        generation: counts the connections; plans loaded over an earlier one are gone.
        capabilities, powers_w: of the session on the first device.
        fingerprint, conditions: as last reported.
    """

    def __init__(self, devices: Sequence[Device], platform: Platform, names: Sequence[str]) -> None:
        self.platform = platform
        self.generation = 0
        self.capabilities = Capabilities()
        self.powers_w: dict[str, float] = {}
        self.fingerprint: dict[str, Any] = {}
        self.conditions: dict[str, Any] = {}
        # A secret: whoever knows it holds the lease.
        self.client = secrets.token_hex(32)
        self._devices = tuple(devices)
        self._names = list(dict.fromkeys(names))
        self._connection: Connection | None = None
        self._patient = True
        self._sent: set[str] = set()
        self._lease_s = 30.0
        self._on: Device | None = None
        self._unlike: dict[Device, UnavailableError] = {}
        self._closed = threading.Event()
        self._beat = threading.Thread(target=self._keep_lease, name="lease", daemon=True)

    def connect(self) -> None:
        """Take a lease on the first device that is free; wait for one where none is, unless that was in vain before.

        Raises:
            UnavailableError: no device was free in time, or a device cannot be used.
        """
        self._drop()
        if self._closed.is_set():
            raise UnavailableError("the session is closed", "load candidates inside the `with` block of prepare()")
        try:
            waited(self._devices, self._open, patient=self._patient)
        except UnavailableError:
            self._patient = False
            raise
        self._patient = True

    def _open(self, device: Device) -> None:
        if device in self._unlike:
            raise self._unlike[device]
        connection = Connection(device)
        try:
            # Preparing takes long; this short call fails at once where there is no agent.
            version = connection.call("Describe", {}, SHORT_S).get("version")
            _check_version(device, version)
            request = {
                "client": self.client,
                "platform": wire.platform_to_json(_unpriced(self.platform)),
                "names": self._names,
            }
            answer = connection.call("Open", request, 2 * self.platform.limits.load_s + SLACK_S)
            self._check_alike(device, answer.get("fingerprint"), connection)
        except BaseException:
            connection.close()
            raise
        if self._on is not None and self._on != device:
            _LOGGER.warning("device %s is lost or busy; measuring on %s from now on", self._on.name, device.name)
        self._connection, self._on = connection, device
        self._sent.clear()
        self.fingerprint = {"evaluator": "remote", "device": device.name, "there": answer.get("fingerprint")}
        self.conditions = _plain(answer.get("conditions"))
        self._lease_s = max(1.0, float(answer.get("lease_s", 30.0)))
        if not self.generation:
            self.capabilities = wire.capabilities_from_json(answer.get("capabilities"))
            powers = _plain(answer.get("powers_w")).items()
            self.powers_w = {k: float(v) for k, v in powers if isinstance(v, int | float) and 0.0 <= v < math.inf}
        self.generation += 1
        if not self._beat.is_alive():
            self._beat.start()

    def _check_alike(self, device: Device, there: Any, connection: Connection) -> None:
        """Return the lease, and raise, unless a device is like the one before it: a study is of one kind."""
        if self._on is None or self._on == device:
            return
        before, now = (x if isinstance(x, dict) else {} for x in (self.fingerprint["there"], there))
        names = sorted({*before, *now} - {"kernel", "platform"})
        other = next((name for name in names if before.get(name) != now.get(name)), None)
        if other is not None:
            connection.call("Leave", {"client": self.client}, SHORT_S)
            what = f"device {device.name} is not like {self._on.name}: another {other[:40].replace('_', ' ')}"
            self._unlike[device] = BusyElsewhereError(what, _UNLIKE)
            raise self._unlike[device]

    def _keep_lease(self) -> None:
        while not self._closed.wait(self._lease_s / 3.0):
            connection = self._connection
            if connection is not None:
                with suppress(OptimizeError, ValueError):  # the next request will report it
                    connection.call("Renew", {"client": self.client}, self._lease_s / 3.0)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Return the lease and close the connection."""
        self._closed.set()
        if self._connection is not None:
            with suppress(OptimizeError):
                self._connection.call("Leave", {"client": self.client}, SHORT_S)
        self._drop()

    def ask(self, method: str, data: dict[str, Any], limit_s: float, model: Sendable | None = None) -> dict[str, Any]:
        """Call a method over the current connection, after sending the model if the device does not have it.

        Raises:
            DeviceLostError: the connection is lost.
            UsageError, UnavailableError: an error on the device.
        """
        request = {**data, "client": self.client}
        try:
            if model is not None:
                request |= {"model": model.digest, "name": model.name}
                self.send(model)
            answer = self._connected().call(method, request, limit_s)
        except DeviceLostError:
            self._drop()
            raise
        if "conditions" in answer:
            self.conditions = _plain(answer["conditions"])
        return answer

    def fetch(self, folder: Path, announced: Any) -> Path:
        """Fetch a file that the device has announced (:meth:`~evaluators.remote.connection.Connection.fetch`)."""
        if not isinstance(announced, dict):
            raise DeviceLostError(f"device {self._devices[0].name}: the connection is lost")
        return self._connected().fetch(folder, self.client, announced)

    def send(self, model: Sendable) -> None:
        """Send a model, unless the device has it.

        Raises:
            DeviceLostError: the connection is lost.
            UnavailableError: the device refuses the model.
        """
        connection, announced = self._connected(), {"client": self.client, "model": model.digest}
        size = {"nbytes": model.path.stat().st_size}
        if model.digest not in self._sent and connection.call("Has", announced | size, SHORT_S).get("has") is not True:
            connection.send(model.path, announced)
        self._sent.add(model.digest)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise DeviceLostError(f"device {self._devices[0].name}: the connection is lost")
        return self._connection

    def moved(self, ask: Callable[[], Found]) -> Found:
        """Return the result of ``ask``; where the device is lost, repeat it on the next one, or later on the same.

        Raises:
            UnavailableError: no device came back in time, or devices were lost repeatedly.
        """
        for attempt in range(_MOVES):
            try:
                if self._connection is None:
                    self.connect()
                return ask()
            except DeviceLostError:
                self._drop()
                if attempt == _MOVES - 1:
                    raise
        raise DeviceLostError("the devices come and go")


def waited(devices: Sequence[Device], ask: Callable[[Device], Found], *, patient: bool = True) -> Found:
    """Return the result of ``ask`` on the first of some devices that answers and is free; wait where none is.

    Args:
        patient: whether to wait.

    Raises:
        UnavailableError: no device was free in time, or a device cannot be used.
    """
    wait_s = max(device.wait_s for device in devices) if patient else 0.0
    end_s, warned = time.monotonic() + wait_s, False
    while True:
        problems: list[UnavailableError] = []
        for device in devices:
            try:
                return ask(device)
            except (DeviceLostError, BusyElsewhereError) as error:
                problems.append(error)
        if time.monotonic() >= end_s:
            why = "; ".join(dict.fromkeys(problem.what for problem in problems))
            why += f"; waited for {wait_s:g} s" if patient else ""
            raise UnavailableError(why, problems[0].hint or _NO_ANSWER)
        if not warned:
            _LOGGER.warning("%s; waiting for up to %g s", problems[0].what, wait_s)
            warned = True
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class AgentState:
    """What an agent says of itself when it is asked.

    Attributes:
        address: ``host:port``.
        processors: names; none where it does not answer.
        state: ``free``, ``busy``, or why it cannot be used.
    """

    address: str
    processors: tuple[str, ...]
    state: str


def agent_state(device: Device) -> AgentState:
    """Ask an agent for its processors, and whether it is free."""
    try:
        with closing(Connection(device)) as connection:
            found = connection.call("Describe", {}, _ASKED_S)
        _check_version(device, found.get("version"))
        names = tuple(p.name for p in wire.platform_from_json(found.get("platform")).processors)
    except OptimizeError as error:
        return AgentState(device.address, (), error.what)
    return AgentState(device.address, names, "busy" if found.get("held") is True else "free")


def _check_version(device: Device, version: object) -> None:
    if version != wire.VERSION:
        raise UnavailableError(f"device {device.name} speaks version {version}", "install the same version there")


def _unpriced(platform: Platform) -> Platform:
    """Return a platform without the power of its processors, which was given here and is unknown to the device."""
    processors = (replace(p, options={k: v for k, v in p.options.items() if k != OPTION}) for p in platform.processors)
    return replace(platform, processors=tuple(processors))


def _plain(conditions: Any) -> dict[str, Any]:
    """Return conditions cut to a size for logs: reports of a device are not trusted to be small."""
    if not isinstance(conditions, dict):
        return {}
    kinds = (str, int, float, bool)
    small = {str(k)[:64]: v[:200] if isinstance(v, str) else v for k, v in list(conditions.items())[:64]}
    versions = small.get("versions")
    kept: dict[str, Any] = {k: v for k, v in small.items() if isinstance(v, kinds)}
    if isinstance(versions, dict):
        kept["versions"] = {str(k)[:64]: str(v)[:64] for k, v in list(versions.items())[:16]}
    return kept
