"""Weights of the zoo's models, and what its builder makes of padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder
from tests.support.models.tflite_models import Array, run_pieces, some_inputs, whole_model
from tests.support.narrowing import there


def kernel(graph: Graph, name: str) -> Array:
    tensor = next(t for t in graph.tensors if t.name == f"{name}/kernel")
    assert graph.source is not None
    extent = graph.source.extents[tensor.buffer]
    found: Array = np.fromfile(graph.source.path, tensor.dtype, int(np.prod(tensor.shape)), offset=extent.offset)
    return found.reshape(tensor.shape)


def test_the_same_bytes_each_time(squeezenet: Graph, tmp_path: Path) -> None:
    draft("squeezenet1_1").write(tmp_path / "again.tflite")
    assert (tmp_path / "again.tflite").read_bytes() == there(squeezenet.source).path.read_bytes()


def test_a_weight_depends_on_its_name_alone(tmp_path: Path) -> None:
    def kernels(order: str) -> dict[str, bytes]:
        net = Builder("order")
        x = net.input((1, 8))
        outputs = [net.fully_connected(x, 4, name) for name in order]
        net.finish(*outputs).write(tmp_path / "order.tflite")
        graph = read_model(tmp_path / "order.tflite")
        return {name: kernel(graph, name).tobytes() for name in order}

    assert kernels("abc") == kernels("cab")
    assert len(set(kernels("abc").values())) == 3


def test_weights_are_he_normal(mobilenet: Graph) -> None:
    weights = kernel(mobilenet, "conv13_pointwise")
    assert weights.std() == pytest.approx((2 / 1024) ** 0.5, rel=0.01)
    assert weights.mean() == pytest.approx(0, abs=1e-4)


def test_a_decaying_spectrum_keeps_the_energy_in_a_quarter_of_the_rank(cache_folder: Path) -> None:
    plain, low = (load(f"resnet18@0.25/64{suffix}") for suffix in ("", "+spectrum"))
    assert plain.digest == low.digest
    for name in ("layer2_0/conv2", "layer4_1/conv1", "layer3_0/shortcut"):
        flat, decaying = kernel(plain, name), kernel(low, name)
        assert decaying.std() == pytest.approx(flat.std(), rel=0.25)
        for axis in (0, -1):  # the unfoldings that Tucker-2 factors (seed 001)
            energies = []
            for weights in (flat, decaying):
                unfolded = np.moveaxis(weights, axis, 0).reshape(weights.shape[axis], -1)
                values = np.linalg.eigvalsh(unfolded @ unfolded.T)  # squares of singular values, ascending
                energies.append(values[-(len(values) // 4) :].sum() / values.sum())
            assert energies[0] < 0.85
            assert energies[1] > 0.95


@pytest.mark.litert
def test_a_decaying_spectrum_keeps_deep_networks_alive(cache_folder: Path) -> None:
    graph = load("resnet152@0.25/64+spectrum")
    results = [run_pieces(whole_model(graph), some_inputs(graph, seed))[0][graph.outputs[0]] for seed in (1, 2)]
    assert np.isfinite(results).all()
    assert np.abs(results[0] - results[1]).max() > 0.01 * results[0].max()


@pytest.mark.litert
def test_a_matrix_product_takes_four_dimensions(tmp_path: Path) -> None:
    net = Builder("fc")
    net.finish(net.fully_connected(net.input((1, 2, 3, 4)), 5, "fc")).write(tmp_path / "fc.tflite")
    graph = read_model(tmp_path / "fc.tflite")
    (found,) = run_pieces(whole_model(graph), some_inputs(graph))
    assert found[graph.outputs[0]].shape == (1, 5)


# Padding


@pytest.mark.litert
@given(st.integers(7, 40), st.integers(1, 7), st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_padding_by_a_number_gives_pytorchs_sizes(
    tmp_path_factory: pytest.TempPathFactory, side: int, size: int, stride: int, data: st.DataObject
) -> None:
    """And a PAD operator only where SAME is not the same; CEIL gives Caffe's sizes."""
    padding = data.draw(st.integers(0, size // 2))
    net = Builder("padding")
    x = net.input((1, side, side, 2))
    y = net.conv(x, 3, size, "conv", stride=stride, padding=padding)
    if side >= size >= stride:
        pool = Builder("pool")
        z = pool.max_pool(pool.input(x.shape), size, stride, "pool", padding="CEIL")
        assert z.shape[1] == -(-(side - size) // stride) + 1
    assert y.shape[1] == (side + 2 * padding - size) // stride + 1
    path = tmp_path_factory.getbasetemp() / "padding.tflite"
    net.finish(y).write(path)
    graph = read_model(path)
    (found,) = run_pieces(whole_model(graph), some_inputs(graph))
    assert found[graph.outputs[0]].shape == y.shape
    same = max(0, (-(-side // stride) - 1) * stride + size - side)
    assert len(graph.operators) == 1 + (padding > 0 and same != 2 * padding)
