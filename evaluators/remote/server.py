"""The agent on the network: a gRPC server with few methods, limits on everything, and no code from the wire.

:func:`listen` starts any server of this product, also that of shared storages.
"""

from __future__ import annotations

import contextlib
import math
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from evaluators.remote import wire
from evaluators.remote.agent import Agent, BusyError, LapsedError
from evaluators.remote.credentials import ServerCredentials, grpc_module
from search_spaces.core.errors import ModelError, OptimizeError, UnavailableError
from search_spaces.models.litert import read_model

_THREADS = 8
_MOST_CALLS = 64
_HANDSHAKE_MS = 10_000
_FILES = 65_536
_END_S = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server; ends with :meth:`close`.

    Attributes:
        server: gRPC's.
        address: host and port that it listens on.
    """

    server: Any
    address: str

    def wait(self) -> None:
        """Wait until the server has ended."""
        self.server.wait_for_termination()

    def close(self) -> None:
        """Refuse new calls, and cancel running ones after a second."""
        self.server.stop(_END_S).wait()


def serve(agent: Agent, host: str, port: int, credentials: ServerCredentials) -> Served:
    """Start listening; calls wait until :meth:`~evaluators.remote.agent.Agent.serve` runs.

    Args:
        port: 0 for any free one.

    Raises:
        UsageError: the credentials do not suffice for this address.
        UnavailableError: gRPC is not installed, or the port is taken.
    """
    grpc = grpc_module()
    return listen(
        grpc,
        host,
        port,
        credentials,
        lambda server: server.add_generic_rpc_handlers((_handlers(grpc, agent),)),
        ThreadPoolExecutor(_THREADS, thread_name_prefix="agent"),
        wire.OPTIONS,
    )


def listen(
    grpc: Any,
    host: str,
    port: int,
    credentials: ServerCredentials,
    add: Callable[[Any], object],
    threads: ThreadPoolExecutor,
    options: Sequence[tuple[str, int]],
    most_calls_per_s: float = math.inf,
) -> Served:
    """Start a server that admits clients with the right credentials, and limits calls and half-open connections.

    Args:
        grpc: the module.
        port: 0 for any free one.
        add: adds the methods to the server.
        threads: serve the calls.
        options: of gRPC, such as the largest size of messages.
        most_calls_per_s: limit for all clients together; further calls are refused, and clients repeat them.

    Raises:
        UsageError: the credentials do not suffice for this address.
        UnavailableError: the port is taken.
    """
    credentials.check(host)
    _allow_many_connections()
    server = grpc.server(
        threads,
        interceptors=[_gate(grpc, credentials, Rate(most_calls_per_s))],
        options=(
            *options,
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", 16 << 10),
        ),
        maximum_concurrent_rpcs=_MOST_CALLS,
    )
    add(server)
    address = f"{host}:{port}"
    secured = ", and check that the key is that of the certificate" if credentials.certificate else ""
    hint = f"end the other server there, or give another --listen{secured}"
    taken = UnavailableError(f"{address} cannot be listened on", hint)
    try:
        if credentials.certificate:
            pair = [(credentials.key, credentials.certificate)]
            authority = credentials.client_authority or None
            secure = grpc.ssl_server_credentials(pair, authority, require_client_auth=authority is not None)
            bound = server.add_secure_port(address, secure)
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, ValueError) as error:
        raise taken from error
    if not bound:
        raise taken
    server.start()
    return Served(server, f"{host}:{bound}")


class Rate:
    """A token bucket: admits so many calls a second, and as many at once after a quiet second. Thread-safe.

    Args:
        per_s: calls a second; infinite for no limit.
        clock: returns seconds.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._at_s = per_s, clock()
        self._lock = threading.Lock()

    def admits(self) -> bool:
        """Count a call, and return whether it is admitted."""
        if math.isinf(self._per_s):
            return True
        with self._lock:
            now_s = self._clock()
            self._left = min(self._per_s, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True


def _allow_many_connections() -> None:
    """Raise the limit of open files, so that a thousand silent connections do not exhaust it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _gate(grpc: Any, credentials: ServerCredentials, rate: Rate) -> Any:
    """Return an interceptor that refuses calls without the token, or beyond the rate, before their content is read."""

    def refusal(code: Any, text: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(code, text))

    stranger = refusal(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
    too_many = refusal(grpc.StatusCode.UNAVAILABLE, "too many calls")

    class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            shown = dict(details.invocation_metadata).get("authorization", "")
            if not credentials.admits(str(shown)):
                return stranger
            return continuation(details) if rate.admits() else too_many

    return Gate()


def _handlers(grpc: Any, agent: Agent) -> Any:
    asked = {name: partial(_asked, agent, name) for name in agent.methods}
    asked |= {"Renew": partial(_answered, partial(_renew, agent)), "Has": partial(_answered, partial(_has, agent))}
    asked["Describe"] = partial(_answered, lambda _: agent.describe())
    methods = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in asked.items()}
    methods["Store"] = grpc.stream_unary_rpc_method_handler(partial(_store, agent))
    methods["Fetch"] = grpc.unary_stream_rpc_method_handler(partial(_fetch, agent))
    return grpc.method_handlers_generic_handler(wire.SERVICE, methods)


def _error(error: Exception) -> bytes:
    if isinstance(error, OptimizeError):
        failure = wire.error_to_json(error)
        failure["busy"], failure["lapsed"] = isinstance(error, BusyError), isinstance(error, LapsedError)
        return wire.packed(failure)
    text = " ".join(str(error).split())[:500]
    return wire.packed(wire.error_to_json(UnavailableError(f"the agent failed: {type(error).__name__}: {text}")))


def _answered(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], content: bytes, _: Any) -> bytes:
    try:
        return wire.packed(answer(wire.unpacked(content)))
    except Exception as error:  # noqa: BLE001 - a bad request must neither end the thread nor show a traceback
        return _error(error)


def _asked(agent: Agent, method: str, content: bytes, context: Any) -> bytes:
    """Serve a call in the agent's own thread; it is dropped if its client has gone before it begins."""

    def answer(data: Mapping[str, Any]) -> Mapping[str, Any]:
        future = agent.submit(method, data)
        context.add_callback(future.cancel)
        try:
            return future.result()
        except CancelledError as error:
            raise UnavailableError("the agent was ended" if agent.ended else "the client has gone") from error

    return _answered(answer, content, context)


def _renew(agent: Agent, data: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"held": agent.lease.renew(wire.text(data, "client", wire.DIGEST))}


def _has(agent: Agent, data: Mapping[str, Any]) -> Mapping[str, Any]:
    agent.must_hold(data)
    agent.store.check_size(wire.whole(data, "nbytes", 0, 1 << 53))
    return {"has": agent.store.has(wire.text(data, "model", wire.DIGEST))}


_storing = threading.Lock()


def _store(agent: Agent, messages: Iterator[bytes], context: Any) -> bytes:
    """Receive a model: a message that announces it, then its pieces; a file that is not a readable model is refused."""

    def pieces(data: Mapping[str, Any]) -> Iterator[bytes]:
        for piece in messages:
            agent.must_hold(data)
            yield piece

    def answer(data: Mapping[str, Any]) -> Mapping[str, Any]:
        agent.must_hold(data)
        digest, nbytes = wire.text(data, "model", wire.DIGEST), wire.whole(data, "nbytes", 1, 1 << 53)
        with _storing:
            path = agent.store.receive(digest, nbytes, pieces(data))
        try:
            read_model(path)
        except ModelError:
            path.unlink(missing_ok=True)
            raise
        return {}

    try:
        first = next(messages)
    except StopIteration:
        return _error(wire.WireError("the request holds no message"))
    return _answered(answer, first, context)


def _fetch(agent: Agent, content: bytes, _: Any) -> Iterator[bytes]:
    """Send a stage file, each piece after an F; an error is one message, after an E."""
    try:
        data = wire.unpacked(content)
        path = agent.deployed_file(wire.text(data, "client", wire.DIGEST), str(data.get("name")))
    except Exception as error:  # noqa: BLE001 - see _answered
        yield b"E" + _error(error)
        return
    for piece in wire.pieces_of(path):
        yield b"F" + piece
