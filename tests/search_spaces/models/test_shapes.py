"""Open dimensions get sizes from the person, and every other tensor the shape that follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from search_spaces.core.errors import ModelError, UsageError
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.shapes import fix_shapes
from search_spaces.models.stages import cut_stage
from tests.support.models.stage_models import apart, same
from tests.support.models.tflite_models import TYPES, Net
from tests.support.narrowing import there
from tests.support.sentences import says


def flattening() -> Net:
    """A batch of unknown size that is flattened as converters do it: by a shape computed from the input's."""
    net = Net()
    x = net.input((1, 2, 2), shapeSignature=[-1, 2, 2], name="image")
    y = net.op("RELU", [x], net.tensor((1, 2, 2), shapeSignature=[-1, 2, 2]))
    shape = net.op("SHAPE", [y], net.tensor((3,), TYPES.INT32), schema.ShapeOptionsT(outType=TYPES.INT32))
    zero, one = net.constant(np.array([0], np.int32)), net.constant(np.array([1], np.int32))
    options = schema.StridedSliceOptionsT(shrinkAxisMask=1)
    batch = net.op("STRIDED_SLICE", [shape, zero, one, one], net.tensor((), TYPES.INT32), options)
    four = net.constant(np.array(4, np.int32), shape=())
    target = net.op("PACK", [batch, four], net.tensor((2,), TYPES.INT32), schema.PackOptionsT(valuesCount=2))
    flat = net.op("RESHAPE", [y, target], net.tensor((1, 4), shapeSignature=[-1, 4]))
    return net.outputs(net.op("NEG", [flat], net.tensor((1, 4), shapeSignature=[-1, 4]), schema.NegOptionsT()))


def test_shapes_follow_and_the_operators_that_computed_them_go(tmp_path: Path) -> None:
    path = flattening().write(tmp_path / "m.tflite")
    graph = load(str(path), ["image=3,2,2"])
    assert [o.kind for o in graph.operators] == ["RELU", "RESHAPE", "NEG"]
    assert [graph.tensors[o.outputs[0]].shape for o in graph.operators] == [(3, 2, 2), (3, 4), (3, 4)]
    assert [graph.tensors[o.outputs[0]].nbytes for o in graph.operators] == [48, 48, 48]
    stages = [cut_stage(graph, operators) for operators in apart(graph)]
    for index, stage in enumerate(stages):
        stage.write(tmp_path / f"{index}.tflite")
        assert read_model(tmp_path / f"{index}.tflite").operators[0].kind == graph.operators[index].kind
    assert read_model(tmp_path / "1.tflite").tensors[0].shape == (3, 2, 2)


def test_stages_of_fixed_shapes_compute_what_the_whole_computes(tmp_path: Path) -> None:
    graph = load(str(flattening().write(tmp_path / "m.tflite")), ["image=3,2,2"])
    whole = cut_stage(graph, range(len(graph.operators)))
    whole.write(tmp_path / "whole.tflite")
    same(read_model(tmp_path / "whole.tflite"), apart(graph), tmp_path)


def test_other_shapes_are_another_model(tmp_path: Path) -> None:
    path = str(flattening().write(tmp_path / "m.tflite"))
    one, two = (load(path, [f"image={n},2,2"]) for n in (1, 2))
    assert one.digest != two.digest
    assert there(one.source).content_digest() != there(two.source).content_digest()


def test_what_data_decides_stays_open_and_together(tmp_path: Path) -> None:
    net = Net()
    x = net.input((1,), TYPES.BOOL, shapeSignature=[-1])
    y = net.op("LOGICAL_NOT", [x], net.tensor((1,), TYPES.BOOL, shapeSignature=[-1]), schema.LogicalNotOptionsT())
    where = net.op("WHERE", [y], net.tensor((1, 1), TYPES.INT64, shapeSignature=[-1, 1]))
    net.op("NEG", [where], total := net.tensor((1, 1), TYPES.INT64, shapeSignature=[-1, 1]), schema.NegOptionsT())
    axis = net.constant(np.array([0], np.int32))
    net.outputs(net.op("SUM", [total, axis], net.tensor((1,), TYPES.INT64), schema.ReducerOptionsT()))
    graph = load(str(net.write(tmp_path / "m.tflite")), ["t0=5"])
    assert [o.kind for o in graph.operators] == ["LOGICAL_NOT", "GROUP"]
    assert [p.kind for p in graph.operators[1].parts] == ["WHERE", "NEG", "SUM"]
    assert graph.tensors[total].shape == (-1, -1)


def test_known_shapes_need_no_runtime(tmp_path: Path) -> None:
    net = Net()
    graph = read_model(net.outputs(net.op("RELU", [net.input()])).write(tmp_path / "m.tflite"))
    assert fix_shapes(graph, {}) is graph
    assert fix_shapes(graph, {"t0": (1, 4, 4, 2)}) is graph


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        (["image=1,2"], UsageError),
        (["image=1,2,3"], UsageError),
        (["x=1,2,3"], UsageError),
        (["image"], UsageError),
        (["image=2147483647,2,2"], ModelError),
    ],
)
def test_shapes_that_cannot_be(tmp_path: Path, shapes: list[str], error: type[UsageError]) -> None:
    path = flattening().write(tmp_path / "m.tflite")
    with pytest.raises(error) as caught:
        load(str(path), shapes)
    says(str(caught.value))
    assert caught.value.exit_code == 2
