"""Ranks beside cuts and placements: laws of the space, of the search in the model, and of plans that have ranks."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.cost_model.session import CostModelEvaluator
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.ranks import Chains, RankCosts, best_ranked, uniform
from optimizer.model.ranks import rank_violations
from search_spaces.core.errors import PlanError, RewriteError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import LayerRanks, Plan
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo import draft
from search_spaces.rewrites.lower import Lowering
from search_spaces.rewrites.tucker import decompose, factor, outline, ranks_of, read_filters
from search_spaces.spaces.chain import ChainSpace, chain_plan
from search_spaces.spaces.rank_space import RankSpace
from search_spaces.spaces.registry import make_space
from tests.search_spaces.rewrites.test_tucker import images, outputs
from tests.support.models.split_models import Layers
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.strategies import one_core, parameters

MIXED = Platform("mixed", (one_core(0), one_core(1), Processor("npu", "npu", {"npu": 1.0}, "npu")))


@cache
def small() -> Graph:
    """Three convolutions, 16 → 24 → 24 → 16 channels."""
    drawn = Layers((1, 6, 6, 16))
    for filters in (24, 24, 16):
        drawn.conv(filters)
    folder = tempfile.mkdtemp()
    return read_model(drawn.done().write(Path(folder) / "model.tflite"))


@cache
def space() -> RankSpace:
    return RankSpace(small(), ChainSpace(small(), MIXED, 2))


@given(st.data())
def test_every_draw_is_a_plan_of_the_space(data: st.DataObject) -> None:
    plan = space().decode(data.draw(parameters(space().distributions())))
    plan.validate(small(), MIXED)
    assert space().decode(space().encode(plan)) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert all(ranks in space().options[operator] for operator, ranks in ranks_of(plan).items())


@given(st.data())
def test_plans_have_numbers(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, space().cardinality() - 1))
    plan = space().plan_at(index)
    assert space().decode(space().encode(plan)) == plan
    with pytest.raises(IndexError):
        space().plan_at(space().cardinality())


def test_all_plans_are_different() -> None:
    found = RankSpace(small(), ChainSpace(small(), Platform("one", (one_core(0),)), 2))
    assert len({found.plan_at(i).digest for i in range(found.cardinality())}) == found.cardinality()


def test_choices_are_multiples_of_fewer_macs() -> None:
    found = RankSpace(vgg16 := draft("vgg16").graph(), ChainSpace(vgg16, MIXED, 4))
    assert len(found.options) == 13
    for operator, options in found.options.items():
        layer = found.layers[operator]
        assert list(options) == sorted(options)
        for ranks in options:
            assert all(rank % 8 == 0 or rank == full for rank, full in zip(ranks, layer.full, strict=True))
            assert layer.macs(ranks) < layer.macs()


@given(st.data())
@settings(max_examples=20)
def test_filters_are_off_by_no_more_than_is_reported(data: st.DataObject) -> None:
    operator = data.draw(st.sampled_from(sorted(space().options)))
    ranks = data.draw(st.sampled_from(space().options[operator]))
    (kernel,) = read_filters(small(), space().layers[operator])
    lost = ((kernel - factor(kernel, *ranks).whole()) ** 2).sum() / (kernel**2).sum()
    assert lost <= space().loss(operator, ranks) + 1e-9
    assert space().loss(operator, space().layers[operator].full) <= 1e-9


# ----- the model


@st.composite
def models(draw: st.DrawFn) -> RankCosts:
    found, count = space(), len(small().operators)
    seconds = st.floats(0.1, 4.0)
    operator_s = np.array([[draw(seconds) for _ in range(count)]] * 2 + [[draw(seconds) for _ in range(count)]])
    same, other = ([draw(seconds) for _ in found.places] for _ in range(2))
    between = np.where(np.eye(3) > 0, 0.0, draw(st.floats(0.0, 0.5)))
    costs = ChainCosts(MIXED, operator_s, np.full(3, 0.1), np.broadcast_to(between, (count, 3, 3)))
    return RankCosts(found, costs, np.array([same, same, other]), Chains(small(), 2))


@given(models(), st.floats(0.0, 1.5))
@settings(max_examples=25, deadline=None)
def test_the_best_by_the_model_is_between_its_bound_and_all_others(model: RankCosts, most_error: float) -> None:
    best = best_ranked(model, most_error)
    assert rank_violations(model, most_error, best.best) == ()
    assert best.value == pytest.approx(model.price(best.best))
    assert space().encode(best.best)
    rng = np.random.default_rng(0)
    for index in rng.integers(0, space().cardinality(), 150):
        plan = space().plan_at(int(index))
        if not rank_violations(model, most_error, plan):
            assert model.price(plan) >= best.bound - 1e-9
    fixed = [chain_plan(small(), (), [p.name]) for p in MIXED.processors]
    assert best.value <= min(map(model.price, fixed)) + 1e-9


@given(models())
@settings(max_examples=15, deadline=None)
def test_without_a_limit_the_best_is_exact(model: RankCosts) -> None:
    best = best_ranked(model, 10.0)
    assert best.value == pytest.approx(best.bound)


@given(models(), st.floats(0.0, 1.5))
def test_one_share_for_all_keeps_the_limit_and_is_never_slower(model: RankCosts, most_error: float) -> None:
    plan = space().with_ranks(chain_plan(small(), (), ["npu"]), uniform(model, "npu", most_error))
    assert rank_violations(model, most_error, plan) == ()


def test_what_ranks_break_is_reported() -> None:
    model = RankCosts(
        space(),
        ChainCosts(MIXED, np.ones((3, len(small().operators))), np.zeros(3), np.zeros((len(small().operators), 3, 3))),
        np.full((3, len(space().places)), 2.0),
        Chains(small(), 1),
    )
    operator = min(space().options)
    plan = space().with_ranks(chain_plan(small(), (), ["npu"]), {operator: space().options[operator][0]})
    slower, wrong = rank_violations(model, 1e-3, plan)
    assert (slower.demand, slower.bound, slower.unit) == (1, 0, "triples")
    assert wrong.demand == pytest.approx(space().error(plan))
    assert "--max-error" in wrong.lever


# ----- plans with ranks, on the cost model and as files


def test_a_plan_with_ranks_costs_what_the_decomposed_model_costs() -> None:
    graph = draft("vgg11@0.25/32").graph()
    evaluator = CostModelEvaluator()
    platform = there(evaluator.described("pixel4"))
    found = RankSpace(graph, ChainSpace(graph, platform, 3))
    ranks = {o: options[0] for o, options in found.options.items()}
    processors = [p.name for p in platform.processors]
    cut = sorted(ranks)[2]
    plan = found.with_ranks(chain_plan(graph, (cut,), processors[:2]), ranks)
    made = outline(graph, ranks)
    before = cut + 2 * sum(o < cut for o in ranks)
    with evaluator.prepare(platform) as session:
        mine = session.load(graph, plan).run(2)
        theirs = session.load(made, chain_plan(made, (before,), processors[:2])).run(2)
        whole = session.load(graph, chain_plan(graph, (cut,), processors[:2])).run(1)
    np.testing.assert_allclose(mine.latency_s, theirs.latency_s)
    np.testing.assert_allclose(mine.stage_s, theirs.stage_s)
    assert there(mine.errors).shape == there(whole.errors).shape
    assert mine.relative_sigma == pytest.approx(theirs.relative_sigma)


def test_stages_hold_the_triples_of_their_convolutions() -> None:
    graph = load("vgg11@0.25/32+spectrum")
    found = RankSpace(graph, ChainSpace(graph, MIXED, 3))
    ranks = {o: options[-1] for o, options in found.options.items()}
    plan = found.with_ranks(chain_plan(graph, (5, 9), ["cpu0", "npu", "cpu0"]), ranks)
    lowering = Lowering(graph)
    made = lowering.lower(plan)
    made.plan.validate(made.graph, MIXED)
    for stage, before in zip(made.plan.stages, plan.stages, strict=True):
        assert {made.origins[o][0] for o in stage.operators} == set(before.operators)
    assert lowering.lower(plan).graph is made.graph
    (mine,), (theirs,) = (outputs(g, images(graph)) for g in (made.graph, decompose(graph, ranks).graph))
    np.testing.assert_array_equal(mine, theirs)
    assert sum(c.macs for c in operator_costs(made.graph)) < sum(c.macs for c in operator_costs(graph))


# ----- wrong input


def test_the_space_has_a_name() -> None:
    assert isinstance(make_space("cuts,ranks", small(), MIXED, 2), RankSpace)


@pytest.mark.parametrize(
    "ranks",
    [
        [[0, 0, 8]],
        [[99, 8, 8]],
        [[1, 8, 8], [0, 8, 8]],
        [[0, 8]],
        [[0, 8.5, 8]],
        7,
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks: object) -> None:
    document = chain_plan(small(), (), ["npu"]).to_json() | {"ranks": ranks}
    with fails(PlanError):
        Plan.from_json(document).validate(small(), MIXED)


def test_ranks_above_the_channels_are_refused() -> None:
    whole = chain_plan(small(), (), ["npu"])
    with fails(RewriteError):
        Lowering(small()).lower(replace(whole, ranks=(LayerRanks(0, 99, 8),)))
    with fails(PlanError):
        space().encode(replace(whole, ranks=(LayerRanks(0, 7, 7),)))


def test_models_without_such_convolutions_have_no_such_space() -> None:
    with fails(RewriteError):
        make_space("cuts,ranks", draft("mobilebert/8").graph(), MIXED, 2)
