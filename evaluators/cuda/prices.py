"""What the jobs of a workload cost on streams, and how models slow each other when all of them run at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from evaluators.workload.prices import Alone, kind_of
from evaluators.workload.scheduler import QueueClient
from evaluators.workload.setting import Setting
from search_spaces.graph import Graph
from search_spaces.platform import Processor

_TIMED_S, _FEWEST, _MOST = 0.2, 6, 200


def crowding(
    graphs: Sequence[Graph],
    lanes: Sequence[Processor],
    alone: Alone,
    whole_s: Mapping[str, Mapping[str, float]],
    progress: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return for each model how much longer a job takes for each other lane that is busy.

    All instances ask in closed loops, each on a stream of its own, as far as there are streams. One that takes ``r``
    times as long beside ``k - 1`` others is slowed by ``r ** (1 / (k - 1))`` by each of them. Where there are lanes of
    several precisions, all of one precision are timed, and mixed pairs get the larger factor.

    Args:
        graphs: of each instance.
        whole_s: model → kind of lane → seconds of the model alone.
    """
    groups: dict[str, list[int]] = {}
    for number, lane in enumerate(lanes):
        groups.setdefault(kind_of(lane), []).append(number)
    found: dict[str, dict[str, float]] = {graph.digest: {} for graph in graphs}
    for kind, numbers in groups.items():
        together = min(len(numbers), len(graphs))
        if together < 2:
            continue
        progress(f"timing {together} models at once on {kind}")
        chosen = [graphs[i * len(graphs) // together] for i in range(together)]
        alone_s = [whole_s[graph.digest][kind] for graph in chosen]
        setting = _closed(numbers[:together], alone_s, lanes)
        outcome = alone(setting, [(graph, ()) for graph in chosen], 2)[-1]
        ratios: dict[str, list[float]] = {}
        for graph, requests, own_s in zip(chosen, outcome.requests, alone_s, strict=True):
            # Behind the first half of its requests the quickest may be alone with those that have more to do.
            times = [r.latency_s for r in requests[: len(requests) // 2 + 1] if r.latency_s is not None]
            ratios.setdefault(graph.digest, []).append(statistics.fmean(times) / own_s)
        for digest, factors in found.items():
            known = ratios.get(digest) or [r for each in ratios.values() for r in each]
            slow = max(1.0, statistics.fmean(known)) ** (1.0 / (together - 1))
            for other in groups:
                key, back = f"{kind}|{other}", f"{other}|{kind}"
                if other == kind or slow > factors.get(key, 1.0):
                    factors |= {key: slow, back: slow}
    return found


def _closed(on: Sequence[int], alone_s: Sequence[float], lanes: Sequence[Processor]) -> Setting:
    """Return a setting in which models ask in closed loops on lanes of their own, all for about as long."""
    wanted_s = max(_TIMED_S, _FEWEST * max(alone_s))
    seats = tuple(
        QueueClient(((lane,),), (0,), int(np.clip(wanted_s / max(own_s, 1e-6) / len(on), _FEWEST, _MOST)), closed=True)
        for lane, own_s in zip(on, alone_s, strict=True)
    )
    excluded = tuple(sum(1 << j for j, b in enumerate(lanes) if i == j or a.excludes(b)) for i, a in enumerate(lanes))
    stages = tuple((k,) for k in range(len(on)))
    return Setting(seats, tuple(range(len(on))), stages, tuple(p.name for p in lanes), excluded)
