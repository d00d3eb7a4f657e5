"""A plan as node data for Model Explorer: ``model-explorer m.tflite --node_data_paths=partition.json,…``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optimizer.exact.chain_costs import ChainCosts
from optimizer.report.svg import COLOURS, PARTS
from search_spaces.graph import Graph
from search_spaces.plan import Plan

_SCALE = ("#eff3ff", "#bdd7e7", "#6baed6", "#3182bd", "#08519c")  # a factor of 4 each, up to the slowest operator


def node_data(
    graph: Graph, plan: Plan, costs: ChainCosts | None = None, stage_s: Sequence[float] = ()
) -> dict[str, dict[str, Any]]:
    """Return name of a file → layer; operators go by the name of their first output.

    ``partition`` has stage and processor of each operator, with the milliseconds of both. Where the times of single
    operators are known there is a layer of them for each processor, all on one scale of colours.

    Args:
        costs: what operators take on each processor.
        stage_s: what the stages took.
    """
    names = {
        o: graph.tensors[operator.outputs[0]].name for o, operator in enumerate(graph.operators) if operator.outputs
    }
    index = {p.name: i for i, p in enumerate(costs.platform.processors)} if costs is not None else {}
    partition = {}
    for number, stage in enumerate(plan.stages):
        told = f"{stage.processor} · stage {number}"
        if len(stage_s) == len(plan.stages):
            told += f" · {stage_s[number] * 1e3:.4g} ms"
        for operator in stage.operators:
            own = ""
            if costs is not None and stage.processor in index:
                own = f" · operator {costs.operator_s[index[stage.processor], operator] * 1e3:.4g} ms"
            if operator in names:
                partition[names[operator]] = {"value": f"{told}{own}", "bgColor": COLOURS[f"p{number % PARTS}"][0]}
    layers: dict[str, dict[str, Any]] = {"partition": {"name": "partition", "results": partition}}
    if costs is None:
        return layers
    most_ms = max((1e3 * s for s in costs.operator_s.flat if math.isfinite(s)), default=0.0)
    for processor, lane in index.items():
        times = {name: 1e3 * float(costs.operator_s[lane, o]) for o, name in names.items()}
        layers[f"partition_{''.join(c if c.isalnum() else '_' for c in processor)}"] = {
            "name": f"ms per operator on {processor}",
            "results": {name: {"value": ms} for name, ms in times.items() if math.isfinite(ms)},
            "thresholds": [
                {"value": most_ms / 4 ** (len(_SCALE) - 1 - step), "bgColor": colour}
                for step, colour in enumerate(_SCALE)
            ],
        }
    return layers
