"""Stages compute what the whole computes, bit for bit, however the model is partitioned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.chain import ChainSpace
from search_spaces.errors import ModelError
from search_spaces.graph import Graph
from search_spaces.models.litert import read_model
from search_spaces.models.stages import StageModel, cut_stage
from search_spaces.models.writer import pack_header, point_outside, write_model
from search_spaces.plan import Plan, Stage, canonical
from search_spaces.platform import Platform, Processor
from tests.tflite_models import SHAPE, TYPES, Array, Net, Piece, nets, run_pieces, variable, with_signature

LANE = Platform("one", (Processor("cpu", "cpu", {}, "cpu"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


def values(graph: Graph) -> dict[int, Array]:
    random = np.random.default_rng(0)
    return {i: random.uniform(-1, 1, graph.tensors[i].shape).astype(graph.tensors[i].dtype) for i in graph.inputs}


def whole(graph: Graph) -> list[Piece]:
    assert graph.source is not None
    return [(str(graph.source.path), b"", graph.inputs, graph.outputs)]


def pieces(graph: Graph, stages: Iterable[Sequence[int]], folder: Path, *, views: bool) -> list[Piece]:
    found: list[Piece] = []
    for index, operators in enumerate(stages):
        stage = cut_stage(graph, operators)
        if views:
            found.append((str(stage.source.path), stage.view(), stage.inputs, stage.outputs))
        else:
            path = folder / f"stage_{index}.tflite"
            stage.write(path)
            found.append((str(path), b"", stage.inputs, stage.outputs))
    return found


def same(graph: Graph, stages: Iterable[Sequence[int]], folder: Path, *, views: bool = False, times: int = 1) -> None:
    given_values = values(graph)
    wanted = run_pieces(whole(graph), given_values, times)
    found = run_pieces(pieces(graph, stages, folder, views=views), given_values, times)
    for mine, theirs in zip(found, wanted, strict=True):
        for tensor in graph.outputs:
            assert mine[tensor].tobytes() == theirs[tensor].tobytes(), tensor


def apart(graph: Graph) -> list[list[int]]:
    return [[i] for i in range(len(graph.operators))]


@st.composite
def partitions(draw: st.DrawFn, graph: Graph) -> Plan:
    """Every partition whose quotient graph is acyclic can be drawn: circles are joined into one stage."""
    labels = [draw(st.integers(0, 3)) for _ in graph.operators]
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(set(labels))
    quotient.add_edges_from((labels[b], labels[o]) for o in range(len(labels)) for b in graph.predecessors(o))
    joined = list(nx.strongly_connected_components(quotient))
    stages = tuple(Stage(tuple(o for o, label in enumerate(labels) if label in group), "cpu") for group in joined)
    return canonical(Plan(graph.digest, stages), graph, LANE)


# The law


@given(nets(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_acyclic_partition_computes_what_the_whole_computes(folder: Path, net: Net, data: st.DataObject) -> None:
    graph = read_model(net.write(folder / "m.tflite"))
    plan = data.draw(partitions(graph))
    plan.validate(graph)
    same(graph, [s.operators for s in plan.stages], folder, views=data.draw(st.booleans()))


@given(nets(), st.data())
@settings(max_examples=60, deadline=None)
def test_no_decoded_plan_has_a_circle(folder: Path, net: Net, data: st.DataObject) -> None:
    graph = read_model(net.write(folder / "m.tflite"))
    space = ChainSpace(graph, LANE, data.draw(st.integers(1, len(graph.operators))))
    plan = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
    plan.validate(graph, LANE)
    assert canonical(plan, graph, LANE) == plan == space.decode(space.encode(plan))


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


def initialised(net: Net, names: Iterable[str]) -> Net:
    """Give variables the value 5 in subgraph 1; a runtime reads whatever memory holds where nobody has written."""
    net.body("init")
    for name in names:
        handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), schema.VarHandleOptionsT("", name))
        net.op("ASSIGN_VARIABLE", [handle, net.constant(np.full(SHAPE, 5, np.float32))], [])
    return net


def counter(second: str = "") -> Net:
    """A sum over all runs, assigned far from where it is read; a second variable may be added to another output."""
    net = Net()
    x = net.input()
    net.op("CALL_ONCE", [], [], schema.CallOnceOptionsT(initSubgraphIndex=1))
    neg = net.op("NEG", [x], options=schema.NegOptionsT())
    handle, before = variable(net)
    after = net.add(net.op("RELU", [net.add(x, before)]), x)
    net.op("ASSIGN_VARIABLE", [handle, after], [], schema.AssignVariableOptionsT())
    last = net.add(neg, variable(net, second)[1] if second else x)
    net.outputs(after, net.op("NEG", [last], options=schema.NegOptionsT()))
    return initialised(net, sorted({"v", second} - {""}))


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


def calling(*, nested: bool = False) -> Net:
    """NEG, then an IF (within another one), then NEG; subgraph 1 is called by nobody."""
    net = Net()
    x = net.input()
    flag = net.input((1,), TYPES.BOOL)
    neg = net.op("NEG", [x], options=schema.NegOptionsT())
    options = schema.IfOptionsT(thenSubgraphIndex=2, elseSubgraphIndex=3)
    y = net.op("IF", [flag, neg, flag], options=options)
    net.outputs(net.op("NEG", [y], options=schema.NegOptionsT()))
    for name, kind in (("idle", "ABS"), ("then", "RELU"), ("else", "CONV")):
        net.body(name)
        value, again = net.input(), net.input((1,), TYPES.BOOL)
        if kind == "CONV":
            kernel, bias = net.constant(np.full((2, 1, 1, 2), 0.5, np.float32)), net.constant(np.ones(2, np.float32))
            net.outputs(net.conv(value, kernel, bias))
        elif kind == "RELU" and nested:
            inner = schema.IfOptionsT(thenSubgraphIndex=4, elseSubgraphIndex=3)
            net.outputs(net.op("IF", [again, value, again], options=inner))
        else:
            net.outputs(net.op(kind, [value]))
    if nested:
        net.body("inner")
        value, _ = net.input(), net.input((1,), TYPES.BOOL)
        net.outputs(net.op("TANH", [value]))
    return net


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


# What else a stage keeps


def test_weights_go_only_where_they_are_read(folder: Path) -> None:
    net = Net()
    x = net.input()
    kernels = [net.constant(np.full((2, 5, 5, 2), i, np.float32)) for i in range(2)]
    bias = net.constant(np.zeros(2, np.float32))
    net.outputs(net.conv(net.conv(x, kernels[0], bias), kernels[1], bias))
    graph = read_model(net.write(folder / "m.tflite"))
    for index, operators in enumerate(apart(graph)):
        stage = cut_stage(graph, operators)
        assert stage.weight_nbytes == 400 + 8
        stage.write(folder / "stage.tflite")
        assert read_model(folder / "stage.tflite").name == "stage"
        content = (folder / "stage.tflite").read_bytes()
        assert np.full(100, index, np.float32).tobytes() in content
        assert np.full(100, 1 - index, np.float32).tobytes() not in content


def signature(stage: StageModel) -> tuple[bytes, list[bytes], list[bytes]]:
    (found,) = stage.schema.signatureDefs
    return found.signatureKey, [e.name for e in found.inputs], [e.name for e in found.outputs]


def test_signatures_name_inputs_and_outputs(folder: Path) -> None:
    net = Net()
    x, y = net.input(), net.input()
    net.outputs(net.op("RELU", [net.add(x, y)]))
    graph = read_model(with_signature(net).write(folder / "m.tflite"))
    assert signature(cut_stage(graph, [0, 1])) == (b"serve", [b"in0", b"in1"], [b"out3"])
    assert signature(cut_stage(graph, [0])) == (b"serve", [b"in0", b"in1"], [b"t2"])
    assert signature(cut_stage(graph, [1])) == (b"serve", [b"t2"], [b"out3"])
    same(graph, apart(graph), folder)


def test_the_least_version_of_the_runtime_is_kept(folder: Path) -> None:
    net = Net()
    net.model.buffers += [schema.BufferT(data=np.frombuffer(b"2.3.0", np.uint8)), schema.BufferT(data=[1] * 9)]
    net.model.metadata = [schema.MetadataT("min_runtime_version", 1), schema.MetadataT("TFLITE_METADATA", 2)]
    x = net.input()
    net.outputs(net.op("RELU", [net.op("RELU", [x])]))
    graph = read_model(net.write(folder / "m.tflite"))
    cut_stage(graph, [0]).write(folder / "stage.tflite")
    source = read_model(folder / "stage.tflite").source
    assert source is not None
    assert [m.name for m in source.schema.metadata] == [b"min_runtime_version"]
    assert source.schema.buffers[1].data.tobytes() == b"2.3.0"
    assert len(cut_stage(graph, [0, 1]).schema.metadata) == 2


def test_quantisation_and_names_are_kept(folder: Path) -> None:
    net = Net()
    x = net.input()
    scales = schema.QuantizationParametersT(scale=[0.5, 0.25], zeroPoint=[0, 0], quantizedDimension=3)
    q = net.tensor(dtype=TYPES.INT8, name="q", quantization=scales)
    net.outputs(net.op("DEQUANTIZE", [net.op("QUANTIZE", [x], q)]))
    graph = read_model(net.write(folder / "m.tflite"))
    cut_stage(graph, [1]).write(folder / "stage.tflite")
    stage = read_model(folder / "stage.tflite")
    assert stage.source is not None
    tensor: Any = stage.source.schema.subgraphs[0].tensors[0]
    assert (tensor.name, tensor.quantization.scale.tolist()) == (b"q", [0.5, 0.25])
    assert tensor.quantization.quantizedDimension == 3


# Weights behind the flatbuffer


def doubling() -> Net:
    net = Net()
    x = net.input()
    bias = net.constant(np.zeros(2, np.float32))
    kernels = [net.constant(np.full((2, 1, 1, 2), i, np.float32)) for i in (1, 2)]
    return net.outputs(net.conv(net.conv(x, kernels[0], bias), kernels[1], bias))


def blobs(net: Net) -> dict[int, bytes]:
    """Take the data out of a model's buffers."""
    found = {i: b.data.tobytes() for i, b in enumerate(net.model.buffers) if b.data is not None}
    for index in found:
        net.model.buffers[index].data = None
    return found


def test_weights_behind_the_flatbuffer(folder: Path) -> None:
    net = doubling()
    write_model(net.model, blobs(net), folder / "outside.tflite", outside=True)
    graph = read_model(folder / "outside.tflite")
    assert graph.source is not None
    assert {e.inline for e in graph.source.extents.values()} == {False}
    for views in (False, True):
        same(graph, apart(graph), folder, views=views)


def test_a_stage_of_more_than_two_gigabytes_has_its_weights_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read_model(doubling().write(folder / "m.tflite"))
    monkeypatch.setattr("search_spaces.models.stages.MAX_INSIDE_NBYTES", 0)
    cut_stage(graph, [0]).write(folder / "stage.tflite")
    source = read_model(folder / "stage.tflite").source
    assert source is not None
    assert {e.inline for e in source.extents.values()} == {False}
    same(graph, apart(graph), folder)


def test_a_model_of_three_gigabytes(tmp_path: Path) -> None:
    net = doubling()
    data = blobs(net)
    header, fields = pack_header(net.model, data, data)
    places = {b: (3 << 30) + 64 * i for i, b in enumerate(data)}
    for buffer, blob in data.items():
        point_outside(header, fields[buffer], places[buffer], len(blob))
    path = tmp_path / "large.tflite"
    with path.open("wb") as file:
        file.write(header)
        for buffer, blob in data.items():
            file.seek(places[buffer])
            file.write(blob)
    graph = read_model(path)
    small = read_model(doubling().write(tmp_path / "small.tflite"))
    wanted = run_pieces(whole(small), values(small))
    found = run_pieces(pieces(graph, apart(graph), tmp_path, views=False), values(graph))
    assert [w[graph.outputs[0]].tobytes() for w in wanted] == [f[graph.outputs[0]].tobytes() for f in found]
    assert (tmp_path / "stage_1.tflite").stat().st_size < 10_000
    view = cut_stage(graph, [1]).view()
    moved = schema.ModelT.InitFromPackedBuf(view, 0).buffers
    assert {b: m.offset - len(view) for b, m in enumerate(moved) if m.size} == {1: places[1], 3: places[3]}
    path.unlink()


def test_weights_in_other_files_are_refused(folder: Path) -> None:
    net = doubling()
    net.model.externalBuffers = [schema.ExternalBufferT(id=1, group=0, offset=0, length=16)]
    with pytest.raises(ModelError, match="keeps weights in other files; convert it anew"):
        read_model(net.write(folder / "m.tflite"))


# What cannot be cut


def test_calls_that_lead_nowhere_or_back(folder: Path) -> None:
    for then, line in ((9, "calls subgraph 9 of 4"), (0, "calls subgraph 0 of 4")):
        net = calling()
        net.model.subgraphs[0].operators[1].builtinOptions.thenSubgraphIndex = then
        with pytest.raises(ModelError, match=line):
            read_model(net.write(folder / "m.tflite"))
    net = calling(nested=True)
    net.model.subgraphs[2].operators[0].builtinOptions.thenSubgraphIndex = 2
    with pytest.raises(ModelError, match="subgraph 2 calls itself"):
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
    with pytest.raises(ModelError, match="needs more than the 16 bytes"):
        read_model(net.write(folder / "m.tflite"))
    setattr(sparsity, field, value)
    with pytest.raises(ModelError, match="is sparse in"):
        read_model(net.write(folder / "m.tflite"))
