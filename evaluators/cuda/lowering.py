"""Operators of a float32 ``.tflite`` graph as calls of PyTorch.

A value with four dimensions is held as ``(N, C, H, W)``, in memory as NHWC (``channels_last``, the layout of tensor
cores and of the file), or as NCHW where a plain program is wanted to compare with. What PyTorch can do in one kernel is
one call: a convolution with its bias and ReLU, the zeros that an operator PAD puts around its image, and the addition
at the end of a residual block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evaluators.cuda.kernels import PLAIN, Call, Conv, Dense
from evaluators.cuda.operators import MAKERS, Placed, same_memory
from evaluators.cuda.support import check
from evaluators.cuda.weights import Weights
from evaluators.cuda.windows import Sides, window_of
from search_spaces.graph import Operator

Choose = Callable[[Conv | Dense], str]
"""Tells which of the ways to compute something is to be taken."""

_IMAGES_FIRST = (0, 3, 1, 2)
_ROWS, _COLUMNS = slice(2, 4), slice(4, 6)


def plainly(_: Conv | Dense) -> str:
    """Choose PyTorch's ordinary call."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class Step:
    """One call: what it reads and writes, and which tensors nobody needs behind it."""

    call: Call
    inputs: tuple[int, ...]
    output: int
    over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Operators of a model as one piece of work.

    Attributes:
        inputs, outputs: tensors of the graph that cross its border.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, values: dict[int, Any]) -> None:
        """Compute the outputs into ``values``, which hold the inputs."""
        for step in self.steps:
            values[step.output] = step.call(*[values[t] for t in step.inputs])
            for tensor in step.over:
                del values[tensor]


def lower(
    weights: Weights, operators: Sequence[int], choose: Choose = plainly, *, gpu: bool = False, first: bool = False
) -> Job:
    """Return operators (ascending) as calls.

    Args:
        choose: asked once for each convolution and matrix product.
        gpu: whether kernels of a GPU may be used.
        first: whether values with four dimensions lie as NCHW in memory.

    Raises:
        UnavailableError: an operator cannot be computed; the text names it.
        ModelError: the model's file cannot be read.
    """
    graph = weights.graph
    check(graph, operators)
    return _Lowering(weights, operators, choose, gpu=gpu, first=first).job()


class _Lowering:
    def __init__(self, weights: Weights, operators: Sequence[int], choose: Choose, *, gpu: bool, first: bool) -> None:
        self.weights, self.graph, self.operators = weights, weights.graph, operators
        self.choose, self.gpu, self.first = choose, gpu, first
        self.inside = set(operators)
        self.pads: dict[int, tuple[int, Sides]] = {}  # padded tensor → image, what is added
        self.ends: dict[int, int] = {}  # an addition → the convolution that it is made one call with
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
        call, inputs = MAKERS[operator.kind](Placed(self.weights, operator, sides, self.first))
        return Step(call, tuple(image if t == operator.inputs[0] else t for t in inputs), operator.outputs[0])

    def _conv(self, operator: Operator, activation: str, *, adds: bool) -> tuple[Call, int]:
        graph = self.graph
        image, sides = self.pads.get(operator.inputs[0], (operator.inputs[0], (0, 0, 0, 0)))
        batch, height, width, channels = graph.tensors[image].shape
        tensor = operator.inputs[1]
        weight, order = self.weights[tensor], _IMAGES_FIRST
        if operator.kind == "DEPTHWISE_CONV_2D":  # 1, H, W, C times the multiplier
            weight, order = self.weights.arranged(tensor, (3, 1, 2, 0)), (3, 0, 1, 2)
        bias = self._bias(operator, int(weight.shape[0]))
        size = int(weight.shape[1]), int(weight.shape[2])
        window = window_of(operator.options, size, (height, width), sides)
        groups = channels // int(weight.shape[3])
        first = partial(self.weights.arranged, tensor, order)
        conv = Conv(weight, bias, window, groups, activation, (batch, channels, height, width), first, adds)
        return self._chosen(conv), image

    def _dense(self, operator: Operator) -> Call:
        weight = self.weights[operator.inputs[1]]
        outputs, inputs = (int(n) for n in weight.shape)
        data, result = (self.graph.tensors[t].shape for t in (operator.inputs[0], operator.outputs[0]))
        rows = 1
        for size in data:
            rows *= size
        rows //= inputs
        dense = Dense(weight, self._bias(operator, outputs), operator.options.get("fused_activation", "NONE"), rows)
        inner, flatten, back = self._chosen(dense), same_memory(len(data), 2), same_memory(2, len(result))
        return lambda x: back(inner(flatten(x, (rows, inputs))), result)

    def _chosen(self, site: Conv | Dense) -> Call:
        if self.first and isinstance(site, Conv):
            # A plain program: what a person writes, filters as NCHW.
            plain = replace(site, weight=site.first().permute(0, 2, 3, 1))
            return plain.variants(gpu=False)[PLAIN]
        return site.variants(gpu=self.gpu)[self.choose(site)]

    def _bias(self, operator: Operator, outputs: int) -> Any:
        given = operator.inputs[2] if len(operator.inputs) > 2 else -1
        if given != -1:
            return self.weights[given]
        return self.weights[operator.inputs[1]].new_zeros(outputs)

    def _look(self, index: int) -> None:
        """Note whether an operator PAD, or an addition, can be part of a convolution."""
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
        """Return whether a tensor is what a convolution of this job computes, for one reader."""
        before = self.graph.producer.get(tensor, -1)
        if before not in self.inside or tensor in self.graph.outputs or len(self.graph.consumers[tensor]) != 1:
            return False
        operator = self.graph.operators[before]
        return operator.kind == "CONV_2D" and operator.options["fused_activation"] == "NONE"

    def _readers(self, tensor: int) -> Sequence[int]:
        """Return who reads a tensor; [-1] where that is not this job alone."""
        readers = self.graph.consumers.get(tensor, ())
        alone = tensor not in self.graph.outputs and all(r in self.inside for r in readers)
        return readers if alone and readers else [-1]

    def _takes_sides(self, reader: int, pad: Operator) -> bool:
        """Return whether an operator can add the zeros around its image itself.

        A maximum over values from 0 on is the same with zeros as with nothing around them.
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
        """Return what a PAD adds around images, or None where it adds elsewhere."""
        amounts = self.weights.whole_numbers(pad.inputs[1])
        if len(amounts) != 8 or any(amounts[:2]) or any(amounts[6:]):
            return None
        rows, columns = amounts[_ROWS], amounts[_COLUMNS]
        return rows[0], rows[1], columns[0], columns[1]


def _with_ends(steps: Sequence[Step], kept: set[int]) -> tuple[Step, ...]:
    """Add to each step the tensors that it is the last to read, so that their memory is free again."""
    last: Mapping[int, int] = {t: i for i, step in enumerate(steps) for t in (*step.inputs, step.output)}
    return tuple(
        replace(step, over=tuple(sorted({t for t in (*step.inputs, step.output) if last[t] == i} - kept)))
        for i, step in enumerate(steps)
    )
