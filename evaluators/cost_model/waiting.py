"""What an operator takes longer because it was timed within an inference of its own: the first one does.

Between inferences whose operators are timed their times are read, and the other threads of the pool fall asleep: the
first operator waits for them, by 15 to 25 µs on two threads. Inferences in a row, which is how a whole model is timed,
know no such wait. In small networks it is 3 to 5 % of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evaluators.cost_model.timed_model import TimedModel

_LEAST_MODELS = 12  # of which it can be told
_UNIT_S = 1e-5
_MOST_S = 1e-3
_SCALES = 0.9, 1.1
_USUAL = 0.01  # how far a model's time usually is from the sum of its operators'; those farther off count less


def waited_s(models: Sequence[TimedModel], invocation_s: float = 0.0) -> float:
    """Return how much longer the first operator of a model took because operators were timed, not negative.

    It is what makes ``whole = invocation + scale * sum - waited`` come nearest over models that were timed both ways;
    0 where too few were.
    """
    from scipy.optimize import least_squares

    known = [m for m in models if np.isfinite(m.whole_s) and not np.isnan(m.sum_s)]
    if len(known) < _LEAST_MODELS:
        return 0.0
    whole = np.array([m.whole_s for m in known])
    terms = np.column_stack([[m.sum_s for m in known], np.full(len(known), -_UNIT_S)]) / whole[:, None]
    found = least_squares(
        lambda theta: terms @ theta + invocation_s / whole - 1.0,
        (1.0, 0.1),
        lambda _: terms,
        bounds=((_SCALES[0], 0.0), (_SCALES[1], _MOST_S / _UNIT_S)),
        loss="soft_l1",
        f_scale=_USUAL,
    )
    return float(found.x[1]) * _UNIT_S


def awake(model: TimedModel, waited_s: float) -> TimedModel:
    """Return a model whose first operator waited for nobody; it keeps a quarter of what it took, or more.

    The first is that which took as long as the wait: one that took less did not wait, since one core ran it alone.
    """
    took = ((i, s) for i, (f, s) in enumerate(zip(model.features, model.operator_s, strict=True)) if not f.free)
    first = next((i for i, s in took if s >= waited_s), None)
    if first is None or waited_s <= 0:
        return model
    operator_s = model.operator_s.copy()
    operator_s[first] = np.maximum(operator_s[first] - waited_s, operator_s[first] / 4)
    return replace(model, operator_s=operator_s)
