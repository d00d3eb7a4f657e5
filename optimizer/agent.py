"""``optimize agent``: the device's end of ``--evaluator remote``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from optimizer.server_options import add_server_options, server_options
from search_spaces.errors import UsageError

_PORT = 7450


def agent(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do ``optimize agent``."""
    add = parser.add_argument
    add("--name", metavar="NAME", help="of the device (default: of the machine)")
    add("--evaluator", metavar="NAME", default="litert", help="who measures here (default litert)")
    add_server_options(add, _PORT)
    add("--folder", metavar="DIR", type=Path, help="where models are kept (default: in the user's cache)")
    add("--max-model", metavar="MB", type=float, default=8192.0, help="the largest model that is taken (default 8192)")
    add("--certificates", metavar="DIR", type=Path, help="make an authority and certificates in DIR for --hosts, end")
    add("--hosts", metavar="A,B", default="", help="names and addresses that this agent is reached by")
    add("--debug", action="store_true", help="a traceback with every error")
    options = parser.parse_args(arguments)
    if options.certificates is not None:
        from optimizer.certificates import make_certificates

        hosts = [host for host in options.hosts.split(",") if host]
        for path in make_certificates(options.certificates, hosts):
            print(path)
        return 0
    if not options.max_model > 0.0:
        raise UsageError(f"--max-model {options.max_model:g}: must be greater than 0")
    _serve(options)
    return 0


def _serve(options: argparse.Namespace) -> None:
    """Serve until an interrupt."""
    import platform as host

    from evaluators.registry import make_evaluator
    from evaluators.remote.agent import Agent
    from evaluators.remote.server import serve
    from search_spaces.models.cache import cache_dir

    where, port, credentials = server_options(options, _PORT)
    if options.evaluator == "remote":
        raise UsageError("--evaluator remote: an agent measures on its own machine")
    name = options.name or host.node() or "device"
    folder = options.folder or cache_dir() / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    evaluator = make_evaluator(options.evaluator)
    lanes = ", ".join(p.name for p in evaluator.platform().processors)
    agent = Agent(name, evaluator, folder, max_file_nbytes=int(options.max_model * (1 << 20)))
    served = serve(agent, where, port, credentials)
    try:
        print(f"optimize: device {name} ({lanes}) at {served.address}, until Ctrl-C", file=sys.stderr, flush=True)
        agent.serve()
    finally:
        served.close()
