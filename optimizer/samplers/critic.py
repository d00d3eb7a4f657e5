"""Corrects operators' costs by stages' times: a linear model with a Gaussian prior (Rasmussen and Williams 2006).

The time of a stage is the sum of its operators' model times, each multiplied by ``1 + u``; u is unknown for each
operator on each kind of processor. Coarser than :mod:`~optimizer.samplers.correction`, which also corrects calls,
transfers and neighbours, but for plans of any shape.
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
_LEAST = 0.2  # smallest estimate, relative to the model's


@dataclass(slots=True)
class Critic:
    """Corrects the costs of operators by the measured times of stages.

    Args:
        predict: returns the model's time of a plan (s).
        model: costs of operators; without them plans take the model's time.
        alike: for each operator the first one equal to it, as in another instance of the network; None for itself.
    """

    predict: Callable[[Plan], float]
    model: ChainCosts | None
    alike: NDArray[np.int64] | None = None
    _rows: list[_Array] = field(default_factory=list)
    _beyond: list[float] = field(default_factory=list)
    _longer: _Array | None = None
    _processors: dict[str, tuple[int, int]] = field(default_factory=dict)
    _shape: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.model is not None:
            likes = list(self.model.platform.classes())
            processors = enumerate(self.model.platform.processors)
            self._processors = {p.name: (i, likes.index(p.like)) for i, p in processors}
            self._shape = len(likes), self.model.operator_s.shape[1]

    def observe(self, plan: Plan, stage_s: tuple[float, ...]) -> None:
        """Learn from the times (s) of a plan's stages; plans with ranks and split stages say nothing of operators."""
        if self.model is None or plan.ranks or any(stage.processor not in self._processors for stage in plan.stages):
            return
        for stage, took_s in zip(plan.stages, stage_s, strict=True):
            if stage.share is None and took_s > 0.0:
                row, noise_s = self._row(stage), NOISE * took_s
                self._rows.append(row / noise_s)
                self._beyond.append((took_s - self.model_s(stage)) / noise_s)

    def model_s(self, stage: Stage) -> float:
        """Return the model's time of a stage (s)."""
        called_s = 0.0 if self.model is None else float(self.model.overhead_s[self._processors[stage.processor][0]])
        return float(self._own(stage)[2].sum()) + called_s

    def learn(self, rng: np.random.Generator | None) -> None:
        """Update the estimate: the posterior's mean, or a draw by ``rng`` (Matheron's rule, as in ``correction``)."""
        if not self._rows:
            return
        rows, beyond = np.array(self._rows[-MOST_STAGES:]), np.array(self._beyond[-MOST_STAGES:])
        drawn = np.zeros(rows.shape[1])
        if rng is not None:
            drawn = np.array(ERROR * rng.standard_normal(rows.shape[1]))
            beyond = beyond - rows @ drawn - rng.standard_normal(len(beyond))
        gram = ERROR**2 * rows @ rows.T + np.eye(len(beyond))
        self._longer = (drawn + ERROR**2 * rows.T @ np.linalg.solve(gram, beyond)).reshape(self._shape)

    def seconds(self, plan: Plan) -> float:
        """Return the estimated time of a plan (s)."""
        return self.predict(plan) * self.factor(*plan.stages)

    def factor(self, *stages: Stage) -> float:
        """Return the ratio of the estimated time of stages to the model's."""
        if self._longer is None or not all(stage.processor in self._processors for stage in stages):
            return 1.0
        more_s = total_s = 0.0
        for like, operators, own_s in map(self._own, stages):
            more_s += float(own_s @ self._longer[like, operators])
            total_s += float(own_s.sum())
        return max(_LEAST, 1.0 + more_s / max(total_s, 1e-12))

    def _own(self, stage: Stage) -> tuple[int, NDArray[np.int64], _Array]:
        """Return the kind of a stage's processor, its operators, and each one's model time in the stage."""
        if self.model is None:
            raise ValueError(stage)
        processor, like = self._processors[stage.processor]
        operators = np.array(stage.operators)
        own_s = self.model.operator_s[processor, operators]
        own_s = np.where(np.isfinite(own_s), own_s, 0.0) * (0.5 if stage.share is not None else 1.0)
        return like, operators if self.alike is None else self.alike[operators], own_s

    def _row(self, stage: Stage) -> _Array:
        """Return the model's time of each operator in a stage, by kind of processor, flat."""
        like, operators, own_s = self._own(stage)
        found = np.zeros(self._shape)
        np.add.at(found[like], operators, own_s)
        return found.ravel()
