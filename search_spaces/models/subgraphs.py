"""Subgraphs that operators call: loop bodies, branches, initialisers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

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
    """Return the subgraphs in an order in which each comes after those that it calls.

    Raises:
        ValueError: a call leads to the main subgraph, nowhere, or back to where it came from.
    """
    count = len(model.subgraphs)
    callers: dict[int, list[int]] = {n: [] for n in range(count)}
    calls = [{n for operator in s.operators or () for n in called(operator)} for s in model.subgraphs]
    for number, others in enumerate(calls):
        wrong = next((n for n in others if not 0 < n < count), None)
        if wrong is not None:
            raise ValueError(f"an operator calls subgraph {wrong} of {count}")
        for other in others:
            callers[other].append(number)
    open_calls = [len(others) for others in calls]
    ordered = [n for n in range(count) if not open_calls[n]]
    for number in ordered:  # grows on the way
        for caller in callers[number]:
            open_calls[caller] -= 1
            if not open_calls[caller]:
                ordered.append(caller)
    left = set(range(count)) - set(ordered)
    if left:
        number = min(left)
        for _ in left:  # after as many steps the way is in the circle
            number = min(calls[number] & left)
        raise ValueError(f"subgraph {number} calls itself")
    return tuple(ordered)


def operator_states(model: Any, order: Sequence[int]) -> list[frozenset[str]]:
    """Return, for each operator of the main subgraph, the variables and tables that it or what it calls refers to.

    Args:
        order: of the subgraphs, as :func:`check_calls` gives it.
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
    """Return a copy of a schema ``OperatorT`` with other numbers for its code and for the subgraphs that it calls."""
    changed = copy.copy(operator)
    changed.opcodeIndex = codes[int(operator.opcodeIndex)]
    for side in _OPTIONS:
        if getattr(changed, side) is not None:
            setattr(changed, side, copy.copy(getattr(changed, side)))
    for options, field in _references(changed):
        value = getattr(options, field)
        if isinstance(value, np.ndarray | list):
            setattr(options, field, np.array([subgraphs[int(v)] for v in value], np.int32))
        elif value is not None:
            setattr(options, field, subgraphs[int(value)])
    return changed


def _references(operator: Any) -> Iterator[tuple[Any, str]]:
    for side in _OPTIONS:
        options = getattr(operator, side)
        for field in _REFERENCES.get(type(options).__name__, ()):
            yield options, field
