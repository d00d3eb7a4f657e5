"""Reads the phone measurements of qed-usc/mobile-ml-benchmark: 68 CNNs, end to end and operator by operator.

The table of operators was measured on GPUs, whose runtime fuses elementwise operators with the operator before:
``convolution_2d_5_linked_:_add_6_linked_:_relu_7`` ran as one kernel. The numbers are positions in the model, which
count activations. From them follow the operators that the CPU runs in addition: the linked additions and products one
by one, and for missing numbers, paddings and products whose result another operator reads.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from evaluators.cost_model.features import OperatorFeatures, convolution_kernel
from search_spaces.core.errors import UsageError, shown

END_TO_END = "phones_cnn_e2e_us.csv"
GPU_OPERATORS = "phones_cnn_gpu_operators_us.csv"
PHONES = ("pixel4", "s10", "mi8se", "a03s", "iphone7", "iphonexs")
_ACTIVATIONS = ("relu", "relu6", "clip")
_FLOAT = 4
_MOST_PADDED = 6  # pixels, both sides together


@dataclass(frozen=True, slots=True)
class PhoneModel:
    """One model and its measured times.

    Attributes:
        name: as in the table.
        family: shared by models of one architecture (:func:`family_of`).
        merged: operators as a GPU runs them, one for each row of the table.
        merged_s: phone → measured time of each of ``merged`` (s); NaN where it ran as part of another.
        single: operators as a CPU runs them, one by one.
        end_to_end_s: (phone, cores or ``gpu``, ``float`` or ``quant``) → mean time (s).
    """

    name: str
    family: str
    merged: tuple[OperatorFeatures, ...]
    merged_s: Mapping[str, tuple[float, ...]]
    single: tuple[OperatorFeatures, ...]
    end_to_end_s: Mapping[tuple[str, str, str], float]


def family_of(model: str) -> str:
    """Return the architecture of a model: its name without depth, width and variant (``mobilenetv2b_wd4``)."""
    stem = re.match(r"mobilenetv\d|[a-z]+", model)
    name = stem.group() if stem else model
    return {"mobilenetb": "mobilenet", "preresnetbc": "preresnet", "resnetbc": "resnet"}.get(name, name)


def read_phones(folder: Path) -> tuple[PhoneModel, ...]:
    """Return the models of the two tables in ``folder``, in the order of the end-to-end table.

    Raises:
        UsageError: a table is missing or not valid.
    """
    rows: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for line, row in _table(folder / GPU_OPERATORS):
        rows.setdefault(row["model"], []).append((line, row))
    found = []
    for line, row in _table(folder / END_TO_END):
        name = row["model"]
        if name not in rows:
            raise UsageError(f"{folder / END_TO_END}:{line}: model {shown(name)} has no operators in {GPU_OPERATORS}")
        merged = [_operator(folder / GPU_OPERATORS, number, each) for number, each in rows[name]]
        times = {
            phone: tuple(_microseconds(each.get(f"{phone}|gpu|float", "")) for _, each in rows[name])
            for phone in PHONES
        }
        whole = {}
        for key, value in row.items():
            parts = tuple(key.split("|"))
            if len(parts) == 4 and parts[3] == "mean":
                whole[parts[0], parts[1], parts[2]] = _microseconds(value)
        kernels = [each.get("pixel4|gpu|kernel", "") for _, each in rows[name]]
        single = tuple(_single(merged, kernels))
        merged = [_with_linked(each, kernel) for each, kernel in zip(merged, kernels, strict=True)]
        found.append(PhoneModel(name, family_of(name), tuple(merged), times, single, whole))
    return tuple(found)


def _table(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from enumerate(csv.DictReader(file), start=2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a table: {error}") from error


def _microseconds(text: str) -> float:
    try:
        return float(text) * 1e-6
    except ValueError:
        return math.nan


def _operator(path: Path, line: int, row: Mapping[str, str]) -> OperatorFeatures:
    try:
        fields = ast.literal_eval(row["feature"])
        return features_of_row(row["operation"], {str(key): _number(value) for key, value in fields.items()})
    except (KeyError, ValueError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path}:{line}: {shown(row.get('feature'))} does not describe an operator") from error


def _number(value: object) -> int:
    return 0 if value == "-" else int(str(value))


def features_of_row(operation: str, fields: Mapping[str, int]) -> OperatorFeatures:
    """Return the features of an operator from a row of the table, instead of a graph; batch 1, float32, square.

    Args:
        operation: the schema's name, ``CONV_2D_GROUP`` for a grouped convolution.
        fields: ``Input_shape`` and ``Output_shape`` (a side), ``Input_channel``, ``Filter`` (channels out),
            ``Kernel`` (a side), ``Stride`` and ``Group``; 0 where there is none.

    Raises:
        KeyError: a field is missing.
        ValueError: the operation is not known, or a number is negative.
    """
    if min(fields.values()) < 0:
        raise ValueError(operation)
    side, depth, out = max(1, fields["Input_shape"]), max(1, fields["Input_channel"]), max(1, fields["Output_shape"])
    filters, window = max(1, fields["Filter"]), max(1, fields["Kernel"])
    stride, groups = max(1, fields["Stride"]), max(1, fields["Group"])
    kernel, kind, inputs, macs, weights = "", operation, 1, 0, 0
    if operation in {"CONV_2D", "CONV_2D_GROUP"}:
        kernel = convolution_kernel(
            (window, window), (stride, stride), groups, (side, side, depth), (out, out, filters)
        )
        kind = "CONV_2D"
        weights = window**2 * depth * filters // groups
        macs, weights = out**2 * weights, weights + filters
    elif operation == "DEPTHWISE_CONV_2D":
        kernel, filters = "depthwise", depth * filters
        macs, weights = out**2 * filters * window**2, filters * (window**2 + 1)
    elif operation == "FULLY_CONNECTED":
        kernel, side, out = "fully_connected", 1, 1
        macs, weights = depth * filters, depth * filters + filters
    elif operation == "MEAN":
        kernel, filters, out, window = "mean", depth, 1, side
    elif operation in {"MAX_POOL_2D", "AVERAGE_POOL_2D"}:
        kernel, filters = "pool", depth
    elif operation == "CONCATENATION":
        kernel, inputs, depth, window = "concat", window, filters, 1
    else:
        raise ValueError(operation)
    return OperatorFeatures(
        kernel=kernel,
        kind=kind,
        macs=macs,
        read_bytes=side**2 * depth * _FLOAT,
        weight_bytes=weights * _FLOAT,
        written_bytes=out**2 * filters * _FLOAT,
        input=(side, side, depth),
        output=(out, out, filters),
        filter=(window, window),
        stride=(stride, stride),
        groups=groups,
        inputs=inputs,
    )


def _linked(kernel: str) -> list[tuple[str, int]]:
    """Return name and position of each operator of a merged kernel."""
    found = []
    for part in kernel.split("_linked_:_"):
        name, _, position = part.rpartition("_")
        found.append((name, int(position) if position.isdigit() else -1))
    return found


def _with_linked(operator: OperatorFeatures, kernel: str) -> OperatorFeatures:
    """Add the reads of the additions and products that are fused with the operator."""
    more = sum(name in {"add", "mul"} for name, _ in _linked(kernel)[1:])
    return replace(
        operator, read_bytes=operator.read_bytes + more * operator.written_bytes, inputs=operator.inputs + more
    )


def _single(operators: Iterable[OperatorFeatures], kernels: Iterable[str]) -> Iterator[OperatorFeatures]:
    before, last = -1, None
    for operator, kernel in zip(operators, kernels, strict=True):
        chain = _linked(kernel)
        missing = chain[0][1] - before - 1 if chain[0][1] >= 0 else 0
        yield from _between(operator, last, missing)
        yield operator
        for name, _ in chain[1:]:
            if name not in _ACTIVATIONS:
                yield elementwise(operator.output, 2 if name in {"add", "mul"} else 1, name.upper())
        before, last = max(before, chain[-1][1]), operator


def _between(operator: OperatorFeatures, last: OperatorFeatures | None, missing: int) -> Iterator[OperatorFeatures]:
    """Yield the operators before ``operator`` that the table omits; they wrote its input."""
    height, width, channels = operator.input
    padded = missing > 0 and (last is None or (height > last.output[0] > 1 and height - last.output[0] <= _MOST_PADDED))
    others = missing - padded
    for _ in range(others - (others == len(("MUL", "ADD", "RELU")))):  # the CPU's ADD applies the activation itself
        yield elementwise((height, width, channels), 2, "MUL")
    if padded:
        yield replace(elementwise((height, width, channels), 1, "PAD"), kernel="copy")


def elementwise(plane: tuple[int, int, int], inputs: int, kind: str) -> OperatorFeatures:
    """Return the features of an operator that reads ``inputs`` tensors of one size and writes one."""
    nbytes = math.prod(plane) * _FLOAT
    return OperatorFeatures(
        kernel="elementwise",
        kind=kind,
        macs=0,
        read_bytes=inputs * nbytes,
        weight_bytes=0,
        written_bytes=nbytes,
        input=plane,
        output=plane,
        inputs=inputs,
    )
