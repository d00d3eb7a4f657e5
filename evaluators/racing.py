"""When to give up on a candidate that loses against the best one so far.

The samples of the candidate are bets against the claim "it is no slower than the incumbent". The capital is a test
martingale: under the claim it reaches 100 with a probability of at most 1 % however often one looks (Ville's
inequality), so the race may be looked at after every run. Each bet is limited, and the claim allows a share of
disturbed runs to be slow without bound, so a spike cannot decide; the idea is that of Wang and Ramdas, "Huber-robust
confidence sequences" (2023), with a fixed mixture of stakes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from evaluators.samples import RUN_NOISE, Samples

MARGIN = 0.02
"""How much slower still counts as no slower: equal work differs by 1.4 % (sd) from one block of runs to another, and
by 0.5 % from instance to instance, on a shared machine. No number of runs in one block would show that."""

SPIKE_SHARE = 0.05
"""The share of runs that something else on the machine may slow down, by any amount."""

PRUNE = ((2.0, 0.030), (1.3, 0.010))
"""A candidate is stopped after its first run (after two runs) if all took longer than this factor of the upper end of
the incumbent's interval and these seconds: neither a spike nor a cold start explains it. A first run costs a few
milliseconds more whatever the model (the median is 2.7 times the later ones for 3 ms, 1.06 times for 100 ms)."""

HOPELESS = 1.05
"""The factor for a candidate that a calibrated model finds far slower: what is broken off must not look the fastest."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """How many times longer first runs take than later ones, if that is known of other candidates.

    Attributes:
        usual: the median.
        most: nine of ten take no longer.
    """

    usual: float = math.inf
    most: float = math.inf


CLIP = 3.0
STAKES = (0.7, 2.0)
_PRIOR_RUNS = 8


def noise(samples: Samples) -> float:
    """Return the relative standard deviation of a run, robust against spikes and pooled with what is usual.

    The median absolute deviation of a few samples says little, so :data:`RUN_NOISE` counts as eight samples; the
    result is never below half of it.
    """
    logs = [math.log(value) for value in samples.values_s]
    middle = statistics.median(logs)
    own = 1.4826 * statistics.median(abs(x - middle) for x in logs)
    count = len(logs) - 1
    pooled = math.sqrt((count * own**2 + _PRIOR_RUNS * RUN_NOISE**2) / (count + _PRIOR_RUNS))
    return max(pooled, RUN_NOISE / 2)


def prune_limit_s(runs: int, incumbent: Samples, cold: float = math.inf, *, hopeless: bool = False) -> float:
    """Return the seconds above which the fastest of the first ``runs`` runs rules a candidate out (:data:`PRUNE`).

    Args:
        runs: how many were made, warm-up included; only the first two have a limit.
        incumbent: samples of the best candidate so far.
        cold: how many times longer nine of ten first runs take than the later ones, at most, if that is known of
            other candidates; a first run is then judged by it too.
        hopeless: whether a model says that the candidate is far slower anyway. It is then ruled out as soon as its
            first run has taken longer than the incumbent.
    """
    if runs > len(PRUNE):
        return math.inf
    factor, cold_s = PRUNE[runs - 1]
    slowest_s = incumbent.ci95[1]
    limit_s = factor * slowest_s + cold_s
    if runs == 1:
        limit_s = min(limit_s, PRUNE[1][0] * cold * slowest_s)
        if hopeless and math.isfinite(cold):
            limit_s = HOPELESS * slowest_s
    return limit_s


def pruned(runs_s: Sequence[float], incumbent: Samples, cold: float = math.inf, *, hopeless: bool = False) -> bool:
    """Return whether the first run or the first two, warm-up included, rule the candidate out; see above."""
    return min(runs_s) > prune_limit_s(len(runs_s), incumbent, cold, hopeless=hopeless)


def promising(first_s: float, incumbent: Samples, cold: ColdStart) -> bool:
    """Return whether a first run is fast enough for the candidate to be the new best, by more than noise."""
    return first_s / cold.usual < incumbent.median * (1.0 - noise(incumbent))


def slower(values_s: Sequence[float], incumbent: Samples, confidence: float = 0.99, margin: float = MARGIN) -> bool:
    """Return whether samples after the warm-up show a candidate to be slower than the incumbent.

    Args:
        values_s: all samples of the candidate so far, in seconds; one may ask after each.
        incumbent: samples of the best candidate so far.
        confidence: 1 minus the probability of ever saying so of a candidate that is within ``margin``.
        margin: how much slower, relative, still counts as no slower; 0 where both are measured in the same rounds.
    """
    scale = noise(incumbent)
    limit = math.log(incumbent.median * (1.0 + margin))
    score = sum(max(-CLIP, min(CLIP, (math.log(value) - limit) / scale)) for value in values_s)
    capital = sum(math.exp(stake * score - len(values_s) * _log_price(stake)) for stake in STAKES) / len(STAKES)
    return capital >= 1.0 / (1.0 - confidence)


@cache
def _log_price(stake: float) -> float:
    """Return log E exp(stake · clipped score) for a candidate at the limit with a share of spikes: a fair bet's price.

    For a standard normal Z clipped to ±c: E exp(sZ) = exp(s²/2) (Φ(c - s) - Φ(-c - s)) + 2 cosh(sc) Φ(-c).
    """
    inside = math.exp(stake**2 / 2) * (_normal_cdf(CLIP - stake) - _normal_cdf(-CLIP - stake))
    quiet = inside + 2 * math.cosh(stake * CLIP) * _normal_cdf(-CLIP)
    return math.log((1.0 - SPIKE_SHARE) * quiet + SPIKE_SHARE * math.exp(stake * CLIP))


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
