"""Branches on concurrent lanes: whatever the lanes of the runs, outputs are those of the whole model, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert.processors import usable_cores
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.model.branch_profile import branch_profile
from optimizer.model.profile import profile
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
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


def side_by_side(space: BranchSpace) -> Plan:
    """Every group's branches in turns on the two lanes, groups within groups too."""
    lanes = [NAMES[0]] * len(space.runs.runs)
    for group in space.runs.groups:
        for number, branch in enumerate(space.runs.branches(group)):
            for place, run in enumerate(branch):
                lanes[run] = NAMES[(number + place) % 2]
    return space.plan(lanes)


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet@0.25", "inception_v3@0.25", "resnet18@0.25"])
def test_groups_of_models_run_side_by_side_and_compute_the_same(
    session: LitertSession, platform: Platform, name: str
) -> None:
    graph = load(name)
    space = BranchSpace(graph, platform, len(graph.operators))
    agrees(session, graph, side_by_side(space))
    rng = np.random.default_rng(0)
    for _ in range(3):
        agrees(session, graph, space.plan([str(lane) for lane in rng.choice(NAMES, len(space.runs.runs))]))


def test_a_plan_of_branches_is_deployed_and_runs_without_us(
    session: LitertSession, squeezenet: Graph, platform: Platform, tmp_path: Path
) -> None:
    plan = side_by_side(BranchSpace(squeezenet, platform, len(squeezenet.operators)))
    assert session.deploy(tmp_path, squeezenet, plan).identical
    with PlanRunner(tmp_path / "plan.json") as runner:
        first = runner.run_seeded()
        runner.measure(5)
        again = runner.run_seeded()
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_runs_and_joins_are_timed_on_the_device(session: LitertSession, squeezenet: Graph, platform: Platform) -> None:
    space = BranchSpace(squeezenet, platform, len(squeezenet.operators))
    known = profile(session, squeezenet, platform)
    found = branch_profile(session, squeezenet, platform, space, known, lambda _: None)
    (like,) = found.whole_s
    total = sum(found.operator_s[like]) + found.overhead_s[like]
    assert total == pytest.approx(known.whole_s[like])
    assert 0 <= found.hand_over_s[f"{like}|{like}"] < known.whole_s[like]
