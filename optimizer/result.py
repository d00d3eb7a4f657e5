"""What a study found, and the document that ``--json`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluators.base import Agreement
from evaluators.objectives import LATENCY, Objective
from evaluators.samples import Measurement, Samples
from optimizer.bounds import Bounds
from optimizer.decide import Verdict
from optimizer.history import History
from optimizer.pareto import Front
from search_spaces.graph import Graph
from search_spaces.plan import Plan
from search_spaces.platform import Platform

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that a finished, or interrupted, study can tell.

    Attributes:
        baselines: name → plan, in the order of the table; ``history`` knows what they were measured at.
        verdict: None where the study was interrupted before the end.
        bounds: what no plan goes below in the model; None where nothing is known of it yet.
        front: of several objectives the plans that none beats; ``best`` is at its knee.
        objective: what was made small, the first of several; all numbers of plans are in its unit.
        deployed: how the outputs of the written stage files compare with the whole model's; None where none were.
        exhausted: whether every plan of the space was tried.
        wall_s: of this session, not of those that it resumed.
    """

    graph: Graph
    platform: Platform
    evaluator: str
    history: History
    baselines: Mapping[str, Plan]
    verdict: Verdict | None
    bounds: Bounds | None
    deployed: Agreement | None
    cardinality: int
    exhausted: bool
    wall_s: float
    run_dir: Path
    objective: Objective = field(default=LATENCY, kw_only=True)
    front: Front | None = field(default=None, kw_only=True)

    @property
    def best(self) -> Plan | None:
        """The plan to use; without a verdict the one with the smallest median."""
        if self.verdict is not None:
            return self.verdict.best
        ranking = self.history.ranking()
        return ranking[0].plan if ranking else None

    def samples(self, plan: Plan) -> Samples | None:
        """Return the samples to report of a plan: those of the final comparison where it took part."""
        if self.verdict is not None and self.verdict.comparison is not None:
            if plan == self.verdict.challenger:
                return self.verdict.comparison.candidate
            if plan == self.verdict.baseline[1]:
                return self.verdict.comparison.baseline
        measured = self.measurement(plan)
        return measured.latency_s if measured else None

    def stage_s(self, plan: Plan) -> tuple[float, ...]:
        """Return the seconds of a plan's stages, taken with what :meth:`samples` returns; empty where it has none."""
        compared = self.verdict.comparison if self.verdict else None
        if self.verdict is not None and compared is not None:
            if plan == self.verdict.challenger:
                return compared.stage_s[1]
            if plan == self.verdict.baseline[1]:
                return compared.stage_s[0]
        measured = self.measurement(plan)
        return measured.stage_s if measured else ()

    @property
    def slower_at_the_end(self) -> float | None:
        """How many times as long things took in the final comparison as during the search; None without one."""
        compared = self.verdict.comparison if self.verdict else None
        if self.verdict is None or compared is None or self.verdict.challenger is None:
            return None
        pairs = ((self.verdict.baseline[1], compared.baseline), (self.verdict.challenger, compared.candidate))
        ratios = [s.median / m.median_s for p, s in pairs if (m := self.measurement(p)) is not None]
        return math.sqrt(min(ratios) * max(ratios)) if ratios else None

    def measurement(self, plan: Plan) -> Measurement | None:
        """Return what a plan was measured at during the search."""
        trial = self.history.known.get(plan.digest)
        return trial.measurement if trial else None

    @property
    def model_bound_s(self) -> float | None:
        """What no plan of the space goes below in the model: its optimum, where that is proven."""
        return self.bounds.space_s if self.bounds else None

    @property
    def gap(self) -> float | None:
        """How far the best plan's median is above the model's bound, relative; below 0 the model is wrong."""
        samples = self.samples(self.best) if self.best else None
        if samples is None or not self.model_bound_s:
            return None
        return samples.median / self.model_bound_s - 1.0

    @property
    def model_error(self) -> float | None:
        """By what share of the bound the best plan's median is below it: the model is wrong by so much at least."""
        samples = self.samples(self.best) if self.best else None
        return self.bounds.error(samples.median) if samples is not None and self.bounds is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        verdict = self.verdict
        comparison = verdict.comparison if verdict else None
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {"name": self.graph.name, "digest": self.graph.digest, "operators": len(self.graph.operators)},
            "platform": self.platform.to_json(),
            "evaluator": self.evaluator,
            "objective": self.objective.name,
            **({"front": self.front.to_json()} if self.front else {}),
            "complete": verdict is not None,
            "best": self._plan_json(self.best) if self.best else None,
            "baselines": {name: self._plan_json(plan) for name, plan in self.baselines.items()},
            "speedup": {
                "ratio": comparison.speedup,
                "ci95": list(comparison.ci95),
                "significant": comparison.significant,
                "model_sigma": comparison.model_sigma,
                "unstable": comparison.unstable,
                "baseline": verdict.baseline[0],
                "plan": verdict.challenger.to_json() if verdict.challenger else None,
            }
            if verdict and comparison
            else None,
            "slower_at_the_end": self.slower_at_the_end,
            f"model_bound_{self.objective.shown.lower()}": self.model_bound_s * 1e3
            if self.model_bound_s is not None
            else None,
            "gap": self.gap,
            "model_error": self.model_error,
            "bounds": self.bounds.to_json() if self.bounds else None,
            "trials": len(self.history.trials),
            "unique_plans": self.history.measured,
            "cache_hits": self.history.repeats,
            "space": {"plans": self.cardinality, "exhausted": self.exhausted},
            "wall_s": self.wall_s,
            "run_dir": str(self.run_dir),
        }

    def _plan_json(self, plan: Plan) -> dict[str, Any]:
        samples, measured = self.samples(plan), self.measurement(plan)
        failure = self.history.known[plan.digest].failure if plan.digest in self.history.known else "not measured"
        return {
            "plan": plan.to_json(),
            self.objective.key: {
                "median": samples.median * 1e3,
                "ci95": [x * 1e3 for x in samples.ci95],
                "samples": len(samples.values_s),
                "values": [x * 1e3 for x in samples.values_s],
                "conditions": dict(samples.conditions),
            }
            if samples
            else None,
            f"stage_{self.objective.shown.lower()}": [s * 1e3 for s in stage_s]
            if (stage_s := self.stage_s(plan))
            else None,
            **({"figures": dict(measured.figures)} if measured and measured.figures else {}),
            "identical": measured.agreement.identical if measured and measured.agreement else None,
            "max_rel_error": measured.agreement.max_rel_error if measured and measured.agreement else None,
            "tolerance": measured.agreement.tolerance if measured and measured.agreement else None,
            "stopped": measured.stopped if measured else None,
            "failure": failure or None,
        }
