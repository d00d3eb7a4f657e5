"""What no plan goes below in the model, however it cuts, places, splits and overlaps the operators.

Three relaxations, of which the largest counts:

- the critical path: each operator on its fastest processor as soon as those that it reads from are done, nothing
  handed over, lanes without end;
- an operator that can be split takes on that path ``1 / Σ 1/t`` over the lanes that can be busy at once, as if its
  parts met without halo or hand-over (seed 002);
- the work: every operator shared out among the lanes as suits best, order and hand-over forgotten (a linear
  programme); for the period of a pipeline this alone is the bound.

The least overhead of a part is paid once in each. Overheads and hand-overs must not be negative.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from optimizer.exact.chain_costs import Seconds, concurrent_sets, exclusive_groups
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform


class OperatorCosts(Protocol):
    """The part of a model's costs that the bound reads; see :class:`~optimizer.exact.chain_costs.ChainCosts`."""

    @property
    def platform(self) -> Platform:
        """The processors."""
        ...

    @property
    def operator_s(self) -> Seconds:
        """Shape ``(P, n)``."""
        ...

    @property
    def overhead_s(self) -> Seconds:
        """Shape ``(P,)``."""
        ...


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Seconds that no plan goes below, one reason each.

    Attributes:
        critical_path_s: of one inference, operators after one another.
        work_s: of one inference, and of the period of a pipeline: all lanes busy all the time.
    """

    critical_path_s: float
    work_s: float

    @property
    def latency_s(self) -> float:
        """The bound on the latency of one inference."""
        return max(self.critical_path_s, self.work_s)


def relax(graph: Graph, costs: OperatorCosts, splittable: Collection[int] = ()) -> Relaxation:
    """Return the bounds of a graph on a platform; infinite where an operator runs nowhere.

    Args:
        splittable: operators that several processors may run together.
    """
    overhead_s = float(costs.overhead_s.min())
    return Relaxation(_critical_path_s(graph, costs, frozenset(splittable)) + overhead_s, _work_s(costs) + overhead_s)


def lower_bound(graph: Graph, costs: OperatorCosts, splittable: Collection[int] = ()) -> float:
    """Return seconds that the latency of no plan goes below in the model; see :func:`relax`."""
    return relax(graph, costs, splittable).latency_s


def model_error(measured_s: float, bound_s: float) -> float:
    """Return by what share of the bound a measured plan is below it; 0 where it is not.

    No plan can be faster than the bound in the model, so one that is shows that the model is wrong by at least that.
    """
    return max(0.0, 1.0 - measured_s / bound_s) if bound_s > 0 else 0.0


def _critical_path_s(graph: Graph, costs: OperatorCosts, splittable: frozenset[int]) -> float:
    fastest = costs.operator_s.min(axis=0)
    if splittable:
        chosen, slots = sorted(splittable), np.array([p.slots for p in costs.platform.processors])
        with np.errstate(divide="ignore"):
            rate = slots[:, None] / costs.operator_s[:, chosen]
            together = np.max([rate[list(lanes)].sum(axis=0) for lanes in concurrent_sets(costs.platform)], axis=0)
            fastest[chosen] = np.minimum(fastest[chosen], 1.0 / together)
    ends = np.zeros(len(graph.operators))
    for operator, seconds in enumerate(fastest):
        ends[operator] = seconds + max((ends[p] for p in graph.predecessors(operator)), default=0.0)
    return float(ends.max(initial=0.0))


def _work_s(costs: OperatorCosts) -> float:
    """Return the least load of the busiest lane (lanes that exclude each other as one) over all shares of the work."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    lanes, count = costs.operator_s.shape
    if not np.isfinite(costs.operator_s).any(axis=0).all():
        return float("inf")
    scale = float(np.where(np.isfinite(costs.operator_s), costs.operator_s, 0.0).max(initial=0.0))
    if scale == 0.0:
        return 0.0
    groups = exclusive_groups(costs.platform)
    # Variables: the share of operator o on lane p at p·n + o, then the load of the busiest group.
    lane, operator = np.nonzero(np.isfinite(costs.operator_s))
    at = lane * count + operator
    member = [(g, np.isin(lane, members)) for g, members in enumerate(groups)]
    rows = np.concatenate([*(np.full(int(inside.sum()), g) for g, inside in member), np.arange(len(groups))])
    columns = np.concatenate([*(at[inside] for _, inside in member), np.full(len(groups), lanes * count)])
    slots = np.array([p.slots for p in costs.platform.processors])
    seconds = costs.operator_s[lane, operator] / (scale * slots[lane])
    values = np.concatenate([*(seconds[inside] for _, inside in member), np.full(len(groups), -1.0)])
    found = linprog(
        np.concatenate((np.zeros(lanes * count), [1.0])),
        A_ub=coo_array((values, (rows, columns)), shape=(len(groups), lanes * count + 1)).tocsr(),
        b_ub=np.zeros(len(groups)),
        A_eq=coo_array((np.ones(at.size), (operator, at)), shape=(count, lanes * count + 1)).tocsr(),
        b_eq=np.ones(count),
        method="highs",
    )
    # The dual of what the solver found is a bound whatever its tolerance; it leaves a hair.
    return float(found.fun) * scale * (1.0 - 1e-9) if found.status == 0 else 0.0
