"""Certificates and tokens of servers (agents, shared storages) and of their clients.

A server on the loopback address needs neither. On any other address it has a certificate, so that messages cannot be
read or changed, and its clients authenticate by a certificate of an authority that it trusts, or by a token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UnavailableError, UsageError, reason_of, shown

MIN_TOKEN_CHARACTERS = 16
_MAX_NBYTES = 1 << 20


def grpc_module(what: str = "remote devices", extra: str = "remote") -> Any:
    """Return the module ``grpc``, which is an optional dependency.

    Args:
        what: names in the error what needs it.
        extra: the extra that installs it.

    Raises:
        UnavailableError: it is not installed.
    """
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are reported by the callers, once and in one line
    try:
        import grpc
    except ImportError as error:
        hint = f"pip install 'partition-optimizer[{extra}]'"
        raise UnavailableError(f"{what} need the extra {extra!r}", hint) from error
    return grpc


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """A server's certificate, and what it requires of clients; all empty only on the loopback address.

    Attributes:
        certificate, key: its own, PEM.
        client_authority: certificates of the authority that must have signed clients', PEM; empty where a token serves.
        token: that clients must send; empty where their certificate serves.
    """

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    client_authority: bytes = b""
    token: str = field(default="", repr=False)

    def check(self, host: str) -> None:
        """Check that the credentials suffice for the address that the server listens on.

        Raises:
            UsageError: they do not.
        """
        if bool(self.certificate) != bool(self.key):
            raise UsageError("a certificate and its key go together", "give --tls-cert and --tls-key")
        if self.client_authority and not self.certificate:
            raise UsageError("clients' certificates are only seen over TLS", "give --tls-cert and --tls-key")
        if is_loopback(host):
            return
        if not self.certificate:
            raise UsageError(
                f"--listen {host}: a server that others reach must have a certificate",
                "give --tls-cert and --tls-key, or listen on 127.0.0.1 and reach it through ssh -L",
            )
        if not self.client_authority and not self.token:
            raise UsageError(
                f"--listen {host}: a server that others reach must authenticate its clients",
                "give --tls-client-ca, --token-file, or both",
            )

    def admits(self, shown: str) -> bool:
        """Return whether the token in a client's header is right."""
        return not self.token or hmac.compare_digest(shown.encode(), f"Bearer {self.token}".encode())


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """A client's certificate or token, and what it requires of the server.

    Attributes:
        authority: certificates of the authority that must have signed the server's, PEM; empty: no TLS, only on the
            loopback address.
        certificate, key: its own, PEM; empty where a token serves.
        token: for the server; empty where the certificate serves.
        server_name: the name in the server's certificate, where it differs from the address.
    """

    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    server_name: str = ""


def channel_to(grpc: Any, address: str, shown: ClientCredentials, options: Sequence[tuple[str, int | str]]) -> Any:
    """Return a channel to a server; the first call connects.

    Args:
        grpc: the module.
    """
    more: list[tuple[str, int | str]] = list(options)
    if shown.server_name:
        more.append(("grpc.ssl_target_name_override", shown.server_name))
    if not shown.authority:
        return grpc.insecure_channel(address, more)
    secure = grpc.ssl_channel_credentials(shown.authority, shown.key or None, shown.certificate or None)
    return grpc.secure_channel(address, secure, more)


def metadata_of(shown: ClientCredentials) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a client's calls."""
    return (("authorization", f"Bearer {shown.token}"),) if shown.token else ()


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port`` or ``[::1]:port``.

    Raises:
        UsageError: the text is not an address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(default_port)
    alone = not colon and host.isdecimal()  # a port
    if (
        not host
        or alone
        or not (port.isascii() and port.isdecimal() and len(port) <= 5)
        or not 0 <= int(port) <= 65535
        or not host.isprintable()
        or "/" in host
    ):
        raise UsageError(f"address {shown(address)}: must be HOST:PORT", "use for example 127.0.0.1:7450")
    return host, int(port)


def read_pem(path: Path | None, what: str) -> bytes:
    """Return the content of a PEM file of certificates or a key; empty without a path.

    Raises:
        UsageError: the file cannot be read or is not PEM.
    """
    if path is None:
        return b""
    try:
        content = read_bounded(path, _MAX_NBYTES)
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}", f"give the PEM file of {what}") from error
    if b"-----BEGIN " not in content:
        raise UsageError(f"{path}: is not a file of {what}", "give a PEM file")
    return content


def read_token(path: Path | None) -> str:
    """Return the token in a file; empty without a path.

    Raises:
        UsageError: the file cannot be read, other users may read it, or the token is too short.
    """
    if path is None:
        return ""
    try:
        content = read_bounded(path, 4096)
        if path.stat().st_mode & 0o077:
            raise UsageError(f"{path}: others may read the token", f"chmod 600 {path}")
        token = content.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UsageError(f"{path}: {reason.lower()}", "give a file that holds the token") from error
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        hint = f"openssl rand -hex 32 > {path}"
        raise UsageError(f"{path}: a token has at least {MIN_TOKEN_CHARACTERS} characters without spaces", hint)
    return token
