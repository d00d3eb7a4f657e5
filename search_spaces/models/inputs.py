"""Inputs of a model: random ones that its operators accept, or arrays of a file."""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from search_spaces.core.bounded import read_bounded
from search_spaces.core.errors import UsageError, reason_of, shown
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.models.dtypes import integers
from search_spaces.models.files import replacing

OPTION = "--input"
MAX_NBYTES = 1 << 30
_MAX_ARRAYS = 1024
_MAX_HEADER = 10_000

Array = NDArray[Any]
Value = TypeVar("Value")

# Types that NumPy lacks → the type of their bytes as an array.
PACKED: Mapping[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "int2": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8),
    "uint4": np.dtype(np.uint8),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
}


def array_form(tensor: Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of a tensor as an array; packed types are one-dimensional.

    Raises:
        TypeError: its elements have no fixed size (strings, resources).
    """
    packed = PACKED.get(tensor.dtype)
    if packed is not None:
        return (tensor.nbytes // packed.itemsize,), packed
    return tensor.shape, np.dtype(tensor.dtype)


def drawn_inputs(graph: Graph, seed: int) -> list[Array]:
    """Return a random array for each input, with values that the operators that read it accept.

    Indices are in range, sizes and axes give the shapes that the file declares, quantised integers take their whole
    range, other integers 0 to 99, floats [-1, 1).

    Raises:
        TypeError: the elements of an input have no fixed size.
    """
    return [drawn(graph, index, np.random.default_rng([seed, n])) for n, index in enumerate(graph.inputs)]


def drawn(graph: Graph, index: int, rng: np.random.Generator) -> Array:
    """Return a random array for one tensor, as :func:`drawn_inputs` does."""
    tensor = graph.tensors[index]
    shape, dtype = array_form(tensor)
    shape = tuple(max(1, size) if size < 0 else size for size in shape)
    if tensor.dtype in PACKED:
        return np.zeros(shape, dtype)
    wanted = _wanted(graph, index, 0)
    if isinstance(wanted, np.ndarray):
        found = np.resize(wanted, shape) if wanted.size else np.zeros(shape)
        return found.astype(dtype)
    low, high = wanted if wanted is not None else _usual(graph, index, dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(int(low), max(int(low) + 1, int(high)), shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.uniform(low, high, shape) + 1j * rng.uniform(low, high, shape)).astype(dtype)
    return rng.uniform(low, high, shape).astype(dtype)


def _usual(graph: Graph, index: int, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the half-open range of an input that no operator restricts."""
    if dtype.kind not in "iu":
        return _quantised_range(graph, index) or (-1.0, 1.0)
    source = graph.source
    tensors = source.schema.subgraphs[0].tensors if source is not None else ()
    held = tensors[index].quantization if index < len(tensors) else None
    if dtype.itemsize <= 2 and held is not None and held.scale is not None and len(held.scale):
        limits = np.iinfo(dtype)
        return limits.min, int(limits.max) + 1
    return 0, 100


def _quantised_range(graph: Graph, index: int) -> tuple[float, float] | None:
    """Return the range of the integers that a float input is quantised to; None if other operators read it too."""
    readers = [p for o in graph.consumers.get(index, ()) for p in graph.operators[o].flat() if index in p.inputs]
    if graph.source is None or not readers or any(p.kind != "QUANTIZE" for p in readers):
        return None
    output = readers[0].outputs[0]
    held = graph.source.schema.subgraphs[0].tensors[output].quantization
    if held is None or held.scale is None or len(held.scale) != 1 or graph.tensors[output].dtype not in _LIMITED:
        return None
    limits, scale, zero = np.iinfo(graph.tensors[output].dtype), float(held.scale[0]), int(held.zeroPoint[0])
    low, high = scale * (int(limits.min) - zero), scale * (int(limits.max) - zero)
    return (low, high) if np.isfinite([low, high]).all() and low < high else None


_LIMITED = frozenset({"int8", "uint8", "int16"})

Wanted = tuple[float, float] | Array
"""A half-open range, or the values themselves."""

_Rule = Callable[[Graph, Operator], Wanted]


def _wanted(graph: Graph, index: int, depth: int) -> Wanted | None:
    """Return the values or the narrowest range that operators require of a tensor; None where they accept anything."""
    found: list[Wanted] = []
    for number in graph.consumers.get(index, ()):
        for operator in graph.operators[number].flat():
            for position, tensor in enumerate(operator.inputs):
                rule = _RULES.get((operator.kind, position)) if tensor == index else None
                if rule is not None:
                    found.append(rule(graph, operator))
            # Operators that only move elements pass the range on.
            if index in operator.inputs[:1] and operator.kind in _MOVERS and depth < _MOST_MOVES:
                found += [w for t in operator.outputs if (w := _wanted(graph, t, depth + 1)) is not None]
    exact = [w for w in found if isinstance(w, np.ndarray)]
    ranges = [w for w in found if not isinstance(w, np.ndarray)]
    if exact or not ranges:
        return exact[0] if exact else None
    return max(low for low, _ in ranges), min(high for _, high in ranges)


_MOST_MOVES = 8
_MOVERS = frozenset(
    {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE", "CAST", "SLICE", "STRIDED_SLICE", "UNPACK", "SPLIT", "TILE"}
)


def _shape(graph: Graph, operator: Operator, position: int, *, output: bool = False) -> tuple[int, ...]:
    side = operator.outputs if output else operator.inputs
    shape = graph.tensors[side[position]].shape if position < len(side) and side[position] >= 0 else ()
    return tuple(max(1, size) for size in shape)


def _below(position: int, axis: Callable[[Operator], int] = lambda _: 0) -> _Rule:
    """Return the rule of indices into an axis of another input."""

    def rule(graph: Graph, operator: Operator) -> Wanted:
        shape = _shape(graph, operator, position)
        at = axis(operator)
        return 0, shape[at] if -len(shape) <= at < len(shape) else 1

    return rule


def _smallest(position: int, *, output: bool = False, size: Callable[[Operator, tuple[int, ...]], int]) -> _Rule:
    """Return the rule of indices into several axes at once: below the smallest of them."""

    def rule(graph: Graph, operator: Operator) -> Wanted:
        indices = _shape(graph, operator, 1 if operator.kind != "SCATTER_ND" else 0)
        shape = _shape(graph, operator, position, output=output)
        return 0, min(shape[: size(operator, indices)], default=1)

    return rule


def _declared(part: slice | int = slice(None)) -> _Rule:
    """Return the rule of sizes that give the first output the shape that the file declares."""

    def rule(graph: Graph, operator: Operator) -> Wanted:
        shape = _shape(graph, operator, 0, output=True)
        found = shape[part] if isinstance(part, slice) else shape[part : part + 1 or None]
        return np.array(found or (1,))

    return rule


def _value(*numbers: int) -> _Rule:
    return lambda _graph, _operator: np.array(numbers)


def _between(low: float, high: float) -> _Rule:
    return lambda _graph, _operator: (low, high)


def _ratio(graph: Graph, operator: Operator) -> Wanted:
    made, read = _shape(graph, operator, 0, output=True), _shape(graph, operator, 0)
    return np.array([a // b for a, b in zip(made, read, strict=False)] or [1])


def _padding(graph: Graph, operator: Operator) -> Wanted:
    made, read = _shape(graph, operator, 0, output=True), _shape(graph, operator, 0)
    return np.array([[0, max(0, a - b)] for a, b in zip(made, read, strict=False)] or [[0, 0]])


def _ascending(graph: Graph, operator: Operator) -> Wanted:
    """Return ascending segment numbers that cover the output."""
    count, made = prod(_shape(graph, operator, 1)), _shape(graph, operator, 0, output=True)
    return np.arange(count) * (made[0] if made else 1) // max(1, count)


def _distinct(graph: Graph, operator: Operator) -> Wanted:
    """Return distinct ascending positions in a dense tensor."""
    places, made = _shape(graph, operator, 0), _shape(graph, operator, 0, output=True)
    count = places[0] if places else 1
    flat = np.arange(count) * max(1, prod(made) // max(1, count)) % max(1, prod(made))
    return np.stack(np.unravel_index(flat, made or (1,)), axis=-1) if len(places) == 2 else flat


def _range(position: int) -> _Rule:
    """Return the rule of RANGE's start, limit and delta: the constants of the file, else 0, the size and 1."""

    def rule(graph: Graph, operator: Operator) -> Wanted:
        size = (_shape(graph, operator, 0, output=True) or (1,))[0]
        first, end, delta = (held[0] if (held := integers(graph, t)) else None for t in operator.inputs)
        step = delta or 1
        start = first if first is not None else 0 if end is None else end - size * step
        return np.array([(start, start + size * step, step)[position]])

    return rule


def _segment(graph: Graph, operator: Operator) -> Wanted:
    return 0, (_shape(graph, operator, 0, output=True) or (1,))[0]


def _reversed(graph: Graph, operator: Operator) -> Wanted:
    shape, axis = _shape(graph, operator, 0), operator.options.get("seq_dim", 0)
    return 1, shape[axis] + 1 if -len(shape) <= axis < len(shape) else 2


def _gathered(graph: Graph, operator: Operator) -> Wanted:
    shape, sizes = _shape(graph, operator, 0), operator.options.get("slice_sizes", ())
    return 0, min((a - b + 1 for a, b in zip(shape, sizes, strict=False)), default=1)


def _depth(graph: Graph, operator: Operator) -> int:
    made, axis = _shape(graph, operator, 0, output=True), operator.options.get("axis", -1)
    return made[axis] if -len(made) <= axis < len(made) else 1


def _of(kinds: str, position: int, rule: _Rule) -> dict[tuple[str, int], _Rule]:
    return {(kind, position): rule for kind in kinds.split()}


# Kind and position of an input → its rule.
_RULES: Mapping[tuple[str, int], _Rule] = {
    ("GATHER", 1): _below(0, lambda o: o.options.get("axis", 0)),
    ("GATHER_ND", 1): _smallest(0, size=lambda _, indices: indices[-1] if indices else 1),
    ("SCATTER_ND", 0): _smallest(0, output=True, size=lambda _, indices: indices[-1] if indices else 1),
    ("STABLEHLO_GATHER", 1): _gathered,
    ("STABLEHLO_SCATTER", 1): _smallest(0, size=lambda o, _: len(o.options.get("scatter_dims_to_operand_dims", (0,)))),
    ("EMBEDDING_LOOKUP", 0): _below(1),
    ("EMBEDDING_LOOKUP_SPARSE", 0): _below(4),
    ("ONE_HOT", 0): lambda graph, operator: (0, _depth(graph, operator)),
    ("ONE_HOT", 1): lambda graph, operator: np.array([_depth(graph, operator)]),
    ("SPARSE_TO_DENSE", 0): _distinct,
    ("SEGMENT_SUM", 1): _ascending,
    **_of("UNSORTED_SEGMENT_SUM UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN", 1, _segment),
    **_of("UNSORTED_SEGMENT_SUM UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN", 2, _declared(0)),
    ("REVERSE_SEQUENCE", 1): _reversed,
    **_of("SPLIT", 0, _value(0)),
    **_of("SLICE STRIDED_SLICE EXPAND_DIMS CUMSUM REVERSE_V2 ARG_MAX ARG_MIN MEAN SUM", 1, _value(0)),
    **_of("REDUCE_PROD REDUCE_MAX REDUCE_MIN REDUCE_ANY REDUCE_ALL", 1, _value(0)),
    **_of("DYNAMIC_UPDATE_SLICE", 2, _value(0)),
    **dict.fromkeys((("STRIDED_SLICE", 3), ("BROADCAST_ARGS", 0), ("BROADCAST_ARGS", 1)), _value(1)),
    **_of("FILL TRANSPOSE_CONV CONV_3D_TRANSPOSE RANDOM_UNIFORM RANDOM_STANDARD_NORMAL", 0, _declared()),
    **_of("RESHAPE BROADCAST_TO SPARSE_TO_DENSE", 1, _declared()),
    **_of("SLICE STRIDED_SLICE", 2, _declared()),
    **_of("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR", 1, _declared(slice(1, 3))),
    ("TILE", 1): _ratio,
    **_of("PAD PADV2 MIRROR_PAD", 1, _padding),
    **_of("TOPK_V2 MULTINOMIAL", 1, _declared(-1)),
    **_of("NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5", 2, _declared(0)),
    **{(f"NON_MAX_SUPPRESSION_V{v}", p): _between(0.0, 1.0) for v in (4, 5) for p in (1, 3, 4, 5)},
    ("TRANSPOSE", 1): lambda g, o: np.arange(len(_shape(g, o, 0))),
    **{("RANGE", position): _range(position) for position in range(3)},
    **_of("DIV FLOOR_DIV FLOOR_MOD", 1, _between(1, 8)),
    ("POW", 0): _between(0, 8),
    ("POW", 1): _between(0, 4),
    **_of("RIGHT_SHIFT STABLEHLO_SHIFT_LEFT", 1, _between(0, 8)),
    **_of("LOG SQRT RSQRT", 0, _between(0.0, 100.0)),
}


def write_inputs(path: Path, graph: Graph) -> None:
    """Write the inputs that a model is measured with, or remove the file where they are the default random ones.

    Raises:
        UsageError: the folder cannot be written, or the disk is full.
    """
    given = list(graph.source.given) if graph.source is not None else []
    arrays = given or drawn_inputs(graph, 0)
    plain = drawn_inputs(replace(graph, operators=(), outputs=(), source=None), 0)
    if all(np.array_equal(a, b) for a, b in zip(arrays, plain, strict=True)):
        path.unlink(missing_ok=True)
        return
    with replacing(path) as file:
        np.savez(file, *arrays)


def given_digest(graphs: Iterable[Graph]) -> str:
    """Return the SHA-256 (hex) of the inputs that a person gave models; "" where nobody gave any."""
    given = [graph.source.given if graph.source is not None else () for graph in graphs]
    found = hashlib.sha256()
    for array in (array for arrays in given for array in (*arrays, np.empty(0))):
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest() if any(given) else ""


def by_full_name(arrays: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value]:
    """Return arrays by the names of a model's inputs; where none is called ``camera``, that stands for ``camera:0``."""
    full = {name.removesuffix(":0"): name for name in names if name.endswith(":0") and name not in arrays}
    return {name if name in names else full.get(name, name): array for name, array in arrays.items()}


def form(of: Tensor | Array) -> str:
    """Return the shape and type of a tensor or an array, as ``1×224×224×3 float32``."""
    return f"{'×'.join(map(str, of.shape)) or 'scalar'} {of.dtype}"


def named_form(tensor: Tensor) -> str:
    """Return the name of an input before its :func:`form`."""
    return f"{shown(tensor.name)} {form(tensor)}"


def read_inputs(path: Path, ports: Sequence[Tensor], model: str = "the model") -> list[Array]:
    """Return the inputs that a file holds: an array of a model with one input, or an ``.npz`` with one for each name.

    Arrays of an ``.npz`` that was written without names (``arr_0``, ``arr_1`` …) are taken by position. The ``:0`` of a
    name may be left out.

    Raises:
        UsageError: the file is missing, damaged, too large, or does not fit the model.
    """
    names = [tensor.name for tensor in ports]
    hint = f"{model} reads: {', '.join(map(named_form, ports))}"
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in map(array_form, ports)]
    arrays = read_arrays(path, OPTION, len(ports), sum(sizes))
    if set(arrays) == {""} and len(names) == 1:
        arrays = {names[0]: arrays[""]}
    elif set(arrays) == {f"arr_{i}" for i in range(len(names))} and set(arrays) != set(names):
        arrays = {name: arrays[f"arr_{i}"] for i, name in enumerate(names)}
    arrays = by_full_name(arrays, names)
    if len(set(names)) != len(names) or set(arrays) != set(names):
        given = ", ".join(shown(name) for name in arrays if name) or f"{len(arrays)} without a name"
        raise UsageError(f"{OPTION} {path}: holds {given}", hint)
    for tensor in ports:
        array, (shape, dtype) = arrays[tensor.name], array_form(tensor)
        if array.shape != shape or array.dtype != dtype:
            raise UsageError(
                f"{OPTION} {path}: {shown(tensor.name)} has the shape {array.shape} and the type {array.dtype}", hint
            )
    return [np.asarray(arrays[name], order="C") for name in names]


def read_arrays(path: Path, option: str, most: int, nbytes: int) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file by their names, or that of an ``.npy`` file by the name "".

    Args:
        option: that names the file, for errors.
        most, nbytes: arrays and bytes that it may hold at most.

    Raises:
        UsageError: the file is missing, damaged or too large.
    """
    try:
        content = read_bounded(path, MAX_NBYTES)
        with warnings.catch_warnings(action="error"):  # about headers from old versions
            return _unpacked(content, most, nbytes) if content[:2] == b"PK" else {"": _plain(content)}
    except OSError as error:
        raise UsageError(f"{option} {path}: {reason_of(error)}", "give an .npy or .npz file") from None
    except Exception as error:  # noqa: BLE001 - NumPy and zipfile raise anything for a damaged file
        text = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{option} {path}: cannot be used: {text}", "write its arrays with numpy.save or savez"
        ) from None


def _plain(content: bytes) -> Array:
    """Return the array of an ``.npy`` file; pickled objects are refused."""
    found: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False, max_header_size=_MAX_HEADER)
    return found


def _unpacked(content: bytes, most: int, nbytes: int) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file, which may unpack to no more bytes than are expected."""
    room = nbytes + most * (_MAX_HEADER << 1)
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        entries = packed.infolist()
        if len(entries) > min(most, _MAX_ARRAYS):
            raise ValueError(f"it holds {len(entries)} arrays, more than {min(most, _MAX_ARRAYS)}")
        found = {}
        for entry in entries:
            with packed.open(entry) as file:
                data = file.read(room + 1)
            room -= len(data)
            if room < 0:
                raise ValueError(f"its arrays have more than {nbytes} bytes")
            found[entry.filename.removesuffix(".npy")] = _plain(data)
    return found
