"""How quick predictions are: one plan, a batch of chains, all plans of VGG16 on three processors.

``pytest tests/benchmarks/test_cost_model.py --benchmark-only``
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from evaluators.cost_model.features import KERNELS
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.plans import PlanSimulator, all_chains, part_costs
from evaluators.cost_model.profile import ContentionProfile, CostProfile, LinkProfile, ProcessorProfile
from evaluators.cost_model.transfers import prices
from optimizer.exact.least import chain_costs
from optimizer.samplers.chains import ChainPricing, Chains
from optimizer.samplers.draws import Draws
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.zoo import draft
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer


def simulator(model: str) -> PlanSimulator:
    """Three processors that may run at once and slow each other."""
    names = ("cpu", "gpu", "npu")
    platform = Platform("three", tuple(Processor(n, n, {n: 1.0}, n) for n in names))  # type: ignore[arg-type]
    kernels = {name: KernelModel({"macs": 1e-11, "read": 1e-10, "weight": 1e-10, "written": 1e-10}) for name in KERNELS}
    profile = CostProfile(
        "three",
        {
            n: ProcessorProfile(kernels, 1e-6, (i + 1) * 1e-5, 1e-11, capacity_bytes=1 << 26)
            for i, n in enumerate(names)
        },
        tuple(LinkProfile(a, b, 2e-5, 1e-10) for a in names for b in names if a < b),
        tuple(ContentionProfile(a, b, 1.05, 1.3) for a in names for b in names if a != b),
    )
    graph = draft(model).graph()
    return PlanSimulator(graph, platform, prices(profile, graph, platform))


def pricing(one: PlanSimulator) -> tuple[ChainPricing, Draws]:
    """What prices chains in a search, and one draw of prices."""
    costs = chain_costs(one.platform, part_costs(one))
    processors, count = costs.operator_s.shape
    none, nowhere = np.zeros((1, processors, count)), np.zeros((1, count, processors, processors))
    draws = Draws(costs.operator_s[None], none, costs.overhead_s[None], nowhere, costs.transfer_s[None])
    return ChainPricing(one.graph, one.platform), draws


def four_parts(one: PlanSimulator, count: int = 1 << 16) -> Chains:
    rng = np.random.default_rng(0)
    operators = len(one.graph.operators)
    cuts = np.sort(np.stack([rng.choice(operators - 1, 3, replace=False) + 1 for _ in range(count)]), axis=1)
    return chains_of(cuts, rng.integers(0, 3, (count, 4)), operators)


def chains_of(cuts: Any, processors: Any, operators: int) -> Chains:
    edge = np.zeros((len(processors), 1), np.int64)
    return Chains(np.hstack([edge, cuts, edge + operators]), processors)


@pytest.mark.parametrize(("model", "most_s"), [("vgg16", 1e-4), ("resnet50", 1e-4)])
def test_one_plan(benchmark: BenchmarkFixture, model: str, most_s: float) -> None:
    """At most 100 µs, for plans whose stages have not been seen before in this combination."""
    one = simulator(model)
    count = len(one.graph.operators)
    plan = chain_plan(one.graph, (count // 4, count // 2, 3 * count // 4), ["cpu", "gpu", "npu", "cpu"])
    benchmark(one.latency_s, plan)
    assert benchmark.stats.stats.median < most_s  # type: ignore[union-attr]


def test_one_plan_of_every_layer(benchmark: BenchmarkFixture) -> None:
    """VGG16 in 22 stages."""
    one = simulator("vgg16")
    count = len(one.graph.operators)
    plan = chain_plan(one.graph, every_layer(one.graph), [("cpu", "gpu", "npu")[i % 3] for i in range(count)])
    benchmark(one.latency_s, plan)
    assert benchmark.stats.stats.median < 1e-4  # type: ignore[union-attr]


@pytest.mark.parametrize("model", ["vgg16", "squeezenet1_1", "resnet50"])
def test_a_batch_of_chains(benchmark: BenchmarkFixture, model: str) -> None:
    """At least 200,000 plans of four parts a second."""
    one = simulator(model)
    (batch, draws), chains = pricing(one), four_parts(one)
    benchmark(batch.latency_s, chains, draws)
    rate = len(chains) / benchmark.stats.stats.median  # type: ignore[union-attr]
    benchmark.extra_info["plans_per_s"] = round(rate)
    assert rate > 200_000


def test_all_plans_of_vgg16(benchmark: BenchmarkFixture) -> None:
    """K up to 4 on three processors in less than 2 s."""
    one = simulator("vgg16")

    def enumerate_all() -> tuple[int, float]:
        batch, draws = pricing(one)
        count, best = 0, np.inf
        for cuts, processors in all_chains(len(one.graph.operators), one.platform, 4):
            chains = chains_of(cuts, processors, len(one.graph.operators))
            found = batch.latency_s(chains, draws)
            count, best = count + len(chains), min(best, float(found.min()))
        return count, best

    count, best = benchmark(enumerate_all)
    assert count == 3 + 21 * 9 + 210 * 27 + 1330 * 81
    assert np.isfinite(best)
    assert benchmark.stats.stats.median < 2.0  # type: ignore[union-attr]
