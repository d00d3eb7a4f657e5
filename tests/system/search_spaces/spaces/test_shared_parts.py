"""Parts that two processors share, all at once: grown chains say what each split says, and arrays price like parts."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.segment_model import SegmentModel
from search_spaces.core.errors import PlanError, RewriteError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.rewrites.splits import Axis, Split, divide, extent
from search_spaces.spaces.segment_space import EACH, SegmentSpace
from search_spaces.spaces.shared_chains import LONGEST
from search_spaces.spaces.shared_parts import Part, SharedParts
from tests.search_spaces.spaces.test_branches import Recipe, built, recipes
from tests.search_spaces.spaces.test_segment_space import read
from tests.support.models.split_models import Layers, layers
from tests.support.sentences import fails

AXES: tuple[Axis, ...] = ("height", "channels")
PROCESSORS = Platform(
    "mixed",
    (
        Processor("gpu", "gpu", {"gpu": 1.0}, "gpu"),
        Processor("big", "cpu", {"big": 1.0}, "big"),
        Processor("small", "cpu", {"small": 1.0}, "small"),
        Processor("both", "cpu", {"big": 1.0, "small": 1.0}, "both"),
    ),
)


def deep(count: int) -> Graph:
    """Return a chain of convolutions, each of which adds halo rows."""
    found = Layers((1, 64, 4, 2))
    for _ in range(count):
        found.conv(2)
    found.done()
    return read(found)


def model_of(space: SegmentSpace, seed: int) -> SegmentModel:
    """Return a model with transfers that differ, copies that cost or not, an unsupported operator, and corrections."""
    rng = np.random.default_rng(seed)
    processors, count = len(space.platform.processors), len(space.graph.operators)
    operator_s = rng.uniform(0.1, 1.0, (processors, count)) * rng.choice([1.0, 3.0], (processors, 1))
    operator_s[0, rng.integers(count)] = math.inf
    transfer_s = rng.uniform(0.0, 0.2, (count, processors, processors))
    costs = ChainCosts(space.platform, operator_s, rng.uniform(0.0, 0.1, processors), transfer_s)
    model = SegmentModel(space, costs, copy_s_per_byte=float(rng.choice([0.0, 1e-5])))
    model.usual |= {"whole": 1.1, "height": 0.9, "channels": 1.3, "branches": 1.2}
    for first, last, how, processor in (
        (int(first), int(rng.integers(first + 1, count + 1)), str(how), str(processor))
        for first in rng.integers(count, size=8)
        for how in rng.choice(["whole", "height", "channels", "branches"], 1)
        for processor in rng.choice([p.name for p in space.platform.processors], 1)
    ):
        model.corrections[first, last, how, processor] = sorted(
            (s, float(rng.uniform(0.5, 2.0))) for s in (0.2, 0.5, 1.5)
        )
    if rng.integers(2):
        model.join_s_per_byte = 2e-5
    return model


def least_s(model: SegmentModel, *, most: int = LONGEST, branches: bool = True, axes: Collection[Axis] = AXES) -> float:
    """Return what the best blocks take, each priced by itself."""
    space = model.space
    count = len(space.graph.operators)
    rest_s: list[dict[str | None, float]] = [{} for _ in range(count)] + [dict.fromkeys(space.processors, 0.0)]
    for first in reversed(range(count)):
        lasts = [last for last in range(first + 1, count + 1) if space.may_follow(first, last)]
        ways = [space.mode_at(first, last, i) for last in lasts for i in range(space.count(first, last))]
        ways = [w for w in ways if w.way not in AXES or (w.last - w.first <= most and w.way in axes)]
        ways = [w for w in ways if w.way not in EACH or EACH[w.way][0] in axes]
        ways = [w for w in ways if (branches or w.way != "branches") and (most or not w.way.startswith("each"))]
        for before in space.processors if first else (None,):
            rest_s[first][before] = min(model.block_s(w, before) + rest_s[w.last][w.on] for w in ways)
    return rest_s[0][None]


@settings(max_examples=25, deadline=None)
@given(drawn=layers(most=4), seed=st.integers(0, 2**16))
def test_the_optimum_is_that_of_parts_priced_one_by_one(drawn: Layers, seed: int) -> None:
    model = model_of(SegmentSpace(read(drawn), PROCESSORS), seed)
    for found, least in (
        (model.best(), least_s(model)),
        (model.best(chains=False), least_s(model, most=1)),
        (model.best(splits=False), least_s(model, most=0)),
    ):
        assert found.cost_s == pytest.approx(least)
        assert found.cost_s == model.price(model.space.plan(found.parts))
        assert all(a.last == b.first for a, b in pairwise(found.parts))
    first, last = sorted(np.random.default_rng(seed).choice(len(model.space.graph.operators) + 1, 2, replace=False))
    for before in (None, *model.space.processors):
        together = model.splits_s(int(first), int(last), before)
        each = {block: model.block_s(block, before) for block in together}
        assert together == pytest.approx(each)


@settings(max_examples=25, deadline=None)
@given(recipe=recipes(), seed=st.integers(0, 2**16))
def test_the_optimum_with_branches_is_that_of_parts_priced_one_by_one(recipe: Recipe, seed: int) -> None:
    graph, _ = built(recipe)
    space = SegmentSpace(graph, PROCESSORS)
    assume(all(4 ** len(segment.runs) <= 64 for segment in space.branching))  # all ways are tried one by one
    model = model_of(space, seed)
    assert model.best().cost_s == pytest.approx(least_s(model))
    assert model.best(branches=False).cost_s == pytest.approx(least_s(model, branches=False))
    for axis in AXES:
        along = model.best(chains=False, branches=False, axis=axis)
        assert along.cost_s == model.price(space.plan(along.parts))
        assert along.cost_s == pytest.approx(least_s(model, most=1, branches=False, axes=[axis]))


@settings(max_examples=25, deadline=None)
@given(drawn=layers())
def test_chains_can_be_split_where_each_by_itself_can(drawn: Layers) -> None:
    graph = read(drawn)
    parts = SharedParts(graph)
    count = len(graph.operators)
    for axis in AXES:
        for last in range(1, count + 1):
            chains = parts.chains(last, axis)
            for first in range(last):
                found = parts.cuts(first, last, axis)
                assert set(found.values()) == {c for c in chains.cuts.tolist() if divides(graph, first, last, axis, c)}
                for k, step in enumerate(chains.steps.tolist()):
                    if step in found:
                        check_sides(graph, parts, Split(first, last, axis, (found[step],)), k)


def divides(graph: Graph, first: int, last: int, axis: Axis, cut: int) -> bool:
    try:
        divide(graph, Split(first, last, axis, (cut,)))
    except RewriteError:
        return False
    return True


def check_sides(graph: Graph, parts: SharedParts, split: Split, k: int) -> None:
    """Check what arrays say of a cut against the split itself."""
    chains, sides = parts.chains(split.last, split.axis), divide(graph, split)
    d = split.last - split.first - 1
    for side, pieces in enumerate(sides.pieces):
        assert [p.rows[1] - p.rows[0] for p in reversed(pieces)] == chains.rows[k, side, : d + 1].tolist()
    assert chains.joined_nbytes[d] == sum(graph.tensors[t].nbytes for t in sides.shares)
    assert chains.given_nbytes[d] == sum(graph.tensors[t].nbytes for t in sides.shares if t in graph.outputs)


def test_chains_have_an_end() -> None:
    graph = deep(LONGEST + 2)
    space = SegmentSpace(graph, PROCESSORS)
    assert space.cuts(1, 1 + LONGEST, "height")
    assert not space.cuts(0, 1 + LONGEST, "height")
    assert extent(graph, 0, 1 + LONGEST, "height") == 64
    split = {"way_0": "height", "share_0": 8, "on_0": "gpu", "with_0": "big"}
    params = space.encode(space.plan([Part(0, LONGEST + 2, ("gpu",))]))
    assert space.parts(space.decode(params | split)) == (Part(0, LONGEST + 2, ("gpu",)),), "too long: it runs whole"
    found = space.parts(space.decode(params | split | {f"cut_{LONGEST}": True}))
    assert found[0] == Part(0, LONGEST, ("gpu", "big"), "height", 32)
    long = Part(0, LONGEST + 1, ("gpu", "big"), "height", 32)
    with fails(PlanError):
        space.encode(space.plan([long, Part(LONGEST + 1, LONGEST + 2, ("gpu",))]))
