"""An evaluator with a known best plan: LiteRT on two equal processors, each slow in one half of the network.

``left`` and ``right`` are all cores of this machine, twice. The convolutions of the second half of a network are slower
on ``left``, those of the first half on ``right``: after each run the evaluator waits, busy, for a known share of the
run's own time, and the wait counts. So a network that is cut in the middle runs at full speed, and a network in one
stage takes longer by the share in ``VERDICTS_SLOWER``.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Agreement, Batch, Candidate, Evaluator, Session
from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.disturbance import Counters
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan

NAME = "verdicts-slowed"
SLOWER = "VERDICTS_SLOWER"
LEFT, RIGHT = "left", "right"


class SlowedEvaluator(Evaluator):
    """See :class:`~evaluators.base.Evaluator`."""

    name = NAME

    def platform(self) -> Platform:
        found = LitertEvaluator().platform()
        both = found.processors[0]
        return Platform(found.name, tuple(replace(both, name=name, like=name) for name in (LEFT, RIGHT)))

    @contextmanager
    def prepare(self, platform: Platform, scratch: Path | None = None) -> Iterator[SlowedSession]:
        with LitertEvaluator().prepare(platform, scratch) as session:
            yield SlowedSession(session, float(os.environ.get(SLOWER, "0")))


class SlowedSession(Session):
    """A session whose plans take longer by what their stages have of slow operators."""

    def __init__(self, inner: Session, slower: float) -> None:
        self.inner, self.slower = inner, slower
        self.capabilities = replace(inner.capabilities, pause=False, stream=False, placements=False)

    def fingerprint(self) -> dict[str, Any]:
        return {**self.inner.fingerprint(), "slower": self.slower}

    def conditions(self) -> dict[str, Any]:
        return self.inner.conditions()

    def counters(self) -> Counters:
        return self.inner.counters()

    def unsupported_operators(self, graph: Graph, processor: str) -> Sequence[int]:
        return self.inner.unsupported_operators(graph, processor)

    def deploy(self, folder: Path, graph: Graph, plan: Plan) -> Agreement:
        return self.inner.deploy(folder, graph, plan)

    def load(self, graph: Graph, plan: Plan, *, fresh: bool = False) -> SlowedCandidate:
        shares = slow_shares(graph, plan, self.slower)
        return SlowedCandidate(self.inner.load(graph, plan, fresh=fresh), shares)


@dataclass
class SlowedCandidate(Candidate):
    """A candidate whose every run is followed by a busy wait, which counts, of a known share of it for each stage."""

    inner: Candidate
    shares: tuple[float, ...]

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        total = math.fsum(self.shares)
        latency_s: list[float] = []
        stage_s = []
        while len(latency_s) < n and not (latency_s and latency_s[-1] > stop_above_s):
            batch = self.inner.run(1, stop_above_s)
            own_s, waited_s = float(batch.latency_s[0]), 0.0
            if total:
                begin_s = time.perf_counter()
                while waited_s < total * own_s:
                    waited_s = time.perf_counter() - begin_s
            latency_s.append(own_s + waited_s)
            stage_s.append(batch.stage_s[0] + waited_s * np.array(self.shares) / (total or 1.0))
        return Batch(np.array(latency_s), np.array(stage_s))

    def verify(self) -> Agreement | None:
        return self.inner.verify()

    def close(self) -> None:
        self.inner.close()


def slow_shares(graph: Graph, plan: Plan, slower: float) -> tuple[float, ...]:
    """Return for each stage by what share of the whole latency its slow operators lengthen it."""
    first, second = halves(graph)
    slow = {LEFT: second, RIGHT: first}
    each = slower / len(first)
    return tuple(each * len(slow[stage.processor].intersection(stage.operators)) for stage in plan.stages)


def halves(graph: Graph) -> tuple[frozenset[int], frozenset[int]]:
    """Return the convolutions of either half of a network."""
    found = [i for i, operator in enumerate(graph.operators) if operator.kind == "CONV_2D"]
    middle = len(found) // 2
    return frozenset(found[:middle]), frozenset(found[middle : 2 * middle])


def best_plan(graph: Graph) -> Plan:
    """Return the plan without a slow operator: it is cut in the middle."""
    return chain_plan(graph, (max(halves(graph)[0]) + 1,), (LEFT, RIGHT))


@contextmanager
def installed(slower: float) -> Iterator[dict[str, str]]:
    """Yield the environment in which ``optimize --evaluator verdicts-slowed`` finds this evaluator."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder) / "verdicts_slowed-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: verdicts-slowed\nVersion: 1\n")
        (about / "entry_points.txt").write_text(
            f"[partition_optimizer.evaluators]\n{NAME} = {__name__}:{SlowedEvaluator.__name__}\n"
        )
        path = os.pathsep.join([folder, str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
        yield {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), SLOWER: repr(slower)}
