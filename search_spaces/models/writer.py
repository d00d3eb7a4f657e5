"""Write a ``.tflite`` file from a schema and its weights, without a second copy of the weights.

The object API of flatbuffers builds a file back to front in one growing array; with half a gigabyte of weights that
takes several copies. Here it packs the structure alone, with a placeholder for each weight. The weights follow that
header as plain byte vectors, and the reference in each ``Buffer`` table is pointed at its vector.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from flatbuffers.table import Table
from numpy.typing import NDArray

from search_spaces.errors import ModelError
from search_spaces.models.atomic import replacing

Blob = bytes | bytearray | memoryview | NDArray[Any]

IDENTIFIER = b"TFL3"
ALIGNMENT = 16  # the schema's force_align of Buffer.data
MAX_NBYTES = 2**31 - 1  # references inside a flatbuffer are signed 32-bit numbers somewhere in every reader

_BUFFERS_FIELD = 12  # position of Model.buffers in a vtable
_DATA_FIELD, _OFFSET_FIELD, _SIZE_FIELD = 4, 6, 8  # positions of Buffer.data, .offset and .size
_OUTSIDE = {"offset": 2, "size": 1}  # numbers that are no defaults, so that the fields are there
_PLACEHOLDER = np.zeros(1, np.uint8)


def write_model(model: Any, blobs: Mapping[int, Blob], path: Path, *, outside: bool = False) -> None:
    """Write ``model`` (a schema ``ModelT``) with the weights ``blobs``; the file appears whole or not at all.

    Args:
        model: the structure; data that its own buffers hold is written too, and it is left as it is.
        blobs: buffer index → its bytes, C-contiguous. Each is asked for once, in ascending order, and let go before
            the next one, so a mapping may make them on the way.
        path: where to write; an existing file is replaced.
        outside: write ``blobs`` behind the flatbuffer, as models of more than 2 GB have their weights.

    Raises:
        ModelError: the flatbuffer would have more than ``MAX_NBYTES``.
        UsageError: the folder cannot be written, or the disk is full.
    """
    with replacing(path) as file:
        write_into(file, model, blobs, str(path), outside=outside)


def write_into(file: BinaryIO, model: Any, blobs: Mapping[int, Blob], name: str, *, outside: bool = False) -> None:
    """Write a model to an open, empty file, which an error leaves half-written; see :func:`write_model`.

    Args:
        name: what an error calls the file.

    Raises:
        ModelError: the flatbuffer would have more than ``MAX_NBYTES``.
        OSError: the file cannot be written.
    """
    given = set(blobs)  # asking the mapping whether it has one could make it
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
    """Pack a schema ``ModelT`` into a flatbuffer whose buffers ``which`` refer to data that is not there yet.

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
        raise ModelError(f"buffers {min(wanted)} to {max(wanted)} are wanted of a model that has {len(model.buffers)}")
    packed = copy.copy(model)
    packed.buffers = [_Aligned(buffer) for buffer in model.buffers]
    for index in wanted:
        placed = index in outside
        packed.buffers[index] = schema.BufferT(**(_OUTSIDE if placed else {"data": _PLACEHOLDER}))
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
    """Make the ``Buffer`` at position ``table`` of a header stand for ``nbytes`` bytes from ``first`` on.

    ``first`` counts from the start of the flatbuffer. A buffer of no bytes is left without any.
    """
    found = Table(header, table)
    place, size = table + found.Offset(_OFFSET_FIELD), table + found.Offset(_SIZE_FIELD)
    struct.pack_into("<Q", header, place, first if nbytes else 0)
    struct.pack_into("<Q", header, size, nbytes)


def _bytes_of(blob: Blob) -> memoryview:
    view = blob.data if isinstance(blob, np.ndarray) else memoryview(blob)
    return view.cast("B") if view.nbytes else memoryview(b"")


class _Aligned:
    """A schema ``BufferT`` whose data starts at a multiple of ``ALIGNMENT``; the object API does not see to that."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def Pack(self, builder: Any) -> Any:  # noqa: N802 - the name that ModelT.Pack calls
        if self._buffer.data is None:
            return self._buffer.Pack(builder)
        builder.Prep(ALIGNMENT, len(self._buffer.data))
        return schema.BufferT(data=np.asarray(self._buffer.data, np.uint8)).Pack(builder)
