"""Subgraphs that operators call, and signatures: the names of inputs and outputs for callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.errors import ModelError, absent, shown
from search_spaces.core.graph import Boundary
from search_spaces.models.changes import changed
from search_spaces.models.source import ModelSource

# Class of options → its fields that hold numbers of subgraphs, one or a list.
_REFERENCES: Mapping[str, tuple[str, ...]] = {
    "CallOptionsT": ("subgraph",),
    "CallOnceOptionsT": ("initSubgraphIndex",),
    "IfOptionsT": ("thenSubgraphIndex", "elseSubgraphIndex"),
    "WhileOptionsT": ("condSubgraphIndex", "bodySubgraphIndex"),
    "StablehloCaseOptionsT": ("branchSubgraphIndices",),
    "StablehloCustomCallOptionsT": ("calledComputations",),
    "StableHLOCompositeOptionsT": ("decompositionSubgraphIndex",),
    "StablehloReduceOptionsT": ("bodySubgraphIndex",),
    "StablehloReduceWindowOptionsT": ("bodySubgraphIndex",),
    "StablehloScatterOptionsT": ("updateComputationSubgraphIndex",),
    "StablehloSortOptionsT": ("comparatorSubgraphIndex",),
    "StablehloWhileOptionsT": ("condSubgraphIndex", "bodySubgraphIndex"),
}

_OPTIONS = ("builtinOptions", "builtinOptions2")


def called(operator: Any) -> tuple[int, ...]:
    """Return the subgraphs that a schema ``OperatorT`` refers to."""
    found: list[int] = []
    for options, field in _references(operator):
        value = getattr(options, field)
        found += [] if value is None else [int(v) for v in np.atleast_1d(value)]
    return tuple(found)


def reached(model: Any, operators: Sequence[Any]) -> tuple[int, ...]:
    """Return the subgraphs that operators call, directly or through each other, ascending."""
    found: set[int] = set()
    waiting = [number for operator in operators for number in called(operator)]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [n for o in model.subgraphs[number].operators or () for n in called(o)]
    return tuple(sorted(found))


def check_calls(model: Any) -> tuple[int, ...]:
    """Return the subgraphs in topological order: each after those that it calls.

    Raises:
        ValueError: a call leads to the main subgraph, to a missing one, or forms a cycle.
    """
    count = len(model.subgraphs)
    calls = {i: {n for o in s.operators or () for n in called(o)} for i, s in enumerate(model.subgraphs)}
    wrong = next((n for others in calls.values() for n in others if not 0 < n < count), None)
    if wrong is not None:
        raise ValueError(f"an operator calls subgraph {wrong}, which is the main one or does not exist")
    try:
        return tuple(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise ValueError(f"subgraph {min(error.args[1])} calls itself") from None


def operator_states(model: Any, order: Sequence[int]) -> list[frozenset[str]]:
    """Return, for each operator of the main subgraph, the variables and tables that it or its subgraphs refer to.

    Args:
        order: of the subgraphs, as :func:`check_calls` returns it.
    """
    inside: dict[int, frozenset[str]] = {}

    def states(operator: Any) -> frozenset[str]:
        own = _own_state(operator)
        return frozenset().union(own, *(inside[n] for n in called(operator)))

    for number in order:
        inside[number] = frozenset().union(*(states(o) for o in model.subgraphs[number].operators or ()))
    return [states(operator) for operator in model.subgraphs[0].operators or ()]


def _own_state(operator: Any) -> tuple[str, ...]:
    options = operator.builtinOptions
    if isinstance(options, schema.VarHandleOptionsT):
        names = ((name or b"").decode(errors="replace") for name in (options.container, options.sharedName))
        return ("variable " + "/".join(names),)
    if isinstance(options, schema.HashtableOptionsT):
        return (f"table {options.tableId}",)
    return ()


def renumbered(operator: Any, codes: Mapping[int, int], subgraphs: Mapping[int, int]) -> Any:
    """Return a copy of a schema ``OperatorT`` with its code and the subgraphs that it calls renumbered."""
    own = {side: changed(getattr(operator, side)) for side in _OPTIONS}
    moved = changed(operator, opcodeIndex=codes[int(operator.opcodeIndex)], **own)
    for options, field in _references(moved):
        value = getattr(options, field)
        if isinstance(value, np.ndarray | list):
            setattr(options, field, np.array([subgraphs[int(v)] for v in value], np.int32))
        elif value is not None:
            setattr(options, field, subgraphs[int(value)])
    return moved


def _references(operator: Any) -> Iterator[tuple[Any, str]]:
    for side in _OPTIONS:
        options = getattr(operator, side)
        for field in _REFERENCES.get(type(options).__name__, ()):
            yield options, field


_DEFAULT_KEY = b"serving_default"


def select_signature(source: ModelSource, key: str) -> ModelSource:
    """Return the model with the subgraph of a signature as its main subgraph.

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
        raise ModelError(f"signature {key!r} is for {absent('subgraph', number, count)}")
    places = {n: 0 if n == number else number if n == 0 else n for n in range(count)}
    codes = {n: n for n in range(len(model.operatorCodes or ()))}
    try:
        subgraphs = [
            changed(s, operators=[renumbered(o, codes, places) for o in s.operators or ()])
            for s in (model.subgraphs[places[place]] for place in range(count))
        ]
    except KeyError as error:
        raise ModelError(f"an operator refers to {error}, which the model does not have") from None
    signatures = [changed(s, subgraphIndex=places.get(int(s.subgraphIndex), -1)) for s in model.signatureDefs]
    moved = changed(model, subgraphs=subgraphs, signatureDefs=signatures)
    return replace(source, schema=moved, fixed=number != 0, signature=key if number else "")


def stage_signatures(whole: Any, border: Boundary, place: Mapping[int, int]) -> list[Any] | None:
    """Return the signatures of a stage, or None where the model has none.

    Inputs and outputs are listed in the order of the stage's subgraph, since the runtime takes buffers in the order of
    the signature.

    Args:
        whole: the schema's ``ModelT`` of the model.
        border: the inputs and outputs of the stage.
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
    """Return one signature, with names from the signatures ``by``; earlier ones take precedence."""
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
    """Return the entries of one side; a repeated name is followed by ``:`` and the tensor's number."""
    taken: set[bytes] = set()
    entries = []
    for tensor in side:
        name = known.get(tensor) or tensors[tensor].name or b"tensor"
        while name in taken:
            name += b":%d" % tensor
        taken.add(name)
        entries.append(schema.TensorMapT(name=name, tensorIndex=place[tensor]))
    return entries
