"""Signatures: the names under which a caller knows a model's inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from search_spaces.errors import ModelError, shown
from search_spaces.graph import Boundary
from search_spaces.models.source import ModelSource
from search_spaces.models.subgraphs import renumbered

_DEFAULT_KEY = b"serving_default"


def select_signature(source: ModelSource, key: str) -> ModelSource:
    """Return a model whose main subgraph is that of a signature.

    Raises:
        ModelError: there is no such signature, or another subgraph calls its subgraph.
    """
    model = source.schema
    keys = [(s.signatureKey or b"").decode(errors="replace") for s in model.signatureDefs or ()]
    if key not in keys:
        known = ", ".join(map(shown, keys)) or "none"
        raise ModelError(f"the model has no signature {key!r}", f"it has: {known}")
    chosen = model.signatureDefs[keys.index(key)]
    number, count = int(chosen.subgraphIndex), len(model.subgraphs or ())
    if not 0 <= number < count:
        raise ModelError(f"signature {key!r} is for subgraph {number} of {count}")
    places = {n: 0 if n == number else number if n == 0 else n for n in range(count)}
    codes = {n: n for n in range(len(model.operatorCodes or ()))}
    changed = copy.copy(model)
    changed.subgraphs = []
    for place in range(count):
        subgraph = copy.copy(model.subgraphs[places[place]])
        subgraph.operators = [_renumbered(o, codes, places) for o in subgraph.operators or ()]
        changed.subgraphs.append(subgraph)
    changed.signatureDefs = [copy.copy(s) for s in model.signatureDefs]
    for signature in changed.signatureDefs:
        signature.subgraphIndex = places.get(int(signature.subgraphIndex), -1)
    return replace(source, schema=changed, fixed=number != 0, signature=key if number else "")


def _renumbered(operator: Any, codes: Mapping[int, int], places: Mapping[int, int]) -> Any:
    try:
        return renumbered(operator, codes, places)
    except KeyError as error:
        raise ModelError(f"an operator refers to {error}, which the model does not have") from None


def stage_signatures(whole: Any, border: Boundary, place: Mapping[int, int]) -> list[Any] | None:
    """Return the signatures of a stage, or None where the model has none.

    Inputs and outputs are listed in the order of the stage's subgraph, since the runtime takes buffers in the order of
    the signature.

    Args:
        whole: the schema's ``ModelT`` of the model.
        border: what enters and leaves the stage.
        place: tensor of the model's main subgraph → its number in the stage.
    """
    signatures = [s for s in whole.signatureDefs or () if not s.subgraphIndex]
    if not signatures:
        return None
    tensors = whole.subgraphs[0].tensors
    kept = [
        _signature(s.signatureKey, border, place, tensors, [s])
        for s in signatures
        if set(_names(s.inputs)) == set(border.inputs) and set(_names(s.outputs)) == set(border.outputs)
    ]
    return kept or [_signature(signatures[0].signatureKey, border, place, tensors, signatures)]


def _signature(key: Any, border: Boundary, place: Mapping[int, int], tensors: Any, by: Sequence[Any]) -> Any:
    """Return one signature, with names from the signatures ``by``, the first ones first."""
    known: dict[int, bytes] = {}
    for signature in reversed(by):
        known |= _names(signature.outputs)
        known |= _names(signature.inputs)
    made = schema.SignatureDefT(signatureKey=key or _DEFAULT_KEY, subgraphIndex=0)
    made.inputs, made.outputs = (_entries(side, place, known, tensors) for side in (border.inputs, border.outputs))
    return made


def _names(entries: Any) -> dict[int, bytes]:
    return {int(entry.tensorIndex): entry.name or b"" for entry in reversed(entries or ())}


def _entries(side: Sequence[int], place: Mapping[int, int], known: Mapping[int, bytes], tensors: Any) -> list[Any]:
    """Return the entries of one side; a name that is there already is followed by ``:`` and the tensor's number."""
    taken: set[bytes] = set()
    entries = []
    for tensor in side:
        name = known.get(tensor) or tensors[tensor].name or b"tensor"
        while name in taken:
            name += b":%d" % tensor
        taken.add(name)
        entries.append(schema.TensorMapT(name=name, tensorIndex=place[tensor]))
    return entries
