"""Co-execution: the space, plans of it as they are run, the model and its exact optimum, on drawn and small models."""

from __future__ import annotations

import tempfile
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evaluators.cost_model.session import CostModelEvaluator
from evaluators.litert.session import LitertEvaluator
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from optimizer.model.profile import Profiler, profile
from optimizer.model.segments import split_profile
from search_spaces.core.errors import PlanError, RewriteError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, Share, Stage, canonical
from search_spaces.core.platform import Platform
from search_spaces.core.wording import many
from search_spaces.models.litert import read_model
from search_spaces.rewrites.lower import Lowering
from search_spaces.rewrites.splits import extent
from search_spaces.rewrites.views import without_copies
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part
from tests.search_spaces.spaces.test_branches import Recipe, built, network, recipes
from tests.support.models.split_models import VALID, Layers, layers
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.strategies import one_core, parameters

TWO = Platform("two", (one_core(0), one_core(1)))


def read(drawn: Layers) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        return read_model(drawn.net.write(Path(folder) / "model.tflite"))


def costs(graph: Graph, seed: int, platform: Platform = TWO) -> ChainCosts:
    rng = np.random.default_rng(seed)
    processors, count = len(platform.processors), len(graph.operators)
    operator_s = np.tile(rng.integers(1, 9, count) * 1e-3, (processors, 1))
    operator_s[1] *= rng.choice([1.0, 3.0])
    between = np.full((count, processors, processors), float(rng.choice([0.0, 1e-4, 3e-3])))
    between[:, np.arange(processors), np.arange(processors)] = 0.0
    return ChainCosts(platform, operator_s, np.full(processors, 1e-5), between)


def small() -> Layers:
    found = Layers((1, 32, 16, 8))
    found.conv(16)
    found.conv(16)
    found.pool("MAX_POOL_2D", 2, 2, VALID)
    found.dense(32)
    found.layer("SOFTMAX", [found.last], (1, 32), None)
    found.done()
    return found


quick = settings(max_examples=25, deadline=None)


@quick
@given(drawn=layers(), data=st.data())
def test_decode_is_total_and_encode_finds_the_way_back(drawn: Layers, data: st.DataObject) -> None:
    graph = read(drawn)
    space = SegmentSpace(graph, TWO)
    number = data.draw(st.integers(0, space.cardinality() - 1))
    for plan in (space.plan_at(number), space.plan_at(space.cardinality() - 1)):
        plan.validate(graph, TWO)
        assert canonical(plan, graph, TWO) == plan
        assert Plan.from_json(plan.to_json()) == plan
        params = space.encode(plan)
        assert params.keys() == space.distributions().keys()
        assert space.decode(params) == plan
    plan = space.decode(data.draw(parameters(space.distributions())))
    assert space.decode(space.encode(plan)) == plan
    assert space.plan(space.parts(plan)) == plan


@quick
@given(drawn=layers(), data=st.data())
def test_lowered_plans_are_plans_of_the_rewritten_model(drawn: Layers, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph = read_model(drawn.net.write(Path(folder) / "model.tflite"))
        space = SegmentSpace(graph, TWO)
        plan = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
        lowered = Lowering(graph).lower(plan)
    lowered.plan.validate(lowered.graph, TWO)
    assert sorted(set(lowered.stage_of)) == list(range(len(plan.stages)))
    for stage, origin in zip(lowered.plan.stages, lowered.stage_of, strict=True):
        assert plan.stages[origin].share is not None or stage.processor == plan.stages[origin].processor


@quick
@given(drawn=layers(most=3), seed=st.integers(0, 99))
def test_the_dynamic_programme_finds_the_least_of_all_parts(drawn: Layers, seed: int) -> None:
    graph = read(drawn)
    space = SegmentSpace(graph, TWO)
    model = SegmentModel(space, costs(graph, seed))
    found = model.best()
    assert found.cost_s == pytest.approx(model.cost_s(found.parts))
    assert found.parts[0].first == 0
    assert found.parts[-1].last == len(graph.operators)
    assert all(a.last == b.first for a, b in pairwise(found.parts))
    assert model.best(chains=False).cost_s >= found.cost_s - 1e-12
    assert model.greedy().cost_s >= found.cost_s - 1e-12
    rng = np.random.default_rng(seed)
    for _ in range(20):
        plan = space.plan_at(int(rng.integers(min(space.cardinality(), 2**62))))
        assert model.price(plan) >= found.cost_s - 1e-12


@quick
@given(recipe=recipes(), data=st.data())
def test_branches_side_by_side_are_parts(recipe: Recipe, data: st.DataObject) -> None:
    graph, _ = built(recipe)
    space = SegmentSpace(graph, TWO)
    plan = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
    plan.validate(graph, TWO)
    assert space.decode(space.encode(plan)) == plan
    for segment in space.branching:
        first, last, runs = segment.first, segment.joint, len(segment.runs)
        before, after = [
            [Part(i, i + 1, ("cpu0",)) for i in r] for r in (range(first), range(last, len(graph.operators)))
        ]
        on = tuple(data.draw(st.lists(st.sampled_from(("cpu0", "cpu1")), min_size=runs, max_size=runs)))
        if len(set(on)) > 1:
            made = space.plan([*before, Part(first, last, on, "branches"), *after])
            inside = [p for p in space.parts(made) if first <= p.first < last]
            assert [(p.first, p.last, p.axis) for p in inside] == [(first, last, "branches")]


@quick
@given(recipe=recipes(), seed=st.integers(0, 99))
@example(recipe=[".", [["."], ["."] * 3], ".", [["."] * 2, ["."] * 3], "."], seed=28)  # ends on the other core
def test_no_plan_of_branches_is_below_the_optimum(recipe: Recipe, seed: int) -> None:
    graph, _ = built(recipe)
    space = SegmentSpace(graph, TWO)
    model = SegmentModel(space, costs(graph, seed))
    best = model.best()
    assert best.cost_s <= model.best(branches=False).cost_s + 1e-12
    assert best.cost_s <= model.best(splits=False).cost_s + 1e-12
    rng = np.random.default_rng(seed)
    for _ in range(20):
        assert model.price(space.plan_at(int(rng.integers(min(space.cardinality(), 2**62))))) >= best.cost_s - 1e-12


def test_what_cannot_be_shared_runs_whole() -> None:
    graph = network(("in", "x"), ("x", "a"), ("x", "b"), ("a", "y"), ("b", "y"), ("y", "out"))
    space = SegmentSpace(graph, TWO)
    assert [segment.runs for segment in space.branching] == [((1,), (2,))]
    reported = {"cut_1": 1, "way_1": "branches", "share_1": 2, "on_1": "cpu0", "with_1": "cpu1"}
    params = space.encode(space.plan([Part(0, 4, ("cpu0",))])) | reported
    found = space.parts(space.decode(params))
    assert found == (Part(0, 1, ("cpu0",)), Part(1, 3, ("cpu0", "cpu1"), "branches"), Part(3, 4, ("cpu0",)))
    for other in ({"cut_1": 2}, {"with_1": "cpu0"}, {"share_1": 4}, {"way_1": "height"}):
        assert {part.axis for part in space.parts(space.decode(params | other))} == {None}


def test_uneven_processors_get_uneven_shares() -> None:
    graph = read(small())
    uneven = costs(graph, 0)
    uneven.operator_s[1] = 5 * uneven.operator_s[0]
    two_kinds = Platform("two kinds", (one_core(0), one_core(1)))
    found = SegmentModel(SegmentSpace(graph, two_kinds), uneven).best()
    (split,) = [p for p in found.parts if p.first == 0]
    assert split.axis == "height"
    first = split.cut / extent(graph, split.first, split.last, "height")
    assert (first if split.on[0] == "cpu0" else 1 - first) == pytest.approx(5 / 6, abs=0.1)


def test_cuts_between_channels_lie_between_tiles_of_the_kernels() -> None:
    drawn = Layers((1, 8, 8, 4))
    drawn.conv(40)
    drawn.conv(12)
    drawn.done()
    space = SegmentSpace(read(drawn), TWO)
    assert set(space.cuts(0, 1, "channels").values()) == {8, 16, 24, 32}
    assert set(space.cuts(1, 2, "channels").values()) == set(range(1, 12))
    assert set(space.cuts(0, 2, "height").values()) == set(range(1, 8))


@pytest.mark.parametrize(
    ("part", "left"),
    [
        (Part(0, 3, ("cpu0", "cpu1"), "height", 7), []),  # rows follow each other in memory
        (Part(0, 1, ("cpu0", "cpu1"), "channels", 8), ["CONCATENATION"]),  # gathered once, where the sides meet
    ],
)
def test_what_lies_where_it_belongs_is_not_copied(part: Part, left: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph = read_model(small().net.write(Path(folder) / "model.tflite"))
        rest = Part(part.last, len(graph.operators), ("cpu0",))
        lowered = Lowering(graph).lower(SegmentSpace(graph, TWO).plan([part, rest]))
        assert {o.kind for o in lowered.graph.operators} >= {"CONCATENATION"}
        viewed = without_copies(lowered.graph, lowered.plan, TWO)
    assert [o.kind for o in viewed.graph.operators if o.kind in ("SLICE", "CONCATENATION")] == left


def test_of_very_many_plans_only_the_digits_are_reported() -> None:
    assert [many(n) for n in (7, 12_345, 10**15, 98 * 10**70)] == ["7", "12,345", "about 10^15", "about 10^71"]


@pytest.mark.litert
def test_what_a_part_costs_is_read_off_the_clock(tmp_path: Path) -> None:
    graph = read_model(small().net.write(tmp_path / "model.tflite"))
    evaluator = LitertEvaluator()
    platform = evaluator.platform().restrict(["cpu0", "cpu1"])
    with evaluator.prepare(platform) as session:
        of = Profiler(session, graph, platform)
        known = profile(of)
        space = SegmentSpace(graph, platform)
        found = split_profile(of, space, known)
    (like,) = found.operator_s
    assert sum(found.operator_s[like]) + found.overhead_s[like] == pytest.approx(found.whole_s[like])
    assert 0 < found.overhead_s[like] < found.whole_s[like]
    assert 0 <= found.transfer_s[f"{like}|{like}"] < 5.0


def test_one_processor_is_refused() -> None:
    with fails(UsageError):
        SegmentSpace(read(small()), Platform("one", (one_core(0),)))


@pytest.mark.parametrize(
    "stages",
    [
        [Stage((0,), "cpu0", Share("height", 0, 9))],
        [Stage((0,), "cpu0", Share("height", 0, 9)), Stage((0,), "cpu1", Share("height", 8, 32))],
        [Stage((0,), "cpu0", Share("height", 0, 9)), Stage((0,), "cpu1", Share("channels", 9, 32))],
    ],
)
def test_shares_must_go_together(stages: list[Stage]) -> None:
    graph = read(small())
    rest = Stage(tuple(range(1, len(graph.operators))), "cpu0")
    with fails(PlanError):
        Plan(graph.digest, (*stages, rest)).validate(graph, TWO)


def test_shares_must_add_up() -> None:
    graph = read(small())
    rest = Stage(tuple(range(1, len(graph.operators))), "cpu0")
    sides = (Stage((0,), "cpu0", Share("height", 0, 9)), Stage((0,), "cpu1", Share("height", 9, 30)))
    plan = Plan(graph.digest, (*sides, rest))
    plan.validate(graph, TWO)
    with fails(PlanError):
        Lowering(graph).lower(plan)
    softmax = len(graph.operators) - 1
    whole = Stage(tuple(range(softmax)), "cpu0")
    halves = tuple(Stage((softmax,), f"cpu{i}", Share("channels", 16 * i, 16 * i + 16)) for i in range(2))
    with fails(RewriteError):
        Lowering(graph).lower(Plan(graph.digest, (whole, *halves)))


@pytest.mark.litert
def test_split_plans_run_and_are_deployed(tmp_path: Path) -> None:
    graph = read_model(small().net.write(tmp_path / "model.tflite"))
    evaluator = LitertEvaluator()
    platform = evaluator.platform().restrict(["cpu0", "cpu1"])
    space = SegmentSpace(graph, platform)
    parts = (
        Part(0, 3, ("cpu0", "cpu1"), "height", 7),
        Part(3, 4, ("cpu1", "cpu0"), "channels", 8),
        Part(4, 5, ("cpu0",)),
    )
    plan = space.plan(parts)
    (tmp_path / "best").mkdir()
    with evaluator.prepare(platform) as session:
        with closing(session.load(graph, plan)) as candidate:
            batch = candidate.run(3)
            assert there(candidate.verify()).accepted
        assert batch.stage_s.shape == (3, len(plan.stages))
        processors = {e.stage: e.processor for e in there(batch.timeline).events}
        assert {processors[0], processors[1]} == {"cpu0", "cpu1"}
        deployed = session.deploy(tmp_path / "best", graph, plan)
    assert deployed.accepted


@pytest.mark.litert
def test_splits_and_branches_in_one_plan(squeezenet: Graph) -> None:
    evaluator = LitertEvaluator()
    platform = evaluator.platform().restrict(["cpu0", "cpu1"])
    space = SegmentSpace(squeezenet, platform)
    first, last = space.branching[0].first, space.branching[0].joint
    count = len(squeezenet.operators)
    cut = next(iter(space.cuts(last, last + 2, "height").values()))
    plan = space.plan(
        [
            Part(0, first, ("cpu0",)),
            Part(first, last, ("cpu1", "cpu0"), "branches"),
            Part(last, last + 2, ("cpu0", "cpu1"), "height", cut),
            Part(last + 2, count, ("cpu0",)),
        ]
    )
    with evaluator.prepare(platform) as session, closing(session.load(squeezenet, plan)) as candidate:
        batch = candidate.run(3)
        assert there(candidate.verify()).accepted
    assert batch.stage_s.shape == (3, 6)


def test_the_cost_model_prices_sides_that_run_at_once(tmp_path: Path) -> None:
    graph = read_model(small().net.write(tmp_path / "model.tflite"))
    evaluator = CostModelEvaluator()
    platform = there(evaluator.described("snapdragon855"))
    processors = [p.name for p in platform.processors][:2]
    restricted = platform.restrict(processors)
    space = SegmentSpace(graph, restricted)
    plan = space.plan([Part(0, 3, (processors[0], processors[1]), "height", 8), Part(3, 5, (processors[0],))])
    with evaluator.prepare(restricted) as session, closing(session.load(graph, plan)) as candidate:
        batch = candidate.run(2)
    sides = {e.stage: e for e in there(batch.timeline).events[:2]}
    assert sides[0].start_s < sides[1].end_s
    assert sides[1].start_s < sides[0].end_s
    assert batch.stage_s.shape == (2, len(plan.stages))
