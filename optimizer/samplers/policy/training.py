"""Training of a policy on networks and devices with known costs: batches of plans, a baseline, Adam.

A task shows the policy a model with errors like a calibration's; its plans are judged by the true costs. So the policy
learns how far to trust a model, and which changes are worth a try; no device time is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optimizer.samplers.policy.features import Choices
from optimizer.samplers.policy.network import Weights, draw, gradient
from search_spaces.core.plan import Plan

_Array = NDArray[np.float64]
RATE, FIRST_MOMENT, SECOND_MOMENT = 0.01, 0.9, 0.99
BATCH, ENTROPY = 24, 0.1
_BEST, _MEAN = 0.25, 0.5


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTask:
    """A network on a device to learn on.

    Attributes:
        choices: the policy's view of it, by a model with errors.
        judge: returns the time of a plan (s); infinite for one that does not run.
    """

    choices: Choices
    judge: Callable[[Plan], float]


@dataclass(slots=True)
class Adam:
    """Gradient ascent with moments (Kingma and Ba 2015, algorithm 1)."""

    weights: Weights
    rate: float = RATE
    steps: int = 0
    first: list[_Array] = field(init=False)
    second: list[_Array] = field(init=False)

    def __post_init__(self) -> None:
        self.first = [np.zeros_like(a) for a in self.weights.arrays()]
        self.second = [np.zeros_like(a) for a in self.weights.arrays()]

    def step(self, towards: Weights) -> None:
        """Move the weights along a gradient."""
        self.steps += 1
        moved = []
        for i, (at, slope) in enumerate(zip(self.weights.arrays(), towards.arrays(), strict=True)):
            self.first[i] = FIRST_MOMENT * self.first[i] + (1 - FIRST_MOMENT) * slope
            self.second[i] = SECOND_MOMENT * self.second[i] + (1 - SECOND_MOMENT) * slope**2
            mean = self.first[i] / (1 - FIRST_MOMENT**self.steps)
            spread = np.sqrt(self.second[i] / (1 - SECOND_MOMENT**self.steps))
            moved.append(at + self.rate * mean / (spread + 1e-8))
        self.weights = Weights(*moved)


def pretrain(
    weights: Weights,
    tasks: Sequence[TrainingTask],
    batches: int,
    seed: int,
    report: Callable[[int, float, float], None] | None = None,
) -> Weights:
    """Return the weights after ``batches`` batches of plans, each on one of the training tasks in turn.

    Args:
        report: called with each batch's number, and the mean and the least time (s) of its plans that run.
    """
    rng = np.random.default_rng([seed, 78])
    adam = Adam(weights)
    for batch in range(batches):
        task = tasks[batch % len(tasks)]
        choices = task.choices
        logits = choices.prior + adam.weights.scores(choices.features)
        taken = draw(logits, choices, BATCH, rng)
        seconds = np.array([task.judge(choices.plan(which)) for which in taken])
        direction = gradient(logits, choices, taken, advantages(seconds) / BATCH, ENTROPY)
        adam.step(adam.weights.slopes(choices.features, direction))
        runs = seconds[np.isfinite(seconds)]
        if report is not None and len(runs):
            report(batch, float(runs.mean()), float(runs.min()))
    return adam.weights


def advantages(seconds: _Array) -> _Array:
    """Return how much better each plan is than the others, with extra weight on the best quarter; scale-free.

    Half is the deviation from the mean of the others, in standard deviations. The other half counts the best quarter
    alone, by how much better they are than the rest (risk-seeking policy gradient, Petersen et al. 2021), since the
    best of several draws is measured, not their mean: by the mean alone a policy learns to draw only the model's
    optimum. Logarithms make networks of different sizes comparable; a plan that does not run counts as twice the
    slowest.
    """
    runs = np.isfinite(seconds)
    if not runs.any():
        return np.zeros(len(seconds))
    logs = np.log(np.where(runs, seconds, 2.0 * seconds[runs].max()))
    usual = (logs.sum() - logs) / max(len(logs) - 1, 1) - logs
    best = np.maximum(np.quantile(logs, _BEST, method="higher") - logs, 0.0)
    found: _Array = _MEAN * _scaled(usual) + (1.0 - _MEAN) * _scaled(best)
    return found


def _scaled(values: _Array) -> _Array:
    spread = float(values.std())
    return values / spread if spread > 1e-9 else np.zeros(len(values))
