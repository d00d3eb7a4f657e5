"""The front of several objectives (plans that no other one dominates), its knee, and the finals that decide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.base import conditions_of, counters_of
from evaluators.measurement.final import Final, FinalComparison
from evaluators.objectives import OBJECTIVES, Objective, Priced, Pricing, memory_gb
from evaluators.samples import Measurement
from evaluators.workload.objectives import find_workload_objective
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.front import Criterion, busiest, memory, summed, undominated
from optimizer.model.bounds import objective_model
from optimizer.study.history import History, Trial
from optimizer.study.verdict import FinalSettings, Verdict, decide
from search_spaces.core.errors import PlanError, RunFolderError, UnavailableError, damage
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.wording import plural

# Number of finalists, each of which takes part in the final of every objective, and how far behind the front of the
# search they are; what is computed is the same again.
_MEASURED, _COMPUTED = (12, 1.03), (64, 0.0)


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """A plan of the front.

    Attributes:
        name: of the baseline, or "".
        values: in the objectives' units and order.
    """

    plan: Plan
    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """The plans that no other measured plan dominates, ascending by the first objective.

    Attributes:
        knee: index of the plan with the least loss over all objectives, each relative to its range on the front.
    """

    objectives: tuple[Objective, ...]
    plans: tuple[FrontPlan, ...]
    knee: int

    @classmethod
    def from_json(cls, data: Any) -> Front:
        """Build a front from what :meth:`to_json` returned.

        Raises:
            RunFolderError: a field is missing or has the wrong type.
        """
        try:
            objectives = tuple(_objective(str(name)) for name in data["objectives"])
            plans = tuple(
                FrontPlan(
                    Plan.from_json(each["plan"]),
                    str(each["name"] or ""),
                    tuple(float(each["values"][o.value_key]) / 1e3 for o in objectives),
                )
                for each in data["plans"]
            )
            at = next(i for i, each in enumerate(data["plans"]) if each["knee"])
        except (KeyError, TypeError, ValueError, StopIteration, PlanError) as error:
            raise RunFolderError(f"the front in the log is damaged: {damage(error)}") from error
        return cls(objectives, plans, at)

    def to_json(self) -> dict[str, Any]:
        """Return the front as plain values, in thousandths of the objectives' units."""
        keys = [o.value_key for o in self.objectives]
        return {
            "objectives": [o.name for o in self.objectives],
            "plans": [
                {
                    "plan": each.plan.to_json(),
                    "name": each.name or None,
                    "values": {key: value * 1e3 for key, value in zip(keys, each.values, strict=True)},
                    "knee": i == self.knee,
                }
                for i, each in enumerate(self.plans)
            ],
        }


def _objective(name: str) -> Objective:
    return OBJECTIVES.get(name) or find_workload_objective(name)


def values_of(measurement: Measurement, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Return the measured values of a plan, in the order of the objectives."""
    return (measurement.median_s, *(measurement.figures[o.name] for o in objectives[1:]))


def knee(values: NDArray[np.float64]) -> int:
    """Return the row that is farthest below the plane through the ends of a front, its ranges made equal.

    That is the row with the least sum of values, each as a share of the way from the best to the worst of the front
    (Das 1999, doi:10.1007/s001580050111).
    """
    low, high = values.min(axis=0), values.max(axis=0)
    share = (values - low) / np.where(high > low, high - low, 1.0)
    return int(share.sum(axis=1).argmin())


def has_criterion(objective: Objective) -> bool:
    """Return whether the front of chains by an objective can be computed."""
    return objective.of_plan is None or objective.of_plan is memory_gb


def criteria(graph: Graph, objectives: Sequence[Pricing], latency: ChainCosts) -> list[Criterion]:
    """Return the model's criteria for some objectives."""
    found = []
    for how in objectives:
        model = objective_model(how, graph, latency)
        if model.objective.of_plan is not None:
            found.append(memory(graph, latency.platform))
        else:
            found.append((busiest if model.chains == "period" else summed)(model.costs))
    return found


def front_finalists(
    history: History, objectives: Sequence[Objective], fits: Callable[[Trial], bool], most: int, near: float
) -> list[Trial]:
    """Return the plans that may be on the front, and the best of whole models.

    Measurements are scaled to the machine's speed at the start of the study.

    Args:
        most: of undominated ones, thinned out evenly, and of those that are the least behind them.
        near: the ratio, in all objectives, by which plans may be behind another one.
    """
    measured = [t for t in history.ranking() if t.measurement is not None and fits(t)]
    measured = [t for t in measured if t.measurement and all(o.name in t.measurement.figures for o in objectives[1:])]
    if not measured:
        return []
    table = np.array([values_of(t.measurement, objectives) for t in measured if t.measurement])
    scaled = [o.is_additive for o in objectives]  # the others follow from plans, or from what the user computes of runs
    table[:, scaled] /= np.array([t.speed for t in measured])[:, None]
    rows = sorted(undominated(table), key=lambda i: tuple(table[i]))
    behind = (table[:, None] / table[rows]).min(axis=2).max(axis=1)
    behind[rows] = np.inf
    ends = {int(table[:, k].argmin()) for k in range(table.shape[1])}
    if len(rows) > most:
        rows = sorted({rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)})
    rows += [i for i in np.argsort(behind, kind="stable") if behind[i] <= near][: max(0, most - len(rows))]
    whole = min(range(len(measured)), key=lambda i: len(measured[i].plan.stages))
    wanted = dict.fromkeys([*map(int, rows), *sorted(ends), whole])
    return [measured[i] for i in wanted]


def significant_front(finals: Sequence[Final], stages: Sequence[int]) -> list[int]:
    """Return the plans that none dominates significantly, without those that equal another one with fewer stages.

    Args:
        finals: of the same plans, one for each objective.
        stages: how many each plan has.
    """
    measured = [i for i in range(len(stages)) if all(f.standings[i].samples is not None for f in finals)]

    def differs(i: int, j: int) -> tuple[bool, bool]:
        """Return whether plan i is significantly worse than plan j in some objective, and better in some."""
        ratios = [f.ratio(i, j) for f in finals]
        return any(r.low > 1.0 for r in ratios), any(r.high < 1.0 for r in ratios)

    def value(i: int) -> tuple[float, ...]:
        return tuple(f.standings[i].samples.median for f in finals if f.standings[i].samples)  # type: ignore[union-attr]

    kept: list[int] = []
    for i in sorted(measured, key=lambda i: (stages[i], value(i))):
        relations = [differs(i, j) for j in measured if j != i]
        if any(worse and not better for worse, better in relations):
            continue
        if any(not worse and not better for worse, better in (differs(i, j) for j in kept)):
            continue
        kept.append(i)
    return sorted(kept, key=value)


def _is(digest: str, trial: Trial) -> bool:
    return trial.plan.digest == digest


def decide_front(
    session: Priced,
    history: History,
    baselines: Mapping[str, Plan],
    how: FinalSettings,
    objectives: Sequence[Objective],
) -> tuple[Front, Verdict]:
    """Return the front of several objectives, each plan compared with the others in each, and its knee's verdict.

    Raises:
        UnavailableError: no plan could be measured.
    """
    limits = _COMPUTED if session.only(0).capabilities.computed else _MEASURED
    trials = (
        front_finalists(history, objectives, lambda t: how.fits(t) and how.allowed(t.plan), *limits)
        or front_finalists(history, objectives, how.fits, *limits)
        or front_finalists(history, objectives, lambda _: True, *limits)
    )
    if not trials:
        raise UnavailableError("no plan could be measured", "see the failures in the trial log")
    for digest in sorted(how.asked - {t.plan.digest for t in trials}):  # each, even where another one dominates it
        trials += front_finalists(history, objectives, partial(_is, digest), *limits)
    count = len(objectives)
    policy = replace(
        how.policy,
        max_s=how.policy.max_s / count,
        disturbed_s=how.policy.disturbed_s / count,
        claim_s=how.policy.claim_s / count,
        loaded=max(2, len(trials)),
    )
    stages = [len(t.plan.stages) for t in trials]
    finals: list[Final] = []
    for which in range(1, len(objectives)):
        other = session.only(which)
        how.progress(f"final comparison of {plural(len(trials), 'plan')} by {session.how[which].objective.name}")
        finals.append(
            FinalComparison(
                [partial(other.load, how.graph, t.plan, fresh=True) for t in trials],
                policy,
                np.random.default_rng([how.seed, 2, len(finals)]),
                conditions=conditions_of(other),
                counters=counters_of(other),
                watched=lambda found: found.measured,
                computed=other.capabilities.computed,
                counted=session.how[which].objective.of_plan is not None,
                scaled=session.how[which].objective.scales,
                groups=[how.loaded_by(t.plan) for t in trials],
            ).run()
        )
    names = {plan.digest: name for name, plan in reversed(list(baselines.items()))}
    common = [i for i in range(len(trials)) if all(i in f.measured for f in finals)]
    if not common:
        reasons = dict.fromkeys(s.failure for f in finals for s in f.standings if s.failure)
        raise UnavailableError(f"no plan could be measured in every objective: {'; '.join(reasons)}")

    def rows(first: Final) -> list[int]:
        return significant_front([first, *finals], stages)

    def values(first: Final, kept: Sequence[int]) -> NDArray[np.float64]:
        samples = [[f.standings[i].samples for f in (first, *finals)] for i in kept]
        return np.array([[s.median if s else np.inf for s in row] for row in samples])

    def at_knee(first: Final, among: Sequence[int]) -> int:
        kept = [i for i in rows(first) if i in among] or [i for i in among if i in common] or common
        return kept[knee(values(first, kept))]

    first_settings = replace(how, policy=policy)
    verdict = decide(session.only(0), history, baselines, first_settings, trials=trials, choose=at_knee)
    kept = rows(verdict.final)
    if verdict.best not in [trials[i].plan for i in kept]:
        kept.append(next(i for i, t in enumerate(trials) if t.plan == verdict.best))
    table = values(verdict.final, kept)
    plans = tuple(
        FrontPlan(trials[i].plan, names.get(trials[i].plan.digest, ""), tuple(map(float, row)))
        for i, row in zip(kept, table, strict=True)
    )
    return Front(tuple(objectives), plans, next(i for i, p in enumerate(plans) if p.plan == verdict.best)), verdict
