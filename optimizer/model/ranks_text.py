"""A plan's ranks in words."""

from __future__ import annotations

from search_spaces.core.decoded_plan import RankSet
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.core.plan import Plan
from search_spaces.core.wording import percent
from search_spaces.rewrites.tucker import outline, ranks_of

_SHOWN = 8


def macs_saved(graph: Graph, ranks: RankSet) -> float:
    """Return the share of multiply-accumulates that decomposed convolutions save."""
    after = outline(graph, ranks_of(Plan(graph.digest, (), ranks=ranks)))
    macs = [sum(each.macs for each in operator_costs(g)) for g in (graph, after)]
    return 1.0 - macs[1] / macs[0]


def describe_ranks(graph: Graph, plan: Plan) -> str:
    """Return the number of decomposed convolutions, their ranks and the saving; "" for none."""
    if not plan.ranks:
        return ""
    names = [f"{o} {inputs}×{outputs}" for o, inputs, outputs in plan.ranks[:_SHOWN]]
    more = ", …" if len(plan.ranks) > _SHOWN else ""
    count = f"{len(plan.ranks)} convolution{'s' if len(plan.ranks) > 1 else ''}"
    how = f"run as Tucker-2 triples (operator ranks: {', '.join(names)}{more})"
    return f"{count} {how}: {percent(macs_saved(graph, plan.ranks), 1)} fewer multiply-accumulates"
