"""Time what two processors do to each other: handing tensors over, and running at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from evaluators.base import Batch, Session
from evaluators.cost_model.profile import COLD_BYTES, ContentionProfile, LinkProfile
from evaluators.cost_model.transfers import one_core
from search_spaces.graph import Graph
from search_spaces.models.zoo.builder import Builder, Draft, Value
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor

Loaded = Callable[[Draft], Graph]
"""Makes a graph that the session can load of a draft."""

MAPS = ((14, 32), (14, 256), (28, 128), (56, 64), (224, 16))
"""Side and channels of the maps that are handed over: 25 KB to 3.2 MB. A stage takes about a millisecond, as stages
do: what lies ready when a stage is tiny (caches, a core that has not gone to sleep) is gone after one of these."""
_RUNS, _ROUNDS = 30, 5
_LINK_RUNS, _LINK_ROUNDS = 8, 6


def pairs(platform: Platform) -> list[tuple[Processor, Processor]]:
    """Return an ordered pair of lanes for each two kinds, and for each kind that has two lanes.

    Of kinds that share cores there are two: lanes that are driven from one core, and lanes that are not.
    """
    groups = list(platform.classes().values())
    found = []
    for i, group in enumerate(groups):
        if len(group) > 1:
            found.append((group[0], group[1]))
        for other in groups[i + 1 :]:
            for near in (True, False):
                both = [(a, b) for a in group for b in other if one_core(a, b) is near]
                for a, b in both[:1]:
                    found += [(a, b), (b, a)]
    return found


def time_link(session: Session, loaded: Loaded, source: Processor, target: Processor) -> LinkProfile:
    """Time handing maps of some sizes from one lane to another.

    Three stages run on the source, the target, and the source again, and all on the one or the other: what the first
    two take longer than on their own lanes, and what passes between them, is what handing over costs. Stages are as
    long as those of usual plans.

    Raises:
        UnavailableError: the device failed.
    """
    terms, extra_s, gaps_s = [], [], []
    for side, channels in MAPS:
        graph = loaded(_three_convolutions(side, channels))
        lanes = (source, target, source), (source,) * 3, (target,) * 3
        with ExitStack() as stack:
            across, here, there = (
                stack.enter_context(closing(session.load(graph, _in_stages(graph, [lane.name for lane in way]))))
                for way in lanes
            )
            gap, extra = [], []
            for number in range(_LINK_ROUNDS + 1):
                batches = [candidate.run(_LINK_RUNS) for candidate in (across, here, there)]
                if not number:
                    continue  # warm
                took, first, second = (np.median(batch.stage_s, axis=0) for batch in batches)
                gap.append(_first_gap_s(batches[0]))
                extra.append(float(took[0] - first[0] + took[1] - second[1]))
        nbytes = graph.tensors[graph.operators[1].inputs[0]].nbytes
        terms.append([1.0, min(1.0, nbytes / COLD_BYTES), nbytes])
        gaps_s.append(float(np.median(gap)))
        extra_s.append(float(np.median(extra)))
    from scipy.optimize import nnls

    size = np.max(terms, axis=0)
    always_s, cold_s, per_byte_s = nnls(np.array(terms) / size, np.array(extra_s))[0] / size
    return LinkProfile(
        source.like,
        target.like,
        max(0.0, float(np.median(gaps_s[1:]))) + float(always_s),
        float(per_byte_s),
        cold_s=float(cold_s),
        one_core=_near(source, target),
    )


def is_of(link: LinkProfile, source: Processor, target: Processor) -> bool:
    """Return whether a link is what :func:`time_link` says about two lanes, or others of their kinds."""
    return (link.source, link.target, link.one_core) == (source.like, target.like, _near(source, target))


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


def _near(source: Processor, target: Processor) -> bool | None:
    """Return whether lanes that share cores are driven from the same one; lanes that share none are all alike."""
    return one_core(source, target) if source.excludes(target) else None


def _first_gap_s(batch: Batch) -> float:
    """Return what passed between the first two stages, of an inference of which that is known."""
    if batch.timeline is None:
        gaps = batch.stage_s.shape[1] - 1
        return float(np.median(batch.latency_s - batch.stage_s.sum(axis=1)) / gaps)
    events = {event.stage: event for event in batch.timeline.events}
    return float(events[1].start_s - events[0].end_s)


def _three_convolutions(side: int, channels: int) -> Draft:
    net = Builder(f"link{side}x{channels}")
    x = net.input((1, side, side, channels))
    for layer in range(3):
        x = net.conv(x, channels, 3, f"conv{layer}", activation="RELU")
    return net.finish(x)


def _in_stages(graph: Graph, lanes: Sequence[str]) -> Plan:
    return Plan(graph.digest, tuple(Stage((i,), lane) for i, lane in enumerate(lanes)))


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
