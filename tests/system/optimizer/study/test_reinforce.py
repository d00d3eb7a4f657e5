"""What policies learn: from a model, and from other models."""

from __future__ import annotations

import numpy as np

from optimizer.samplers.policy.network import Weights, roll_out
from optimizer.samplers.policy.reinforce import lesson
from optimizer.samplers.policy.training import pretrain
from tests.benchmarks.instances import instance
from tests.optimizer.samplers.test_reinforce import OTHER, SMALL, problem


def test_it_learns_from_the_model_at_no_device_time() -> None:
    at_first: list[float] = []
    later: list[float] = []
    task = lesson(problem(SMALL))
    begun = Weights.new(0)
    learned = pretrain(begun, [task], 40, 0, lambda batch, s, _: (at_first if batch < 5 else later).append(s))
    assert np.mean(later[-5:]) < 0.9 * np.mean(at_first)
    again = pretrain(begun, [task], 40, 0)
    assert all(np.array_equal(a, b) for a, b in zip(learned.arrays(), again.arrays(), strict=True))


def test_what_was_learned_on_other_models_helps_on_an_unseen_one() -> None:
    learned = pretrain(Weights.new(0), [lesson(problem(instance(n))) for n in (1, 10, 12)], 60, 0)
    task = lesson(problem(OTHER))
    took = [
        float(task.predict(roll_out(weights, task.seen, 200, np.random.default_rng(1)).chains()).mean())
        for weights in (Weights.new(0), learned)
    ]
    assert took[1] < 0.95 * took[0]
