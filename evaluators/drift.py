"""Does the machine still run at the speed that it had? One plan, measured again and again, tells.

A plan that is looked at from time to time takes the time that it took at first, or the machine has changed: it
throttles, its host gives the cores to others, a neighbour came or went. One look that differs may be a spike, so a
second one, made at once, has to agree. Decisions follow from the latencies alone, never from a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from evaluators.base import Candidate
from evaluators.racing import noise
from evaluators.samples import Samples

SHARE = 0.02
"""Looking takes at most this share of the time that measuring takes."""

CHANGE = 0.05
"""The smallest relative change that counts: equal blocks of runs on a shared machine differ by 1.4 % (sd)."""

PAUSES_S = (1.0, 2.0, 4.0)
"""How long to wait for the old speed to come back before the new one is taken for lasting."""

_SURE = 4.0  # standard deviations
_SETTLE_S = 0.010
_LONG_S = 0.050


def look(candidate: Candidate) -> tuple[Samples, float]:
    """Run a plan a few times: to settle, then two or three that count; return these, and the seconds of all."""
    spent_s = latest_s = _once(candidate)
    while spent_s < _SETTLE_S:
        latest_s = _once(candidate)
        spent_s += latest_s
    values_s = [_once(candidate) for _ in range(2 if latest_s >= _LONG_S else 3)]
    return Samples(tuple(values_s)), spent_s + math.fsum(values_s)


def _once(candidate: Candidate) -> float:
    return Samples(tuple(float(v) for v in candidate.run(1).latency_s)).median


def change(reference: Samples, found: Samples) -> float:
    """Return how many times as long things take now as they did (1.2: slower by 20 %); exactly 1 where that is noise.

    A spike within a look does not count, since its fastest run must have changed too.
    """
    scale = max(noise(reference), noise(found))
    error = scale * math.sqrt(math.pi / 2 * (1 / len(reference.values_s) + 1 / len(found.values_s)))
    step = math.log(found.median / reference.median)
    if step > 0:
        step = min(step, math.log(min(found.values_s) / min(reference.values_s)))
    return math.exp(step) if abs(step) > max(math.log1p(CHANGE), _SURE * error) else 1.0


@dataclass(slots=True)
class SpeedWatch:
    """What is known of the machine's speed; told of all looks, it says when to look and what has changed.

    Attributes:
        reference: the first look: at speed 1.
        speed: how many times as long things take now as they did then.
        good: whatever was measured before this position was measured at the speed that was thought.
        looked_s, measured_s: seconds that looks after the first, and all other measurements, have taken.
    """

    reference: Samples | None = None
    speed: float = 1.0
    good: int = 0
    looked_s: float = 0.0
    measured_s: float = 0.0
    _last_s: float = field(default=0.0)

    def due(self) -> bool:
        """Return whether there is time for a look."""
        return self.reference is None or self.looked_s + self._last_s <= SHARE * self.measured_s

    def take(self, found: Samples, spent_s: float, position: int) -> float:
        """Take note of a look, and return the change of speed since the last one that counted; 1 where there is none.

        Args:
            position: number of the next measurement.
        """
        self._last_s = spent_s
        if self.reference is None:
            self.reference, self.good = found, position
            return 1.0
        self.looked_s += spent_s
        now = change(self._expected(), found)
        if now == 1.0:
            self.good = position
        return now

    def settle(self, changed: float, position: int) -> None:
        """Take a change of speed for lasting."""
        self.speed *= changed
        self.good = position

    def _expected(self) -> Samples:
        if self.reference is None:
            raise ValueError("nothing was looked at")
        return Samples(tuple(value * self.speed for value in self.reference.values_s))
