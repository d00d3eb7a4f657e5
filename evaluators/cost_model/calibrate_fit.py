"""A processor's profile from models whose operators were timed within them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from evaluators.cost_model.columns import Array, Columns, columns
from evaluators.cost_model.features import OperatorFeatures
from evaluators.cost_model.fit import OPERATOR_TERMS, fit_overheads, nonnegative_prices
from evaluators.cost_model.kernels import KernelModel, Tile, term
from evaluators.cost_model.process import Process, fit_process, shape_features, together
from evaluators.cost_model.profile import ProcessorProfile
from evaluators.cost_model.recent import sway
from evaluators.cost_model.timed_model import TimedModel
from evaluators.cost_model.waiting import awake, waited_s
from search_spaces.errors import ProfileError

MEASURED = 0.04
"""Standard deviation of one operator's time, relative; short ones are known to half a microsecond."""
_CLOCK_S = 5e-7

_TILES = tuple(
    Tile(pixels, channels, narrow=narrow)
    for pixels in (1, 6, 7, 8, 14)
    for channels, narrow in ((1, 0), (16, 0), (32, 0), (32, 16), (64, 0), (64, 16))
)
_NEAR_S = (0.0, 5e-4, 1e-3, 1.5e-3, 2e-3, 2.7e-3, 3.5e-3, 4.5e-3, 6e-3, 1e-2, 2e-2)
_CACHE_BYTES = (0.0, 5e5, 1e6, 2e6, 4e6, 1.6e7)
_SHRUNK, _MOST_SWAYED = 0.1, 0.5
_FIRST = Tile(near_s=3.3e-3, cache_bytes=2e6)

_BEYOND = ("read_beyond", "written_beyond")
_MATRIX = (
    *("launch", "macs", "narrow", "steps", "patches", "read", "written", *_BEYOND, "ragged"),
    *("far_weight", "near_weight", "far_pointers", "near_pointers"),
)
_TERMS: Mapping[str, tuple[str, ...]] = {
    **{kernel: (*terms, *_BEYOND) for kernel, terms in OPERATOR_TERMS.items()},
    **dict.fromkeys(("conv", "pointwise", "transpose_conv"), _MATRIX),
    "concat": ("inputs", "rows", "read", *_BEYOND),
    "elementwise": (*OPERATOR_TERMS["elementwise"], "rows", *_BEYOND),
    "fully_connected": ("launch", "macs", "far_weight", "near_weight", "read", "written"),
}
_TILED = frozenset({"conv", "pointwise"})
_LEAST, _LEAST_SHAPES = 3, 6
_MOST_POINTS = 1000
_RANGES = ("macs", "read", "weight", "written")

# Kernels that one implementation runs: a product of matrices, or one that finds its rows by pointers.
_ONE_KERNEL: Mapping[str, str] = {
    "winograd": "conv",
    "grouped": "conv",
    "pointwise/strided": "conv",
    "fully_connected/rows": "pointwise",
}

# Kernels that do the same work: where few shapes of the one were timed, the other, of which there are many, tells more.
_SAME_WORK: Mapping[str, tuple[str, ...]] = {"matmul": ("pointwise", "fully_connected")}


def fit_processor(
    models: Sequence[TimedModel],
    tuned: Mapping[str, KernelModel] | None = None,
    *,
    noise: float = MEASURED,
    tune: bool = True,
    invocation_s: float = 0.0,
) -> ProcessorProfile:
    """Fit a processor's kernels and its overheads.

    Args:
        tuned: kernel models of an earlier fit; their tiles and length scales are used again, which is quicker.
        noise: standard deviation of one operator's time.
        tune: whether to look for the likeliest length scales.
        invocation_s: what a stage is known to cost beside its operators, at least.

    Raises:
        ProfileError: there are too few operators or models, or a time is no time.
    """
    _check_times(models)
    wait_s = waited_s(models, invocation_s)
    models = [awake(m, wait_s) for m in models]
    features = [f for m in models for f in m.at_their_pace()]
    seconds = np.concatenate([m.operator_s for m in models])
    kernels: dict[str, KernelModel] = {}
    timed = {
        key: (columns([features[i] for i in where]), seconds[where])
        for key, where in _groups(features, seconds).items()
    }
    near_s = 0.0 if tuned else _near_s(timed)
    for key, (rows, took) in timed.items():
        if _stand_in(key, timed) is not None:
            continue
        like = (tuned or {}).get(key)
        base = _priced(rows, took, _terms(key), like.tile)[0] if like else _base(key, rows, took, near_s)
        # The coarse model of kernels that have fine ones only stands in for kinds that were not timed. What terms leave
        # over of kernels with tiles is too little to tell length scales by: usual ones predict unseen families better.
        usual = _kernel(key) in _TILED or any(fine.startswith(f"{key}/") for fine in timed)
        kernels[key] = _corrected(base, rows, took, like, noise, tune=tune and not usual)
    for key, (rows, took) in timed.items():
        if (other := _stand_in(key, timed)) is not None:
            kernels[key] = _standing_in(kernels[other], rows, took)
    for key in tuple(kernels):
        kernel, colon, dtype = key.partition(":")
        for twin in (twin for twin, one in _ONE_KERNEL.items() if one == kernel):
            coarse, slash, fine = twin.partition("/")
            kernels[f"{coarse}{colon}{dtype}{slash}{fine}"] = kernels[key]
    if not kernels:
        raise ProfileError("no kind of operator was timed often enough to fit", f"time {_LEAST} or more of a kind")
    return _with_overheads(kernels, models, invocation_s)


def _check_times(models: Sequence[TimedModel]) -> None:
    if not models:
        raise ProfileError("nothing was timed", "time some networks")
    for what, seconds in (
        ("an operator", np.concatenate([m.operator_s for m in models])),
        ("a model", np.array([m.whole_s for m in models])),
    ):
        bad = np.flatnonzero(np.isinf(seconds) | (seconds <= 0))
        if bad.size:
            raise ProfileError(f"{what} to fit has the time {seconds[bad[0]]}", "times are positive seconds")


def _groups(features: Sequence[OperatorFeatures], seconds: Array) -> dict[str, list[int]]:
    """Return the operators of each kernel, coarse and fine, that were timed."""
    found: dict[str, list[int]] = {}
    for index, feature in enumerate(features):
        if feature.free or np.isnan(seconds[index]):
            continue
        one = _implementation(feature)
        for key in {one} if one else {feature.key, feature.fine}:
            found.setdefault(key, []).append(index)
    kept: dict[str, list[int]] = {}
    for key, where in found.items():
        # One of few shapes is known to its coarser kernel, too, which tells more about others.
        shapes = {_shape(features[i]) for i in where}
        if len(shapes) >= _LEAST_SHAPES if "/" in key else len(where) >= _LEAST:
            kept[key] = where
    return kept


def _shape(feature: OperatorFeatures) -> tuple[int, ...]:
    return feature.macs, feature.read_bytes, feature.weight_bytes, feature.written_bytes


def _stand_in(key: str, timed: Mapping[str, tuple[Columns, Array]]) -> str | None:
    """Return the key of a kernel that prices this one, of which too few shapes were timed; None where it prices itself.

    Of few shapes prices cannot be told apart: a few microseconds may be the launch as well as the work.
    """
    rows = timed[key][0]
    if len({*zip(rows.macs, rows.read, rows.written, strict=True)}) >= _LEAST_SHAPES:
        return None
    kernel, colon, dtype = key.partition(":")
    return next((k for one in _SAME_WORK.get(kernel, ()) if (k := f"{one}{colon}{dtype}") in timed), None)


def _standing_in(other: KernelModel, rows: Columns, seconds: Array) -> KernelModel:
    """Return a kernel as the model of another one, with what was timed of it."""
    left = np.log(seconds / np.maximum(other.predict(rows)[0], 1e-12))
    ranges = {
        name: (min(low, float(getattr(rows, name).min())), max(high, float(getattr(rows, name).max())))
        for name, (low, high) in other.ranges.items()
    }
    return replace(other, ranges=ranges, samples=len(seconds), sigma=round(float(np.sqrt(np.mean(left**2))) + 0.01, 4))


def _implementation(feature: OperatorFeatures) -> str | None:
    """Return the key of the kernel that runs operators of several kinds, this one among them; None where none does."""
    coarse, slash, fine = feature.fine.partition("/")
    kernel, colon, dtype = coarse.partition(":")
    one = _ONE_KERNEL.get(f"{kernel}{slash}{fine}")
    return one and f"{one}{colon}{dtype}"


def _corrected(
    model: KernelModel, rows: Columns, seconds: Array, like: KernelModel | None, noise: float, *, tune: bool
) -> KernelModel:
    """Return a kernel that has prices with what its neighbours correct, and where it was fitted."""
    ranges = {name: (float(getattr(rows, name).min()), float(getattr(rows, name).max())) for name in _RANGES}
    model = replace(model, ranges=ranges, samples=len(seconds))
    residual = np.log(seconds / np.maximum(model.base_s(rows), 1e-9))
    keys = [tuple(row) for row in np.round(shape_features(rows), 1)]
    first, mean, deviation = together(keys, residual, noise)
    clock = _CLOCK_S / seconds[first]
    deviation = np.hypot(deviation, np.minimum(clock, 0.5))
    chosen = _spread_out(len(first))
    process = like.correction if like and isinstance(like.correction, Process) else None
    fitted = fit_process(rows[np.array(first)[chosen]], mean[chosen], deviation[chosen], process, tune=tune)
    model = replace(model, correction=fitted)
    left = np.log(seconds / np.maximum(model.predict(rows)[0], 1e-12))
    return replace(model, sigma=round(float(1.4826 * np.median(np.abs(left)) + 0.01), 4))


def _terms(key: str) -> tuple[str, ...]:
    return _TERMS[_kernel(key)]


def _kernel(key: str) -> str:
    return key.partition("/")[0].partition(":")[0]


def _near_s(timed: Mapping[str, tuple[Columns, Array]]) -> float:
    """Return how long weights stay near on a processor, whatever kernel reads them: what fits best over all of them."""
    loss = np.zeros(len(_NEAR_S))
    for key, (rows, seconds) in timed.items():
        if "far_weight" in _terms(key):
            tile = _cut(key, rows, seconds, _FIRST)
            kept = [_priced(rows, seconds, _terms(key), replace(tile, near_s=near_s))[1] for near_s in _NEAR_S]
            loss += len(seconds) * np.array(kept)
    return _NEAR_S[int(loss.argmin())]


def _cut(key: str, rows: Columns, seconds: Array, first: Tile) -> Tile:
    """Return the tile that fits best."""
    if _kernel(key) not in _TILED:
        return first
    tiles = [replace(tile, near_s=first.near_s, cache_bytes=first.cache_bytes) for tile in _TILES]
    return min(tiles, key=lambda tile: _priced(rows, seconds, _terms(key), tile)[1])


def _base(key: str, rows: Columns, seconds: Array, near_s: float) -> KernelModel:
    """Return prices on the tile and with the cache that fit best."""
    tile = _cut(key, rows, seconds, replace(_FIRST, near_s=near_s if "far_weight" in _terms(key) else 0.0))
    found = [_priced(rows, seconds, _terms(key), replace(tile, cache_bytes=nbytes)) for nbytes in _CACHE_BYTES]
    return min(found, key=lambda one: one[1])[0]


def _priced(rows: Columns, seconds: Array, terms: Sequence[str], tile: Tile) -> tuple[KernelModel, float]:
    """Return prices on a tile, and the mean of what they are off, as a logarithm."""
    table = np.stack([term(name, rows, tile) for name in terms], axis=1)
    prices, swayed = _prices(table, seconds, sway(rows.duty))
    model = KernelModel({n: float(p) for n, p in zip(terms, prices, strict=True) if p > 0}, tile, swayed=swayed)
    return model, float(np.mean(np.abs(np.log(np.maximum(model.base_s(rows), 1e-9) / seconds))))


def _prices(table: Array, seconds: Array, swayed: Array) -> tuple[Array, float]:
    """Return positive prices, and a sway, that come nearest to the logarithms of times.

    What is left over is learnt as a factor, so that it is factors that count here, too; those far off count less.
    """
    from scipy.optimize import least_squares

    used = table.any(axis=0)
    terms = table[:, used]
    start = nonnegative_prices(table, seconds)[used]
    least = 0.01 / np.maximum((terms / seconds[:, None]).mean(axis=0), 1e-30)  # a hundredth of the usual time

    def residual(theta: Array) -> Array:
        result: Array = np.log(terms @ np.exp(theta[:-1]) / seconds) + theta[-1] * swayed
        return np.append(result, _SHRUNK * theta[-1])

    def slope(theta: Array) -> Array:
        parts = terms * np.exp(theta[:-1])
        shares = np.column_stack([parts / parts.sum(axis=1)[:, None], swayed])
        return np.vstack([shares, [*np.zeros(terms.shape[1]), _SHRUNK]])

    first = np.log(np.maximum(start, least))
    low, high = np.append(first - 8.0, 0.0), np.append(first + 4.0, _MOST_SWAYED)
    found = least_squares(
        residual, np.append(first, 0.02), slope, bounds=(low, high), max_nfev=60, loss="soft_l1", f_scale=0.1
    )
    prices = np.zeros(table.shape[1])
    prices[used] = np.exp(found.x[:-1])
    return prices, round(float(found.x[-1]), 4)


def _spread_out(count: int) -> list[int]:
    """Return which of many shapes to learn from: all, or some of them drawn at random."""
    if count <= _MOST_POINTS:
        return list(range(count))
    return sorted(int(i) for i in np.random.default_rng(0).choice(count, _MOST_POINTS, replace=False))


def _with_overheads(
    kernels: Mapping[str, KernelModel], models: Sequence[TimedModel], invocation_s: float
) -> ProcessorProfile:
    """Return the processor with what whole models take beside their kernels, ``invocation_s`` of it known."""
    bare = ProcessorProfile(kernels, invocation_s=invocation_s)
    wholes = [m for m in models if np.isfinite(m.whole_s) and not np.isnan(m.sum_s)]
    if len(wholes) < _LEAST:
        return bare
    inside = [replace(m.whole, seconds=max(m.whole_s - invocation_s, m.whole_s / 2)) for m in wholes]
    fitted = fit_overheads(kernels, inside, [m.sum_s for m in wholes])
    return replace(fitted, invocation_s=fitted.invocation_s + invocation_s)
