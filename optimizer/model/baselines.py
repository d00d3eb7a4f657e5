"""Baselines of one model: each processor alone, and the cut criteria of seed 000."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan, canonical
from search_spaces.core.platform import Platform
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer, layer_length, layer_type, parameter_count

MOST_PARTS = 4


@dataclass(frozen=True, slots=True)
class Baseline:
    """A plan to compare with, and its name in tables."""

    name: str
    plan: Plan


def baselines(graph: Graph, platform: Platform, fastest: str) -> tuple[Baseline, ...]:
    """Return the baselines of a model: whole on each kind of processor, then the criteria of seed 000 on ``fastest``.

    Args:
        fastest: name of the processor that runs the whole model fastest.
    """
    found = [
        Baseline(f"whole on {members[0].name}", chain_plan(graph, (), [members[0].name]))
        for members in platform.classes().values()
    ]
    most = min(MOST_PARTS, len(graph.operators))
    cuts = {f"layer length K={k}": layer_length(graph, k) for k in range(2, most + 1)}
    cuts["layer type K=2"] = layer_type(graph)
    cuts |= {f"parameter count K={k}": parameter_count(graph, k) for k in range(2, most + 1)}
    cuts["every layer"] = every_layer(graph)
    for name, positions in cuts.items():
        if positions:  # some criteria find no cut: a model without fully connected layers, or of one layer
            found.append(Baseline(name, chain_plan(graph, positions, [fastest] * (len(positions) + 1))))
    return tuple(Baseline(b.name, canonical(b.plan, graph, platform)) for b in found)
