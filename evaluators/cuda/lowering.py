"""Operators and weights of a float32 ``.tflite`` graph as calls of PyTorch, and which operators are not supported.

A value with four dimensions has the shape ``(N, C, H, W)``; in memory it is NHWC (``channels_last``, the layout of
tensor cores and of the file), or NCHW for the plain program that tests compare with. Operators that PyTorch can compute
in one kernel are one call: a convolution with its bias and ReLU, the padding of its image by an operator PAD, and the
addition at the end of a residual block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from evaluators.cuda.devices import torch_module
from evaluators.cuda.kernels import ACTIVATIONS, PLAIN, Call, Conv, Dense, Sides, Window, activate, window_of
from evaluators.cuda.streamed import TILE_NBYTES, Staging, rows_held
from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph, Operator
from search_spaces.models.dtypes import integers
from search_spaces.models.stages import mapped


def float_constant(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor is a plain float32 constant whose values are stored in the model's file."""
    held = graph.tensors[tensor]
    if graph.source is None or not held.constant or held.dtype != "float32" or tensor in graph.source.recipes:
        return False
    return graph.source.schema.subgraphs[0].tensors[tensor].sparsity is None


class Weights:
    """The constants of one instance of a model, in the layout of the file (filters OHWI, matrices OI).

    Args:
        graph: one with a file.
        device: ``cuda`` or ``cpu``.
        like: other weights of the model; constants that it holds are copied on the device instead of read again.
        room_nbytes: memory of the device for them; None for as much as there is.

    Raises:
        UnavailableError: the room does not suffice.
    """

    def __init__(self, graph: Graph, device: str, like: Weights | None = None, room_nbytes: int | None = None) -> None:
        self.graph, self.device = graph, device
        self._rows = {} if room_nbytes is None else rows_held(graph, room_nbytes)
        self._hosts: dict[int, Any] = {}
        self._like = like
        self._known: dict[int, Any] = {}
        self._arranged: dict[tuple[int, tuple[int, ...]], Any] = {}

    def __getitem__(self, tensor: int) -> Any:
        """Return a float32 constant, of a matrix the rows that stay on the device.

        Raises:
            UnavailableError: the tensor is not a float32 constant.
            ModelError: the file is gone or has changed.
        """
        if tensor not in self._known:
            if self._like is not None and tensor in self._like._known:  # noqa: SLF001 - of the same class
                self._known[tensor] = self._like[tensor].clone()
            else:
                found = self._read(tensor)
                kept = found[: self.rows(tensor)] if found.ndim else found
                self._known[tensor] = torch_module().from_numpy(kept).to(self.device)
        return self._known[tensor]

    @property
    def streams(self) -> bool:
        """Whether some weights do not stay on the device."""
        return any(rows < self.graph.tensors[t].shape[0] for t, rows in self._rows.items())

    def rows(self, tensor: int) -> int:
        """Return how many rows of a constant stay on the device."""
        shape = self.graph.tensors[tensor].shape
        return self._rows.get(tensor, shape[0] if shape else 1)

    def host(self, tensor: int) -> Any:
        """Return a float32 constant in the host's memory, pinned. Raises as :meth:`__getitem__`."""
        if tensor not in self._hosts:
            found = torch_module().from_numpy(self._read(tensor))
            self._hosts[tensor] = found if self.device == "cpu" else found.pin_memory()
        return self._hosts[tensor]

    def arranged(self, tensor: int, order: tuple[int, ...]) -> Any:
        """Return a constant with its axes, and its memory, in another order; made once and kept.

        A captured graph holds addresses, not tensors, so its constants must be kept alive as long as it is replayed.

        Args:
            order: for each axis of the result, the axis in the file.

        Raises:
            UnavailableError: the tensor is not a float32 constant.
            ModelError: the file is gone or has changed.
        """
        key = tensor, order
        if key not in self._arranged:
            self._arranged[key] = self[tensor].permute(order).contiguous()
        return self._arranged[key]

    @property
    def nbytes(self) -> int:
        """Bytes of its constants on the device."""
        return sum(int(t.numel()) * 4 for held in (self._known, self._arranged) for t in held.values())

    def whole_numbers(self, tensor: int) -> list[int]:
        """Return an integer constant (axes, paddings, shapes).

        Raises:
            UnavailableError: the tensor is not an integer constant.
        """
        found = integers(self.graph, tensor)
        if found is None:
            raise UnavailableError(f"tensor {self.graph.tensors[tensor].name!r} is not a constant of whole numbers")
        return found

    def _read(self, tensor: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        graph, held = self.graph, self.graph.tensors[tensor]
        if graph.source is None or not float_constant(graph, tensor):
            raise UnavailableError(f"tensor {held.name!r} is not a constant of float32 numbers")
        extent = graph.source.extents.get(held.buffer)
        count = prod(held.shape)
        if extent is None:
            data = bytes(np.asarray(graph.source.schema.buffers[held.buffer].data, np.uint8))
            return np.frombuffer(data, np.float32, count).reshape(held.shape).copy()
        with mapped(graph.source) as file, file[extent.offset : extent.offset + extent.nbytes] as part:
            return np.frombuffer(part, np.float32, count).reshape(held.shape).copy()


_SHOWN = 6


def refused(graph: Graph, operators: Sequence[int] | None = None) -> dict[int, str]:
    """Return the operators (by default of the whole graph) that are not supported, each with the reason."""
    chosen = range(len(graph.operators)) if operators is None else operators
    found = {}
    for index in chosen:
        why = _why_not(graph, graph.operators[index])
        if why:
            found[index] = why
    return found


def check(graph: Graph, operators: Sequence[int]) -> None:
    """Check that all operators are supported.

    Raises:
        UnavailableError: some are not; the text names them.
    """
    wrong = refused(graph, operators)
    if not wrong:
        return
    named = [f"{i} ({graph.operators[i].kind}: {why})" for i, why in list(wrong.items())[:_SHOWN]]
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise UnavailableError(
        f"the evaluator cuda does not run operator{'s' * (len(wrong) > 1)} {', '.join(named)}{more} of {graph.name!r}",
        "measure this model with --evaluator litert",
    )


def _why_not(graph: Graph, operator: Operator) -> str:
    test = _TESTS.get(operator.kind)
    if test is None:
        return "not supported"
    for tensor in (*_data(operator), *operator.outputs):
        held = graph.tensors[tensor]
        if held.dtype != "float32":
            return f"reads or writes {held.dtype}"
        if any(size < 0 for size in held.shape):
            return "has a shape that is known only at run time"
        if held.variable:
            return "keeps state"
    if operator.options.get("fused_activation", "NONE") not in ACTIVATIONS:
        return f"has the activation {operator.options['fused_activation']}"
    return test(graph, operator)


def _data(operator: Operator) -> Sequence[int]:
    """Return the inputs that hold data, not shapes or axes."""
    first_only = ("MEAN", "PAD", "RESHAPE", "SLICE", "TRANSPOSE")
    inputs = operator.inputs[:1] if operator.kind in first_only else operator.inputs
    return [t for t in inputs if t != -1]


def _weighted(graph: Graph, operator: Operator) -> str:
    if not all(float_constant(graph, t) for t in operator.inputs[1:] if t != -1):
        return "has weights that are not plain constants"
    data, weights = graph.tensors[operator.inputs[0]], graph.tensors[operator.inputs[1]]
    if operator.kind == "CONV_2D" and (not weights.shape[3] or data.shape[3] % weights.shape[3]):
        return "has channels that do not fit"
    if operator.kind == "FULLY_CONNECTED" and operator.options.get("weights_format", "DEFAULT") != "DEFAULT":
        return "has shuffled weights"
    return ""


def _pooling(graph: Graph, operator: Operator) -> str:
    return "" if len(graph.tensors[operator.inputs[0]].shape) == 4 else "reads no image"


def _arithmetic(graph: Graph, operator: Operator) -> str:
    constant = [t for t in operator.inputs if graph.tensors[t].constant]
    return "" if all(float_constant(graph, t) for t in constant) else "reads computed constants"


def _numbers(graph: Graph, operator: Operator) -> str:
    return "" if integers(graph, operator.inputs[1]) is not None else "has axes or sizes that are computed"


def _ranges(graph: Graph, operator: Operator) -> str:
    known = all(integers(graph, t) is not None for t in operator.inputs[1:3])
    return "" if known else "has a begin or a size that is computed"


_TESTS: Mapping[str, Callable[[Graph, Operator], str]] = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"), _weighted),
    **dict.fromkeys(("MAX_POOL_2D", "AVERAGE_POOL_2D"), _pooling),
    **dict.fromkeys(("ADD", "SUB", "MUL", "CONCATENATION"), _arithmetic),
    **dict.fromkeys(("MEAN", "PAD", "TRANSPOSE"), _numbers),
    "SLICE": _ranges,
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "SOFTMAX"), lambda _, __: ""),
    **dict.fromkeys(("RELU", "RELU6", "LOGISTIC", "TANH", "HARD_SWISH"), lambda _, __: ""),
}
KINDS = tuple(_TESTS)


# For each axis of NHWC its position in NCHW; then orders of axes for permute().
_AXIS = (0, 2, 3, 1)
_TO_FIRST, _TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


@dataclass(frozen=True, slots=True)
class Placed:
    """An operator, its constants, and the padding of a PAD before it."""

    weights: Weights
    operator: Operator
    sides: Sides

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return a tensor's shape as in the file."""
        return self.weights.graph.tensors[tensor].shape

    @property
    def activation(self) -> str:
        """The fused activation."""
        return str(self.operator.options.get("fused_activation", "NONE"))


Made = tuple[Call, Sequence[int]]
"""A call, and the tensors that are its arguments."""


def held(value: Any, rank: int) -> Any:
    """Return a tensor of the file's layout with the axes of a value (NCHW)."""
    return value.permute(_TO_FIRST) if rank == 4 else value


def as_in_file(value: Any) -> Any:
    """Return a value in the file's layout."""
    return value.permute(_TO_LAST) if value.dim() == 4 else value


def same_memory(before: int, after: int) -> Callable[[Any, Sequence[int]], Any]:
    """Return a function that reshapes a value, with its elements in the file's order.

    Args:
        before, after: numbers of dimensions.
    """

    def run(value: Any, shape: Sequence[int]) -> Any:
        value = value.permute(_TO_LAST) if before == 4 else value
        value = value.reshape(tuple(shape))
        return value.permute(_TO_FIRST) if after == 4 else value

    return run


def axis_of(axis: int, rank: int) -> int:
    """Return the position in a value of an axis of the file."""
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
        if _pads_itself(window):
            return lambda x: functional.max_pool2d(x, window.size, window.stride, window.padding)
        return lambda x: functional.max_pool2d(
            functional.pad(x, window.around, value=float("-inf")), window.size, window.stride
        )

    return _pool(placed, call)


def _average_pool(placed: Placed) -> Made:
    """Return the mean over the part of the window that lies on the image, as TFLite computes it."""
    torch = torch_module()
    functional = torch.nn.functional

    def call(window: Window, image: tuple[int, int]) -> Call:
        if _pads_itself(window):
            return lambda x: functional.avg_pool2d(
                x, window.size, window.stride, window.padding, count_include_pad=False
            )
        ones = torch.ones((1, 1, *image), device=placed.weights.device)
        share = functional.avg_pool2d(functional.pad(ones, window.around), window.size, window.stride)
        return lambda x: functional.avg_pool2d(functional.pad(x, window.around), window.size, window.stride) / share

    return _pool(placed, call)


def _pads_itself(window: Window) -> bool:
    """Return whether PyTorch's pooling supports the window's padding."""
    return window.even and all(2 * n <= k for n, k in zip(window.padding, window.size, strict=True))


def _binary(placed: Placed) -> Made:
    torch, operator = torch_module(), placed.operator
    function = {"ADD": torch.add, "SUB": torch.sub, "MUL": torch.mul}[operator.kind]
    activation, rank = placed.activation, len(placed.shape(operator.outputs[0]))
    fixed, moving = _fixed(placed, rank)
    rising = [len(placed.shape(t)) for t in moving]

    def run(*given: Any) -> Any:
        values = iter(x if r == rank else held(_wide(x, rank), rank) for x, r in zip(given, rising, strict=True))
        a, b = (next(values) if value is None else value for value in fixed)
        return activate(function(a, b), activation)

    return run, moving


def _fixed(placed: Placed, rank: int) -> tuple[list[Any], list[int]]:
    """Return each input's value where it is a constant, else None; and the inputs that are not constants."""
    tensors, inputs = placed.weights.graph.tensors, placed.operator.inputs
    fixed = [held(_wide(placed.weights[t], rank), rank) if tensors[t].constant else None for t in inputs]
    return fixed, [t for t, value in zip(inputs, fixed, strict=True) if value is None]


def _wide(value: Any, rank: int) -> Any:
    """Return a value with leading dimensions of 1 up to a rank, as broadcasting adds them."""
    return value.reshape((1,) * (rank - value.dim()) + tuple(value.shape))


def _concatenation(placed: Placed) -> Made:
    torch, operator = torch_module(), placed.operator
    rank = len(placed.shape(operator.outputs[0]))
    axis, activation = axis_of(int(operator.options["axis"]), rank), placed.activation
    fixed, moving = _fixed(placed, rank)

    def run(*given: Any) -> Any:
        values = iter(given)
        joined = [next(values) if value is None else value for value in fixed]
        return activate(torch.cat(joined, axis), activation)

    return run, moving


def _mean(placed: Placed) -> Made:
    operator = placed.operator
    rank, after = (len(placed.shape(t)) for t in (operator.inputs[0], operator.outputs[0]))
    axes = [a % rank for a in placed.weights.whole_numbers(operator.inputs[1])]
    # The mean of an image is in the file's order unless it is an image again, or its channels alone.
    if rank == 4 and (after not in {2, 4} or (after == 2 and sorted(axes) != [1, 2])):
        return lambda x: x.permute(_TO_LAST).mean(axes), operator.inputs[:1]
    where = [axis_of(a, rank) for a in axes]
    keep = bool(operator.options.get("keep_dims")) and after == rank
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
    return lambda x: torch.softmax(x if beta == 1.0 else x * beta, axis), operator.inputs[:1]


def _map(function: Callable[[Any], Call]) -> Callable[[Placed], Made]:
    return lambda placed: (function(torch_module()), placed.operator.inputs[:1])


MAKERS: Mapping[str, Callable[[Placed], Made]] = {
    "MAX_POOL_2D": _max_pool,
    "AVERAGE_POOL_2D": _average_pool,
    **dict.fromkeys(("ADD", "SUB", "MUL"), _binary),
    "CONCATENATION": _concatenation,
    "MEAN": _mean,
    "PAD": _pad,
    **dict.fromkeys(("RESHAPE", "SQUEEZE"), _reshape),
    "SLICE": _slice,
    "TRANSPOSE": _transpose,
    "SOFTMAX": _softmax,
    "RELU": _map(lambda torch: torch.relu),
    "RELU6": _map(lambda torch: torch.nn.functional.relu6),
    "LOGISTIC": _map(lambda torch: torch.sigmoid),
    "TANH": _map(lambda torch: torch.tanh),
    "HARD_SWISH": _map(lambda torch: torch.nn.functional.hardswish),
}


Choose = Callable[[Conv | Dense], str]
"""Returns the name of the variant that is to compute a convolution or matrix product."""

_ROWS, _COLUMNS = slice(2, 4), slice(4, 6)


def plainly(_: Conv | Dense) -> str:
    """Choose PyTorch's ordinary call."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class Step:
    """One call: the tensors that it reads and writes, and those that no later step reads."""

    call: Call
    inputs: tuple[int, ...]
    output: int
    over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Operators of a model that run together.

    Attributes:
        inputs, outputs: tensors of the graph that cross their border.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, values: dict[int, Any]) -> None:
        """Compute the outputs into ``values``, which holds the inputs."""
        for step in self.steps:
            values[step.output] = step.call(*[values[t] for t in step.inputs])
            for tensor in step.over:
                del values[tensor]


def lower(
    weights: Weights,
    operators: Sequence[int],
    choose: Choose = plainly,
    *,
    gpu: bool = False,
    first: bool = False,
    staging: Staging | None = None,
) -> Job:
    """Lower operators (ascending) to calls of PyTorch.

    Args:
        choose: called once for each convolution and matrix product.
        gpu: whether kernels of a GPU may be used.
        first: whether values with four dimensions are NCHW in memory.
        staging: buffers for weights that do not stay on the device; None where all do.

    Raises:
        UnavailableError: an operator is not supported; the text names it.
        ModelError: the model's file cannot be read.
    """
    graph = weights.graph
    check(graph, operators)
    return _Lowering(weights, operators, choose, gpu=gpu, first=first, staging=staging).job()


class _Lowering:
    def __init__(
        self,
        weights: Weights,
        operators: Sequence[int],
        choose: Choose,
        *,
        gpu: bool,
        first: bool,
        staging: Staging | None,
    ) -> None:
        self.weights, self.graph, self.operators = weights, weights.graph, operators
        self.choose, self.gpu, self.first, self.staging = choose, gpu, first, staging
        self.inside = set(operators)
        self.pads: dict[int, tuple[int, Sides]] = {}  # padded tensor → image, padding
        self.ends: dict[int, int] = {}  # addition → the convolution that it is fused with
        for index in operators:
            self._look(index)

    def job(self) -> Job:
        border = self.graph.boundary(self.operators)
        steps: list[Step] = []
        for index in self.operators:
            operator = self.graph.operators[index]
            if operator.outputs[0] in self.pads or index in self.ends.values():
                continue
            steps.append(self._step(index, operator))
        return Job(_with_ends(steps, {*border.inputs, *border.outputs}), border.inputs, border.outputs)

    def _step(self, index: int, operator: Operator) -> Step:
        if index in self.ends:
            before = self.graph.operators[self.ends[index]]
            other = next(t for t in operator.inputs if t != before.outputs[0])
            call, image = self._conv(before, operator.options["fused_activation"], adds=True)
            return Step(call, (image, other), operator.outputs[0])
        if operator.kind in {"CONV_2D", "DEPTHWISE_CONV_2D"}:
            call, image = self._conv(operator, operator.options["fused_activation"], adds=False)
            return Step(call, (image,), operator.outputs[0])
        if operator.kind == "FULLY_CONNECTED":
            return Step(self._dense(operator), operator.inputs[:1], operator.outputs[0])
        image, sides = self.pads.get(operator.inputs[0], (operator.inputs[0], (0, 0, 0, 0)))
        call, inputs = MAKERS[operator.kind](Placed(self.weights, operator, sides))
        return Step(call, tuple(image if t == operator.inputs[0] else t for t in inputs), operator.outputs[0])

    def _conv(self, operator: Operator, activation: str, *, adds: bool) -> tuple[Call, int]:
        graph = self.graph
        image, sides = self.pads.get(operator.inputs[0], (operator.inputs[0], (0, 0, 0, 0)))
        batch, height, width, channels = graph.tensors[image].shape
        tensor = operator.inputs[1]
        there = self.weights.rows(tensor) > 0
        weight, order = (self.weights[tensor] if there else self.weights.host(tensor)), _TO_FIRST
        if operator.kind == "DEPTHWISE_CONV_2D":  # 1, H, W, C times the multiplier
            weight, order = self.weights.arranged(tensor, (3, 1, 2, 0)), (3, 0, 1, 2)
        bias = self._bias(operator, int(weight.shape[0]))
        size = int(weight.shape[1]), int(weight.shape[2])
        window = window_of(operator.options, size, (height, width), sides)
        groups = channels // int(weight.shape[3])
        first = partial(self.weights.arranged, tensor, order)
        conv = Conv(weight, bias, window, groups, activation, (batch, channels, height, width), first, adds)
        if there:
            return self._chosen(conv), image
        filters = self.weights.host(tensor)
        if self.first:
            filters = filters.permute(order).contiguous()
            filters = filters if self.weights.device == "cpu" else filters.pin_memory()

        def make(filters: Any) -> Call:
            inside = filters.permute(0, 2, 3, 1) if self.first else filters
            return replace(conv, weight=inside).variants(gpu=False)[PLAIN]

        return self._through(filters, make), image

    def _through(self, weights: Any, make: Callable[[Any], Call]) -> Call:
        """Return a call whose weights do not stay on the device."""
        if self.staging is None:
            raise UnavailableError("some weights do not stay on the device, and there are no buffers for them")
        return self.staging.through(weights, make)

    def _dense(self, operator: Operator) -> Call:
        tensor = operator.inputs[1]
        outputs, inputs = self.graph.tensors[tensor].shape
        data, result = (self.graph.tensors[t].shape for t in (operator.inputs[0], operator.outputs[0]))
        rows = prod(data) // inputs
        bias, activation = self._bias(operator, outputs), operator.options.get("fused_activation", "NONE")
        there, each = self.weights.rows(tensor), max(1, TILE_NBYTES // (4 * inputs))
        calls = [self._chosen(Dense(self.weights[tensor], bias[:there], activation, rows))] if there else []
        for begin in range(there, outputs, each):
            part = slice(begin, min(begin + each, outputs))

            def make(weight: Any, part: slice = part) -> Call:
                return Dense(weight, bias[part], activation, rows).variants(gpu=self.gpu)[PLAIN]

            calls.append(self._through(self.weights.host(tensor)[part], make))
        flatten, back = same_memory(len(data), 2), same_memory(2, len(result))
        if len(calls) == 1:
            (inner,) = calls
            return lambda x: back(inner(flatten(x, (rows, inputs))), result)
        torch = torch_module()

        def run(x: Any) -> Any:
            given = flatten(x, (rows, inputs))
            return back(torch.cat([call(given) for call in calls], 1), result)

        return run

    def _chosen(self, site: Conv | Dense) -> Call:
        if self.first and isinstance(site, Conv):
            # The plain program: filters as NCHW, ordinary calls.
            plain = replace(site, weight=site.first().permute(0, 2, 3, 1))
            return plain.variants(gpu=False)[PLAIN]
        return site.variants(gpu=self.gpu)[self.choose(site)]

    def _bias(self, operator: Operator, outputs: int) -> Any:
        given = operator.inputs[2] if len(operator.inputs) > 2 else -1
        if given != -1:
            return self.weights[given]
        return torch_module().zeros(outputs, device=self.weights.device)

    def _look(self, index: int) -> None:
        """Record whether an operator PAD, or an addition, can be fused with a convolution."""
        operator = self.graph.operators[index]
        if operator.kind == "PAD":
            sides = self._sides(operator)
            if sides is not None and all(self._takes_sides(c, operator) for c in self._readers(operator.outputs[0])):
                self.pads[operator.outputs[0]] = operator.inputs[0], sides
        elif operator.kind == "ADD" and operator.options["fused_activation"] in {"NONE", "RELU"}:
            shapes = {self.graph.tensors[t].shape for t in (*operator.inputs, *operator.outputs)}
            for tensor in reversed(operator.inputs):
                if len(shapes) == 1 and len(set(operator.inputs)) == 2 and self._ends_here(tensor):
                    self.ends[index] = self.graph.producer[tensor]
                    return

    def _ends_here(self, tensor: int) -> bool:
        """Return whether a tensor is the output of a convolution in this job and has one reader."""
        before = self.graph.producer.get(tensor, -1)
        if before not in self.inside or tensor in self.graph.outputs or len(self.graph.consumers[tensor]) != 1:
            return False
        operator = self.graph.operators[before]
        return operator.kind == "CONV_2D" and operator.options["fused_activation"] == "NONE"

    def _readers(self, tensor: int) -> Sequence[int]:
        """Return the operators that read a tensor; [-1] where some are outside this job, or there are none."""
        readers = self.graph.consumers.get(tensor, ())
        alone = tensor not in self.graph.outputs and all(r in self.inside for r in readers)
        return readers if alone and readers else [-1]

    def _takes_sides(self, reader: int, pad: Operator) -> bool:
        """Return whether an operator can pad its image itself.

        For a maximum, the zeros of a PAD make no difference where all values are 0 or larger.
        """
        if reader == -1:
            return False
        operator = self.graph.operators[reader]
        if operator.options.get("padding") != "VALID" or operator.inputs[0] != pad.outputs[0]:
            return False
        if operator.kind == "MAX_POOL_2D":
            before = self.graph.producer.get(pad.inputs[0], -1)
            return before != -1 and self.graph.operators[before].options.get("fused_activation") in {"RELU", "RELU6"}
        return operator.kind in {"CONV_2D", "DEPTHWISE_CONV_2D"}

    def _sides(self, pad: Operator) -> Sides | None:
        """Return the padding that a PAD adds around images, or None where it also pads other axes."""
        amounts = self.weights.whole_numbers(pad.inputs[1])
        if len(amounts) != 8 or any(amounts[:2]) or any(amounts[6:]):
            return None
        rows, columns = amounts[_ROWS], amounts[_COLUMNS]
        return rows[0], rows[1], columns[0], columns[1]


def _with_ends(steps: Sequence[Step], kept: set[int]) -> tuple[Step, ...]:
    """Add to each step the tensors that it is the last to use, so that their memory is freed."""
    last: Mapping[int, int] = {t: i for i, step in enumerate(steps) for t in (*step.inputs, step.output)}
    return tuple(
        replace(step, over=tuple(sorted({t for t in (*step.inputs, step.output) if last[t] == i} - kept)))
        for i, step in enumerate(steps)
    )
