"""Reading of untrusted ``.tflite`` files, and writing of them, without copies of the weights.

Reading: the generated object API follows every offset that it finds. Reads outside the file raise some exception there,
but it does not detect a small file that refers to one table a million times, or a string as long as the file. So the
vectors of tables are walked first, each table is counted, and copies are limited by an allowance. A converter's file
holds each table once and cannot exceed it.

Writing: the object API of flatbuffers builds a file back to front in one growing array; with half a gigabyte of
weights that takes several copies. Here it packs the structure alone, with a placeholder for each weight. The weights
follow that header as plain byte vectors, and the reference in each ``Buffer`` table is set to its vector.
"""

from __future__ import annotations

import copy
import mmap
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from flatbuffers.table import Table
from numpy.typing import NDArray

from search_spaces.core.errors import ModelError, reason_of
from search_spaces.models.files import replacing
from search_spaces.models.source import Extent

Blob = bytes | bytearray | memoryview | NDArray[Any]

IDENTIFIER = b"TFL3"
ALIGNMENT = 16  # the schema's force_align of Buffer.data
MAX_NBYTES = 2**31 - 1  # references inside a flatbuffer are signed 32-bit numbers somewhere in every reader

_BUFFERS_FIELD = 12  # position of Model.buffers in a vtable
_DATA_FIELD, _OFFSET_FIELD, _SIZE_FIELD = 4, 6, 8  # positions of Buffer.data, .offset and .size
_ELSEWHERE = {"offset": 2, "size": 1}  # not the default 0, so that the fields are written
_PLACEHOLDER = np.zeros(1, np.uint8)


class Blobs(Mapping[int, Blob]):
    """Buffer number → its bytes, made anew on each access, so that no more than one of them is in memory.

    Args:
        numbers: of the buffers.
        make: returns the bytes of a buffer.
    """

    def __init__(self, numbers: Collection[int], make: Callable[[int], Blob]) -> None:
        self._numbers, self._make = numbers, make

    def __getitem__(self, buffer: int) -> Blob:
        return self._make(buffer)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def write_model(model: Any, blobs: Mapping[int, Blob], path: Path, *, outside: bool = False) -> None:
    """Write ``model`` (a schema ``ModelT``) with the weights ``blobs``; the file appears whole or not at all.

    Args:
        model: the structure; data in its own buffers is written too, and the model is not changed.
        blobs: buffer index → its bytes, C-contiguous. Each is read once, in ascending order, and released before
            the next one, so a mapping may make them on demand.
        path: where to write; an existing file is replaced.
        outside: write ``blobs`` behind the flatbuffer, as in models of more than 2 GB.

    Raises:
        ModelError: the flatbuffer would have more than ``MAX_NBYTES``.
        UsageError: the folder cannot be written, or the disk is full.
    """
    with replacing(path) as file:
        write_into(file, model, blobs, str(path), outside=outside)


def write_into(file: BinaryIO, model: Any, blobs: Mapping[int, Blob], name: str, *, outside: bool = False) -> None:
    """Write a model as :func:`write_model` does to an open, empty file, which an error leaves half-written.

    Args:
        name: of the file, for errors.

    Raises:
        ModelError: the flatbuffer would have more than ``MAX_NBYTES``.
        OSError: the file cannot be written.
    """
    given = set(blobs)  # a lookup in the mapping could make a blob
    own = {i: b.data for i, b in enumerate(model.buffers) if b.data is not None and i not in given}
    header, fields = pack_header(model, given if outside else given | own.keys(), given if outside else ())
    end = len(header)
    for index in sorted(fields):
        data = _bytes_of(blobs[index] if index in given else np.asarray(own[index], np.uint8))
        start = -(-(end + 4) // ALIGNMENT) * ALIGNMENT
        end = start + len(data)
        if outside:
            point_outside(header, fields[index], start, len(data))
            file.seek(start)
        else:
            if end > MAX_NBYTES:
                raise ModelError(f"{name}: the model takes more than {MAX_NBYTES} bytes, which one file cannot hold")
            point_at(header, fields[index], start - 4)
            file.seek(start - 4)
            file.write(struct.pack("<I", len(data)))
        file.write(data)
    file.seek(0)
    file.write(header)


def pack_header(model: Any, which: Collection[int], outside: Collection[int] = ()) -> tuple[bytearray, dict[int, int]]:
    """Pack a schema ``ModelT`` into a flatbuffer whose buffers ``which`` refer to data that is written later.

    Args:
        model: the structure.
        which: numbers of buffers; data of all others is packed inside, aligned as the schema asks.
        outside: those of ``which`` whose data lies behind the flatbuffer (``Buffer.offset`` and ``Buffer.size``);
            the others hold a placeholder of one byte.

    Returns:
        The flatbuffer, and for each buffer of ``which`` the position to give to :func:`point_at`, or to
        :func:`point_outside` for those of ``outside``.

    Raises:
        ModelError: ``which`` names a buffer that the model lacks.
    """
    wanted = set(which)
    if wanted and not 0 <= min(wanted) <= max(wanted) < len(model.buffers):
        raise ModelError(f"the model has {len(model.buffers)} buffers, not {min(wanted)} to {max(wanted)}")
    packed = copy.copy(model)
    packed.buffers = [_Aligned(buffer) for buffer in model.buffers]
    for index in wanted:
        placed = index in outside
        packed.buffers[index] = schema.BufferT(**(_ELSEWHERE if placed else {"data": _PLACEHOLDER}))
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(packed.Pack(builder), IDENTIFIER)
    header = bytearray(builder.Output())
    root = Table(header, struct.unpack_from("<I", header)[0])
    start = root.Vector(root.Offset(_BUFFERS_FIELD))
    fields = {}
    for index in wanted:
        table = Table(header, root.Indirect(start + 4 * index))
        fields[index] = table.Pos if index in outside else table.Pos + table.Offset(_DATA_FIELD)
    return header, fields


def point_at(header: bytearray, field: int, vector: int) -> None:
    """Make the reference at position ``field`` of a header refer to the vector at position ``vector`` after it."""
    struct.pack_into("<I", header, field, vector - field)


def point_outside(header: bytearray, table: int, first: int, nbytes: int) -> None:
    """Make the ``Buffer`` at position ``table`` of a header refer to ``nbytes`` bytes from ``first`` on.

    ``first`` counts from the start of the flatbuffer. An empty buffer gets offset and size 0.
    """
    found = Table(header, table)
    place, size = table + found.Offset(_OFFSET_FIELD), table + found.Offset(_SIZE_FIELD)
    struct.pack_into("<Q", header, place, first if nbytes else 0)
    struct.pack_into("<Q", header, size, nbytes)


def _bytes_of(blob: Blob) -> memoryview:
    view = blob.data if isinstance(blob, np.ndarray) else memoryview(blob)
    return view.cast("B") if view.nbytes else memoryview(b"")


class _Aligned:
    """A schema ``BufferT`` whose data starts at a multiple of ``ALIGNMENT``; the object API does not align it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def Pack(self, builder: Any) -> Any:  # noqa: N802 - the name that ModelT.Pack calls
        if self._buffer.data is None:
            return self._buffer.Pack(builder)
        builder.Prep(ALIGNMENT, len(self._buffer.data))
        return schema.BufferT(data=np.asarray(self._buffer.data, np.uint8)).Pack(builder)


MAX_TABLES = 1_000_000  # the limit of the runtime's own verifier
MAX_REPEATED = 1000  # repeated references to a table, buffers excepted; converters write none
MAX_COPIED_NBYTES = 1 << 28
SMALL_NBYTES = 1024  # constants up to here (shapes, axes, scalars) are kept with the structure

# Exceptions of the generated code and of NumPy when they read at a wrong offset.
_OUTSIDE = (struct.error, ValueError, TypeError, IndexError, OverflowError, MemoryError)

# Fields that refer to vectors of tables, or to a table that does: vtable position → (is a vector, kind of table).
_CHILDREN: Mapping[str, Mapping[int, tuple[bool, str]]] = {
    "Model": {
        6: (True, "OperatorCode"),
        8: (True, "SubGraph"),
        12: (True, "Buffer"),
        16: (True, "Metadata"),
        18: (True, "SignatureDef"),
        20: (True, "ExternalBufferGroup"),
        22: (True, "ExternalBuffer"),
    },
    "SubGraph": {4: (True, "Tensor"), 10: (True, "Operator")},
    "Tensor": {16: (False, "SparsityParameters"), 22: (True, "VariantSubType")},
    "SparsityParameters": {8: (True, "DimensionMetadata")},
    "SignatureDef": {4: (True, "TensorMap"), 6: (True, "TensorMap")},
}


class _DamageError(Exception):
    """Damage of the file that a check of this module found."""


class _Mapped(mmap.mmap):
    """A file mapped read-only, with the bytes that may still be copied out of it."""

    allowance: int = 0

    def spend(self, nbytes: int) -> None:
        """Count the bytes of a copy.

        Raises:
            _DamageError: copies take more bytes than the file has.
        """
        self.allowance -= nbytes
        if self.allowance < 0:
            raise _DamageError("names and lists take more bytes than the file has")

    def __getitem__(self, key: Any) -> Any:
        """Return bytes; the generated code slices for strings only."""
        if isinstance(key, slice):
            first, last = key.start or 0, key.stop or 0
            if not 0 <= first <= last <= len(self):
                raise _DamageError("a string ends outside the file")
            self.spend(last - first)
        return super().__getitem__(key)


def unpack(path: Path) -> tuple[Any, dict[int, Extent], int]:
    """Read the structure of a ``.tflite`` file.

    Returns:
        The schema's ``ModelT`` with data only in buffers of up to ``SMALL_NBYTES``; where the data of each buffer that
        has any lies (buffer index → extent, checked to be within the file); and the file's size in bytes. No result
        refers to the file.

    Raises:
        ModelError: the file is missing, unreadable, not a regular file, no ``.tflite``, truncated or damaged.
    """
    with _open(path) as mapped:
        try:
            return (*_unpack(mapped), len(mapped))
        except _DamageError as error:
            problem = str(error)
        except _OUTSIDE:
            problem = "an offset leads outside the file"
    # Raised here, the error keeps no reference to the mapped file.
    raise ModelError(f"{path}: the model is truncated or damaged: {problem}", "get the file again")


@contextmanager
def _open(path: Path) -> Iterator[_Mapped]:
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file", "give the path of a .tflite file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {reason_of(error)}", "give the path of a .tflite file") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelError(f"{path}: is {kind}", "give the path of a .tflite file")
        if status.st_size == 0:
            raise ModelError(f"{path}: the file is empty", "get the file again")
        if os.pread(descriptor, 8, 0)[4:] != IDENTIFIER:
            raise ModelError(
                f"{path}: is not a .tflite model: it lacks the identifier {IDENTIFIER.decode()}",
                "convert the model to .tflite first",
            )
        mapped = _Mapped(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {reason_of(error)}") from None
    finally:
        os.close(descriptor)
    mapped.allowance = min(2 * len(mapped), MAX_COPIED_NBYTES)  # twice: equal names may be stored once
    try:
        yield mapped
    finally:
        with suppress(BufferError):  # an active exception may still hold views; it releases them later
            mapped.close()


def _unpack(mapped: _Mapped) -> tuple[Any, dict[int, Extent]]:
    root = struct.unpack_from("<I", mapped)[0]
    _count_tables(mapped, root)
    model = schema.ModelT.InitFromBuf(mapped, root)
    model.buffers = model.buffers or []
    base = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    extents: dict[int, Extent] = {}
    for index, buffer in enumerate(model.buffers):
        data, buffer.data = buffer.data, None
        if data is not None and len(data):
            extents[index] = Extent(data.__array_interface__["data"][0] - base, len(data))
            if len(data) <= SMALL_NBYTES:
                mapped.spend(len(data))
                buffer.data = data.copy()
        elif buffer.offset > 1 and buffer.size:  # data behind the flatbuffer; 0 and 1 stand for none
            if buffer.offset + buffer.size > len(mapped):
                raise _DamageError(f"buffer {index} ends outside the file")
            extents[index] = Extent(buffer.offset, buffer.size, inline=False)
    for subgraph in model.subgraphs or ():
        for operator in subgraph.operators or ():
            _embed_large_options(mapped, operator)
    _detach(mapped, model)
    return model, extents


def _count_tables(mapped: _Mapped, root: int) -> None:
    """Follow every vector of tables.

    Raises:
        _DamageError: there are more tables than the file has room for, or many references to one.
    """
    # A table takes its reference and its head: 8 bytes at least.
    left = min(MAX_TABLES, len(mapped) // 8)
    repeats_left = MAX_REPEATED
    seen: set[int] = set()
    pending = [("Model", root)]
    while pending:
        kind, position = pending.pop()
        table = Table(mapped, position)
        for field, (is_vector, child) in _CHILDREN[kind].items():
            offset = table.Offset(field)
            if not offset:
                continue
            if not is_vector:
                pending.append((child, table.Indirect(position + offset)))
                continue
            start = table.Vector(offset)
            count = table.VectorLen(offset)
            left -= count
            if left < 0:
                raise _DamageError("it has more tables than the file has room for")
            places = [start + 4 * i + o for i, o in enumerate(struct.unpack_from(f"<{count}I", mapped, start))]
            if child == "Buffer":  # the LiteRT converter has one table for all empty ones; none refers to others
                continue
            repeats_left -= count + len(seen)
            seen.update(places)
            repeats_left += len(seen)
            if repeats_left < 0:
                raise _DamageError("it refers to the same tables again and again")
            if child in _CHILDREN:
                pending += [(child, place) for place in places]


def _embed_large_options(mapped: _Mapped, operator: Any) -> None:
    """Move a custom operator's options from behind the flatbuffer into it, so that stage files have them."""
    first, nbytes = operator.largeCustomOptionsOffset, operator.largeCustomOptionsSize
    if first > 1 and nbytes:
        if first + nbytes > len(mapped):
            raise _DamageError("a custom operator's options end outside the file")
        operator.customOptions = np.frombuffer(mapped, np.uint8, nbytes, first)
        operator.largeCustomOptionsOffset = operator.largeCustomOptionsSize = 0


def _detach(mapped: _Mapped, value: Any) -> None:
    """Replace every view of the file below ``value`` by a copy; the schema nests a few levels deep at most."""
    for name, item in vars(value).items():
        if isinstance(item, np.ndarray):
            if item.base is not None:
                mapped.spend(item.nbytes)
                setattr(value, name, item.copy())
        elif isinstance(item, list):
            for element in item:
                if hasattr(element, "__dict__"):
                    _detach(mapped, element)
        elif hasattr(item, "__dict__"):
            _detach(mapped, item)
