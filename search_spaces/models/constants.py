"""Small constants of a model, as numbers."""

from __future__ import annotations

import numpy as np

from search_spaces.graph import Graph


def integers(graph: Graph, tensor: int) -> list[int] | None:
    """Return the elements of a constant of whole numbers (axes, paddings, shapes), or None where they are not known.

    Only what is kept with the structure is looked at (:data:`~search_spaces.models.flatbuffer.SMALL_NBYTES`).
    """
    held = graph.tensors[tensor]
    if graph.source is None or not held.constant or held.dtype not in {"int32", "int64"}:
        return None
    buffers = graph.source.schema.buffers
    data = buffers[held.buffer].data if 0 < held.buffer < len(buffers) else None
    if data is None or len(data) < held.nbytes:
        return None
    return [int(v) for v in np.frombuffer(bytes(np.asarray(data, np.uint8)), held.dtype)]
