"""Element types of the schema: their names, and how many bytes a tensor of them takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.graph import Graph


def enumerators(enum: type) -> dict[int, str]:
    """Return value → name of an enumeration of the generated schema."""
    return {value: name for name, value in vars(enum).items() if isinstance(value, int) and not name.startswith("_")}


# The schema's ``TensorType`` → name of the element type.
DTYPES: Mapping[int, str] = {value: name.lower() for value, name in enumerators(schema.TensorType).items()}

# Types without an entry (string, resource, variant) have elements of no fixed size.
_NAMES: Mapping[int, str] = {
    2: "int2",
    4: "int4 uint4",
    8: "bool int8 uint8 float8_e4m3fn float8_e5m2",
    16: "int16 uint16 float16 bfloat16",
    32: "int32 uint32 float32",
    64: "int64 uint64 float64 complex64",
    128: "complex128",
}
_BITS = {name: bits for bits, names in _NAMES.items() for name in names.split()}


def has_fixed_size(dtype: str) -> bool:
    """Return whether the shape alone determines the bytes of a tensor; strings and handles do not."""
    return dtype in _BITS


def element_bits(dtype: str) -> int:
    """Return the bits of an element, 0 where elements differ in size."""
    return _BITS.get(dtype, 0)


def tensor_nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a tensor, open dimensions (-1) counted as 1.

    Elements narrower than a byte are packed (two ``int4`` in one byte) and the last byte is padded. Types without
    a fixed size count as 0.
    """
    count = prod(1 if size < 0 else size for size in shape)
    return (count * _BITS.get(dtype, 0) + 7) // 8


def integers(graph: Graph, tensor: int) -> list[int] | None:
    """Return the elements of a constant of integers (axes, paddings, shapes), or None where they are not known.

    Only constants that are kept with the structure are known (:data:`~search_spaces.models.flatbuffer.SMALL_NBYTES`).
    """
    held = graph.tensors[tensor]
    if graph.source is None or not held.constant or held.dtype not in {"int32", "int64"}:
        return None
    buffers = graph.source.schema.buffers
    data = buffers[held.buffer].data if 0 < held.buffer < len(buffers) else None
    if data is None or len(data) < held.nbytes:
        return None
    return [int(v) for v in np.frombuffer(bytes(np.asarray(data, np.uint8)), held.dtype)]
