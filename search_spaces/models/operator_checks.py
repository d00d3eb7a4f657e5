"""Operators whose inputs and outputs do not go together: the runtime trusts the file, and writes beyond what it gave.

Only what follows without doubt is checked: how many tensors common operators take, and the shapes that they make of
known shapes. The kernels of LiteRT require the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from search_spaces.graph import Operator, Tensor

Shape = tuple[int, ...]
_Rule = Callable[[Operator, Sequence[Shape]], Shape | int | None]


def check_operator(operator: Operator, tensors: Sequence[Tensor]) -> None:
    """Check one operator.

    Args:
        operator: of known kind or not; its tensors exist.
        tensors: of its subgraph.

    Raises:
        ValueError: it has too few or too many tensors, or makes another shape than its output is said to have.
    """
    found = _CHECKS.get(operator.kind)
    if found is None:
        return
    least, most, outputs, rule = found
    if not least <= len(operator.inputs) <= most or len(operator.outputs) != outputs:
        raise ValueError(f"has {len(operator.inputs)} inputs and {len(operator.outputs)} outputs")
    if rule is None:
        return
    needed = operator.inputs[:least]
    if -1 in needed:
        raise ValueError(f"lacks input {needed.index(-1)}")
    shapes = [tensors[t].shape for t in operator.inputs if t != -1]
    declared = tensors[operator.outputs[0]].shape
    if not declared or any(d < 0 for shape in (*shapes, declared) for d in shape):
        return  # no dimensions may stand for unknown ones
    made = rule(operator, shapes)
    if made is not None and made != (prod(declared) if isinstance(made, int) else declared):
        text = f"{made} elements" if isinstance(made, int) else f"the shape {made}"
        raise ValueError(f"makes {text} and its output is said to have the shape {declared}")


def _same(_: Operator, shapes: Sequence[Shape]) -> Shape:
    return shapes[0]


def _as_many(_: Operator, shapes: Sequence[Shape]) -> int:
    return prod(shapes[0])


def _joined(_: Operator, shapes: Sequence[Shape]) -> int:
    return sum(map(prod, shapes))


def _broadcast(_: Operator, shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True)
    made = tuple(next((d for d in column if d != 1), 1) for column in columns)
    if any(d not in (1, m) for s in shapes for d, m in zip(reversed(s), reversed(made), strict=False)):
        raise ValueError(f"cannot combine the shapes {' and '.join(map(str, shapes))}")
    return made


def _fully_connected(_: Operator, shapes: Sequence[Shape]) -> int | None:
    weights = shapes[1]
    if len(weights) != 2 or not weights[1] or prod(shapes[0]) % weights[1]:
        raise ValueError(f"cannot multiply {shapes[0]} by weights of {weights}")
    return prod(shapes[0]) // weights[1] * weights[0]


def _convolution(operator: Operator, shapes: Sequence[Shape]) -> Shape:
    _four(shapes[0], shapes[1])
    _, height, width, _ = shapes[1]
    channels = shapes[1][3 if operator.kind == "DEPTHWISE_CONV_2D" else 0]
    return _window(operator, shapes[0], (height, width), channels)


def _pool(operator: Operator, shapes: Sequence[Shape]) -> Shape:
    _four(shapes[0])
    size = (operator.options.get("filter_height", 0), operator.options.get("filter_width", 0))
    return _window(operator, shapes[0], size, shapes[0][3])


def _four(*shapes: Shape) -> None:
    wrong = next((s for s in shapes if len(s) != 4), None)
    if wrong is not None:
        raise ValueError(f"takes four dimensions, not {wrong}")


def _window(operator: Operator, shape: Shape, kernel: tuple[int, int], channels: int) -> Shape:
    options = operator.options
    strides = options.get("stride_h", 0), options.get("stride_w", 0)
    dilations = options.get("dilation_h_factor", 1), options.get("dilation_w_factor", 1)
    if min(*strides, *dilations, *kernel) < 1:
        raise ValueError(f"has a window of {kernel} with strides of {strides}")
    lost = [0 if options.get("padding") == "SAME" else (k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    height, width = (-(-(n - less) // s) for n, less, s in zip(shape[1:3], lost, strides, strict=True))
    return shape[0], height, width, channels


_UNARY = """ABS CAST CEIL COS DENSIFY DEQUANTIZE ELU EXP FLOOR GELU HARD_SWISH L2_NORMALIZATION LEAKY_RELU LOG
LOGICAL_NOT LOGISTIC LOG_SOFTMAX NEG QUANTIZE RELU RELU6 RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SOFTMAX SQRT
SQUARE TANH ZEROS_LIKE""".split()  # noqa: SIM905 - as in intensity.py

_BINARY = """ADD DIV EQUAL FLOOR_DIV FLOOR_MOD GREATER GREATER_EQUAL LESS LESS_EQUAL LOGICAL_AND LOGICAL_OR MAXIMUM
MINIMUM MUL NOT_EQUAL POW SQUARED_DIFFERENCE SUB""".split()  # noqa: SIM905 - as in intensity.py

_MANY = 1 << 31

# Kind → fewest and most inputs, outputs, and what shape (or how many elements) the output has.
_CHECKS: Mapping[str, tuple[int, int, int, _Rule | None]] = {
    **dict.fromkeys(_UNARY, (1, 1, 1, _same)),
    **dict.fromkeys(_BINARY, (2, 2, 1, _broadcast)),
    "ASSIGN_VARIABLE": (2, 2, 0, None),
    "AVERAGE_POOL_2D": (1, 1, 1, _pool),
    "CALL_ONCE": (0, 0, 0, None),
    "CONCATENATION": (1, _MANY, 1, _joined),
    "CONV_2D": (2, 3, 1, _convolution),
    "DEPTHWISE_CONV_2D": (2, 3, 1, _convolution),
    "FULLY_CONNECTED": (2, 3, 1, _fully_connected),
    "L2_POOL_2D": (1, 1, 1, _pool),
    "MAX_POOL_2D": (1, 1, 1, _pool),
    "MEAN": (2, 2, 1, None),
    "READ_VARIABLE": (1, 1, 1, None),
    "RESHAPE": (1, 2, 1, _as_many),
    "TRANSPOSE": (2, 2, 1, _as_many),
    "VAR_HANDLE": (0, 0, 1, None),
}
