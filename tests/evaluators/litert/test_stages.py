"""Stage files are models of their own, and stage after stage computes what the whole model computes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ai_edge_litert.interpreter import Interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evaluators.litert.tensors import model_inputs
from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.core.platform import Platform
from search_spaces.models.litert import read_model
from search_spaces.models.source import ModelSource
from search_spaces.models.stages import StageModel, cut_stage, packing_model
from tests.support import strategies
from tests.support.narrowing import there
from tests.support.sentences import fails

pytestmark = pytest.mark.litert

Arrays = list[NDArray[Any]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


def run(interpreter: Any, inputs: Sequence[NDArray[Any]]) -> Arrays:
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def whole(graph: Graph) -> tuple[Arrays, Arrays]:
    inputs: Arrays = list(model_inputs(graph, 0))
    return inputs, run(Interpreter(model_path=str(there(graph.source).path), num_threads=1), inputs)


def one_after_another(graph: Graph, stages: Sequence[tuple[StageModel, Any]], inputs: Arrays) -> Arrays:
    values = dict(zip(graph.inputs, inputs, strict=True))
    for model, interpreter in stages:
        outputs = run(interpreter, [values[t] for t in model.inputs])
        values |= dict(zip(model.outputs, outputs, strict=True))
    return [values[t] for t in graph.outputs]


def identical(a: Arrays, b: Arrays) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


PROCESSOR = Platform("one", (strategies.one_core(0),))


@pytest.mark.parametrize("name", ["squeezenet", "mobilenet"])
def test_files_stage_after_stage_compute_what_the_model_computes(
    name: str, request: pytest.FixtureRequest, scratch: Path
) -> None:
    graph: Graph = request.getfixturevalue(name)
    inputs, wanted = whole(graph)

    @settings(max_examples=8)
    @given(st.one_of(strategies.placements(graph, PROCESSOR), strategies.chains(graph, PROCESSOR)))
    def check(plan: Any) -> None:
        stages = []
        for stage in plan.stages:
            model = cut_stage(graph, stage.operators)
            file = scratch / "stage.tflite"
            assert model.write(file) == hashlib.sha256(file.read_bytes()).hexdigest()
            again = read_model(file)
            border = graph.boundary(stage.operators)
            assert (model.inputs, model.outputs) == (border.inputs, border.outputs)
            assert [o.kind for o in again.operators] == [graph.operators[i].kind for i in stage.operators]
            for mine, theirs in ((again.inputs, border.inputs), (again.outputs, border.outputs)):
                assert [again.tensors[t].name for t in mine] == [graph.tensors[t].name for t in theirs]
                assert [again.tensors[t].shape for t in mine] == [graph.tensors[t].shape for t in theirs]
            stages.append((model, Interpreter(model_path=str(file), num_threads=1)))
        assert identical(one_after_another(graph, stages, inputs), wanted)

    check()


@settings(max_examples=5)
@given(data=st.data())
def test_a_header_before_the_whole_file_is_the_stage(data: st.DataObject, squeezenet: Graph) -> None:
    graph = squeezenet
    inputs, wanted = whole(graph)
    plan = data.draw(strategies.placements(graph, PROCESSOR))
    content = there(graph.source).path.read_bytes()
    stages = []
    for stage in plan.stages:
        model = cut_stage(graph, stage.operators)
        view = model.view()
        assert len(view) % 4096 == 0
        stages.append((model, Interpreter(model_content=view + content, num_threads=1)))
    assert identical(one_after_another(graph, stages, inputs), wanted)


def test_a_stage_file_holds_its_own_weights_only(mobilenet: Graph, tmp_path: Path) -> None:
    count = len(mobilenet.operators)
    sizes = []
    for operators in (range(count // 2), range(count // 2, count), range(count)):
        model = cut_stage(mobilenet, operators)
        model.write(tmp_path / "stage.tflite")
        size = (tmp_path / "stage.tflite").stat().st_size
        assert model.weight_nbytes <= size <= model.weight_nbytes + 64_000
        sizes.append(size)
    assert sizes[0] + sizes[1] < 1.02 * sizes[2]


def test_the_model_for_packing_holds_each_operator_with_weights_once_more(squeezenet: Graph, tmp_path: Path) -> None:
    model = packing_model(squeezenet)
    alone = [o for o in squeezenet.operators if any(t != -1 and squeezenet.tensors[t].constant for t in o.inputs)]
    assert len(model.schema.subgraphs) == 1 + len(alone)
    model.write(tmp_path / "packing.tflite")
    inputs, wanted = whole(squeezenet)
    assert identical(run(Interpreter(model_path=str(tmp_path / "packing.tflite")), inputs), wanted)


def test_a_file_that_changed_is_not_cut(squeezenet: Graph, tmp_path: Path) -> None:
    copy = tmp_path / "model.tflite"
    copy.write_bytes(there(squeezenet.source).path.read_bytes())
    graph = read_model(copy)
    model = cut_stage(graph, [0, 1])
    copy.write_bytes(b"x")
    with fails(ModelError):
        model.write(tmp_path / "stage.tflite")
    copy.unlink()
    with fails(ModelError):
        model.write(tmp_path / "stage.tflite")
    assert not (tmp_path / "stage.tflite").exists()


def test_a_graph_without_a_file_cannot_be_cut() -> None:
    with fails(ModelError):
        cut_stage(strategies.chain_graph(3), [0])


def test_sources_tell_when_their_file_changed(squeezenet: Graph, tmp_path: Path) -> None:
    source = there(squeezenet.source)
    missing = ModelSource(tmp_path / "gone.tflite", source.nbytes, source.schema, source.extents)
    with fails(ModelError):
        missing.content_digest()
