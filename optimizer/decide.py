"""The end of a study: the fastest plans once more, interleaved, and the verdict against the best baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evaluators.base import Candidate, Session, conditions_of
from evaluators.comparison import Comparison, ComparisonPolicy, finals
from evaluators.comparison import compare as compare_pair
from evaluators.samples import Samples
from optimizer.history import History, Trial
from search_spaces.errors import UnavailableError, UnstableError
from search_spaces.graph import Graph
from search_spaces.plan import Plan

_PLANS = 3
_ABOUT = 1.25  # times the fastest, for a processor to be as fast as it after all
_PAUSES_S = (2.0, 5.0)
_FINALS = ComparisonPolicy(max_s=4.0, min_rounds=3, max_rounds=6)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the final measurements say.

    Attributes:
        best: the plan to use: the challenger where it is significantly faster than the best baseline, else that.
        baseline: name and plan of the best baseline.
        challenger: the fastest plan that is no baseline, or None where every measured plan is one.
        comparison: challenger against the best baseline, or None without a challenger.
        again_s: name of a baseline → median of its samples in the end; those of the search where it was the only one.
    """

    best: Plan
    baseline: tuple[str, Plan]
    challenger: Plan | None
    comparison: Comparison | None
    again_s: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {
            "best": self.best.to_json(),
            "baseline": {"name": self.baseline[0], "plan": self.baseline[1].to_json()},
            "challenger": self.challenger.to_json() if self.challenger else None,
            "comparison": self.comparison.to_json() if self.comparison else None,
            **({"again_s": dict(self.again_s)} if self.again_s else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Build a verdict from what :meth:`to_json` returned; errors are those of the parts."""
        challenger, comparison = data["challenger"], data["comparison"]
        return cls(
            Plan.from_json(data["best"]),
            (str(data["baseline"]["name"]), Plan.from_json(data["baseline"]["plan"])),
            Plan.from_json(challenger) if challenger is not None else None,
            Comparison.from_json(comparison) if comparison is not None else None,
            {str(name): float(value) for name, value in data.get("again_s", {}).items()},
        )


def decide(
    graph: Graph,
    session: Session,
    history: History,
    baselines: Mapping[str, Plan],
    policy: ComparisonPolicy,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    believed: Sequence[Plan] | None = None,
    fits: Callable[[Trial], bool] = lambda _: True,
) -> Verdict:
    """Measure the fastest plans and baselines again, interleaved, and compare the best of each.

    The plans that looked fastest were in part lucky; fresh samples choose among them, and others decide.

    Args:
        baselines: name → plan; those that were not measured are left out.
        believed: measured plans, by what all that was measured says of them, the best first (default: by their own
            medians); the fastest by its own median is a finalist too.
        sleep: waits some seconds, for the machine to calm down.
        fits: whether a plan keeps what is limited; where no baseline does, the best other plan wins anyway.

    Raises:
        UnavailableError: no baseline could be measured, or the device failed.
        UnstableError: the ratio of the two best changed while it was measured, each time.
    """
    rng = np.random.default_rng([seed, 1])
    names = {plan.digest: name for name, plan in reversed(list(baselines.items()))}
    ranking = [t for t in history.ranking() if fits(t)]
    plans = _finalists([t for t in ranking if t.plan.digest not in names], believed)
    fitting = _strongest([t for t in ranking if t.plan.digest in names])
    firsts = fitting or _strongest([t for t in history.ranking() if t.plan.digest in names])
    if not firsts:
        raise UnavailableError("no baseline could be measured", "see the failures in the trial log")

    def load(trial: Trial) -> Callable[[], Candidate]:
        return lambda: session.load(graph, trial.plan, fresh=True)

    conditions, finalists = conditions_of(session), [*plans, *firsts]
    if len(plans) > 1 or len(firsts) > 1:
        progress(f"measuring the {len(finalists)} fastest again, in turns")
        samples = finals([load(t) for t in finalists], _FINALS, rng, conditions)
    else:
        samples = tuple(t.measurement.latency_s for t in finalists if t.measurement)
    baseline = _simplest(list(zip(samples[len(plans) :], firsts, strict=True)))
    named = names[baseline.plan.digest], baseline.plan
    again_s = {names[t.plan.digest]: s.median for s, t in zip(samples[len(plans) :], firsts, strict=True)}
    if not plans:
        return Verdict(baseline.plan, named, None, None, again_s)
    challenger = min(zip(samples[: len(plans)], plans, strict=True), key=lambda pair: pair[0].median)[1]
    progress("comparing the best plan with the best baseline")
    comparison = settled(
        lambda: compare_pair(load(baseline), load(challenger), policy, rng, conditions),
        f"the best plan to “{named[0]}”",
        progress,
        sleep,
    )
    wins = not fitting or (comparison.significant and comparison.speedup > 1.0)
    return Verdict(challenger.plan if wins else baseline.plan, named, challenger.plan, comparison, again_s)


def settled(
    compare: Callable[[], Comparison],
    ratio_of: str,
    progress: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Comparison:
    """Compare, and again after a pause where something changed meanwhile.

    A machine that changes its speed slows both alike, so that is looked at once more and then accepted; a ratio that
    changes is not.

    Args:
        ratio_of: what is compared, for the error.

    Raises:
        UnstableError: the ratio changed in each of three comparisons.
    """
    found = compare()
    for number, pause_s in enumerate(_PAUSES_S):
        if not (found.undecided or (found.unstable and number == 0)):
            return found
        progress(f"the machine was not steady; comparing again after {pause_s:.0f} s")
        sleep(pause_s)
        found = compare()
    if found.undecided:
        first, *_, last = found.round_speedups
        raise UnstableError(
            f"measurements are too unstable to decide: the ratio of {ratio_of} went from {first:.3f} to {last:.3f} "
            f"while it was measured, and the {len(_PAUSES_S)} times before were no steadier"
        )
    return found


def _finalists(ranking: list[Trial], believed: Sequence[Plan] | None) -> list[Trial]:
    """Return the plans that are measured again: those that are believed in, and the one that was fastest itself."""
    own = {trial.plan.digest: trial for trial in ranking}
    first = [own[plan.digest] for plan in believed or () if plan.digest in own][: _PLANS - 1]
    return list({trial.plan.digest: trial for trial in (*first, *ranking[:_PLANS])}.values())[:_PLANS]


def _strongest(ranking: list[Trial]) -> list[Trial]:
    """Return the fastest baseline, and those that leave the model whole and are about as fast as the fastest of these.

    What a trial says of a processor can be wrong by more than its interval: an adapter is awake in one and not in the
    next.
    """
    whole = [t for t in ranking if len(t.plan.stages) == 1]
    near = [t for t in whole if t.median_s <= _ABOUT * whole[0].median_s]
    return list({t.plan.digest: t for t in (*ranking[:1], *near[:_PLANS])}.values())


def _simplest(found: list[tuple[Samples, Trial]]) -> Trial:
    """Return the trial with the fewest stages among those that are not clearly slower than the fastest."""
    fastest = min((samples for samples, _ in found), key=lambda samples: samples.median)
    tied = [
        (len(trial.plan.stages), i) for i, (samples, trial) in enumerate(found) if samples.ci95[0] <= fastest.ci95[1]
    ]
    return found[min(tied)[1]][1]
