"""The reader turns whatever is not a model into one line, and quickly."""

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

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.models.flatbuffer import IDENTIFIER, write_model
from search_spaces.models.litert import read_model
from tests.support.models.tflite_models import Net, single, tiny
from tests.support.sentences import fails

_FLIPS = 800  # python -m tests.faults.fuzz_files goes on for as long as it is told


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
    start_s = time.process_time()
    try:
        graph = read_model(path)
    except ModelError as error:
        line = str(error)
    assert time.process_time() - start_s < 2  # of its own: others may use the cores
    assert str(path) in line
    assert "\n" not in line
    return graph


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


def test_many_flipped_bytes(content: bytes, scratch: Path) -> None:
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(_FLIPS):
        changed = bytearray(content)
        for place in random.integers(0, len(content), random.integers(1, 6)):
            changed[place] = random.integers(256)
        refused += read_or_refuse(scratch, bytes(changed)) is None
    assert 0 < refused < _FLIPS


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


class _SharedBuffer(schema.BufferT):  # type: ignore[misc]
    """Writes one table however often it is referred to."""

    place = 0

    def Pack(self, builder: Any) -> int:  # noqa: N802 - the schema's name
        self.place = self.place or super().Pack(builder)
        return self.place


def test_empty_buffers_may_be_one_table(scratch: Path) -> None:
    net, count = Net(), 3000  # as the LiteRT converter writes them
    x = net.input(buffer=1)
    for i in range(count):
        x = net.op("NEG", [x], net.tensor(buffer=2 + i))
    net.outputs(x)
    net.model.buffers = [schema.BufferT(), *([_SharedBuffer()] * (count + 1))]
    builder = flatbuffers.Builder(1024)
    builder.Finish(net.model.Pack(builder), IDENTIFIER)
    graph = read_or_refuse(scratch, bytes(builder.Output()))
    assert graph is not None
    assert len(graph.operators) == count


def test_a_sparse_file_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse.tflite"
    with path.open("wb") as file:
        file.write(b"\x10\0\0\0" + IDENTIFIER)
        file.truncate(4 << 30)
    start_s = time.process_time()
    with pytest.raises(ModelError):
        read_model(path)
    assert time.process_time() - start_s < 2  # of its own: others may use the cores


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
    "make",
    [
        _nothing,
        _folder,
        _fifo,
        _empty,
        _text,
        _loop,
    ],
)
def test_what_is_no_file_with_a_model(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "m.tflite"
    make(path)
    with fails(ModelError) as caught:
        read_model(path)
    assert caught.value.hint
    assert str(path) in str(caught.value)


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
    "change",
    [
        _model(version=1),
        _model(subgraphs=[]),
        _model(operatorCodes=[]),
        _model(operatorCodes=[schema.OperatorCodeT(builtinCode=99_999)]),
        _set(inputs=[7]),
        _set(inputs=[-2]),
        _set(inputs=[1]),
        _set(outputs=[0]),
        _set(opcodeIndex=3),
        _set(builtinOptionsType=250),
        _set(builtinOptionsType=schema.BuiltinOptions.Pool2DOptions, builtinOptions=schema.Pool2DOptionsT(padding=9)),
        _tensor(type=99),
        _tensor(buffer=5),
        _tensor(shape=[-5]),
        _tensor(shape=[2**31 - 1] * 3),
        _tensor(shape=[1] * 65),
    ],
)
def test_structure_that_cannot_be(scratch: Path, change: Callable[[Any], None]) -> None:
    model = single([schema.TensorT(name="x", shape=[4], type=0, buffer=0)])
    change(model)
    write_model(model, {}, scratch)
    with fails(ModelError) as caught:
        read_model(scratch)
    assert str(caught.value).startswith(str(scratch))
