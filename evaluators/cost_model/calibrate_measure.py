"""Time a model's operators where they stand, the whole model, and a fixed kernel between them.

A machine's clock may drift by more than half between two hours, and nothing tells. So every measurement is taken in
rounds between runs of one reference network, and is given as a multiple of it: what the machine did to the one, it did
to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Candidate, Session
from search_spaces.chain import chain_plan
from search_spaces.cuts import every_layer
from search_spaces.errors import ProfileError, UnavailableError
from search_spaces.graph import Graph
from search_spaces.models.zoo.builder import Builder, Draft
from search_spaces.plan import Plan

ROUNDS = 4
LEAST_RUNS, MOST_RUNS = 3, 60
REFERENCE_S = 0.006  # spent on the reference before and after each part of a round

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """One model on one processor.

    Attributes:
        model: its name.
        processor: the lane.
        whole_s: of the model as one stage.
        stage_s: of each operator as a stage of its own, in its place; each holds the cost of a call.
        apart_s: of the inference that these are from.
        reference_s: of the reference network meanwhile.
        spread: relative standard error of ``whole_s``, from its rounds.
    """

    model: str
    processor: str
    whole_s: float
    stage_s: tuple[float, ...]
    apart_s: float
    reference_s: float
    spread: float

    def scaled(self, factor: float) -> Timing:
        """Return the timing as it were with a reference ``factor`` times as long."""
        return Timing(
            self.model,
            self.processor,
            self.whole_s * factor,
            tuple(s * factor for s in self.stage_s),
            self.apart_s * factor,
            self.reference_s * factor,
            self.spread,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the timing as plain values."""
        return {
            "model": self.model,
            "processor": self.processor,
            "whole_s": self.whole_s,
            "stage_s": [float(f"{s:.4g}") for s in self.stage_s],
            "apart_s": self.apart_s,
            "reference_s": self.reference_s,
            "spread": self.spread,
        }

    @classmethod
    def from_json(cls, data: Any) -> Timing:
        """Build a timing from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            ProfileError: a field is missing, or a time is no positive number.
        """
        try:
            found = cls(
                str(data["model"]),
                str(data["processor"]),
                float(data["whole_s"]),
                tuple(float(s) for s in data["stage_s"]),
                float(data["apart_s"]),
                float(data["reference_s"]),
                float(data["spread"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"a timing is damaged: {error!r}") from error
        check_seconds((found.whole_s, found.apart_s, found.reference_s, *found.stage_s), found.model)
        return found


def check_seconds(values: Sequence[float], what: str) -> None:
    """Check that times are times.

    Raises:
        ProfileError: one is not a positive, finite number; the text tells which and of what.
    """
    for index, value in enumerate(values):
        if not (np.isfinite(value) and value > 0.0):
            raise ProfileError(
                f"{what}: time {index} of {len(values)} is {value} s, which is not a time", "measure it again"
            )


def reference_network() -> Draft:
    """Return the network that everything is compared with: two usual convolutions, about 2 ms on a fast core."""
    net = Builder("reference")
    x = net.input((1, 28, 28, 128))
    for layer in range(2):
        x = net.conv(x, 128, 3, f"conv{layer}", activation="RELU")
    return net.finish(x)


def whole_plan(graph: Graph, processor: str) -> Plan:
    """Return the plan of one stage."""
    return chain_plan(graph, (), [processor])


def apart_plan(graph: Graph, processor: str) -> Plan:
    """Return the plan with a stage for each operator."""
    return chain_plan(graph, every_layer(graph), [processor] * len(graph.operators))


def time_model(
    session: Session, graph: Graph, processor: str, reference: Candidate, *, seconds: float = 0.25
) -> Timing:
    """Time a model on a processor, whole and operator by operator, for about ``seconds`` each.

    Args:
        reference: the reference network, loaded on the same processor.

    Raises:
        UnavailableError: the device failed, or does not run the model.
        ProfileError: it returned something that is no time.
    """
    with (
        closing(session.load(graph, whole_plan(graph, processor))) as whole,
        closing(session.load(graph, apart_plan(graph, processor))) as apart,
    ):
        once_s = warm(whole)
        warm(apart)
        runs = int(np.clip(seconds / ROUNDS / once_s, LEAST_RUNS, MOST_RUNS))
        least_s = warm(reference)
        beats = max(2, int(REFERENCE_S / least_s))
        wholes, parts, apart_s, clocks = [], [], [], []
        for _ in range(ROUNDS):
            clock = [reference_s(reference, beats)]
            wholes.append(float(np.median(whole.run(runs).latency_s)))
            clock.append(reference_s(reference, beats))
            batch = apart.run(runs)
            clock.append(reference_s(reference, beats))
            parts.append(np.median(batch.stage_s, axis=0))
            apart_s.append(float(np.median(batch.latency_s)))
            clocks.append(clock)
    clock_s = np.array(clocks)
    # A part lies between two runs of the reference: it is compared with their mean.
    before, after = clock_s[:, :2].mean(axis=1), clock_s[:, 1:].mean(axis=1)
    usual = float(np.median(clock_s))
    whole_s = np.array(wholes) / before * usual
    found = Timing(
        graph.name,
        processor,
        float(np.median(whole_s)),
        tuple(float(s) for s in np.median(np.array(parts) / after[:, None] * usual, axis=0)),
        float(np.median(np.array(apart_s) / after * usual)),
        usual,
        float(np.std(whole_s) / np.mean(whole_s) / np.sqrt(ROUNDS)),
    )
    check_seconds((found.whole_s, found.apart_s, *found.stage_s), graph.name)
    return found


def reference_s(reference: Candidate, beats: int) -> float:
    """Return the median of some runs of the reference network."""
    return float(np.median(reference.run(beats).latency_s))


def warm(candidate: Candidate) -> float:
    """Run a few times and return about what a run takes, in seconds."""
    candidate.run(1)
    latency_s = candidate.run(2).latency_s
    if not np.all(np.isfinite(latency_s)):
        raise UnavailableError("the device returned times that are no numbers")
    return max(1e-7, float(latency_s.min()))
