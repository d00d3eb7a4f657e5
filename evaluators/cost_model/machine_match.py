"""Which kernels of the runtime belong to which operators of a model.

XNNPACK runs a model's operators in their order, but not one kernel each: a fused activation of a sum is a kernel of its
own, paddings go into convolutions, reshapes vanish. So kernels of one class are matched, in order, with the operators
that such kernels run; a class whose numbers do not agree is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.features import OperatorFeatures

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
    features: Sequence[OperatorFeatures], names: Sequence[str], kernel_s: Sequence[float]
) -> NDArray[np.float64]:
    """Return what each operator took, shape ``(n,)``; NaN where its kernels could not be told, 0 where none ran.

    Args:
        names, kernel_s: of the kernels in the order in which they ran.
    """
    found = np.array([0.0 if f.free else np.nan for f in features])
    if any(_KIND.fullmatch(name) for name in names):
        return found  # the interpreter runs some operators itself: the order of the rest is not the model's
    by_class: dict[tuple[str, ...], list[float]] = {}
    clamps: list[float] = []
    for name, seconds in zip(names, kernel_s, strict=True):
        if name.startswith("Clamp"):
            clamps.append(seconds)
            continue
        kinds = next((runs for start, runs in _RUNS.items() if name.startswith(start)), (name,))
        by_class.setdefault(kinds, []).append(seconds)
    for kinds, seconds_of in by_class.items():
        where = [i for i, f in enumerate(features) if f.kind in kinds and not f.free]
        if len(where) == len(seconds_of):
            found[where] = seconds_of
    clamped = [i for i, f in enumerate(features) if f.kind in _CLAMPS or (f.kind in _CLAMPED and f.activation)]
    alone = [i for i in clamped if features[i].kind in _CLAMPS]
    found[alone] = 0.0
    if len(clamped) == len(clamps):
        found[clamped] += clamps
    else:
        found[clamped] = np.nan
    return found
