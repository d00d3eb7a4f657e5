"""Time what two processors do to each other: handing tensors over, and running at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from evaluators.base import Session
from evaluators.cost_model.profile import ContentionProfile, LinkProfile
from search_spaces.graph import Graph
from search_spaces.models.zoo.builder import Builder, Draft, Value
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor

Loaded = Callable[[Draft], Graph]
"""Makes a graph that the session can load of a draft."""

SIDES = (8, 64, 256)  # of the maps that are handed over, with 16 channels: 4 KiB, 256 KiB, 4 MiB
_RUNS, _ROUNDS = 30, 5


def pairs(platform: Platform) -> list[tuple[Processor, Processor]]:
    """Return one ordered pair of lanes for each two kinds, and for each kind that has two lanes."""
    groups = list(platform.classes().values())
    found = []
    for i, group in enumerate(groups):
        if len(group) > 1:
            found.append((group[0], group[1]))
        for other in groups[i + 1 :]:
            found += [(group[0], other[0]), (other[0], group[0])]
    return found


def time_link(session: Session, loaded: Loaded, source: Processor, target: Processor) -> LinkProfile:
    """Time handing maps of some sizes from one lane to another.

    The latency is what passes between the two stages; each byte costs what the second stage takes longer than behind a
    stage on its own lane.

    Raises:
        UnavailableError: the device failed.
    """
    nbytes, gaps_s, longer_s = [], [], []
    for side in SIDES:
        graph = loaded(_mapped_twice(side))
        plans = [_two_stages(graph, (source.name, target.name)), _two_stages(graph, (target.name, target.name))]
        with closing(session.load(graph, plans[0])) as across, closing(session.load(graph, plans[1])) as within:
            across.run(3)
            within.run(3)
            gap, longer = [], []
            for _ in range(_ROUNDS):
                there, here = across.run(_RUNS), within.run(_RUNS)
                gap.append(float(np.median(there.latency_s - there.stage_s.sum(axis=1))))
                longer.append(float(np.median(there.stage_s[:, 1]) - np.median(here.stage_s[:, 1])))
        nbytes.append(graph.tensors[graph.operators[1].inputs[0]].nbytes)
        gaps_s.append(float(np.median(gap)))
        longer_s.append(float(np.median(longer)))
    slope = float(np.dot(nbytes, longer_s) / np.dot(nbytes, nbytes))
    return LinkProfile(source.like, target.like, max(0.0, float(np.median(gaps_s))), max(0.0, slope))


def time_contention(session: Session, loaded: Loaded, victim: Processor, other: Processor) -> ContentionProfile:
    """Time a stage that computes and one that moves memory, alone and beside another lane that does the same.

    Raises:
        UnavailableError: the device failed.
    """
    factors = []
    for draft in (_computing(), _moving()):
        graph = loaded(draft)
        count = len(graph.operators) // 2
        first, second = tuple(range(0, 2 * count, 2)), tuple(range(1, 2 * count, 2))
        alone = Plan(graph.digest, (Stage(first, victim.name), Stage(second, victim.name)))
        beside = Plan(graph.digest, (Stage(first, victim.name), Stage(second, other.name)))
        with closing(session.load(graph, alone)) as quiet, closing(session.load(graph, beside)) as crowded:
            quiet.run(2)
            crowded.run(2)
            ratios = []
            for _ in range(_ROUNDS):
                own = float(np.median(quiet.run(_RUNS).stage_s[:, 0]))
                batch = crowded.run(_RUNS)
                ratios.append(_while_both(batch.stage_s) / own)
        factors.append(max(1.0, float(np.median(ratios))))
    return ContentionProfile(victim.like, other.like, factors[0], factors[1])


def _while_both(stage_s: Any) -> float:
    """Return what the first stage takes; the second is as long, so that the two overlap nearly all the time."""
    return float(np.median(stage_s[:, 0]))


def _mapped_twice(side: int) -> Draft:
    net = Builder(f"link{side}")
    x = net.input((1, side, side, 16))
    return net.finish(net.unary("LOGISTIC", net.unary("LOGISTIC", x, "first"), "second"))


def _two_stages(graph: Graph, lanes: Sequence[str]) -> Plan:
    return Plan(graph.digest, (Stage((0,), lanes[0]), Stage((1,), lanes[1])))


def _computing(layers: int = 6) -> Draft:
    """Return two equal chains that share nothing, operator by operator in turn: work that stays in the caches."""
    net = Builder("computing")
    chains = [net.input((1, 14, 14, 128), f"input{i}") for i in range(2)]
    for layer in range(layers):
        chains = [net.conv(x, 128, 3, f"conv{i}_{layer}", activation="RELU") for i, x in enumerate(chains)]
    return net.finish(*chains)


def _moving(layers: int = 6) -> Draft:
    """Return two equal chains of maps that are larger than a core's caches."""
    net = Builder("moving")
    chains: list[Value] = [net.input((1, 256, 256, 16), f"input{i}") for i in range(2)]
    kept = list(chains)
    for layer in range(layers):
        chains = [net.add(x, y, f"add{i}_{layer}") for i, (x, y) in enumerate(zip(chains, kept, strict=True))]
    return net.finish(*chains)
