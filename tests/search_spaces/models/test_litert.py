"""The reader gives back what was written: layers, options, shapes and places of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph, Tensor
from search_spaces.models.dtypes import tensor_nbytes
from search_spaces.models.flatbuffer import write_model
from search_spaces.models.litert import read_model
from search_spaces.models.source import Extent
from search_spaces.models.zoo.builder import Builder
from tests.support.models.tflite_models import single, tiny
from tests.support.narrowing import there
from tests.support.sentences import fails


def test_layers_come_back(scratch: Path) -> None:
    tiny().write(scratch)
    graph = read_model(scratch)
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
    source = there(graph.source)
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


def test_the_file_is_let_go(scratch: Path) -> None:
    tiny().write(scratch)
    read_model(scratch)
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
    assert there(graph.source).schema.subgraphs[0].operators[0].customOptions.tolist() == [0, 1, 2, 3, 4]


def test_codes_of_files_from_before_the_wider_field(scratch: Path) -> None:
    model = tiny().schema
    for code in model.operatorCodes:
        code.builtinCode = 0
    assert write_and_read(model, scratch, dict.fromkeys(tiny().weights, bytes(1024))).operators[0].kind == "CONV_2D"


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
    with fails(ModelError):
        write_and_read(single([X, w], [schema.BufferT()]), scratch, {1: bytes(2)})


def test_strings_take_what_they_take(scratch: Path) -> None:
    text = schema.TensorT(name="text", shape=[1], type=schema.TensorType.STRING, buffer=1)
    assert write_and_read(single([X, text], [schema.BufferT()]), scratch, {1: bytes(30)}).tensors[1].nbytes == 30


def test_data_behind_the_flatbuffer(scratch: Path) -> None:
    w = schema.TensorT(name="w", shape=[4], type=0, buffer=1)
    buffer = schema.BufferT(offset=1 << 20, size=16)
    model = single([X, w], [buffer])
    write_model(model, {}, scratch)
    with fails(ModelError):
        read_model(scratch)
    with scratch.open("r+b") as file:
        file.truncate((1 << 20) + 16)
    source = there(read_model(scratch).source)
    assert source.extents == {1: Extent(1 << 20, 16, inline=False)}


def test_options_of_a_custom_operator_behind_the_flatbuffer_come_in(scratch: Path) -> None:
    model = single([X])
    model.subgraphs[0].operators[0].largeCustomOptionsOffset = 1 << 16
    model.subgraphs[0].operators[0].largeCustomOptionsSize = 3
    write_model(model, {}, scratch)
    with scratch.open("r+b") as file:
        file.seek(1 << 16)
        file.write(b"abc")
    source = there(read_model(scratch).source)
    operator = source.schema.subgraphs[0].operators[0]
    assert operator.customOptions.tobytes() == b"abc"
    assert operator.largeCustomOptionsOffset == 0


def test_further_subgraphs_stay_in_the_schema(scratch: Path) -> None:
    model = single([X])
    model.subgraphs.append(schema.SubGraphT(tensors=[X], inputs=[0], outputs=[0], operators=[], name="body"))
    source = there(write_and_read(model, scratch).source)
    assert [s.name for s in source.schema.subgraphs] == [b"main", b"body"]


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 3))
def test_bytes_of_a_tensor_are_those_numpy_needs(shape: list[int], opened: int) -> None:
    elements = int(np.prod(shape)) if shape else 1
    assert tensor_nbytes(shape, "float32") == 4 * elements
    assert tensor_nbytes(shape, "int4") == (elements + 1) // 2
    assert tensor_nbytes(shape, "string") == 0
    assert tensor_nbytes([*shape, *[-1] * opened], "int8") == elements
