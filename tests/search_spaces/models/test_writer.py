"""What is written is what is read, and what cannot be written leaves nothing behind."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError, UsageError
from search_spaces.models.flatbuffer import ALIGNMENT, SMALL_NBYTES, pack_header, point_at, unpack, write_model
from tests.support.sentences import fails


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("writer") / "m.tflite"


def empty_model(buffers: int) -> Any:
    return schema.ModelT(version=3, description="d", subgraphs=[], buffers=[schema.BufferT() for _ in range(buffers)])


contents = st.lists(st.none() | st.binary(max_size=3 * SMALL_NBYTES), min_size=1, max_size=8)


@given(given_blobs=contents, own=contents)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(path: Path, given_blobs: list[bytes | None], own: list[bytes | None]) -> None:
    model = empty_model(len(given_blobs) + len(own))
    blobs = {i: blob for i, blob in enumerate(given_blobs) if blob is not None}
    own_blobs = {i: blob for i, blob in enumerate(own, len(given_blobs)) if blob is not None}
    for index, blob in own_blobs.items():
        model.buffers[index].data = np.frombuffer(blob, np.uint8)
    write_model(model, blobs, path)
    content = path.read_bytes()
    read, extents, nbytes = unpack(path)
    assert nbytes == len(content)
    assert read.description == b"d"
    wanted = {i: blob for i, blob in (blobs | own_blobs).items() if blob}
    assert {i: content[e.offset : e.offset + e.nbytes] for i, e in extents.items()} == wanted
    for index, extent in extents.items():
        assert extent.offset % ALIGNMENT == 0
        assert int.from_bytes(content[extent.offset - 4 : extent.offset], "little") == extent.nbytes
        kept = read.buffers[index].data
        assert (None if kept is None else kept.tobytes()) == (
            wanted[index] if len(wanted[index]) <= SMALL_NBYTES else None
        )


@given(contents)
@settings(max_examples=60, deadline=None)
def test_a_header_can_be_pointed_at_anything_behind_it(path: Path, blobs: list[bytes | None]) -> None:
    model = empty_model(len(blobs) + 1)
    model.buffers[-1].data = np.arange(7, dtype=np.uint8)
    which = [i for i, blob in enumerate(blobs) if blob is not None]
    header, fields = pack_header(model, which)
    assert set(fields) == set(which)
    tail = bytearray()
    for index in which:
        blob = blobs[index] or b""
        point_at(header, fields[index], len(header) + len(tail))
        tail += len(blob).to_bytes(4, "little") + blob
    content = bytes(header) + bytes(tail)
    path.write_bytes(content)
    _, extents, _ = unpack(path)
    inside = extents.pop(len(blobs))
    assert inside.offset % ALIGNMENT == 0  # data left in the header
    assert content[inside.offset :][:7] == bytes(range(7))
    assert {i: content[e.offset : e.offset + e.nbytes] for i, e in extents.items()} == {
        i: blob for i, blob in enumerate(blobs) if blob
    }


def test_the_model_is_left_as_it_was(path: Path) -> None:
    model = empty_model(3)
    model.buffers[1].data = data = np.arange(9, dtype=np.uint8)
    before = list(model.buffers)
    write_model(model, {2: b"x"}, path)
    assert model.buffers == before
    assert model.buffers[1].data is data
    assert model.buffers[2].data is None


def test_blobs_are_made_one_at_a_time(path: Path) -> None:
    asked: list[int] = []

    class Lazy(Mapping[int, bytes]):
        def __getitem__(self, index: int) -> bytes:
            asked.append(index)
            return b"w" * 100

        def __iter__(self) -> Iterator[int]:
            return iter([2, 0])

        def __len__(self) -> int:
            return 2

    write_model(empty_model(3), Lazy(), path)
    assert asked == [0, 2]


def test_a_buffer_that_is_not_there() -> None:
    with fails(ModelError):
        pack_header(empty_model(3), [-1, 5])


# What cannot be written


def untouched(folder: Path) -> bool:
    return [(p.name, p.read_bytes()) for p in folder.iterdir()] == [("m.tflite", b"old")]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "m.tflite"
    path.write_bytes(b"old")
    return path


def test_a_model_too_large_for_one_file(old: Path) -> None:
    with mmap.mmap(-1, 2**31) as huge, memoryview(huge) as view, fails(ModelError):
        write_model(empty_model(2), {1: view}, old)
    assert untouched(old.parent)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Make the system refuse longer files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more(old: Path) -> None:
    with file_size_limit(1 << 16), fails(UsageError):
        write_model(empty_model(2), {1: bytes(1 << 20)}, old)
    assert untouched(old.parent)


def test_a_failure_half_way(old: Path) -> None:
    class Failing(dict[int, bytes]):
        def __getitem__(self, index: int) -> bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(empty_model(2), Failing({1: b""}), old)
    assert untouched(old.parent)


def test_a_folder_that_is_none(old: Path) -> None:
    with fails(UsageError):
        write_model(empty_model(1), {}, old / "inside.tflite")
    with fails(UsageError):
        write_model(empty_model(1), {}, old.parent / "missing" / "m.tflite")
