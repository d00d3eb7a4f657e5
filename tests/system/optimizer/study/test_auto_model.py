"""Where measuring gives what the cost model says, ``auto`` has found the best plan at once, and keeps to it."""

from __future__ import annotations

import logging

import pytest

from tests.benchmarks.samplers import PHONES, ZOO, zoo_study


@pytest.mark.parametrize("device", PHONES)
@pytest.mark.parametrize("model", ZOO)
def test_its_gap_is_0(model: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # what the profile cannot vouch for is no matter here
    curve = zoo_study(model, device).run("auto", seed=0, budget=5)
    assert curve.looked[-1] == pytest.approx(0.0, abs=1e-9)
    assert curve.believed[-1] == pytest.approx(0.0, abs=1e-9)
