"""Several objectives: the plans that no other plan beats in all of them, and the one at the knee."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.objectives import Objective, PricedSession, weights
from evaluators.samples import Measurement
from optimizer.exact.chain_costs import ChainCosts
from optimizer.exact.front import Criterion, busiest, memory, summed, undominated
from optimizer.exact.weighed import weighed
from optimizer.history import History, Trial
from search_spaces.graph import Graph
from search_spaces.plan import Plan

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """A plan of the front.

    Attributes:
        name: of the baseline that it is, or "".
        values: in the objectives' units and order.
    """

    plan: Plan
    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """The plans that no other measured plan beats, by their first objective.

    Attributes:
        knee: which of them gives up least of all objectives together, each relative to its range on the front.
        model: values of the front of the model, exact on it; empty where there is none.
    """

    objectives: tuple[Objective, ...]
    plans: tuple[FrontPlan, ...]
    knee: int
    model: tuple[tuple[float, ...], ...] = ()

    @property
    def best(self) -> Plan:
        """The plan at the knee."""
        return self.plans[self.knee].plan

    def to_json(self) -> dict[str, Any]:
        """Return the front as plain values, in thousandths of the objectives' units."""
        keys = [o.key for o in self.objectives]
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
            "model": [[value * 1e3 for value in values] for values in self.model],
        }


def values_of(measurement: Measurement, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Return what a plan was measured at, in the order of the objectives."""
    return (measurement.median_s, *(measurement.figures[o.name] for o in objectives[1:]))


def front_of(
    history: History,
    objectives: Sequence[Objective],
    baselines: Mapping[str, Plan],
    fits: Callable[[Plan], bool] = lambda _: True,
    model: Sequence[tuple[float, ...]] = (),
) -> Front:
    """Return the front of all measured plans that keep the constraints.

    Raises:
        ValueError: no plan was measured in full.
    """
    names = {plan.digest: name for name, plan in reversed(list(baselines.items()))}
    measured = [t for t in history.known.values() if t.measurement is not None and fits(t.plan)]
    if not measured:
        raise ValueError("no plan was measured")
    table = np.array([values_of(t.measurement, objectives) for t in measured if t.measurement])
    order = sorted(undominated(table), key=lambda i: tuple(table[i]))
    plans = tuple(
        FrontPlan(measured[i].plan, names.get(measured[i].plan.digest, ""), tuple(map(float, table[i]))) for i in order
    )
    return Front(tuple(objectives), plans, knee(np.array([p.values for p in plans])), tuple(model))


def knee(values: NDArray[np.float64]) -> int:
    """Return the row that is farthest below the plane through the ends of a front, its ranges made equal.

    That is the row with the least sum of values, each as a share of the way from the best to the worst of the front
    (Das 1999, doi:10.1007/s001580050111).
    """
    low, high = values.min(axis=0), values.max(axis=0)
    share = (values - low) / np.where(high > low, high - low, 1.0)
    return int(share.sum(axis=1).argmin())


def criteria(graph: Graph, session: PricedSession, costs: ChainCosts) -> list[Criterion]:
    """Return what the model says of the objectives of a session.

    Args:
        costs: of the latency.
    """
    found = []
    for how in session.how:
        objective = how.objective
        if objective.law == "memory":
            found.append(memory(objective.name, graph, costs.platform))
        elif objective.law == "period":
            moved = weighed(costs, {p.name: 1.0 for p in costs.platform.processors})
            found.append(busiest(objective.name, moved))
        elif objective.law == "sum":
            by = weights(objective, costs.platform, how.powers) or {p.name: 1.0 for p in costs.platform.processors}
            found.append(summed(objective.name, weighed(costs, by)))
        else:
            found.append(summed(objective.name, costs))
    return found


def measured_again(
    history: History,
    find: Callable[[], Front],
    measure: Callable[[Plan], Measurement],
    log: Callable[[Trial], object],
    progress: Callable[[str], None],
) -> Front:
    """Measure the plans of the front once more, since they were in part lucky, and return the front that is left.

    Args:
        find: returns the front as it is known now.
        log: takes note of a better measurement.
    """
    seen: set[str] = set()
    for _ in range(_ROUNDS):
        left = [each.plan for each in find().plans if each.plan.digest not in seen]
        if not left:
            break
        progress(f"measuring the {len(left)} plans of the front again")
        for plan in left:
            seen.add(plan.digest)
            trial = history.known[plan.digest]
            better = replace(trial, measurement=measure(plan), speed=history.speed)
            log(better)
            history.correct(better)
    return find()
