"""Checks of what the graph does not need and the runtime trusts: signatures, metadata, sparsity, quantisation."""

from __future__ import annotations

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
