"""Tucker-2: what is decomposed computes the same at full rank, loses what it says it loses, and takes fewer MACs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from search_spaces.core.errors import OptimizeError, RewriteError, UsageError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.models.zoo import draft
from search_spaces.rewrites.tucker import (
    INPUTS,
    OUTPUTS,
    Layer,
    Ranks,
    decompose,
    factor,
    find_layer,
    outline,
    spectrum,
    tucker_layers,
)
from search_spaces.rewrites.tucker_ranks import (
    GIVEN,
    SEED_001,
    VBMF,
    Choosing,
    choose_ranks,
    energy,
    energy_rank,
    evbmf_rank,
    parse_rule,
    ratio,
)
from tests.support.models.split_models import Layers, layers
from tests.support.models.tflite_models import Array, run_pieces
from tests.support.sentences import fails, says

KERNELS = st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(-1, 1))
)


def outputs(graph: Graph, value: Array) -> list[Array]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tflite")
        cut_stage(graph, range(len(graph.operators))).write(path)
        (found,) = run_pieces([(str(path), b"", graph.inputs, graph.outputs)], {graph.inputs[0]: value})
    return [found[t] for t in graph.outputs]


def agree(before: Graph, after: Graph, value: Array) -> None:
    for a, b in zip(outputs(after, value), outputs(before, value), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(b).max(initial=0.0))))


def images(graph: Graph) -> Array:
    found: Array = np.random.default_rng(0).uniform(-1, 1, graph.tensors[graph.inputs[0]].shape).astype(np.float32)
    return found


def ranks_of(graph: Graph, how: Choosing) -> dict[int, Ranks]:
    return {c.layer.operator: c.ranks for c in choose_ranks(graph, how) if c.ranks is not None}


@settings(max_examples=30)
@given(KERNELS)
def test_full_rank_loses_nothing(kernel: Array) -> None:
    found = factor(kernel, kernel.shape[INPUTS], kernel.shape[OUTPUTS])
    np.testing.assert_allclose(found.whole(), kernel, atol=1e-12)


@settings(max_examples=30)
@given(KERNELS, st.data())
def test_what_is_lost_is_at_most_what_both_unfoldings_lose_and_sweeps_only_gain(
    kernel: Array, data: st.DataObject
) -> None:
    ranks = [data.draw(st.integers(1, kernel.shape[axis])) for axis in (INPUTS, OUTPUTS)]
    rough, fine = factor(kernel, *ranks, sweeps=0), factor(kernel, *ranks)
    bound = sum(float(spectrum(kernel, a)[r:].sum()) for a, r in zip((INPUTS, OUTPUTS), ranks, strict=True))
    lost = [float(((kernel - found.whole()) ** 2).sum()) for found in (rough, fine)]
    assert lost[1] <= lost[0] + 1e-9
    assert lost[0] <= bound + 1e-9
    for found in (rough, fine):
        np.testing.assert_allclose(found.first @ found.first.T, np.eye(ranks[0]), atol=1e-9)
        np.testing.assert_allclose(found.last.T @ found.last, np.eye(ranks[1]), atol=1e-9)


@given(arrays(np.float64, st.integers(1, 9), elements=st.floats(0, 1)), st.floats(0.01, 1))
def test_an_energy_rank_is_the_least_that_keeps_its_share(values: Array, share: float) -> None:
    squared = np.sort(values)[::-1]
    rank = energy_rank(squared, share)
    assert 1 <= rank <= len(squared)
    if squared.sum() > 0:
        assert squared[:rank].sum() >= share * squared.sum() * (1 - 1e-9)
        assert rank == 1 or squared[: rank - 1].sum() < share * squared.sum()


@settings(max_examples=20)
@given(st.integers(16, 48), st.integers(1, 8), st.integers(0, 6), st.sampled_from((0.0, 0.05, 0.2)), st.integers(0, 99))
def test_vbmf_finds_the_rank_under_the_noise(rows: int, times: int, rank: int, noise: float, seed: int) -> None:
    assume(rank or noise)
    assume(rank or rows >= 32)  # asymptotic: 2 % of 16 x 16 values of noise alone seem to hold something
    rng = np.random.default_rng(seed)
    parts = [np.linalg.qr(rng.standard_normal((n, max(rank, 1))))[0][:, :rank] for n in (rows, rows * times)]
    matrix = 10 * parts[0] @ parts[1].T + noise * rng.standard_normal((rows, rows * times))
    squared = np.linalg.svd(matrix, compute_uv=False) ** 2
    assert evbmf_rank(squared, matrix.shape) == rank
    assert evbmf_rank(squared, (matrix.shape[1], matrix.shape[0])) == rank


def test_vbmf_finds_nothing_in_nothing() -> None:
    assert evbmf_rank(np.zeros(4), (4, 9)) == 0
    with fails(ValueError):
        evbmf_rank(np.ones(3), (4, 9))


@settings(max_examples=12)
@given(layers(most=4), st.data())
def test_a_network_at_full_rank_computes_the_same(drawn: Layers, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph = read_model(drawn.net.write(Path(folder) / "model.tflite"))
        try:
            found = tucker_layers(graph)
        except RewriteError:
            assume(condition=False)
        made = decompose(graph, {x.operator: x.full for x in found})
        lower = {x.operator: Ranks(*(data.draw(st.integers(1, n)) for n in x.full)) for x in found}
        smaller = decompose(graph, lower)
        agree(graph, made.graph, drawn.value())
        assert all(np.isfinite(x).all() for x in outputs(smaller.graph, drawn.value()))
    assert max(made.errors.values()) < 1e-6
    check_structure(graph, smaller.graph, smaller.origins, lower, found)


def check_structure(
    graph: Graph, made: Graph, origins: tuple[int, ...], ranks: dict[int, Ranks], found: tuple[Layer, ...]
) -> None:
    """Check that what is written, what is outlined and what is counted beforehand are one."""
    drawn = outline(graph, ranks)
    assert [(o.kind, dict(o.options)) for o in drawn.operators] == [(o.kind, dict(o.options)) for o in made.operators]
    costs = operator_costs(made)
    assert operator_costs(drawn) == costs
    before = operator_costs(graph)
    for layer in found:
        assert before[layer.operator].macs == layer.macs()
        triple = [c.macs for c, origin in zip(costs, origins, strict=True) if origin == layer.operator]
        assert len(triple) == 3
        assert sum(triple) == layer.macs(ranks[layer.operator])
    assert sorted(set(origins)) == list(range(len(graph.operators)))


@pytest.mark.parametrize("name", ["squeezenet", "mobilenet", "mobilenet_v1@0.25/64:f16"])
def test_networks_at_full_rank_compute_the_same(name: str, request: pytest.FixtureRequest) -> None:
    graph: Graph = request.getfixturevalue(name) if name in ("squeezenet", "mobilenet") else load(name)
    found = tucker_layers(graph)
    made = decompose(graph, {x.operator: x.full for x in found})
    agree(graph, made.graph, images(graph))
    assert [made.graph.tensors[t].name for t in made.graph.outputs] == [graph.tensors[t].name for t in graph.outputs]


def test_depthwise_and_1x1_convolutions_are_left_alone(mobilenet: Graph, squeezenet: Graph) -> None:
    assert [x.kernel for x in tucker_layers(mobilenet)] == [(3, 3)]
    assert {x.kernel for x in tucker_layers(squeezenet)} == {(3, 3)}


def test_weights_that_are_kept_stay_in_the_file(squeezenet: Graph) -> None:
    layer = tucker_layers(squeezenet)[2]
    made = decompose(squeezenet, {layer.operator: Ranks(8, 8)}).graph
    stage = cut_stage(made, range(len(made.operators)))
    assert made.source is not None
    assert squeezenet.source is not None
    assert made.source.path == squeezenet.source.path
    assert len(stage.buffers) == len(cut_stage(squeezenet, range(len(squeezenet.operators))).buffers) - 1
    assert made.source.content_digest() != squeezenet.source.content_digest()


# ----- ranks


def test_a_decaying_spectrum_gives_energy_and_vbmf_something_to_drop() -> None:
    graph = load("squeezenet1_1@0.25/64+spectrum")
    for rule, most in ((energy(0.9), 0.2), (VBMF, 0.2)):
        ranks = ranks_of(graph, Choosing(rule, multiple=1))
        assert len(ranks) >= 8
        made = decompose(graph, ranks)
        assert sum(c.macs for c in operator_costs(made.graph)) < sum(c.macs for c in operator_costs(graph))
        (before,), (after,) = outputs(graph, images(graph)), outputs(made.graph, images(graph))
        assert np.linalg.norm(after - before) < most * np.linalg.norm(before)


def test_random_weights_have_no_rank_to_spare() -> None:
    graph = load("squeezenet1_1@0.5/64")
    assert ranks_of(graph, Choosing(energy(0.95))) == {}
    (why,) = {c.why for c in choose_ranks(graph, Choosing(VBMF))}
    says(why)


@given(st.floats(0.05, 1), st.sampled_from((1, 4, 8, 16)))
@settings(max_examples=20)
def test_ranks_are_multiples_and_within_the_channels(share: float, multiple: int) -> None:
    graph = draft("vgg11@0.25/32").graph()
    rule = ratio(share, share)
    for choice in choose_ranks(graph, Choosing(rule, multiple=multiple, even_larger=True)):
        assert choice.ranks is not None
        for rank, channels in zip(choice.ranks, choice.layer.full, strict=True):
            assert rank == channels or rank % multiple == 0 or rank == 8
            assert rank <= max(share * channels + 1e-6, min(multiple, 8, channels))
    assert all(max(c.ranks or (0,)) <= 24 for c in choose_ranks(graph, Choosing(rule, multiple=multiple, most=24)))
    for choice in choose_ranks(graph, Choosing(rule, multiple=multiple)):
        assert choice.ranks is None or choice.layer.macs(choice.ranks) < choice.layer.macs()


@pytest.mark.parametrize(
    ("name", "published"), [("vgg16", 81.0), ("resnet152", 38.6), ("inception_v3", 62.8), ("regnet_y_32gf", 35.8)]
)
def test_one_rule_saves_what_the_seed_saves(name: str, published: float) -> None:
    graph = draft(name).graph()
    made = outline(graph, ranks_of(graph, SEED_001))
    before, after = (sum(c.macs for c in operator_costs(g)) for g in (graph, made))
    assert 100 * (1 - after / before) == pytest.approx(published, abs=0.7)


def test_given_ranks_are_taken_as_they_are() -> None:
    graph = draft("vgg11").graph()
    layer = find_layer(tucker_layers(graph), "conv3_1")
    assert ranks_of(graph, Choosing(GIVEN, {layer.operator: Ranks(5, 7)})) == {layer.operator: Ranks(5, 7)}
    both = ranks_of(graph, Choosing(ratio(0.25, 0.25), {layer.operator: Ranks(5, 7)}))
    assert both[layer.operator] == Ranks(5, 7)
    assert len(both) > 5


# ----- wrong input


@pytest.mark.parametrize("ranks", [Ranks(0, 8), Ranks(8, 0), Ranks(65, 8), Ranks(8, 129), Ranks(-1, 1)])
def test_ranks_that_cannot_be_are_refused(ranks: Ranks) -> None:
    graph = draft("vgg11").graph()
    operator = find_layer(tucker_layers(graph), "conv2_1").operator
    with fails(RewriteError):
        outline(graph, {operator: ranks})
    with fails(RewriteError):
        choose_ranks(graph, Choosing(GIVEN, {operator: ranks}))


def test_an_operator_that_is_no_such_convolution_is_refused() -> None:
    graph = draft("vgg11").graph()
    with fails(RewriteError):
        outline(graph, {1: Ranks(1, 1)})
    with fails(RewriteError):
        find_layer(tucker_layers(graph), "conv9_9")


@pytest.mark.parametrize(
    "text", ["", "best", "ratio", "ratio:", "ratio:0", "ratio:1.1", "energy:nan", "vbmf:1", "energy:x", "ratio:1,2,3"]
)
def test_rules_that_are_none_are_refused(text: str) -> None:
    with fails(UsageError):
        parse_rule(text)


def test_models_with_nothing_to_decompose_are_refused(tmp_path: Path) -> None:
    with fails(RewriteError):
        tucker_layers(draft("mobilebert/8").graph())
    drawn = Layers((1, 8, 8, 4), int8=True)
    drawn.conv(4)
    graph = read_model(drawn.done().write(tmp_path / "model.tflite"))
    with fails(RewriteError):
        tucker_layers(graph)
    with fails(OptimizeError):
        decompose(draft("vgg11").graph(), {})
