"""Four indicators that may explain latency as a network gets wider (seed 004).

For each, the share of the variance of measured latencies that a straight line explains, and how wrong a line through
work alone, or through work and memory accesses, is about networks that it was not fitted to. Cache accesses are
estimates from sizes, not counts of hardware counters, and are named so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.cost_model.features import OperatorFeatures, operator_features
from search_spaces.core.errors import ProfileError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import parameter_total

_ROWS, _COLUMNS = 6, 16  # of a register tile, in which each loaded element is reused
_WORD = 4
LEAST_MODELS = 4
_RESAMPLES = 2000
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Indicators:
    """Indicators of a model's latency (seed 004).

    Attributes:
        flops: multiply-accumulates.
        parameters: weights, in elements.
        l1_accesses_estimate: elements loaded into and stored from registers, with register tiles of 6 by 16.
        memory_accesses_estimate: elements loaded from or stored beyond the cache: weights, and maps that do not fit.
    """

    flops: float
    parameters: float
    l1_accesses_estimate: float
    memory_accesses_estimate: float


def indicators(graph: Graph, cache_bytes: int) -> Indicators:
    """Return the indicators of a model on a processor whose last private cache holds ``cache_bytes``."""
    features = operator_features(graph)
    return Indicators(
        flops=float(sum(f.macs for f in features)),
        parameters=float(parameter_total(graph)),
        l1_accesses_estimate=sum(_l1(f) for f in features),
        memory_accesses_estimate=sum(_memory(f, cache_bytes) for f in features),
    )


def _l1(f: OperatorFeatures) -> float:
    if f.free:
        return 0.0
    moved = (f.read_bytes + f.written_bytes) / _WORD
    if f.kernel == "depthwise":
        return 2.0 * f.macs + moved
    return f.macs * (1.0 / _ROWS + 1.0 / _COLUMNS) + f.written_bytes / _WORD if f.macs else moved


def _memory(f: OperatorFeatures, cache_bytes: int) -> float:
    """Return the elements moved beyond the cache: all weights, and maps unless the maps just written still fit."""
    if f.free:
        return 0.0
    fits = f.read_bytes + f.written_bytes <= cache_bytes
    maps = (f.read_bytes - f.resident_bytes if fits else f.read_bytes + f.written_bytes) / _WORD
    return f.weight_bytes / _WORD + maps


def explained(found: Sequence[Indicators], latency_s: Sequence[float]) -> dict[str, float]:
    """Return the R² of a straight line through each indicator, and of FLOPs and memory accesses together.

    Raises:
        ProfileError: there are too few models, or a latency is not positive and finite.
    """
    tables, latency = _tables(found, latency_s)
    return {name: round(_r_squared(table, latency), 4) for name, table in tables.items()}


def left_out_errors(
    found: Sequence[Indicators], latency_s: Sequence[float], groups: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return how wrong lines through FLOPs, and through FLOPs and memory accesses, are about groups that they lack.

    A line has an intercept and no negative coefficient, and the squares of its relative errors are least.

    Args:
        found: the indicators of models.
        latency_s: their latencies.
        groups: of each model, as its family; a group's latencies are predicted from all the others'.

    Returns:
        For ``flops`` and ``flops_and_memory``, relative errors: their ``median`` and 90th percentile ``p90``, each
        with ``_low`` and ``_high`` of its 95 % interval (models drawn again); nothing where a group has no other.

    Raises:
        ProfileError: there are too few models, or a latency is not positive and finite.
    """
    from scipy.optimize import nnls

    tables, latency = _tables(found, latency_s)
    every = np.array(groups)
    if len(set(groups)) < 2:
        return {}
    again = np.random.default_rng(0).integers(0, len(latency), (_RESAMPLES, len(latency)))
    errors = {}
    for name in ("flops", "flops_and_memory"):
        design = _design(tables[name])
        wrong = np.empty(len(latency))
        for group in dict.fromkeys(groups):
            own = every == group
            line, _ = nnls(design[~own] / latency[~own, None], np.ones(int((~own).sum())))
            wrong[own] = np.abs(design[own] @ line / latency[own] - 1.0)
        errors[name] = _spread(wrong, again)
    return errors


def _spread(wrong: _Array, again: NDArray[np.int64]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, share in (("median", 0.5), ("p90", 0.9)):
        low, high = np.quantile(np.quantile(wrong[again], share, axis=1), (0.025, 0.975))
        found |= {name: float(np.quantile(wrong, share)), f"{name}_low": low, f"{name}_high": high}
    return {name: round(float(value), 4) for name, value in found.items()}


def _tables(found: Sequence[Indicators], latency_s: Sequence[float]) -> tuple[dict[str, _Array], _Array]:
    """Return the columns of each line, ``(models, indicators)``, and the latencies."""
    latency = np.asarray(latency_s, dtype=np.float64)
    if len(found) != len(latency) or len(found) < LEAST_MODELS:
        raise ProfileError(
            f"{len(found)} models with {len(latency)} latencies are too few", f"give {LEAST_MODELS} or more"
        )
    if not np.all(np.isfinite(latency) & (latency > 0)):
        raise ProfileError("a latency is not a positive number", "measure it again")
    rows: list[dict[str, Any]] = [asdict(one) for one in found]
    named = {name: np.array([[row[name]] for row in rows], dtype=np.float64) for name in rows[0]}
    named["flops_and_memory"] = np.hstack([named["flops"], named["memory_accesses_estimate"]])
    return named, latency


def _design(table: _Array) -> _Array:
    return np.hstack([table / table.max(axis=0), np.ones((len(table), 1))])


def _r_squared(table: _Array, values: _Array) -> float:
    design = _design(table)
    fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
    left = values - design @ fitted
    total = float(((values - values.mean()) ** 2).sum())
    return 1.0 - float((left**2).sum()) / total if total > 0 else 1.0
