"""What the exact solver takes; VGG16's size is 22 operators, ResNet152's about 520."""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.exact.chain import ChainCosts, best_chains
from search_spaces.core.platform import Platform, Processor

_LIMIT_S = 0.05  # for 22 operators


@pytest.mark.parametrize("alike", [1, 8], ids=["3 processors", "3 classes, 10 processors"])
@pytest.mark.parametrize("operators", [22, 520])
def test_16_best_chains_of_up_to_4_parts(benchmark: BenchmarkFixture, operators: int, alike: int) -> None:
    likes = ["cpu", *["core"] * alike, "gpu"]
    platform = Platform("p", tuple(Processor(f"p{i}", "cpu", {}, like) for i, like in enumerate(likes)))
    rng = np.random.default_rng(0)
    processors = len(likes)
    costs = ChainCosts(
        platform,
        rng.gamma(1.0, 5e-3, (processors, operators)),
        np.full(processors, 1e-4),
        rng.gamma(1.0, 5e-4, (operators, processors, processors)),
    )
    found = benchmark(best_chains, costs, 4, 16)
    assert len(found) == 16
    if operators == 22:
        assert benchmark.stats is not None
        assert benchmark.stats.stats.median < _LIMIT_S
