"""Storages that several workers share, by URL: SQLite, PostgreSQL, or a server in front of one of them.

::

    sqlite:///study.db                        one machine; writers wait for each other
    postgresql://user@host:5432/database      extra "postgres"; the password comes from ~/.pgpass or PGPASSWORD
    grpc://127.0.0.1:13000, grpc://NAME       extra "grpc"; the server is `optimize storage`, elsewhere one of the
                                              ``storages`` of :mod:`evaluators.remote.devices`

A storage holds Optuna's own tables, so that its dashboard shows the study while it runs.
"""

from __future__ import annotations

import logging
import random
import re
import sqlite3
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from search_spaces.core.errors import UnavailableError, UsageError, needs_extra

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

HEARTBEAT_S = 10
SILENT_BEATS = 4
PATIENCE_S = 300.0
READY_S = 30.0
_SIZES = (("grpc.max_receive_message_length", 1 << 30), ("grpc.enable_http_proxy", 0))  # all trials are one answer
_FIRST_PAUSE_S, _TOLD_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8, 2.0
_SCHEMES = ("sqlite", "postgresql", "grpc")
# PostgreSQL's words.
_REFUSALS = re.compile('authentication failed|(database|role) ".*" does not exist|pg_hba.conf|no password supplied')
_LOGGER = logging.getLogger("partition_optimizer")

Found = TypeVar("Found")


def check_url(url: str) -> str:
    """Return a storage URL, checked so that it may be written to files.

    Raises:
        UsageError: it is not a URL of a known kind of storage, or has a password in it.
    """
    parts = urlsplit(url)
    secret = re.search(r"://[^/@]*:[^@]*@|^\w+:[^/]*:.*@|[?&]password=", url)
    if secret or parts.password is not None or "password" in dict(parse_qsl(parts.query)):
        raise UsageError(
            "--storage: a password in the URL would be written to the run's files", "use PGPASSWORD or ~/.pgpass"
        )
    if parts.scheme not in _SCHEMES or (parts.scheme != "sqlite" and not parts.hostname):
        raise UsageError(
            f"--storage {url}: is not a storage URL", f"use {', '.join(f'{scheme}://…' for scheme in _SCHEMES)}"
        )
    if parts.scheme == "sqlite" and (not url.startswith("sqlite:///") or len(url) <= len("sqlite:///")):
        raise UsageError(f"--storage {url}: needs a file", "use for example sqlite:///study.db")
    return url


def sqlite_file(url: str) -> Path | None:
    """Return the file of a storage in SQLite; None for servers.

    Raises:
        UsageError: the URL is wrong.
    """
    return Path(urlsplit(check_url(url)).path[1:]) if url.startswith("sqlite:") else None


def open_storage(url: str, heartbeat_s: int = HEARTBEAT_S, patience_s: float | None = None) -> BaseStorage:
    """Open a storage, and make its tables if they are missing.

    Args:
        heartbeat_s: seconds between heartbeats of a worker.
        patience_s: seconds to wait for a server that does not answer; by default 30, for a file that is locked 300.

    Raises:
        UsageError: the URL is wrong.
        UnavailableError: it cannot be reached, or an extra is not installed.
    """
    from optimizer.samplers import quiet_optuna

    quiet_optuna()
    check_url(url)
    if url.startswith("grpc://"):
        return _proxy(url)
    usual_s = PATIENCE_S if url.startswith("sqlite:") else READY_S
    return patiently(lambda: _tables(url, heartbeat_s), f"storage {url}", usual_s if patience_s is None else patience_s)


def _tables(url: str, heartbeat_s: int) -> BaseStorage:
    from optuna.storages import RDBStorage, get_storage

    engine: dict[str, Any] = {"connect_args": {"timeout": 60}}
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
        # A connection from before a restart of the server must not fail the first query after it.
        engine = {"pool_pre_ping": True, "pool_size": 4, "connect_args": {"connect_timeout": 5}}
    beats: dict[str, Any] = {"heartbeat_interval": heartbeat_s, "grace_period": SILENT_BEATS * heartbeat_s}
    with warnings.catch_warnings(action="ignore"), needs_extra("PostgreSQL", "postgres"):  # heartbeats are experimental
        return get_storage(RDBStorage(url, engine_kwargs=engine, **beats))


def _proxy(url: str) -> BaseStorage:
    from evaluators.remote.credentials import channel_to, grpc_module, metadata_of
    from evaluators.remote.devices import find_storage

    place = find_storage(urlsplit(url).netloc)
    grpc: Any = grpc_module("storages by grpc://", "grpc")
    with needs_extra("grpc://", "grpc"):
        import google.protobuf  # noqa: F401
        from optuna.storages._grpc.auto_generated import api_pb2_grpc
        from optuna.storages._grpc.client import GrpcClientCache, GrpcStorageProxy
    metadata = metadata_of(place.credentials)
    stub: Any = api_pb2_grpc.StorageServiceStub

    class Shown(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        def intercept_unary_unary(self, call: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
            return call(details._replace(metadata=metadata), request)

    class Proxy(GrpcStorageProxy):
        """Optuna's proxy, over a channel with credentials."""

        def _setup(self) -> None:
            self.plain = channel_to(grpc, place.address, place.credentials, _SIZES)
            self._channel = grpc.intercept_channel(self.plain, Shown()) if metadata else self.plain
            self._stub = stub(self._channel)
            self._cache = GrpcClientCache(self._stub)

    with warnings.catch_warnings(action="ignore"):
        proxy = Proxy()
    try:
        grpc.channel_ready_future(proxy.plain).result(timeout=READY_S)
    except grpc.FutureTimeoutError as error:
        proxy.close()
        hint = "start `optimize storage` there, or check its certificate"
        raise UnavailableError(f"storage {url} does not answer", hint) from error
    return proxy


def patiently(call: Callable[[], Found], what: str, patience_s: float = PATIENCE_S) -> Found:
    """Return the result of a call, which is repeated while the storage's server does not answer.

    The call must be idempotent: the first one may have been carried out, and only its answer lost.

    Raises:
        UnavailableError: the server did not come back in time.
    """
    end_s, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if _code(error) in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
                raise UnavailableError(f"{what} refused access", "check the token and the certificate") from error
            if not _passes(error):
                if _code(error):
                    raise UnavailableError(
                        f"{what} rejected a request: {_reason(error)}", "check how it was started"
                    ) from error
                strange = isinstance(error, (ValueError, TypeError, RecursionError)) or type(error) is LookupError
                if strange:  # rows that another program wrote
                    found = type(error).__name__
                    raise UsageError(f"{what}: its content cannot be read ({found})", "give another study") from error
                raise
            if why := _no_file(error):
                raise unusable(what, why) from error
            if _REFUSALS.search(_reason(error)):
                hint = "check its user, database and password (PGPASSWORD or ~/.pgpass)"
                raise UnavailableError(f"{what} refused access: {_reason(error)}", hint) from error
            if pause_s == _TOLD_PAUSE_S:
                _LOGGER.warning("%s: %s; trying again for up to %.0f s", what, _reason(error), patience_s)
            if time.monotonic() > end_s:
                hint = "check that its server runs"
                raise UnavailableError(f"{what} does not answer: {_reason(error)}", hint) from error
        time.sleep(pause_s * (0.5 + random.random()))  # noqa: S311 - so that workers do not retry all at once
        pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)


def unusable(what: str, why: str) -> UnavailableError:
    """Return the error that a file of SQLite cannot be used."""
    return UnavailableError(
        f"{what} cannot be used: {why}", "give a database of SQLite, or a new file, where you can write"
    )


def _reason(error: Exception) -> str:
    details = getattr(error, "details", None)  # of grpc.RpcError
    return " ".join(str(details() if callable(details) else error.__cause__ or error).split())[:200]


def _passes(error: Exception) -> bool:
    """Return whether an error is one of the connection, which may pass, and not of the request."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import DBAPIError

    if isinstance(error, StorageInternalError | DBAPIError | ConnectionError):
        return True
    if _code(error) == "RESOURCE_EXHAUSTED":  # of too many calls at once, or of one that is too large
        return "larger than max" not in _reason(error)
    return _code(error) in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL"}


def _code(error: Exception) -> str:
    """Return the name of the status that a call by gRPC ended with, or "": gRPC need not be installed."""
    code = getattr(error, "code", None)
    return str(getattr(code(), "name", "")) if callable(code) else ""


def _no_file(error: Exception) -> str:
    """Return why SQLite cannot use its file, which no waiting mends; "" for other errors."""
    cause = error.__cause__ or error
    found = getattr(cause, "orig", None) or cause
    wrong = ("unable to open database file", "file is not a database", "attempt to write a readonly database")
    return str(found) if isinstance(found, sqlite3.DatabaseError) and str(found) in wrong else ""


def close_storage(storage: BaseStorage) -> None:
    """Close the connections of a storage."""
    storage.remove_session()
    engine = getattr(getattr(storage, "_backend", None), "engine", None)
    if engine is not None:
        engine.dispose()
    close = getattr(storage, "close", None)  # of the proxy
    if close is not None:
        close()
