"""Training of a policy: batches of plans, a baseline, Adam; on a model of the costs it takes no device time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optimizer.samplers.policy.features import Features
from optimizer.samplers.policy.network import Weights, gradient, roll_out

_Array = NDArray[np.float64]
Chain = tuple[Sequence[int], Sequence[int]]
RATE, FIRST_MOMENT, SECOND_MOMENT = 0.01, 0.9, 0.99
BATCH, ENTROPY = 24, 0.003


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A model on a platform to learn on.

    Attributes:
        seen: what the policy sees of it.
        predict: seconds that chains, given as cuts and lanes, take, shape ``(B,)``; infinite for what does not run.
    """

    seen: Features
    predict: Callable[[Sequence[Chain]], _Array]


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
        """Move the weights."""
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
    lessons: Sequence[Lesson],
    batches: int,
    seed: int,
    told: Callable[[int, float, float], None] | None = None,
) -> Weights:
    """Return the weights after so many batches of plans, each on one of the lessons in turn.

    Args:
        told: gets the number of each batch, and the mean and the least latency of its plans that run, in seconds.
    """
    rng = np.random.default_rng([seed, 78])
    adam = Adam(weights)
    for batch in range(batches):
        lesson = lessons[batch % len(lessons)]
        rollout = roll_out(adam.weights, lesson.seen, BATCH, rng)
        seconds = lesson.predict(rollout.chains())
        adam.step(gradient(adam.weights, rollout, advantages(seconds), ENTROPY))
        runs = seconds[np.isfinite(seconds)]
        if told is not None and len(runs):
            told(batch, float(runs.mean()), float(runs.min()))
    return adam.weights


def advantages(seconds: _Array) -> _Array:
    """Return by how many standard deviations each plan is better than the batch, the baseline being the batch's mean.

    Logarithms make models of different sizes alike; what does not run counts as twice the slowest.
    """
    runs = np.isfinite(seconds)
    if not runs.any():
        return np.zeros(len(seconds))
    logs = np.log(np.where(runs, seconds, 2.0 * seconds[runs].max()))
    spread = float(logs.std())
    found: _Array = (logs.mean() - logs) / spread if spread > 1e-9 else np.zeros(len(logs))
    return found
