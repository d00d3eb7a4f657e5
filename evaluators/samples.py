"""Samples and measurements of plans: every latency, the conditions, and the statistics of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from evaluators.base import Agreement
from evaluators.schedule import Events
from evaluators.workload.outcome import read_figures
from search_spaces.core.bounded import built, plain
from search_spaces.core.errors import RunFolderError, UnavailableError

RUN_NOISE = 0.01
"""Relative standard deviation of a run, assumed before there are samples (a shared, otherwise idle CPU)."""

Stopped = Literal["precision", "limit", "raced", "single-run"]
_WHERE_THERE = ("figures", "load_s", "outcome")  # documents leave these out where they are empty

LEAST_S, MOST_S = 1e-12, 1e12
"""Limits of a latency, so that sums and other units of it stay finite, and ratios mean something."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Latencies of one candidate, in seconds, in the order in which they were taken.

    They do not show differences between instances of one plan (memory placement, 0.4 to 0.65 %);
    :func:`evaluators.measurement.final.FinalComparison` does.

    Attributes:
        values_s: at least one value; each is finite and greater than 0.
        conditions: under which they were taken (governor, load, versions, …), plain values.

    Raises:
        UnavailableError: there is no value, or one is not a latency.
    """

    values_s: tuple[float, ...]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values_s:
            raise UnavailableError("a measurement has no samples")
        for index, value in enumerate(self.values_s):
            if not 0.0 < value <= MOST_S:
                raise UnavailableError(f"sample {index} of {len(self.values_s)} is {value} s, which is not a latency")

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.values_s)

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % interval of the median, in seconds.

        From 6 samples on these are the order statistics that cover the median with at least 95 % for any distribution
        (binomial). Fewer samples do not suffice (5: 94 %, 3: 75 %, 1: 0 %), so the interval then reaches from the
        fastest to the slowest, and at least as far as the error of the median of runs with noise
        :data:`RUN_NOISE`.
        """
        ordered = sorted(self.values_s)
        count = len(ordered)
        if count >= 6:
            rank = _rank95(count)
            return ordered[rank - 1], ordered[count - rank]
        spread = 1.96 * RUN_NOISE * math.sqrt((math.pi / 2 if count > 2 else 1.0) / count)
        return min(ordered[0], self.median * (1.0 - spread)), max(ordered[-1], self.median * (1.0 + spread))

    @property
    def precision(self) -> float:
        """Distance from the median to the farther end of :attr:`ci95`, relative to the median."""
        low, high = self.ci95
        return max(high - self.median, self.median - low) / self.median

    def to_json(self) -> dict[str, Any]:
        """Return the samples as plain values."""
        found: dict[str, Any] = plain(Samples, self)
        return found

    @classmethod
    def from_json(cls, data: object) -> Samples:
        """Build samples from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            RunFolderError: a field is missing or has the wrong type, or a value is not a latency.
        """
        return built(cls, data, "samples are", RunFolderError)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one candidate.

    Attributes:
        latency_s: the samples after the warm-up.
        stage_s: median seconds of each stage of the plan over these samples, shape ``(stages,)``; 0 where every run
            was interrupted before the end of the stage.
        warmup_s: seconds of the runs before the samples; empty where the first run is the sample.
        stopped: why no more runs were made: the interval is narrow enough (``precision``), the limit of runs or seconds
            is reached (``limit``), the candidate lost against the incumbent (``raced``), or its single-run probe was
            not promising, and there was no time for another run (``single-run``).
        timeline: the last run, where the evaluator reports it.
        agreement: how the outputs compare with the whole model's, where they were compared.
        cold: estimated ratio of the sample to a warm run, where it is a first run; else 1.
        promised: whether later runs were made only because the first one was fast.
        figures: medians of further objectives, by the names of :mod:`evaluators.objectives`, in their units.
        load_s: seconds that loading took, where it was slow; cached stages take none.
        outcome: of several models, medians of the figures of :meth:`~evaluators.workload.outcome.Outcome.to_json`.
    """

    latency_s: Samples
    stage_s: tuple[float, ...]
    warmup_s: tuple[float, ...]
    stopped: Stopped
    timeline: Events | None = None
    agreement: Agreement | None = None
    cold: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    promised: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    load_s: float = 0.0
    outcome: Annotated[Mapping[str, Any], BeforeValidator(read_figures)] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Estimated seconds of a warm run."""
        return self.latency_s.median / self.cold

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain values."""
        found = plain(Measurement, self)
        return {name: value for name, value in found.items() if value or name not in _WHERE_THERE}

    @classmethod
    def from_json(cls, data: object) -> Measurement:
        """Build a measurement from what :meth:`to_json` returned; unknown fields are ignored.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        return built(cls, data, "measurement is", RunFolderError)


@cache
def _rank95(count: int) -> int:
    """Return the largest k for which the k-th smallest to the k-th largest of ``count`` cover the median with 95 %."""
    rank, ways, below = 0, 1, 1  # below: ways in which at most ``rank`` of the samples lie under the median
    while 40 * below <= 2**count:  # 2.5 % on each side
        rank += 1
        ways = ways * (count - rank + 1) // rank
        below += ways
    return rank
