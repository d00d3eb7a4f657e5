"""Traces: interleaved turns of rebuilt instances of several plans, and what they say of the plans' ratios.

The estimates here are independent of the product's final: every plan takes part in every block of every round.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluators.base import Candidate
from evaluators.measurement.disturbance import QUIET, Counters, RunFilter
from evaluators.measurement.final import SETTLE_BELOW_S, FinalPolicy, Load
from search_spaces.core.errors import UnavailableError

Array = NDArray[np.float64]

_POLICY = FinalPolicy()
_TRIMMED = 0.1  # share of the rounds at either end that do not count
_SETTLED, _GAIN, _FORGETS, _MOST_SETTLING_S = 1.03, 0.97, 1.01, 0.2
_KEPT_INSTANCES = 2
_SLOW_LOAD_S = 0.3  # where building takes longer, instances are kept


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns of plans; what was not measured is NaN.

    Attributes:
        names: of the plans; two plans of one name are equal.
        run_s: seconds of each run, shape ``(rounds, blocks, plans, runs)``; a round has instances of its own.
        lost: share of each turn without a core, shape ``(rounds, blocks, plans)``.
        first_s: seconds of each instance's first run, shape ``(rounds, plans)``.
        settle: how many runs at the beginning of a turn are discarded.
    """

    names: tuple[str, ...]
    run_s: Array
    lost: Array
    first_s: Array
    settle: int

    def save(self, path: Path) -> None:
        """Write the trace to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        run_s, lost, first_s = (values.astype(np.float32) for values in (self.run_s, self.lost, self.first_s))
        names, settle = np.array(self.names), np.array(self.settle)
        np.savez_compressed(path, names=names, settle=settle, run_s=run_s, lost=lost, first_s=first_s)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Return the trace of a file."""
        with np.load(path) as found:
            run_s, lost, first_s = (found[name].astype(np.float64) for name in ("run_s", "lost", "first_s"))
            return cls(tuple(map(str, found["names"])), run_s, lost, first_s, int(found["settle"]))

    @property
    def log_s(self) -> Array:
        """The log seconds of each turn (the median of its runs), shape ``(rounds, blocks, plans)``."""
        found: Array = np.median(np.log(self.run_s[..., self.settle :]), axis=-1)
        return found

    @property
    def typical_s(self) -> Array:
        """The median seconds of each plan's turns; NaN where it failed."""
        log_s = self.log_s.reshape(-1, len(self.names))
        return np.array([np.exp(np.median(v[np.isfinite(v)])) if np.isfinite(v).any() else np.nan for v in log_s.T])


def record(
    loads: Sequence[Load],
    names: Sequence[str],
    counters: Callable[[], Counters] | None,
    seconds: float,
    rng: np.random.Generator,
    *,
    blocks: int = 9,
    spare_runs: int = 0,
    least_rounds: int = 3,
    groups: Sequence[Hashable] = (),
) -> Trace:
    """Measure plans in interleaved turns, which are as long as those of the product's final.

    Args:
        seconds: begin no round later, once there are ``least_rounds``; from the end of the second round on, by which
            instances that are slow to build have been built.
        blocks: turns of each plan in a round.
        spare_runs: how many more runs a turn has than one of the final.
        groups: of each plan; those of one group take turns with each other, then those of the next one, since an
            accelerator's clock follows its load. By default all plans are one group.

    Where building is slow, two instances of each plan are kept and alternate. A plan that fails is NaN from then on.
    """
    instances, filtered = _Instances(loads), RunFilter(counters)
    settle = runs = 0
    found: list[tuple[Array, Array, Array]] = []
    begin_s = time.monotonic()
    try:
        while len(found) < least_rounds or time.monotonic() - begin_s < seconds:
            first_s = np.full(len(loads), np.nan)
            for plan in map(int, rng.permutation(len(loads))):
                first_s[plan] = instances.build(plan, len(found))
            if not runs:
                settle, runs = turn_runs(instances.typical_s())
                runs += spare_runs
            run_s, lost = np.full((blocks, len(loads), runs), np.nan), np.full((blocks, len(loads)), np.nan)
            for plans in _shuffled(instances.built, groups, rng):
                instances.run(plans[0], 1)  # which warms up an accelerator that idled
                for block in range(blocks):
                    for plan in map(int, rng.permutation(plans)):
                        instances.settle(plan, settle)
                        turn = partial(instances.run, plan, runs)
                        run_s[block, plan], lost[block, plan] = filtered.once(turn)
            instances.give_back()
            found.append((run_s, lost, first_s))
            if len(found) == _KEPT_INSTANCES:
                begin_s = time.monotonic()
    finally:
        instances.close()
    turns, shares, firsts = (np.stack(arrays) for arrays in zip(*found, strict=True))
    return Trace(tuple(names), turns, shares, firsts, settle)


def _shuffled(built: Iterable[int], groups: Sequence[Hashable], rng: np.random.Generator) -> list[list[int]]:
    """Return the plans that are built, by group, in random order of the groups."""
    apart: dict[Hashable, list[int]] = {}
    for plan in sorted(built):
        apart.setdefault(groups[plan] if groups else None, []).append(plan)
    found = list(apart.values())
    return [found[i] for i in rng.permutation(len(found))]


@dataclass(slots=True)
class _Instances:
    """Instances of plans, rebuilt each round; where building is slow, two of each plan are kept and alternate.

    Attributes:
        built: plan → its instance in this round.
        failed: plans that failed once; they are not built again.
    """

    loads: Sequence[Load]
    built: dict[int, Candidate] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    _kept: dict[int, list[Candidate]] = field(default_factory=dict)
    _best_s: dict[int, float] = field(default_factory=dict)

    def settle(self, plan: int, runs: int) -> None:
        """Run until the plan is about as fast as it has been or gains nothing more, as the product's final does."""
        spent_s, fastest_s = 0.0, math.inf
        while runs and plan not in self.failed and spent_s < _MOST_SETTLING_S:
            latency_s = self.run(plan, runs)
            spent_s += float(latency_s.sum())
            median_s, best_s = float(np.median(latency_s)), self._best_s.get(plan, math.inf)
            self._best_s[plan] = min(median_s, _FORGETS * best_s)
            if median_s <= _SETTLED * best_s or not median_s <= _GAIN * fastest_s:
                return
            fastest_s = median_s

    def build(self, plan: int, number: int) -> float:
        """Build the instance of a round and return the seconds of its first run; NaN where the plan fails."""
        if plan in self.failed:
            return math.nan
        kept = self._kept.setdefault(plan, [])
        if len(kept) == _KEPT_INSTANCES:
            self.built[plan] = kept[number % _KEPT_INSTANCES]
            return float(self.run(plan, 1)[0])
        begin_s = time.monotonic()
        try:
            self.built[plan] = self.loads[plan]()
        except UnavailableError:
            self.failed.add(plan)
            return math.nan
        if time.monotonic() - begin_s > _SLOW_LOAD_S:
            kept.append(self.built[plan])
        return float(self.run(plan, 1)[0])

    def run(self, plan: int, runs: int) -> Array:
        """Return the seconds of some runs, or NaN where the plan fails or has failed."""
        try:
            if plan not in self.failed:
                return self.built[plan].run(runs).latency_s
        except UnavailableError:
            self.failed.add(plan)
        return np.full(runs, np.nan)

    def typical_s(self) -> float:
        """Return the median seconds of the fastest plan.

        Raises:
            UnavailableError: every plan fails.
        """
        found = [float(np.median(self.run(plan, 20))) for plan in self.built]
        if all(map(math.isnan, found)):
            raise UnavailableError("no plan could be measured")
        return min(value for value in found if not math.isnan(value))

    def give_back(self) -> None:
        """Close what is not kept for later rounds."""
        for plan, candidate in self.built.items():
            if candidate not in self._kept.get(plan, ()):
                _close(candidate)
        self.built.clear()

    def close(self) -> None:
        """Close everything."""
        self.give_back()
        for candidate in itertools.chain.from_iterable(self._kept.values()):
            _close(candidate)
        self._kept.clear()


def turn_runs(typical_s: float) -> tuple[int, int]:
    """Return the discarded runs of a turn and all its runs, for inferences of some length."""
    settle = 0 if typical_s >= SETTLE_BELOW_S else math.ceil(_POLICY.settle_s / typical_s)
    return settle, settle + max(3 if settle else 1, math.ceil(_POLICY.turn_s / typical_s))


def ratio(trace: Trace, plan: int, other: int) -> tuple[float, float]:
    """Return the log of how many times as long a plan takes as another, and the half width of its 95 % interval.

    A round counts with the median of its blocks' differences; turns without a core are left out where enough others
    are left. The mean over rounds is trimmed, and its interval is Yuen's.
    """
    difference = trace.log_s[:, :, plan] - trace.log_s[:, :, other]
    calm = (trace.lost[:, :, plan] <= QUIET) & (trace.lost[:, :, other] <= QUIET)
    if calm.sum() * 4 >= calm.size:
        difference = np.where(calm, difference, np.nan)
    rows = difference[np.isfinite(difference).any(axis=1)]
    values = np.sort(np.nanmedian(rows, axis=1)) if len(rows) else np.empty(0)
    cut = int(_TRIMMED * len(values))
    inner = values[cut : len(values) - cut]
    if len(inner) < 2:
        return (float(inner.mean()) if len(inner) else math.nan), math.inf
    if len(np.unique(inner)) == 1:
        return float(inner[0]), 0.0
    winsorised = np.clip(values, inner[0], inner[-1])
    error = float(winsorised.std(ddof=1)) / ((1.0 - 2.0 * cut / len(values)) * math.sqrt(len(values)))
    return float(inner.mean()), student(len(inner) - 1) * error


def student(freedom: int) -> float:
    """Return how many standard errors to either side hold 95 %."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def _close(candidate: Candidate) -> None:
    with suppress(UnavailableError):
        candidate.close()
