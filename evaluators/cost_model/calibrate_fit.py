"""A processor's profile from models whose operators were timed within them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evaluators.cost_model.columns import Array, Columns, columns
from evaluators.cost_model.features import OperatorFeatures
from evaluators.cost_model.fit import OPERATOR_TERMS, WholeModel, fit_overheads, nonnegative_prices
from evaluators.cost_model.kernels import KernelModel, Tile, term
from evaluators.cost_model.process import Process, fit_process, together
from evaluators.cost_model.profile import ProcessorProfile
from search_spaces.errors import ProfileError

MEASURED = 0.04
"""Standard deviation of one operator's time, relative; short ones are known to half a microsecond."""
_CLOCK_S = 5e-7

_TILES = tuple(Tile(p, c, 1) for p in (1, 6, 7, 8, 14) for c in (1, 16, 32, 64))
_TERMS: Mapping[str, tuple[str, ...]] = {"fully_connected": ("launch", "macs", "weight", "written")}
_TILED = frozenset({"conv", "winograd", "pointwise", "grouped"})
_LEAST_FINE, _LEAST = 6, 3
_MOST_POINTS = 1000
_RANGES = ("macs", "read", "weight", "written")

# Kernels that one implementation runs; the shape tells which.
_ONE_KERNEL: Mapping[str, str] = {"winograd": "conv"}


@dataclass(frozen=True, slots=True)
class TimedModel:
    """One model on one processor.

    Attributes:
        name, family: models of one family share what they are built of, and are kept out of a fit together.
        features: of its operators.
        operator_s: what each takes within the model, shape ``(n,)``; NaN where that is not known.
        whole_s: of the model as one stage; NaN where that was not measured.
    """

    name: str
    family: str
    features: tuple[OperatorFeatures, ...]
    operator_s: Array
    whole_s: float

    def at_their_pace(self) -> list[OperatorFeatures]:
        """Return the features, each with the time from one inference to the next."""
        pace_s = self.whole_s if np.isfinite(self.whole_s) else float(np.nansum(self.operator_s))
        return [replace(f, interval_s=pace_s) for f in self.features]

    @property
    def whole(self) -> WholeModel:
        """The model without its operators' times."""
        return WholeModel(self.name, self.family, self.features, self.whole_s)


def fit_processor(
    models: Sequence[TimedModel],
    tuned: Mapping[str, KernelModel] | None = None,
    *,
    noise: float = MEASURED,
    tune: bool = True,
) -> ProcessorProfile:
    """Fit a processor's kernels and its overheads.

    Args:
        tuned: kernel models of an earlier fit; their tiles and length scales are used again, which is quicker.
        noise: standard deviation of one operator's time.
        tune: whether to look for the likeliest length scales.

    Raises:
        ProfileError: there are too few operators or models, or a time is no time.
    """
    features = [f for m in models for f in m.at_their_pace()]
    seconds = np.concatenate([m.operator_s for m in models])
    bad = np.flatnonzero(np.isinf(seconds) | (seconds <= 0))
    if bad.size:
        raise ProfileError(f"an operator to fit has the time {seconds[bad[0]]}", "times are positive seconds")
    kernels: dict[str, KernelModel] = {}
    for key, where in _groups(features, seconds).items():
        picked = [features[i] for i in where]
        like = (tuned or {}).get(key)
        # The coarse model of kernels that have fine ones only stands in for kinds that were not timed.
        stand_in = "/" not in key and any(f.fine != f.key for f in picked)
        kernels[key] = _fit_kernel(picked, seconds[where], like, noise, tune=tune and not stand_in)
    for twin, key in _ONE_KERNEL.items():
        if key in kernels:
            kernels[twin] = kernels[key]
    if not kernels:
        raise ProfileError("no kind of operator was timed often enough to fit", f"time {_LEAST} or more of a kind")
    return _with_overheads(kernels, models)


def _groups(features: Sequence[OperatorFeatures], seconds: Array) -> dict[str, list[int]]:
    """Return the operators of each kernel, coarse and fine, that were timed."""
    found: dict[str, list[int]] = {}
    for index, feature in enumerate(features):
        if feature.free or np.isnan(seconds[index]):
            continue
        key = _ONE_KERNEL.get(feature.kernel, feature.kernel) + feature.key.removeprefix(feature.kernel)
        found.setdefault(key, []).append(index)
        if feature.fine != feature.key:
            found.setdefault(feature.fine, []).append(index)
    return {key: where for key, where in found.items() if len(where) >= (_LEAST_FINE if "/" in key else _LEAST)}


def _fit_kernel(
    features: Sequence[OperatorFeatures], seconds: Array, like: KernelModel | None, noise: float, *, tune: bool
) -> KernelModel:
    rows = columns(features)
    kernel = features[0].kernel
    terms = _TERMS.get(kernel, OPERATOR_TERMS[kernel])
    choice = (like.tile,) if like else _TILES if kernel in _TILED else (Tile(),)
    best, least = None, np.inf
    for tile in choice:
        table = np.stack([term(name, rows, tile) for name in terms], axis=1)
        prices = _prices(table, seconds)
        loss = float(np.mean(np.log(table @ prices / seconds) ** 2))
        if loss < least:
            best, least = (tile, {n: float(p) for n, p in zip(terms, prices, strict=True) if p > 0}), loss
    if best is None:
        raise ProfileError(f"no terms fit the {kernel} operators; their times are no numbers")
    tile, named = best
    ranges = {name: (float(getattr(rows, name).min()), float(getattr(rows, name).max())) for name in _RANGES}
    model = KernelModel(named, tile, ranges=ranges, samples=len(seconds))
    residual = np.log(seconds / np.maximum(model.base_s(rows), 1e-9))
    keys = [tuple(row) for row in _table(rows)]
    first, mean, deviation = together(keys, residual, noise)
    clock = _CLOCK_S / seconds[first]
    deviation = np.hypot(deviation, np.minimum(clock, 0.5))
    chosen = _spread_out(len(first))
    process = like.correction if like and isinstance(like.correction, Process) else None
    fitted = fit_process(rows[np.array(first)[chosen]], mean[chosen], deviation[chosen], process, tune=tune)
    model = replace(model, correction=fitted)
    left = np.log(seconds / np.maximum(model.predict(rows)[0], 1e-12))
    return replace(model, sigma=round(float(1.4826 * np.median(np.abs(left)) + 0.01), 4))


def _prices(table: Array, seconds: Array) -> Array:
    """Return positive prices that come nearest to the logarithms of times: what is left over is learnt as a factor."""
    from scipy.optimize import least_squares

    start = nonnegative_prices(table, seconds)
    share = (table / seconds[:, None]).mean(axis=0)
    least = 0.01 / np.maximum(share, 1e-30)  # a hundredth of the usual time
    used = table.any(axis=0)

    def residual(theta: Array) -> Array:
        result: Array = np.log(table[:, used] @ np.exp(theta) / seconds)
        return result

    first = np.log(np.maximum(start, least)[used])
    found = least_squares(residual, first, bounds=(first - 8.0, first + 4.0), max_nfev=60)
    prices = np.zeros(table.shape[1])
    prices[used] = np.exp(found.x)
    return prices


def _table(rows: Columns) -> Array:
    return np.stack([getattr(rows, name) for name in Columns.__slots__], axis=1)


def _spread_out(count: int) -> list[int]:
    """Return which of many shapes to learn from: all, or an even share of them."""
    if count <= _MOST_POINTS:
        return list(range(count))
    return [int(i) for i in np.linspace(0, count - 1, _MOST_POINTS)]


def _with_overheads(kernels: Mapping[str, KernelModel], models: Sequence[TimedModel]) -> ProcessorProfile:
    """Return the processor with what whole models take beside their kernels."""
    bare = ProcessorProfile(kernels)
    wholes = [m for m in models if np.isfinite(m.whole_s) and not np.isnan(_sum_s(m))]
    if len(wholes) < _LEAST:
        return bare
    return fit_overheads(kernels, [m.whole for m in wholes], [_sum_s(m) for m in wholes])


def _sum_s(model: TimedModel) -> float:
    """Return the time of all operators that are not free; NaN where one is not known."""
    return float(sum(s for f, s in zip(model.features, model.operator_s, strict=True) if not f.free))
