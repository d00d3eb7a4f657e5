"""The front of a cost model beside all plans."""

from __future__ import annotations

import numpy as np
import pytest

from tests.optimizer.study.test_objectives import POWERS, study

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_front_of_a_cost_model_is_the_front_of_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--objective", "latency", "--objective", "energy", *POWERS, "--max-stages", "2"]
    found = study(capsys, *words, "--budget", "60", "--out", "auto")
    front = [tuple(each["values"].values()) for each in found["front"]["plans"]]
    everything = study(capsys, *words, "--sampler", "brute-force", "--budget", "1000", "--out", "all")
    every = [tuple(each["values"].values()) for each in everything["front"]["plans"]]
    assert everything["space"]["exhausted"]
    # Of plans that the model cannot tell apart one stands for the others, so the two fronts need not be the same.
    reach = np.array(every).max(axis=0) - np.array(every).min(axis=0)
    for one, other in ((front, every), (every, front)):
        for values in one:
            assert min(np.max(np.abs(np.subtract(values, v)) / reach) for v in other) <= 0.2
