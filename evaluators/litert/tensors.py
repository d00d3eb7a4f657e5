"""Inputs made from a seed, tensors seen in shared memory, and how two sets of outputs compare."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement
from evaluators.litert.memory import check_fits
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph, Tensor
from search_spaces.models.inputs import array_form, drawn_inputs


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return how a tensor looks as an array; packed types are a row of bytes.

    Raises:
        UnavailableError: only a run tells how large it is, or its elements have no fixed size.
    """
    if any(d < 0 for d in tensor.shape):
        raise UnavailableError(f"tensor {tensor.name!r} has a size that depends on the data, and cannot be transferred")
    try:
        return array_form(tensor)
    except TypeError:
        raise UnavailableError(
            f"tensor {tensor.name!r} has elements of type {tensor.dtype}, which are not supported as inputs"
        ) from None


def view(memory: mmap.mmap, offset: int, tensor: Tensor) -> NDArray[np.generic]:
    """Return a tensor that lies at ``offset`` of a shared memory, without a copy."""
    shape, dtype = shape_and_dtype(tensor)
    return np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)


def model_inputs(graph: Graph, seed: int) -> list[NDArray[Any]]:
    """Return one array per input of the model: those that a person gave, or drawn from ``seed``.

    Raises:
        UnavailableError: an input cannot be fed, or this machine lacks the memory for the model's tensors.
    """
    check_fits(graph)
    for tensor in (*graph.inputs, *graph.outputs):
        shape_and_dtype(graph.tensors[tensor])
    given = graph.source.given if graph.source is not None else ()
    return list(given) or drawn_inputs(graph, seed)


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
