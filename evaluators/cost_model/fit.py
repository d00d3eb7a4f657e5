"""Fits a processor's profile from operators that were timed within models, and from the whole models.

Prices come from least squares on relative errors, none of them negative, with less weight on outliers. Whole models
show what operators cannot: the cost of a stage call, the dispatch of operators, and how much slower or faster
operators run together.

The first operator of an inference is corrected for a wait. Between inferences whose operators are timed, their times
are read, and the other threads of the pool fall asleep: the first operator waits for them, by 15 to 25 µs on two
threads. Consecutive inferences, which time a whole model, have no such wait. In small networks it is 3 to 5 % of the
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from evaluators.cost_model.correction import Process, fit_process, shape_features, together
from evaluators.cost_model.features import (
    KERNELS,
    Array,
    Columns,
    OperatorFeatures,
    columns,
    history_effect,
    with_matrix_shares,
)
from evaluators.cost_model.kernels import KernelModel, Tile, term
from evaluators.cost_model.profile import ProcessorProfile
from search_spaces.core.errors import ProfileError

_DENSE = ("launch", "macs", "patches", "written", "weight")
_MOVED = ("launch", "read", "written")

OPERATOR_TERMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(KERNELS, _MOVED),
    **dict.fromkeys(("conv", "winograd", "pointwise", "transpose_conv"), _DENSE),
    "depthwise": ("launch", "macs", "read", "written"),
    "grouped": ("launch", "macs", "read", "written"),
    "fully_connected": ("launch", "weight"),
    "matmul": ("launch", "macs", "read", "written"),
    "concat": ("inputs", "read"),
    "pool": ("launch", "patches", "read", "written"),
}

_RANGES = ("macs", "read", "weight", "written")
USUAL_ERROR = 0.05  # rows with larger errors count less
REWEIGHTED = 8  # times, each of which lowers the weight of outliers
_CONVERGED = 60  # times, where few of the rows are far off by many times: networks shorter than a stage call
RIDGE = 1e-4  # weight of squared prices against the mean squared error, each term scaled to its usual share
_LEAST_OPERATORS = 3


@dataclass(frozen=True, slots=True)
class TimedModel:
    """Measured times of one model on one processor.

    Attributes:
        name, family: models of one family share their building blocks, and are kept out of a fit together.
        features: of its operators, as the processor runs them.
        whole_s: time of the model as one stage; NaN where it was not measured.
        operator_s: time of each operator within the model, shape ``(n,)``; NaN where it is not known; empty where
            operators were not timed.
    """

    name: str
    family: str
    features: tuple[OperatorFeatures, ...]
    whole_s: float
    operator_s: Array = field(default_factory=lambda: np.empty(0))

    def with_intervals(self) -> list[OperatorFeatures]:
        """Return the features, each with ``interval_s`` and ``matrix_share``."""
        interval_s = self.whole_s if np.isfinite(self.whole_s) else float(np.nansum(self.operator_s))
        return with_matrix_shares([replace(f, interval_s=interval_s) for f in self.features], self.operator_s)

    @property
    def sum_s(self) -> float:
        """The time of all operators that are not free (s); NaN where one is not known."""
        return float(sum(s for f, s in zip(self.features, self.operator_s, strict=True) if not f.free))


def fit_overheads(
    kernels: Mapping[str, KernelModel], models: Sequence[TimedModel], operator_s: Sequence[float]
) -> ProcessorProfile:
    """Return a processor whose kernels are fitted already, with overheads fitted from whole models.

    ``time = invocation + dispatch * operators + scale * sum(kernels)``; the scale is multiplied into the prices.

    Args:
        operator_s: the measured sum of each model's operators.
    """
    times = np.array([m.whole_s for m in models])
    counts = np.array([float(sum(not f.free for f in m.features)) for m in models])
    table = np.stack([np.ones_like(times), counts, np.asarray(operator_s)], axis=1)
    invocation, dispatch, scale = nonnegative_prices(table, times, rounds=_CONVERGED)
    scaled = {
        key: replace(model, prices={name: price * float(scale) for name, price in model.prices.items()})
        for key, model in kernels.items()
    }
    return ProcessorProfile(kernels=scaled, dispatch_s=float(dispatch), invocation_s=float(invocation))


def errors_of(predicted: npt.ArrayLike, measured: npt.ArrayLike) -> dict[str, float]:
    """Return the errors of predictions, relative to the measured values.

    Returns:
        ``median`` and ``p90`` of the absolute error, the shares ``within_5`` and ``within_10`` per cent, the ``mean``
        error with its sign, ``kendall`` (rank correlation; 1 where all are equal), and ``cases``.
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
        "kendall": kendalltau(p, m).statistic if len({*p.tolist()}) > 1 < len({*m.tolist()}) else 1.0,
        "cases": len(p),
    }
    return {name: round(float(value), 4) for name, value in values.items()}


def nonnegative_prices(table: Array, seconds: Array, rounds: int = REWEIGHTED) -> Array:
    """Return prices ``p >= 0`` so that ``table @ p`` is near ``seconds`` in relative terms.

    Args:
        table: terms, shape ``(n, k)``.
        rounds: how often the weight of outliers is lowered.
    """
    from scipy.optimize import nnls

    relative = table / seconds[:, None]
    usual = np.sqrt((relative**2).mean(axis=0))
    relative = relative / np.where(usual > 0, usual, 1.0)
    shrink, nothing = np.sqrt(RIDGE) * np.eye(table.shape[1]), np.zeros(table.shape[1])
    weight = np.ones(len(seconds))
    prices = nothing
    for _ in range(rounds + 1):
        stacked = np.vstack([relative * weight[:, None], shrink])
        prices, _ = nnls(stacked, np.concatenate([weight, nothing]), maxiter=100 * table.shape[1])
        weight = 1.0 / np.sqrt(1.0 + ((relative @ prices - 1.0) / USUAL_ERROR) ** 2)
    result: Array = prices / np.where(usual > 0, usual, 1.0)
    return result


def ranges_of(rows: Columns) -> dict[str, tuple[float, float]]:
    """Return the least and the greatest value of the columns in which predictions are limited to a range."""
    return {name: (float(getattr(rows, name).min()), float(getattr(rows, name).max())) for name in _RANGES}


_LEAST_MODELS = 12
_UNIT_S = 1e-5
_MOST_S = 1e-3
_SCALES = 0.9, 1.1
_USUAL = 0.01  # usual deviation of a model's time from the sum of its operators'; larger ones count less


def waited_s(models: Sequence[TimedModel], invocation_s: float = 0.0) -> float:
    """Return by how much timing operators delayed the first operator of a model (s), not negative.

    It is the value for which ``whole = invocation + scale * sum - waited`` fits best over models that were timed both
    ways; 0 where there are too few.
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
    """Return a model without the wait of its first operator, which keeps at least a quarter of its time.

    The first operator is the first that took as long as the wait: a shorter one ran on one core and did not wait.
    """
    took = ((i, s) for i, (f, s) in enumerate(zip(model.features, model.operator_s, strict=True)) if not f.free)
    first = next((i for i, s in took if s >= waited_s), None)
    if first is None or waited_s <= 0:
        return model
    operator_s = model.operator_s.copy()
    operator_s[first] = np.maximum(operator_s[first] - waited_s, operator_s[first] / 4)
    return replace(model, operator_s=operator_s)


MEASURED = 0.04
"""Relative standard deviation of one operator's time; short times are known to half a microsecond."""
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
    **dict.fromkeys(("conv", "pointwise", "transpose_conv"), (*_MATRIX, "far_launch")),
    "depthwise": (*OPERATOR_TERMS["depthwise"], *_BEYOND, "far_launch"),
    "concat": ("inputs", "rows", "read", *_BEYOND),
    "elementwise": (*OPERATOR_TERMS["elementwise"], "rows", *_BEYOND),
    "fully_connected": ("launch", "macs", "far_weight", "near_weight", "read", "written", "far_launch"),
}
_TILED = frozenset({"conv", "pointwise"})
_LEAST_SHAPES = 6
_MOST_POINTS = 1000

# Operators that one implementation runs: a matrix product, or a convolution that finds its rows by pointers.
_ONE_KERNEL: Mapping[str, str] = {
    "winograd": "conv",
    "grouped": "conv",
    "pointwise/strided": "conv",
    "fully_connected/rows": "pointwise",
}

# Kernels that do the same work: where few shapes of one were timed, the many shapes of another predict better.
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
        tuned: kernel models of an earlier fit, whose tiles and noise are used again, which is faster.
        noise: standard deviation of one operator's time.
        tune: whether to search for the best noise.
        invocation_s: known lower bound of the cost of a stage call.

    Raises:
        ProfileError: there are too few operators or models, or a time is not positive and finite.
    """
    _check_timed(models)
    wait_s = waited_s(models, invocation_s)
    models = [awake(m, wait_s) for m in models]
    features = [f for m in models for f in m.with_intervals()]
    seconds = np.concatenate([m.operator_s for m in models])
    networks = np.repeat(np.arange(len(models)), [len(m.features) for m in models])
    kernels: dict[str, KernelModel] = {}
    groups = _groups(features, seconds)
    timed = {key: (columns([features[i] for i in where]), seconds[where]) for key, where in groups.items()}
    near_s = 0.0 if tuned else _near_s(timed)
    for key, (rows, took) in timed.items():
        if _stand_in(key, timed) is not None:
            continue
        like = (tuned or {}).get(key)
        base = _priced(rows, took, _terms(key), like.tile)[0] if like else _base(key, rows, took, near_s)
        kernels[key] = _corrected(base, rows, took, networks[groups[key]], like, noise, tune=tune)
    for key, (rows, took) in timed.items():
        if (other := _stand_in(key, timed)) is not None:
            kernels[key] = _standing_in(kernels[other], rows, took)
    for key in tuple(kernels):
        kernel, colon, dtype = key.partition(":")
        for twin in (twin for twin, one in _ONE_KERNEL.items() if one == kernel):
            coarse, slash, fine = twin.partition("/")
            kernels[f"{coarse}{colon}{dtype}{slash}{fine}"] = kernels[key]
    if not kernels:
        raise ProfileError(
            "no kind of operator was timed often enough to fit", f"time {_LEAST_OPERATORS} or more of a kind"
        )
    return _with_overheads(kernels, models, invocation_s)


def _check_timed(models: Sequence[TimedModel]) -> None:
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
    """Return the timed operators of each kernel, coarse and fine."""
    found: dict[str, list[int]] = {}
    for index, feature in enumerate(features):
        if feature.free or np.isnan(seconds[index]):
            continue
        one = _implementation(feature)
        for key in {one} if one else {feature.key, feature.fine}:
            found.setdefault(key, []).append(index)
    kept: dict[str, list[int]] = {}
    for key, where in found.items():
        # A fine kernel with few shapes is left to its coarser kernel, which predicts other shapes better.
        shapes = {(f.macs, f.read_bytes, f.weight_bytes, f.written_bytes) for f in (features[i] for i in where)}
        if len(shapes) >= _LEAST_SHAPES if "/" in key else len(where) >= _LEAST_OPERATORS:
            kept[key] = where
    return kept


def _stand_in(key: str, timed: Mapping[str, tuple[Columns, Array]]) -> str | None:
    """Return the key of another kernel whose model replaces this one's, because few shapes were timed; else None.

    With few shapes prices cannot be separated: a few microseconds may be the launch as well as the work.
    """
    rows = timed[key][0]
    if len({*zip(rows.macs, rows.read, rows.written, strict=True)}) >= _LEAST_SHAPES:
        return None
    kernel, colon, dtype = key.partition(":")
    return next((k for one in _SAME_WORK.get(kernel, ()) if (k := f"{one}{colon}{dtype}") in timed), None)


def _standing_in(other: KernelModel, rows: Columns, seconds: Array) -> KernelModel:
    """Return the model of another kernel, with the ranges and the deviation of this kernel's timings."""
    left = np.log(seconds / np.maximum(other.predict(rows)[0], 1e-12))
    ranges = {
        name: (min(low, float(getattr(rows, name).min())), max(high, float(getattr(rows, name).max())))
        for name, (low, high) in other.ranges.items()
    }
    return replace(other, ranges=ranges, samples=len(seconds), sigma=round(float(np.sqrt(np.mean(left**2))) + 0.01, 4))


def _implementation(feature: OperatorFeatures) -> str | None:
    """Return the key of the shared kernel that runs this operator; None where its kind has a kernel of its own."""
    coarse, slash, fine = feature.fine.partition("/")
    kernel, colon, dtype = coarse.partition(":")
    one = _ONE_KERNEL.get(f"{kernel}{slash}{fine}")
    return one and f"{one}{colon}{dtype}"


def _corrected(
    model: KernelModel,
    rows: Columns,
    seconds: Array,
    networks: npt.NDArray[np.int64],
    like: KernelModel | None,
    noise: float,
    *,
    tune: bool,
) -> KernelModel:
    """Return a priced kernel with its correction, ranges and deviation."""
    model = replace(model, ranges=ranges_of(rows), samples=len(seconds))
    residual = np.log(seconds / np.maximum(model.base_s(rows), 1e-9))
    keys = [tuple(row) for row in np.round(shape_features(rows), 1)]
    first, mean, deviation = together(keys, residual, noise)
    clock = _CLOCK_S / seconds[first]
    deviation = np.hypot(deviation, np.minimum(clock, 0.5))
    chosen = np.arange(len(first))
    if len(first) > _MOST_POINTS:
        chosen = np.sort(np.random.default_rng(0).choice(len(first), _MOST_POINTS, replace=False))
    process = like.correction if like and isinstance(like.correction, Process) else None
    at = np.array(first)[chosen]
    fitted = fit_process(rows[at], mean[chosen], deviation[chosen], networks[at], seconds[at], process, tune=tune)
    model = replace(model, correction=fitted)
    left = np.log(seconds / np.maximum(model.predict(rows)[0], 1e-12))
    return replace(model, sigma=round(float(1.4826 * np.median(np.abs(left)) + 0.01), 4))


def _terms(key: str) -> tuple[str, ...]:
    return _TERMS[_kernel(key)]


def _kernel(key: str) -> str:
    return key.partition("/")[0].partition(":")[0]


def _near_s(timed: Mapping[str, tuple[Columns, Array]]) -> float:
    """Return how long weights stay in near caches (s), for all of a processor: what fits kernels with weights best."""
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
    tile = _cut(key, rows, seconds, replace(_FIRST, near_s=near_s if "far_launch" in _terms(key) else 0.0))
    found = [_priced(rows, seconds, _terms(key), replace(tile, cache_bytes=nbytes)) for nbytes in _CACHE_BYTES]
    return min(found, key=lambda one: one[1])[0]


def _priced(rows: Columns, seconds: Array, terms: Sequence[str], tile: Tile) -> tuple[KernelModel, float]:
    """Return a kernel with prices for a tile, and its mean absolute error, as a logarithm."""
    table = np.stack([term(name, rows, tile) for name in terms], axis=1)
    prices, history = _prices(table, seconds, history_effect(rows.matrix_share))
    model = KernelModel({n: float(p) for n, p in zip(terms, prices, strict=True) if p > 0}, tile, history=history)
    return model, float(np.mean(np.abs(np.log(np.maximum(model.base_s(rows), 1e-9) / seconds))))


def _prices(table: Array, seconds: Array, history: Array) -> tuple[Array, float]:
    """Return positive prices, and a history effect, that fit the logarithms of times.

    The residual is learnt as a factor, so factors count here, too; outliers count less.
    """
    from scipy.optimize import least_squares

    used = table.any(axis=0)
    terms = table[:, used]
    start = nonnegative_prices(table, seconds)[used]
    least = 0.01 / np.maximum((terms / seconds[:, None]).mean(axis=0), 1e-30)  # so that the term is 1 % of the time

    def residual(theta: Array) -> Array:
        result: Array = np.log(terms @ np.exp(theta[:-1]) / seconds) + theta[-1] * history
        return np.append(result, _SHRUNK * theta[-1])

    def slope(theta: Array) -> Array:
        parts = terms * np.exp(theta[:-1])
        shares = np.column_stack([parts / parts.sum(axis=1)[:, None], history])
        return np.vstack([shares, [*np.zeros(terms.shape[1]), _SHRUNK]])

    first = np.log(np.maximum(start, least))
    low, high = np.append(first - 8.0, 0.0), np.append(first + 4.0, _MOST_SWAYED)
    found = least_squares(
        residual, np.append(first, 0.02), slope, bounds=(low, high), max_nfev=60, loss="soft_l1", f_scale=0.1
    )
    prices = np.zeros(table.shape[1])
    prices[used] = np.exp(found.x[:-1])
    return prices, round(float(found.x[-1]), 4)


def _with_overheads(
    kernels: Mapping[str, KernelModel], models: Sequence[TimedModel], invocation_s: float
) -> ProcessorProfile:
    """Return the processor with overheads from whole models, at least ``invocation_s`` for a stage call."""
    bare = ProcessorProfile(kernels, invocation_s=invocation_s)
    wholes = [m for m in models if np.isfinite(m.whole_s) and not np.isnan(m.sum_s)]
    if len(wholes) < _LEAST_OPERATORS:
        return bare
    inside = [replace(m, whole_s=max(m.whole_s - invocation_s, m.whole_s / 2)) for m in wholes]
    fitted = fit_overheads(kernels, inside, [m.sum_s for m in wholes])
    return replace(fitted, invocation_s=fitted.invocation_s + invocation_s)
