"""What tests of LiteRT share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.deployment import write_deployment
from evaluators.litert.processors import local_platform
from evaluators.litert.session import LitertSession
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from tests.support.narrowing import there
from tests.support.sentences import fails


def single_cores(platform: Platform) -> list[str]:
    """Return the processors that have one core each."""
    return [p.name for p in platform.processors if len(p.options["cores"]) == 1]


def litert_processors() -> Platform:
    """Return what this machine offers to LiteRT, whichever other runtimes are installed."""
    found = local_platform()
    return found.restrict([p.name for p in found.processors if "runtime" not in p.options])


def three_processors() -> Platform:
    """All cores together and the first two of them alone, however many this machine has."""
    found = litert_processors()
    alone = single_cores(found)
    together = [p.name for p in found.processors if p.name not in alone]
    return found.restrict([*together, *alone[:2]])


def loaded(session: LitertSession, graph: Graph, plan: Plan, *, fresh: bool = False) -> LitertCandidate:
    """Load a plan without split stages, whose candidate can be looked into."""
    candidate = session.load(graph, plan, fresh=fresh)
    assert isinstance(candidate, LitertCandidate)
    return candidate


def agrees(session: LitertSession, graph: Graph, plan: Plan, runs: int = 3, *, exactly: bool = True) -> None:
    """Run a plan, and check that it computes what the whole model computes: bit for bit, or as nearly as it should."""
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(runs)
        agreement = there(candidate.verify())
        assert agreement.identical if exactly else agreement.accepted


def pid_of(session: LitertSession, processor: str) -> int:
    """Return the process of a processor."""
    return session._workers._running[processor].pid


@contextmanager
def signalled(pid: int, number: int, after_s: float = 0.05) -> Iterator[None]:
    """Send a process a signal while something else goes on."""
    timer = threading.Timer(after_s, os.kill, (pid, number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def survives(
    session: LitertSession, graph: Graph, plan: Plan, processor: str, number: int, *, exactly: bool = True
) -> None:
    """Send a signal to a processor while a plan runs: that run fails, and the plan runs when it is loaded again."""
    with closing(session.load(graph, plan)) as candidate:
        candidate.run(1)
        with signalled(pid_of(session, processor), number, 0.1), fails(UnavailableError):
            candidate.run(3000)
    agrees(session, graph, plan, exactly=exactly)


def three_stages(folder: Path, graph: Graph, platform: Platform) -> Path:
    """Write the files of a plan of three stages on two processors."""
    alone = single_cores(platform)
    plan = chain_plan(graph, [11, 25], [alone[0], alone[-1], alone[0]])
    write_deployment(folder, graph, plan, platform, there(graph.source).content_digest())
    return folder
