"""Segments, and branches side by side in them: laws on drawn graphs, SqueezeNet, and what cannot be a space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna.distributions import IntDistribution

from evaluators.schedule import Law, Task, run_tasks
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Stage, canonical
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.zoo import draft
from search_spaces.spaces.branch_runs import BranchRuns
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import make_space
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.segments import gates, segments_of
from tests.search_spaces.spaces.test_branches import Recipe, built, network, recipes
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, graphs, one_core

CORES = Platform("two cores", (one_core(0), one_core(1)))
MIXED = Platform("mixed", (one_core(0), one_core(1), Processor("npu", "npu", {"npu": 1.0}, "npu")))
TWO_WAYS = network(("x", "a"), ("x", "b"), ("a", "y"), ("b", "y"))


@st.composite
def spaces(draw: st.DrawFn) -> tuple[SegmentSpace, list[str]]:
    """A space of branches, and a processor for each operator."""
    graph = built(draw(recipes()), shortcuts=draw(st.booleans()))[0] if draw(st.booleans()) else draw(graphs())
    assume(any(segment.runs for segment in segments_of(graph)))
    platform = draw(st.sampled_from((CORES, MIXED)))
    count = len(graph.operators)
    names = draw(st.lists(st.sampled_from([p.name for p in platform.processors]), min_size=count, max_size=count))
    return SegmentSpace(graph, platform, splits=False), names


def seconds(graph: Graph, plan: Plan, platform: Platform, operator_s: list[float]) -> float:
    """Return when the last stage of a plan ends, where only operators take time."""
    processor = {p.name: i for i, p in enumerate(platform.processors)}
    place = {o: i for i, stage in enumerate(plan.stages) for o in stage.operators}
    tasks = [
        Task(
            processor[stage.processor],
            sum(operator_s[o] for o in stage.operators),
            tuple((i, 0.0) for i in {place[b] for o in stage.operators for b in graph.predecessors(o)} - {index}),
        )
        for index, stage in enumerate(plan.stages)
    ]
    return max(end for _, end in run_tasks(tasks, Law.of(platform)))


@given(st.one_of(graphs(max_operators=10), recipes().map(lambda r: built(r)[0])))
def test_runs_hold_every_operator_once(graph: Graph) -> None:
    runs = BranchRuns.of(graph)
    assert sorted(o for run in runs.runs for o in run) == list(range(len(graph.operators)))
    for group in runs.groups:
        for branch, members in zip(runs.branches(group), group.branches, strict=True):
            assert sorted(o for r in branch for o in runs.runs[r]) == list(members.members())


@given(st.one_of(graphs(max_operators=10), recipes().map(lambda r: built(r)[0])))
def test_segments_hold_every_operator_once_and_end_at_gates(graph: Graph) -> None:
    found = segments_of(graph)
    assert [o for s in found for o in range(s.first, s.last)] == list(range(len(graph.operators)))
    assert [s.last - 1 for s in found if s.joint < s.last] == gates(graph)
    for segment in found:
        if segment.runs:
            assert sorted(o for run in segment.runs for o in run) == list(range(segment.first, segment.joint))
        for number, reads in enumerate(segment.reads):
            inside = {b for o in segment.runs[number] for b in graph.predecessors(o) if b >= segment.first}
            assert inside <= {o for r in (*reads, number) for o in segment.runs[r]}
            assert all(before < number for before in reads)


@given(spaces())
def test_every_choice_of_processors_is_a_canonical_plan_that_runs_and_is_found_again(
    drawn: tuple[SegmentSpace, list[str]],
) -> None:
    space, names = drawn
    plan = space.plan(space.placed(names))
    plan.validate(space.graph, space.platform)
    assert plan == canonical(plan, space.graph, space.platform)
    assert space.plan(space.parts(plan)) == plan


@given(spaces(), st.data())
def test_joining_runs_to_stages_delays_nothing(drawn: tuple[SegmentSpace, list[str]], data: st.DataObject) -> None:
    space, names = drawn
    graph = space.graph
    times = st.sampled_from((0.0, 1.0, 2.0, 5.0))
    operator_s = data.draw(st.lists(times, min_size=len(graph.operators), max_size=len(graph.operators)))
    stages = []
    for segment in space.segments:
        runs = segment.runs or (tuple(range(segment.first, segment.joint)),)
        stages += [Stage(run, names[run[0]]) for run in runs if run]
        joint = names[segment.joint] if segment.runs and segment.joint < segment.last else names[segment.first]
        stages += [Stage((o,), joint) for o in range(segment.joint, segment.last)]
    apart = Plan(graph.digest, tuple(stages))
    joined = space.plan(space.placed(names))
    took = seconds(graph, apart, space.platform, operator_s)
    assert seconds(graph, joined, space.platform, operator_s) == took


@given(spaces())
def test_on_one_processor_the_model_is_whole(drawn: tuple[SegmentSpace, list[str]]) -> None:
    space, names = drawn
    graph = space.graph
    whole = canonical(chain_plan(graph, (), names[:1]), graph, space.platform)
    assert space.plan(space.placed([names[0]] * len(names))) == whole
    assert space.decode(space.encode(whole)) == whole


@given(recipes(), st.booleans())
def test_numbers_name_every_plan(recipe: Recipe, mixed: bool) -> None:
    graph, _ = built(recipe)
    assume(any(segment.runs for segment in segments_of(graph)))
    space = SegmentSpace(graph, MIXED if mixed else CORES, splits=False)
    assume(space.cardinality() <= 600)
    plans = {space.plan_at(i) for i in range(space.cardinality())}
    assert all(space.decode(space.encode(plan)) == plan for plan in plans)
    for index in (-1, space.cardinality()):
        with pytest.raises(IndexError):
            space.plan_at(index)


@given(spaces(), st.integers(0, 2**32))
def test_neighbours_are_plans_of_the_space(drawn: tuple[SegmentSpace, list[str]], seed: int) -> None:
    space, _ = drawn
    rng = np.random.default_rng(seed)
    plan = space.plan_at(int(rng.integers(min(space.cardinality(), 2**62))))
    for _ in range(3):
        plan = space.neighbour(plan, rng)
        assert space.decode(space.encode(plan)) == plan


def test_squeezenet_side_by_side_has_three_stages_for_each_group() -> None:
    graph = draft("squeezenet1_1").graph()
    space = make_space("cuts,branches", graph, CORES, 4)
    assert isinstance(space, SegmentSpace)
    names = ["cpu0"] * len(graph.operators)
    assert len(space.plan(space.placed(names)).stages) == 1
    for segment in space.branching:
        names[segment.runs[0][0]] = "cpu1"
    plan = space.plan(space.placed(names))
    assert [stage.processor for stage in plan.stages] == ["cpu0", "cpu1", "cpu0"] * 8 + ["cpu0"]
    segment = space.branching[0]
    assert plan.stages[0].operators[-1] == segment.first - 1
    assert plan.stages[3].operators[0] == segment.joint
    assert space.decode(space.encode(plan)) == plan


def test_branches_that_share_a_processor_are_one_stage() -> None:
    graph = network(("in", "x"), *(("x", f"b{i}") for i in range(4)), *((f"b{i}", "y") for i in range(4)), ("y", "out"))
    space = SegmentSpace(graph, CORES, splits=False)
    plan = space.plan(space.placed(["cpu0", "cpu0", "cpu1", "cpu1", "cpu0", "cpu0"]))
    assert [(s.operators, s.processor) for s in plan.stages] == [
        ((0,), "cpu0"), ((1, 4), "cpu0"), ((2, 3), "cpu1"), ((5,), "cpu0"),
    ]  # fmt: skip


def test_runs_go_to_any_three_processors_by_one_number() -> None:
    graph = network(("in", "x"), *(("x", f"b{i}") for i in range(3)), *((f"b{i}", "y") for i in range(3)), ("y", "out"))
    space = SegmentSpace(graph, MIXED, splits=False)
    plan = space.plan(space.placed(["cpu0", "npu", "cpu1", "cpu0", "cpu0", "cpu0"]))
    params = space.encode(plan)
    # The digits of cpu0, npu and cpu1, in the order cpu0, npu (the other one), cpu1: 1, 2 and 0.
    assert (params["way_1"], params["on_1"], params["with_1"], params["share_1"]) == (
        "branches",
        "cpu0",
        "npu",
        1 + 2 * 3,
    )
    assert space.decode(params) == plan


def test_where_edges_cross_each_sequence_of_operators_is_a_run() -> None:
    edges = (
        ("x", "a"),
        ("a", "b"),
        ("x", "c"),
        ("b", "d"),
        ("c", "d"),
        ("c", "e"),
        ("d", "y"),
        ("e", "y"),
        ("y", "out"),
    )
    graph = network(*edges)
    space = SegmentSpace(graph, CORES, splits=False)
    (segment,) = space.branching
    assert sorted(len(run) for run in segment.runs) == [1, 1, 1, 2]  # a and b; c, d and e
    for code in range(space.cardinality()):
        plan = space.plan_at(code)
        assert space.decode(space.encode(plan)) == plan


def test_the_processors_of_many_runs_are_several_numbers_that_floats_hold() -> None:
    edges = [e for i in range(45) for e in ((f"a{i}", f"a{i + 1}"), (f"a{i}", f"b{i + 1}"), (f"b{i}", f"a{i + 1}"))]
    graph = network(("x", "a0"), ("x", "b0"), *edges, *((f"b{i}", "y") for i in range(46)), ("a45", "y"))
    space = SegmentSpace(graph, MIXED, splits=False)
    found = space.distributions()
    (segment,) = space.branching
    numbers = [d for name, d in found.items() if name.startswith(f"share_{segment.first}")]
    assert len(numbers) == -(-len(segment.runs) // 33)
    assert all(isinstance(d, IntDistribution) and d.high < 2**53 for d in numbers)
    rng = np.random.default_rng(0)
    plan = space.plan_at(space.cardinality() - 1)
    for _ in range(50):
        plan = space.neighbour(plan, rng)
        params = {name: float(v) if isinstance(v, int) else v for name, v in space.encode(plan).items()}
        assert space.decode(params) == plan


def test_what_is_no_plan_of_the_space() -> None:
    graph = network(("in", "x"), ("x", "a"), ("a", "b"), ("x", "c"), ("b", "y"), ("c", "y"), ("y", "out"))
    space = SegmentSpace(graph, CORES, splits=False)
    with fails(PlanError):
        space.encode(chain_plan(graph, (1, 2, 3), ("cpu0", "cpu1", "cpu0", "cpu1")))
    inside = canonical(chain_plan(graph, (2,), ("cpu0", "cpu1")), graph, CORES)
    assert space.decode(space.encode(inside)) == inside


@pytest.mark.parametrize(
    ("graph", "platform"),
    [
        (chain_graph(3), CORES),
        (TWO_WAYS, CORES.restrict(["cpu1"])),
        (TWO_WAYS, Platform("p", (one_core(0), Processor("cpu", "cpu", {"core0": 1.0}, "cpu")))),
    ],
    ids=["no branches", "one processor", "one at a time"],
)
def test_what_cannot_be_a_space_is_reported(graph: Graph, platform: Platform) -> None:
    with fails(UsageError):
        make_space("cuts,branches", graph, platform, 1)


@pytest.mark.parametrize(
    ("model", "most"), [("inception_v3", 200), ("googlenet", 130), ("vgg16", 120), ("squeezenet1_1", 130)]
)
def test_parameters_go_by_segments(model: str, most: int) -> None:
    graph = draft(model).graph()
    space = make_space("cuts,branches,splits,ranks", graph, CORES, 4)
    names = space.distributions()
    assert len(names) < most
    assert sum(not name.startswith("ranks_") for name in names) <= 5 * len(segments_of(graph))
