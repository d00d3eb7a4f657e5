"""What the file of a stage holds: its border, its weights and no others, signatures, and weights behind it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.flatbuffer import pack_header, point_outside, write_model
from search_spaces.models.litert import read_model
from search_spaces.models.source import ModelSource
from search_spaces.models.stages import StageModel, cut_stage, mapped, packing_model
from tests.support.models.stage_models import apart, pieces, same
from tests.support.models.tflite_models import (
    TYPES,
    Net,
    run_pieces,
    some_inputs,
    whole_model,
    with_signature,
)
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, one_core, placements


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_stage_file_has_the_border_of_its_stage(squeezenet: Graph, folder: Path, data: st.DataObject) -> None:
    for stage in data.draw(placements(squeezenet, Platform("one", (one_core(0),)))).stages:
        model, border = cut_stage(squeezenet, stage.operators), squeezenet.boundary(stage.operators)
        assert (model.inputs, model.outputs) == (border.inputs, border.outputs)
        assert len(model.view()) % 4096 == 0
        file = folder / "stage.tflite"
        assert model.write(file) == hashlib.sha256(file.read_bytes()).hexdigest()
        again = read_model(file)
        assert [o.kind for o in again.operators] == [squeezenet.operators[i].kind for i in stage.operators]
        for mine, theirs in ((again.inputs, border.inputs), (again.outputs, border.outputs)):
            assert [again.tensors[t] for t in mine] == [squeezenet.tensors[t] for t in theirs]


def test_the_model_for_packing_holds_each_operator_with_weights_once_more(squeezenet: Graph, folder: Path) -> None:
    model = packing_model(squeezenet)
    alone = [o for o in squeezenet.operators if any(t != -1 and squeezenet.tensors[t].constant for t in o.inputs)]
    assert len(model.schema.subgraphs) == 1 + len(alone)
    model.write(folder / "packing.tflite")
    packing = [(str(folder / "packing.tflite"), b"", squeezenet.inputs, squeezenet.outputs)]
    found, wanted = (run_pieces(m, some_inputs(squeezenet))[0] for m in (packing, whole_model(squeezenet)))
    assert found[squeezenet.outputs[0]].tobytes() == wanted[squeezenet.outputs[0]].tobytes()


def test_a_file_that_changed_is_not_cut(folder: Path) -> None:
    file = doubling().write(folder / "model.tflite")
    model = cut_stage(read_model(file), [0])
    file.write_bytes(b"x")
    with fails(ModelError):
        model.write(folder / "changed.tflite")
    file.unlink()
    with fails(ModelError):
        model.write(folder / "changed.tflite")
    assert not (folder / "changed.tflite").exists()
    with fails(ModelError):
        ModelSource(file, 0, model.schema, {}).content_digest()


def test_a_graph_without_a_file_cannot_be_cut() -> None:
    with fails(ModelError):
        cut_stage(chain_graph(3), [0])


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
    source = there(read_model(folder / "stage.tflite").source)
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
    tensor: Any = there(stage.source).schema.subgraphs[0].tensors[0]
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
    assert {e.inline for e in there(graph.source).extents.values()} == {False}
    for views in (False, True):
        same(graph, apart(graph), folder, views=views)


def test_a_stage_of_more_than_two_gigabytes_has_its_weights_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read_model(doubling().write(folder / "m.tflite"))
    monkeypatch.setattr("search_spaces.models.stages.MAX_INSIDE_NBYTES", 0)
    cut_stage(graph, [0]).write(folder / "stage.tflite")
    source = there(read_model(folder / "stage.tflite").source)
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
    wanted = run_pieces(whole_model(small), some_inputs(small))
    found = run_pieces(pieces(graph, apart(graph), tmp_path), some_inputs(graph))
    assert [w[graph.outputs[0]].tobytes() for w in wanted] == [f[graph.outputs[0]].tobytes() for f in found]
    assert (tmp_path / "stage_1.tflite").stat().st_size < 10_000
    view = cut_stage(graph, [1]).view()
    moved = schema.ModelT.InitFromPackedBuf(view, 0).buffers
    assert {b: m.offset - len(view) for b, m in enumerate(moved) if m.size} == {1: places[1], 3: places[3]}
    path.unlink()


def test_weights_in_other_files_are_refused(folder: Path) -> None:
    net = doubling()
    net.model.externalBuffers = [schema.ExternalBufferT(id=1, group=0, offset=0, length=16)]
    with fails(ModelError):
        read_model(net.write(folder / "m.tflite"))


def test_an_error_that_holds_a_part_of_a_mapped_model_is_not_hidden() -> None:
    def copy(source: ModelSource) -> None:
        with mapped(source) as content:
            part = content[:4]
            raise OSError(f"full at {part.nbytes}")

    with pytest.raises(OSError, match="full"):
        copy(there(load("squeezenet1_1@0.25/64").source))
