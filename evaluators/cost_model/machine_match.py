"""Which kernels of the runtime belong to which operators of a model.

XNNPACK runs a model's operators in their order, but not one kernel each: a fused activation of a sum is a kernel of its
own, paddings go into convolutions, reshapes vanish. So kernels of one class are matched, in order, with the operators
that such kernels run; a class whose numbers do not agree is left out. Where the interpreter runs some operators itself,
the order is no longer the model's: :func:`run_order`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.features import OperatorFeatures
from search_spaces.graph import Graph

# Beginning of a kernel's name → the schema's kinds that it runs. The interpreter's own kernels have the kind's name.
_RUNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Convolution": ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"),
        "Fully Connected": ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"),
        "Deconvolution": ("TRANSPOSE_CONV",),
        "Batch Matrix Multiply": ("BATCH_MATMUL",),
        "Max Pooling": ("MAX_POOL_2D",),
        "Average Pooling": ("AVERAGE_POOL_2D",),
        "Global Average Pooling": ("AVERAGE_POOL_2D",),
        "Mean": ("MEAN",),
        "Add": ("ADD",),
        "Multiply": ("MUL",),
        "Subtract": ("SUB",),
        "Squared Difference": ("SQUARED_DIFFERENCE",),
        "HardSwish": ("HARD_SWISH",),
        "Sigmoid": ("LOGISTIC",),
        "TanH": ("TANH",),
        "GELU": ("GELU",),
        "LeakyReLU": ("LEAKY_RELU",),
        "Reciprocal Square Root": ("RSQRT",),
        "Copy": ("CONCATENATION",),
        "Constant Pad": ("PAD",),
        "Softmax": ("SOFTMAX",),
        "Transpose": ("TRANSPOSE",),
        "Slice": ("SLICE",),
        "Space To Depth": ("SPACE_TO_DEPTH",),
        "Static Resize Bilinear": ("RESIZE_BILINEAR",),
    }
)
_KIND = re.compile(r"[A-Z][A-Z0-9_]+")
_CLAMPED = frozenset({"ADD", "MUL", "SUB", "DIV", "MAXIMUM", "MINIMUM"})
_CLAMPS = frozenset({"RELU", "RELU6", "RELU_0_TO_1", "RELU_N1_TO_1"})


def operator_seconds(
    features: Sequence[OperatorFeatures], names: Sequence[str], kernel_s: Sequence[float], graph: Graph | None = None
) -> NDArray[np.float64]:
    """Return what each operator took, shape ``(n,)``; NaN where its kernels could not be told, 0 where none ran.

    Args:
        names, kernel_s: of the kernels in the order in which they ran.
        graph: that the features are of; without it nothing is told of a model that the interpreter runs a part of.
    """
    found = np.array([0.0 if f.free else np.nan for f in features])
    own = {name for name in names if _KIND.fullmatch(name)}
    if own and graph is None:
        return found
    order = run_order(graph, own) if graph is not None else range(len(features))
    by_class: dict[tuple[str, ...], list[float]] = {}
    clamps: list[float] = []
    for name, seconds in zip(names, kernel_s, strict=True):
        if name.startswith("Clamp"):
            clamps.append(seconds)
            continue
        kinds = next((runs for start, runs in _RUNS.items() if name.startswith(start)), (name,))
        by_class.setdefault(kinds, []).append(seconds)
    for kinds, seconds_of in by_class.items():
        where = [i for i in order if features[i].kind in kinds and not features[i].free]
        if len(where) == len(seconds_of):
            found[where] = seconds_of
    clamped = [
        i for i in order if features[i].kind in _CLAMPS or (features[i].kind in _CLAMPED and features[i].activation)
    ]
    alone = [i for i in clamped if features[i].kind in _CLAMPS]
    found[alone] = 0.0
    if len(clamped) == len(clamps):
        found[clamped] += clamps
    else:
        found[clamped] = np.nan
    return found


def run_order(graph: Graph, own: Collection[str]) -> list[int]:
    """Return the operators in the order in which they run where the interpreter keeps some kinds for itself.

    It hands the others over in as few pieces as it can: by turns all that is ready for the one side, then all that is
    ready for the other, the model's order within each (TensorFlow Lite's ``PartitionGraphIntoIndependentNodeSubsets``).

    Args:
        own: kinds that the interpreter runs.
    """
    order: list[int] = []
    ready = set(range(len(graph.tensors))) - {t for o in graph.operators for t in o.outputs}
    waiting = list(range(len(graph.operators)))
    while waiting:
        side: bool | None = None
        left = []
        for index in waiting:
            operator = graph.operators[index]
            mine = operator.kind in own
            if all(t in ready or t == -1 for t in operator.inputs) and side in {None, mine}:
                side = mine
                order.append(index)
                ready.update(operator.outputs)
            else:
                left.append(index)
        waiting = left
    return order
