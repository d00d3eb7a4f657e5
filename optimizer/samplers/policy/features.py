"""What a policy sees of a decision: features of operator and processors, without units, alike for every model.

The decision before operator ``o``, in a part on lane ``q``: to stay in the part (action 0), or to cut and begin a
part on lane ``p`` (action ``1 + p``). The first operator has no part to stay in. Times come from the model of the
costs; all are relative to the same model's own mean, so a policy carries over from one graph and platform to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.exact.chain import ChainCosts
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.spaces.cuts import cut_points

_Array = NDArray[np.float64]
_Ints = NDArray[np.int64]
_WINDOWS = (1, 4, 16)
_KINDS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_PROCESSORS = ("cpu", "gpu", "npu")

NAMES = (
    "cut",
    "cut on the same lane",
    "time here against the fastest lane",
    *(f"gain over the next {w}" for w in _WINDOWS),
    "gain over the rest",
    "hand-over",
    "overhead",
    "position",
    "crossing bytes",
    "multiply-accumulates",
    "arithmetic intensity",
    *(f"is {kind}" for kind in _KINDS),
    *(f"to {kind}" for kind in _PROCESSORS),
    "parts left, if cut",
    "length of the part, if cut",
)
_LEAST_SHARE = 1e-3  # of the mean: some operators take no time at all, and ratios of times are features
DYNAMIC = 2
"""The last features depend on the decisions before, the others are the same for every plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of all decisions on a graph.

    Attributes:
        table: shape ``(n, P, 1 + P, F - DYNAMIC)``: of operator, lane of the part, action.
        allowed: shape ``(n, P, 1 + P)``: actions after which a processor runs only what it supports.
        cut_rate: shape ``(n, K + 1)``: how likely a cut is before an operator after so many parts, where the number of
            parts is uniform in 1 … K and the cuts lie anywhere.
        max_stages: K, parts of a plan at most.
    """

    table: _Array
    allowed: NDArray[np.bool_]
    cut_rate: _Array
    max_stages: int


def features(graph: Graph, model: ChainCosts, max_stages: int) -> Features:
    """Return what a policy sees of a graph on a platform."""
    lanes, count = model.operator_s.shape
    finite = np.isfinite(model.operator_s)
    seconds = np.where(finite, model.operator_s, model.operator_s[finite].max())
    seconds = np.maximum(seconds, _LEAST_SHARE * max(float(seconds.mean()), 1e-12))
    fastest = seconds.min(axis=0)
    mean_s, total_s = max(float(fastest.mean()), 1e-12), max(float(fastest.sum()), 1e-12)
    table = np.zeros((count, lanes, 1 + lanes, len(NAMES) - DYNAMIC))
    start = np.arange(count)
    done = np.concatenate((np.zeros((lanes, 1)), seconds.cumsum(axis=1)), axis=1)
    own = [_squash(c) for c in _of_operators(graph)]
    for here in range(lanes):
        for action in range(1 + lanes):
            to = here if action == 0 else action - 1
            cut = float(action > 0)
            row = [np.full(count, cut), np.full(count, cut * (to == here)), np.log(seconds[to] / fastest)]
            for window in _WINDOWS:
                stop = np.minimum(start + window, count)
                gain = (done[here, stop] - done[here, start]) - (done[to, stop] - done[to, start])
                row.append(np.tanh(gain / (mean_s * window)))
            gain = (done[here, -1] - done[here, :-1]) - (done[to, -1] - done[to, :-1])
            row.append(np.tanh(3.0 * gain / total_s))
            hand_over_s = np.where(np.isfinite(model.hand_over_s[:, here, to]), model.hand_over_s[:, here, to], total_s)
            row.append(cut * np.log1p(hand_over_s / mean_s))
            row.append(np.full(count, cut * np.log1p(model.overhead_s[to] / mean_s)))
            row.append(start / count)
            row += [cut * own[0], *own[1:]]
            kind = model.platform.processors[to].kind
            row += [np.full(count, cut * (kind == k)) for k in _PROCESSORS]
            table[:, here, action] = np.stack(row, axis=1)
    allowed = np.concatenate((finite.T[:, :, None], np.broadcast_to(finite.T[:, None], (count, lanes, lanes))), axis=2)
    return Features(table, allowed, _cut_rate(count, max_stages), max_stages)


def _cut_rate(count: int, most: int) -> _Array:
    """Return what :attr:`Features.cut_rate` holds, by Bayes' rule over the number of cuts that are still to come."""
    log_factorial = np.concatenate(([0.0], np.log(np.arange(1, count + 1)).cumsum()))

    def log_ways(top: _Ints, chosen: _Ints) -> _Array:
        possible = (chosen >= 0) & (chosen <= top)
        size = np.where(possible, chosen, 0)
        ways: _Array = log_factorial[top] - log_factorial[size] - log_factorial[top - size]
        return np.where(possible, ways, -np.inf)

    rate = np.zeros((count, most + 1))
    cuts = np.arange(most)
    prior = log_ways(np.full(most, count - 1), cuts)
    for parts in range(1, most):
        left = np.arange(count - 1, 0, -1)[:, None]  # places for cuts from operators 1 … n-1 on
        to_come = np.broadcast_to(cuts - (parts - 1), (count - 1, most))
        weights = log_ways(np.broadcast_to(left, to_come.shape), to_come) - prior
        weights = np.exp(weights - np.maximum(weights.max(axis=1, keepdims=True), -1e300))
        with np.errstate(invalid="ignore", divide="ignore"):
            rate[1:, parts] = np.nan_to_num((weights * to_come / left).sum(axis=1) / weights.sum(axis=1))
    return rate


def _of_operators(graph: Graph) -> list[_Array]:
    """Return bytes across the cut before it, multiply-accumulates, intensity, and kind of each operator."""
    crossing = np.array([0.0, *(float(point.nbytes) for point in cut_points(graph))])
    costs = operator_costs(graph)
    macs = np.array([float(c.macs) for c in costs])
    moved = np.array([float(c.read_bytes + c.written_bytes) for c in costs])
    kinds = [np.array([float(o.kind == kind) for o in graph.operators]) for kind in _KINDS]
    return [crossing, macs, macs / np.maximum(moved, 1.0), *kinds]


def _squash(values: _Array) -> _Array:
    """Return values on a scale on which their mean is log 2."""
    mean = float(values.mean())
    return np.log1p(values / mean) if mean > 0.0 else np.zeros_like(values)
