"""Laws of workloads, joined graphs and their space; errors in files name file and line."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.core.decoded_plan import decoded_plan, jobs_of
from search_spaces.core.errors import PlanError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.core.pools import members, single_processors, with_pools
from search_spaces.core.workload import (
    Arrival,
    Client,
    Workload,
    by_name,
    counted,
    is_workload,
    with_given,
    workload_of,
)
from search_spaces.core.workload_file import read_workload
from search_spaces.models import load
from search_spaces.spaces.registry import make_workload_space
from search_spaces.spaces.shared_workload_space import SharedWorkloadSpace
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.sentences import fails, says
from tests.support.strategies import chain_graph, graphs, one_core, parameters


def two_cores() -> Platform:
    both = Processor("cpu", "cpu", {"core0": 1.0, "core1": 1.0}, "both", {"cores": (0, 1), "threads": 2})
    return with_pools(Platform("two cores", (both, one_core(0), one_core(1))))


def space_of(*sizes: tuple[int, int], jobs: int = 2, deadline_s: float | None = None) -> WorkloadSpace:
    """Return the space of chains, each of so many operators and instances."""
    clients = tuple(Client(f"m{i}", f"m{i}", count, deadline_s=deadline_s) for i, (_, count) in enumerate(sizes))
    workload = Workload("drawn", clients)
    parts = [(i.name, chain_graph(sizes[i.client][0], f"m{i.client}")) for i in workload.instances]
    return WorkloadSpace(workload, merge("drawn", parts), two_cores(), jobs)


spaces = st.builds(
    lambda sizes, jobs, deadline: space_of(*sizes, jobs=jobs, deadline_s=deadline),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=2),
    st.integers(1, 3),
    st.sampled_from((None, 0.1)),
)


@given(st.lists(graphs(max_operators=4), min_size=1, max_size=3))
def test_a_joined_graph_holds_its_models_unchanged(models: list[Graph]) -> None:
    joined = merge("all", [(f"c{i}", g) for i, g in enumerate(models)])
    assert len(joined.graph.operators) == sum(len(g.operators) for g in models)
    shift = 0
    for component, graph in zip(joined.components, models, strict=True):
        assert component.graph is graph
        for mine, theirs in zip(component.operators, graph.operators, strict=True):
            operator = joined.graph.operators[mine]
            assert operator.kind == theirs.kind
            assert operator.inputs == tuple(t if t == -1 else t + shift for t in theirs.inputs)
            assert all(joined.component_of[b] == joined.component_of[mine] for b in joined.graph.predecessors(mine))
        border = joined.graph.boundary(component.operators)
        assert set(border.inputs) <= set(joined.graph.inputs)
        shift += len(graph.tensors)
    assert len(joined.graph.inputs) == sum(len(g.inputs) for g in models)


def test_models_are_joined_under_different_names() -> None:
    graph = chain_graph(2)
    with fails(UsageError):
        merge("all", [("a", graph), ("a", graph)])
    with fails(UsageError):
        merge("none", [])


@settings(max_examples=50)
@given(spaces, st.data())
def test_decoding_is_total_and_what_it_returns_is_canonical(space: WorkloadSpace, data: st.DataObject) -> None:
    plan = space.decode(data.draw(parameters(space.distributions())))
    plan.validate(space.joined.graph, space.platform)
    assert space.decode(space.encode(plan)) == plan
    assert space.plan(decoded_plan(plan, space.joined)) == plan
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=30)
@given(spaces, st.integers(0, 2**31))
def test_a_neighbour_is_a_plan_of_the_space(space: WorkloadSpace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = space.plan_at(int(rng.integers(space.cardinality())))
    for _ in range(8):
        plan = space.neighbour(plan, rng)
        assert space.decode(space.encode(plan)) == plan


SMALL = (space_of((3, 2)), space_of((2, 1), (1, 2)), space_of((2, 2), jobs=1, deadline_s=0.1))


@pytest.mark.parametrize("space", SMALL)
def test_plans_have_numbers_and_each_is_there_once(space: WorkloadSpace) -> None:
    plans = [space.plan_at(i) for i in range(space.cardinality())]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert all(space.decode(space.encode(plan)) == plan for plan in plans)
    with pytest.raises(IndexError):
        space.plan_at(len(plans))


def test_instances_of_one_client_stand_for_each_other_and_so_do_alike_processors() -> None:
    space = space_of((2, 2), jobs=1)
    one = {"dispatch": "fifo", "jobs_1": 1, "first_1": 1, "first_2": 2, "on_1_1": "cpu1", "on_2_1": "cpu"}
    other = one | {"first_1": 2, "first_2": 1, "on_1_1": "cpu", "on_2_1": "cpu0"}
    assert space.decode(one) == space.decode(other)


def test_what_is_no_plan_of_a_workload_is_reported() -> None:
    space = space_of((2, 1), (2, 1))
    digest, joined = space.joined.graph.digest, space.joined
    mixed = Plan(digest, (Stage((0, 2), "cpu"), Stage((1, 3), "cpu")), "fifo")
    with fails(PlanError):
        jobs_of(mixed, joined)
    torn = Plan(digest, (Stage((0,), "cpu"), Stage((2, 3), "cpu"), Stage((1,), "cpu")), "fifo")
    with fails(PlanError):
        jobs_of(torn, joined)
    with fails(PlanError):
        decoded_plan(Plan(digest, (Stage((0, 1), "cpu"), Stage((2, 3), "cpu"))), joined)
    with fails(PlanError):
        space.encode(Plan(digest, (Stage((0, 1), "cpu"), Stage((2, 3), "cpu")), "edf"))


def test_a_pool_is_made_of_alike_processors_that_can_run_at_once() -> None:
    platform = two_cores()
    assert [p.name for p in platform.processors] == ["cpu", "cpu0", "cpu1", "cpu0|cpu1"]
    assert members(platform["cpu0|cpu1"]) == ("cpu0", "cpu1")
    assert members(platform["cpu"]) == ("cpu",)
    assert [p.name for p in single_processors(platform)] == ["cpu", "cpu0", "cpu1"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("vgg16", ("vgg16", None)),
        ("vgg16×8", ("vgg16", 8)),
        ("squeezenet1_1x4", ("squeezenet1_1", 4)),
        ("posenet/240x320", ("posenet/240x320", None)),
        ("posenet/240x320×2", ("posenet/240x320", 2)),
        ("mobilenet_v1@0.5/192x3", ("mobilenet_v1@0.5/192", 3)),
        ("mobilebert/384x2", ("mobilebert/384", 2)),
        ("vgg16/224x32", ("vgg16/224x32", None)),
        ("model_x2.tflite", ("model_x2.tflite", None)),
    ],
)
def test_counts_of_models(text: str, found: tuple[str, int | None]) -> None:
    assert counted(text) == found
    assert is_workload(text) == (found[1] is not None)


def test_a_list_of_models_is_a_workload() -> None:
    workload = workload_of("squeezenet1_1x2,mobilenet_v1")
    assert [i.name for i in workload.instances] == ["squeezenet1_1 1", "squeezenet1_1 2", "mobilenet_v1"]
    for text in ("vgg16×0", "vgg16,vgg16", "vgg16,,resnet50", "vgg16×1000"):
        with fails(UsageError):
            workload_of(text)


@given(st.integers(1, 50), st.floats(1e-3, 1.0), st.integers(0, 100))
def test_requests_come_in_order_and_follow_from_the_seed(requests: int, period_s: float, seed: int) -> None:
    for kind in ("burst", "periodic", "poisson"):
        arrival = Arrival(kind, requests, period_s, 0.5)
        times = arrival.releases_s(seed)
        assert len(times) == requests
        assert all(a <= b for a, b in pairwise(times))
        assert min(times) >= 0.5
        assert times == arrival.releases_s(seed)


def test_what_models_are_given_is_for_one_by_its_name_or_for_all(tmp_path: Path) -> None:
    clients = (Client("a", "a", signature="old"), Client("a=b", "m"), Client("c", "m"))
    found = with_given(clients, {"signature": ["x", "a=b=y", "c=z=w"], "input": [f"a={tmp_path}/=.npy"]})
    assert [c.signature for c in found] == ["x", "y", "z=w"]
    assert [c.input for c in found] == [f"{tmp_path}/=.npy", None, None]
    assert with_given(clients, {}) == clients
    assert Workload.from_json(Workload("w", found).to_json()).clients == found
    assert len({c.source for c in found}) == len({Workload("w", (c,)).digest for c in found}) == 3
    for texts in (["d=x"], ["x", "y"], ["a=x", "a=y"]):
        with fails(UsageError):
            with_given(clients, {"custom_ops": texts})
    named = by_name("--input", ["d=x"], ["m.tflite"])
    assert named == {"m.tflite": "d=x"}  # of one model alone no name is asked for
    with fails(UsageError):
        by_name("--input", ["m.tflite=x", "m.tflite=y"], ["m.tflite"])


def test_a_file_says_what_models_are_given(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    (tmp_path / "x.npz").touch()
    path.write_text(
        "models: [{model: a, input: x.npz, signature: s, custom_ops: /libops.so}, {model: b, input: y.npy}]"
    )
    assert read_workload(path).clients == (
        Client("a", "a", input=str(tmp_path / "x.npz"), signature="s", custom_ops="/libops.so"),
        Client("b", "b", input="y.npy"),
    )
    path.write_text("models: [{model: a, input: [x.npz]}]")
    with fails(UsageError):
        read_workload(path)


GOOD = """\
name: robot
memory_limit_mb: 512
models:
  - model: mobilenet_v1
    name: detector
    count: 2
    arrival: {kind: periodic, period_ms: 40, requests: 3}
    priority: 2
  - model: squeezenet1_1
    arrival: {kind: closed, requests: 20}
    own_weights: true
  - {model: googlenet, arrival: {kind: poisson, rate_per_s: 5, requests: 10}, queue: 8, deadline_ms: 100}
seed: 7
"""


def test_a_workload_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text(GOOD)
    found = read_workload(path)
    assert found == Workload(
        "robot",
        (
            Client("detector", "mobilenet_v1", 2, Arrival("periodic", 3, 0.04), 2, 0.04),
            Client("squeezenet1_1", "squeezenet1_1", 1, Arrival("closed", 20), own_weights=True),
            Client("googlenet", "googlenet", 1, Arrival("poisson", 10, 0.2), deadline_s=0.1, queue=8),
        ),
        7,
        512_000_000,
    )
    assert found.digest != workload_of("mobilenet_v1").digest


def test_requests_come_more_often_with_the_deadlines_that_they_had(tmp_path: Path) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text(GOOD)
    found = read_workload(path).at_rate(2.0)
    detector, again, other = found.clients
    assert detector.arrival.period_s == 0.02
    assert detector.deadline_s == 0.04
    assert again == read_workload(path).clients[1]
    assert other.arrival.period_s == 0.1
    with fails(UsageError):
        workload_of("squeezenet1_1,mobilenet_v1").at_rate(2.0)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("count: 2", "count: 0", 6),
        ("count: 2", "count: two", 6),
        ("name: detector", "name: squeezenet1_1", 9),
        ("period_ms: 40", "period_ms: -1", 7),
        ("kind: periodic", "kind: sometimes", 7),
        ("period_ms: 40, ", "", 7),
        ("rate_per_s: 5", "rate_per_s: 0", 12),
        ("priority: 2", "priority: 2\n    prio: 2", 9),
        ("deadline_ms: 100", "deadline_ms: 0", 12),
        ("memory_limit_mb: 512", "memory_limit_mb: none", 2),
        ("own_weights: true", "own_weights: perhaps", 11),
        ("kind: closed, requests: 20", "kind: burst, requests: 20}\n    queue: 3\n    #", 9),
        ("  - model: squeezenet1_1", "  - count: 1", 9),
    ],
)
def test_what_is_wrong_in_a_file_is_reported_with_its_line(tmp_path: Path, old: str, new: str, line: int) -> None:
    path = tmp_path / "robot.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    says(str(caught.value))


def shared(model: str, *counts: int, branches: bool = True, cores: int = 2) -> SharedWorkloadSpace:
    graph = load(model)
    clients = tuple(Client(f"m{i}", model, count) for i, count in enumerate(counts))
    workload = Workload("drawn", clients)
    joined = merge("drawn", [(i.name, graph) for i in workload.instances])
    unlike = tuple(replace(one_core(i), like=f"core{i}") for i in range(cores))
    platform = two_cores() if cores == 2 else Platform("unlike cores", unlike)
    return SharedWorkloadSpace(workload, joined, platform, branches=branches)


SHARED = (
    shared("squeezenet1_1@0.25/64", 1, 2),
    shared("googlenet@0.25/64", 3),
    shared("mobilenet_v1@0.25/64", 2, 1, branches=False),
)
NAMES = ["squeezenet", "googlenet", "mobilenet"]


@pytest.mark.parametrize("space", SHARED, ids=NAMES)
def test_models_that_are_shared_by_processors_are_plans_of_a_space(space: SharedWorkloadSpace) -> None:
    rng = np.random.default_rng(7)
    kinds = set()
    for _ in range(6):
        plan = space.plan_at(int.from_bytes(rng.bytes(64), "little") % space.cardinality())
        for _ in range(12):
            params = space.encode(plan)
            assert set(params) == set(space.distributions())
            assert space.decode(params) == plan
            plan.validate(space.joined.graph, space.platform)
            kinds |= {stage.share.axis if stage.share else "whole" for stage in plan.stages}
            plan = space.neighbour(plan, rng)
    assert {"whole", "height", "channels"} <= kinds


@pytest.mark.parametrize("space", SHARED, ids=NAMES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_parameters_stand_for_a_plan_of_shared_models(space: SharedWorkloadSpace, data: st.DataObject) -> None:
    plan = space.decode(data.draw(parameters(space.distributions())))
    assert space.decode(space.encode(plan)) == plan


def test_a_model_without_branches_is_cut_beside_one_that_has_some() -> None:
    def made(*models: str) -> WorkloadSpace:
        workload = Workload("mixed", tuple(Client(model, model) for model in models))
        joined = merge("mixed", [(model, load(model)) for model in models])
        return make_workload_space("cuts,branches", workload, joined, two_cores(), 4)

    space, rng = made("squeezenet1_1@0.25/64", "mobilenet_v1@0.25/64"), np.random.default_rng(3)
    plan = space.plan_at(int.from_bytes(rng.bytes(32), "little") % space.cardinality())
    for _ in range(12):
        plan = space.neighbour(plan, rng)
        assert space.decode(space.encode(plan)) == plan
    with fails(UsageError):
        made("alexnet@0.25/64", "mobilenet_v1@0.25/64")


def test_other_names_for_alike_processors_stay_in_the_space() -> None:
    """With eight alike streams of a GPU, a plan's canonical form may place branches in words that instances lack."""
    streams = tuple(Processor(f"stream{i}", "gpu", {f"stream{i}": 1.0}, "stream") for i in range(8))
    workload = Workload("drawn", (Client("m", "squeezenet1_1@0.25/64", 2),))
    joined = merge("drawn", [(i.name, load("squeezenet1_1@0.25/64")) for i in workload.instances])
    space = SharedWorkloadSpace(workload, joined, with_pools(Platform("one GPU", streams)))
    rng = np.random.default_rng(0)
    plan = space.plan_at(int(rng.integers(1 << 60)))
    for step in range(240):
        plan = space.neighbour(plan, rng)
        if step > 200:
            assert space.decode(space.encode(plan)) == plan


def test_instances_have_one_word_for_branches_that_they_place_alike() -> None:
    space = shared("squeezenet1_1@0.25/64", 2, cores=4)
    alone = space.models[0]
    segment = next(s for s in alone.segments if len(s.runs) == 2)
    base, at = alone.base, segment.first
    for code in range(1, base**2):
        params = space.encode(space.plan_at(0)) | {f"cut_1_{at}": 1, f"way_1_{at}": "branches", f"share_1_{at}": code}
        for instance, (on, other) in enumerate((("cpu0", "cpu1"), ("cpu1", "cpu3")), 1):
            params |= {f"on_{instance}_{at}": on, f"with_{instance}_{at}": other}
        plan = space.decode(params)
        assert space.decode(space.encode(plan)) == plan


def test_all_plans_of_a_small_model_are_numbered() -> None:
    space = shared("mobilenet_v1@0.25/64", 1)
    tiny = space.models[0]
    assert space._count_rows() == tiny.cardinality()
