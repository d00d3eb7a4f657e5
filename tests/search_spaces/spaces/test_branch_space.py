"""The space of branches: laws on drawn graphs, the models of seed 003, and what cannot be a space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evaluators.schedule import Law, Task, run_tasks
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.zoo import draft
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.branch_space import BranchSpace
from search_spaces.spaces.branches import branch_groups
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import make_space
from tests.search_spaces.spaces.test_branches import Recipe, built, network, recipes
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, graphs, one_core

CORES = Platform("two cores", (one_core(0), one_core(1)))
MIXED = Platform("mixed", (one_core(0), one_core(1), Processor("npu", "npu", {"npu": 1.0}, "npu")))
MOST = 10_000


def lanes_for(draw: st.DrawFn, space: BranchSpace, platform: Platform) -> list[str]:
    count = len(space.runs.runs)
    return draw(st.lists(st.sampled_from([p.name for p in platform.processors]), min_size=count, max_size=count))


@st.composite
def spaces(draw: st.DrawFn) -> tuple[BranchSpace, Platform, list[str]]:
    """A space, its platform, and a lane for each of its runs."""
    graph = built(draw(recipes()), shortcuts=draw(st.booleans()))[0] if draw(st.booleans()) else draw(graphs())
    assume(branch_groups(graph))
    platform = draw(st.sampled_from((CORES, MIXED)))
    space = BranchSpace(graph, platform, MOST)
    return space, platform, lanes_for(draw, space, platform)


def seconds(graph: Graph, plan: Plan, platform: Platform, operator_s: list[float]) -> float:
    """Return when the last stage of a plan ends, where only operators take time."""
    lane = {p.name: i for i, p in enumerate(platform.processors)}
    place = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
    tasks = [
        Task(
            lane[stage.processor],
            sum(operator_s[o] for o in stage.operators),
            tuple((i, 0.0) for i in {place[b] for o in stage.operators for b in graph.predecessors(o)} - {index}),
        )
        for index, stage in enumerate(plan.stages)
    ]
    return max(end for _, end in run_tasks(tasks, Law.of(platform)))


@given(st.one_of(graphs(max_operators=10), recipes().map(lambda r: built(r)[0])))
def test_runs_hold_every_operator_once_and_read_only_what_is_before(graph: Graph) -> None:
    runs = BranchRuns.of(graph)
    assert sorted(o for run in runs.runs for o in run) == list(range(len(graph.operators)))
    assert all(before < index for index, reads in enumerate(runs.reads) for before in reads)
    runs.as_graph()
    for group in runs.groups:
        for branch, members in zip(runs.branches(group), group.branches, strict=True):
            assert sorted(o for r in branch for o in runs.runs[r]) == list(members.members())


@given(spaces())
def test_every_choice_of_lanes_is_a_canonical_plan_that_runs_and_is_found_again(
    drawn: tuple[BranchSpace, Platform, list[str]],
) -> None:
    space, platform, lanes = drawn
    plan = space.plan(lanes)
    plan.validate(space.runs.graph, platform)
    assert plan == canonical(plan, space.runs.graph, platform)
    assert space.decode(space.encode(plan)) == plan
    assert space.plan(space.lanes(plan)) == plan


@given(spaces(), st.data())
def test_joining_runs_to_stages_delays_nothing(
    drawn: tuple[BranchSpace, Platform, list[str]], data: st.DataObject
) -> None:
    space, platform, lanes = drawn
    graph = space.runs.graph
    times = st.sampled_from((0.0, 1.0, 2.0, 5.0))
    operator_s = data.draw(st.lists(times, min_size=len(graph.operators), max_size=len(graph.operators)))
    apart = Plan(graph.digest, tuple(Stage(run, lane) for run, lane in zip(space.runs.runs, lanes, strict=True)))
    joined = Plan(graph.digest, tuple(space.runs.stages(lanes)))
    assert seconds(graph, joined, platform, operator_s) == seconds(graph, apart, platform, operator_s)


@given(spaces())
def test_on_one_lane_the_model_is_whole(drawn: tuple[BranchSpace, Platform, list[str]]) -> None:
    space, platform, lanes = drawn
    graph = space.runs.graph
    whole = canonical(chain_plan(graph, (), lanes[:1]), graph, platform)
    assert space.plan([lanes[0]] * len(lanes)) == whole
    assert space.decode(space.encode(whole)) == whole


@given(recipes(), st.booleans())
def test_numbers_name_every_plan_once(recipe: Recipe, mixed: bool) -> None:
    graph, groups = built(recipe)
    assume(groups)
    space = BranchSpace(graph, MIXED if mixed else CORES, MOST)
    assume(space.cardinality() <= 300)
    plans = {space.plan_at(i) for i in range(space.cardinality())}
    assert len(plans) == space.cardinality()
    for index in (-1, space.cardinality()):
        with pytest.raises(IndexError):
            space.plan_at(index)


@given(spaces(), st.integers(0, 2**32))
def test_neighbours_are_plans_of_the_space(drawn: tuple[BranchSpace, Platform, list[str]], seed: int) -> None:
    space, _, lanes = drawn
    found = space.neighbour(space.plan(lanes), np.random.default_rng(seed))
    assert space.decode(space.encode(found)) == found


def test_squeezenet_side_by_side_has_three_stages_for_each_group() -> None:
    graph = draft("squeezenet1_1").graph()
    space = make_space("branches", graph, CORES, MOST)
    assert isinstance(space, BranchSpace)
    lanes = ["cpu0"] * len(space.runs.runs)
    assert len(space.plan(lanes).stages) == 1
    groups = space.runs.groups
    for group in groups:
        lanes[space.runs.branches(group)[0][0]] = "cpu1"
    plan = space.plan(lanes)
    assert [stage.processor for stage in plan.stages] == ["cpu0", "cpu1", "cpu0"] * 8 + ["cpu0"]
    group = groups[0]
    assert group.entry is not None
    assert plan.stages[0].operators[-1] == group.entry
    assert plan.stages[3].operators[0] == group.exit


def test_branches_that_share_a_lane_are_one_stage() -> None:
    graph = network(("in", "x"), *(("x", f"b{i}") for i in range(4)), *((f"b{i}", "y") for i in range(4)), ("y", "out"))
    space = BranchSpace(graph, CORES, MOST)
    plan = space.plan(["cpu0", "cpu0", "cpu1", "cpu1", "cpu0", "cpu0"])
    assert [(s.operators, s.processor) for s in plan.stages] == [
        ((0,), "cpu0"), ((1, 4), "cpu0"), ((2, 3), "cpu1"), ((5,), "cpu0"),
    ]  # fmt: skip


def test_what_is_no_plan_of_the_space() -> None:
    graph = network(("in", "x"), ("x", "a"), ("a", "b"), ("x", "c"), ("b", "y"), ("c", "y"), ("y", "out"))
    space = BranchSpace(graph, CORES, MOST)
    with fails(PlanError):
        space.encode(chain_plan(graph, (2,), ("cpu0", "cpu1")))
    with fails(PlanError):
        space.encode(chain_plan(graph, (1,), ("cpu0", "cpu0")))


@pytest.mark.parametrize(
    ("graph", "platform", "most"),
    [
        (chain_graph(3), CORES, MOST),
        (network(("x", "a"), ("x", "b"), ("a", "y"), ("b", "y")), CORES.restrict(["cpu1"]), MOST),
        (
            network(("x", "a"), ("x", "b"), ("a", "y"), ("b", "y")),
            Platform("p", (one_core(0), Processor("cpu", "cpu", {"core0": 1.0}, "cpu"))),
            MOST,
        ),
        (network(("x", "a"), ("x", "b"), ("a", "y"), ("b", "y")), CORES, 3),
    ],
    ids=["no branches", "one processor", "one at a time", "too few stages"],
)
def test_what_cannot_be_a_space_is_told(graph: Graph, platform: Platform, most: int) -> None:
    with fails(UsageError):
        BranchSpace(graph, platform, most)
