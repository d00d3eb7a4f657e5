"""A plan's ranks in words."""

from __future__ import annotations

from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan
from search_spaces.core.wording import percent
from search_spaces.rewrites.tucker import outline, ranks_of

_SHOWN = 8


def describe_ranks(graph: Graph, plan: Plan) -> str:
    """Return the number of decomposed convolutions, their ranks and the saving; "" for none."""
    if not plan.ranks:
        return ""
    before, after = (sum(c.macs for c in operator_costs(g)) for g in (graph, outline(graph, ranks_of(plan))))
    names = [f"{o} {inputs}×{outputs}" for o, inputs, outputs in plan.ranks[:_SHOWN]]
    more = ", …" if len(plan.ranks) > _SHOWN else ""
    count = f"{len(plan.ranks)} convolution{'s' if len(plan.ranks) > 1 else ''}"
    how = f"run as Tucker-2 triples (operator ranks: {', '.join(names)}{more})"
    return f"{count} {how}: {percent(1 - after / before, 1)} fewer multiply-accumulates"
