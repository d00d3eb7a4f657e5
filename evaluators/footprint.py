"""How much memory a plan needs, computed from the sizes of its tensors; what a runtime needs beside is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.graph import Graph
from search_spaces.plan import Plan


def peak_nbytes(graph: Graph, plan: Plan) -> dict[str, int]:
    """Return the bytes that each lane of a plan needs: the weights of its stages, and the most activations of one."""
    found = {}
    for lane, indices in plan.by_processor().items():
        stages = [plan.stages[i].operators for i in indices]
        constants = {t for operators in stages for t in graph.boundary(operators).constants}
        weights = sum(graph.tensors[t].nbytes for t in constants)
        found[lane] = weights + max(most_alive_nbytes(graph, operators) for operators in stages)
    return found


def most_alive_nbytes(graph: Graph, operators: Sequence[int]) -> int:
    """Return the most bytes of activations that are alive at once while operators run one after another."""
    border = graph.boundary(operators)
    inside = set(operators)
    size = {t: graph.tensors[t].nbytes for o in operators for t in (*graph.operators[o].outputs, *border.inputs)}
    kept = set(border.outputs)
    last = {t: max((c for c in graph.consumers.get(t, ()) if c in inside), default=-1) for t in size}
    alive = sum(size[t] for t in border.inputs)
    most = alive
    for operator in operators:
        alive += sum(size[t] for t in graph.operators[operator].outputs)
        most = max(most, alive)
        for t in {*graph.operators[operator].inputs, *graph.operators[operator].outputs} & size.keys():
            if t not in kept and last[t] <= operator:
                alive -= size[t]
    return most
