"""Lower bounds of all plans under the model, however they cut, place, split and overlap the operators.

The largest of three relaxations:

- the critical path: each operator on its fastest processor as soon as its inputs are available, without transfers, on
  unlimited processors;
- an operator that can be split takes on that path ``1 / Σ 1/t`` over the processors that can be busy at once, as if its
  stages met without halo or transfer (seed 002);
- the work: every operator divided freely among the processors, without order or transfers (a linear programme); for the
  period of a pipeline this alone is the bound.

The least overhead of a stage is paid once in each. Overheads and transfers must not be negative.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from optimizer.exact.chain_costs import OperatorCosts, Seconds, concurrent_sets, exclusive_groups
from search_spaces.core.graph import Graph


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Lower bounds in seconds, one for each relaxation.

    Attributes:
        critical_path_s: of one inference.
        work_s: of one inference, and of the period of a pipeline: all processors busy all the time.
    """

    critical_path_s: float
    work_s: float

    @property
    def latency_s(self) -> float:
        """The bound on the latency of one inference."""
        return max(self.critical_path_s, self.work_s)


def relax(graph: Graph, costs: OperatorCosts, splittable: Collection[int] = ()) -> Relaxation:
    """Return the bounds of a graph on a platform; infinite if no processor supports an operator.

    Args:
        splittable: operators that several processors may run together.
    """
    overhead_s = float(costs.overhead_s.min())
    return Relaxation(_critical_path_s(graph, costs, frozenset(splittable)) + overhead_s, _work_s(costs) + overhead_s)


def model_error(measured_s: float, bound_s: float) -> float:
    """Return how far a measured plan is below the bound, relative to it; 0 where it is not.

    A plan below the bound shows that the model is wrong by at least this share.
    """
    return max(0.0, 1.0 - measured_s / bound_s) if bound_s > 0 else 0.0


def _critical_path_s(graph: Graph, costs: OperatorCosts, splittable: frozenset[int]) -> float:
    fastest = costs.operator_s.min(axis=0)
    if splittable:
        chosen, slots = sorted(splittable), np.array([p.slots for p in costs.platform.processors])
        with np.errstate(divide="ignore"):
            rate = slots[:, None] / costs.operator_s[:, chosen]
            together = np.max(
                [rate[list(processors)].sum(axis=0) for processors in concurrent_sets(costs.platform)], axis=0
            )
            fastest[chosen] = np.minimum(fastest[chosen], 1.0 / together)
    return longest_path_s(graph, fastest)


def longest_path_s(graph: Graph, each_s: Seconds) -> float:
    """Return the seconds of the longest path of operators, given those of each."""
    ends = np.zeros(len(each_s))
    for operator, seconds in enumerate(each_s):
        ends[operator] = seconds + max((ends[p] for p in graph.predecessors(operator)), default=0.0)
    return float(ends.max(initial=0.0))


def _work_s(costs: OperatorCosts) -> float:
    """Return the least load of the busiest processor over all shares of the work; exclusive processors count as one."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    processors, count = costs.operator_s.shape
    if not np.isfinite(costs.operator_s).any(axis=0).all():
        return float("inf")
    # The solver takes coefficients below 1e-9 for 0, so the slowest operator, where it is fastest, is the unit.
    scale = float(costs.operator_s.min(axis=0).max(initial=0.0))
    if scale == 0.0:
        return 0.0
    groups = exclusive_groups(costs.platform)
    # Variables: the share of operator o on processor p at p·n + o, then the load of the busiest group.
    processor, operator = np.nonzero(np.isfinite(costs.operator_s))
    at = processor * count + operator
    member = [(g, np.isin(processor, members)) for g, members in enumerate(groups)]
    rows = np.concatenate([*(np.full(int(inside.sum()), g) for g, inside in member), np.arange(len(groups))])
    columns = np.concatenate([*(at[inside] for _, inside in member), np.full(len(groups), processors * count)])
    slots = np.array([p.slots for p in costs.platform.processors])
    seconds = costs.operator_s[processor, operator] / (scale * slots[processor])
    values = np.concatenate([*(seconds[inside] for _, inside in member), np.full(len(groups), -1.0)])
    found = linprog(
        np.concatenate((np.zeros(processors * count), [1.0])),
        A_ub=coo_array((values, (rows, columns)), shape=(len(groups), processors * count + 1)).tocsr(),
        b_ub=np.zeros(len(groups)),
        A_eq=coo_array((np.ones(at.size), (operator, at)), shape=(count, processors * count + 1)).tocsr(),
        b_eq=np.ones(count),
        method="highs",
    )
    # The dual solution is a bound whatever the solver's tolerance.
    return float(found.fun) * scale * (1.0 - 1e-9) if found.status == 0 else 0.0
