"""Branches on concurrent processors: outputs are those of the whole model, bit for bit, whatever runs where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert.processors import usable_cores
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.model.branch_profile import branch_profile
from optimizer.model.profile import Profiler, profile
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.models.litert_loading import agrees

pytestmark = [
    pytest.mark.litert,
    pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores"),
]
NAMES = [f"cpu{core}" for core in usable_cores()[:2]]


@pytest.fixture(scope="module")
def platform() -> Platform:
    return Platform("two cores", tuple(LitertEvaluator().processor(name) for name in NAMES))


@pytest.fixture(scope="module")
def session(cache_folder: Path, platform: Platform) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(platform) as opened:
        yield opened


def side_by_side(space: SegmentSpace) -> Plan:
    """Every segment's runs in turns on the two processors."""
    on = [NAMES[0]] * len(space.graph.operators)
    for segment in space.branching:
        for number, run in enumerate(segment.runs):
            for operator in run:
                on[operator] = NAMES[number % 2]
    return space.plan(space.placed(on))


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet@0.25", "inception_v3@0.25", "resnet18@0.25"])
def test_groups_of_models_run_side_by_side_and_compute_the_same(
    session: LitertSession, platform: Platform, name: str
) -> None:
    graph = load(name)
    space = SegmentSpace(graph, platform, splits=False)
    agrees(session, graph, side_by_side(space))
    rng = np.random.default_rng(0)
    for _ in range(3):
        on = [str(name) for name in rng.choice(NAMES, len(graph.operators))]
        agrees(session, graph, space.plan(space.placed(on)))


def test_a_plan_of_branches_is_deployed_and_runs_without_us(
    session: LitertSession, squeezenet: Graph, platform: Platform, tmp_path: Path
) -> None:
    plan = side_by_side(SegmentSpace(squeezenet, platform, splits=False))
    assert session.deploy(tmp_path, squeezenet, plan).identical
    with PlanRunner(tmp_path / "plan.json") as runner:
        first = runner.run_seeded()
        runner.measure(5)
        again = runner.run_seeded()
    assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.timing
def test_runs_and_joins_are_timed_on_the_device(session: LitertSession, squeezenet: Graph, platform: Platform) -> None:
    space = SegmentSpace(squeezenet, platform, splits=False)
    of = Profiler(session, squeezenet, platform)
    known = profile(of)
    found = branch_profile(of, space, known)
    (like,) = found.whole_s
    total = sum(found.operator_s[like]) + found.overhead_s[like]
    assert total == pytest.approx(known.whole_s[like])
    assert 0 <= found.transfer_s[f"{like}|{like}"] < known.whole_s[like]
