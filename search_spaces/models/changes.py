"""Changes of a model's structure: changed copies of the schema's objects, and operators that are added."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from search_spaces.models.dtypes import enumerators

KINDS = enumerators(schema.BuiltinOperator)
"""Number → name of each builtin operator."""
BUILTIN = frozenset(KINDS.values())

Tensors = Sequence[int] | NDArray[np.int32]


def number_of(code: Any) -> int:
    """Return the number of a schema ``OperatorCodeT``; the deprecated field holds numbers up to 127."""
    return int(max(code.builtinCode, code.deprecatedBuiltinCode))


def indices(vector: Any) -> tuple[int, ...]:
    """Return the numbers of a vector of the schema, which may be missing, an array or a list."""
    if vector is None:
        return ()
    return tuple(vector.tolist() if isinstance(vector, np.ndarray) else map(int, vector))


def changed(thing: Any, **attributes: Any) -> Any:
    """Return a copy of an object of the schema with some of its attributes changed, as :func:`dataclasses.replace`."""
    found = copy.copy(thing)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def with_main(model: Any, **attributes: Any) -> Any:
    """Return a copy of a model (``ModelT``) with some attributes of its main subgraph changed."""
    return changed(model, subgraphs=[changed(model.subgraphs[0], **attributes), *model.subgraphs[1:]])


def made_operator(
    codes: list[Any], kind: str, inputs: Tensors, outputs: Tensors, options: Any = None, version: int = 1
) -> Any:
    """Return a builtin operator.

    Args:
        codes: of the model; a code of this kind is added where there is none of at least this version.
        options: an object of the schema, as ``AddOptionsT``.
    """
    found = schema.OperatorT(opcodeIndex=_code(codes, kind, version), inputs=inputs, outputs=outputs)
    if options is not None:
        found.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        found.builtinOptions = options
    return found


def _code(codes: list[Any], kind: str, version: int) -> int:
    number = getattr(schema.BuiltinOperator, kind)
    for index, code in enumerate(codes):
        if number_of(code) == number and code.version >= version:
            return index
    # Older readers use the deprecated field, which holds codes up to 127.
    codes.append(schema.OperatorCodeT(deprecatedBuiltinCode=min(number, 127), builtinCode=number, version=version))
    return len(codes) - 1
