"""Studies in the space of branches: the procedure of seed 003, the joint optimum, and a study from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evaluators.schedule import Event, Timeline
from optimizer.exact.chain_costs import ChainCosts
from optimizer.model.baselines import SEED_003, SIDE_BY_SIDE
from optimizer.model.branch_greedy import branch_greedy
from optimizer.model.segments import segment_baselines, segment_estimate, segment_price, waits_s
from optimizer.study.config import StudyConfig, most_stages
from optimizer.study.course import run_study
from search_spaces.core.errors import UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.segments import segments_of
from search_spaces.spaces.space import in_space
from tests.search_spaces.spaces.test_branches import Recipe, built, network, recipes
from tests.search_spaces.spaces.test_segments import CORES
from tests.support.sentences import fails
from tests.support.short_studies import Quiet
from tests.support.strategies import one_core

FOUR = network(("in", "x"), *(("x", f"b{i}") for i in range(4)), *((f"b{i}", "y") for i in range(4)), ("y", "out"))
CPU_NPU = Platform(
    "board", (Processor("cpu", "cpu", {"cpu": 1.0}, "cpu"), Processor("npu", "npu", {"npu": 1.0}, "npu"))
)


def costs(platform: Platform, operator_s: list[list[float]], stage_s: float = 0.0, hand_s: float = 0.0) -> ChainCosts:
    processors, count = len(platform.processors), len(operator_s[0])
    between = np.where(np.eye(processors) > 0, 0.0, hand_s)
    table = np.broadcast_to(between, (count, processors, processors))
    return ChainCosts(platform, np.array(operator_s), np.full(processors, stage_s), table)


def chosen(graph: Graph, table: ChainCosts, main: int = 0) -> list[int]:
    return branch_greedy(BranchRuns.of(graph), table, main)


def test_the_seed_gives_one_branch_a_processor_and_the_rest_the_other() -> None:
    # 3 + 3 | 2 + 2 would take 5, but the procedure knows only one branch against three.
    assert chosen(FOUR, costs(CORES, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 2)) == [0, 1, 0, 0, 0, 0]
    assert chosen(FOUR, costs(CORES, [[1.0, 9.0, 2.0, 2.0, 1.0, 1.0]] * 2)) == [0, 1, 0, 0, 0, 0]


def test_the_seed_runs_a_group_in_sequence_where_that_is_faster() -> None:
    assert chosen(FOUR, costs(CORES, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 2, hand_s=4.0)) == [0] * 6
    assert chosen(FOUR, costs(CORES, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 2, stage_s=1.6)) == [0] * 6
    quick = [1.0, 3.0, 3.0, 2.0, 2.0, 1.0]
    assert chosen(FOUR, costs(CPU_NPU, [[11.0] * 6, quick]), main=1) == [1] * 6
    assert sum(chosen(FOUR, costs(CPU_NPU, [[7.5] * 6, quick]), main=1)) == 5


def test_with_enough_processors_each_branch_gets_one() -> None:
    platform = Platform("four", tuple(one_core(i) for i in range(4)))
    assert sorted(chosen(FOUR, costs(platform, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 4))[1:5]) == [0, 1, 2, 3]


@st.composite
def problems(draw: st.DrawFn) -> tuple[SegmentSpace, ChainCosts]:
    recipe: Recipe = draw(recipes())
    graph, _ = built(recipe)
    assume(any(segment.runs for segment in segments_of(graph)) and len(BranchRuns.of(graph).runs) <= 9)
    platform = draw(st.sampled_from((CORES, CPU_NPU)))
    times = st.lists(st.integers(1, 9).map(float), min_size=len(graph.operators), max_size=len(graph.operators))
    first = draw(times)
    second = first if platform is CORES else draw(times)
    stage_s, hand_s = draw(st.sampled_from((0.0, 0.5, 3.0))), draw(st.sampled_from((0.0, 0.5, 3.0)))
    return SegmentSpace(graph, platform, splits=False), costs(platform, [first, second], stage_s, hand_s)


@given(problems())
@settings(max_examples=25)
def test_the_joint_plan_is_no_worse_than_the_seeds_and_no_plan_is_below_the_bound(
    drawn: tuple[SegmentSpace, ChainCosts],
) -> None:
    space, table = drawn
    graph, platform = space.graph, table.platform
    estimate = segment_estimate(graph, table, space)
    price = segment_price(space, table)
    best_s = price(estimate.optima[0])
    for baseline in segment_baselines(graph, platform, space, table, platform.processors[0].name):
        if in_space(space, baseline.plan):  # the best cuts are not where they cut a module twice
            assert best_s <= price(baseline.plan) * (1 + 1e-9)
    assert estimate.bounds.space_s <= best_s * (1 + 1e-9)
    if space.cardinality() <= 256:
        least_s = min(price(space.plan_at(i)) for i in range(space.cardinality()))
        assert best_s == pytest.approx(least_s)


def test_the_seed_is_a_baseline_by_name() -> None:
    space = SegmentSpace(FOUR, CORES, splits=False)
    table = costs(CORES, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 2, stage_s=0.1)
    found = {b.name: b.plan for b in segment_baselines(FOUR, CORES, space, table, "cpu0")}
    assert list(found)[:2] == ["whole on cpu0", SEED_003]
    assert len(found[SEED_003].stages) == 4


def test_a_baseline_that_is_asked_for_keeps_its_name_where_another_is_the_same_plan() -> None:
    space = SegmentSpace(FOUR, CORES, splits=False)
    table = costs(CORES, [[1.0, 3.0, 3.0, 2.0, 2.0, 1.0]] * 2, stage_s=0.0)
    usual = {b.name: b.plan for b in segment_baselines(FOUR, CORES, space, table, "cpu0")}
    asked = {b.name: b.plan for b in segment_baselines(FOUR, CORES, space, table, "cpu0", [SIDE_BY_SIDE, SEED_003])}
    assert SIDE_BY_SIDE not in usual
    assert asked == usual | {SIDE_BY_SIDE: usual[SEED_003]}


def test_waits_are_those_for_other_processors() -> None:
    graph = network(("in", "x"), ("x", "a"), ("x", "b"), ("a", "y"), ("b", "y"), ("y", "out"))
    processors = ("cpu0", "cpu0", "cpu1", "cpu0")
    plan = Plan(graph.digest, tuple(Stage((i,), processor) for i, processor in enumerate(processors)))
    events = (Event(0, "cpu0", 0, 10), Event(1, "cpu0", 10, 15), Event(2, "cpu1", 13, 20), Event(3, "cpu0", 24, 30))
    assert waits_s(graph, plan, Timeline(events)) == [3, 4]
    assert waits_s(graph, plan, None) == []


def test_a_study_of_branches_from_end_to_end(tmp_path: Path) -> None:
    config = StudyConfig(
        model="squeezenet1_1", budget=12, evaluator="synthetic", allow="cuts,branches", out=tmp_path / "run"
    )
    assert most_stages(config, 39) == 39
    result = run_study(config, Quiet(), ["optimize"])
    assert SEED_003 in result.baselines
    assert result.best is not None
    document = result.to_json()
    assert document["unique_plans"] == 12
    assert (tmp_path / "run" / "result.json").exists()
    again = run_study(config, Quiet(), ["optimize"])
    assert again.best == result.best


def test_wrong_input_is_reported_in_a_line(tmp_path: Path) -> None:
    for model, processors in (("mobilenet_v1", None), ("squeezenet1_1", ("cpu0",))):
        config = StudyConfig(
            model=model,
            budget=1,
            evaluator="synthetic",
            allow="cuts,branches",
            processors=processors,
            out=tmp_path / model,
        )
        with fails(UsageError):
            run_study(config, Quiet(), ["optimize"])
