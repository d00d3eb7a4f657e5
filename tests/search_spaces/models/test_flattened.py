"""Dense layers that flatten their input: the RESHAPE before them, spelled out, changes no result."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_spaces.models import load
from search_spaces.models.stages import cut_stage, flattened, join
from tests.support.models.tflite_models import Net, run_pieces


def dense(shape: tuple[int, ...], fan_in: int, units: int = 3, *, keep: bool = False, times: int = 1) -> Net:
    """Add ``times`` dense layers that read the same tensor, as many rows as ``fan_in`` leaves, and their outputs."""
    net = Net()
    x = net.op("ABS", [net.input(shape)], net.tensor(shape))
    outputs = []
    for number in range(times):
        weights = np.random.default_rng(number).standard_normal((units, fan_in)).astype(np.float32)
        bias = net.constant(np.arange(units, dtype=np.float32))
        wanted = (*shape[:-1], units) if keep else (prod(shape) // fan_in, units)
        options = schema.FullyConnectedOptionsT(keepNumDims=keep)
        outputs.append(net.op("FULLY_CONNECTED", [x, net.constant(weights), bias], net.tensor(wanted), options))
    return net.outputs(*outputs)


def kinds(model: object) -> list[int]:
    codes = [code.builtinCode for code in model.operatorCodes]  # type: ignore[attr-defined]
    return [codes[o.opcodeIndex] for o in model.subgraphs[0].operators]  # type: ignore[attr-defined]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Return the shape of an input, and how many numbers a dense layer takes of it at a time."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return tuple(shape), prod(shape[draw(st.integers(0, len(shape) - 1)) :])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=shapes(), times=st.integers(1, 2))
def test_what_is_computed_stays(tmp_path: Path, drawn: tuple[tuple[int, ...], int], times: int) -> None:
    shape, fan_in = drawn
    graph = load(str(dense(shape, fan_in, times=times).write(tmp_path / "dense.tflite")))
    stage = cut_stage(graph, range(len(graph.operators)))
    found = dataclasses.replace(stage, schema=flattened(stage.schema))
    assert kinds(found.schema).count(schema.BuiltinOperator.RESHAPE) == (len(shape) > 2)
    assert flattened(found.schema) is found.schema
    found.write(tmp_path / "flat.tflite")
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    outputs = [
        run_pieces([(str(tmp_path / name), b"", graph.inputs, graph.outputs)], {graph.inputs[0]: value})[0]
        for name in ("dense.tflite", "flat.tflite")
    ]
    for tensor in graph.outputs:
        assert outputs[0][tensor].tobytes() == outputs[1][tensor].tobytes()


@pytest.mark.parametrize(("shape", "keep"), [((2, 8), False), ((1, 4, 8), True)])
def test_layers_that_do_not_flatten_are_left_alone(tmp_path: Path, shape: tuple[int, ...], keep: bool) -> None:
    graph = load(str(dense(shape, 8, keep=keep).write(tmp_path / "dense.tflite")))
    model = join([cut_stage(graph, range(len(graph.operators)))]).schema
    assert flattened(model) is model


def test_an_unknown_size_is_left_to_the_runtime(tmp_path: Path) -> None:
    net = dense((1, 2, 2, 4), 16)
    net.graph.tensors[1].shapeSignature = [-1, 2, 2, 4]
    assert flattened(net.model) is net.model
