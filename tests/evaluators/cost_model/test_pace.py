"""A machine whose speed drifts while many models are visited in turns."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.fitting import slowness, usual_times

PASSES = 9


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.3), st.floats(0.0, 0.02))
def test_what_a_drifting_machine_does_to_all_is_told_from_what_models_take(
    seed: int, swing: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    models = [f"m{i}" for i in range(30)]
    true_s = dict(zip(models, np.exp(rng.uniform(-9.0, -2.0, len(models))), strict=True))
    visits = [str(m) for _ in range(PASSES) for m in rng.permutation(models)]
    drift = swing * np.sin(np.linspace(0.0, 6.0, len(visits)))
    seconds = np.array([true_s[m] for m in visits]) * np.exp(drift + noise * rng.standard_normal(len(visits)))
    slower = slowness(visits, list(seconds))
    found = np.array(
        [
            usual_times([[s] for s in seconds[where]], slower[where])[0]
            for where in (np.array(visits) == m for m in models)
        ]
    )
    ratio = found / np.array(list(true_s.values()))
    assert np.allclose(ratio / np.median(ratio), 1.0, atol=4.0 * noise + 0.04 * swing + 1e-6)


def test_one_visit_is_at_the_usual_pace() -> None:
    assert slowness(["one"], [1.0]).tolist() == [0.0]
    assert usual_times([[1.0, 2.0]], np.zeros(1)).tolist() == [1.0, 2.0]


def test_visits_that_were_disturbed_do_not_count() -> None:
    rows = [[1.0, 2.0], [9.0, 2.0], [1.0, 2.2], [30.0, 40.0]]
    assert usual_times(rows, np.zeros(4)).tolist() == [1.0, 2.1]
    assert usual_times(rows, np.log([1.0, 10.0, 1.0, 1.0])).tolist() == [0.95, 1.1]
