from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.cost_model.features import (
    KERNELS,
    Columns,
    OperatorFeatures,
    columns,
    convolution_kernel,
    fused,
    fusions,
    operator_features,
)
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.intensity import operator_costs
from search_spaces.models.zoo import draft
from search_spaces.models.zoo.builder import Builder
from tests.benchmarks.phone_tables import features_of_row
from tests.support.sentences import fails
from tests.support.strategies import graphs, vgg16_graph

SIDES = st.integers(1, 64)


@given(graphs())
def test_features_say_what_the_costs_say(graph: Graph) -> None:
    features = operator_features(graph)
    assert len(features) == len(graph.operators)
    for feature, cost in zip(features, operator_costs(graph), strict=True):
        assert feature.kernel in KERNELS
        assert feature.macs == cost.macs
        assert feature.read_bytes + feature.weight_bytes == cost.read_bytes
        assert feature.written_bytes == cost.written_bytes
        assert 0 <= feature.resident_bytes <= feature.read_bytes
        assert min(*feature.input, *feature.output, *feature.filter, *feature.stride, feature.groups) >= 1


@given(graphs())
def test_columns_are_the_features_in_their_order(graph: Graph) -> None:
    features = operator_features(graph)
    rows = columns(features)
    assert rows.macs.tolist() == [f.macs for f in features]
    assert rows.pixels.tolist() == [f.output[0] * f.output[1] for f in features]
    picked = rows[np.array([0])]
    assert picked.read.tolist() == [features[0].read_bytes]
    assert columns([]).macs.shape == (0,)


def test_vgg16() -> None:
    features = operator_features(vgg16_graph())
    kernels = [f.kernel for f in features]
    assert kernels[:3] == ["conv", "winograd", "pool"]  # three channels in are too few for a transform to gain
    assert kernels[-4:-1] == ["fully_connected"] * 3
    assert sum(f.macs for f in features) == sum(c.macs for c in operator_costs(vgg16_graph()))
    second = features[1]
    assert second.resident_bytes == second.read_bytes == 224 * 224 * 64 * 4
    assert second.intensity == second.macs / second.moved_bytes


@pytest.mark.parametrize("model", ["mobilenet_v2", "squeezenet1_1", "regnet_y_32gf", "googlenet"])
def test_each_kernel_of_a_model_is_known(model: str) -> None:
    features = operator_features(draft(model).graph())
    assert "other" not in {f.kernel for f in features if not f.free}
    assert all(f.macs > 0 for f in features if f.kernel in {"conv", "winograd", "pointwise", "depthwise", "grouped"})
    assert {f.kernel for f in features if f.groups > 1} <= {"grouped", "depthwise"}


def test_operands_are_repeated_along_pixels_or_channels() -> None:
    net = Builder("repeats")
    x = net.input((1, 8, 8, 16))
    net.binary("MUL", x, net.input((1, 8, 8, 1), "gate"), "by pixel")
    net.binary("MUL", x, net.input((1, 1, 1, 16), "scale"), "by channel")
    net.binary("ADD", x, net.input((1, 1, 1, 1), "one"), "by one")
    features = operator_features(net.finish(net.add(x, x, "alike")).graph())
    assert [f.repeats for f in features] == ["channels", "pixels", "", ""]
    assert [f.fine for f in features] == [
        "elementwise/MUL+channels",
        "elementwise/MUL+pixels",
        "elementwise/ADD",
        "elementwise/ADD",
    ]
    assert [f.fine_once for f in features] == ["elementwise/MUL"] * 2 + ["elementwise/ADD"] * 2


def test_an_elementwise_operator_may_run_in_the_kernel_before_it() -> None:
    net = Builder("fused")
    x = net.input((1, 8, 8, 4))
    shortcut = net.conv(x, 4, 3, "first")
    y = net.add(net.conv(shortcut, 4, 3, "second"), shortcut, "sum")
    y = net.conv(net.unary("TANH", y, "tanh"), 4, 3, "third")
    y = net.binary("MUL", y, net.unary("LOGISTIC", y, "gate"), "by its own sigmoid")
    y = net.binary("MUL", net.conv(y, 4, 3, "fourth"), x, "by another tensor")  # has a kernel
    y = net.add(y, x, "into that")
    y = net.add(net.conv(y, 4, 3, "fifth"), x, "sum with an input")  # a stage does not compute that
    y = net.conv(y, 4, 3, "sixth")
    y = net.binary("MUL", y, y, "square")
    rows = net.reshape(y, (1, 64, 4), "rows")
    dense = net.unary("GELU", net.fully_connected(rows, 4, "dense", keep=True), "gelu")
    again = net.fully_connected(dense, 4, "again", keep=True)
    graph = net.finish(net.add(again, dense, "sum behind a fully connected layer")).graph()
    features, needs = operator_features(graph), fusions(graph)
    found = [(f.kind, needs[i]) for i, f in enumerate(features) if f.kernel == "elementwise"]
    assert found == [
        *(("ADD", (0, 1)), ("TANH", (2,)), ("LOGISTIC", (4,)), ("MUL", (4,)), ("MUL", ()), ("ADD", (8,))),
        *(("ADD", ()), ("MUL", ()), ("GELU", (15,)), ("ADD", ())),
    ]
    assert [f.fusable for f in features] == list(map(bool, needs))
    assert all(f.free for f, into in zip(fused(features), needs, strict=True) if into)


@pytest.mark.parametrize("outputs", [(), (2, 4)])
def test_an_elementwise_operator_of_a_damaged_file_is_not_fused(outputs: tuple[int, ...]) -> None:
    tensors = tuple(Tensor(f"t{i}", (1, 4, 4, 2), "float32", 128) for i in range(5))
    conv, gate = Operator("CONV_2D", (0,), (1,)), Operator("LOGISTIC", (1,), outputs)
    graph = Graph("damaged", tensors, (conv, gate, Operator("MUL", (1, 0), (3,))), (0,), (3,))
    assert fusions(graph) == [(), (), ()]


@given(graphs())
def test_what_is_fused_follows_what_it_is_fused_with(graph: Graph) -> None:
    for index, into in enumerate(fusions(graph)):
        assert all(other < index for other in into)


def test_int8_has_kernels_of_its_own() -> None:
    feature = operator_features(vgg16_graph())[0]
    assert (feature.key, replace(feature, dtype="int8").key) == ("conv", "conv:int8")


@given(SIDES, SIDES, SIDES, st.integers(1, 5), st.integers(1, 2))
def test_a_row_says_what_a_graph_says(side: int, depth: int, filters: int, window: int, stride: int) -> None:
    fields = {"Input_shape": side, "Output_shape": -(-side // stride), "Input_channel": depth, "Filter": filters}
    feature = features_of_row("CONV_2D", {**fields, "Kernel": window, "Stride": stride, "Group": 1})
    out = fields["Output_shape"]
    assert feature.macs == out * out * filters * depth * window * window
    assert feature.read_bytes == side * side * depth * 4
    assert feature.written_bytes == out * out * filters * 4
    assert feature.weight_bytes == (depth * window * window + 1) * filters * 4


@pytest.mark.parametrize("fields", [{}, {"Input_shape": 7}])
def test_a_row_that_lacks_fields(fields: dict[str, int]) -> None:
    with pytest.raises((KeyError, ValueError)):
        features_of_row("CONV_2D", fields)


def test_a_row_of_an_unknown_operation() -> None:
    names = ("Input_shape", "Output_shape", "Input_channel", "Filter", "Kernel", "Stride", "Group")
    with fails(ValueError):
        features_of_row("FFT", dict.fromkeys(names, 1))


@pytest.mark.parametrize(
    ("side", "channels", "kernel"),
    [(56, (64, 64), "winograd"), (14, (256, 256), "conv"), (56, (128, 32), "conv"), (28, (61, 61), "winograd")],
)
def test_what_is_deep_and_large_is_transformed(side: int, channels: tuple[int, int], kernel: str) -> None:
    planes = (side, side, channels[0]), (side, side, channels[1])
    assert convolution_kernel((3, 3), (1, 1), 1, *planes) == kernel
    assert convolution_kernel((3, 3), (2, 2), 1, *planes) == "conv"


def test_columns_have_a_field_for_each_value() -> None:
    feature = OperatorFeatures("conv", "CONV_2D", 1, 2, 3, 4, (5, 6, 7), (8, 9, 10), (11, 12), (1, 1), 13, 14)
    rows = columns([feature])
    values = {name: float(getattr(rows, name)[0]) for name in Columns.__slots__}
    expected = {
        "macs": 1,
        "read": 2,
        "weight": 3,
        "written": 4,
        "resident": 0,
        "pixels": 72,
        "pixels_in": 30,
        "interval": 0,
        "matrix_share": 0,
    }
    assert values == {**expected, "channels": 10, "channels_in": 7, "taps": 132, "groups": 13, "inputs": 14}
