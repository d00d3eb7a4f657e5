"""Agents for tests: in threads of this process, or processes of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evaluators.base import Evaluator
from evaluators.remote.agent import Agent
from evaluators.remote.credentials import ServerCredentials
from evaluators.remote.server import Served, serve
from tests.support.narrowing import there

ROOT = Path(__file__).parents[2]


@contextmanager
def agent_here(
    evaluator: Evaluator,
    folder: Path,
    *,
    credentials: ServerCredentials | None = None,
    port: int = 0,
    **limits: Any,
) -> Iterator[tuple[Agent, Served]]:
    """An agent whose evaluator runs in a thread; no call of it is broken off, since only the main thread can."""
    agent = Agent("here", evaluator, folder, **limits)
    served = serve(agent, "127.0.0.1", port, credentials or ServerCredentials())
    thread = threading.Thread(target=agent.serve)
    thread.start()
    try:
        yield agent, served
    finally:
        served.close()
        agent.end()
        thread.join()


@contextmanager
def agent_process(folder: Path, evaluator: str = "synthetic", options: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    """An agent as a person starts it; gives the process and its address."""
    command = [sys.executable, "-m", "optimizer.cli", "agent", "--evaluator", evaluator, "--folder", str(folder)]
    if "--listen" not in options:
        options = (*options, "--listen", "127.0.0.1:0")
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = there(process.stderr).readline()
        found = re.search(r" at (\S+), until", line)
        assert found, line
        yield process, found[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)
