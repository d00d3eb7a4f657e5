"""Plans with split stages, run as plans of the rewritten model, and told as what they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evaluators.base import Batch
from evaluators.forwarding import ForwardingCandidate
from evaluators.litert.candidate import LitertCandidate
from evaluators.litert.settings import TOLERANCE_F32
from evaluators.timeline import Event, Timeline
from search_spaces.graph import Graph
from search_spaces.plan import Plan

SPLIT_TOLERANCE = TOLERANCE_F32
"""Relative: a kernel may add up in another order where a side has another shape than the whole, which is what other
kernels do. Networks that normalise by what they see make more of it: fast style transfer is off by 5e-5 when split."""

_WEIGHTS = {"CONV_2D": 1, "DEPTHWISE_CONV_2D": 1, "FULLY_CONNECTED": 1, "TRANSPOSE_CONV": 1}


class LoweredCandidate(ForwardingCandidate):
    """See :class:`~evaluators.base.Candidate`; the stages are those of the plan that was asked for.

    What brings two sides together counts as part of the first one.

    Args:
        plan: what was asked for.
        stage_of: for each stage that runs, the stage of ``plan`` that it belongs to.
    """

    def __init__(self, inner: LitertCandidate, plan: Plan, stage_of: Sequence[int]) -> None:
        super().__init__(inner)
        self.plan = plan
        self._stage_of = np.asarray(stage_of, np.int64)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        return self._folded(super().run(n, stop_above_s))

    def stream(self, n: int) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        return self._folded(super().stream(n))

    def _folded(self, found: Batch) -> Batch:
        stage_s = np.zeros((len(found.latency_s), len(self.plan.stages)))
        for column, stage in enumerate(self._stage_of):
            stage_s[:, stage] += found.stage_s[:, column]
        timeline = None
        if found.timeline is not None:
            events = (
                Event(int(self._stage_of[e.stage]), e.lane, e.start_s, e.end_s, e.copied_s)
                for e in found.timeline.events
            )
            timeline = Timeline(tuple(events))
        return Batch(found.latency_s, stage_s, timeline)


def reads_parts_of_weights(graph: Graph, operators: Sequence[int], buffers: int) -> bool:
    """Return whether operators have weights that are parts of the model's, which nobody has packed.

    Args:
        buffers: how many the model had before it was rewritten.
    """
    for index in operators:
        operator = graph.operators[index]
        place = _WEIGHTS.get(operator.kind)
        if place is not None and graph.tensors[operator.inputs[place]].buffer >= buffers:
            return True
    return False


def usable_packed(packed: Path | None, graph: Graph, whole: Graph, stages: Sequence[Sequence[int]]) -> Path | None:
    """Return the packed weights that stages can use, which are compiled together.

    None where they read weights that nobody has packed: parts of the model's, or what was made in their place.

    Args:
        packed: of ``whole``, the model that ``graph`` was rewritten from, or is.
        stages: operators of each.
    """
    if graph is whole or whole.source is None:
        return packed
    buffers = len(whole.source.schema.buffers)
    return None if any(reads_parts_of_weights(graph, operators, buffers) for operators in stages) else packed
