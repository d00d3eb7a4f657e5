"""Plans whose runs are computed, not made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from evaluators.base import Batch, Candidate


class Prediction(Candidate):
    """A candidate without outputs whose runs take no time and are all as ``one``.

    Args:
        figures: what is to be known beside it.
    """

    def __init__(self, one: Batch, figures: Mapping[str, float] | None = None) -> None:
        self.one, self._figures = one, dict(figures or {})

    def figures(self) -> dict[str, float]:
        """See :class:`~evaluators.base.Candidate`."""
        return dict(self._figures)

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        runs = 1 if self.one.latency_s[0] > stop_above_s else n
        latency_s, stage_s = np.tile(self.one.latency_s, runs), np.tile(self.one.stage_s, (runs, 1))
        return replace(self.one, latency_s=latency_s, stage_s=stage_s)
