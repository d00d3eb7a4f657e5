"""Which operators a GPU lane takes: everything else is refused by name, and nothing falls back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from evaluators.cuda.kernels import ACTIVATIONS
from evaluators.cuda.weights import float_constant
from search_spaces.errors import UnavailableError
from search_spaces.graph import Graph, Operator
from search_spaces.models.constants import integers

_SHOWN = 6
_ELEMENTWISE = ("RELU", "RELU6", "LOGISTIC", "TANH", "HARD_SWISH")


def refused(graph: Graph, operators: Sequence[int] | None = None) -> dict[int, str]:
    """Return the operators (of all by default) that cannot be computed here, and why."""
    chosen = range(len(graph.operators)) if operators is None else operators
    found = {}
    for index in chosen:
        why = _why_not(graph, graph.operators[index])
        if why:
            found[index] = why
    return found


def check(graph: Graph, operators: Sequence[int]) -> None:
    """Check that all operators can be computed.

    Raises:
        UnavailableError: some cannot; the text names them.
    """
    wrong = refused(graph, operators)
    if not wrong:
        return
    named = [f"{i} ({graph.operators[i].kind}: {why})" for i, why in list(wrong.items())[:_SHOWN]]
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise UnavailableError(
        f"the evaluator cuda does not run operators {', '.join(named)}{more} of {graph.name!r}",
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
            return "has a shape that is left open"
        if held.variable:
            return "keeps state"
    if operator.options.get("fused_activation", "NONE") not in ACTIVATIONS:
        return f"ends in {operator.options['fused_activation']}"
    return test(graph, operator)


def _data(operator: Operator) -> Sequence[int]:
    """Return the inputs that hold data, not shapes or axes."""
    first_only = ("MEAN", "PAD", "RESHAPE", "SLICE", "TRANSPOSE")
    inputs = operator.inputs[:1] if operator.kind in first_only else operator.inputs
    return [t for t in inputs if t != -1]


def _weighted(graph: Graph, operator: Operator) -> str:
    if not all(float_constant(graph, t) for t in operator.inputs[1:] if t != -1):
        return "has weights that are no plain constants"
    data, weights = graph.tensors[operator.inputs[0]], graph.tensors[operator.inputs[1]]
    if operator.kind == "CONV_2D" and (not weights.shape[3] or data.shape[3] % weights.shape[3]):
        return "has channels that do not fit"
    if operator.kind == "FULLY_CONNECTED" and operator.options.get("weights_format", "DEFAULT") != "DEFAULT":
        return "has shuffled weights"
    return ""


def _image(graph: Graph, operator: Operator) -> str:
    return "" if len(graph.tensors[operator.inputs[0]].shape) == 4 else "reads no image"


def _arithmetic(graph: Graph, operator: Operator) -> str:
    constant = [t for t in operator.inputs if graph.tensors[t].constant]
    return "" if all(float_constant(graph, t) for t in constant) else "reads computed constants"


def _numbers(graph: Graph, operator: Operator) -> str:
    return "" if integers(graph, operator.inputs[1]) is not None else "has axes or sizes that are computed"


def _ranges(graph: Graph, operator: Operator) -> str:
    known = all(integers(graph, t) is not None for t in operator.inputs[1:3])
    return "" if known else "has a begin or a size that is computed"


def _fine(_: Graph, __: Operator) -> str:
    return ""


_TESTS: Mapping[str, Callable[[Graph, Operator], str]] = {
    "CONV_2D": _weighted,
    "DEPTHWISE_CONV_2D": _weighted,
    "FULLY_CONNECTED": _weighted,
    "MAX_POOL_2D": _image,
    "AVERAGE_POOL_2D": _image,
    "ADD": _arithmetic,
    "SUB": _arithmetic,
    "MUL": _arithmetic,
    "CONCATENATION": _arithmetic,
    "MEAN": _numbers,
    "PAD": _numbers,
    "SLICE": _ranges,
    "TRANSPOSE": _numbers,
    "RESHAPE": _fine,
    "SQUEEZE": _fine,
    "SOFTMAX": _fine,
    **dict.fromkeys(_ELEMENTWISE, _fine),
}
KINDS = tuple(_TESTS)
