"""Bring visits to many models to one pace: the machine's speed at any moment follows from all models around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evaluators.cost_model.columns import Array

_NEAR = 8  # visits on either side
_ROUNDS = 3


def slowness(models: Sequence[str], seconds: Sequence[float]) -> Array:
    """Return the logarithm of how much slower than usual the machine was at each visit, shape ``(n,)``.

    A visit is compared with the median of all visits to its model; the median of that over a visit's neighbours in time
    is what the machine did, and the rest is of the visit itself.

    Args:
        models: name of the model of each visit, in the order in which they were made.
        seconds: what it took.
    """
    logs = np.log(np.asarray(seconds, dtype=np.float64))
    which = np.unique(np.asarray(models), return_inverse=True)[1]
    found = np.zeros_like(logs)
    for _ in range(_ROUNDS):
        own = logs - found
        usual = np.array([np.median(own[which == m]) for m in range(which.max() + 1)]) if len(which) else own
        off = logs - usual[which]
        for index in range(len(off)):
            near = np.arange(max(0, index - _NEAR), min(len(off), index + _NEAR + 1))
            found[index] = np.median(off[near[near != index]]) if len(near) > 1 else 0.0
        found -= np.median(found)
    return found


def usual_times(rows: Sequence[Sequence[float]], slower: Array) -> Array:
    """Return usual times at the usual pace, shape ``(k,)``: the medians over the quicker half of the visits.

    Whatever else ran during a visit made it slower, never quicker. On two threads, which one busy core holds up, the
    times by every second visit and by the others then differ by 3.2 % where medians over all visits differ by 5.0 %
    (in the worst tenth 13 and 23 %).

    Args:
        rows: ``k`` times of each visit; visits are compared by their sums.
        slower: how much slower the machine was at each (:func:`slowness`).
    """
    paced: Array = np.asarray(rows, dtype=np.float64) / np.exp(slower)[:, None]
    quicker = np.argsort(paced.sum(axis=1), kind="stable")[: -(-len(paced) // 2)]
    result: Array = np.median(paced[quicker], axis=0)
    return result
