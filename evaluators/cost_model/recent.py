"""What ran just before an operator: a core that multiplied matrices runs other kernels differently for milliseconds.

On the machine this was found on, a 3 by 3 convolution takes 1.9 ms where convolutions alone run, and 2.1 to 2.25 ms
within about 4 ms of a matrix product, such as a pointwise convolution; matrix products are slower where none ran before
them. What state the processor keeps is not known; other operators neither cause nor undo it. It is described by a duty:
the share of the time before that matrix products took, recent time counting more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evaluators.cost_model.columns import Array
from evaluators.cost_model.features import OperatorFeatures

MEMORY_S = 4e-3
"""Time after which what ran counts for a factor of e less."""
_LEAST_DUTY = 0.03


def multiplies_matrices(feature: OperatorFeatures) -> bool:
    """Return whether an operator runs as a product of two matrices, both of more than one row."""
    if feature.kernel == "fully_connected":
        return feature.output[0] * feature.output[1] > 1
    return feature.kernel == "matmul" or (feature.kernel == "pointwise" and feature.stride == (1, 1))


def sway(duty: Array) -> Array:
    """Return what a duty does to kernels, from 0 (nothing) to about 1; a little of it does much."""
    result: Array = 1.0 + np.log(np.maximum(duty, 0.0) + _LEAST_DUTY) / np.log(1.0 / _LEAST_DUTY)
    return result


def with_duties(features: Sequence[OperatorFeatures], seconds: Array) -> list[OperatorFeatures]:
    """Return the features of a model that runs again and again, each with the duty while it runs.

    Args:
        seconds: what each operator takes, shape ``(n,)``; one that is not known counts as nothing.
    """
    took = np.maximum(np.nan_to_num(seconds, nan=0.0, posinf=0.0), 0.0) / MEMORY_S
    fades = np.exp(-took)
    duty = 0.0
    for feature, fade in zip(features, fades, strict=True):
        duty = duty * fade + _busy(feature) * (1.0 - fade)
    duty /= max(1e-9, 1.0 - float(fades.prod()))  # as all inferences before leave it
    found = []
    for feature, fade, length in zip(features, fades, took, strict=True):
        busy = _busy(feature)
        share = (1.0 - fade) / length if length > 1e-9 else 1.0  # of what was before, on average while it runs
        found.append(replace(feature, duty=float(busy + (duty - busy) * share)))
        duty = busy + (duty - busy) * fade
    return found


def _busy(feature: OperatorFeatures) -> float:
    return 1.0 if not feature.free and multiplies_matrices(feature) else 0.0
