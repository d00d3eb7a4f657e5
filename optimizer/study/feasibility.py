"""Constraints that a plan violates, checked before it runs."""

from __future__ import annotations

import math

from optimizer.exact.chain_costs import ChainCosts
from search_spaces.core.constraints import Violation
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.wording import plural


def violations(graph: Graph, costs: ChainCosts, max_stages: int, plan: Plan) -> tuple[Violation, ...]:
    """Return a plan's violations: unsupported operators, a processor's memory, and the number of stages.

    Args:
        costs: infinite if a processor does not support an operator.
        max_stages: stages of a plan at most.
    """
    index = {p.name: i for i, p in enumerate(costs.platform.processors)}
    found = []
    parts = len({stage.operators for stage in plan.stages})  # both sides of a split count as one stage
    if parts > max_stages:
        found.append(Violation("stages of a plan", parts, max_stages, "stages", "give more --max-stages"))
    for name, stages in plan.by_processor().items():
        processor = index[name]
        operators = [o for i in stages for o in plan.stages[i].operators]
        refused = [o for o in operators if not math.isfinite(costs.operator_s[processor, o])]
        if refused:
            kind = graph.operators[refused[0]].kind
            what = f"not supported on {name!r} (the first is {refused[0]}, {kind})"
            lever = f"leave {name!r} out of --processors"
            sentence = f"{plural(len(refused), 'operator')} {what}"
            found.append(Violation(f"operators {what}", len(refused), 0, "operators", lever, sentence))
        if costs.operator_nbytes is not None and costs.memory_bytes is not None:
            demand, bound = float(costs.operator_nbytes[operators].sum()), float(costs.memory_bytes[processor])
            if demand > bound:
                found.append(Violation(f"memory of {name!r}", demand, bound, "B", "allow more --max-stages"))
    return tuple(found)
