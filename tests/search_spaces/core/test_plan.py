import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph, Operator
from search_spaces.core.plan import MAX_OPERATORS, Plan, Stage, canonical
from search_spaces.core.platform import Platform, Processor
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, chains, followers, graphs, partitions, platforms, tensor

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _platform(*likes: str) -> Platform:
    return Platform("p", tuple(Processor(f"p{i}", "cpu", {}, like) for i, like in enumerate(likes)))


@given(graphs(), platforms(), st.data())
def test_json_round_trip(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    plan = data.draw(partitions(graph, platform))
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


def _is_acyclic(plan: Plan, graph: Graph) -> bool:
    import networkx as nx

    place = {o: i for i, s in enumerate(plan.stages) for o in s.operators}
    quotient = nx.DiGraph((place[a], place[b]) for a, b in followers(graph).edges if place[a] != place[b])
    return nx.is_directed_acyclic_graph(quotient)


@given(graphs(), platforms(), st.data())
def test_parts_in_a_circle_have_no_canonical_plan(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    plan = data.draw(partitions(graph, platform))
    if _is_acyclic(plan, graph):
        return
    with pytest.raises(PlanError):
        canonical(plan, graph, platform)
    with pytest.raises(PlanError):
        plan.validate(graph, platform)


@given(graphs(), platforms(), st.data())
def test_canonical_is_idempotent_and_does_the_same(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    plan = data.draw(partitions(graph, platform))
    if not _is_acyclic(plan, graph):
        return
    best = canonical(plan, graph, platform)
    best.validate(graph, platform)
    assert canonical(best, graph, platform) == best
    assert {s.operators for s in best.stages} == {s.operators for s in plan.stages}
    before = {s.operators: platform[s.processor] for s in plan.stages}
    after = {s.operators: platform[s.processor] for s in best.stages}
    pairs = [(processor, after[operators]) for operators, processor in before.items()]
    assert all(old.like == new.like for old, new in pairs)
    assert all((old == other) == (new == now) for old, new in pairs for other, now in pairs)


@given(graphs(), platforms(), st.data())
def test_renaming_alike_processors_and_reordering_stages_leaves_the_canonical_plan(
    graph: Graph, platform: Platform, data: st.DataObject
) -> None:
    plan = data.draw(chains(graph, platform))
    renamed: dict[str, str] = {}
    for members in platform.classes().values():
        names = [p.name for p in members]
        renamed |= dict(zip(names, data.draw(st.permutations(names)), strict=True))
    stages = data.draw(st.permutations([Stage(s.operators, renamed[s.processor]) for s in plan.stages]))
    one = canonical(plan, graph, platform)
    other = canonical(Plan(graph.digest, tuple(stages)), graph, platform)
    assert one == other
    assert one.digest == other.digest


@given(graphs(), platforms(), st.data())
def test_validate_takes_exactly_what_can_run(graph: Graph, platform: Platform, data: st.DataObject) -> None:
    plan = data.draw(partitions(graph, platform))
    done: set[int] = set()
    runs = True
    for stage in plan.stages:
        done |= set(stage.operators)
        runs &= all(graph.predecessors(o) <= done for o in stage.operators)
    if runs:
        plan.validate(graph, platform)
    else:
        with pytest.raises(PlanError):
            plan.validate(graph, platform)


@given(_JSON)
def test_any_json_is_a_plan_or_a_plan_error(data: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(data)


@given(st.data(), _JSON)
def test_a_plan_with_anything_in_a_field_is_a_plan_or_a_plan_error(data: st.DataObject, junk: Any) -> None:
    plan: Any = Plan("d", (Stage((0, 1), "cpu"), Stage((2,), "gpu"))).to_json()
    stages = plan["stages"]
    places = [(plan, key) for key in plan] + [(stages[0], key) for key in stages[0]]
    at, key = data.draw(st.sampled_from([*places, (stages, 0), (stages[0]["operators"], 0)]))
    at[key] = junk
    message = ""
    try:
        read = Plan.from_json(plan)
        assert Plan.from_json(read.to_json()) == read
    except PlanError as error:
        message = str(error)
    assert len(message) < 200
    assert "\n" not in message


@given(st.lists(st.lists(st.integers(-2, 8), min_size=1, max_size=3), max_size=4))
@example([[0, 2], [1, 3]])
@example([[0, MAX_OPERATORS + 1]])
@example([[0, 10**300]])
def test_runs_of_operators_ascend_or_are_refused(runs: list[list[int]]) -> None:
    data = {**Plan("d", ()).to_json(), "stages": [{"operators": runs, "processor": "cpu"}]}
    try:
        operators = Plan.from_json(data).stages[0].operators
    except PlanError:
        return
    assert list(operators) == sorted(set(operators))
    assert list(operators) == [o for first, last in runs for o in range(first, last)]


def test_stages_together_have_a_limit() -> None:
    stage = {"operators": [[0, MAX_OPERATORS]], "processor": "cpu"}
    with fails(PlanError):
        Plan.from_json({**Plan("d", ()).to_json(), "stages": [stage, stage]})


def test_unknown_fields_are_ignored_and_newer_versions_refused() -> None:
    plan = Plan("d", (Stage((0,), "cpu"),))
    assert Plan.from_json({**plan.to_json(), "comment": "mine"}) == plan
    with fails(PlanError):
        Plan.from_json({**plan.to_json(), "schema_version": 2})


@pytest.mark.parametrize(
    "stages",
    [
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(0, 1, 2), ()],
        [(0, 1, 2, 3)],
        [(0, -1)],
        [(0, 2), (1,)],
        [(1, 2), (0,)],
        [(1, 0), (2,)],
        [(0, 0), (1, 2)],
    ],
)
def test_validate_refuses(stages: list[tuple[int, ...]]) -> None:
    graph = chain_graph(3)
    with fails(PlanError):
        Plan(graph.digest, tuple(Stage(s, "p0") for s in stages)).validate(graph)


def test_validate_refuses_other_graphs_and_unknown_processors() -> None:
    graph = chain_graph(2)
    with fails(PlanError):
        Plan("0" * 64, (Stage((0, 1), "p0"),)).validate(graph)
    with fails(PlanError):
        Plan(graph.digest, (Stage((0, 1), "npu"),)).validate(graph, _platform("cpu"))


def test_a_part_may_leave_out_a_branch_that_is_independent_of_it() -> None:
    operators = (Operator("RELU", (0,), (1,)), Operator("RELU", (0,), (2,)), Operator("ADD", (1, 2), (3,)))
    graph = Graph("branches", (tensor(1),) * 4, operators, (0,), (3,))
    plan = Plan(graph.digest, (Stage((1,), "p1"), Stage((0, 2), "p0")))
    plan.validate(graph)
    best = canonical(plan, graph, _platform("cpu", "cpu"))
    assert best.stages == (Stage((1,), "p0"), Stage((0, 2), "p1"))


def test_a_platform_names_its_processors() -> None:
    with fails(UsageError):
        _platform("a", "b")["c"]
    with fails(UsageError):
        Platform("empty", ())
    with fails(UsageError):
        Platform("twins", (Processor("a", "cpu", {}, "x"), Processor("a", "cpu", {}, "x")))
