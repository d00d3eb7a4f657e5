"""What the exact methods take.

``pytest tests/benchmarks/test_exact.py --benchmark-only``
"""

from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from evaluators.cost_model.session import CostModelEvaluator
from optimizer.exact.chain import best_chains
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.least import chain_costs
from optimizer.model.segments import segment_estimate
from optimizer.study.config import parse_config
from optimizer.study.one_model import OneModel
from search_spaces.core.platform import Platform, Processor

_LIMIT_S = 0.05  # for 22 operators


@pytest.mark.parametrize("alike", [1, 8], ids=["3 processors", "3 classes, 10 processors"])
@pytest.mark.parametrize("operators", [22, 520])
def test_16_best_chains_of_up_to_4_parts(benchmark: BenchmarkFixture, operators: int, alike: int) -> None:
    """VGG16 has 22 operators, ResNet152 about 520."""
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


@pytest.mark.parametrize(("model", "most_s"), [("vgg16", 1.0), ("inception_v3", 10.0)])
def test_the_optimum_of_all_freedoms(benchmark: BenchmarkFixture, tmp_path: Path, model: str, most_s: float) -> None:
    """Cuts, branches and splits on a CPU and a GPU, with its bound."""
    words = {"model": model, "evaluator": "cost-model", "platform": "snapdragon855", "allow": "cuts,branches,splits"}
    subject = OneModel.read(parse_config(words | {"budget": "1"}), CostModelEvaluator())
    with subject.session(tmp_path) as session:
        costs = chain_costs(subject.platform, session.part_costs(subject.graph))
    found = benchmark(segment_estimate, subject.graph, costs, subject.space)
    assert found.bounds.space_s > 0.0
    assert benchmark.stats is not None
    assert benchmark.stats.stats.median < most_s
