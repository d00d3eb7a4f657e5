"""A thousand half-open connections to an agent."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

from evaluators.remote.credentials import (
    ClientCredentials,
    ServerCredentials,
    split_address,
)
from evaluators.testing import SyntheticEvaluator
from optimizer.tools.certificates import make_certificates
from tests.evaluators.remote.test_security import TOKEN, connection, pem
from tests.support.remote_agents import agent_here


def test_a_thousand_half_open_connections(tmp_path: Path) -> None:
    """They neither keep others out nor are they kept for ever."""
    ours = tmp_path / "ours"
    make_certificates(ours, ["127.0.0.1"])
    shown = ServerCredentials(pem(ours, "agent.pem"), pem(ours, "agent.key"), token=TOKEN)
    mine = ClientCredentials(pem(ours, "ca.pem"), token=TOKEN)
    with agent_here(SyntheticEvaluator(), tmp_path, credentials=shown) as (_, served), ExitStack() as stack:
        host, port = split_address(served.address, 0)
        sockets = [stack.enter_context(socket.create_connection((host, port), timeout=10.0)) for _ in range(1000)]
        for index, each in enumerate(sockets):
            if index % 2:
                each.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake that does not go on
        begin_s = time.monotonic()
        assert connection(served.address, mine).call("Describe", {}, 10.0)["device"] == "here"
        assert time.monotonic() - begin_s < 5.0
        sockets[-1].settimeout(30.0)
        assert not sockets[-1].recv(4096) or not sockets[-1].recv(4096)  # perhaps a last alert, then the end
