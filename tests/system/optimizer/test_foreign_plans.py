"""A plan in the words of OpenVINO, ONNX Runtime and Model Explorer; the first two are asked what went where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.cli import main
from optimizer.export import onnx_plan, openvino_plan
from optimizer.report.data import read_study
from search_spaces.models import load
from tests.support.sentences import says

MODEL = "squeezenet1_1@0.25/64"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A predicted study whose plan has some stages on two processors."""
    folder = tmp_path_factory.mktemp("foreign") / "run"
    words = [MODEL, "--evaluator", "synthetic", "--budget", "4", "--max-stages", "3", "-q", "--out", str(folder)]
    assert main(words) == 0
    result = json.loads((folder / "result.json").read_text())
    last = len(load(MODEL).operators)
    parts = ((0, 10, "cpu0"), (10, 25, "cpu1"), (25, last, "cpu0"))
    stages = [{"operators": [[first, end]], "processor": name} for first, end, name in parts]
    result["best"]["plan"]["stages"], result["best"]["stage_ms"] = stages, None
    (folder / "result.json").write_text(json.dumps(result))
    assert [s.processor for s in read_study(folder).best.stages] == ["cpu0", "cpu1", "cpu0"]
    return folder


def test_model_explorer_shows_every_operator(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--target", "model-explorer", "--out", str(tmp_path / "out")]) == 0
    shown = json.loads((tmp_path / "out" / "partition.json").read_text())["results"]
    graph = load(MODEL)
    assert set(shown) == {graph.tensors[o.outputs[0]].name for o in graph.operators}
    found = {" · ".join(each["value"].split(" · ")[:2]) for each in shown.values()}
    assert found == {"cpu0 · stage 0", "cpu1 · stage 1", "cpu0 · stage 2"}


@pytest.mark.openvino
def test_openvino_runs_every_node_where_the_plan_says(run: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    out = tmp_path / "out"
    assert main(["export", str(run), "--target", "openvino", "--out", str(out)]) == 0
    core = openvino.Core()
    library = Path(openvino.__file__).parent / "libs" / "libopenvino_intel_cpu_plugin.so"
    core.register_plugin(str(library), "CPU2")  # a second device, on the same cores
    model = openvino_plan.placed(core, out, {"cpu1": "CPU2"})
    placed = openvino_plan.affinities(model)
    devices = ["CPU", "CPU2", "CPU"]
    assert all(devices[int(name[6])] == device for name, device in placed.items() if name.startswith("stage_"))
    exact = {"INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": True}
    network = openvino_plan.compiled(core, model, exact)
    assert network.get_property("EXECUTION_DEVICES") == ["CPU", "CPU2"]
    assert network.get_property("HETERO_NUMBER_OF_SUBMODELS") == 3
    inputs = np.random.default_rng(0).standard_normal((1, 64, 64, 3)).astype(np.float32)
    request = network.create_infer_request()
    (found,) = request.infer({0: inputs}).values()
    # Where OpenVINO ran what, in its own words, and the nodes that each of its layers was fused from.
    ran = dict(reversed(each.node_name.split(": ")) for each in request.get_profiling_info())
    fused = {layer.get_friendly_name(): layer.get_rt_info() for layer in network.get_runtime_model().get_ordered_ops()}
    nodes = {
        node: ran[layer]
        for layer, said in fused.items()
        for node in said["originalLayersNames"].astype(str).split(",")
        if layer in ran and node in placed and node.startswith("stage_")
    }
    assert all(where == f"subgraph{name[6]}" for name, where in nodes.items())
    kinds = {node.get_friendly_name(): node.get_type_name() for node in model.get_ordered_ops()}
    # All but what was folded when it was compiled: weights, and transposes of them and of what is read and written.
    assert {kinds[name] for name in set(placed) - set(nodes)} <= {"Constant", "Transpose", "Parameter", "Result"}
    (wanted,) = core.compile_model(str(load(MODEL).source.path), "CPU", exact)({0: inputs}).values()  # type: ignore[union-attr]
    np.testing.assert_allclose(found, wanted, atol=1e-4 * float(np.abs(wanted).max()))


def chain(kinds: list[str]) -> Any:
    """Return an ONNX model of operators one after another; each output has a name."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    names = ["x", *(f"t{i}" for i in range(len(kinds)))]
    nodes = [helper.make_node(op, [a], [b], name=b) for op, a, b in zip(kinds, names, names[1:], strict=False)]
    ends = [helper.make_tensor_value_info(name, kind, [1, 4]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[str], list[int], list[bool]]:
    """Draw kinds of operators, the stage of each, and whether its output has kept its name."""
    count = draw(st.integers(1, 8))
    kinds = draw(st.lists(st.sampled_from(["Relu", "Tanh", "Neg"]), min_size=count, max_size=count))
    stages = sorted(draw(st.lists(st.integers(0, 11), min_size=count, max_size=count)))
    kept = draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))
    return kinds, stages, [*kept, True]


@settings(max_examples=30)
@given(plans())
def test_onnx_runtime_has_every_node_where_the_plan_says(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    kinds, stages, kept = drawn
    # A fused node has the stage of the operator that computes the next named tensor.
    wanted = [next(stages[j] for j in range(i, len(kinds)) if kept[j]) for i in range(len(kinds))]
    tensors = {f"t{i}": stages[i] for i in range(len(kinds)) if kept[i]}
    placement = {"tensors": tensors, "stages": [{"processor": f"p{i % 2}", "kind": "cpu"} for i in range(12)]}
    model = chain(kinds)
    setting = onnx_plan.annotate(model, placement, {"p1": "gpu"})
    assert [p.value for node in model.graph.node for p in node.metadata_props] == [f"stage_{s}" for s in wanted]
    assert setting == (
        "cpu(=stage_0,=stage_2,=stage_4,=stage_6,=stage_8,=stage_10);"
        "gpu(=stage_1,=stage_3,=stage_5,=stage_7,=stage_9,=stage_11)"
    )
    setting = onnx_plan.annotate(model, placement, {})  # there is no other device here
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    onnx.save(model, path)
    session = onnx_plan.session_of(path, setting)
    output = {n.name: part.ep_name for part in session.get_provider_graph_assignment_info() for n in part.get_nodes()}
    assert set(output) == {f"t{i}" for i in range(len(kinds))}
    assert set(output.values()) == {"CPUExecutionProvider"}


def test_a_model_of_another_plan_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx = pytest.importorskip("onnx")
    assert main(["export", str(run), "--target", "onnxruntime", "--out", str(tmp_path / "out")]) == 0
    assert set(json.loads((tmp_path / "out" / "placement.json").read_text())["tensors"].values()) == {0, 1, 2}
    onnx.save(chain(["Relu"]), tmp_path / "net.onnx")
    words = ["onnx_plan.py", str(tmp_path / "net.onnx"), "--folder", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    capsys.readouterr()
    assert onnx_plan.main() == 4
    says(capsys.readouterr().err)


GOOD = {"tensors": {"t0": 0, "t1": 1}, "stages": [{"processor": "a", "kind": "cpu"}, {"processor": "b", "kind": "cpu"}]}
HOSTILE: dict[str, Any] = {
    "stage 9": GOOD | {"tensors": {"t0": 9}},
    "a word": GOOD | {"tensors": {"t0": "x"}},
    "no stages": {"tensors": {"t0": 0}},
    "no kind": GOOD | {"stages": [{"processor": "a"}] * 2},
    "rules": GOOD | {"stages": [{"processor": "a", "kind": ")("}, {"processor": "b", "kind": "cpu(=x);gpu"}]},
    "a list": [1, 2],
}


def _with_weights_elsewhere(model: Any) -> bytes:
    weights = model.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=1)
    weights.external_data.add(key="location", value="../../../../../../etc/passwd")
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("name", [*HOSTILE, "nested", "noise", "a cycle", "unknown kind", "weights elsewhere"])
def test_hostile_placements_and_models_are_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = chain(["Evil" if name == "unknown kind" else "Relu", "Neg"])
    if name == "a cycle":
        model.graph.node[0].input[0] = "t1"
    content = _with_weights_elsewhere(model) if name == "weights elsewhere" else model.SerializeToString()
    (tmp_path / "net.onnx").write_bytes(bytes(range(256)) if name == "noise" else content)
    (tmp_path / "placement.json").write_text("[" * 100_000 if name == "nested" else json.dumps(HOSTILE.get(name, GOOD)))
    monkeypatch.setattr("sys.argv", ["onnx_plan.py", str(tmp_path / "net.onnx"), "--folder", str(tmp_path)])
    assert onnx_plan.main() == 4
    output = capsys.readouterr().err
    assert output.startswith("onnx_plan: ")
    assert output.count("\n") == 1


@pytest.mark.openvino
@pytest.mark.parametrize("name", ["files", "platform", "noise", "device"])
def test_hostile_folders_are_one_line(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino")
    out = tmp_path / "out"
    assert main(["export", str(run), "--target", "openvino", "--out", str(out)]) == 0
    document = json.loads((out / "plan.json").read_text())
    if name == "noise":
        (out / "stage_0.tflite").write_bytes(bytes(range(256)))
    document.pop(name, None)
    (out / "plan.json").write_text(json.dumps(document))
    monkeypatch.setattr("sys.argv", ["openvino_plan.py", str(out), "--device", "cpu1=NOWHERE"])
    capsys.readouterr()
    assert openvino_plan.main() == 4
    output = capsys.readouterr().err
    assert output.startswith("openvino_plan: ")
    assert len(output) > len("openvino_plan: \n")
    assert output.count("\n") == 1


@pytest.mark.parametrize("runner", [onnx_plan, openvino_plan])
def test_a_device_is_a_pair(runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["runner", "folder", "--device", "gpu"])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 2
    says(capsys.readouterr().err)
