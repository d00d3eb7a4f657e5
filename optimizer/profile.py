"""Operators timed once per kind of processor, and the additive model that they make.

The model cut before every operator gives each operator's time in its place in the network, with the caches as its
predecessor leaves them. The whole model on the same processor then tells what cutting costs, and the operators' times
are scaled so that they add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Session
from evaluators.sampling import SamplingPolicy, measure
from optimizer.exact.chain import ChainCosts
from search_spaces.chain import chain_plan
from search_spaces.cuts import every_layer
from search_spaces.errors import RunFolderError
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

_POLICY = SamplingPolicy(precision=0.02, max_s=0.4, min_runs=2, max_runs=30)


@dataclass(frozen=True, slots=True)
class Profile:
    """What the additive model needs, per kind of processor (``Processor.like``).

    Attributes:
        operator_s: like → seconds of each operator.
        overhead_s: like → seconds that starting one more part adds.
        hand_over_s: ``like → other like`` (as ``"a|b"``) → seconds between the end of a part and the start of the
            next one on another lane.
        whole_s: like → seconds of the whole model.
    """

    operator_s: Mapping[str, tuple[float, ...]]
    overhead_s: Mapping[str, float]
    hand_over_s: Mapping[str, float]
    whole_s: Mapping[str, float]

    def costs(self, platform: Platform) -> ChainCosts:
        """Return the additive model for the lanes of a platform."""
        likes = [p.like for p in platform.processors]
        count = len(self.operator_s[likes[0]])
        between = np.array(
            [[self._between(a, b, same=i == j) for j, b in enumerate(likes)] for i, a in enumerate(likes)]
        )
        return ChainCosts(
            platform=platform,
            operator_s=np.array([self.operator_s[like] for like in likes]),
            overhead_s=np.array([self.overhead_s[like] for like in likes]),
            hand_over_s=np.broadcast_to(between, (count, *between.shape)),
        )

    def _between(self, a: str, b: str, *, same: bool) -> float:
        return 0.0 if same else self.hand_over_s[_pair(a, b)]

    def fastest(self, platform: Platform) -> str:
        """Return the name of the processor that runs the whole model fastest."""
        return min(platform.processors, key=lambda p: self.whole_s[p.like]).name

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        return {
            "operator_s": {like: list(values) for like, values in self.operator_s.items()},
            "overhead_s": dict(self.overhead_s),
            "hand_over_s": dict(self.hand_over_s),
            "whole_s": dict(self.whole_s),
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Build a profile from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        try:
            content: Any = data
            return cls(
                {str(k): tuple(float(v) for v in values) for k, values in content["operator_s"].items()},
                {str(k): float(v) for k, v in content["overhead_s"].items()},
                {str(k): float(v) for k, v in content["hand_over_s"].items()},
                {str(k): float(v) for k, v in content["whole_s"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"the profile of the operators is damaged: {error!r}") from error


def profile(
    session: Session, graph: Graph, platform: Platform, progress: Callable[[str], None] = lambda _: None
) -> Profile:
    """Time every operator on one processor of each kind, and every kind of hand-over.

    Raises:
        UnavailableError: a processor refuses an operator, or the device failed.
    """
    operator_s, overhead_s, whole_s, hand_over_s = {}, {}, {}, {}
    count = len(graph.operators)
    cuts = every_layer(graph)
    for like, members in platform.classes().items():
        name = members[0].name
        progress(f"timing {count} operators on {name}")
        whole, _ = _time(session, graph, chain_plan(graph, (), [name]))
        apart, stages = _time(session, graph, chain_plan(graph, cuts, [name] * count))
        overhead = max(0.0, (apart - whole) / (count - 1)) if count > 1 else 0.0
        alone = np.maximum(stages - overhead, 0.0)
        total = float(alone.sum())
        scaled = alone * ((whole - overhead) / total) if total > 0 else np.full(count, whole / count)
        operator_s[like] = tuple(float(s) for s in scaled)
        overhead_s[like] = overhead
        whole_s[like] = whole
    for pair, (here, there) in _pairs(platform).items():
        progress(f"timing hand-over between {here} and {there}")
        if count < 2:
            hand_over_s[pair] = 0.0
            continue
        latency, stages = _time(session, graph, chain_plan(graph, (count // 2,), [here, there]))
        hand_over_s[pair] = max(0.0, latency - float(stages.sum()))
    return Profile(operator_s, overhead_s, hand_over_s, whole_s)


def _time(session: Session, graph: Graph, plan: Plan) -> tuple[float, NDArray[np.float64]]:
    candidate = session.load(graph, plan)
    try:
        found = measure(candidate, _POLICY)
    finally:
        candidate.close()
    return found.latency_s.median, np.array(found.stage_s)


def _pairs(platform: Platform) -> dict[str, tuple[str, str]]:
    """Return one pair of lanes for each pair of kinds, and for each kind that has two lanes."""
    classes = list(platform.classes().items())
    found = {}
    for i, (like, members) in enumerate(classes):
        if len(members) > 1:
            found[_pair(like, like)] = (members[0].name, members[1].name)
        for other, others in classes[i + 1 :]:
            found[_pair(like, other)] = (members[0].name, others[0].name)
    return found


def _pair(a: str, b: str) -> str:
    return "|".join(sorted((a, b)))
