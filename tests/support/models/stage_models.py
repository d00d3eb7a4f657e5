"""Stages of models, run and compared with the whole; models with state, and with subgraphs, to cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.graph import Graph
from search_spaces.models.stages import cut_stage
from tests.support.models.tflite_models import SHAPE, TYPES, Net, Piece, run_pieces, some_inputs, variable, whole_model


def pieces(graph: Graph, stages: Iterable[Sequence[int]], folder: Path, *, views: bool = False) -> list[Piece]:
    found: list[Piece] = []
    for index, operators in enumerate(stages):
        stage = cut_stage(graph, operators)
        if views:
            found.append((str(stage.source.path), stage.view(), stage.inputs, stage.outputs))
        else:
            path = folder / f"stage_{index}.tflite"
            stage.write(path)
            found.append((str(path), b"", stage.inputs, stage.outputs))
    return found


def same(graph: Graph, stages: Iterable[Sequence[int]], folder: Path, *, views: bool = False, times: int = 1) -> None:
    given_values = some_inputs(graph)
    wanted = run_pieces(whole_model(graph), given_values, times)
    found = run_pieces(pieces(graph, stages, folder, views=views), given_values, times)
    for mine, theirs in zip(found, wanted, strict=True):
        for tensor in graph.outputs:
            assert mine[tensor].tobytes() == theirs[tensor].tobytes(), tensor


def apart(graph: Graph) -> list[list[int]]:
    return [[i] for i in range(len(graph.operators))]


def initialised(net: Net, names: Iterable[str]) -> Net:
    """Give variables the value 5 in subgraph 1; a runtime reads whatever memory holds where nobody has written."""
    net.body("init")
    for name in names:
        handle = net.op("VAR_HANDLE", [], net.tensor([], TYPES.RESOURCE), schema.VarHandleOptionsT("", name))
        net.op("ASSIGN_VARIABLE", [handle, net.constant(np.full(SHAPE, 5, np.float32))], [])
    return net


def counter(second: str = "") -> Net:
    """A sum over all runs, assigned far from where it is read; a second variable may be added to another output."""
    net = Net()
    x = net.input()
    net.op("CALL_ONCE", [], [], schema.CallOnceOptionsT(initSubgraphIndex=1))
    neg = net.op("NEG", [x], options=schema.NegOptionsT())
    handle, before = variable(net)
    after = net.add(net.op("RELU", [net.add(x, before)]), x)
    net.op("ASSIGN_VARIABLE", [handle, after], [], schema.AssignVariableOptionsT())
    last = net.add(neg, variable(net, second)[1] if second else x)
    net.outputs(after, net.op("NEG", [last], options=schema.NegOptionsT()))
    return initialised(net, sorted({"v", second} - {""}))


def calling(*, nested: bool = False) -> Net:
    """NEG, then an IF (within another one), then NEG; subgraph 1 is called by nobody."""
    net = Net()
    x = net.input()
    flag = net.input((1,), TYPES.BOOL)
    neg = net.op("NEG", [x], options=schema.NegOptionsT())
    options = schema.IfOptionsT(thenSubgraphIndex=2, elseSubgraphIndex=3)
    y = net.op("IF", [flag, neg, flag], options=options)
    net.outputs(net.op("NEG", [y], options=schema.NegOptionsT()))
    for name, kind in (("idle", "ABS"), ("then", "RELU"), ("else", "CONV")):
        net.body(name)
        value, again = net.input(), net.input((1,), TYPES.BOOL)
        if kind == "CONV":
            kernel, bias = net.constant(np.full((2, 1, 1, 2), 0.5, np.float32)), net.constant(np.ones(2, np.float32))
            net.outputs(net.conv(value, kernel, bias))
        elif kind == "RELU" and nested:
            inner = schema.IfOptionsT(thenSubgraphIndex=4, elseSubgraphIndex=3)
            net.outputs(net.op("IF", [again, value, again], options=inner))
        else:
            net.outputs(net.op(kind, [value]))
    if nested:
        net.body("inner")
        value, _ = net.input(), net.input((1,), TYPES.BOOL)
        net.outputs(net.op("TANH", [value]))
    return net
