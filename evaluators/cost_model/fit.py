"""Fits a processor's kernels from operators that were timed one by one, from whole models, or from both.

Prices come from least squares on relative errors, none of them negative, in which rows far off count less. Whole models
say what operators cannot: what entering the runtime costs, what handing over between operators costs, and how much
slower or faster operators run in company.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from evaluators.cost_model.columns import Array, Columns, columns
from evaluators.cost_model.correction import fit_correction
from evaluators.cost_model.features import KERNELS, OperatorFeatures
from evaluators.cost_model.kernels import KernelModel, Tile, term
from evaluators.cost_model.profile import ProcessorProfile
from search_spaces.errors import ProfileError

_DENSE = ("launch", "macs", "patches", "written", "weight")
_MOVED = ("launch", "read", "written")

OPERATOR_TERMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(KERNELS, _MOVED),
        **dict.fromkeys(("conv", "winograd", "pointwise", "transpose_conv"), _DENSE),
        "depthwise": ("launch", "macs", "read", "written"),
        "grouped": ("launch", "macs", "read", "written"),
        "fully_connected": ("launch", "weight"),
        "matmul": ("launch", "macs", "read", "written"),
        "concat": ("inputs", "read"),
        "pool": ("launch", "patches", "read", "written"),
    }
)

# Whole models cannot tell apart what always comes together: kernels of one group have one price for each term.
MODEL_GROUPS: Mapping[str, str] = MappingProxyType(
    {
        **{kernel: kernel for kernel in KERNELS},
        "winograd": "conv",
        "transpose_conv": "conv",
        "matmul": "fully_connected",
        **dict.fromkeys(("concat", "mean", "pool"), "moving"),
        **dict.fromkeys(("elementwise", "copy", "softmax", "other"), "mapping"),
    }
)
MODEL_TERMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("conv", "pointwise"), ("macs", "patches", "written", "weight")),
        "depthwise": ("macs", "read", "written"),
        "grouped": ("macs", "patches", "written"),
        "fully_connected": ("weight",),
        **dict.fromkeys(("moving", "mapping"), ("read", "written")),
    }
)

_RANGES = ("macs", "read", "weight", "written")
_USUAL_ERROR = 0.05  # rows farther off than this count less
_LEAST_OPERATORS = 3


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model that was timed end to end.

    Attributes:
        name: of the model.
        family: models of one architecture share it.
        features: of its operators, as the processor runs them.
        seconds: of one inference.
    """

    name: str
    family: str
    features: tuple[OperatorFeatures, ...]
    seconds: float


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
        terms: kernel → the terms that its time is made of.
        tiles: kernel → tiles to choose from by what fits best; whole operators where it is not listed.
        correct: whether to correct the sum of terms by what similar shapes took.
        folds: the stated ``sigma`` is that of shapes kept out of the fit, in so many parts; 0: of the fit itself.

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
    models: Sequence[WholeModel],
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
        key: KernelModel(priced[_group(key, groups)], sigma=sigma, ranges=_ranges(part), samples=len(part.macs))
        for key, part in _parts(features).items()
    }
    return ProcessorProfile(kernels=kernels, dispatch_s=float(prices[-2]), invocation_s=float(prices[-1]))


def fit_overheads(
    kernels: Mapping[str, KernelModel], models: Sequence[WholeModel], operator_s: Sequence[float] | None = None
) -> ProcessorProfile:
    """Return a processor whose kernels are known from operators and whose overheads from whole models.

    ``time = invocation + dispatch * operators + scale * sum(kernels)``; the scale becomes part of the kernels' prices.

    Args:
        operator_s: the measured sum of each model's operators; their prediction where left out.

    Raises:
        ProfileError: a time is not positive, or there are fewer than 3 models.
    """
    times = _times(models)
    if len(models) < _LEAST_OPERATORS:
        raise ProfileError(f"{len(models)} models are too few to tell overheads from", "time 3 or more")
    bare = ProcessorProfile(kernels=kernels)
    sums = np.asarray(operator_s) if operator_s is not None else np.array([sum_of_kernels(bare, m) for m in models])
    counts = np.array([float(sum(not f.free for f in m.features)) for m in models])
    invocation, dispatch, scale = nonnegative_prices(np.stack([np.ones_like(times), counts, sums], axis=1), times)
    scaled = {
        key: replace(model, prices={name: price * float(scale) for name, price in model.prices.items()})
        for key, model in kernels.items()
    }
    return ProcessorProfile(kernels=scaled, dispatch_s=float(dispatch), invocation_s=float(invocation))


def sum_of_kernels(processor: ProcessorProfile, model: WholeModel) -> float:
    """Return what the operators of a model take in their kernels, in seconds; kernels not seen take nothing."""
    return sum(
        float(processor.kernels[key].predict(part)[0].sum())
        for key, part in _parts(model.features).items()
        if key in processor.kernels
    )


Row = TypeVar("Row")


def cross_validated(
    rows: Sequence[Row], groups: Sequence[str], fit: Callable[[list[Row]], Any], predict: Callable[[Any, Row], float]
) -> Array:
    """Return a prediction for each row by a fit that has seen no row of its group; shape ``(n,)``."""
    found = np.full(len(rows), np.nan)
    for group in dict.fromkeys(groups):
        fitted = fit([row for row, of in zip(rows, groups, strict=True) if of != group])
        for index, row in enumerate(rows):
            if groups[index] == group:
                found[index] = predict(fitted, row)
    return found


def errors_of(predicted: npt.ArrayLike, measured: npt.ArrayLike) -> dict[str, float]:
    """Return how wrong predictions are, relative to what was measured.

    Returns:
        ``median`` and ``p90`` of the absolute error, the shares ``within_5`` and ``within_10`` per cent, the ``mean``
        error with its sign, ``kendall`` (rank correlation), and ``cases``.
    """
    p, m = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    from scipy.stats import kendalltau

    error = p / m - 1.0
    absolute = np.abs(error)
    values = {
        "median": np.median(absolute),
        "p90": np.percentile(absolute, 90),
        "within_5": np.mean(absolute <= 0.05),
        "within_10": np.mean(absolute <= 0.10),
        "mean": error.mean(),
        "kendall": kendalltau(p, m).statistic if len(p) > 1 else 1.0,
        "cases": len(p),
    }
    return {name: round(float(value), 4) for name, value in values.items()}


def nonnegative_prices(table: Array, seconds: Array, *, ridge: float = 1e-4, rounds: int = 8) -> Array:
    """Return prices ``p >= 0`` so that ``table @ p`` is near ``seconds`` in relative terms.

    Args:
        table: terms, shape ``(n, k)``.
        ridge: weight of the prices' squares against the mean squared error, each term scaled to its usual share.
        rounds: of reweighting, in which rows that are far off count less and less.
    """
    from scipy.optimize import nnls

    relative = table / seconds[:, None]
    usual = np.sqrt((relative**2).mean(axis=0))
    relative = relative / np.where(usual > 0, usual, 1.0)
    shrink, nothing = np.sqrt(ridge) * np.eye(table.shape[1]), np.zeros(table.shape[1])
    weight = np.ones(len(seconds))
    prices = nothing
    for _ in range(rounds + 1):
        stacked = np.vstack([relative * weight[:, None], shrink])
        prices, _ = nnls(stacked, np.concatenate([weight, nothing]), maxiter=100 * table.shape[1])
        weight = 1.0 / np.sqrt(1.0 + ((relative @ prices - 1.0) / _USUAL_ERROR) ** 2)
    result: Array = prices / np.where(usual > 0, usual, 1.0)
    return result


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
            best, least = (KernelModel(named, tile, ranges=_ranges(rows), samples=len(seconds)), residual), loss
    if best is None:
        raise ProfileError("no tile fits an operator; its times or its terms are no numbers")
    model, residual = best
    correction = fit_correction(rows, residual) if correct else None
    model = replace(model, correction=correction)
    left = np.log(seconds / np.maximum(model.predict(rows)[0], 1e-12))
    return replace(model, sigma=round(float(left.std()), 4))


def _sigma(rows: Columns, seconds: Array, terms: Sequence[str], tile: Tile, folds: int, *, correct: bool) -> float:
    """Return the deviation on operators kept out, alike shapes together; beyond 3 deviations counts as 3."""
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


def _ranges(rows: Columns) -> dict[str, tuple[float, float]]:
    return {name: (float(getattr(rows, name).min()), float(getattr(rows, name).max())) for name in _RANGES}


def _times(models: Sequence[WholeModel]) -> Array:
    times = np.array([m.seconds for m in models], dtype=np.float64)
    _check_times(times, len(models))
    return times


def _check_times(times: Array, count: int) -> None:
    if times.shape != (count,):
        raise ProfileError(f"{count} rows to fit have {times.size} times")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise ProfileError(f"row {int(bad[0])} to fit has the time {times[bad[0]]}", "times are positive seconds")
