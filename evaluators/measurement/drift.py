"""Drift of the machine's speed during a study, from a reference plan that is measured from time to time.

Throttling, a host that gives the cores to others, or load that comes and goes change the latency of every plan. The
reference plan shows by how much, so that measurements taken minutes apart can be compared.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from dataclasses import dataclass, field

from evaluators.base import Candidate
from evaluators.measurement.disturbance import RunFilter
from evaluators.samples import Samples
from evaluators.sampling import noise

SHARE = 0.05
"""Measuring the reference plan takes at most this share of the time that other measurements take."""

LEAST = 0.02
"""A smaller relative change counts as noise: equal blocks of runs on a shared machine differ by 1.4 % (sd)."""

_SETTLE_S = 0.010
_LONG_S = 0.050
_SMOOTHED = 3  # probes in a moving median: a single one may be a spike


def probe(candidate: Candidate, runs: RunFilter) -> tuple[Samples, float]:
    """Run the reference plan a few times, and again where it waited for a core.

    Returns:
        Two or three samples, and the sum of all figures, as of the other measurements.
    """
    value_s, took_s = _once(candidate)
    spent_s, settled_s = value_s, took_s
    while settled_s < _SETTLE_S:
        value_s, took_s = _once(candidate)
        spent_s, settled_s = spent_s + value_s, settled_s + took_s

    def few() -> list[float]:
        nonlocal spent_s
        values_s = [_once(candidate)[0] for _ in range(2 if took_s >= _LONG_S else 3)]
        spent_s += math.fsum(values_s)
        return values_s

    values_s, _ = runs.run(few)
    return Samples(tuple(values_s)), spent_s


def _once(candidate: Candidate) -> tuple[float, float]:
    """Return the figure of a run, and the seconds that it takes."""
    batch = candidate.run(1)
    found = Samples(tuple(float(v) for v in batch.latency_s)).median
    return found, found if batch.run_s is None else batch.run_s


@dataclass(slots=True)
class Drift:
    """The speed of the machine in the course of a study.

    Attributes:
        reference: the first probe of the reference plan, at speed 1.
        probed_s, measured_s: seconds that later probes, and all other measurements, have taken.
    """

    reference: Samples | None = None
    probed_s: float = 0.0
    measured_s: float = 0.0
    _last_s: float = 0.0
    _positions: list[int] = field(default_factory=list)
    _logs: list[float] = field(default_factory=list)

    def due(self) -> bool:
        """Return whether there is time for a probe of the reference plan."""
        return self.reference is None or self.probed_s + self._last_s <= SHARE * self.measured_s

    def take(self, found: Samples, spent_s: float, position: int) -> None:
        """Record a probe of the reference plan.

        Args:
            found, spent_s: as :func:`probe` returns them.
            position: number of the next trial.
        """
        self._last_s = spent_s
        if self.reference is None:
            self.reference = found
        else:
            self.probed_s += spent_s
        self._positions.append(position)
        self._logs.append(math.log(found.median / self.reference.median))

    @property
    def speed(self) -> float:
        """Latency now relative to that at the start; exactly 1 where the change is noise."""
        return self._at(len(self._logs) - 1)

    def uncertainty(self, position: int, speed: float) -> float:
        """Return the relative error of the speed that a trial was scaled by.

        Args:
            position: number of the trial.
            speed: the assumed speed of the machine during the trial.
        """
        if self.reference is None or len(self._logs) < 2:
            return 0.0
        after = bisect_right(self._positions, position)
        around = [self._at(i) for i in (after - 1, after, after + 1) if 0 <= i < len(self._logs)]
        far = max((abs(math.log(s / speed)) for s in around), default=0.0)
        return far + noise(self.reference) / math.sqrt(_SMOOTHED)

    def _at(self, index: int) -> float:
        if index < 0:
            return 1.0
        value = statistics.median(self._logs[max(0, index - _SMOOTHED + 1) : index + 1])
        return math.exp(value) if abs(value) > math.log1p(LEAST) else 1.0
