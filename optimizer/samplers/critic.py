"""What the times of stages teach about operators: a linear model with a Gaussian prior (Rasmussen and Williams 2006).

A stage takes what its operators take by the model, each times ``1 + u``, with u of one operator on one kind of
processor unknown. It is coarser than :mod:`~optimizer.samplers.correction`, which knows of calls, transfers and
neighbours too, and serves plans of any shape, whose latency it takes to be off as their operators are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain_costs import ChainCosts
from search_spaces.core.plan import Plan, Stage

_Array = NDArray[np.float64]
ERROR, NOISE, MOST_STAGES = 0.2, 0.02, 400
_LEAST = 0.2  # of what the model says


@dataclass(slots=True)
class Critic:
    """See the module.

    Args:
        predict: seconds that the model gives a plan.
        model: None where nothing is known of operators; plans then take what the model says.
        alike: for each operator the first one that is the same, as in other instances of one network; None for itself.
    """

    predict: Callable[[Plan], float]
    model: ChainCosts | None
    alike: NDArray[np.int64] | None = None
    _rows: list[_Array] = field(default_factory=list)
    _beyond: list[float] = field(default_factory=list)
    _longer: _Array | None = None
    _lanes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model is not None:
            likes = list(self.model.platform.classes())
            lanes = enumerate(self.model.platform.processors)
            self._lanes = {p.name: (i, likes.index(p.like)) for i, p in lanes}

    def observe(self, plan: Plan, stage_s: tuple[float, ...]) -> None:
        """Learn from the times of a plan's stages; those of shares and triples are no operators' own."""
        if self.model is None or plan.ranks or any(stage.processor not in self._lanes for stage in plan.stages):
            return
        for stage, took_s in zip(plan.stages, stage_s, strict=True):
            if stage.share is None and took_s > 0.0:
                row, noise_s = self._row(stage), NOISE * took_s
                self._rows.append(row / noise_s)
                self._beyond.append((took_s - self.believed_s(stage)) / noise_s)

    def believed_s(self, stage: Stage) -> float:
        """Return what the model says that a stage takes."""
        called_s = 0.0 if self.model is None else float(self.model.overhead_s[self._lanes[stage.processor][0]])
        return float(self._row(stage).sum()) + called_s

    def learn(self, rng: np.random.Generator | None) -> None:
        """Settle what is believed: the mean, or a draw (Matheron's rule, as in the correction of ``auto``)."""
        if not self._rows:
            return
        rows, beyond = np.array(self._rows[-MOST_STAGES:]), np.array(self._beyond[-MOST_STAGES:])
        drawn = np.zeros(rows.shape[1])
        if rng is not None:
            drawn = np.array(ERROR * rng.standard_normal(rows.shape[1]))
            beyond = beyond - rows @ drawn - rng.standard_normal(len(beyond))
        gram = ERROR**2 * rows @ rows.T + np.eye(len(beyond))
        self._longer = drawn + ERROR**2 * rows.T @ np.linalg.solve(gram, beyond)

    def seconds(self, plan: Plan) -> float:
        """Return what a plan is thought to take."""
        return self.predict(plan) * self.factor(*plan.stages)

    def factor(self, *stages: Stage) -> float:
        """Return how many times as long as by the model stages are thought to take together."""
        if self._longer is None or not all(stage.processor in self._lanes for stage in stages):
            return 1.0
        share = np.sum([self._row(stage) for stage in stages], axis=0)
        return max(_LEAST, 1.0 + float(share @ self._longer) / max(float(share.sum()), 1e-12))

    def _row(self, stage: Stage) -> _Array:
        """Return what each operator adds to a stage by the model, by kinds of processors."""
        if self.model is None:
            raise ValueError(stage)
        lane, like = self._lanes[stage.processor]
        operators = list(stage.operators)
        own = self.model.operator_s[lane, operators]
        found = np.zeros((1 + max(like for _, like in self._lanes.values()), self.model.operator_s.shape[1]))
        own = np.where(np.isfinite(own), own, 0.0) * (0.5 if stage.share is not None else 1.0)
        np.add.at(found[like], operators if self.alike is None else self.alike[operators], own)
        return found.ravel()
