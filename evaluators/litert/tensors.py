"""Inputs made from a seed, tensors seen in shared memory, and how two sets of outputs compare."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement
from evaluators.litert.memory import check_fits
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph, Tensor

_UNKNOWN_NUMPY: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype(np.uint16),
    "int4": np.dtype(np.uint8),
    "uint4": np.dtype(np.uint8),
}


def numpy_dtype(tensor: Tensor) -> np.dtype[np.generic]:
    """Return the NumPy type of a tensor's elements; packed types are seen as bytes.

    Raises:
        UnavailableError: elements of this type have no fixed size (strings, resources).
    """
    if tensor.dtype in _UNKNOWN_NUMPY:
        return _UNKNOWN_NUMPY[tensor.dtype]
    try:
        dtype: np.dtype[np.generic] = np.dtype(tensor.dtype)
    except TypeError:
        raise UnavailableError(
            f"tensor {tensor.name!r} has elements of type {tensor.dtype}, which cannot be fed"
        ) from None
    return dtype


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return how a tensor looks as an array; packed types are a row of bytes.

    Raises:
        UnavailableError: only a run tells how large it is, or its elements have no fixed size.
    """
    dtype = numpy_dtype(tensor)
    if any(d < 0 for d in tensor.shape):
        raise UnavailableError(f"tensor {tensor.name!r} has a size that depends on the data, and cannot be handed over")
    if tensor.dtype in _UNKNOWN_NUMPY:
        return (tensor.nbytes // dtype.itemsize,), dtype
    return tensor.shape, dtype


def view(memory: mmap.mmap, offset: int, tensor: Tensor) -> NDArray[np.generic]:
    """Return a tensor that lies at ``offset`` of a shared memory, without a copy."""
    shape, dtype = shape_and_dtype(tensor)
    return np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)


def seeded_inputs(graph: Graph, seed: int) -> list[NDArray[np.generic]]:
    """Return one array per input of the model, drawn from ``seed``: floats in [-1, 1), integers 0 to 99, bools.

    Raises:
        UnavailableError: an input cannot be fed, the model has what the runtime does not load, or this machine lacks
            the memory for its tensors.
    """
    if any(t.variable for t in graph.tensors):
        raise UnavailableError(
            f"{graph.name!r} keeps state in variable tensors, which LiteRT's compiled models do not support",
            "convert it with its state as inputs and outputs, or as resource variables",
        )
    check_fits(graph)
    arrays: list[NDArray[np.generic]] = []
    for number, index in enumerate(graph.inputs):
        tensor = graph.tensors[index]
        shape, dtype = shape_and_dtype(tensor)
        rng = np.random.default_rng([seed, number])
        if tensor.dtype in _UNKNOWN_NUMPY:
            arrays.append(np.zeros(shape, dtype))
        elif dtype.kind == "b":
            arrays.append(rng.integers(0, 2, shape).astype(dtype))
        elif dtype.kind in "iu":
            arrays.append(rng.integers(0, 100, shape).astype(dtype))
        elif dtype.kind == "c":
            arrays.append((rng.uniform(-1, 1, shape) + 1j * rng.uniform(-1, 1, shape)).astype(dtype))
        else:
            arrays.append(rng.uniform(-1, 1, shape).astype(dtype))
    return arrays


def agreement(
    graph: Graph, outputs: Sequence[NDArray[np.generic]], reference: Sequence[NDArray[np.generic]], tolerance: float
) -> Agreement:
    """Compare a plan's outputs with the whole model's, in the order of the graph's outputs."""
    if all(a.tobytes() == b.tobytes() for a, b in zip(outputs, reference, strict=True)):
        return Agreement(identical=True, max_abs_error=0.0, max_rel_error=0.0, tolerance=tolerance)
    worst_abs, worst = 0.0, (0.0, 0.0, "")
    for tensor, mine, wanted in zip(graph.outputs, outputs, reference, strict=True):
        name = graph.tensors[tensor].name
        a, b = np.asarray(mine, np.complex128), np.asarray(wanted, np.complex128)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            worst_abs, worst = math.inf, max(worst, (math.inf, math.inf, name))
            continue
        finite = np.isfinite(b)
        errors = np.abs(a[finite] - b[finite])
        error = float(np.max(errors, initial=0.0))
        scale = float(np.max(np.abs(b[finite]), initial=0.0))
        worst_abs = max(worst_abs, error)
        if error:
            largest, mean = (error / scale, float(errors.mean()) / scale) if scale else (math.inf, math.inf)
            worst = max(worst, (largest, mean, name))
    return Agreement(False, worst_abs, worst[0], tolerance, worst[1], worst[2])
