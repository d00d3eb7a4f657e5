"""The reader turns whatever is not a model into one line, and quickly."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
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
from search_spaces.models import load
from search_spaces.models.flatbuffer import IDENTIFIER, write_model
from search_spaces.models.litert import read_model
from tests.faults.fuzz_reader import CASE_S, corpus
from tests.support.models.tflite_models import Net, single, tiny
from tests.support.narrowing import there
from tests.support.sentences import fails


@pytest.fixture(scope="module")
def content(folder: Path) -> bytes:
    tiny().write(folder / "tiny.tflite")
    return (folder / "tiny.tflite").read_bytes()


def read_or_refuse(path: Path, content: bytes) -> Graph | None:
    """Read content from a file; the reader must soon end with a graph or one line."""
    path.write_bytes(content)
    graph, line = None, f"{path}: the model can be used"
    start_s = time.process_time()
    try:
        graph = read_model(path)
    except ModelError as error:
        line = str(error)
    assert time.process_time() - start_s < CASE_S  # of its own: others may use the cores
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
    graph = there(read_or_refuse(scratch, bytes(builder.Output())))
    assert len(graph.operators) == count


def _sparse(path: Path) -> None:
    """4 GB of nothing behind the identifier."""
    with path.open("wb") as file:
        file.write(b"\x10\0\0\0" + IDENTIFIER)
        file.truncate(4 << 30)


def _sparse_behind_a_model(path: Path) -> None:
    path.write_bytes(corpus(path.parent)[0][:-16])
    os.truncate(path, 4 << 30)


@pytest.mark.parametrize("make", [_sparse, _sparse_behind_a_model], ids=["noise", "model"])
def test_four_gigabytes_of_nothing_take_no_memory(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "m.tflite")
    program = """
import pathlib, resource, sys, time
from search_spaces.core.errors import ModelError
from search_spaces.models.litert import read_model
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    read_model(pathlib.Path(sys.argv[1]))
except ModelError:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, time.process_time() - begin)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.tflite")], capture_output=True, text=True, check=True
    )
    nbytes, took_s = map(float, done.stdout.split())
    assert nbytes < 64e6
    assert took_s < CASE_S


@pytest.mark.parametrize(
    "make",
    [
        Path.exists,
        Path.mkdir,
        os.mkfifo,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("a text that is longer than a header"),
        lambda path: path.write_bytes(b"\x10\0\0\0TFL2" + bytes(100)),
        lambda path: path.write_bytes(IDENTIFIER),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["missing", "folder", "fifo", "empty", "text", "identifier", "short", "loop", "device"],
)
def test_what_is_no_file_with_a_model(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "m.tflite"
    make(path)
    begin = time.process_time()
    with fails(ModelError) as caught:
        load(str(path))
    assert time.process_time() - begin < CASE_S
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


POOL = schema.BuiltinOptions.Pool2DOptions
PARTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "operator": lambda model: model.subgraphs[0].operators[0],
    "tensor": lambda model: model.subgraphs[0].tensors[0],
}


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("model", {"version": 1}),
        ("model", {"subgraphs": []}),
        ("model", {"operatorCodes": []}),
        ("model", {"operatorCodes": [schema.OperatorCodeT(builtinCode=99_999)]}),
        ("operator", {"inputs": [7]}),
        ("operator", {"inputs": [-2]}),
        ("operator", {"inputs": [1]}),
        ("operator", {"outputs": [0]}),
        ("operator", {"opcodeIndex": 3}),
        ("operator", {"builtinOptionsType": 250}),
        (
            "operator",
            {
                "builtinOptionsType": schema.BuiltinOptions.Pool2DOptions,
                "builtinOptions": schema.Pool2DOptionsT(padding=9),
            },
        ),
        ("tensor", {"type": 99}),
        ("tensor", {"buffer": 5}),
        ("tensor", {"shape": [-5]}),
        ("tensor", {"shape": [2**31 - 1] * 3}),
        ("tensor", {"shape": [1] * 65}),
    ],
)
def test_structure_that_cannot_be(scratch: Path, part: str, wrong: dict[str, Any]) -> None:
    model = single([schema.TensorT(name="x", shape=[4], type=0, buffer=0)])
    vars(PARTS[part](model)).update(wrong)
    write_model(model, {}, scratch)
    with fails(ModelError) as caught:
        read_model(scratch)
    assert str(caught.value).startswith(str(scratch))
