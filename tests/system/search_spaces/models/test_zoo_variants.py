"""Float16 and int8 variants: what their files hold, and how near they come to the float32 model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo import ZOO, calibration, draft, write
from search_spaces.models.zoo.calibration import _outward
from search_spaces.models.zoo.int8 import _scale
from search_spaces.models.zoo.names import parse_name
from search_spaces.spaces.chain import ChainSpace
from tests.support.models.stage_models import same
from tests.support.models.tflite_models import Array, plain_interpreter
from tests.support.narrowing import there
from tests.support.sentences import fails

# One of each kind of operator that is quantised: the smallest models that have it.
MODELS = (
    "alexnet@0.125/67",
    "densenet121@0.25/32",
    "inception_v3@0.125/80",
    "mobilenet_v2@0.25/64",
    "mobilenet_v3_large@0.25/64",
    "regnet_y_32gf@0.125/64",
    "retinaface@0.125/64",
    "squeezenet1_1@0.5/64",
    "yolov2@0.125/64",
)
PLATFORM = Platform("one", (Processor("cpu", "cpu", {}, "cpu"),))

pytestmark = pytest.mark.litert


def observed(graph: Graph, values: Array, name: str) -> Array:
    """Run a model with the runtime's own kernels, and return a tensor's real numbers."""
    interpreter = plain_interpreter(graph)
    (given_input,) = interpreter.get_input_details()
    scale, zero = given_input["quantization"]
    if scale:
        values = np.clip(np.rint(values / scale) + zero, -128, 127)
    interpreter.set_tensor(given_input["index"], values.astype(given_input["dtype"]))
    interpreter.invoke()
    detail: dict[str, Any] = next(d for d in interpreter.get_tensor_details() if d["name"] == name)
    found: Array = interpreter.get_tensor(detail["index"]).astype(np.float64)
    scale, zero = detail["quantization"]
    return (found - zero) * scale if scale else found


def before_softmax(graph: Graph) -> str:
    last = [o for o in graph.operators if o.kind != "SOFTMAX"][-1]
    return graph.tensors[last.outputs[0]].name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("variant", "likeness", "size"), [("int8", 0.99, 0.4), ("f16", 0.9999, 0.6)])
def test_a_variant_computes_nearly_the_same_in_a_smaller_file(
    name: str, variant: str, likeness: float, size: float, cache_folder: Path
) -> None:
    plain, small = load(name), load(f"{name}:{variant}")
    values = np.random.default_rng(5).uniform(-1, 1, plain.tensors[plain.inputs[0]].shape)
    mine, theirs = (observed(g, values, before_softmax(plain)).ravel() for g in (small, plain))
    assert mine @ theirs / np.sqrt((mine @ mine) * (theirs @ theirs)) > likeness
    assert there(small.source).nbytes < there(plain.source).nbytes * size
    assert small.name == f"{name}:{variant}"


@pytest.mark.parametrize("name", [f"{m}:int8" for m in MODELS] + [f"{m}:f16" for m in MODELS[:4]])
def test_random_stages_of_a_variant_compute_what_the_whole_computes(name: str, tmp_path: Path) -> None:
    graph = load(name)
    space = ChainSpace(graph, PLATFORM, 4)
    plan = space.plan_at(int(np.random.default_rng(2).integers(space.cardinality())))
    same(graph, [s.operators for s in plan.stages], tmp_path)


def test_int8_is_integers_only() -> None:
    for name in MODELS:
        graph = load(f"{name}:int8")
        assert {t.dtype for t in graph.tensors} == {"int8", "int32"}
        assert {graph.tensors[i].dtype for i in (*graph.inputs, *graph.outputs)} == {"int8"}
        assert [o.kind for o in graph.operators] == [o.kind for o in draft(name).graph().operators]


def test_int8_follows_the_specification() -> None:
    graph = load("mobilenet_v1@0.25/64:int8")
    tensors = there(graph.source).schema.subgraphs[0].tensors
    for operator in graph.operators:
        data, result = (tensors[t].quantization for t in (operator.inputs[0], operator.outputs[0]))
        if operator.kind in {"CONV_2D", "DEPTHWISE_CONV_2D"}:
            kernel, bias = (tensors[t] for t in operator.inputs[1:])
            axis = 3 if operator.kind == "DEPTHWISE_CONV_2D" else 0
            assert kernel.quantization.quantizedDimension == axis
            assert len(kernel.quantization.scale) == kernel.shape[axis]
            assert not kernel.quantization.zeroPoint.any()
            np.testing.assert_allclose(bias.quantization.scale, data.scale[0] * kernel.quantization.scale, rtol=1e-6)
        elif operator.kind == "SOFTMAX":
            assert (result.scale[0], result.zeroPoint[0]) == (1 / 256, -128)
        else:
            assert (result.scale[0], result.zeroPoint[0]) == (data.scale[0], data.zeroPoint[0])


def test_float16_weights_become_float32_by_operators() -> None:
    graph = load("squeezenet1_1@0.5/64:f16")
    model = there(graph.source).schema
    kinds = [model.operatorCodes[o.opcodeIndex].builtinCode for o in model.subgraphs[0].operators]
    plain = draft("squeezenet1_1@0.5/64")
    assert kinds.count(6) == len(plain.weights) == 52  # DEQUANTIZE
    assert [t.dtype for t in graph.tensors].count("float16") == len(plain.weights)
    assert {graph.tensors[i].dtype for i in (*graph.inputs, *graph.outputs)} == {"float32"}


def test_what_has_no_int8_says_why() -> None:
    assert {name for name, entry in ZOO.items() if entry.int8} == {"fast_style_transfer", "mobilebert", "vit_b16"}


def test_building_int8_again_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = parse_name("mobilenet_v3_large@0.25/64:int8")
    for number in range(2):
        write(spec, tmp_path / f"{number}.tflite")
    assert (tmp_path / "0.tflite").read_bytes() == (tmp_path / "1.tflite").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.tflite", "1.tflite"]
    assert read_model(tmp_path / "0.tflite").digest == load("mobilenet_v3_large@0.25/64:int8").digest


def test_a_runtime_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(b"no model")
    with fails(UnavailableError):
        calibration.calibrated(tmp_path / "m.tflite", draft("squeezenet1_1@0.25/64").graph())


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_range_holds_zero_exactly_and_its_ends_nearly(a: float, b: float) -> None:
    low, high = sorted((a, b))
    scale, zero = _scale((low, high))
    assert -128 <= zero <= 127
    for value in (min(low, 0), 0, max(high, 0)):
        code = np.clip(np.rint(value / scale) + zero, -128, 127)
        assert abs((code - zero) * scale - value) <= scale * 1.01


@given(st.floats(-1e30, 1e30))
def test_ends_move_outward_to_three_digits(value: float) -> None:
    moved = _outward(value)
    assert abs(value) <= max(abs(moved) * (1 + 1e-12), calibration.TINY)
    assert abs(moved) <= abs(value) * 1.0101
    assert moved == 0 or float(f"{moved:.2e}") == pytest.approx(moved, rel=1e-9)


def test_the_float_model_is_not_left_behind_where_calibration_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 9, "", "")

    monkeypatch.setattr(subprocess, "run", fail)
    with fails(UnavailableError):
        write(parse_name("squeezenet1_1@0.25/64:int8"), tmp_path / "m.tflite")
    assert list(tmp_path.iterdir()) == []
