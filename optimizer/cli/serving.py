"""Commands that serve clients until Ctrl-C, and their options of addresses and credentials."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.cli.parsing import Parser
from search_spaces.core.errors import UsageError

if TYPE_CHECKING:
    from evaluators.remote.credentials import ServerCredentials

_LOOPBACK = "127.0.0.1"
_AGENT_PORT, _STORAGE_PORT = 7450, 13000


def add_server_options(add: Callable[..., object], port: int) -> None:
    """Add the options of a server whose usual port is ``port``."""
    where = f"address to listen on (default {_LOOPBACK}:{port}, this machine only)"
    add("--listen", metavar="HOST:PORT", default=_LOOPBACK, help=where)
    add("--tls-cert", metavar="FILE", type=Path, help="certificate of this server, PEM; required for other machines")
    add("--tls-key", metavar="FILE", type=Path, help="its key, PEM")
    add("--tls-client-ca", metavar="FILE", type=Path, help="accept only clients with a certificate signed by this one")
    add("--token-file", metavar="FILE", type=Path, help="accept only clients that send this token")


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


def storage(parser: Parser, arguments: list[str]) -> None:
    """Serve a shared study database to many workers, until Ctrl-C."""
    add = parser.add_argument
    add("url", metavar="URL", help="sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    add("--heartbeat", metavar="S", default="10", help="seconds between heartbeats of a worker (default 10)")
    add_server_options(add, _STORAGE_PORT)
    options = parser.read(arguments, as_json=False)
    heartbeat_s = parser.whole("--heartbeat", options.heartbeat, 1, 3600)
    if options.url.startswith("grpc://"):
        parser.error(f"{options.url}: is already a server; give the URL of its database")
    from optimizer.tools.storage_server import serve_storage

    host, port, credentials = server_options(options, _STORAGE_PORT)
    with suppress(KeyboardInterrupt):
        serve_storage(options.url, heartbeat_s, host, port, credentials)


def agent(parser: Parser, arguments: list[str]) -> None:
    """Serve measurements of this machine until Ctrl-C."""
    add = parser.add_argument
    add("--name", metavar="NAME", help="of the device (default: of the machine)")
    add("--evaluator", metavar="NAME", default="litert", help="evaluator that measures (default litert)")
    add_server_options(add, _AGENT_PORT)
    add("--folder", metavar="DIR", type=Path, help="folder for models (default: in the user's cache)")
    add("--max-model", metavar="MB", type=float, default=8192.0, help="largest model accepted, MB (default 8192)")
    certificates = "write a certificate authority and certificates for --hosts to DIR, and exit"
    add("--certificates", metavar="DIR", type=Path, help=certificates)
    add("--hosts", metavar="A,B", default="", help="names and addresses of agents, for --certificates")
    options = parser.read(arguments, as_json=False)
    if options.certificates is not None:
        from optimizer.tools.certificates import make_certificates

        hosts = [host for host in options.hosts.split(",") if host]
        for path in make_certificates(options.certificates, hosts):
            print(path)
        return
    if options.hosts:
        parser.error("--hosts has no effect without --certificates")
    if not options.max_model > 0.0:
        raise UsageError(f"--max-model {options.max_model:g}: must be greater than 0")
    _serve(options)


def _serve(options: argparse.Namespace) -> None:
    """Serve until an interrupt."""
    import platform as host

    from evaluators.registry import make_evaluator
    from evaluators.remote.agent import Agent
    from evaluators.remote.server import serve
    from search_spaces.models.cache import cache_dir

    where, port, credentials = server_options(options, _AGENT_PORT)
    if options.evaluator == "remote":
        raise UsageError("--evaluator remote is not supported: an agent measures on its own machine")
    name = options.name or host.node() or "device"
    folder = options.folder or cache_dir() / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    evaluator = make_evaluator(options.evaluator)
    processors = ", ".join(p.name for p in evaluator.platform().processors)
    agent = Agent(name, evaluator, folder, max_file_nbytes=int(options.max_model * (1 << 20)))
    served = serve(agent, where, port, credentials)
    try:
        print(f"optimize: device {name} ({processors}) at {served.address}, until Ctrl-C", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            agent.serve()
    finally:
        served.close()
