"""A plan as node data for Model Explorer: ``model-explorer m.tflite --node_data_paths=partition.json``."""

from __future__ import annotations

from typing import Any

from optimizer.report.svg import COLOURS, PARTS
from search_spaces.graph import Graph
from search_spaces.plan import Plan


def node_data(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return which stage and processor each operator has, by the name of its first output."""
    results = {}
    for index, stage in enumerate(plan.stages):
        value = {"value": f"{stage.processor} · stage {index}", "bgColor": COLOURS[f"p{index % PARTS}"][0]}
        for operator in stage.operators:
            outputs = graph.operators[operator].outputs
            if outputs:
                results[graph.tensors[outputs[0]].name] = value
    return {"name": "partition", "results": results}
