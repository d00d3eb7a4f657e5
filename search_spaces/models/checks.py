"""Checks of what the graph does not need and the runtime trusts: signatures, metadata, sparsity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from search_spaces.errors import shown
from search_spaces.models.source import ModelSource


def check_references(source: ModelSource) -> None:
    """Check that signatures and metadata refer to what is there.

    Raises:
        ValueError: one does not.
    """
    model = source.schema
    buffers = len(model.buffers)
    for number in model.metadataBuffer if model.metadataBuffer is not None else ():
        if not 0 <= number < buffers:
            raise ValueError(f"its metadata is in buffer {number} of {buffers}")
    for entry in model.metadata or ():
        if not 0 <= entry.buffer < buffers:
            raise ValueError(f"metadata {shown(entry.name)} is in buffer {entry.buffer} of {buffers}")
    for signature in model.signatureDefs or ():
        if not 0 <= signature.subgraphIndex < len(model.subgraphs):
            raise ValueError(f"a signature is for subgraph {signature.subgraphIndex} of {len(model.subgraphs)}")
        tensors = len(model.subgraphs[signature.subgraphIndex].tensors or ())
        for entry in (*(signature.inputs or ()), *(signature.outputs or ())):
            if not 0 <= entry.tensorIndex < tensors:
                key = shown(signature.signatureKey)
                raise ValueError(f"signature {key} names tensor {entry.tensorIndex} of {tensors}")


def block_scales(tensor: Any) -> tuple[int, ...]:
    """Return the tensor that holds the scales of one quantised by blocks; empty for any other."""
    held = tensor.quantization
    blockwise = schema.QuantizationDetails.BlockwiseQuantization
    if held is None or held.detailsType != blockwise or held.details is None:
        return ()
    return (int(held.details.scales),)


def check_blocks(subgraph: Any, index: int, sizes: Mapping[int, int]) -> None:
    """Check that the scales of a tensor that is quantised by blocks are there.

    Args:
        sizes: buffer → bytes that it holds.

    Raises:
        ValueError: they are not.
    """
    tensor = subgraph.tensors[index]
    for scales in block_scales(tensor):
        details = tensor.quantization.details
        count = prod(_numbers(tensor.shape))
        if not 0 <= scales < len(subgraph.tensors) or details.blockSize < 1 or count % details.blockSize:
            raise ValueError(f"tensor {index} is quantised by blocks of {details.blockSize} with scales {scales}")
        held = subgraph.tensors[scales]
        elements = prod(_numbers(held.shape))
        half = held.type == schema.TensorType.FLOAT16
        if not half or elements != count // details.blockSize or sizes.get(held.buffer, 0) < 2 * elements:
            raise ValueError(f"tensor {index} is quantised by blocks, and its scales (tensor {scales}) do not fit")
        if details.zeroPoints > 0:
            raise ValueError(f"tensor {index} is quantised by blocks with zero points, which the runtime does not read")


def check_sparsity(sparsity: Any, shape: Sequence[int], bits: int, nbytes: int) -> None:
    """Check that a sparse tensor's data can be unfolded to its shape.

    Dimensions are stored in ``traversalOrder``, each dense (all of its places) or sparse (a list of places for each
    place of the dimension before); blocks are further dimensions that subdivide those of ``blockMap``.

    Args:
        sparsity: the schema's ``SparsityParametersT``.
        shape: of the tensor.
        bits: of an element.
        nbytes: of the data that is there.

    Raises:
        ValueError: it cannot.
    """
    order, blocks = _numbers(sparsity.traversalOrder), _numbers(sparsity.blockMap)
    levels = sparsity.dimMetadata or []
    rank = len(shape)
    if sorted(order) != list(range(rank + len(blocks))) or len(levels) != len(order):
        raise ValueError("is sparse in other dimensions than it has")
    if any(not 0 <= b < rank for b in blocks) or len(set(blocks)) != len(blocks):
        raise ValueError("is sparse in blocks of other dimensions than it has")
    sizes = [*shape, *(1 for _ in blocks)]
    for dimension, level in zip(order, levels, strict=True):
        if dimension >= rank:
            sizes[dimension] = size = level.denseSize
            divided = blocks[dimension - rank]
            if level.format != schema.DimensionType.DENSE or size < 1 or shape[divided] % size:
                raise ValueError("is sparse in blocks that do not fill it")
            sizes[divided] = shape[divided] // size
    places = 1
    for dimension, level in zip(order, levels, strict=True):
        places = _places(level, sizes[dimension], places)
        if places * bits > 8 * nbytes:
            raise ValueError(f"is sparse and needs more than the {nbytes} bytes that it has")


def _places(level: Any, size: int, before: int) -> int:
    """Return how many places there are after one more dimension."""
    if level.format == schema.DimensionType.DENSE:
        if level.denseSize != size:
            raise ValueError(f"is sparse with a dimension of {level.denseSize} in place of {size}")
        return before * size
    segments = _numbers(level.arraySegments.values if level.arraySegments is not None else None)
    indices = _numbers(level.arrayIndices.values if level.arrayIndices is not None else None)
    if (
        len(segments) != before + 1
        or segments[0]
        or segments != sorted(segments)
        or segments[-1] != len(indices)
        or any(not 0 <= i < size for i in indices)
    ):
        raise ValueError("is sparse with places outside of its shape")
    return len(indices)


def _numbers(vector: Any) -> list[int]:
    return [] if vector is None else [int(v) for v in vector]
