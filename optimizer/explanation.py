"""An explanation of why a plan is what it is, as values and as the document of ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.exact.bound import Relaxation
from search_spaces.plan import Plan

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a plan.

    Attributes:
        predicted_s: by the model; None where it cannot run, or where the model does not tell.
        measured_s: the median in the study; None where it was not measured.
        why_not: why it cannot be, or "".
    """

    predicted_s: float | None
    measured_s: float | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of the plan, and its neighbours.

    Attributes:
        before: the operator before which it lies.
        nbytes: what crosses there.
        left, right: the plan with the cut one operator earlier, and later.
    """

    before: int
    nbytes: int
    left: Told
    right: Told


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the plan: what it does, what it took, and what the plan would take with it on each other processor."""

    operators: str
    processor: str
    measured_s: float | None
    elsewhere: tuple[tuple[str, Told], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """A constraint, or a cost, and what the best plan would take without it.

    Attributes:
        what: in words.
        without_s: what the best chain takes without it in the model; None where none is left.
        saves_s: by how much that is faster than the best chain with it; it binds where this is more than 0.
    """

    what: str
    without_s: float | None
    saves_s: float | None

    @property
    def binds(self) -> bool:
        """Whether the best plan would be faster without it."""
        return self.saves_s is not None and self.saves_s > 0


@dataclass(frozen=True, slots=True)
class ByStages:
    """The best plan of so many parts: in the model, and of those that were measured."""

    stages: int
    predicted_s: float | None
    predicted: Plan | None
    measured_s: float | None
    measured: Plan | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why this plan.

    Attributes:
        run: folder of the study.
        model: who predicts, in words.
        best: the plan, and what is known of it.
        limits: constraints first, then costs and processors.
        baselines: the counterfactuals that a person would have tried, by name.
        relaxed: what no plan whatsoever goes below in the model.
        final: how the fastest other plan compared in the final comparison, as in the result; None without one.
        note: what could not be told, or "".
    """

    run: Path
    model: str
    plan: Plan
    best: Told
    cuts: tuple[Cut, ...]
    parts: tuple[Part, ...]
    limits: tuple[Limit, ...]
    by_stages: tuple[ByStages, ...]
    baselines: tuple[tuple[str, Told], ...]
    relaxed: Relaxation
    final: Mapping[str, Any] | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``; times are in milliseconds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run_dir": str(self.run),
            "predicted_by": self.model,
            "plan": self.plan.to_json(),
            "best": _told(self.best, self.best),
            "cuts": [
                {"before": c.before, "nbytes": c.nbytes, "left": _told(c.left, self.best)}
                | {"right": _told(c.right, self.best)}
                for c in self.cuts
            ],
            "parts": [
                {
                    "operators": p.operators,
                    "processor": p.processor,
                    "measured_ms": _ms(p.measured_s),
                    "elsewhere": {name: _told(told, self.best) for name, told in p.elsewhere},
                }
                for p in self.parts
            ],
            "limits": [
                {"what": x.what, "binds": x.binds, "without_ms": _ms(x.without_s), "saves_ms": _ms(x.saves_s)}
                for x in self.limits
            ],
            "by_stages": [
                {
                    "stages": k.stages,
                    "predicted_ms": _ms(k.predicted_s),
                    "predicted": k.predicted.to_json() if k.predicted else None,
                    "measured_ms": _ms(k.measured_s),
                    "measured": k.measured.to_json() if k.measured else None,
                }
                for k in self.by_stages
            ],
            "baselines": {name: _told(told, self.best) for name, told in self.baselines},
            "no_plan_below": {
                "predicted_ms": _ms(self.relaxed.latency_s),
                "critical_path_ms": _ms(self.relaxed.critical_path_s),
                "work_ms": _ms(self.relaxed.work_s),
            },
            "final_comparison": self.final,
            "note": self.note or None,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _told(told: Told, best: Told) -> dict[str, Any]:
    more = None if told.predicted_s is None or best.predicted_s is None else told.predicted_s - best.predicted_s
    return {
        "predicted_ms": _ms(told.predicted_s),
        "predicted_more_ms": _ms(more),
        "measured_ms": _ms(told.measured_s),
        "why_not": told.why_not or None,
    }
