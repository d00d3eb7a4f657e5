"""The final comparison: loaded plans measured against each other until one is left or the rest are equal.

Two instances of one plan differ by a constant 0.4 to 0.65 % (memory placement), and a shared machine changes its speed
within seconds. So a final repeats on two levels: rounds of rebuilt instances, and in each round blocks in which every
plan has one short turn, in random order. Rounds are the independent observations, and only differences within a block
count. Runs that waited for a core are repeated; kernel counters decide which, never the latency. Plans that load an
accelerator and plans that leave it idle have separate blocks: its clock follows its load.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from evaluators.base import Batch, Candidate
from evaluators.measurement.disturbance import CALM, NOTHING, QUIET, Counters, Disturbance, RunFilter
from evaluators.samples import Samples
from evaluators.workload.outcome import Outcome, read_figures, typical_figures
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.wording import plural

Load = Callable[[], Candidate]
"""Builds a new instance of a plan at each call (:meth:`~evaluators.base.Session.load` with ``fresh``)."""

SETTLE_BELOW_S = 0.05
"""A turn of shorter runs begins with discarded runs, which restore caches and clocks; longer runs do so themselves."""

LEVELS = (QUIET, CALM, 0.10, math.inf)
"""Shares of a turn without a core up to which it counts. If too few turns are within a level, the next one is used, so
that every plan has figures on a machine that is always busy."""

_ALPHA = 0.025  # of the t interval of one pair: half, since it is looked at after each round
_EARLY_ALPHAS = (5, 0.005), (9, 0.01)  # below so many rounds: few may agree by chance, and a final ends when they do
_EARLY_ROUNDS = 5
_OUTLIER = 5.0  # rounds farther from the median than this many robust standard deviations are pulled in to that
ROUND_NOISE = 0.005
"""Relative standard deviation of a difference between rounds, assumed before there are enough rounds."""
_PRIOR_ROUNDS = 5  # weight, in rounds, of the other pairs' variance in that of one pair
_PRUNE = 0.5  # log: a plan whose fastest turn is slower by more than this leaves after its first round
_DECIDED = 0.25  # an interval of less than this share of the difference needs no more rounds
_SHORT_RUNS, _MOST_RUNS = 3, 200  # of a turn
_GAIN = 0.97  # discarded runs end when they gain less than this factor on the fastest ones before
_FORGETS = 1.01  # per turn: the machine may have been faster in a turn long ago
_SETTLED, _MOST_SETTLING_S = 1.03, 0.2  # ratio to its fastest turn so far; maximum in a turn
_LEADERS = 2  # the fastest and its closest rival
_RIVALS = 3  # of the recommended plan, in the time added for disturbances
_FOCUS, _KEPT_SHARE = 6, 0.5
"""If noise prevents eliminations, each round keeps the most promising plans: half of those of the round before, but at
least six. With three quarters, 41 plans left time for three rounds, too few to decide a gain of 3 %."""
_ADMITTED = 0.4  # share of the time in which plans are admitted to the first round
_REBUILT = 0.7  # share of the time in which second instances of slowly loading plans are built; all of it for leaders
_LONG_S = 1.0  # turns of plans that take this long are reported one by one
_ROUND_S = 0.4  # a round lasts at least this long, or for max_blocks, so that no short disturbance fills it
INSTANCE_NOISE = 0.004
"""Relative standard deviation between instances of a plan, assumed before there are pairs of kept instances."""
_PRIOR_PAIRS, _PRIOR_FREEDOM = 1, 5  # weight of this assumption: in pairs of instances, and in degrees of freedom
_ODD = 4.0  # levels farther off than this many robust standard deviations are pulled in to that
_REWEIGHTED = 30  # iterations of reweighted least squares for the least absolute residuals
_SAME_PLAN = 0.1  # weight, in rounds, of the tie between instances of one plan
_UNDESCRIBED = 0.01  # minimum relative standard deviation of the ratio of two predictions
_EXACT = 1e-9  # sums of the same costs in another order differ by less
_NORMAL = 1.96  # standard deviations to either side hold 95 %
_WIDEST = math.log(1e6)  # half width of an interval at most
_LOADING_SHARE = 0.1  # share of the final for building all plans once, beyond which instances are kept
_LEAST_INSTANCE_NBYTES = 16 << 20
_NO_LOAD_S = 0.1  # where latencies are computed, faster loading does not count, so that results do not depend on load
_NOISE_SHARE = 0.5  # of the half width of a simultaneous interval
UNDECIDED = 0.02
"""If another plan is expected to be faster than the recommended one by more than this, the final is undecided; for
plans that look equal, that is an interval of about ±12 %."""
_NEARLY_NORMAL = 1e4  # degrees of freedom
_NO_TURN = (math.nan, math.inf)  # placeholder in blocks of another group

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FinalPolicy:
    """How long and how precisely plans are compared.

    Attributes:
        precision: two plans are equal when the interval of their ratio is within this share.
        tie: a plan with fewer stages is preferred to the fastest if it is at most this much slower, and not
            significantly.
        max_s: seconds of loading and running after which no round begins.
        disturbed_s: seconds that are added where half of the turns or more were disturbed, fewer where fewer were; and
            where the final is undecided without disturbances in the counters (hyper-threads, memory, clocks of a host).
        claim_s: seconds that are added where the recommended plan looks faster than the reference, but not
            significantly: the two alone have several times as many rounds then as among all.
        min_rounds, max_rounds: number of rounds, each with rebuilt instances.
        min_blocks, max_blocks: turns of each plan in a round; one turn where an inference takes 50 ms or more.
        turn_s: approximate seconds of a turn's measured runs; 0 for one run.
        settle_s: approximate minimum of seconds of a turn's discarded runs; 0 for none.
        slow_load_s: if loading takes longer, at most two instances of a plan are built, and kept.
        room: number of plans whose instances fit into memory; up to that many are also kept if building them all takes
            more than a tenth of the final.
        keep_nbytes: memory for kept instances, from which :attr:`room` follows once the first are built; 0: unknown.
        loaded: number of plans that are loaded at once.
        least: number of plans that take part in the first round regardless of time.

    Raises:
        UsageError: a value is out of range.
    """

    precision: float = 0.005
    tie: float = 0.01
    max_s: float = 14.0
    disturbed_s: float = 60.0
    claim_s: float = 0.0
    min_rounds: int = 5
    max_rounds: int = 100
    min_blocks: int = 3
    max_blocks: int = 9
    turn_s: float = 0.02
    settle_s: float = 0.01
    slow_load_s: float = 1.0
    room: int = 0
    keep_nbytes: int = 0
    loaded: int = 8
    least: int = 10

    def loads_slowly_s(self, loads_s: Sequence[float]) -> float:
        """Return the seconds above which loading is slow, given the loading times of the plans."""
        long = sum(loads_s) > _LOADING_SHARE * self.max_s
        return 0.0 if long and len(loads_s) <= self.room else self.slow_load_s

    def __post_init__(self) -> None:
        if not 0.0 < self.precision < 1.0:
            raise UsageError(f"precision {self.precision} is not a share", "use one between 0 and 1, such as 0.005")
        if not self.max_s > 0.0:
            raise UsageError(f"max_s {self.max_s}: a final needs more than 0 seconds")
        if not 2 <= self.min_rounds <= self.max_rounds:
            raise UsageError(f"rounds {self.min_rounds} to {self.max_rounds}: need 2 <= min_rounds <= max_rounds")
        if not 1 <= self.min_blocks <= self.max_blocks:
            raise UsageError(f"blocks {self.min_blocks} to {self.max_blocks}: need 1 <= min_blocks <= max_blocks")
        if self.loaded < 2:
            raise UsageError(f"loaded {self.loaded}: a comparison needs 2 plans at once")


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the latencies of two plans.

    Attributes:
        value: above 1 the first plan is slower.
        low, high: the 95 % interval, which holds for all pairs of a final at once.
    """

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % interval."""
        return self.low, self.high

    @property
    def inverse(self) -> Ratio:
        """Ratio of the second plan to the first."""
        return Ratio(1.0 / self.value, 1.0 / self.high, 1.0 / self.low)


@dataclass(frozen=True, slots=True)
class Standing:
    """The results of one plan in a final.

    Attributes:
        samples: seconds of each turn, scaled to the speed of the machine that all standings share; None where the plan
            was not measured.
        levels: log seconds in each round; None where the plan did not take part.
        stage_s: seconds of each stage: its usual share of a turn, of the samples' median; its usual time where figures
            are not in proportion to it.
        failure: why it dropped out, or "".
        kept: number of instances that were built and kept; 0 where each round built its own.
        instances: which of these was used in each round; None where the round built one, or the plan took no part.
        outcome: of several models, medians of the figures of :meth:`~evaluators.workload.outcome.Outcome.to_json`.
        errors: of a prediction, as of :class:`~evaluators.base.Batch`.
    """

    samples: Samples | None
    levels: tuple[float | None, ...] = ()
    stage_s: tuple[float, ...] = ()
    failure: str = ""
    errors: tuple[float, ...] | None = None
    kept: int = 0
    instances: tuple[int | None, ...] = ()
    outcome: Annotated[Mapping[str, Any], BeforeValidator(read_figures)] = field(default_factory=dict)


@dataclass(frozen=True)
class Final:
    """The result of a final comparison.

    Attributes:
        standings: in the order of the given plans.
        racing: the plans that were left at the end.
        disturbance: what kept the measuring threads off their cores.
        repeated: number of turns that were repeated for it.
        exact: whether all instances of a plan have exactly the same figure, as predictions do.
        computed: whether the figures are computed and not measured.
    """

    standings: tuple[Standing, ...]
    racing: tuple[int, ...]
    disturbance: Disturbance = NOTHING
    repeated: int = 0
    exact: bool = False
    computed: bool = False

    @property
    def measured(self) -> tuple[int, ...]:
        """The plans that have figures and did not fail."""
        return tuple(i for i, s in enumerate(self.standings) if s.samples is not None and not s.failure)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max((len(s.levels) for s in self.standings), default=0)

    @property
    def predicted(self) -> bool:
        """Whether the figures are predictions with known errors."""
        return any(s.errors is not None for s in self.standings)

    def effect(self, plan: int, other: int) -> float:
        """Return the log of the ratio of a plan to another one."""
        return self._table.effect(plan, other)

    def ratio(self, plan: int, other: int) -> Ratio:
        """Return the ratio of a plan to another one, with its interval."""
        value = self._table.effect(plan, other)
        half = math.hypot(self._table.half(plan, other), _NORMAL * self.model_sigma(plan, other))
        if kept := self._kept_share(plan, other):
            half = math.hypot(half, self.instance_half * kept)
        half = min(half, _WIDEST)
        return Ratio(math.exp(value), math.exp(value - half), math.exp(value + half))

    def _kept_share(self, plan: int, other: int) -> float:
        """Return the standard deviation of a ratio by kept instances, in units of that of one instance."""
        if plan == other or self.exact:
            return 0.0
        return math.sqrt(sum(1.0 / n for n in (self.standings[plan].kept, self.standings[other].kept) if n))

    @property
    def instance_half(self) -> float:
        """Half width of the 95 % interval of an instance's latency around its plan's, relative."""
        sigma, wide = self._instance_noise
        return sigma * wide

    @cached_property
    def _instance_noise(self) -> tuple[float, float]:
        """The relative standard deviation between instances, and the quantile factor of the 95 % interval.

        Pooled from an assumption and from pairs of kept instances.
        """
        table = self._table.table
        plans = np.isfinite(table).sum(axis=1, keepdims=True)
        rows = np.where(plans >= 2, table, np.nan)
        for _ in range(3):  # two-way fit with missing cells: effects of plans and of rounds
            rows = rows - _median_of_rows(rows.T)
            rows = rows - np.nansum(rows, axis=1, keepdims=True) / np.maximum(plans, 1)
        rows = rows * np.sqrt(plans / np.maximum(plans - 1, 1))  # a plan contributes to the effect of its round
        gaps: list[tuple[float, float]] = []  # gap of a pair of instances, and its variance in units of a round's
        rest: list[Array] = []
        for column, standing in enumerate(self.standings):
            number = np.array([-1 if k is None else k for k in standing.instances])
            groups = [rows[: len(number), column][number == k] for k in range(standing.kept)]
            groups = [values[np.isfinite(values)] for values in groups]
            rest += [values - values.mean() for values in groups if len(values) > 1]
            if len(groups) == 2 and all(map(len, groups)):
                gaps.append((groups[0].mean() - groups[1].mean(), sum(1.0 / len(values) for values in groups)))
        freedom = sum(len(values) - 1 for values in rest)
        round_variance = sum(float((values**2).sum()) for values in rest) / freedom if freedom else ROUND_NOISE**2
        shown = sum(max(0.0, (gap**2 - round_variance * share) / 2.0) for gap, share in gaps)
        variance = (_PRIOR_PAIRS * INSTANCE_NOISE**2 + shown) / (_PRIOR_PAIRS + len(gaps))
        wide = _student(1.0 - _ALPHA, _PRIOR_FREEDOM + len(gaps)) if gaps else _NORMAL
        return math.sqrt(variance), wide

    def model_sigma(self, plan: int, other: int) -> float:
        """Return the relative standard deviation of the ratio of two predictions; 0 where they were measured.

        Errors that both plans share cancel; errors that no term of the model describes do not. Predictions by
        different models, as for other processors of a device, share none.
        """
        one, two = self.standings[plan].errors, self.standings[other].errors
        if one is None or two is None or plan == other:
            return 0.0
        terms = np.subtract(one, two) if len(one) == len(two) else (*one, *two)
        return math.hypot(float(np.linalg.norm(terms)), _UNDESCRIBED)

    @property
    def fastest(self) -> int:
        """The plan with the lowest latency.

        Raises:
            UnavailableError: no plan could be measured.
        """
        if not self.measured:
            reasons = "; ".join(dict.fromkeys(s.failure for s in self.standings if s.failure))
            raise UnavailableError(f"no plan could be measured in the final: {reasons or 'there was none'}")
        return self._table.fastest(self.measured)

    def choose(
        self, stages: Sequence[int], tie: float, allowed: Iterable[int] | None = None, *, ended: bool = True
    ) -> int:
        """Return the plan to recommend: the fastest, or one with fewer stages that is not significantly slower.

        No other plan is significantly faster than the returned one.

        Args:
            stages: number of stages of each plan.
            tie: how much slower than the fastest the plan may be; for predictions, their error decides instead.
            allowed: the plans to choose from; all by default.
            ended: whether no more rounds follow, so that a lead within the noise is a tie, if both raced to the end: of
                forty equal plans the fastest leads by two standard errors, which is half of an interval's half width.
        """
        among = [i for i in self.measured if allowed is None or i in set(allowed)]
        if not among:
            return self.fastest
        best = self._table.fastest(among)

        def beaten(i: int) -> bool:
            return any(self.ratio(i, j).low > 1.0 for j in among if j != i)

        def eligible(i: int) -> bool:
            if i == best:
                return True
            near = self.ratio(i, best).value <= 1.0 + tie or self.model_sigma(i, best) > 0.0
            near = near or (ended and i in self.racing and self._is_noise(i, best))
            return near and not beaten(i)

        def fewest_stages(plans: Iterable[int]) -> int:
            return min(plans, key=lambda i: (stages[i], self._table.effect(i, best), i))

        chosen = fewest_stages(filter(eligible, among))
        # A plan with more stages may have raced to the end on a tie that one it does not beat left early.
        rest = (i for i in among if stages[i] < stages[chosen] and self._table.effect(i, chosen) <= 0.0)
        return fewest_stages((chosen, *(i for i in rest if not beaten(i))))

    def _is_noise(self, plan: int, best: int) -> bool:
        """Return whether noise alone would give a plan that leads another one its lead."""
        to_best = self.ratio(plan, best)
        half = math.log(to_best.high / to_best.low) / 2.0
        return math.log(to_best.value) <= _NOISE_SHARE * half

    def expected_loss(self, chosen: int, rival: int) -> float:
        """Return the expected relative gain of a rival over the chosen plan, counted as 0 where the rival is slower.

        That is the expectation of the positive part of a Student variable with the mean, the standard error and the
        degrees of freedom of the difference: 40 % of the error where the two look equal after many rounds, 55 % after
        three, about 0 where the rival looks clearly slower.
        """
        return self._loss(self._table.effect(chosen, rival), chosen, rival)

    def _loss(self, mean: float, chosen: int, rival: int) -> float:
        kept = self._kept_share(chosen, rival)
        instances = kept * self._instance_noise[0] if kept else 0.0
        error, freedom = self._table.error(chosen, rival)
        sigma = math.hypot(error, self.model_sigma(chosen, rival), instances)
        if sigma <= 0.0:
            return max(0.0, mean)
        return sigma * _positive_part(mean / sigma, min(max(2.0, freedom), _NEARLY_NORMAL))

    def may_lose(self, chosen: int, rival: int) -> bool:
        """Return whether a rival may be much faster than the chosen plan, and their order is not significant.

        A lead that noise alone would give the rival counts as none.
        """
        if rival == chosen or self.expected_loss(chosen, rival) <= UNDECIDED:
            return False
        if self._is_noise(chosen, rival) and self._loss(0.0, chosen, rival) <= UNDECIDED:
            return False
        return not self.ratio(chosen, rival).significant

    @cached_property
    def _table(self) -> _Levels:  # a report reads it hundreds of times
        rows = list(zip_longest(*(s.levels for s in self.standings)))
        table = np.array(rows, np.float64).reshape(-1, len(self.standings))
        numbers = np.full(table.shape, -1)
        for column, standing in enumerate(self.standings):
            numbers[: len(standing.instances), column] = [-1 if n is None else n for n in standing.instances]
        return _Levels(table, numbers, exact=self.exact)


@dataclass(frozen=True)
class _Levels:
    """Statistics of the log seconds of plans in rounds.

    Attributes:
        table: log seconds, shape ``(rounds, plans)``; NaN where a plan did not take part.
        numbers: of kept instances, of the same shape; -1 where a round built its own.
    """

    table: Array
    numbers: NDArray[np.int64]
    exact: bool = False
    _found: dict[tuple[int, int], list[Array]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def fit(self) -> _Fit:
        """The fitted levels of the plans."""
        return _fitted(self.table, self.numbers)

    def differences(self, plan: int, other: int) -> list[Array]:
        """Return the differences in the common rounds, grouped by instances, with outliers pulled in."""
        if (plan, other) not in self._found:
            self._found[plan, other] = self._differences(plan, other)
        return self._found[plan, other]

    def _differences(self, plan: int, other: int) -> list[Array]:
        values: Array = self.table[:, plan] - self.table[:, other]
        met = np.isfinite(values)
        if not met.any():
            return []
        values, pairs = values[met], self.numbers[met][:, (plan, other)]
        calm = _without_outliers(values)
        if (pairs == pairs[0]).all():
            return [calm]
        groups = [(pairs == pair).all(axis=1) for pair in np.unique(pairs, axis=0)]
        # Two rounds of the same instances do not show which is the outlier; all rounds together do.
        return [_without_outliers(values[group]) if group.sum() > 2 else calm[group] for group in groups]

    def effect(self, plan: int, other: int) -> float:
        """Return the difference of two plans, from their common rounds and from those with other plans."""
        if plan == other:
            return 0.0
        fit = self.fit
        if fit.parts[plan] != fit.parts[other]:
            return float(np.nanmean(self.table[:, plan]) - np.nanmean(self.table[:, other]))
        found = float(fit.levels[plan] - fit.levels[other])
        return 0.0 if self.exact and abs(found) < _EXACT else found

    def fastest(self, among: Sequence[int]) -> int:
        """Return the fastest of some plans."""
        best = among[0]
        for plan in among[1:]:
            if self.effect(plan, best) < 0.0:
                best = plan
        return best

    def half(self, plan: int, other: int) -> float:
        """Return the half width of the t interval of a difference, for all pairs with one plan at once."""
        if self.exact or plan == other:
            return 0.0
        error, freedom = self.error(plan, other)
        pairs = max(1, int(np.isfinite(self.table).any(axis=0).sum()) - 1)
        rounds = self._rounds(plan, other)
        alpha = next((early for below, early in _EARLY_ALPHAS if rounds < below - 0.5), _ALPHA)
        return _student(1.0 - alpha / pairs, freedom) * error

    def _rounds(self, plan: int, other: int) -> float:
        """Return the effective number of common rounds of two plans; rounds with other plans count in part."""
        fit = self.fit
        if fit.parts[plan] != fit.parts[other]:
            return 1.0
        return 2.0 / max(float(fit.spread[plan, plan] + fit.spread[other, other] - 2.0 * fit.spread[plan, other]), 1e-9)

    def error(self, plan: int, other: int) -> tuple[float, float]:
        """Return the standard error of a difference and its degrees of freedom.

        A pair's own variance is moderated by that of all pairs (Smyth 2004, doi:10.2202/1544-6115.1027): three
        rounds alone say little.
        """
        if self.exact or plan == other:
            return 0.0, math.inf
        groups, count = self.differences(plan, other), self._rounds(plan, other)
        inside = sum(len(group) - 1 for group in groups)
        own = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / inside if inside else 0.0
        common, known = self._pooled
        others = min(_PRIOR_ROUNDS, max(0, known - inside))
        if others:
            prior = others
        else:  # a plan that left after one round was slower by far more than the noise of rounds
            prior, common = (1 if inside else _PRIOR_ROUNDS + 1), max(common, ROUND_NOISE**2)
        freedom = prior + inside
        variance = (prior * max(common, ROUND_NOISE**2 / 4) + inside * own) / freedom
        return math.sqrt(variance / count), freedom

    @cached_property
    def _pooled(self) -> tuple[float, int]:
        """The variance of a difference within pairs, over all pairs, and its degrees of freedom."""
        table = self.table[:, np.isfinite(self.table).any(axis=0)]
        rows = table[np.isfinite(table).sum(axis=1) >= 2]
        if len(rows) < 2:
            return ROUND_NOISE**2, 0
        cells = np.isfinite(rows)
        rows, missing = np.where(cells, rows, 0.0), ~cells
        counts = [np.maximum(cells.sum(axis=axis, keepdims=True), 1) for axis in (0, 1)]
        for axis in (1, 0, 1, 0, 1, 0, 1):  # two-way fit with missing cells
            rows = rows - rows.sum(axis=axis, keepdims=True) / counts[axis]
            rows[missing] = 0.0
        freedom = int(cells.sum() - len(rows) - cells.any(axis=0).sum() + 1)
        if freedom < 1:
            return ROUND_NOISE**2, 0
        values = rows[cells]
        spread = max(1.4826 * _median(np.abs(values)), ROUND_NOISE)
        kept = np.clip(values, -_OUTLIER * spread, _OUTLIER * spread)
        return 2.0 * float((kept**2).sum()) / freedom, freedom


@dataclass(frozen=True, slots=True)
class _Fit:
    """The levels of plans, without the effects of rounds.

    Attributes:
        levels: of each plan, log seconds; comparable within a connected part.
        spread: covariance of two plans' levels, in units of the variance of a level in one round.
        parts: number of each plan's connected part: plans that had common rounds, also through others; -1 for none.
    """

    levels: Array
    spread: Array
    parts: NDArray[np.int64]


def _fitted(table: Array, numbers: NDArray[np.int64]) -> _Fit:
    """Return the least-squares fit of log seconds by instance and round; instances of a plan have equal weight.

    Means of pairs alone would be inconsistent, as pairs meet in different rounds.
    """
    plans = table.shape[1]
    table = _without_odd_rounds(table, numbers)
    rows, columns = np.nonzero(np.isfinite(table))
    width = int(numbers.max(initial=-1)) + 2
    keys, which = np.unique(columns * width + numbers[rows, columns] + 1, return_inverse=True)
    owners = keys // width  # plans of the instances
    met = np.zeros((len(keys), len(table)))
    met[which, rows] = 1.0
    count = np.maximum(met.sum(axis=0), 1.0)
    normal = np.diag(met.sum(axis=1)) - (met / count) @ met.T
    # Kept instances that alternate in step never meet, so those of one plan are tied weakly.
    same = (owners[:, None] == owners).astype(float)
    tied = normal + _SAME_PLAN * (np.diag(same.sum(axis=1)) - same)
    inverse = np.linalg.pinv(tied, rcond=1e-10, hermitian=True)
    values = table[rows, columns]
    shared = np.bincount(rows, values, len(table)) / count
    levels = inverse @ np.bincount(which, values - shared[rows], len(keys))
    mean = np.zeros((plans, len(keys)))
    mean[owners, np.arange(len(keys))] = 1.0
    mean /= np.maximum(mean.sum(axis=1, keepdims=True), 1.0)
    reached = (mean > 0.0) @ (normal != 0.0) @ (mean > 0.0).T | np.eye(plans, dtype=bool)
    for _ in range(plans.bit_length()):  # plans that meet through others: each squaring doubles how many
        reached = reached @ reached
    parts = np.where(mean.any(axis=1), reached.argmax(axis=1), -1)
    return _Fit(mean @ levels, mean @ inverse @ mean.T, parts)


def _levels_of(
    turns: Mapping[int, Sequence[tuple[float, float]]],
) -> tuple[dict[int, float], dict[int, Array], float]:
    """Return each plan's log level in a round, without the effects of blocks, and its turns that count.

    The third value is the one of :data:`LEVELS` that these turns are within.

    Args:
        turns: of each plan, one per block until it failed: log seconds, and the share of it without a core.
    """
    plans = [i for i, made in turns.items() if made]
    blocks = max((len(turns[i]) for i in plans), default=0)
    log_s = np.full((blocks, len(plans)), np.nan)
    lost = np.full((blocks, len(plans)), np.inf)
    for column, plan in enumerate(plans):
        log_s[: len(turns[plan]), column], lost[: len(turns[plan]), column] = np.transpose(turns[plan])
    present = np.isfinite(log_s)
    level = math.inf
    for level in LEVELS:
        kept = present & (lost <= level)
        if (kept.sum(axis=0) * 2 >= present.sum(axis=0)).all():
            log_s = np.where(kept, log_s, np.nan)
            break
    middle = _median_of_rows(log_s.T)
    for _ in range(3):  # median polish: a block has one state of the machine
        shared = _median_of_rows(log_s - middle)
        shared = shared - _median(shared)
        middle = _median_of_rows((log_s - shared[:, None]).T)
    kept_turns = {plan: log_s[np.isfinite(log_s[:, c]), c] for c, plan in enumerate(plans)}
    return {plan: float(middle[c]) for c, plan in enumerate(plans)}, kept_turns, level


def _calmest(found: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Return the outcomes of turns that count; the first of each is the share of its time without a core."""
    level = next(level for level in LEVELS if 2 * sum(lost <= level for lost, _ in found) >= len(found))
    return [outcome for lost, outcome in found if lost <= level]


@dataclass(eq=False)
class FinalComparison:
    """A comparison of plans over rebuilt instances; :meth:`run` makes it, once.

    A plan that fails twice drops out with the reason; the others go on.

    Attributes:
        loads: build a new instance of each plan; the most promising plan first, since time may not suffice for all.
        policy: limits of time, rounds and precision.
        rng: for the order in which plans are built and run.
        reuse: for plans that load slowly, functions that return an instance which may share loaded stages.
        conditions: returns the conditions of the samples; called at the end.
        counters: reads the kernel's counters of the threads that measure; None where there are none.
        watched: returns plans whose ratio to the fastest must be precise although they have lost.
        progress: called once per round, and once per turn of plans that take seconds.
        computed: whether latencies that are equal to the last bit are computed. Otherwise they come from a coarse
            timer, and their error is its resolution.
        counted: whether figures are counts, as bytes are, and repeat although plans are run.
        scaled: whether figures are in proportion to the machine's slowness, so that stages have shares of them.
        groups: of each plan; plans of one group take turns with each other, those of another group before or after
            them. An H100 that was idle in the CPU's turns for half of the time lowered its clock from 1,980 to
            345 MHz, and an inference of 1.2 ms took 1.6 ms. By default all plans are one group.
        recommended: returns the plan to be recommended, by default the fastest, given whether no more rounds follow; a
            final goes on while another plan may be faster than that.
        reference: returns the plan that the recommended one is said to be faster than; a final goes on for a while
            where that is likely but not significant.
        free_nbytes: returns the free memory where plans are loaded; None where it is not known.

    Raises:
        UsageError: no plans are given.
    """

    loads: Sequence[Load]
    policy: FinalPolicy
    rng: np.random.Generator
    _: KW_ONLY
    reuse: Mapping[int, Load] = field(default_factory=dict)
    conditions: Callable[[], Mapping[str, Any]] = dict
    counters: Callable[[], Counters] | None = None
    watched: Callable[[Final], Iterable[int]] = lambda _: ()
    progress: Callable[[str], None] = lambda _: None
    computed: bool = True
    counted: bool = False
    scaled: bool = True
    groups: Sequence[Hashable] = ()
    recommended: Callable[[Final, bool], int] | None = None
    reference: Callable[[Final], int | None] = lambda _: None
    free_nbytes: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        if not self.loads:
            raise UsageError("a final needs at least one plan")
        count = len(self.loads)
        self._apart = self.groups if self.groups and self.policy.settle_s > 0.0 else [None] * count
        self._filter = RunFilter(self.counters)
        self._clock = time.process_time if self.computed else time.monotonic
        self._racing = set(range(count))  # may still be the fastest
        self._running = list(range(count))  # measured in the next round
        self._leaders: set[int] = set()  # the fastest, the recommended plan and close rivals
        self._levels: list[dict[int, float]] = []
        self._table_of = -1  # rounds in the table
        self._calm: list[bool] = []
        self._turns: list[dict[int, Array]] = []
        self._stages: dict[int, list[Array]] = defaultdict(list)
        self._failures: dict[int, list[str]] = defaultdict(list)
        self._errors: dict[int, Array] = {}
        self._outcomes: dict[int, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
        self._faults, self._runs, self._resident_nbytes = Counter[int](), Counter[int](), dict[int, int]()
        # Seconds of a run, which takes longer than its figure with several models or a stream.
        self._typical_s: dict[int, float] = {}
        self._least_s: dict[int, float] = {}
        self._best_s: dict[int, float] = {}
        self._load_s: dict[int, float] = {}
        self._kept: dict[int, list[Candidate]] = {}
        self._instances: dict[int, int] = {}
        self._used: list[dict[int, int]] = []
        self._loaded = self.policy.loaded
        self._room, self._instance_nbytes = self.policy.room, _LEAST_INSTANCE_NBYTES
        self._met = count  # plans that had a turn in the first round
        self._building_s: dict[int, float] = {}  # of the instances that were built in this round
        self._fresh = 0  # how many these are, without those that share what is loaded
        self._spent_s, self._turns_made, self._disturbed = 0.0, 0, 0

    def run(self) -> Final:
        """Measure the plans against each other until one is left, the rest are equal, or time is up."""
        try:
            while self._running and not self._over():
                self._round()
                self._eliminate()
        finally:
            for plan in list(self._kept):
                self._forget(plan)
        return self._final(dict(self.conditions()))

    # --- rounds -------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        done = len(self._levels)
        self.progress(self._where())
        order = [self._running[0], *map(int, self.rng.permutation(self._running[1:]))] if done else self._running
        hub = order[0]
        if done:
            hub = self._levels_table().fastest([i for i in self._running if self._seen(i)] or [hub])
        rest = [i for i in order if i != hub]
        self._used.append({})
        levels: dict[int, float] = {}
        turns: dict[int, Array] = {}
        first = calm = True
        while first or rest:
            late = self._spent_s >= _ADMITTED * self.policy.max_s
            if not (first or done) and late and len(turns) >= self.policy.least:
                break  # no time for less promising plans
            group, rest = [hub, *rest[: self._loaded - 1]], rest[self._loaded - 1 :]
            made = self._group(group)
            if any(made.values()):
                level, turned, lost = _levels_of(made)
                calm = calm and lost <= CALM  # else it counts until its plans have enough calmer rounds
                shift = levels[hub] - level[hub] if hub in levels and hub in level else 0.0
                levels |= {i: value + shift for i, value in level.items() if i not in levels}
                turns |= {i: value + shift for i, value in turned.items() if i not in turns}
            first = False
        if not done:
            self._racing -= set(rest)
            self._running = [i for i in self._running if i not in rest]
            self._met = len(turns)
        self._levels.append(levels)
        self._calm.append(calm)
        self._turns.append(turns)
        if not done and levels:
            best = min(levels, key=lambda i: levels[i])
            # For a plan that is always disturbed, the fastest turn is the best estimate.
            self._racing -= {i for i in levels if float(turns[i].min()) - levels[best] > _PRUNE}

    def _where(self) -> str:
        return f"final comparison of {plural(len(self._running), 'plan')}, round {len(self._levels) + 1}"

    def _group(self, group: Sequence[int]) -> dict[int, list[tuple[float, float]]]:
        """Build some plans, run blocks of turns, and close them; return the turns, none of a plan that fails."""
        turns: dict[int, list[tuple[float, float]]] = {i: [] for i in group}
        built: dict[int, Candidate] = {}
        self._building_s, self._fresh, free = {}, 0, self.free_nbytes()
        try:
            for plan in map(int, self.rng.permutation(list(group))):
                if (candidate := self._build(plan, built)) is not None:
                    built[plan] = candidate
                    if candidate in (kept := self._kept.get(plan, [])):
                        self._used[-1][plan] = self._instances[plan] - len(kept) + kept.index(candidate)
            self._learn_room(free)
            self._blocks(built, turns)
        finally:
            for plan, candidate in built.items():
                if candidate not in self._kept.get(plan, ()):
                    with suppress(UnavailableError):
                        candidate.close()
        return {plan: made if any(math.isfinite(log_s) for log_s, _ in made) else [] for plan, made in turns.items()}

    def _build(self, plan: int, built: Mapping[int, Candidate]) -> Candidate | None:
        kept = self._kept.get(plan, [])
        slow = bool(kept) or plan in self.reuse
        if kept and (len(kept) == 2 or not self._affordable(plan)):
            return kept[len(self._levels) % len(kept)]
        load = self.reuse[plan] if not kept and plan in self.reuse else self.loads[plan]
        begin = self._clock()
        try:
            candidate = load()
        except UnavailableError as error:
            self._failed(plan, error)
            self._spent_s += self._counted_s(begin)
            # There may be too little memory for this many at once.
            self._loaded = max(2, len(built)) if len(built) > 1 else self._loaded
            for other in [i for i in self._kept if i not in built]:
                self._forget(other)
            return None
        took_s = self._counted_s(begin)
        if not (slow and not kept):  # a shared instance has no loading time
            self._load_s[plan] = min(took_s, self._load_s.get(plan, math.inf))
        try:
            settle = candidate.run(1)
        except UnavailableError as error:
            self._failed(plan, error)
            with suppress(UnavailableError):
                candidate.close()
            return None
        first_s = float(settle.latency_s[0])
        self._typical_s.setdefault(plan, self._run_s(plan, first_s, settle))
        built_s = max(self._counted_s(begin), took_s + first_s)
        self._spent_s += built_s
        self._building_s[plan] = built_s
        self._fresh += bool(kept) or not slow
        if slow or took_s > self.policy.slow_load_s or self._has_room():
            self._kept.setdefault(plan, []).append(candidate)
            self._instances[plan] = self._instances.get(plan, 0) + 1
        return candidate

    def _counted_s(self, begin: float) -> float:
        """Return the seconds since ``begin`` that count; results of computed latencies must not depend on a clock."""
        took_s = self._clock() - begin
        quick = took_s < min(_NO_LOAD_S, self.policy.slow_load_s)
        return 0.0 if self.computed and quick else took_s

    def _run_s(self, plan: int, figure_s: float, batch: Batch) -> float:
        """Return the seconds of a run: its figure, or more where that is no latency of a run.

        The least of a plan's batches counts: one may have waited. What is computed takes what it says.
        """
        if self.computed or batch.run_s is None:
            return figure_s
        self._least_s[plan] = min(batch.run_s, self._least_s.get(plan, math.inf))
        return max(figure_s, self._least_s[plan])

    def _has_room(self) -> bool:
        """Return whether instances are kept, since loading all plans takes long and they fit into memory."""
        building_s = sum(self._load_s.get(plan, 0.0) + self._typical_s.get(plan, 0.0) for plan in self._running)
        return len(self._running) <= self._room and building_s > _LOADING_SHARE * self.policy.max_s

    def _learn_room(self, free_nbytes: int | None) -> None:
        """Estimate the memory of an instance from the free memory before the last ones were built."""
        left_nbytes = self.free_nbytes()
        if not self.policy.keep_nbytes or not self._fresh or free_nbytes is None or left_nbytes is None:
            return
        self._instance_nbytes = max(self._instance_nbytes, (free_nbytes - left_nbytes) // self._fresh)
        self._room = self.policy.keep_nbytes // (2 * self._instance_nbytes)

    def _affordable(self, plan: int) -> bool:
        """Return whether there is time for a second instance of a plan that loads slowly.

        A final begins with the instance of the search, which may have been a lucky one: instances of a GPU's plans
        differ by several per cent. So at least the leaders are rebuilt.
        """
        if len(self._levels) < 2 or plan not in self._racing:
            return False
        policy, known = self.policy, self._load_s.values()
        expected_s = self._load_s.get(plan, max(known, default=policy.slow_load_s))
        limit_s = policy.max_s if plan in self._leaders else _REBUILT * policy.max_s
        if self._spent_s > policy.max_s:
            limit_s = policy.max_s + _REBUILT * policy.disturbed_s
        return self._spent_s + expected_s <= limit_s

    def _blocks(self, built: dict[int, Candidate], turns: dict[int, list[tuple[float, float]]]) -> None:
        """Run blocks of turns, those of one group after those of another."""
        apart: dict[Hashable, list[int]] = defaultdict(list)
        for plan in built:
            apart[self._apart[plan]].append(plan)
        groups = list(apart.values())
        if len(groups) < 2:
            self._take_turns(built, turns, 0.0)
            return
        for which in map(int, self.rng.permutation(len(groups))):
            before = max(map(len, turns.values()))
            for plan in groups[which]:
                turns[plan] += [_NO_TURN] * before
            begin = self._clock()
            with suppress(UnavailableError):  # its turn reports why
                built[groups[which][0]].run(1)  # warms up an accelerator that was idle
            ready_s = self._counted_s(begin)
            self._spent_s += ready_s
            own = {plan: built.pop(plan) for plan in groups[which]}
            self._take_turns(own, turns, ready_s)
            built |= own

    def _take_turns(
        self, built: dict[int, Candidate], turns: dict[int, list[tuple[float, float]]], ready_s: float
    ) -> None:
        policy = self.policy
        # For slow networks a round is one block: rebuilt instances tell more than more turns of the same ones.
        slow = all(self._typical_s[i] >= SETTLE_BELOW_S for i in built)
        count, begin_s = 1 if slow else policy.min_blocks, self._spent_s
        building_s = sum(self._building_s.get(i, 0.0) for i in built) + ready_s
        if self._levels:  # in the first round the number of plans matters more than precision
            building_s *= 2.0
        done = 0
        while built and done < count and (done == 0 or self._spent_s < self.policy.max_s):
            for plan in map(int, self.rng.permutation(sorted(built))):
                if plan not in built:
                    continue
                try:
                    turns[plan].append(self._turn(plan, built[plan]))
                except UnavailableError as error:
                    self._failed(plan, error)
                    lost = built.pop(plan)
                    kept = any(each is lost for each in self._kept.get(plan, ()))
                    self._forget(plan)
                    if not kept:
                        with suppress(UnavailableError):
                            lost.close()
            done += 1
            # Measure for about as long as building took.
            if done == count and self._spent_s - begin_s < max(_ROUND_S, 0.0 if self.computed else 0.5 * building_s):
                count = min(count + 1, policy.max_blocks)

    def _turn(self, plan: int, candidate: Candidate) -> tuple[float, float]:
        """Return the least disturbed of a few tries at a turn; only tries that waited for a core are repeated."""
        before = self._filter.total
        if self._typical_s[plan] >= _LONG_S and not self.computed:
            self.progress(f"{self._where()}; {plural(self._turns_made, 'turn')} so far")
        try:
            (log_s, shares, outcome), lost = self._filter.run(lambda: self._try(plan, candidate))
        finally:
            self._spent_s -= self._filter.total.queued_s - before.queued_s
            self._faults[plan] += self._filter.total.page_faults - before.page_faults
            self._resident_nbytes[plan] = self._filter.resident_nbytes
        self._stages[plan].append(shares)
        if outcome is not None:
            self._outcomes[plan].append((lost, outcome.to_json()))
        self._turns_made += 1
        self._disturbed += not self._filter.quiet
        return log_s, lost

    def _try(self, plan: int, candidate: Candidate) -> tuple[float, Array, Outcome | None]:
        """Return medians of a turn's measured runs, log seconds and stages' shares, and what happened to models."""
        policy, typical_s = self.policy, self._typical_s[plan]
        settle = 0 if typical_s >= SETTLE_BELOW_S else min(_MOST_RUNS, math.ceil(policy.settle_s / typical_s))
        runs = min(_MOST_RUNS, max(_SHORT_RUNS if settle else 1, math.ceil(policy.turn_s / typical_s)))
        begin = time.monotonic()
        settling_s = self._settle(plan, candidate, settle) if settle else 0.0
        batch = candidate.run(runs)
        self._runs[plan] += runs
        values = _checked(batch, runs)
        said_s = settling_s + math.fsum(batch.latency_s)  # computed latencies: results must not depend on load
        self._spent_s += max(0.0 if self.computed else time.monotonic() - begin, said_s)
        median_s = _median(values)
        self._typical_s[plan] = self._run_s(plan, median_s, batch)
        self._best_s[plan] = min(median_s, _FORGETS * self._best_s.get(plan, math.inf))
        if batch.errors is not None:
            self._errors[plan] = batch.errors
        stage_s = np.median(batch.stage_s, axis=0)
        return math.log(median_s), stage_s / median_s if self.scaled else stage_s, batch.outcome

    def _settle(self, plan: int, candidate: Candidate, runs: int) -> float:
        """Run until the plan is about as fast as before or gets no faster; return the seconds that this took.

        Another plan's turn evicts caches and lets clocks fall, unlike an application that runs the plan in a loop.
        Longer settling does harm: on a virtual machine with an H100, an inference of 0.95 ms takes 1.2 ms for 0.2 to
        2 s at a time, in every plan. Plans that take turns within such a spell share it.
        """
        spent_s, fastest_s = 0.0, math.inf
        while True:
            latency_s = _checked(candidate.run(runs), runs)
            self._runs[plan] += runs
            spent_s += float(latency_s.sum())
            median_s = _median(latency_s)
            fast = median_s <= _SETTLED * self._best_s.get(plan, math.inf)
            if fast or median_s > _GAIN * fastest_s or spent_s >= _MOST_SETTLING_S:
                return spent_s
            fastest_s = median_s

    def _failed(self, plan: int, error: UnavailableError) -> None:
        self._failures[plan].append(str(error))
        if len(self._failures[plan]) >= 2:
            self._forget(plan)
            self._racing.discard(plan)

    def _forget(self, plan: int) -> None:
        for candidate in self._kept.pop(plan, ()):
            with suppress(UnavailableError):
                candidate.close()

    # --- decisions ----------------------------------------------------------------------------------------------

    def _seen(self, plan: int) -> bool:
        return any(plan in levels for levels in self._levels)

    def _levels_table(self) -> _Levels:
        """Return the levels of the rounds that are over, made once a round with what follows from them."""
        if self._table_of != len(self._levels):
            self._table, self._table_of = self._make_table(), len(self._levels)
        return self._table

    def _make_table(self) -> _Levels:
        plans = range(len(self.loads))
        rows = [[levels.get(plan, np.nan) for plan in plans] for levels in self._levels]
        numbers = [[used.get(plan, -1) for plan in plans] for used in self._used[: len(rows)]]
        table = np.array(rows, np.float64).reshape(-1, len(plans))
        calm, met = np.array(self._calm, bool), np.isfinite(table).astype(int)
        # A disturbed round is dropped if every two of its plans keep five calm common rounds, and half of all.
        meetings, left = met.T @ met, met[calm].T @ met[calm]
        enough = left >= np.maximum(_EARLY_ROUNDS, 0.5 * meetings)
        for row in np.flatnonzero(~calm):
            there = np.flatnonzero(met[row])
            if enough[np.ix_(there, there)].all():
                table[row] = np.nan
        return _Levels(table, np.array(numbers, np.int64).reshape(table.shape), exact=self._exact())

    def _exact(self) -> bool:
        """Return whether rebuilt instances are equal to the last bit: they are computed or counted, not timed."""
        if not (self.computed or self.counted):
            return False
        seen: dict[int, set[float]] = defaultdict(set)
        for turns in self._turns:
            for plan, values in turns.items():
                seen[plan].update(np.round(values, 12).tolist())
                if len(seen[plan]) > 1:
                    return False
        rebuilt = [i for i in seen if self._instances.get(i, 2) >= 2]
        return any(sum(i in levels for levels in self._levels) >= 2 for i in rebuilt)

    def _eliminate(self) -> None:
        """Eliminate plans that have lost, and choose those of the next round."""
        table = self._levels_table()
        seen = [i for i in range(len(self.loads)) if self._seen(i) and len(self._failures[i]) < 2]
        if not seen:
            self._running = [i for i in self._running if len(self._failures[i]) < 2]
            return
        best = table.fastest(seen)
        if len(self._levels) >= 2:  # computed anew: a plan that was disturbed in its first rounds may return
            self._racing = {i for i in seen if table.effect(i, best) <= table.half(i, best)}
        known = self._final()
        alive = {i for i in seen if len(self._failures[i]) < 2}
        watched = {i for i in self.watched(known) if i in alive and not self._settled(table, i, best)}
        again = {i for i in self._running if not self._seen(i) and len(self._failures[i]) == 1}
        ahead = sorted(self._racing & set(seen), key=lambda i: table.effect(i, best))
        chosen = self.recommended(known, False) if self.recommended is not None else best
        self._leaders = {best, chosen, *ahead[:_LEADERS]}
        if self._spent_s < self.policy.max_s:
            ahead = ahead[: max(_FOCUS, math.ceil(self._met * _KEPT_SHARE ** len(self._levels)))]
        elif len(self._levels) < 2:  # one round took all the time: the best two get another
            ahead = ahead[:2]
        elif self._is_claimed(known):
            ahead, watched = [chosen], {i for i in [self.reference(known)] if i is not None}
        else:  # in the time added for disturbances: the least certain ones
            rivals = [i for i in ahead if i in known.measured]
            ahead = [chosen, *sorted(rivals, key=lambda i: -known.expected_loss(chosen, i))[:_RIVALS]]
        self._running = [i for i in range(len(self.loads)) if i in {*ahead, *watched, *again, best}]
        for plan in [i for i in self._kept if i not in self._running]:
            self._forget(plan)

    def _settled(self, table: _Levels, plan: int, best: int) -> bool:
        """Return whether the ratio of a plan to the fastest is precise enough."""
        half = table.half(plan, best)
        return half <= max(self.policy.precision, _DECIDED * abs(table.effect(plan, best)))

    def _over(self) -> bool:
        policy, done = self.policy, len(self._levels)
        if done < 2:
            return False
        table, racing = self._levels_table(), [i for i in self._racing if self._seen(i)]
        if not racing or table.exact or len(self._running) == 1 or done >= policy.max_rounds:
            return True
        share = min(1.0, 2.0 * self._disturbed / max(1, self._turns_made))
        best = table.fastest(racing)
        if self._spent_s >= policy.max_s + share * policy.disturbed_s:
            if self._is_claimed(self._final()):
                return False
            return self._spent_s >= policy.max_s + policy.disturbed_s or not self._open(racing)
        seen = (i for i in self._running if self._seen(i) and i != best)
        return done >= policy.min_rounds and all(self._settled(table, i, best) for i in seen)

    def _is_claimed(self, known: Final) -> bool:
        """Return whether the recommended plan may be faster than the reference, and there is time to find out."""
        policy, reference = self.policy, self.reference(known)
        if self.recommended is None or not policy.max_s <= self._spent_s < policy.max_s + policy.claim_s:
            return False
        if reference is None or (chosen := self.recommended(known, False)) == reference:
            return False
        ratio = known.ratio(reference, chosen)
        return ratio.value > 1.0 + policy.tie and not ratio.significant

    def _open(self, racing: Iterable[int]) -> bool:
        """Return whether the final would end undecided."""
        known = self._final()
        chosen = self.recommended(known, True) if self.recommended is not None else known.fastest
        return any(known.may_lose(chosen, i) for i in racing if i in known.measured)

    def _memory(self, plan: int) -> dict[str, float]:
        """Return how a plan's runs used memory, as conditions of its samples."""
        return self._filter.memory(self._faults[plan] / self._runs[plan], self._resident_nbytes[plan])

    def _final(self, under: dict[str, Any] | None = None) -> Final:
        """Return the result, scaled to the speed of the machine in which the fastest plan was measured.

        Args:
            under: the conditions, at the end; before, what no decision depends on is left out.
        """
        table = self._levels_table()
        measured = [i for i in range(len(self.loads)) if self._seen(i)]
        standings = [
            Standing(None, failure=self._failures[i][-1] if self._failures[i] else "") for i in range(len(self.loads))
        ]
        if not measured:
            return Final(tuple(standings), ())
        best = table.fastest([i for i in measured if i in self._racing] or measured)
        state = _median(table.table[np.isfinite(table.table[:, best]), best])
        for i in measured:
            logs = np.concatenate([turns[i] for turns in self._turns if i in turns])
            # The median becomes the level over rounds; the spread of the turns is unchanged.
            logs = logs + state + table.effect(i, best) - _median(logs)
            samples = Samples(tuple(np.exp(logs).tolist()), (under or {}) | self._memory(i))
            stages = np.median(self._stages[i], axis=0) if under is not None else np.empty(0)
            levels = tuple(v if math.isfinite(v) else None for v in table.table[:, i].tolist())
            standings[i] = Standing(
                samples,
                levels,
                tuple((stages * (samples.median if self.scaled else 1.0)).tolist()),
                self._failures[i][-1] if len(self._failures[i]) >= 2 else "",
                tuple(map(float, self._errors[i])) if i in self._errors else None,
                self._instances.get(i, 0),
                tuple(used.get(i) for used in self._used) if i in self._instances else (),
                typical_figures(_calmest(self._outcomes[i])) if under is not None else {},
            )
        racing = tuple(sorted(i for i in self._racing if self._seen(i) and i in self._running))
        total, repeated = self._filter.total, self._filter.repeated
        found = Final(tuple(standings), racing, total, repeated, table.exact, self.computed)
        vars(found)["_table"] = table  # what it would make of the standings' levels
        return found


def _without_odd_rounds(table: Array, numbers: NDArray[np.int64]) -> Array:
    """Return levels, with outliers from the effects of their plan and round pulled in.

    Instances of a plan with three rounds have separate effects: two rounds do not show which is the outlier.
    """
    present = np.isfinite(table)
    if not present.any():
        return table
    rows, columns = np.nonzero(present)
    begin = columns * (int(numbers.max()) + 3)
    keys = begin + numbers[rows, columns] + 2
    _, which, count = np.unique(keys, return_inverse=True, return_counts=True)
    _, which = np.unique(np.where(count[which] < 3, begin, keys), return_inverse=True)
    values = table[rows, columns]
    weights, off = np.ones(len(values)), values
    grid = np.zeros((int(which.max()) + 1, len(table)))
    for _ in range(_REWEIGHTED):  # converges to the least sum of absolute residuals
        grid[which, rows] = weights
        total = np.maximum(grid.sum(axis=0), 1e-12)
        shared = np.bincount(rows, weights * values, len(table)) / total
        normal = (grid / -total) @ grid.T
        diagonal = normal.reshape(-1)[:: len(grid) + 1]
        diagonal += grid.sum(axis=1)
        diagonal += 1e-9 * (1.0 + normal.max())
        right = np.bincount(which, weights * (values - shared[rows]), len(grid))
        levels = np.linalg.solve(normal, right)
        own = np.bincount(rows, weights * (values - levels[which]), len(table)) / total
        off = values - levels[which] - own[rows]
        weights = 1.0 / np.maximum(np.abs(off), ROUND_NOISE / 10.0)
        weights /= weights.max()
    limit = _ODD * max(1.4826 * _median(np.abs(off)), ROUND_NOISE)
    found: Array = table.copy()
    found[rows, columns] += np.clip(off, -limit, limit) - off
    return found


def _without_outliers(values: Array) -> Array:
    """Return values, with those far from their median pulled in."""
    if len(values) < 3:
        return values
    middle = _median(values)
    spread = max(1.4826 * _median(np.abs(values - middle)), ROUND_NOISE)
    return np.clip(values, middle - _OUTLIER * spread, middle + _OUTLIER * spread)


def _checked(batch: Batch, runs: int) -> Array:
    """Return the latencies of a batch, checked."""
    if len(batch.latency_s) != runs:
        raise UnavailableError(
            f"evaluator returned {plural(len(batch.latency_s), 'latency')} for {plural(runs, 'run')}"
        )
    return np.asarray(Samples(tuple(map(float, batch.latency_s))).values_s)


def _median(values: Array) -> float:
    """Return the median of finite values; for few, several times faster than numpy's."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0)


def _median_of_rows(values: Array) -> Array:
    """Return the median of each row; 0 where a row has none."""
    finite = np.isfinite(values)
    some = finite.any(axis=1)
    found = np.zeros(len(values))
    if finite.all() and values.size:
        ordered, middle = np.sort(values, axis=1), values.shape[1] // 2
        return ordered[:, middle] if values.shape[1] % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2.0
    if some.any():
        found[some] = np.nanmedian(values[some], axis=1)
    return found


def _positive_part(mean: float, freedom: float) -> float:
    """Return the expectation of the positive part of a Student variable of scale 1 with this mean."""
    from scipy.special import gammaln, stdtr

    height = math.exp(gammaln((freedom + 1.0) / 2.0) - gammaln(freedom / 2.0)) / math.sqrt(freedom * math.pi)
    density = height * (1.0 + mean * mean / freedom) ** (-(freedom + 1.0) / 2.0)
    return float((freedom + mean * mean) / (freedom - 1.0) * density + mean * stdtr(freedom, mean))


def _student(level: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + level / 2))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speedup of a candidate over a baseline.

    Attributes:
        ratio: latency of the baseline over that of the candidate; above 1 the candidate is faster.
        baseline, candidate: the median of each turn, scaled to a common speed of the machine.
        final: the comparison of the baseline, its first plan, and the candidate.
    """

    ratio: Ratio
    baseline: Samples
    candidate: Samples
    final: Final

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, with ``significant``."""
        return {
            "speedup": self.ratio.value,
            "ci95": list(self.ratio.ci95),
            "significant": self.ratio.significant,
            "rounds": self.final.rounds,
            "baseline": self.baseline.to_json(),
            "candidate": self.candidate.to_json(),
            "stage_s": [list(standing.stage_s) for standing in self.final.standings],
            "disturbance": self.final.disturbance.to_json(),
            "repeated": self.final.repeated,
            **({"model_sigma": self.final.model_sigma(0, 1)} if self.final.predicted else {}),
        }


def compare(
    load_baseline: Load,
    load_candidate: Load,
    policy: FinalPolicy,
    rng: np.random.Generator,
    conditions: Callable[[], Mapping[str, Any]] = dict,
    counters: Callable[[], Counters] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    groups: Sequence[Hashable] = (),
) -> Comparison:
    """Measure two plans against each other until their ratio is precise enough.

    Raises:
        UnavailableError: a plan cannot be built, or failed.
    """
    found = FinalComparison(
        (load_baseline, load_candidate),
        policy,
        rng,
        conditions=conditions,
        counters=counters,
        watched=lambda _: (0, 1),
        computed=counters is None,
        progress=progress,
        groups=groups,
    ).run()
    one, other = found.standings
    if one.failure or other.failure or one.samples is None or other.samples is None:
        raise UnavailableError(one.failure or other.failure or "a plan was not measured in the final")
    return Comparison(found.ratio(0, 1), one.samples, other.samples, found)
