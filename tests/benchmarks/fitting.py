"""Fits of processors from operators that were timed one by one, or from whole models alone, and what those need.

Published tables of phones are fitted so (:mod:`tests.benchmarks.fit_phones`), and errors of models that were kept out
are told by folds. A device at hand is fitted by :func:`evaluators.cost_model.fit.fit_processor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from evaluators.cost_model import fit
from evaluators.cost_model.correction import Correction, shape_coordinates, squared_exponential
from evaluators.cost_model.features import KERNELS, Array, Columns, OperatorFeatures, columns
from evaluators.cost_model.fit import OPERATOR_TERMS, TimedModel, nonnegative_prices, ranges_of
from evaluators.cost_model.kernels import KernelModel, Tile, term
from evaluators.cost_model.profile import ProcessorProfile
from search_spaces.core.errors import ProfileError
from search_spaces.core.wording import plural

# Whole models cannot separate kernels that always occur together: kernels of one group share one price for each term.
MODEL_GROUPS: Mapping[str, str] = {
    **{kernel: kernel for kernel in KERNELS},
    "winograd": "conv",
    "transpose_conv": "conv",
    "matmul": "fully_connected",
    **dict.fromkeys(("concat", "mean", "pool"), "moving"),
    **dict.fromkeys(("elementwise", "copy", "softmax", "other"), "mapping"),
}
MODEL_TERMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("conv", "pointwise"), ("macs", "patches", "written", "weight")),
    "depthwise": ("macs", "read", "written"),
    "grouped": ("macs", "patches", "written"),
    "fully_connected": ("weight",),
    **dict.fromkeys(("moving", "mapping"), ("read", "written")),
}

_LEAST_OPERATORS = 3
_NOISE = 0.1  # variance of one residual, relative to that of the process
_JITTER = 1e-6


def fit_operators(
    features: Sequence[OperatorFeatures],
    seconds: Sequence[float] | Array,
    *,
    terms: Mapping[str, tuple[str, ...]] = OPERATOR_TERMS,
    tiles: Mapping[str, Sequence[Tile]] | None = None,
    correct: bool = True,
    folds: int = 5,
) -> dict[str, KernelModel]:
    """Return a model for each kind of kernel among operators that were timed one by one.

    Args:
        seconds: shape ``(n,)``.
        terms: kernel → the terms of its time.
        tiles: kernel → tiles of which the best-fitting is chosen; no tiling where it is not listed.
        correct: whether to correct the sum of terms by the times of similar shapes.
        folds: ``sigma`` is cross-validated over shapes in so many folds; 0: the residual of the fit itself.

    Raises:
        ProfileError: a time is not positive, or there are fewer than 3 operators of a kind.
    """
    times = np.asarray(seconds, dtype=np.float64)
    _check_times(times, len(features))
    rows = columns(features)
    by_key: dict[str, list[int]] = {}
    for index, feature in enumerate(features):
        if not feature.free:
            by_key.setdefault(feature.key, []).append(index)
    found = {}
    for key, where in by_key.items():
        if len(where) < _LEAST_OPERATORS:
            raise ProfileError(
                f"{len(where)} timed operators of kind {key} are too few to fit", f"time {_LEAST_OPERATORS} or more"
            )
        kernel = key.partition(":")[0]
        picked, took = rows[np.asarray(where)], times[where]
        choice = (tiles or {}).get(kernel, (Tile(),))
        model = _fit_kernel(picked, took, terms[kernel], choice, correct=correct)
        if folds:
            model = replace(model, sigma=_sigma(picked, took, terms[kernel], model.tile, folds, correct=correct))
        found[key] = model
    return found


def fit_whole_models(
    models: Sequence[TimedModel],
    *,
    terms: Mapping[str, tuple[str, ...]] = MODEL_TERMS,
    groups: Mapping[str, str] = MODEL_GROUPS,
) -> ProcessorProfile:
    """Return a processor fitted from end-to-end times alone.

    Raises:
        ProfileError: a time is not positive, or there are fewer than 8 models.
    """
    times = _times(models)
    if len(models) < 8:
        raise ProfileError(f"{len(models)} models are too few to fit a processor from", "time 8 or more")
    keys = sorted({f.key for m in models for f in m.features if not f.free})
    names = sorted(
        {(_group(key, groups), name) for key in keys for name in terms[_group(key, groups).partition(":")[0]]}
    )
    table = np.zeros((len(models), len(names) + 2))
    for row, model in enumerate(models):
        for key, part in _parts(model.features).items():
            group = _group(key, groups)
            for name in terms[group.partition(":")[0]]:
                table[row, names.index((group, name))] += term(name, part, Tile()).sum()
        table[row, -2:] = sum(not f.free for f in model.features), 1.0
    prices = nonnegative_prices(table, times)
    priced: dict[str, dict[str, float]] = {}
    for (group, name), price in zip(names, prices, strict=False):
        priced.setdefault(group, {})[name] = float(price)
    sigma = float(np.std(np.log(table @ prices / times)))
    features = [f for m in models for f in m.features]
    kernels = {
        key: KernelModel(priced[_group(key, groups)], sigma=sigma, ranges=ranges_of(part), samples=len(part.macs))
        for key, part in _parts(features).items()
    }
    return ProcessorProfile(kernels=kernels, dispatch_s=float(prices[-2]), invocation_s=float(prices[-1]))


def fit_overheads(
    kernels: Mapping[str, KernelModel], models: Sequence[TimedModel], operator_s: Sequence[float] | None = None
) -> ProcessorProfile:
    """Return a processor with overheads, as :func:`evaluators.cost_model.fit.fit_overheads` does.

    Args:
        operator_s: the measured sum of each model's operators; predicted where it is not given.

    Raises:
        ProfileError: a time is not positive, or there are fewer than 3 models.
    """
    _times(models)
    if len(models) < _LEAST_OPERATORS:
        raise ProfileError(f"{len(models)} models are too few to separate overheads", "time 3 or more")
    bare = ProcessorProfile(kernels=kernels)
    sums = [sum_of_kernels(bare, m) for m in models] if operator_s is None else operator_s
    return fit.fit_overheads(kernels, models, sums)


def sum_of_kernels(processor: ProcessorProfile, model: TimedModel) -> float:
    """Return the time of a model's operators in their kernels (s); kernels without a model count as 0."""
    return sum(
        float(processor.kernels[key].predict(part)[0].sum())
        for key, part in _parts(model.features).items()
        if key in processor.kernels
    )


Row = TypeVar("Row")


def cross_validated(
    rows: Sequence[Row], groups: Sequence[str], fit: Callable[[list[Row]], Any], predict: Callable[[Any, Row], float]
) -> Array:
    """Return a prediction for each row by a fit without the rows of its group; shape ``(n,)``."""
    found = np.full(len(rows), np.nan)
    for group in dict.fromkeys(groups):
        fitted = fit([row for row, of in zip(rows, groups, strict=True) if of != group])
        for index, row in enumerate(rows):
            if groups[index] == group:
                found[index] = predict(fitted, row)
    return found


def _fit_kernel(
    rows: Columns, seconds: Array, terms: Sequence[str], tiles: Sequence[Tile], *, correct: bool
) -> KernelModel:
    best, least = None, np.inf
    for tile in tiles:
        table = np.stack([term(name, rows, tile) for name in terms], axis=1)
        prices = nonnegative_prices(table, seconds)
        residual = np.log(seconds) - np.log(np.maximum(table @ prices, 1e-9))
        loss = float(np.mean(np.abs(residual)))
        if loss < least:
            named = {name: float(p) for name, p in zip(terms, prices, strict=True) if p > 0}
            best, least = (KernelModel(named, tile, ranges=ranges_of(rows), samples=len(seconds)), residual), loss
    if best is None:
        raise ProfileError("no tile fits an operator; its times or its terms are not numbers")
    model, residual = best
    correction = fit_correction(rows, residual) if correct else None
    model = replace(model, correction=correction)
    left = np.log(seconds / np.maximum(model.predict(rows)[0], 1e-12))
    return replace(model, sigma=round(float(left.std()), 4))


def _sigma(rows: Columns, seconds: Array, terms: Sequence[str], tile: Tile, folds: int, *, correct: bool) -> float:
    """Return the cross-validated deviation, equal shapes in one fold; values beyond 3 deviations count as 3."""
    shapes = np.unique(
        np.stack([rows.macs, rows.read, rows.written, rows.weight], axis=1), axis=0, return_inverse=True
    )[1]
    part = shapes.reshape(-1) % folds
    if len(np.unique(part)) < folds or len(seconds) < 2 * folds:
        return _fit_kernel(rows, seconds, terms, (tile,), correct=correct).sigma
    left = np.zeros(len(seconds))
    for fold in range(folds):
        out, kept = np.flatnonzero(part == fold), np.flatnonzero(part != fold)
        model = _fit_kernel(rows[kept], seconds[kept], terms, (tile,), correct=correct)
        left[out] = np.log(seconds[out] / np.maximum(model.predict(rows[out])[0], 1e-12))
    usual = 1.4826 * float(np.median(np.abs(left)))
    return round(float(np.sqrt(np.mean(np.clip(left, -3 * usual, 3 * usual) ** 2))), 4)


def _group(key: str, groups: Mapping[str, str]) -> str:
    kernel, colon, dtype = key.partition(":")
    return groups[kernel] + colon + dtype


def _parts(features: Sequence[OperatorFeatures]) -> dict[str, Columns]:
    by_key: dict[str, list[OperatorFeatures]] = {}
    for feature in features:
        if not feature.free:
            by_key.setdefault(feature.key, []).append(feature)
    return {key: columns(part) for key, part in by_key.items()}


def fit_correction(rows: Columns, residual: Array, *, most: int = 160) -> Correction | None:
    """Fit the logarithm of measured over predicted time; None where there are too few operators.

    Args:
        residual: shape ``(n,)``.
        most: support points at most; of more shapes, those farthest apart are chosen.
    """
    points = shape_coordinates(rows)
    spread = float(residual.std())
    if len(residual) < 8 or spread <= 0.0:
        return None
    scale = points.std(axis=0)
    scale = np.where(scale > 1e-6, np.round(scale, 4), 1.0)
    points = np.round(points / scale, 3)
    shapes, which, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    mean = np.bincount(which, residual) / counts
    support = shapes[_far_apart(shapes, most)]
    near, among = squared_exponential(shapes, support), squared_exponential(support, support)
    # Subset of regressors: with all shapes as support this is the exact process.
    precision = near.T @ (near * (counts / _NOISE)[:, None]) + among + _JITTER * np.eye(len(support))
    weights = np.linalg.solve(precision, near.T @ (mean * counts / _NOISE))
    return Correction(
        scale=tuple(float(s) for s in scale),
        support=tuple(tuple(float(v) for v in point) for point in support),
        weights=tuple(float(f"{w:.5g}") for w in weights),
        spread=round(spread, 4),
    )


def _far_apart(points: Array, most: int) -> list[int]:
    """Return the indices of at most ``most`` points, each the one farthest from those chosen before."""
    chosen = [int(((points - points.mean(axis=0)) ** 2).sum(1).argmin())]
    distance = ((points - points[chosen[0]]) ** 2).sum(1)
    while len(chosen) < min(most, len(points)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(1))
    return chosen


def _times(models: Sequence[TimedModel]) -> Array:
    times = np.array([m.whole_s for m in models], dtype=np.float64)
    _check_times(times, len(models))
    return times


def _check_times(times: Array, count: int) -> None:
    if times.shape != (count,):
        raise ProfileError(f"{plural(count, 'row')} to fit have {plural(times.size, 'time')}")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise ProfileError(f"row {int(bad[0])} to fit has the time {times[bad[0]]}", "times are positive seconds")


_NEAR = 8  # visits on either side
_ROUNDS = 3


def slowness(models: Sequence[str], seconds: Sequence[float]) -> Array:
    """Return how much slower than usual the machine was at each visit, as a logarithm, shape ``(n,)``.

    Each visit is compared with the median of all visits to its model. The median of this ratio over a visit's
    neighbours in time is the machine's slowness; the rest belongs to the visit itself.

    Args:
        models: name of the model of each visit, in order of time.
        seconds: time of each visit.
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
    """Return usual times at the machine's usual speed, shape ``(k,)``: medians over the faster half of the visits.

    Other processes make a visit slower, never faster. On two threads, where one busy core delays both, the times
    from every second visit and from the others then differ by 3.2 %, where medians over all visits differ by 5.0 % (in
    the worst tenth 13 and 23 %).

    Args:
        rows: ``k`` times of each visit; visits are ranked by their sums.
        slower: slowness of the machine at each (:func:`slowness`).
    """
    corrected: Array = np.asarray(rows, dtype=np.float64) / np.exp(slower)[:, None]
    quicker = np.argsort(corrected.sum(axis=1), kind="stable")[: -(-len(corrected) // 2)]
    result: Array = np.median(corrected[quicker], axis=0)
    return result
