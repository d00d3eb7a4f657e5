"""Split operators compute what the whole ones compute, or are refused with the reason."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from search_spaces.core.errors import RewriteError
from search_spaces.core.graph import Graph
from search_spaces.models.litert import read_model
from search_spaces.rewrites.locality import Window
from search_spaces.rewrites.splits import Axis, Split, SplitGraph, divide, extent, split_operators
from search_spaces.spaces.shared_parts import SharedParts
from tests.search_spaces.rewrites.test_tucker import outputs
from tests.support.models.split_models import SAME, VALID, Layers, layers
from tests.support.sentences import fails

AXES: tuple[Axis, ...] = ("height", "channels")


def splits(graph: Graph, data: st.DataObject, most_sides: int = 3) -> Split:
    """Draw a split that can be made; examples in which it cannot are passed over."""
    first = data.draw(st.integers(0, len(graph.operators) - 1))
    last = data.draw(st.integers(first + 1, len(graph.operators)))
    axis = data.draw(st.sampled_from(AXES))
    try:
        length = extent(graph, first, last, axis)
        assume(length > 1)
        cuts = data.draw(st.sets(st.integers(1, length - 1), min_size=1, max_size=most_sides - 1))
        found = Split(first, last, axis, tuple(sorted(cuts)))
        divide(graph, found)
    except RewriteError:
        assume(condition=False)
    return found


def agree(drawn: Layers, made: tuple[Split, ...] | None, data: st.DataObject | None, *, exact: bool) -> SplitGraph:
    """Split a model and compare what it computes with what it computed before."""
    with tempfile.TemporaryDirectory() as folder:
        graph = read_model(drawn.net.write(Path(folder) / "model.tflite"))
        found = split_operators(graph, made or (splits(graph, data),) if data is not None else made or ())
        value = drawn.value()
        before, after = outputs(graph, value), outputs(found.graph, value)
    for a, b in zip(after, before, strict=True):
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max(initial=0.0))))
    assert [r.what for r in found.roles].count("join") >= 1
    assert len(found.roles) == len(found.graph.operators)
    return found


slow = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@slow
@given(drawn=layers(), data=st.data())
def test_a_split_model_computes_what_the_model_computes(drawn: Layers, data: st.DataObject) -> None:
    agree(drawn, None, data, exact=False)


@slow
@given(drawn=layers(int8=True), data=st.data())
def test_a_split_quantised_model_computes_the_same_bits(drawn: Layers, data: st.DataObject) -> None:
    agree(drawn, None, data, exact=True)


@given(
    size=st.integers(1, 7),
    stride=st.integers(1, 4),
    rows_in=st.integers(1, 30),
    same=st.booleans(),
    data=st.data(),
)
def test_windows_read_what_they_look_at(
    size: int, stride: int, rows_in: int, *, same: bool, data: st.DataObject
) -> None:
    rows_out = -(-rows_in // stride) if same else -(-(rows_in - size + 1) // stride)
    assume(rows_out > 0)
    window = Window(size, stride, rows_in, rows_out, same)
    first = data.draw(st.integers(0, rows_out - 1))
    last = data.draw(st.integers(first + 1, rows_out))
    looked_at = [r * stride - window.before + k for r in range(first, last) for k in range(size)]
    inside = [r for r in looked_at if 0 <= r < rows_in]
    found = window.needs((first, last))
    assert found.read == (min(inside), max(inside) + 1)
    assert (found.before, found.after) == (max(0, -looked_at[0]), max(0, looked_at[-1] - rows_in + 1))
    if same:
        part = window.same_slice((first, last))
        assert part.read[0] <= found.read[0]
        assert part.read[1] >= found.read[1]
        assert part.skip + last - first <= part.rows


def chain(tmp_path: Path) -> tuple[Layers, Graph]:
    found = Layers((1, 12, 10, 4))
    found.conv(8)
    found.conv(8, stride=2)
    found.pool("MAX_POOL_2D", 2, 2, VALID)
    found.dense(10)
    found.layer("SOFTMAX", [found.last], (1, 10), None)
    return found, read_model(found.done().write(tmp_path / "chain.tflite"))


def test_a_chain_meets_once(tmp_path: Path) -> None:
    drawn, graph = chain(tmp_path)
    found = agree(drawn, (Split(0, 3, "height", (1,)), Split(3, 4, "channels", (6,))), None, exact=False)
    kinds = [o.kind for o in found.graph.operators]
    assert kinds.count("CONCATENATION") == 2
    assert kinds.count("CONV_2D") == 4
    assert {r.side for r in found.roles if r.what == "side"} == {0, 1}
    assert divide(graph, Split(0, 3, "height", (1,))).pieces[0][0].rows == (0, 5)  # of 12, with the halo


def test_weights_stay_where_they_are(tmp_path: Path) -> None:
    drawn = Layers((1, 8, 8, 64))
    drawn.conv(64)
    drawn.dense(64)
    graph = read_model(drawn.done().write(tmp_path / "wide.tflite"))
    found = split_operators(graph, [Split(0, 1, "height", (3,)), Split(1, 2, "channels", (20,))]).graph
    assert found.source is not None
    assert graph.source is not None
    inside = sum(len(b.data) for b in found.source.schema.buffers if b.data is not None)
    assert inside - sum(len(b.data) for b in graph.source.schema.buffers if b.data is not None) < 2048
    assert found.source.path == graph.source.path
    assert found.source.content_digest() != graph.source.content_digest()
    agree(drawn, (Split(0, 1, "height", (3,)), Split(1, 2, "channels", (20,))), None, exact=False)


def test_a_mean_over_height_is_a_sum_of_the_sides(tmp_path: Path) -> None:
    drawn = Layers((1, 9, 5, 4))
    drawn.conv(8)
    drawn.mean()
    drawn.done()
    found = agree(drawn, (Split(0, 2, "height", (4,)),), None, exact=False)
    assert "CONCATENATION" not in {o.kind for o in found.graph.operators}


def test_factors_of_a_normalisation_are_computed_on_both_sides(tmp_path: Path) -> None:
    drawn = Layers((1, 9, 5, 4))
    wide = drawn.conv(8)
    mean = drawn.mean()
    shape = (1, 1, 1, 8)
    shifted = drawn.layer("ADD", [mean, drawn.constant(8)], shape, schema.AddOptionsT())
    factor = drawn.layer("MUL", [shifted, drawn.constant(1, 1, 1, 8)], shape, schema.MulOptionsT())
    drawn.layer("MUL", [wide, factor], (1, 9, 5, 8), schema.MulOptionsT())
    drawn.layer("SUB", [drawn.last, shifted], (1, 9, 5, 8), schema.SubOptionsT())
    drawn.conv(8)
    drawn.done()
    graph = agree(drawn, (Split(0, 2, "height", (4,)), Split(2, 7, "height", (3,))), None, exact=False).graph
    assert sum(o.kind == "CONCATENATION" for o in graph.operators) == 2, "of both convolutions, and nothing between"
    parts = SharedParts(read_model(drawn.net.write(tmp_path / "model.tflite")))
    assert parts.cuts(2, 7, "height")
    assert not parts.cuts(2, 5, "height"), "the last of them reads what another operator needs, too"
    assert not parts.cuts(1, 7, "height"), "the mean is known when the sides have met"


@pytest.mark.parametrize(
    "split",
    [
        Split(4, 5, "height", (3,)),
        Split(4, 5, "channels", (3,)),
        Split(0, 1, "height", (0,)),
        Split(0, 1, "height", (12,)),
        Split(0, 1, "height", (7, 5)),
        Split(0, 2, "channels", (4,)),
        Split(3, 3, "height", (1,)),
        Split(0, 9, "height", (1,)),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(tmp_path: Path, split: Split) -> None:
    _, graph = chain(tmp_path)
    with fails(RewriteError):
        split_operators(graph, [split])


def test_open_dimensions_are_refused_with_what_to_do(tmp_path: Path) -> None:
    _, graph = chain(tmp_path)
    tensors = list(graph.tensors)
    output = graph.operators[0].outputs[0]
    tensors[output] = replace(tensors[output], shape=(1, -1, 10, 8))
    with fails(RewriteError) as caught:
        split_operators(replace(graph, tensors=tuple(tensors)), [Split(0, 1, "height", (3,))])
    assert "--input-shape" in str(caught.value)


def test_a_halo_larger_than_the_slice(tmp_path: Path) -> None:
    drawn = Layers((1, 7, 5, 4))
    drawn.conv(4, size=4, dilation=2, padding=SAME)
    drawn.conv(6, size=5)
    drawn.done()
    for cuts in ((1,), (6,), (1, 2, 3, 4, 5, 6)):
        agree(drawn, (Split(0, 2, "height", cuts),), None, exact=False)


def test_splits_may_not_overlap(tmp_path: Path) -> None:
    _, graph = chain(tmp_path)
    with fails(RewriteError):
        split_operators(graph, [Split(0, 2, "height", (1,)), Split(1, 3, "height", (1,))])


def test_a_cut_through_a_group_is_refused(tmp_path: Path) -> None:
    drawn = Layers((1, 6, 6, 4))
    drawn.conv(6, groups=2)
    graph = read_model(drawn.done().write(tmp_path / "groups.tflite"))
    with fails(RewriteError):
        split_operators(graph, [Split(0, 1, "channels", (2,))])


def test_a_reshape_cannot_be_split(tmp_path: Path) -> None:
    drawn = Layers((1, 4, 4, 2))
    drawn.conv(4)
    drawn.net.outputs(drawn.net.reshape(drawn.last, (1, 16, 2, 2)))
    graph = read_model(drawn.net.write(tmp_path / "reshape.tflite"))
    with fails(RewriteError):
        split_operators(graph, [Split(0, 2, "height", (2,))])
