"""The operators that are neither convolution nor matrix product, as calls of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluators.cuda.kernels import Call, activate
from evaluators.cuda.settings import torch_module
from evaluators.cuda.weights import Weights
from evaluators.cuda.windows import Sides, Window, window_of
from search_spaces.graph import Operator

# Where an axis of NHWC is in NCHW, and which axis of NHWC each one of NCHW is.
_AXIS = (0, 2, 3, 1)
_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class Placed:
    """An operator, its constants, what a PAD before it adds, and whether images lie as NCHW in memory."""

    weights: Weights
    operator: Operator
    sides: Sides
    first: bool

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return a tensor's shape as the file has it."""
        return self.weights.graph.tensors[tensor].shape

    @property
    def activation(self) -> str:
        """What is applied at the end."""
        return str(self.operator.options.get("fused_activation", "NONE"))


Made = tuple[Call, Sequence[int]]
"""A call, and the tensors that it is given."""


def held(value: Any, rank: int) -> Any:
    """Return a tensor of the file's layout as values are held here."""
    return value.permute(_TO_FIRST) if rank == 4 else value


def as_in_file(value: Any) -> Any:
    """Return a value in the file's layout."""
    return value.permute(_TO_LAST) if value.dim() == 4 else value


def same_memory(before: int, after: int) -> Callable[[Any, Sequence[int]], Any]:
    """Return what gives a value another shape, elements being in the file's order.

    Args:
        before, after: numbers of dimensions.
    """

    def run(value: Any, shape: Sequence[int]) -> Any:
        value = value.permute(_TO_LAST) if before == 4 else value
        value = value.reshape(tuple(shape))
        return value.permute(_TO_FIRST) if after == 4 else value

    return run


def axis_of(axis: int, rank: int) -> int:
    """Return where an axis of the file is in a value."""
    return _AXIS[axis % rank] if rank == 4 else axis % rank


def _pool(placed: Placed, call: Callable[[Window, tuple[int, int]], Call]) -> Made:
    options, shape = placed.operator.options, placed.shape(placed.operator.inputs[0])
    size = int(options["filter_height"]), int(options["filter_width"])
    top, bottom, left, right = placed.sides
    image = shape[1] - top - bottom, shape[2] - left - right
    window = window_of(options, size, image, placed.sides)
    inner, activation = call(window, image), placed.activation
    return lambda x: activate(inner(x), activation), placed.operator.inputs


def _max_pool(placed: Placed) -> Made:
    functional = torch_module().nn.functional

    def call(window: Window, _: tuple[int, int]) -> Call:
        small = all(2 * n <= k for n, k in zip(window.padding, window.size, strict=True))
        if window.even and small:
            return lambda x: functional.max_pool2d(x, window.size, window.stride, window.padding)
        top, bottom, left, right = window.sides
        least = float("-inf")
        return lambda x: functional.max_pool2d(
            functional.pad(x, (left, right, top, bottom), value=least), window.size, window.stride
        )

    return _pool(placed, call)


def _average_pool(placed: Placed) -> Made:
    """Return a mean over what of the window lies on the image, as TFLite takes it."""
    torch = torch_module()
    functional = torch.nn.functional

    def call(window: Window, image: tuple[int, int]) -> Call:
        small = all(2 * n <= k for n, k in zip(window.padding, window.size, strict=True))
        if window.even and small:
            return lambda x: functional.avg_pool2d(
                x, window.size, window.stride, window.padding, count_include_pad=False
            )
        top, bottom, left, right = window.sides
        around = (left, right, top, bottom)
        ones = torch.ones((1, 1, *image), device=placed.weights.device)
        share = functional.avg_pool2d(functional.pad(ones, around), window.size, window.stride)
        return lambda x: functional.avg_pool2d(functional.pad(x, around), window.size, window.stride) / share

    return _pool(placed, call)


def _binary(placed: Placed) -> Made:
    torch, operator = torch_module(), placed.operator
    function = {"ADD": torch.add, "SUB": torch.sub, "MUL": torch.mul}[operator.kind]
    graph, activation = placed.weights.graph, placed.activation
    rank = len(placed.shape(operator.outputs[0]))
    fixed: list[Any] = []
    ranks = []
    for tensor in operator.inputs:
        ranks.append(len(placed.shape(tensor)))
        fixed.append(held(_wide(placed.weights[tensor], rank), rank) if graph.tensors[tensor].constant else None)
    moving = [t for t, value in zip(operator.inputs, fixed, strict=True) if value is None]
    rising = [r for r, value in zip(ranks, fixed, strict=True) if value is None]

    def run(*given: Any) -> Any:
        values = iter(x if r == rank else held(_wide(x, rank), rank) for x, r in zip(given, rising, strict=True))
        a, b = (next(values) if value is None else value for value in fixed)
        return activate(function(a, b), activation)

    return run, moving


def _wide(value: Any, rank: int) -> Any:
    """Return a value with dimensions of 1 before its own, as broadcasting adds them."""
    return value.reshape((1,) * (rank - value.dim()) + tuple(value.shape))


def _concatenation(placed: Placed) -> Made:
    torch, operator = torch_module(), placed.operator
    rank = len(placed.shape(operator.outputs[0]))
    axis, activation = axis_of(int(operator.options["axis"]), rank), placed.activation
    graph = placed.weights.graph
    fixed = [held(placed.weights[t], rank) if graph.tensors[t].constant else None for t in operator.inputs]
    moving = [t for t, value in zip(operator.inputs, fixed, strict=True) if value is None]

    def run(*given: Any) -> Any:
        values = iter(given)
        joined = [next(values) if value is None else value for value in fixed]
        return activate(torch.cat(joined, axis), activation)

    return run, moving


def _mean(placed: Placed) -> Made:
    operator = placed.operator
    rank, after = (len(placed.shape(t)) for t in (operator.inputs[0], operator.outputs[0]))
    axes = [a % rank for a in placed.weights.whole_numbers(operator.inputs[1])]
    where = [axis_of(a, rank) for a in axes]
    if rank == 4 and after not in {2, 4}:  # what is left is in the file's order
        return lambda x: x.permute(_TO_LAST).mean(axes), operator.inputs[:1]
    keep = bool(operator.options.get("keep_dims")) and after == rank
    if rank == 4 and after == 2 and sorted(axes) != [1, 2]:
        return lambda x: x.permute(_TO_LAST).mean(axes), operator.inputs[:1]
    return lambda x: x.mean(where, keepdim=keep), operator.inputs[:1]


def _pad(placed: Placed) -> Made:
    operator, functional = placed.operator, torch_module().nn.functional
    rank = len(placed.shape(operator.inputs[0]))
    amounts = placed.weights.whole_numbers(operator.inputs[1])
    around = [0] * (2 * rank)
    for axis in range(rank):
        # PyTorch names the last dimension first.
        place = 2 * (rank - 1 - axis_of(axis, rank))
        around[place : place + 2] = amounts[2 * axis : 2 * axis + 2]
    return lambda x: functional.pad(x, around), operator.inputs[:1]


def _slice(placed: Placed) -> Made:
    operator = placed.operator
    shape = placed.shape(operator.inputs[0])
    begins, sizes = (placed.weights.whole_numbers(operator.inputs[i]) for i in (1, 2))
    cuts = [slice(0, None)] * len(shape)
    for axis, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        cuts[axis_of(axis, len(shape))] = slice(begin, shape[axis] if size == -1 else begin + size)
    where = tuple(cuts)
    return lambda x: x[where], operator.inputs[:1]


def _reshape(placed: Placed) -> Made:
    operator = placed.operator
    before, after = placed.shape(operator.inputs[0]), placed.shape(operator.outputs[0])
    change = same_memory(len(before), len(after))
    return lambda x: change(x, after), operator.inputs[:1]


def _transpose(placed: Placed) -> Made:
    operator = placed.operator
    order = placed.weights.whole_numbers(operator.inputs[1])
    rank = len(order)
    return lambda x: held(as_in_file(x).permute(order).contiguous(), rank), operator.inputs[:1]


def _softmax(placed: Placed) -> Made:
    operator, torch = placed.operator, torch_module()
    axis = axis_of(-1, len(placed.shape(operator.inputs[0])))
    beta = float(operator.options.get("beta", 1.0))
    if beta == 1.0:
        return lambda x: torch.softmax(x, axis), operator.inputs[:1]
    return lambda x: torch.softmax(x * beta, axis), operator.inputs[:1]


def _map(function: Callable[[Any], Call]) -> Callable[[Placed], Made]:
    return lambda placed: (function(torch_module()), placed.operator.inputs[:1])


MAKERS: Mapping[str, Callable[[Placed], Made]] = {
    "MAX_POOL_2D": _max_pool,
    "AVERAGE_POOL_2D": _average_pool,
    "ADD": _binary,
    "SUB": _binary,
    "MUL": _binary,
    "CONCATENATION": _concatenation,
    "MEAN": _mean,
    "PAD": _pad,
    "RESHAPE": _reshape,
    "SLICE": _slice,
    "SQUEEZE": _reshape,
    "TRANSPOSE": _transpose,
    "SOFTMAX": _softmax,
    "RELU": _map(lambda torch: torch.relu),
    "RELU6": _map(lambda torch: torch.nn.functional.relu6),
    "LOGISTIC": _map(lambda torch: torch.sigmoid),
    "TANH": _map(lambda torch: torch.tanh),
    "HARD_SWISH": _map(lambda torch: torch.nn.functional.hardswish),
}
