"""Inputs drawn from a seed, tensors as arrays over shared memory, and comparison of outputs."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Agreement, OutputError
from evaluators.machine import available_nbytes
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph, Tensor
from search_spaces.models.inputs import array_form, drawn_inputs

_CLASSES = ("float32", "float16", "int8", "uint8")
_COPIES = 3  # of a model's activations: in shared memory, within the runtime, and as arrays


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of a tensor as an array; packed types are a row of bytes.

    Raises:
        UnavailableError: its size is only known after a run, or its elements have no fixed size.
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
    """Return a tensor at ``offset`` (bytes) of a shared memory as an array, without a copy."""
    shape, dtype = shape_and_dtype(tensor)
    return np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)


def fill(graph: Graph, view_of: Callable[[int], NDArray[np.generic]], arrays: Sequence[NDArray[np.generic]]) -> None:
    """Copy one array per input of a model into memory; shapes and types must be the model's.

    The memory of the outputs is overwritten, so that outputs of an earlier plan cannot pass for this one's.

    Args:
        view_of: returns a tensor in memory, given its index.
    """
    for tensor, array in zip(graph.inputs, arrays, strict=True):
        view_of(tensor)[...] = array
    for tensor in graph.outputs:
        if tensor not in graph.inputs:
            view_of(tensor).reshape(-1).view(np.uint8)[...] = 0xFF


def model_inputs(graph: Graph, seed: int) -> list[NDArray[Any]]:
    """Return one array per input of the model: those that the user gave, or drawn from ``seed``.

    Raises:
        UnavailableError: an input cannot be fed, or this machine lacks the memory for the model's tensors.
    """
    _check_fits(graph)
    for tensor in (*graph.inputs, *graph.outputs):
        shape_and_dtype(graph.tensors[tensor])
    given = graph.source.given if graph.source is not None else ()
    return list(given) or drawn_inputs(graph, seed)


def _check_fits(graph: Graph) -> None:
    """Check that a model's activations fit into memory; the system kills a process that allocates more."""
    unfolded = graph.source.recipes if graph.source else ()  # constants that the runtime computes
    largest = sum(graph.tensors[t].nbytes for t in (*graph.activation_tensors, *unfolded))
    available = available_nbytes()
    if available is not None and _COPIES * largest > available:
        raise UnavailableError(
            f"the activations of {graph.name!r} take {largest / 1e9:.1f} GB, and {_COPIES} times that must be free; "
            f"this process can have {available / 1e9:.1f} GB",
            "use a smaller input, or give the container more memory",
        )


def agreement(
    graph: Graph, outputs: Sequence[NDArray[np.generic]], reference: Sequence[NDArray[np.generic]], tolerance: float
) -> Agreement:
    """Compare a plan's outputs with the whole model's; both in the order of the graph's outputs."""
    if all(a.tobytes() == b.tobytes() for a, b in zip(outputs, reference, strict=True)):
        return Agreement(identical=True, max_abs_error=0.0, max_rel_error=0.0, tolerance=tolerance)
    worst_abs, found = 0.0, []
    for tensor, mine, wanted in zip(graph.outputs, outputs, reference, strict=True):
        name = graph.tensors[tensor].name
        a, b = np.asarray(mine, np.complex128), np.asarray(wanted, np.complex128)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            worst_abs = math.inf
            found.append(OutputError(name, math.inf, math.inf))
            continue
        finite = np.isfinite(b)
        errors = np.abs(a[finite] - b[finite])
        error = float(np.max(errors, initial=0.0))
        scale = float(np.max(np.abs(b[finite]), initial=0.0))
        worst_abs = max(worst_abs, error)
        if error:
            largest, mean = (error / scale, float(errors.mean()) / scale) if scale else (math.inf, math.inf)
            found.append(OutputError(name, largest, mean))
    found.sort(key=lambda output: output.largest, reverse=True)
    return Agreement(False, worst_abs, found[0].largest if found else 0.0, tolerance, tuple(found))


def is_classifier(graph: Graph) -> bool:
    """Return whether a model has one output: a row of at least two numbers, the largest of which may be its answer."""
    if len(graph.outputs) != 1:
        return False
    tensor = graph.tensors[graph.outputs[0]]
    return tensor.dtype in _CLASSES and len(tensor.shape) > 0 and tensor.shape[-1] == math.prod(tensor.shape) > 1
