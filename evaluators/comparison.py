"""Which of two candidates is faster, by how much, and whether that is more than chance.

Two identical instances of one plan differ by a lasting 0.4 to 0.65 %, so a comparison repeats on two levels: rounds
of rebuilt instances, and interleaved pairs of runs inside a round. The rounds are the independent observations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Batch, Candidate
from evaluators.racing import slower
from evaluators.samples import Samples
from search_spaces.errors import RunFolderError, UnavailableError, UsageError

Load = Callable[[], Candidate]
"""Builds a new instance of a candidate at each call (:meth:`~evaluators.base.Session.load` with ``fresh``)."""

SETTLE_BELOW_S = 0.05
"""A shorter run is preceded by a discarded one, which puts the caches back that the other candidate used. A longer run
replaces their content many times over by itself."""

UNSTABLE_ABOVE = 0.02
"""Smallest relative change between the halves of a comparison that is called unstable; it must also be significant."""

_DECIDED = 0.25  # an interval that is within a quarter of the difference needs no more rounds
_LEVEL = 0.97  # of the t interval: looking after each round costs up to 2.5 % of coverage; this makes it 95 to 97 %
_OUTLIER = 5.0  # rounds farther from the median than this many robust standard deviations are pulled in to it
_ROUND_NOISE = 0.003  # relative standard deviation of a round that is assumed at least when outliers are looked for
_ROUND_S = 0.1  # short candidates are run more often in a round, for about this long
_MOST_TURNS = 5
_NORMAL = 1.96  # standard deviations to either side hold 95 %
_UNDESCRIBED = 0.01  # relative standard deviation of the ratio of two predictions, at least


@dataclass(frozen=True, slots=True)
class ComparisonPolicy:
    """How hard to try to tell candidates apart.

    Attributes:
        precision: stop when the interval of the ratio is within this share (a quarter of the difference will do too).
        max_s: begin no round when all runs together took this many seconds and ``min_rounds`` are done; loading the
            instances is not counted.
        min_rounds, max_rounds: bounds of the number of rounds.
        min_pairs, max_pairs: bounds of the pairs of runs in a round, chosen by how long they take. Where a pair is of
            several short runs of each, fewer will do: ``min_pairs`` is then the least number of these.
        pair_s: in a pair each candidate is run for about this long, at most five times. Neighbouring runs are disturbed
            alike, those some 40 ms apart are not.

    Raises:
        UsageError: a value is out of range.
    """

    precision: float = 0.005
    max_s: float = 10.0
    min_rounds: int = 5
    max_rounds: int = 20
    min_pairs: int = 5
    max_pairs: int = 9
    pair_s: float = 0.02

    def __post_init__(self) -> None:
        if not 0.0 < self.precision < 1.0:
            raise UsageError(f"precision {self.precision} is no share", "give a value between 0 and 1, such as 0.005")
        if not self.max_s > 0.0:
            raise UsageError(f"max_s {self.max_s}: a comparison needs more than 0 seconds")
        if not self.pair_s >= 0.0:
            raise UsageError(f"pair_s {self.pair_s}: a pair cannot take less than 0 seconds")
        if not 3 <= self.min_rounds <= self.max_rounds:
            raise UsageError(f"rounds {self.min_rounds} to {self.max_rounds}: need 3 <= min_rounds <= max_rounds")
        if not 1 <= self.min_pairs <= self.max_pairs:
            raise UsageError(f"pairs {self.min_pairs} to {self.max_pairs}: need 1 <= min_pairs <= max_pairs")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times faster a candidate is than a baseline.

    Attributes:
        speedup: latency of the baseline over that of the candidate; above 1 the candidate is faster.
        ci95: the 95 % interval of ``speedup``, over rebuilt instances.
        round_speedups: the median ratio of each round.
        baseline, candidate: the median of each pair's runs, in the order of the rounds.
        drift: relative change of both latencies from the first half of the rounds to the second (throttling).
        unstable: whether the latencies or their ratio changed by more than :data:`UNSTABLE_ABOVE` and more than by
            chance; the comparison should be repeated after a pause.
        shift: relative change of the ratio from the first half of the rounds to the second.
        undecided: whether it is the ratio that changed; it is then not to be relied upon. A machine that slows down
            both alike leaves it as it is.
        stage_s: median seconds of each stage of the baseline, and of the candidate; empty in what was kept before.
        model_sigma: relative standard deviation of ``speedup`` where it is a prediction, which ``ci95`` then holds too;
            None where it was measured.
    """

    speedup: float
    ci95: tuple[float, float]
    round_speedups: tuple[float, ...]
    baseline: Samples
    candidate: Samples
    drift: float
    unstable: bool
    shift: float = 0.0
    undecided: bool = False
    stage_s: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    model_sigma: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the interval excludes that both are equally fast."""
        return not self.ci95[0] <= 1.0 <= self.ci95[1]

    @property
    def rounds(self) -> int:
        """How many times both candidates were rebuilt."""
        return len(self.round_speedups)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, what can be derived included."""
        return {
            "speedup": self.speedup,
            "ci95": list(self.ci95),
            "significant": self.significant,
            "rounds": self.rounds,
            "round_speedups": list(self.round_speedups),
            "baseline": self.baseline.to_json(),
            "candidate": self.candidate.to_json(),
            "drift": self.drift,
            "unstable": self.unstable,
            "shift": self.shift,
            "undecided": self.undecided,
            "stage_s": [list(stages) for stages in self.stage_s],
            **({} if self.model_sigma is None else {"model_sigma": self.model_sigma}),
        }

    @classmethod
    def from_json(cls, data: object) -> Comparison:
        """Build a comparison from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        try:
            content: Any = data
            low, high = content["ci95"]
            first, second = content.get("stage_s", ((), ()))
            return cls(
                speedup=float(content["speedup"]),
                ci95=(float(low), float(high)),
                round_speedups=tuple(float(r) for r in content["round_speedups"]),
                baseline=Samples.from_json(content["baseline"]),
                candidate=Samples.from_json(content["candidate"]),
                drift=float(content["drift"]),
                unstable=bool(content["unstable"]),
                shift=float(content.get("shift", 0.0)),
                undecided=bool(content.get("undecided", False)),
                stage_s=(tuple(float(s) for s in first), tuple(float(s) for s in second)),
                model_sigma=float(content["model_sigma"]) if content.get("model_sigma") is not None else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"comparison is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Round:
    """Latencies of the pairs of a round, shape ``(pairs, 2)``: baseline, candidate; and all its runs' seconds.

    One observation of a pair is the median of a candidate's runs in it. The ratio is that of neighbouring runs, since
    these are disturbed alike: ``turns_s``, shape ``(turns, 2)``, all turns of all pairs.

    ``stages_s`` are the stages' seconds of these runs, shape ``(pairs, stages)`` each; ``model_sigma`` is that of the
    ratio of two predictions.
    """

    pairs_s: NDArray[np.float64]
    turns_s: NDArray[np.float64]
    spent_s: float
    stages_s: tuple[NDArray[np.float64], NDArray[np.float64]]
    model_sigma: float | None = None

    @property
    def log_ratio(self) -> float:
        return float(np.median(np.log(self.turns_s[:, 0] / self.turns_s[:, 1])))

    @property
    def log_level(self) -> float:
        return float(np.log(np.median(self.pairs_s, axis=0)).mean())


def compare(
    load_baseline: Load,
    load_candidate: Load,
    policy: ComparisonPolicy,
    rng: np.random.Generator,
    conditions: Callable[[], Mapping[str, Any]] = dict,
) -> Comparison:
    """Measure two candidates interleaved, over rebuilt instances, until their ratio is known well enough.

    A round gives the median of its turns' log ratios, so single disturbed runs do not count; the interval is Student's
    over the rounds, outlying rounds pulled in. By simulation (see the tests) it holds the true ratio in 94 to 97 %.

    Args:
        load_baseline: builds a new instance of what ``speedup`` relates to; closed at the end of each round.
        load_candidate: the same for the other one.
        policy: see there.
        rng: decides the order of each pair.
        conditions: tells at the end what the samples were taken under, to be kept with them.

    Raises:
        UnavailableError: a candidate cannot be built or failed.
    """
    rounds: list[_Round] = []
    while not _enough(rounds, policy):
        rounds.append(_round(load_baseline, load_candidate, policy, rng))
    ratios = np.array([r.log_ratio for r in rounds])
    middle, half = _interval(ratios)
    model_sigma = rounds[-1].model_sigma
    half = math.hypot(half, _NORMAL * (model_sigma or 0.0))
    drift, drifts = _change(np.array([r.log_level for r in rounds]))
    shift, shifts = _change(ratios)
    pairs_s = np.concatenate([r.pairs_s for r in rounds])
    under = dict(conditions())
    return Comparison(
        speedup=math.exp(middle),
        ci95=(math.exp(middle - half), math.exp(middle + half)),
        round_speedups=tuple(float(r) for r in np.exp(ratios)),
        baseline=Samples(tuple(float(v) for v in pairs_s[:, 0]), under),
        candidate=Samples(tuple(float(v) for v in pairs_s[:, 1]), under),
        drift=drift,
        unstable=drifts or shifts,
        shift=shift,
        undecided=shifts,
        stage_s=(_medians([r.stages_s[0] for r in rounds]), _medians([r.stages_s[1] for r in rounds])),
        model_sigma=model_sigma,
    )


def finals(
    loads: Sequence[Load],
    policy: ComparisonPolicy,
    rng: np.random.Generator,
    conditions: Callable[[], Mapping[str, Any]] = dict,
) -> tuple[Samples, ...]:
    """Measure a few candidates round-robin, to choose the one that is worth a comparison with the baseline.

    Each round loads, settles and runs the remaining candidates in random order, one at a time (three measured runs
    each, two of slow ones); one that is slower than the fastest with 99 % confidence drops out. After three rounds it
    ends when one is left or ``policy.max_s`` is used up, and after ``policy.max_rounds`` in any case.

    Returns:
        The samples of each candidate from the rounds that it took part in; the smallest median wins.

    Raises:
        UsageError: there is no candidate.
        UnavailableError: a candidate cannot be built or failed.
    """
    if not loads:
        raise UsageError("a final needs at least one candidate")
    values_s: list[list[float]] = [[] for _ in loads]
    medians_s: list[list[float]] = [[] for _ in loads]
    racing = set(range(len(loads)))
    spent_s, done = 0.0, 0
    while not (done >= 3 and (len(racing) == 1 or done >= policy.max_rounds or spent_s >= policy.max_s)):
        for index in rng.permutation(sorted(racing)):
            with closing(loads[index]()) as candidate:
                settling_s = _run(candidate)
                measured_s = [_run(candidate) for _ in range(3 if settling_s < _ROUND_S else 2)]
            values_s[index] += measured_s
            medians_s[index].append(statistics.median(measured_s))
            spent_s += settling_s + math.fsum(measured_s)
        done += 1
        if done >= 2:
            best = min(racing, key=lambda i: statistics.median(medians_s[i]))
            leader = Samples(tuple(medians_s[best]))
            racing -= {i for i in racing if i != best and slower(medians_s[i], leader, margin=0.0)}
    under = dict(conditions())
    return tuple(Samples(tuple(v), under) for v in values_s)


def _round(load_baseline: Load, load_candidate: Load, policy: ComparisonPolicy, rng: np.random.Generator) -> _Round:
    """Build and settle both, and run interleaved pairs, each turn in random order.

    A pair is one run of each, or of short runs a few in turns (``policy.pair_s``).

    Which pages of memory a candidate gets makes it some tenths of a per cent faster or slower, and hangs on who was
    built first, now and in the round before. Chance decides that. Where the two took turns, Linux gave each the same
    pages in every round: the rounds agreed with each other more than with the truth.
    """
    loads, first = (load_baseline, load_candidate), int(rng.integers(2))
    with ExitStack() as stack:
        built = {which: stack.enter_context(closing(loads[which]())) for which in (first, 1 - first)}
        settling_s = {which: _run(candidate) for which, candidate in built.items()}
        first_s = [settling_s[0], settling_s[1]]
        turns = min(_MOST_TURNS, max(1, math.ceil(policy.pair_s / max(first_s))))
        least = math.ceil(policy.min_pairs / turns)
        count = min(policy.max_pairs, max(least, int(_ROUND_S / (turns * sum(first_s)))))
        spent_s = sum(first_s)
        pairs_s = np.empty((count, turns, 2))
        stages_s: tuple[list[NDArray[np.float64]], ...] = ([], [])
        errors: list[NDArray[np.float64] | None] = [None, None]
        for turn in pairs_s.reshape(-1, 2):
            for which in map(int, rng.permutation(2)):
                if first_s[which] < SETTLE_BELOW_S:
                    spent_s += _run(built[which])
                batch = _batch(built[which])
                turn[which] = batch.latency_s[0]
                stages_s[which].append(batch.stage_s[0])
                errors[which] = batch.errors
        spent_s += float(pairs_s.sum())
        both = (np.array(stages_s[0]), np.array(stages_s[1]))
        return _Round(np.median(pairs_s, axis=1), pairs_s.reshape(-1, 2), spent_s, both, _model_sigma(*errors))


def _model_sigma(one: NDArray[np.float64] | None, other: NDArray[np.float64] | None) -> float | None:
    """Return the relative standard deviation of the ratio of two predictions; None where they were measured.

    What both plans may be wrong about in the same way cancels; what no term of a model describes does not.
    """
    if one is None or other is None:
        return None
    return math.hypot(float(np.linalg.norm(one - other)), _UNDESCRIBED)


def _run(candidate: Candidate) -> float:
    return float(_batch(candidate).latency_s[0])


def _batch(candidate: Candidate) -> Batch:
    """Run once, and check that the one latency is one."""
    batch = candidate.run(1)
    if len(batch.latency_s) != 1:
        raise UnavailableError(f"evaluator returned {len(batch.latency_s)} latencies for 1 run")
    Samples((float(batch.latency_s[0]),))
    return batch


def _medians(stages_s: Sequence[NDArray[np.float64]]) -> tuple[float, ...]:
    return tuple(float(s) for s in np.median(np.concatenate(stages_s), axis=0))


def _enough(rounds: Sequence[_Round], policy: ComparisonPolicy) -> bool:
    if len(rounds) < policy.min_rounds:
        return False
    if len(rounds) >= policy.max_rounds or math.fsum(r.spent_s for r in rounds) >= policy.max_s:
        return True
    middle, half = _interval(np.array([r.log_ratio for r in rounds]))
    return half <= max(policy.precision, _DECIDED * abs(middle))


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of the rounds' values and the half width of its interval, outliers pulled in."""
    middle = np.median(values)
    spread = max(1.4826 * float(np.median(np.abs(values - middle))), _ROUND_NOISE)
    kept = np.clip(values, middle - _OUTLIER * spread, middle + _OUTLIER * spread)
    error = float(kept.std(ddof=1)) / math.sqrt(len(kept))
    return float(kept.mean()), _student(_LEVEL, len(kept) - 1) * error


def _change(values: NDArray[np.float64]) -> tuple[float, bool]:
    """Return the relative change of exp(values) from the first to the last half, and whether it is too large."""
    size = len(values) // 2
    first, last = values[:size], values[-size:]
    step = float(np.median(last) - np.median(first))
    if size < 2:
        return math.expm1(step), False
    error = math.sqrt((float(first.var(ddof=1)) + float(last.var(ddof=1)) + 2 * _ROUND_NOISE**2) / size)
    return math.expm1(step), abs(step) > max(UNSTABLE_ABOVE, _student(0.99, 2 * size - 2) * error)


def _student(level: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + level / 2))
