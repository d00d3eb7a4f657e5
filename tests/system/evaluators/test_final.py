"""Error rates of the final over many simulated comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evaluators.measurement.final import FinalComparison, compare
from evaluators.testing import Noise
from tests.evaluators.measurement.test_final import POLICY, QUIET, ROUGH, loader


def pairs(times: int, latency_s: float, difference: float, noise: Noise) -> list[tuple[float, float, float]]:
    rng = np.random.default_rng(7)
    loads = loader(latency_s * (1 + difference), noise, rng), loader(latency_s, noise, rng)
    found = [compare(*loads, POLICY, rng) for _ in range(times)]
    return [(c.ratio.value, *c.ratio.ci95) for c in found]


@pytest.mark.parametrize("noise", [QUIET, ROUGH], ids=["quiet", "rough"])
@pytest.mark.parametrize("latency_s", [0.003, 0.02, 0.13])
def test_equal_plans_are_called_equal(latency_s: float, noise: Noise) -> None:
    found = pairs(60, latency_s, 0.0, noise)
    called = sum(not low <= 1.0 <= high for _, low, high in found)
    assert called <= 8, "5 % of 60 are 3, and more than 8 have a probability of 0.4 %"


@pytest.mark.parametrize(("difference", "share"), [(0.01, 0.5), (0.02, 0.9), (0.05, 1.0)])
def test_true_differences_are_found_and_covered(difference: float, share: float) -> None:
    found = np.array(pairs(60, 0.02, difference, ROUGH))
    assert np.mean(found[:, 1] > 1.0) >= share
    assert not (found[:, 2] < 1.0).any(), "never the wrong way round"
    assert np.mean((found[:, 1] <= 1 + difference) & (found[:, 2] >= 1 + difference)) >= 0.87


@pytest.mark.parametrize("spread", [0.0, 0.03, 0.15])
def test_the_best_of_many_is_kept_and_chosen(spread: float) -> None:
    rng = np.random.default_rng(3)
    regrets, left = [], 0
    for _ in range(15):
        truth = rng.permutation(np.linspace(0.0, spread, 12))
        found = FinalComparison([loader(0.01 * math.exp(x), ROUGH, rng) for x in truth], POLICY, rng).run()
        chosen = found.choose([1] * 12, 0.01)
        regrets.append(truth[chosen])
        left += int(truth.argmin()) in found.racing
        assert all(found.ratio(chosen, j).low <= 1.0 for j in found.measured if j != chosen), "no row contradicts it"
    assert np.mean(regrets) <= 0.004
    assert max(regrets) <= 0.02
    assert left >= 14 or not spread, "of equal plans any may be left"
