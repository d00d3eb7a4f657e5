"""The reader gives back what was written, and turns whatever is not a model into one line."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.errors import ModelError
from search_spaces.graph import Graph, Tensor
from search_spaces.models.dtypes import tensor_nbytes
from search_spaces.models.litert import read_model
from search_spaces.models.source import Extent
from search_spaces.models.writer import IDENTIFIER, write_model
from search_spaces.models.zoo.builder import Builder, Draft


def tiny() -> Draft:
    """One layer of each kind, 4 KB in all."""
    net = Builder("tiny")
    x = net.input((1, 8, 8, 3))
    x = net.conv(x, 4, 3, "conv", stride=2, activation="RELU6")
    y = net.depthwise_conv(x, 3, "depthwise")
    x = net.concat([net.add(x, y, "add"), net.max_pool(x, 2, 1, "max", "SAME")], "concat")
    x = net.reshape(net.mean(net.average_pool(x, 2, 2, "average"), "mean"), (1, 1, 8), "reshape")
    return net.finish(net.softmax(net.fully_connected(x, 5, "fc", activation="RELU")))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.tflite"
    tiny().write(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "scratch.tflite"


def read_or_refuse(path: Path, content: bytes) -> Graph | None:
    """Read content from a file; the reader must end within two seconds with a graph or one line."""
    path.write_bytes(content)
    graph, line = None, f"{path}: the model can be used"
    start = time.monotonic()
    try:
        graph = read_model(path)
    except ModelError as error:
        line = str(error)
    assert time.monotonic() - start < 2
    assert str(path) in line
    assert "\n" not in line
    return graph


# What is not a model


def test_every_proper_prefix_is_refused(content: bytes, scratch: Path) -> None:
    for length in range(0, len(content), 7):
        assert read_or_refuse(scratch, content[:length]) is None, length
    assert read_or_refuse(scratch, content[:-1]) is None
    assert read_or_refuse(scratch, content) is not None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_bytes_give_a_graph_or_one_line(content: bytes, scratch: Path, data: st.DataObject) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 4))
        value = data.draw(st.integers(-(2**31), 2**31 - 1) | st.sampled_from([0, 1, -1, 255, 2**31 - 1, -(2**31)]))
        struct.pack_into("<i", changed, place, value)
    read_or_refuse(scratch, bytes(changed))


def test_thousands_of_flipped_bytes(content: bytes, scratch: Path) -> None:
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(2000):
        changed = bytearray(content)
        for place in random.integers(0, len(content), random.integers(1, 6)):
            changed[place] = random.integers(256)
        refused += read_or_refuse(scratch, bytes(changed)) is None
    assert 0 < refused < 2000


def test_noise_behind_the_identifier_is_refused(scratch: Path) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        noise = random.bytes(int(random.integers(0, 300)))
        assert read_or_refuse(scratch, random.bytes(4) + IDENTIFIER + noise) is None


def bomb(tables: int, name: bytes) -> bytes:
    """A model whose every subgraph is one subgraph, whose every tensor is one tensor."""
    builder = flatbuffers.Builder(1024)
    tensor = schema.TensorT(name=name, shape=np.zeros(4, np.int32)).Pack(builder)
    schema.SubGraphStartTensorsVector(builder, tables)
    for _ in range(tables):
        builder.PrependUOffsetTRelative(tensor)
    tensors = builder.EndVector()
    schema.SubGraphStart(builder)
    schema.SubGraphAddTensors(builder, tensors)
    subgraph = schema.SubGraphEnd(builder)
    schema.ModelStartSubgraphsVector(builder, tables)
    for _ in range(tables):
        builder.PrependUOffsetTRelative(subgraph)
    subgraphs = builder.EndVector()
    schema.ModelStart(builder)
    schema.ModelAddVersion(builder, 3)
    schema.ModelAddSubgraphs(builder, subgraphs)
    builder.Finish(schema.ModelEnd(builder), IDENTIFIER)
    return bytes(builder.Output())


@pytest.mark.parametrize(("tables", "name"), [(20_000, b"t"), (300, b"t"), (20, b"t" * 1_000_000)])
def test_a_file_that_repeats_itself_is_refused_before_it_unfolds(scratch: Path, tables: int, name: bytes) -> None:
    assert read_or_refuse(scratch, bomb(tables, name)) is None


def test_a_sparse_file_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse.tflite"
    with path.open("wb") as file:
        file.write(b"\x10\0\0\0" + IDENTIFIER)
        file.truncate(4 << 30)
    start = time.monotonic()
    with pytest.raises(ModelError):
        read_model(path)
    assert time.monotonic() - start < 2


def _folder(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _nothing(path: Path) -> None:
    pass


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_text("a text that is longer than a header")


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "statement"),
    [
        (_nothing, "no such file"),
        (_folder, "is a folder"),
        (_fifo, "no regular file"),
        (_empty, "is empty"),
        (_text, "not a .tflite model"),
        (_loop, "cannot be read"),
    ],
)
def test_what_is_no_file_with_a_model(tmp_path: Path, make: Callable[[Path], None], statement: str) -> None:
    path = tmp_path / "m.tflite"
    make(path)
    with pytest.raises(ModelError, match=statement) as caught:
        read_model(path)
    assert caught.value.hint
    assert str(path) in str(caught.value)


# What is


def test_layers_come_back(content: bytes, scratch: Path) -> None:
    graph = read_or_refuse(scratch, content)
    assert graph is not None
    assert [o.kind for o in graph.operators] == [
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "ADD",
        "MAX_POOL_2D",
        "CONCATENATION",
        "AVERAGE_POOL_2D",
        "MEAN",
        "RESHAPE",
        "FULLY_CONNECTED",
        "SOFTMAX",
    ]
    expected = {"padding": "SAME", "stride_h": 2, "dilation_w_factor": 1, "fused_activation": "RELU6"}
    assert expected.items() <= graph.operators[0].options.items()
    assert graph.operators[3].options["filter_height"] == 2
    assert graph.operators[7].options["new_shape"] == (1, 1, 8)
    assert graph.tensors[graph.inputs[0]] == Tensor("input", (1, 8, 8, 3), "float32", 768)
    assert graph.tensors[graph.outputs[0]] == Tensor("softmax", (1, 5), "float32", 20)
    assert graph.name == "scratch"


def test_extents_hold_the_weights_and_the_schema_only_small_ones(tmp_path: Path) -> None:
    net = Builder("sizes")
    x = net.input((1, 16))
    draft = net.finish(net.fully_connected(net.fully_connected(x, 16, "small"), 17, "large"))
    draft.write(tmp_path / "m.tflite")
    graph = read_model(tmp_path / "m.tflite")
    source = graph.source
    assert source is not None
    content = source.path.read_bytes()
    weights = {t.name: t for t in graph.tensors if t.constant}
    for name in ("small/kernel", "large/kernel"):
        tensor = weights[name]
        extent = source.extents[tensor.buffer]
        assert extent.nbytes == tensor.nbytes
        assert extent.offset % 16 == 0
        assert np.frombuffer(content, np.float32, 256, extent.offset).std() > 0
        kept = source.schema.buffers[tensor.buffer].data
        assert (kept is not None) == (name == "small/kernel")


def test_the_file_is_let_go(content: bytes, scratch: Path) -> None:
    graph = read_or_refuse(scratch, content)
    assert graph is not None
    assert str(scratch) not in Path("/proc/self/maps").read_text()


def write_and_read(model: Any, path: Path, blobs: dict[int, bytes] | None = None) -> Graph:
    write_model(model, blobs or {}, path)
    return read_model(path)


def test_an_input_left_out_stays_left_out(scratch: Path) -> None:
    model = tiny().schema
    model.subgraphs[0].operators[0].inputs[2] = -1
    graph = write_and_read(model, scratch, dict.fromkeys(tiny().weights, bytes(1024)))
    assert graph.operators[0].inputs[2] == -1


def test_a_custom_operator_has_its_own_name(scratch: Path) -> None:
    model = tiny().schema
    model.operatorCodes[0] = schema.OperatorCodeT(builtinCode=schema.BuiltinOperator.CUSTOM, customCode="Mine")
    model.subgraphs[0].operators[0].builtinOptionsType = 0
    model.subgraphs[0].operators[0].builtinOptions = None
    model.subgraphs[0].operators[0].customOptions = np.arange(5, dtype=np.uint8)
    graph = write_and_read(model, scratch, dict.fromkeys(tiny().weights, bytes(1024)))
    assert graph.operators[0].kind == "Mine"
    assert graph.operators[0].options == {}
    assert graph.source is not None
    assert graph.source.schema.subgraphs[0].operators[0].customOptions.tolist() == [0, 1, 2, 3, 4]


def test_codes_of_files_from_before_the_wider_field(scratch: Path) -> None:
    model = tiny().schema
    for code in model.operatorCodes:
        code.builtinCode = 0
    assert write_and_read(model, scratch, dict.fromkeys(tiny().weights, bytes(1024))).operators[0].kind == "CONV_2D"


def single(inputs: list[Any], buffers: list[Any] | None = None) -> Any:
    """A model of one RESHAPE that reads ``inputs``."""
    output = schema.TensorT(name="y", shape=[4], type=0, buffer=0)
    operator = schema.OperatorT(
        opcodeIndex=0, inputs=list(range(len(inputs))), outputs=[len(inputs)], builtinOptionsType=0
    )
    subgraph = schema.SubGraphT(
        tensors=[*inputs, output], inputs=[0], outputs=[len(inputs)], operators=[operator], name="main"
    )
    code = schema.OperatorCodeT(
        builtinCode=schema.BuiltinOperator.RESHAPE, deprecatedBuiltinCode=schema.BuiltinOperator.RESHAPE
    )
    return schema.ModelT(
        version=3, operatorCodes=[code], subgraphs=[subgraph], buffers=[schema.BufferT(), *(buffers or [])]
    )


X = schema.TensorT(name="x", shape=[4], type=0, buffer=0)


def test_an_open_dimension_is_minus_one(scratch: Path) -> None:
    x = schema.TensorT(name="x", shape=[1, 4], shapeSignature=[-1, 4], type=0, buffer=0)
    assert write_and_read(single([x]), scratch).tensors[0] == Tensor("x", (-1, 4), "float32", 16)


def test_the_shape_of_a_scalar_is_a_constant_without_data(scratch: Path) -> None:
    shape = schema.TensorT(name="shape", shape=[0], type=schema.TensorType.INT32, buffer=1)
    assert write_and_read(single([X, shape], [schema.BufferT()]), scratch).tensors[1].constant


def test_a_variable_tensor_needs_no_writer(scratch: Path) -> None:
    state = schema.TensorT(name="state", shape=[4], type=0, buffer=0, isVariable=True)
    assert write_and_read(single([X, state]), scratch).tensors[1].variable


def test_int4_is_packed(scratch: Path) -> None:
    w = schema.TensorT(name="w", shape=[5], type=schema.TensorType.INT4, buffer=1)
    assert write_and_read(single([X, w], [schema.BufferT()]), scratch, {1: bytes(3)}).tensors[1].nbytes == 3
    with pytest.raises(ModelError, match="needs 3 bytes and has 2"):
        write_and_read(single([X, w], [schema.BufferT()]), scratch, {1: bytes(2)})


def test_strings_take_what_they_take(scratch: Path) -> None:
    text = schema.TensorT(name="text", shape=[1], type=schema.TensorType.STRING, buffer=1)
    assert write_and_read(single([X, text], [schema.BufferT()]), scratch, {1: bytes(30)}).tensors[1].nbytes == 30


def test_data_behind_the_flatbuffer(scratch: Path) -> None:
    w = schema.TensorT(name="w", shape=[4], type=0, buffer=1)
    buffer = schema.BufferT(offset=1 << 20, size=16)
    model = single([X, w], [buffer])
    write_model(model, {}, scratch)
    with pytest.raises(ModelError, match="buffer 1 ends outside the file"):
        read_model(scratch)
    with scratch.open("r+b") as file:
        file.truncate((1 << 20) + 16)
    source = read_model(scratch).source
    assert source is not None
    assert source.extents == {1: Extent(1 << 20, 16, inline=False)}


def test_options_of_a_custom_operator_behind_the_flatbuffer_come_in(scratch: Path) -> None:
    model = single([X])
    model.subgraphs[0].operators[0].largeCustomOptionsOffset = 1 << 16
    model.subgraphs[0].operators[0].largeCustomOptionsSize = 3
    write_model(model, {}, scratch)
    with scratch.open("r+b") as file:
        file.seek(1 << 16)
        file.write(b"abc")
    source = read_model(scratch).source
    assert source is not None
    operator = source.schema.subgraphs[0].operators[0]
    assert operator.customOptions.tobytes() == b"abc"
    assert operator.largeCustomOptionsOffset == 0


def test_further_subgraphs_stay_in_the_schema(scratch: Path) -> None:
    model = single([X])
    model.subgraphs.append(schema.SubGraphT(tensors=[X], inputs=[0], outputs=[0], operators=[], name="body"))
    source = write_and_read(model, scratch).source
    assert source is not None
    assert [s.name for s in source.schema.subgraphs] == [b"main", b"body"]


def _set(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for field, value in fields.items():
            setattr(model.subgraphs[0].operators[0], field, value)

    return change


def _tensor(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for field, value in fields.items():
            setattr(model.subgraphs[0].tensors[0], field, value)

    return change


def _model(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for field, value in fields.items():
            setattr(model, field, value)

    return change


@pytest.mark.parametrize(
    ("change", "statement"),
    [
        (_model(version=1), "version 1"),
        (_model(subgraphs=[]), "no subgraph"),
        (_model(operatorCodes=[]), "code 0 of 0"),
        (_model(operatorCodes=[schema.OperatorCodeT(builtinCode=99_999)]), "99999 is not known"),
        (_set(inputs=[7]), "tensor 7 of 2"),
        (_set(inputs=[-2]), "tensor -2 of 2"),
        (_set(inputs=[1]), "before any operator writes it"),
        (_set(outputs=[0]), "a second time"),
        (_set(opcodeIndex=3), "code 3 of 1"),
        (_set(builtinOptionsType=250), "schema does not know"),
        (
            _set(
                builtinOptionsType=schema.BuiltinOptions.Pool2DOptions, builtinOptions=schema.Pool2DOptionsT(padding=9)
            ),
            "padding has the value 9",
        ),
        (_tensor(type=99), "type 99"),
        (_tensor(buffer=5), "buffer 5 of 1"),
        (_tensor(shape=[-5]), "impossible shape"),
        (_tensor(shape=[2**31 - 1] * 3), "more than any machine holds"),
        (_tensor(shape=[1] * 65), "impossible shape"),
    ],
)
def test_structure_that_cannot_be(scratch: Path, change: Callable[[Any], None], statement: str) -> None:
    model = single([schema.TensorT(name="x", shape=[4], type=0, buffer=0)])
    change(model)
    write_model(model, {}, scratch)
    with pytest.raises(ModelError, match=statement) as caught:
        read_model(scratch)
    assert str(caught.value).startswith(str(scratch))


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3))
def test_bytes_of_a_tensor_are_those_numpy_needs(shape: list[int], opened: int) -> None:
    elements = int(np.prod(shape)) if shape else 1
    assert tensor_nbytes(shape, "float32") == 4 * elements
    assert tensor_nbytes(shape, "int4") == (elements + 1) // 2
    assert tensor_nbytes(shape, "string") == 0
    assert tensor_nbytes([*shape, *[-1] * opened], "int8") == elements
