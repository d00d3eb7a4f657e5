"""Builtin options of an operator as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.models.dtypes import DTYPES, enumerators

MAX_ELEMENTS = 64  # longer lists are tables of data, not settings

# Field of the schema → the values that it may have by name. A field without an entry is a number, or a list of them.
_ENUMERATIONS: Mapping[str, Mapping[int, str]] = {
    "padding": enumerators(schema.Padding),
    "fusedActivationFunction": enumerators(schema.ActivationFunctionType),
    "weightsFormat": enumerators(schema.FullyConnectedOptionsWeightsFormat),
    "kernelType": enumerators(schema.LSTMKernelType),
    "combiner": enumerators(schema.CombinerType),
    "mode": enumerators(schema.MirrorPadMode),
    "reduceFunction": enumerators(schema.ReduceWindowFunction),
    "inDataType": DTYPES,
    "outDataType": DTYPES,
    "outType": DTYPES,
    "idxOutType": DTYPES,
    "quantizedBiasType": DTYPES,
}

_RENAMED: Mapping[str, str] = {"fusedActivationFunction": "fused_activation"}


def plain_options(operator: Any) -> dict[str, Any]:
    """Return the builtin options of a schema ``OperatorT``: numbers, names of enumerators, tuples of numbers.

    The schema's ``strideH`` becomes ``stride_h``, its ``fusedActivationFunction`` ``fused_activation``.

    Raises:
        ValueError: an enumeration has a value that the installed schema does not know.
    """
    found: dict[str, Any] = {}
    for options in (operator.builtinOptions, operator.builtinOptions2):
        for field, value in vars(options).items() if options is not None else ():
            plain = _plain(field, value)
            if plain is not None:
                found[_RENAMED.get(field) or re.sub(r"(?<!^)(?=[A-Z])", "_", field).lower()] = plain
    return found


def _plain(field: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tuple(value.tolist()) if value.size <= MAX_ELEMENTS else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (bool, float)):
        return value
    if not isinstance(value, int):
        return None
    names = _ENUMERATIONS.get(field)
    if names is None:
        return value
    if value not in names:
        raise ValueError(f"option {field} has the value {value}, which the installed schema does not know")
    return names[value]
