"""Replayed comparisons: the product's decision code on stretches of a recorded trace, and what it decided.

All candidates of a comparison share one clock, so a disturbance hits them together, as it did when it was recorded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evaluators.base import Batch, Candidate
from evaluators.measurement.disturbance import Counters
from evaluators.measurement.final import Comparison, FinalPolicy, compare
from search_spaces.core.errors import UnavailableError
from tests.benchmarks.verdicts.document import judged
from tests.benchmarks.verdicts.trace import Trace

POLICY = FinalPolicy(max_s=20.0)  # that of `optimize compare`
EQUAL = "equal"
_LIMITS = {"quiet": 0.90, "disturbed": 0.60}
_DIFFERENT, _REVERSED = 0.06, 0.01
_THREAD = 1


@dataclass(slots=True)
class Stretch:
    """Consecutive rounds of a trace, replayed from one of them on.

    Attributes:
        round, block: which turns come next.
        reused: how many turns were replayed twice, since more were asked for than a round of the trace has.
    """

    trace: Trace
    round: int
    block: int = 0
    reused: int = 0
    turns: int = 0
    _built: set[int] = field(default_factory=set)
    _used: set[int] = field(default_factory=set)
    _at_s: float = 0.0
    _waited_s: float = 0.0

    def build(self, plan: int) -> Replayed:
        """Return the instance of a plan in the current round; the next round begins when a plan is built again."""
        if plan in self._built:
            self.round = (self.round + 1) % len(self.trace.run_s)
            self.block = 0
            self._built, self._used = set(), set()
        self._built.add(plan)
        return Replayed(self, plan)

    def turn(self, plan: int) -> tuple[int, int]:
        """Return round and block of a plan's next turn: the current block, or the next one where it had its turn."""
        if plan in self._used:
            self._used.clear()
            self.block += 1
        blocks = self.trace.run_s.shape[1]
        self._used.add(plan)
        self.turns += 1
        self.reused += self.block >= blocks
        return self.round, self.block % blocks

    def advance(self, seconds: float, lost: float) -> None:
        """Let time go by, a share of it without a core."""
        self._at_s += seconds
        self._waited_s += seconds * lost

    def counters(self) -> Counters:
        """Return the counters at the replayed moment."""
        return Counters(self._at_s, {_THREAD: round(self._waited_s * 1e9)})


@dataclass(slots=True)
class Replayed(Candidate):
    """An instance of a trace as a :class:`~evaluators.base.Candidate`."""

    stretch: Stretch
    plan: int
    begun: bool = False
    turn: tuple[int, int] | None = None
    settling: int = 0

    def run(self, n: int, stop_above_s: float = math.inf) -> Batch:  # noqa: ARG002 - a final never breaks off
        """Return recorded runs: first one alone, then in turns a few that settle and more that count."""
        trace = self.stretch.trace
        if n == 1 and not self.begun:
            values, lost = trace.first_s[self.stretch.round, self.plan : self.plan + 1], 0.0
        else:
            if self.turn is None:
                self.turn, self.settling = self.stretch.turn(self.plan), n
            settles = n == self.settling  # a turn measures more runs than it discards at a time
            where = (*self.turn, self.plan)
            recorded, lost = trace.run_s[where], float(trace.lost[where])
            values = recorded[: trace.settle] if settles else recorded[trace.settle :]
            if not settles:
                self.turn = None
        self.begun = True
        values = np.resize(values, n)  # where the machine has become faster, the same runs again
        if not np.isfinite(values).all():
            raise UnavailableError("this plan failed when the trace was recorded")
        self.stretch.advance(float(values.sum()), lost)
        return Batch(values, values[:, None])


def outcome(pair: str, found: Comparison) -> dict[str, Any]:
    """Return what is kept of a comparison of a slower plan (or an equal one) with a faster one."""
    shown = {"ratio": found.ratio.value, "low": found.ratio.ci95[0], "high": found.ratio.ci95[1]}
    kept = {name: round(value, 5) for name, value in shown.items()}
    return {"pair": pair, **kept, "rounds": found.final.rounds, "repeated": found.final.repeated}


def plans_of(names: Sequence[str], pair: str, rng: np.random.Generator) -> tuple[int, int]:
    """Return two plans of a trace to compare, the slower one first; which of the equal ones takes part is chance."""
    equal = [i for i, name in enumerate(names) if name == EQUAL]
    if pair == EQUAL:
        one, other = rng.permutation(equal)[:2]
        return int(one), int(other)
    return names.index(pair), int(rng.choice(equal))


def replayed(trace: Trace, seed: Sequence[int], pairs: Sequence[str], times: int) -> list[dict[str, Any]]:
    """Return comparisons of each pair over randomly chosen stretches of a trace."""
    rng, found = np.random.default_rng(seed), []
    for index in range(times):
        pair = pairs[index % len(pairs)]
        stretch = Stretch(trace, int(rng.integers(max(1, len(trace.run_s) - POLICY.max_rounds))))
        slower, faster = plans_of(trace.names, pair, rng)
        loads = partial(stretch.build, slower), partial(stretch.build, faster)
        row = outcome(pair, compare(*loads, POLICY, rng, counters=stretch.counters))
        found.append(row | {"turns": stretch.turns, "reused": stretch.reused})
    return found


def resample(path: Path, pairs: Sequence[str], times: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``times`` comparisons over a recorded trace, made by as many processes as there are cores."""
    jobs = len(os.sched_getaffinity(0))
    chunks = max(jobs, math.ceil(times / 100))
    shares = [len(range(i, times, chunks)) for i in range(chunks)]
    with ProcessPoolExecutor(jobs) as pool:
        tasks = [pool.submit(_chunk, path, (seed, i), pairs, share) for i, share in enumerate(shares) if share]
        return [row for task in tasks for row in task.result()]


def _chunk(path: Path, seed: Sequence[int], pairs: Sequence[str], times: int) -> list[dict[str, Any]]:
    return replayed(Trace.read(path), seed, pairs, times)


def summary(rows: Sequence[Mapping[str, Any]], truth: float) -> dict[str, Any]:
    """Return how often a pair was decided rightly; ``truth`` is how much longer the first plan takes, relative."""
    low, high = np.array([r["low"] for r in rows]), np.array([r["high"] for r in rows])
    return {
        "comparisons": len(rows),
        "slower": _mean(low > 1.0),
        "faster": _mean(high < 1.0),
        "not_decided": _mean((low <= 1.0) & (high >= 1.0)),
        "half_width": _mean((high - low) / 2),
        "coverage": _mean((low <= 1.0 + truth) & (high >= 1.0 + truth)),
        "ratio": float(np.median([r["ratio"] for r in rows])),
        "rounds": _mean([r["rounds"] for r in rows]),
        "turns_repeated": _mean([r["repeated"] for r in rows]),
    }


def _mean(values: Any) -> float:
    return float(np.mean(values))


def judge(condition: str, rows: Sequence[Mapping[str, Any]], truths: Mapping[str, float]) -> dict[str, Any]:
    """Return the summary of each pair with the limits of the condition."""
    found: dict[str, Any] = {}
    for pair, truth in truths.items():
        own = [row for row in rows if row["pair"] == pair]
        if not own:
            continue
        reported = summary(own, truth)
        if pair == EQUAL:
            reported["limits"] = {"different": judged(reported["slower"] + reported["faster"], _DIFFERENT, most=True)}
        else:
            least = _LIMITS["quiet" if condition == "quiet" else "disturbed"]
            reported["limits"] = {
                "found": judged(reported["slower"], least, most=False),
                "reversed": judged(reported["faster"], _REVERSED, most=True),
            }
        found[pair] = reported
    return found
