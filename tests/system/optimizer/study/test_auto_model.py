"""Where measuring gives what the cost model says, ``auto`` has found the best plan at once, and keeps to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer import optimize

PHONES = {"pixel4": ("gpu", "1large", "3med"), "mi8se": ("gpu", "2large", "6small"), "s10": ("gpu", "2large", "4small")}


@pytest.mark.parametrize("device", PHONES)
@pytest.mark.parametrize("model", ["vgg16", "squeezenet1_1", "googlenet", "resnet50", "mobilenet_v2"])
def test_its_gap_is_0(model: str, device: str, tmp_path: Path) -> None:
    found = optimize(
        model,
        budget=12,  # of which baselines take up to eight
        evaluator="cost-model",
        platform=Path(device),
        processors=PHONES[device],
        max_stages=3,
        out=tmp_path / "run",
    )
    assert found.bounds is not None
    assert found.bounds.proven
    # What is recommended may have fewer stages, where the profile cannot tell the two apart.
    assert found.history.ranking()[0].median_s == pytest.approx(found.bounds.space_s, rel=1e-9)
