"""Sampling of a candidate: warm-up, repetition until the median is known, and early stopping (racing).

Decisions depend on what the candidate reports alone (latencies, and the seconds of a run where these are others), never
on a clock, so replayed runs give the same decisions.

Racing is a sequential test of the hypothesis "the candidate is no slower than the incumbent". Samples are bets against
it; the capital is a test martingale, which under the hypothesis ever reaches 100 with a probability of at most 1 %
(Ville's inequality), so the test may be made after every run. Each bet is limited, and the hypothesis allows a share of
arbitrarily slow, disturbed runs, so a spike cannot decide. The idea is that of Wang and Ramdas, "Huber-robust
confidence sequences" (2023), with a fixed mixture of stakes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Candidate
from evaluators.measurement.disturbance import RunFilter
from evaluators.samples import RUN_NOISE, Measurement, Samples, Stopped
from evaluators.schedule import Timeline
from evaluators.workload.outcome import typical_figures
from search_spaces.core.errors import UnavailableError
from search_spaces.core.wording import plural

MARGIN = 0.02
"""Relative difference that counts as no slower: on a shared machine, equal work differs by 1.4 % (sd) between blocks
of runs and by 0.5 % between instances, which no number of runs in one block shows."""

CONFIDENCE = 0.99
"""One minus the probability of ever stopping a candidate as slower that is within :data:`MARGIN`."""

SPIKE_SHARE = 0.05
"""Share of runs that other load on the machine may slow down, by any amount."""

PRUNE = ((2.0, 0.030), (1.3, 0.010))
"""A candidate is stopped after its first run (after two runs) if all took longer than this factor of the upper end of
the incumbent's interval and these seconds: neither a spike nor a cold start explains that. A first run of any model
takes a few milliseconds more (in the median 2.7 times as long as later ones of 3 ms, 1.06 times as long for 100 ms)."""

PREDICTED_SLOW = 1.05
"""That factor for a candidate predicted to be far slower; above 1, as an interrupted run must not look the fastest."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Ratio of first runs to later ones, from other candidates; infinite where unknown.

    Attributes:
        usual: the median.
        most: the 90th percentile.
    """

    usual: float = math.inf
    most: float = math.inf


_FIRST_LOST = 0.1
"""Share of a first run without a core above which it decides nothing. On virtual machines, the host backs the memory
that a plan touches first, and tells that in ticks of 10 ms: half of all first runs of 200 ms lose a tick or two."""

CLIP = 3.0
STAKES = (0.7, 2.0)
_PRIOR_RUNS = 8


def noise(samples: Samples) -> float:
    """Return the relative standard deviation of a run, robust against spikes and pooled with :data:`RUN_NOISE`.

    The median absolute deviation of a few samples is inaccurate, so :data:`RUN_NOISE` counts as eight samples; the
    result is never below half of it.
    """
    logs = [math.log(value) for value in samples.values_s]
    middle = statistics.median(logs)
    own = 1.4826 * statistics.median(abs(x - middle) for x in logs)
    count = len(logs) - 1
    pooled = math.sqrt((count * own**2 + _PRIOR_RUNS * RUN_NOISE**2) / (count + _PRIOR_RUNS))
    return max(pooled, RUN_NOISE / 2)


def prune_limit_s(runs: int, incumbent: Samples, cold: float = math.inf, *, predicted_slow: bool = False) -> float:
    """Return the seconds above which the fastest of the first ``runs`` runs rules a candidate out (:data:`PRUNE`).

    Args:
        runs: how many were made, warm-up included; only the first two have a limit.
        incumbent: samples of the best candidate so far.
        cold: 90th percentile of the ratio of first runs to later ones, if it was measured on other candidates; it then
            also limits a first run.
        predicted_slow: whether the candidate is predicted to be far slower. If ``cold`` is known, the limit of its
            first run is then that of the incumbent times :data:`PREDICTED_SLOW`.
    """
    if runs > len(PRUNE):
        return math.inf
    factor, cold_s = PRUNE[runs - 1]
    slowest_s = incumbent.ci95[1]
    limit_s = factor * slowest_s + cold_s
    if runs == 1:
        limit_s = min(limit_s, PRUNE[1][0] * cold * slowest_s)
        if predicted_slow and math.isfinite(cold):
            limit_s = PREDICTED_SLOW * slowest_s
    return limit_s


def promising(first_s: float, incumbent: Samples, cold: ColdStart) -> bool:
    """Return whether a first run is fast enough for the candidate to be the new best, by more than noise."""
    return first_s / cold.usual < incumbent.median * (1.0 - noise(incumbent))


def slower(values_s: Sequence[float], incumbent: Samples) -> bool:
    """Return whether samples after the warm-up show a candidate to be slower than the incumbent.

    Args:
        values_s: all samples of the candidate so far, in seconds; the test may be made after each.
        incumbent: samples of the best candidate so far.
    """
    scale = noise(incumbent)
    limit = math.log(incumbent.median * (1.0 + MARGIN))
    score = sum(max(-CLIP, min(CLIP, (math.log(value) - limit) / scale)) for value in values_s)
    capital = sum(math.exp(stake * score - len(values_s) * _log_price(stake)) for stake in STAKES) / len(STAKES)
    return capital >= 1.0 / (1.0 - CONFIDENCE)


@cache
def _log_price(stake: float) -> float:
    """Return log E exp(stake · clipped score) for a candidate at the limit with spikes: the price of a fair bet.

    For a standard normal Z clipped to ±c: E exp(sZ) = exp(s²/2) (Φ(c - s) - Φ(-c - s)) + 2 cosh(sc) Φ(-c).
    """
    inside = math.exp(stake**2 / 2) * (_normal_cdf(CLIP - stake) - _normal_cdf(-CLIP - stake))
    quiet = inside + 2 * math.cosh(stake * CLIP) * _normal_cdf(-CLIP)
    return math.log((1.0 - SPIKE_SHARE) * quiet + SPIKE_SHARE * math.exp(stake * CLIP))


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


WARM_S = 0.030
"""A warm-up lasts at least this long, or ``warmup_max`` runs: small models stay slow for several runs."""

STOP_ABOVE = 2.0
"""A batch ends early after a run that takes this many times the upper end of the incumbent's interval."""

_UNKNOWN = ColdStart()


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How long one candidate is measured.

    Attributes:
        precision: stop when both ends of the 95 % interval of the median are within this share of it.
        max_s: stop when the runs (warm-up included) took this many seconds together, but not before ``min_runs``.
        min_runs, max_runs: bounds of the number of samples after the warm-up.
        warmup_max: maximum number of runs of the warm-up.
    """

    precision: float = 0.01
    max_s: float = 0.8
    min_runs: int = 5
    max_runs: int = 100
    warmup_max: int = 10


def measure(
    candidate: Candidate,
    policy: SamplingPolicy,
    incumbent: Samples | None = None,
    conditions: Callable[[], Mapping[str, Any]] = dict,
    cold: ColdStart = _UNKNOWN,
    *,
    predicted_slow: bool = False,
    single_run: bool = False,
    runs: RunFilter | None = None,
) -> Measurement:
    """Run a candidate until its median is known well enough, or until it has lost against the incumbent.

    The candidate is warm when it ran for :data:`WARM_S` and the last run was not clearly faster than the one before;
    these two are the first samples, but never the very first run. If the time is up before, the last
    ``policy.min_runs`` runs are the samples. A candidate that was fast twice runs once more even then. Outputs are not
    compared; :meth:`~evaluators.base.Candidate.verify` does.

    Args:
        candidate: a loaded plan.
        policy: limits of runs, time and precision.
        incumbent: samples of the best candidate so far; without it every candidate is measured in full.
        conditions: returns the conditions of the samples; called at the end.
        cold: ratio of first runs to later ones on other candidates.
        predicted_slow: as of :func:`prune_limit_s`.
        single_run: whether the first run may be the only one (a single-run probe): if a second would exceed
            ``policy.max_s``, ``cold`` is known, and the first is not promising. Many single runs find more than half as
            many pairs of runs: a first run, corrected by ``cold``, is no noisier than a later one.
        runs: makes the runs, and repeats those that waited for a core.

    Raises:
        UnavailableError: the candidate failed, or did not return a batch of latencies.
    """
    record = _Record(candidate, runs or RunFilter())
    if incumbent is not None:
        # A run above its limit is out of the race, so it may be interrupted there.
        record.limits_s = tuple(
            prune_limit_s(runs, incumbent, cold.most, predicted_slow=predicted_slow) for runs in (1, 2)
        )
        record.stop_above_s = max(record.limits_s[1], incumbent.ci95[1] * STOP_ABOVE)
    promised = False
    record.run(1)
    stopped = _lost(record)
    if single_run and incumbent is not None and stopped is None and math.isfinite(cold.usual) and not record.disturbed:
        promised = promising(record.values_s[0] * (1.0 - record.first_lost), incumbent, cold)
        if not promised and 2.0 * record.took_s[0] > policy.max_s:
            stopped = "single-run"
    if stopped is None:
        stopped = _warm_up(record, policy, incumbent)
    while stopped is None:
        stopped = _verdict(record, policy, incumbent)
        if stopped is None:
            record.run(_next_runs(record, policy))
    once = stopped == "limit" and len(record.values_s) == record.warm + 1
    if promised and once and incumbent and record.values_s[-1] < incumbent.median * (1.0 - noise(incumbent)):
        record.run(1)  # the best so far must have two samples to be the incumbent, else every equal plan runs twice
    samples = Samples(tuple(record.values_s[record.warm :]), {**conditions(), **record.memory()})
    return Measurement(
        latency_s=samples,
        stage_s=record.stages_s(),
        warmup_s=tuple(record.values_s[: record.warm]),
        stopped=stopped,
        timeline=record.timeline,
        cold=cold.usual if stopped == "single-run" else 1.0,
        promised=promised,
        outcome=typical_figures(record.outcomes),
    )


@dataclass(slots=True)
class _Record:
    """All runs of a candidate so far; the first ``warm`` of them are the warm-up.

    A run may take longer (``took_s``) than its figure (``values_s``): of several models, of a stream, of a percentile.
    """

    candidate: Candidate
    filter: RunFilter
    limits_s: tuple[float, ...] = ()
    stop_above_s: float = math.inf
    values_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    stage_s: list[NDArray[np.float64]] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    timeline: Timeline | None = None
    outcomes: list[Mapping[str, Any]] = field(default_factory=list)
    warm: int = 0
    first_lost: float = 0.0  # share of the first run without a core

    @property
    def disturbed(self) -> bool:
        """Whether the first run lost more than first runs differ by themselves."""
        return self.first_lost > _FIRST_LOST

    def run(self, runs: int) -> None:
        done_before = len(self.values_s)
        limit_s = self.limits_s[done_before] if done_before < len(self.limits_s) else self.stop_above_s
        faults_before = self.filter.total.page_faults
        if done_before:
            batch, _ = self.filter.run(lambda: self.candidate.run(runs, limit_s))
        else:  # a cold start cannot be repeated
            batch, self.first_lost = self.filter.once(lambda: self.candidate.run(runs, limit_s))
        done = len(batch.latency_s)
        stages = self.stage_s[0].shape[1:] if self.stage_s else batch.stage_s.shape[1:2]
        if not 1 <= done <= runs or batch.stage_s.shape != (done, *stages) or batch.stage_s.ndim != 2:
            raise UnavailableError(
                f"evaluator returned {plural(done, 'latency')} and stage times of shape {batch.stage_s.shape} "
                f"for {plural(runs, 'run')}"
            )
        values_s = Samples(tuple(float(v) for v in batch.latency_s)).values_s
        self.values_s += values_s
        self.faults += [(self.filter.total.page_faults - faults_before) / done] * done
        self.took_s += values_s if batch.run_s is None else [batch.run_s] * done
        self.stage_s.append(batch.stage_s)
        self.timeline = batch.timeline
        if batch.outcome is not None:
            self.outcomes.append(batch.outcome.to_json())

    def memory(self) -> dict[str, float]:
        """Return how the runs used memory, as conditions."""
        return self.filter.memory(statistics.mean(self.faults[self.warm :]), self.filter.resident_nbytes)

    def stages_s(self) -> tuple[float, ...]:
        """Return the medians of the stages over complete runs, or over all where every run was interrupted."""
        runs = np.concatenate(self.stage_s)[self.warm :]
        whole = (runs > 0.0).all(axis=1)
        return tuple(float(s) for s in np.median(runs[whole] if whole.any() else runs, axis=0))


def _warm_up(record: _Record, policy: SamplingPolicy, incumbent: Samples | None) -> Stopped | None:
    """Run until the candidate is warm or out of the race; at least the last run remains a sample."""
    clearly = 1.0 - 2.0 * (RUN_NOISE if incumbent is None else noise(incumbent))
    while True:
        if lost := _lost(record):
            return lost
        runs = len(record.values_s)
        settled = runs >= 2 and record.values_s[-1] >= clearly * record.values_s[-2]
        if settled and math.fsum(record.took_s[:-1]) >= WARM_S:
            record.warm = max(1, runs - 2)
            return None
        if runs > policy.warmup_max:
            record.warm = policy.warmup_max
            return None
        if runs > policy.min_runs and math.fsum(record.took_s) >= policy.max_s:
            record.warm = runs - policy.min_runs  # the time is up before it is surely warm
            return None
        record.run(1)


def _lost(record: _Record) -> Stopped | None:
    """Return ``raced`` if all runs so far took longer than their limit."""
    runs = len(record.values_s)
    if record.disturbed and runs == 1:
        return None
    if runs <= len(record.limits_s) and min(record.values_s) > record.limits_s[runs - 1]:
        record.warm = runs - 1
        return "raced"
    return None


def _verdict(record: _Record, policy: SamplingPolicy, incumbent: Samples | None) -> Stopped | None:
    values = record.values_s[record.warm :]
    if incumbent is not None and slower(values, incumbent):
        return "raced"
    if len(values) < policy.min_runs:
        return None
    if Samples(tuple(values)).precision <= policy.precision:
        return "precision"
    if len(values) >= policy.max_runs or math.fsum(record.took_s) >= policy.max_s:
        return "limit"
    return None


def _next_runs(record: _Record, policy: SamplingPolicy) -> int:
    """Return how many runs to make before the next decision: one at first, later half as many as there are."""
    values = record.values_s[record.warm :]
    if len(values) < max(policy.min_runs, 6):
        return 1
    left_s = policy.max_s - math.fsum(record.took_s)
    affordable = math.ceil(left_s / (math.fsum(record.took_s[record.warm :]) / len(values)))
    return max(1, min(len(values) // 2, policy.max_runs - len(values), affordable))
