"""Time what cutting costs on one lane: to leave the runtime, to enter it again, and to pass on what lies between."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from evaluators.base import Session
from evaluators.cost_model.calibrate_measure import whole_plan
from evaluators.cost_model.calibrate_pairs import MAPS, Loaded
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Processor

_LAYERS, _RUNS, _ROUNDS = 6, 8, 6


@dataclass(frozen=True, slots=True)
class CutProfile:
    """What a cut costs on one kind of lane.

    Attributes:
        like: the kind.
        invocation_s: for every stage, whatever its size.
    """

    like: str
    invocation_s: float


def time_cuts(session: Session, loaded: Loaded, lane: Processor) -> CutProfile:
    """Time chains of convolutions whole and cut at every operator, in turns; what each cut adds is what a stage costs.

    Stages are as long as those of usual plans: a cut between tiny ones costs half as much.

    Raises:
        UnavailableError: the device failed.
    """
    extra_s = []
    for side, channels in MAPS:
        graph = loaded(_chain(side, channels))
        count = len(graph.operators)
        apart = Plan(graph.digest, tuple(Stage((i,), lane.name) for i in range(count)))
        with (
            closing(session.load(graph, whole_plan(graph, lane.name))) as one,
            closing(session.load(graph, apart)) as many,
        ):
            one.run(2)
            many.run(2)
            for _ in range(_ROUNDS):
                before, cut, after = (float(np.median(c.run(_RUNS).latency_s)) for c in (one, many, one))
                extra_s.append((cut - (before + after) / 2) / (count - 1))
    return CutProfile(lane.like, max(0.0, float(np.median(extra_s))))


def _chain(side: int, channels: int) -> Draft:
    net = Builder(f"cut{side}x{channels}")
    x = net.input((1, side, side, channels))
    for layer in range(_LAYERS):
        x = net.conv(x, channels, 3, f"conv{layer}", activation="RELU")
    return net.finish(x)
