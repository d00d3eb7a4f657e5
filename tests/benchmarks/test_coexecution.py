"""Co-execution: planning VGG16 from a profile in 1 s, and rewriting one of its operators without copying the others."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import Costed, SegmentModel
from optimizer.samplers.auto import Problem
from optimizer.samplers.segments import SegmentProposer
from search_spaces.core.intensity import operator_costs
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.zoo import draft
from search_spaces.rewrites.splits import Axis, Split, SplitGraph, split_operators
from search_spaces.spaces.branches import branch_groups
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.strategies import one_core

PLAN_S, GROUPS_S, REWRITE_NBYTES = 1.0, 0.1, 4 << 20


@pytest.mark.parametrize("uneven", [False, True], ids=["alike", "5 to 1"])
def test_planning_vgg16(benchmark: BenchmarkFixture, uneven: bool) -> None:
    """Under 1 s, from the graph on: where chains begin and end, along which axis, at which share, on which pair."""
    graph = draft("vgg16").graph()
    platform = Platform("two", (one_core(0), one_core(1)))
    work = np.array([max(float(c.macs), 1.0) for c in operator_costs(graph)])
    operator_s = np.tile(0.14 * work / work.sum(), (2, 1))
    operator_s[1] *= 5.0 if uneven else 1.0
    transfer_s = np.broadcast_to(np.where(np.eye(2) > 0, 0.0, 5e-6), (len(graph.operators), 2, 2))
    costs = ChainCosts(platform, operator_s, np.full(2, 1e-5), transfer_s)

    def plan() -> Costed:
        return SegmentModel(SegmentSpace(graph, platform), costs).best()

    found = benchmark(plan)
    benchmark.extra_info |= {"parts": len(found.parts), "speedup": float(operator_s[0].sum()) / found.cost_s}
    assert _median_s(benchmark) < PLAN_S


@pytest.mark.parametrize(("axis", "cut"), [("height", 112), ("channels", 32)])
def test_rewriting_one_operator_of_vgg16(benchmark: BenchmarkFixture, axis: Axis, cut: int) -> None:
    """Of 553 MB of weights nothing is copied: what is allocated meanwhile is below 4 MiB."""
    graph = load("vgg16")
    assert graph.source is not None

    def rewrite() -> SplitGraph:
        return split_operators(graph, [Split(1, 2, axis, (cut,))])

    rewrite()
    tracemalloc.start()
    kept = rewrite()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept.graph.operators) > len(graph.operators)
    benchmark.extra_info["most_nbytes"] = most
    assert most < REWRITE_NBYTES
    benchmark(rewrite)


def test_neighbours_of_a_plan(benchmark: BenchmarkFixture) -> None:
    """At least 20,000 plans with cuts, splits and branches a second, once their blocks have been priced."""
    graph = draft("googlenet").graph()
    platform = Platform("two", (one_core(0), one_core(1)))
    work = np.array([max(float(c.macs), 1.0) for c in operator_costs(graph)])
    transfer_s = np.broadcast_to(np.where(np.eye(2) > 0, 0.0, 5e-6), (len(work), 2, 2))
    costs = ChainCosts(platform, np.tile(0.14 * work / work.sum(), (2, 1)), np.full(2, 1e-5), transfer_s)
    space = SegmentSpace(graph, platform)
    proposer = SegmentProposer(Problem(graph, platform, space, costs), space, 0)
    blocks = proposer.best()

    count = sum(1 for _ in proposer.near(blocks))
    benchmark(lambda: sum(1 for _ in proposer.near(blocks)))
    benchmark.extra_info["plans_per_s"] = round(count / _median_s(benchmark))
    assert count / _median_s(benchmark) > 20_000


def test_groups_of_densenet121(benchmark: BenchmarkFixture) -> None:
    """Under 100 ms: layers that read all earlier ones are no branches."""
    graph = draft("densenet121").graph()
    assert benchmark(branch_groups, graph) == ()
    assert _median_s(benchmark) < GROUPS_S


def _median_s(benchmark: Any) -> float:
    """Return the median in seconds; the fixture's statistics have no types."""
    return float(benchmark.stats.stats.median)
