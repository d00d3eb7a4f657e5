"""The agent on the network: a gRPC server with few methods, limits on everything, and no code from the wire."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

from evaluators.remote import wire
from evaluators.remote.agent import Agent, LapsedError, pieces_of
from evaluators.remote.credentials import ServerCredentials, grpc_module
from evaluators.remote.lease import BusyError
from search_spaces.errors import ModelError, OptimizeError, UnavailableError
from search_spaces.models.litert import read_model

_THREADS = 8
_MOST_CALLS = 64
_HANDSHAKE_MS = 10_000
_FILES = 65_536
_END_S = 1.0


class Served:
    """A running server; ends with :meth:`close`.

    Attributes:
        address: host and port that it listens on.
    """

    def __init__(self, server: Any, address: str) -> None:
        self._server = server
        self.address = address

    def close(self) -> None:
        """Refuse new calls, and break the others off after a second."""
        self._server.stop(_END_S).wait()


def serve(agent: Agent, host: str, port: int, credentials: ServerCredentials) -> Served:
    """Listen; calls are served as soon as somebody runs :meth:`~evaluators.remote.agent.Agent.serve`.

    Args:
        port: 0 for any that is free.

    Raises:
        UsageError: the credentials are not enough for this address.
        UnavailableError: gRPC is not installed, or the port is taken.
    """
    credentials.check(host)
    grpc = grpc_module()
    _allow_many_connections()
    options = (
        *wire.OPTIONS,
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", 16 << 10),
    )
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="agent"),
        handlers=[_handlers(grpc, agent)],
        interceptors=[_gate(grpc, credentials)],
        options=options,
        maximum_concurrent_rpcs=_MOST_CALLS,
    )
    address = f"{host}:{port}"
    try:
        if credentials.certificate:
            pair = [(credentials.key, credentials.certificate)]
            authority = credentials.client_authority or None
            secure = grpc.ssl_server_credentials(pair, authority, require_client_auth=authority is not None)
            bound = server.add_secure_port(address, secure)
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"{address} cannot be listened on", "is another agent there, is the key right?"
        ) from error
    if not bound:
        raise UnavailableError(f"{address} cannot be listened on", "is another agent there, is the key right?")
    server.start()
    return Served(server, f"{host}:{bound}")


def _allow_many_connections() -> None:
    """A thousand who connect and say nothing must not use up the files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _gate(grpc: Any, credentials: ServerCredentials) -> Any:
    """Return what turns calls without the token away, before anything of them is read."""

    def refuse(_: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")

    refusal = grpc.unary_unary_rpc_method_handler(refuse)

    class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            shown = dict(details.invocation_metadata).get("authorization", "")
            return continuation(details) if credentials.admits(str(shown)) else refusal

    return Gate()


def _handlers(grpc: Any, agent: Agent) -> Any:
    methods = {name: grpc.unary_unary_rpc_method_handler(partial(_asked, agent, name)) for name in agent.methods}
    methods["Renew"] = grpc.unary_unary_rpc_method_handler(partial(_answered, partial(_renew, agent)))
    methods["Has"] = grpc.unary_unary_rpc_method_handler(partial(_answered, partial(_has, agent)))
    methods["Store"] = grpc.stream_unary_rpc_method_handler(partial(_store, agent))
    methods["Fetch"] = grpc.unary_stream_rpc_method_handler(partial(_fetch, agent))
    return grpc.method_handlers_generic_handler(wire.SERVICE, methods)


def _error(error: Exception) -> bytes:
    if isinstance(error, OptimizeError):
        told = wire.error_to_json(error)
        told["busy"], told["lapsed"] = isinstance(error, BusyError), isinstance(error, LapsedError)
        return wire.packed(told)
    text = " ".join(str(error).split())[:500]
    return wire.packed(wire.error_to_json(UnavailableError(f"the agent failed: {type(error).__name__}: {text}")))


def _answered(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], content: bytes, _: Any) -> bytes:
    try:
        return wire.packed(answer(wire.unpacked(content)))
    except Exception as error:  # noqa: BLE001 - a bad request must not end the thread, nor show a trace
        return _error(error)


def _asked(agent: Agent, method: str, content: bytes, context: Any) -> bytes:
    """Serve a call in the agent's own thread; one whose client has gone before it began is never served."""

    def answer(data: Mapping[str, Any]) -> Mapping[str, Any]:
        future = agent.submit(method, data)
        context.add_callback(future.cancel)
        try:
            return future.result()
        except CancelledError as error:
            raise UnavailableError("the client has gone") from error

    return _answered(answer, content, context)


def _renew(agent: Agent, data: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"held": agent.lease.renew(wire.text(data, "client", wire.DIGEST))}


def _has(agent: Agent, data: Mapping[str, Any]) -> Mapping[str, Any]:
    _must_hold(agent, data)
    agent.store.check_size(wire.whole(data, "nbytes", 0, 1 << 53))
    return {"has": agent.store.has(wire.text(data, "model", wire.DIGEST))}


def _must_hold(agent: Agent, data: Mapping[str, Any]) -> str:
    client = wire.text(data, "client", wire.DIGEST)
    if not agent.lease.renew(client):
        raise LapsedError("the device has given this study up, or was started anew")
    return client


_storing = threading.Lock()


def _store(agent: Agent, messages: Iterator[bytes], context: Any) -> bytes:
    """Take a model in: a message that announces it, then its pieces. It must be one that we can read."""

    def pieces(client: str) -> Iterator[bytes]:
        for piece in messages:
            if not agent.lease.renew(client):
                raise LapsedError("the device has given this study up")
            yield piece

    def answer(data: Mapping[str, Any]) -> Mapping[str, Any]:
        client = _must_hold(agent, data)
        digest, nbytes = wire.text(data, "model", wire.DIGEST), wire.whole(data, "nbytes", 1, 1 << 53)
        with _storing:
            path = agent.store.receive(digest, nbytes, pieces(client))
        try:
            read_model(path)
        except ModelError:
            path.unlink(missing_ok=True)
            raise
        return {}

    try:
        first = next(messages)
    except StopIteration:
        return _error(wire.WireError("nothing came"))
    return _answered(answer, first, context)


def _fetch(agent: Agent, content: bytes, _: Any) -> Iterator[bytes]:
    """Give a stage file out, each piece behind an F; an error is one message, behind an E."""
    try:
        data = wire.unpacked(content)
        path = agent.deployed_file(wire.text(data, "client", wire.DIGEST), str(data.get("name")))
        pieces = pieces_of(path)
    except Exception as error:  # noqa: BLE001 - see _answered
        yield b"E" + _error(error)
        return
    for piece in pieces:
        yield b"F" + piece
