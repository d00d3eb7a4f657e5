"""Stages compute what the whole computes, bit for bit, however the model is partitioned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from tests.support.models.stage_models import apart, calling, counter, same
from tests.support.models.tflite_models import SHAPE, Net, nets, variable
from tests.support.sentences import fails
from tests.support.strategies import placements

PROCESSOR = Platform("one", (Processor("cpu", "cpu", {}, "cpu"),))


# The law


@given(nets(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_acyclic_partition_computes_what_the_whole_computes(folder: Path, net: Net, data: st.DataObject) -> None:
    graph = read_model(net.write(folder / "m.tflite"))
    plan = data.draw(placements(graph, PROCESSOR))
    plan.validate(graph)
    same(graph, [s.operators for s in plan.stages], folder, views=data.draw(st.booleans()))


# Constants that operators compute


def test_operators_of_constants_are_copied_into_each_stage_that_reads_them(folder: Path) -> None:
    net = Net()
    x = net.input()
    half = net.constant(np.ones((2, 1, 1, 2), np.float16))
    kernel = net.op("DEQUANTIZE", [half], net.tensor((2, 1, 1, 2)), schema.DequantizeOptionsT())
    bias = net.constant(np.zeros(2, np.float32))
    net.outputs(net.conv(net.op("RELU", [net.conv(x, kernel, bias)]), kernel, bias))
    graph = read_model(net.write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["CONV_2D", "RELU", "CONV_2D"]
    assert graph.tensors[kernel].constant
    assert [len(cut_stage(graph, s).schema.subgraphs[0].operators) for s in apart(graph)] == [2, 1, 2]
    assert graph.boundary([2]).inputs == (graph.operators[1].outputs[0],)
    same(graph, apart(graph), folder)
    same(graph, apart(graph), folder, views=True)


def test_a_constant_that_is_an_output_is_computed_by_one_stage(folder: Path) -> None:
    net = Net()
    x, one = net.input(), net.constant(np.ones(SHAPE, np.float32))
    two = net.add(one, one)
    net.outputs(net.add(x, two), two)
    graph = read_model(net.write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["ADD", "ADD"]
    same(graph, apart(graph), folder)


# State


def test_a_variable_is_never_separated_from_those_who_use_it(folder: Path) -> None:
    graph = read_model(counter().write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["GROUP", "NEG", "ADD", "NEG"]
    assert [p.kind for p in graph.operators[0].parts] == [
        "CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ADD", "RELU", "ADD", "ASSIGN_VARIABLE",
    ]  # fmt: skip
    for views in (False, True):
        same(graph, apart(graph), folder, views=views, times=3)


@pytest.mark.parametrize(("second", "handles"), [("v", 2), ("w", 2)])
def test_handles_of_one_name_are_one_state(folder: Path, second: str, handles: int) -> None:
    graph = read_model(counter(second).write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["GROUP", "NEG", "ADD", "NEG"]  # one initialiser writes both
    assert [p.kind for p in graph.operators[0].parts].count("VAR_HANDLE") == handles
    same(graph, apart(graph), folder, times=3)


def test_variables_of_two_names_can_be_apart(folder: Path) -> None:
    net = Net()
    x = net.input()
    for name in ("v", "w"):
        handle, before = variable(net, name)
        x = net.add(x, before)
        net.op("ASSIGN_VARIABLE", [handle, x], [], schema.AssignVariableOptionsT())
    graph = read_model(net.outputs(x).write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["GROUP", "GROUP"]


def test_an_operator_keeps_its_variable_tensors(folder: Path) -> None:
    net = Net()
    x = net.input((1, 4))
    features = net.constant(np.ones((2, 4), np.float32))
    time = net.constant(np.ones((2, 3), np.float32))
    state = net.tensor((1, 6), isVariable=True)
    options = schema.SVDFOptionsT(rank=1)
    y = net.op("SVDF", [x, features, time, -1, state], net.tensor((1, 2)), options)
    net.outputs(net.op("RELU", [y], net.tensor((1, 2))))
    graph = read_model(net.write(folder / "m.tflite"))
    assert graph.boundary([0]).inputs == (x,)
    assert [s.isVariable for s in cut_stage(graph, [0]).schema.subgraphs[0].tensors].count(True) == 1
    same(graph, apart(graph), folder, times=4)


# Subgraphs


@pytest.mark.parametrize("nested", [False, True])
def test_subgraphs_go_with_those_who_call_them(folder: Path, nested: bool) -> None:
    graph = read_model(calling(nested=nested).write(folder / "m.tflite"))
    assert [o.kind for o in graph.operators] == ["NEG", "IF", "NEG"]
    stage = cut_stage(graph, [1])
    assert [s.name for s in stage.schema.subgraphs[1:]] == [b"then", b"else", b"inner"][: 2 + nested]
    assert len(cut_stage(graph, [0]).schema.subgraphs) == 1
    assert cut_stage(graph, [0]).weight_nbytes == 0
    assert stage.weight_nbytes == 24
    for views in (False, True):
        same(graph, apart(graph), folder, views=views)


# What cannot be cut


def test_calls_that_lead_nowhere_or_back(folder: Path) -> None:
    for then in (9, 0):
        net = calling()
        net.model.subgraphs[0].operators[1].builtinOptions.thenSubgraphIndex = then
        with fails(ModelError):
            read_model(net.write(folder / "m.tflite"))
    net = calling(nested=True)
    net.model.subgraphs[2].operators[0].builtinOptions.thenSubgraphIndex = 2
    with fails(ModelError):
        read_model(net.write(folder / "m.tflite"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("traversalOrder", [0, 0]), ("traversalOrder", []), ("dimMetadata", []), ("blockMap", [7]), ("blockMap", [0])],
)
def test_sparse_weights_that_cannot_be_unfolded(folder: Path, field: str, value: list[int]) -> None:
    net = Net()
    weights = net.constant(np.ones(4, np.float32), shape=(4, 8))
    levels = [schema.DimensionMetadataT(format=0, denseSize=4), schema.DimensionMetadataT(format=0, denseSize=8)]
    sparsity = schema.SparsityParametersT(traversalOrder=[0, 1], dimMetadata=levels)
    net.graph.tensors[weights].sparsity = sparsity
    dense = net.op("DENSIFY", [weights], net.tensor((4, 8)), schema.DensifyOptionsT())
    net.outputs(net.op("ADD", [net.input((4, 8)), dense], net.tensor((4, 8)), schema.AddOptionsT()))
    with fails(ModelError):
        read_model(net.write(folder / "m.tflite"))
    setattr(sparsity, field, value)
    with fails(ModelError):
        read_model(net.write(folder / "m.tflite"))
