"""Plans whose runs are computed, not made."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from evaluators.base import Batch, Candidate


class Prediction(Candidate):
    """A candidate without outputs whose runs take no time and are all as ``one``."""

    def __init__(self, one: Batch) -> None:
        self.one = one

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:
        """See :class:`~evaluators.base.Candidate`."""
        runs = 1 if self.one.latency_s[0] > stop_above_s else n
        latency_s, stage_s = np.tile(self.one.latency_s, runs), np.tile(self.one.stage_s, (runs, 1))
        return replace(self.one, latency_s=latency_s, stage_s=stage_s)
