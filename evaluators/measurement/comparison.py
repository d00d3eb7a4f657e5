"""Which of two plans is faster, and by how much: a final of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluators.measurement.disturbance import NOTHING, Counters, Disturbance
from evaluators.measurement.final import Final, FinalPolicy, Load, run_final
from evaluators.samples import Samples
from search_spaces.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times faster a candidate is than a baseline.

    Attributes:
        speedup: latency of the baseline over that of the candidate; above 1 the candidate is faster.
        ci95: the 95 % interval of ``speedup``, over rebuilt instances; of predictions, with the model's error.
        baseline, candidate: the median of each turn, in the state of the machine that both share.
        rounds: how many times both were rebuilt.
        stage_s: median seconds of each stage of the baseline, and of the candidate.
        model_sigma: relative standard deviation of ``speedup`` where it is a prediction, else None.
        disturbance: what kept the measuring threads off their cores.
        repeated: how many turns were repeated for it.
    """

    speedup: float
    ci95: tuple[float, float]
    baseline: Samples
    candidate: Samples
    rounds: int
    stage_s: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    model_sigma: float | None = None
    disturbance: Disturbance = NOTHING
    repeated: int = 0

    @property
    def significant(self) -> bool:
        """Whether the interval excludes that both are equally fast."""
        return not self.ci95[0] <= 1.0 <= self.ci95[1]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, what can be derived included."""
        return {
            "speedup": self.speedup,
            "ci95": list(self.ci95),
            "significant": self.significant,
            "rounds": self.rounds,
            "baseline": self.baseline.to_json(),
            "candidate": self.candidate.to_json(),
            "stage_s": [list(stages) for stages in self.stage_s],
            "disturbance": self.disturbance.to_json(),
            "repeated": self.repeated,
            **({} if self.model_sigma is None else {"model_sigma": self.model_sigma}),
        }


def compare(
    load_baseline: Load,
    load_candidate: Load,
    policy: FinalPolicy,
    rng: np.random.Generator,
    conditions: Callable[[], Mapping[str, Any]] = dict,
    counters: Callable[[], Counters] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure two plans against each other until their ratio is known well enough; see :mod:`.final`.

    Raises:
        UnavailableError: a plan cannot be built, or failed.
    """
    found = run_final(
        (load_baseline, load_candidate),
        policy,
        rng,
        conditions=conditions,
        counters=counters,
        watched=lambda _: (0, 1),
        computed=counters is None,
        progress=progress,
    )
    return comparison_of(found, 0, 1)


def comparison_of(found: Final, baseline: int, candidate: int) -> Comparison:
    """Return the comparison of two plans of a final.

    Raises:
        UnavailableError: one of them failed.
    """
    one, other = found.standings[baseline], found.standings[candidate]
    if one.failure or other.failure or one.samples is None or other.samples is None:
        raise UnavailableError(one.failure or other.failure or "a plan was not measured in the final")
    ratio = found.ratio(baseline, candidate)
    sigma = found.model_sigma(baseline, candidate)
    return Comparison(
        ratio.value,
        (ratio.low, ratio.high),
        one.samples,
        other.samples,
        found.rounds,
        (one.stage_s, other.stage_s),
        sigma if found.predicted else None,
        found.disturbance,
        found.repeated,
    )
