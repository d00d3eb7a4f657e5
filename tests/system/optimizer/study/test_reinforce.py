"""What policies learn from other networks and devices, and what a study teaches them."""

from __future__ import annotations

import numpy as np

from optimizer.samplers.policy.features import Choices
from optimizer.samplers.policy.network import Weights, draw
from optimizer.samplers.policy.reinforce import task_of
from optimizer.samplers.policy.training import TrainingTask, pretrain
from tests.benchmarks.instances import instance
from tests.optimizer.samplers.test_reinforce import OTHER, problem

UNSEEN = (OTHER, instance(25), instance(28), instance(31))


def test_what_was_learned_on_other_models_helps_on_unseen_ones() -> None:
    of = [instance(n) for n in (1, 10, 12, 4, 7, 13, 16, 19)]
    tasks = [TrainingTask(Choices(task_of(problem(each))), each.true_s) for each in of]
    learned, again = (pretrain(Weights.new(0), tasks, 240, 0) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(learned.arrays(), again.arrays(), strict=True))
    for each in UNSEEN:
        choices, took = Choices(task_of(problem(each))), []
        for weights in (Weights.new(0), learned):
            logits = choices.prior + weights.scores(choices.features)
            drawn = draw(logits, choices, 200, np.random.default_rng(1))
            took.append(np.array([each.true_s(choices.plan(which)) for which in drawn]))
        assert took[1].mean() < took[0].mean()
        assert took[1].reshape(-1, 10).min(axis=1).mean() < took[0].reshape(-1, 10).min(axis=1).mean()
