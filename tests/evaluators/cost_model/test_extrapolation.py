"""What a profile cannot vouch for is told in one line, once."""

from __future__ import annotations

import math

from evaluators.cost_model.profile import Concern, Reported, extrapolation_warning


def far(kernel: str, beyond: float, *operators: int) -> Concern:
    return Concern(operators, kernel, beyond)


def test_all_processors_share_a_line() -> None:
    reported: Reported = set()
    concerns = {
        "gpu": [far("mean", 8.0, 3), far("winograd", math.inf, 5)],
        "1large": [far("mean", 2.0, 3), far("conv", 26.24, 0, 1)],
        "1med": [far("mean", 2.0, 3), far("conv", 26.24, 0, 1)],
    }
    assert extrapolation_warning("phone", concerns, reported) == (
        "profile 'phone' extrapolates 4 operators; outside the range of its fit: conv (up to 26 times on "
        "1large, 1med), mean (up to 8 times); missing in its fit: winograd on gpu"
    )
    assert extrapolation_warning("phone", concerns, reported) is None
    assert extrapolation_warning("phone", {"gpu": [far("mean", 9.0, 7)], "1large": []}, reported) is None


def test_one_operator_and_many_processors() -> None:
    processors = {f"processor{i}": [far("softmax", math.inf, 7)] if i else [] for i in range(5)}
    assert extrapolation_warning("phone", processors, set()) == (
        "profile 'phone' extrapolates 1 operator; missing in its fit: softmax on 4 of 5 processors"
    )
    assert extrapolation_warning("phone", {"cpu": []}, set()) is None
    assert "up to 1,500 times" in (extrapolation_warning("phone", {"cpu": [far("mean", 1500.2, 7)]}, set()) or "")
