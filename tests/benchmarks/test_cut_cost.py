"""What cutting costs where nothing is gained by it: all parts on one core, against the whole model, interleaved."""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from evaluators.litert.session import LitertEvaluator
from evaluators.measurement.final import FinalPolicy, compare
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer, layer_length


@pytest.mark.parametrize(
    ("model", "parts", "limit"),
    [("vgg16", 4, 0.005), ("vgg16", None, 0.02), ("mobilenet_v1", 8, 0.02), ("mobilenet_v1", None, 0.07)],
)
def test_cutting_on_one_processor_costs_little(
    benchmark: BenchmarkFixture, model: str, parts: int | None, limit: float
) -> None:
    graph, evaluator = load(model), LitertEvaluator()
    cuts = layer_length(graph, parts) if parts else every_layer(graph)
    processor = evaluator.platform().processors[-1].name
    whole, cut = chain_plan(graph, (), [processor]), chain_plan(graph, cuts, [processor] * (len(cuts) + 1))
    with evaluator.prepare(evaluator.platform()) as session:
        found = benchmark.pedantic(  # type: ignore[no-untyped-call]
            lambda: compare(
                lambda: session.load(graph, whole, fresh=True),
                lambda: session.load(graph, cut, fresh=True),
                FinalPolicy(precision=0.002, max_s=20.0),
                np.random.default_rng(0),
            ),
            rounds=1,
        )
    cost, interval = 1 / found.ratio.value - 1, sorted(1 / x - 1 for x in found.ratio.ci95)
    benchmark.extra_info |= {"cost": cost, "interval": interval, "limit": limit}
    # The limit must lie within what the measurement leaves open, or above it.
    assert interval[0] <= limit


def test_loading_a_plan_whose_weights_are_packed(benchmark: BenchmarkFixture) -> None:
    """At most 20 ms for VGG16 in four parts."""
    graph, evaluator = load("vgg16"), LitertEvaluator()
    processor = evaluator.platform().processors[-1].name
    plan = chain_plan(graph, layer_length(graph, 4), [processor] * 4)
    with evaluator.prepare(evaluator.platform()) as session:
        session.load(graph, plan).close()
        benchmark.pedantic(lambda: session.load(graph, plan, fresh=True).close(), rounds=20)  # type: ignore[no-untyped-call]
    assert benchmark.stats is not None
    assert benchmark.stats.stats.median <= 0.02
