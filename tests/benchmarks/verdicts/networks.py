"""Networks of 3 to 8 ms with a known number of extra operators, and how much longer those take: the calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.measurement.final import Load
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.zoo.builder import Builder
from search_spaces.spaces.chain import chain_plan
from tests.benchmarks.verdicts.trace import Trace, ratio, record

BODY = 20  # convolutions of equal work
SHARES = (0.02, 0.05)
KNOWN_TO, NEAR = 0.003, 0.005
LADDER = (0, 5, 8, 11, 14, 17, 21, 26, 31, 36, 42)
"""Extra operators of the networks among which those are found that take 2 and 5 % longer."""


def network(extra: int, folder: Path) -> Graph:
    """Return a chain of convolutions of about 4 ms on two cores; ``extra`` more ones follow on a small map."""
    path = folder / f"extra{extra}.tflite"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        net = Builder("verdicts")
        x = net.conv(net.input((1, 56, 56, 3)), 64, 3, "stem", stride=2, activation="RELU")
        for i in range(BODY):
            x = net.conv(x, 64, 3, f"body{i}", activation="RELU")
        for i in range(2):
            x = net.conv(x, 64, 3, f"down{i}", stride=2, activation="RELU")
        for i in range(extra):
            x = net.conv(x, 64, 1, f"extra{i}", activation="RELU")
        net.finish(net.fully_connected(net.mean(x, "mean"), 10, "out")).write(path)
    return load(str(path))


def whole(session: LitertSession, graph: Graph, processor: str = "cpu") -> Load:
    """Return what builds new instances of a network in one stage."""
    plan = chain_plan(graph, (), [processor])
    return lambda: session.load(graph, plan, fresh=True)


def two_threads() -> Platform:
    """Return this machine with all cores as one processor, ``cpu`` (on one core: that core)."""
    found = cores()
    return found.restrict([found.processors[0].name])


def cores() -> Platform:
    """Return the cores of this machine, together and each alone: no adapter, and no other runtime."""
    found = LitertEvaluator().platform()
    return found.restrict([p.name for p in found.processors if p.kind == "cpu" and ":" not in p.name])


def calibrate(folder: Path, minutes: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return for 2 and 5 % how many extra operators take so much longer, and how much that is exactly."""
    platform, rng = two_threads(), np.random.default_rng(0)
    name = platform.processors[0].name
    with LitertEvaluator().prepare(platform) as session:

        def long(counts: Sequence[int], seconds: float) -> Trace:
            loads = [whole(session, network(count, folder), name) for count in counts]
            return record(loads, [str(count) for count in counts], session.counters, seconds, rng, blocks=4)

        tell(f"networks with {', '.join(map(str, LADDER))} extra operators")
        ladder = long(LADDER, 60.0 * minutes / 3)
        steps = {count: ratio(ladder, i, 0)[0] for i, count in enumerate(LADDER) if i}
        # Measured one by one, since the latency does not grow evenly: more operators lie elsewhere in memory.
        near = {count for share in SHARES for count in _nearest(steps, share)[:2]}
        counts = [0, *sorted(near)]
        tell(f"{', '.join(map(str, counts[1:]))} extra operators, over many rebuilt instances")
        found = long(counts, 60.0 * minutes * 2 / 3)
    known = {count: ratio(found, i, 0) for i, count in enumerate(counts) if i}
    pairs: dict[str, Any] = {}
    for share in SHARES:
        extra = _nearest({count: value for count, (value, _) in known.items()}, share)[0]
        value, half = known[extra]
        pairs[label(share)] = {"extra": extra, "truth": math.expm1(value), "half": half}
    return {
        "latency_ms": float(found.typical_s[0]) * 1e3,
        "ladder": {str(count): math.expm1(value) for count, value in steps.items()},
        "rounds": len(found.run_s),
        "pairs": pairs,
        "known": all(pair["half"] <= KNOWN_TO for pair in pairs.values()),
        "near": all(abs(pairs[label(share)]["truth"] - share) <= NEAR for share in SHARES),
    }


def _nearest(steps: dict[int, float], share: float) -> list[int]:
    """Return the numbers of extra operators, that first which comes nearest to taking a share longer."""
    return sorted(steps, key=lambda count: abs(steps[count] - math.log1p(share)))


def label(share: float) -> str:
    """Return the name of a pair: ``2 %``."""
    return f"{share:.0%}".replace("%", " %")


def slots(calibration: dict[str, Any], folder: Path, session: LitertSession) -> tuple[list[str], list[Load]]:
    """Return names and loaders of the plans of a trace: the base twice, and the base with extra operators."""
    name = two_threads().processors[0].name
    pairs = calibration["pairs"]
    graphs = [network(0, folder), network(0, folder), *(network(pairs[p]["extra"], folder) for p in pairs)]
    return ["equal", "equal", *pairs], [partial(_load, session, graph, name) for graph in graphs]


def _load(session: LitertSession, graph: Graph, processor: str) -> Any:
    return whole(session, graph, processor)()
