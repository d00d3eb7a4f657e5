"""Time what cutting costs on one lane: to leave the runtime, to enter it again, and to pass on what lies between."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from evaluators.base import Session
from evaluators.cost_model.calibrate_measure import whole_plan
from evaluators.cost_model.calibrate_pairs import MAPS, Loaded
from search_spaces.errors import ProfileError
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Processor

_MAPS = MAPS[1:4]
_LAYERS, _RUNS, _ROUNDS = 6, 12, 8
_ROUND_S = 0.03  # of which two runs are the least
_MOST_S = 0.01


@dataclass(frozen=True, slots=True)
class CutProfile:
    """What a cut costs on one kind of lane.

    Attributes:
        like: the kind.
        invocation_s: for every stage, whatever its size.
    """

    like: str
    invocation_s: float

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ProfileError: they are of another kind, or no cut takes that long.
        """
        given = self.invocation_s
        if not isinstance(self.like, str) or isinstance(given, bool) or not isinstance(given, int | float):
            raise ProfileError("what a cut costs is a processor's name and a number of seconds")
        if not 0.0 <= given <= _MOST_S:
            raise ProfileError(f"a cut that costs {given:g} s is none", f"it takes 0 to {_MOST_S:g} s")


def time_cuts(session: Session, loaded: Loaded, lane: Processor) -> CutProfile:
    """Time chains of convolutions whole and cut at every operator, in turns; what each cut adds is what a stage costs.

    Stages are as long as those of usual plans: a cut between tiny ones costs half as much. Of the runs of a turn the
    quicker quarter counts, since others disturb.

    Raises:
        UnavailableError: the device failed, or the lane refuses the chains.
    """
    extra_s = []
    for side, channels in _MAPS:
        graph = loaded(_chain(side, channels))
        count = len(graph.operators)
        apart = Plan(graph.digest, tuple(Stage((i,), lane.name) for i in range(count)))
        with (
            closing(session.load(graph, whole_plan(graph, lane.name))) as one,
            closing(session.load(graph, apart)) as many,
        ):
            many.run(2)
            usual_s = float(np.median(one.run(2).latency_s))
            runs = int(np.clip(_ROUND_S / usual_s, 2, _RUNS))
            for _ in range(_ROUNDS if runs > 2 else 2):
                before, cut, after = (float(np.quantile(c.run(runs).latency_s, 0.25)) for c in (one, many, one))
                extra_s.append((cut - (before + after) / 2) / (count - 1))
    return CutProfile(lane.like, min(_MOST_S, max(0.0, float(np.median(extra_s)))))


def _chain(side: int, channels: int) -> Draft:
    net = Builder(f"cut{side}x{channels}")
    x = net.input((1, side, side, channels))
    for layer in range(_LAYERS):
        x = net.conv(x, channels, 3, f"conv{layer}", activation="RELU")
    return net.finish(x)
