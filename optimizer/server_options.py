"""Options of the commands that serve others: where they listen, and who is let in."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evaluators.remote.credentials import ServerCredentials

_LOOPBACK = "127.0.0.1"


def add_server_options(add: Callable[..., object], port: int) -> None:
    """Add the options of a server whose usual port is ``port``."""
    where = f"where (default {_LOOPBACK}:{port}, this machine alone)"
    add("--listen", metavar="HOST:PORT", default=_LOOPBACK, help=where)
    add("--tls-cert", metavar="FILE", type=Path, help="certificate of this server, PEM; needed beyond this machine")
    add("--tls-key", metavar="FILE", type=Path, help="its key, PEM")
    add("--tls-client-ca", metavar="FILE", type=Path, help="take only clients with a certificate that this one signed")
    add("--token-file", metavar="FILE", type=Path, help="take only clients that show this token")


def server_options(options: argparse.Namespace, port: int) -> tuple[str, int, ServerCredentials]:
    """Return host, port and credentials.

    Raises:
        UsageError: a file is wrong, or the credentials are not enough for the address.
    """
    from evaluators.remote.credentials import ServerCredentials, read_pem, read_token, split_address

    host, port = split_address(options.listen, port)
    credentials = ServerCredentials(
        read_pem(options.tls_cert, "a certificate"),
        read_pem(options.tls_key, "a key"),
        read_pem(options.tls_client_ca, "certificates"),
        read_token(options.token_file),
    )
    credentials.check(host)
    return host, port, credentials
