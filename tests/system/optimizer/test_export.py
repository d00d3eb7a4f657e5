"""``optimize export``: a folder that runs with the runtime and numpy alone; its drift, and its fallback on request."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evaluators.litert import PlanRunner, WorkloadRunner, parts
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.devices import choose_platform
from optimizer.export.run_plan import (
    ALPHA,
    MAX_PAIRS,
    MIN_PAIRS,
    SURE_RUNS,
    Comparison,
    FallbackError,
    _usual_inputs,
    whole_file,
)
from optimizer.export.run_plan import Plan as RunPlan
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.models import load
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.registry import FREEDOMS
from tests.support.commands import SEARCHED
from tests.support.models.operator_corpus import corpus
from tests.support.models.tflite_models import TYPES, Net
from tests.support.sentences import fails, says
from tests.system.optimizer.test_export_everything import drawn

pytestmark = pytest.mark.litert
ROOT = Path(__file__).parents[3]
MODEL = "squeezenet1_1@0.5/64"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("study") / "run"
    words = ["--model", "mobilenet_v1@0.25/128", "--max-stages", "2", "--budget", "6", "-q", "--out", str(run)]
    assert main(words) == 0
    assert main(["export", str(run)]) == 0
    return run / "export"


def test_the_folder_holds_what_it_needs(exported: Path) -> None:
    names = {p.name for p in exported.iterdir()}
    assert {"plan.json", "plan.txt", "stage_0.tflite", "run_plan.py", "run_plan.cc", "delegates.json"} <= names
    document = json.loads((exported / "plan.json").read_text())
    assert document["expected"]["latency_ms"] > 0
    assert json.loads((exported / "delegates.json").read_text())["processors"]
    text = (exported / "plan.txt").read_text()
    assert text.count("\nstage file=") == len(document["stages"])


def test_it_computes_what_the_product_computes(exported: Path) -> None:
    with PlanRunner(exported) as runner:
        ((name, (shape, dtype)),) = runner.inputs.items()
        rng = np.random.default_rng(3)
        images = [rng.standard_normal(shape).astype(dtype) for _ in range(5)]
        wanted = [runner.run(image) for image in images]
    with RunPlan(exported) as plan:
        assert plan.inputs == {name: (shape, dtype)}
        for image, outputs in zip(images, wanted, strict=True):
            found = plan.run({name.partition(":")[0]: image})
            assert all(found[key].tobytes() == value.tobytes() for key, value in outputs.items())
        streamed = list(plan.stream(images))
        assert len(streamed) == len(images)
        for found, outputs in zip(streamed, wanted, strict=True):
            assert all(found[key].tobytes() == value.tobytes() for key, value in outputs.items())
        with fails(ValueError):
            plan.run(np.zeros((1, 2), np.float32))
        with fails(ValueError):
            plan.run({"other": images[0]})


def test_it_imports_only_the_runtime_and_numpy(exported: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import run_plan, numpy as np\n"
        "with run_plan.Plan('.') as plan:\n"
        "    plan.run({n: np.zeros(s, d) for n, (s, d) in plan.inputs.items()})\n"
        "bad = {'optuna', 'optimizer', 'evaluators', 'search_spaces', 'scipy', 'pydantic'} & set(sys.modules)\n"
        "print(sorted(bad))\n"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], cwd=exported, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    command = [sys.executable, "-I", str(exported / "run_plan.py"), "--runs", "5"]
    says(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def exported_with(run: Path, cuts: tuple[int, ...], processors: tuple[str, ...], *more: str) -> Path:
    """Export a study of these processors with a plan of our choice in the place of its best one.

    Args:
        more: options of the export.
    """
    names = tuple(dict.fromkeys(processors))
    words = ["--model", MODEL, "--processors", ",".join(names), "--max-stages", "1", "--budget", "2"]
    assert main([*words, "-q", "--out", str(run)]) in SEARCHED
    evaluator, graph = LitertEvaluator(), load(MODEL)
    platform = choose_platform(evaluator, names)
    with evaluator.prepare(platform) as session:
        session.deploy(run / "best", graph, chain_plan(graph, cuts, processors))
    result = json.loads((run / "result.json").read_text())
    result["best"]["stage_ms"] = None
    (run / "result.json").write_text(json.dumps(result))
    assert main(["export", str(run), *more]) == 0
    return run / "export"


def test_a_plan_of_split_operators_computes_what_the_product_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1 << 10)
    run = tmp_path / "run"
    exported_with(run, (20,), ("cpu0", "cpu1"))
    graph = load(MODEL)
    sides = (Share("height", 0, 6), Share("height", 6, 15))
    stages = [Stage((0, 1), processor, share) for processor, share in zip(("cpu0", "cpu1"), sides, strict=True)]
    plan = Plan(graph.digest, (*stages, Stage(tuple(range(2, len(graph.operators))), "cpu1")))
    evaluator = LitertEvaluator()
    with evaluator.prepare(choose_platform(evaluator, ("cpu0", "cpu1"))) as session:
        session.deploy(run / "best", graph, plan)
    assert main(["export", str(run)]) == 0
    folder = run / "export"
    document = json.loads((folder / "plan.json").read_text())
    assert document["views"]
    assert not {"stage_0.tflite", "stage_1.tflite"} <= {p.name for p in folder.iterdir()}
    assert " in=" in (folder / "plan.txt").read_text()  # tensors that are rows of others
    with PlanRunner(folder) as runner, RunPlan(folder) as mine:
        samples = [random_inputs(mine) for _ in range(5)]
        wanted = [{k: v.tobytes() for k, v in runner.run(sample).items()} for sample in samples]
        found = [mine.run(sample) for sample in samples]
        assert [{k: v.tobytes() for k, v in each.items()} for each in found] == wanted
        assert [{k: v.tobytes() for k, v in each.items()} for each in mine.stream(samples)] == wanted


def test_the_plan_of_a_run_is_not_overwritten(exported: Path, tmp_path: Path) -> None:
    run = shutil.copytree(exported.parent, tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (run / "best").iterdir()}
    assert main(["export", str(run), "--out", str(run / "best")]) == 2
    assert {file.name: file.read_bytes() for file in (run / "best").iterdir()} == before
    assert main(["export", str(run)]) == 0  # into the folder of an earlier export


def test_a_refused_export_changes_nothing(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(exported.parent, tmp_path / "run")
    (run / "export" / "model_card.md").write_text("of the user")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"objective": "throughput"}))  # has no fallback
    before = {file.name: file.read_bytes() for file in (run / "export").iterdir() if file.is_file()}
    for folder in (run / "export", tmp_path / "new"):
        assert main(["export", str(run), "--fallback", "--out", str(folder)]) == 2
        says(capsys.readouterr().err)
    assert {file.name: file.read_bytes() for file in (run / "export").iterdir() if file.is_file()} == before
    assert not (tmp_path / "new").exists()
    assert main(["export", str(run)]) == 0
    assert (run / "export" / "model_card.md").is_file()


@pytest.mark.parametrize("name", ["files", "platform", "a list", "nested", "a type"])
def test_damaged_folders_are_one_line(exported: Path, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "copy")
    document = json.loads((folder / "plan.json").read_text())
    document.pop(name, None)
    if name == "a type":
        document["tensors"][0]["dtype"] = "object,O"
    text = {"a list": "[]", "nested": "[" * 100_000}.get(name, json.dumps(document))
    (folder / "plan.json").write_text(text)
    command = [sys.executable, "-I", str(folder / "run_plan.py"), "--runs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"run_plan: {folder}: ")


@pytest.fixture
def sized_at_run_time(tmp_path: Path) -> Path:
    """An exported plan of a model that zeros do not fit: its input is the shape of its output."""
    net = Net()
    shape, value = net.input((2,), TYPES.INT32), net.input(())
    filled = net.op("FILL", [shape, value], net.tensor((2, 3)), schema.FillOptionsT())
    path = net.outputs(net.op("NEG", [filled], net.tensor((2, 3)))).write(tmp_path / "m.tflite")
    run = tmp_path / "run"
    words = [str(path), "--processors", "cpu0", "--max-stages", "1", "--budget", "1", "-q", "--out", str(run)]
    assert main(words) in SEARCHED
    assert main(["export", str(run)]) == 0
    return run / "export"


def test_outputs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    net = Net()
    first = net.op("NEG", [net.input()], net.tensor(name="o"))
    second = net.op("RELU", [first], net.tensor(name="o"))
    path, run = net.outputs(first, second, first).write(tmp_path / "m.tflite"), tmp_path / "run"
    words = [str(path), "--processors", "cpu0", "--max-stages", "1", "--budget", "1", "-q", "--out", str(run)]
    assert main(words) in SEARCHED
    assert main(["export", str(run)]) == 0
    with PlanRunner(run / "best") as runner, RunPlan(run / "export") as plan:
        wanted, found = runner.run(random_inputs(plan)), plan.run(random_inputs(plan))
    assert list(found) == list(wanted) == ["o", "o:1", "o:2"]
    assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())


@pytest.mark.parametrize("kind", ["BFLOAT16", "INT4"])
def test_types_that_numpy_lacks_cross_stages(exported: Path, kind: str, tmp_path: Path) -> None:
    net = Net()
    if kind == "INT4":
        scale = schema.QuantizationParametersT(scale=[0.2], zeroPoint=[0])
        middle = net.input(dtype=TYPES.INT4, quantization=scale)
        last = net.op("DEQUANTIZE", [middle], options=schema.DequantizeOptionsT())
        last = net.op("NEG", [last])
    else:
        to = schema.CastOptionsT(inDataType=TYPES.FLOAT32, outDataType=TYPES.BFLOAT16)
        middle = net.op("CAST", [net.input()], net.tensor(dtype=TYPES.BFLOAT16), to)
        back = schema.CastOptionsT(inDataType=TYPES.BFLOAT16, outDataType=TYPES.FLOAT32)
        last = net.op("CAST", [middle], options=back)
    graph = load(str(net.outputs(last).write(tmp_path / "m.tflite")))
    run = shutil.copytree(exported.parent, tmp_path / "run")
    shutil.rmtree(run / "best")
    shutil.rmtree(run / "export")
    (run / "best").mkdir()
    evaluator = LitertEvaluator()
    with evaluator.prepare(choose_platform(evaluator, ("cpu0", "cpu1:builtin"))) as session:
        session.deploy(run / "best", graph, chain_plan(graph, (1,), ("cpu0", "cpu1:builtin")))
    assert main(["export", str(run)]) == 0
    with PlanRunner(run / "best") as runner, RunPlan(run / "export") as plan:
        assert plan.inputs == runner.inputs
        given = random_inputs(plan)
        wanted, found = runner.run(given), plan.run(given)
    assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())


def test_a_folder_is_timed_on_what_it_was_measured_with(sized_at_run_time: Path) -> None:
    (shape,) = [np.frombuffer((sized_at_run_time / "inputs.bin").read_bytes()[:8], np.int32)]
    assert shape.tolist() == [2, 3]
    command = [sys.executable, "-I", str(sized_at_run_time / "run_plan.py"), "--runs", "2"]
    says(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert " engine=interpreter" in (sized_at_run_time / "plan.txt").read_text()


def edited(folder: Path, copy: Path, **changes: Any) -> Path:
    """Copy an exported folder and change its plan.json."""
    shutil.copytree(folder, copy)
    document = json.loads((copy / "plan.json").read_text())
    for key, change in changes.items():
        change(document[key])
    (copy / "plan.json").write_text(json.dumps(document))
    return copy


def random_inputs(plan: RunPlan) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in plan.inputs.items()}


def test_drift_is_reported(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def expect_less(expected: dict[str, Any]) -> None:
        expected["latency_ms"] /= 10
        expected["stage_ms"] = [ms / 10 for ms in expected["stage_ms"]]

    with RunPlan(edited(exported, tmp_path / "slow", expected=expect_less)) as plan:
        inputs = random_inputs(plan)
        for _ in range(2 * SURE_RUNS):
            plan.run(inputs)
        assert min(plan.drift()) > 1.2
        says(plan.advice())
        assert not plan.fallen_back
    assert not capsys.readouterr().err


@pytest.fixture(scope="module")
def many_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that hands every tensor from one core to the other: the whole model is far faster."""
    operators = len(load(MODEL).operators)
    processors = tuple(("cpu0", "cpu1")[i % 2] for i in range(operators))
    return exported_with(tmp_path_factory.mktemp("many") / "run", tuple(range(1, operators)), processors, "--fallback")


def test_a_fallback_is_used_only_on_request(many_stages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads((many_stages / "plan.json").read_text())["fallback"]["file"] == "whole.tflite"
    assert (many_stages / "whole.part").stat().st_size < 1 << 19  # of 1.8 MB: large weights are those of the stages
    assert "whole" not in (many_stages / "plan.txt").read_text()  # the runner in C++ has no fallback
    capsys.readouterr()
    with RunPlan(many_stages) as plan:
        inputs = random_inputs(plan)
        outputs = [plan.run(inputs) for _ in range(2 * SURE_RUNS)]
        assert plan.comparison is None
        assert not plan.fallen_back
    assert not capsys.readouterr().err
    with RunPlan(many_stages, fallback=True) as plan:
        output = capsys.readouterr().err
        assert plan.fallen_back
        found = plan.comparison
        assert found is not None
        assert found.ratio > 1
        assert found.p_value < ALPHA
        assert MIN_PAIRS <= len(found.plan_s) == len(found.fallback_s) <= MAX_PAIRS
        assert output == f"run_plan: {plan.advice()}\n"
        for outputs_of in (plan.run, lambda one: next(plan.stream([one]))):
            assert {k: v.tobytes() for k, v in outputs_of(inputs).items()} == {
                k: v.tobytes() for k, v in outputs[0].items()
            }
        assert not plan.runs
    assert not plan.fallen_back


def test_a_plan_stays_where_the_fallback_is_not_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = RunPlan._begin

    def slow_whole(plan: RunPlan, inputs: Any, whole: Any = None) -> Any:
        if whole is not None:
            time.sleep(0.02)
        return begin(plan, inputs, whole)

    monkeypatch.setattr(RunPlan, "_begin", slow_whole)
    folder = exported_with(tmp_path / "run", (20,), ("cpu0", "cpu1"), "--fallback")
    capsys.readouterr()
    with RunPlan(folder, fallback=True) as plan:
        assert plan.comparison is not None
        assert not plan.fallen_back
        plan.run(random_inputs(plan))
        assert len(plan.runs) == 1
    assert not capsys.readouterr().err


def test_calls_from_python_that_take_longer_than_the_plan_are_told(many_stages: Path, tmp_path: Path) -> None:
    def expect_little(expected: dict[str, Any]) -> None:
        expected["latency_ms"] = 0.01
        expected.pop("stage_ms", None)

    folder = edited(many_stages, tmp_path / "fast", expected=expect_little)
    with RunPlan(folder) as plan:
        stages = len(plan.document["stages"])
        plan.runs += [(0.1e-3 * stages, [0.05e-3] * stages)] * SURE_RUNS
        says(plan.advice())


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_what_is_left_of_a_stage_file_is_not_run(exported: Path, tmp_path: Path, kept: float) -> None:
    shutil.copytree(exported, tmp_path / "copy")
    stage = tmp_path / "copy" / "stage_0.tflite"
    content = stage.read_bytes()
    stage.unlink()  # the copy may be a link
    stage.write_bytes(content[: int(kept * len(content))])
    command = [sys.executable, str(tmp_path / "copy" / "run_plan.py"), "--runs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 4
    says(run.stderr.splitlines()[-1])


def test_a_fallback_that_computes_otherwise_is_refused(
    many_stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_kernels(fallback: dict[str, Any]) -> None:
        fallback["processor"]["options"]["kernels"] = "builtin"

    with fails(FallbackError):
        RunPlan(edited(many_stages, tmp_path / "kernels", fallback=other_kernels), fallback=True)
    known = json.loads((many_stages / "plan.json").read_text())["fallback"]
    with whole_file(many_stages, known) as path:
        content = bytearray(Path(path).read_bytes())
    other_weights = edited(many_stages, tmp_path / "weights", fallback=lambda fallback: fallback.pop("parts"))
    half = len(content) // 2
    content[half : half + 4096] = bytes(byte ^ 1 for byte in content[half : half + 4096])
    (other_weights / "whole.tflite").write_bytes(content)
    with fails(FallbackError):
        RunPlan(other_weights, fallback=True)
    mixed = exported_with(tmp_path / "run", (20,), ("cpu0", "cpu1:builtin"))
    assert not (mixed / "whole.tflite").exists()
    with fails(FallbackError):
        RunPlan(mixed, fallback=True)
    with RunPlan(mixed) as plan:  # the plan itself runs
        plan.run(random_inputs(plan))
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--fallback"]) == 2
    says(capsys.readouterr().err)
    command = [sys.executable, "-I", str(mixed / "run_plan.py"), "--fallback"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    says(done.stderr)


SECONDS = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60))
def test_the_fallback_is_compared_by_an_exact_sign_test(pairs: list[tuple[float, float]]) -> None:
    found = Comparison(tuple(p for p, _ in pairs), tuple(f for _, f in pairs))
    unequal = [p > f for p, f in pairs if p != f]
    wanted = stats.binomtest(sum(unequal), len(unequal), alternative="greater").pvalue if unequal else 1.0
    assert found.p_value == pytest.approx(wanted, rel=1e-9)
    assert found.fallback_is_faster == (found.p_value < ALPHA)
    if found.fallback_is_faster:
        assert found.ratio > 1
    swapped = Comparison(found.fallback_s, found.plan_s)
    assert not (found.fallback_is_faster and swapped.fallback_is_faster)


@pytest.fixture(scope="module")
def runner_in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built from LiteRT's and Abseil's sources against the library of the Python package."""
    sources = [os.environ.get(f"PARTITION_OPTIMIZER_{name}", "") for name in ("LITERT", "ABSEIL")]
    if not all(sources) or shutil.which("cmake") is None:
        pytest.skip("PARTITION_OPTIMIZER_LITERT and PARTITION_OPTIMIZER_ABSEIL name no sources, or there is no CMake")
    package = importlib.util.find_spec("ai_edge_litert")
    assert package is not None
    assert package.origin is not None
    folder = tmp_path_factory.mktemp("build")
    options = [f"-DLITERT={sources[0]}", f"-DABSEIL={sources[1]}"]
    options.append(f"-DLITERT_LIBRARY={Path(package.origin).parent / 'libLiteRt.so'}")
    for command in (["-S", str(ROOT / "optimizer" / "export"), "-B", str(folder), *options], ["--build", str(folder)]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "run_plan"


def in_cpp(program: Path, folder: Path, inputs: bytes) -> tuple[bytes, str]:
    """Run an exported plan by the runner in C++; return the bytes of its outputs, or what it says is wrong."""
    (folder / "inputs").write_bytes(inputs)
    command = list(map(str, (program, folder, 5, folder / "inputs", folder / "outputs")))
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    if output.returncode:
        return b"", output.stderr.splitlines()[-1]
    return (folder / "outputs").read_bytes(), ""


def agrees_in_cpp(program: Path, folder: Path) -> None:
    """Check that both runners compute the same."""
    with RunPlan(folder) as runner:
        arrays = random_inputs(runner)
        if (folder / "inputs.bin").exists():  # not just any fit
            arrays = dict(zip(arrays, _usual_inputs(folder, runner.document), strict=True))
        for _ in range(5):  # as many as in C++: state is kept between runs
            wanted = b"".join(value.tobytes() for value in runner.run(arrays).values())
    assert in_cpp(program, folder, b"".join(array.tobytes() for array in arrays.values())) == (wanted, "")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("second", ["cpu1:builtin", "cpu1:openvino"])
def test_the_runner_in_cpp_computes_what_the_one_in_python_computes(
    runner_in_cpp: Path, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    exported_with(run, (20,), ("cpu0", second))
    if second.endswith("openvino"):
        says(in_cpp(runner_in_cpp, run / "export", bytes(64 * 64 * 12))[1])
        (library,) = Path(pytest.importorskip("openvino").__file__).parent.glob("libs/libopenvino_c.so*")
        monkeypatch.setenv("OPENVINO_C_LIBRARY", str(library))
    graph, evaluator = load(MODEL), LitertEvaluator()
    platform = choose_platform(evaluator, ("cpu0", second))
    for freedom in FREEDOMS:
        with evaluator.prepare(platform) as session:
            session.deploy(run / "best", graph, drawn(graph, platform, freedom))
        assert main(["export", str(run)]) == 0
        agrees_in_cpp(runner_in_cpp, run / "export")
    says(in_cpp(runner_in_cpp, run / "export", b"too few")[1])
    for runs in ("0", "-1", "5x", "", "99999999999"):
        assert (
            subprocess.run([runner_in_cpp, run / "export", runs], stderr=subprocess.DEVNULL, check=False).returncode
            == 2
        )
    text = (run / "export" / "plan.txt").read_text()
    (run / "export" / "plan.txt").write_text(text.replace(" threads=1 ", " runtime=tflite-runtime threads=1 ", 1))
    says(in_cpp(runner_in_cpp, run / "export", b"")[1])


@pytest.mark.timeout(900)
def test_the_runner_in_cpp_joins_stage_files(runner_in_cpp: Path, tmp_path: Path) -> None:
    folder = exported_with(tmp_path / "run", (20,), ("cpu0", "cpu1:builtin"))
    content = (folder / "stage_1.tflite").read_bytes()
    (tmp_path / "run" / "elsewhere").write_bytes(b"before" + content[:1000] + b"behind")
    (folder / "stage_1.part").write_bytes(content[1000:])
    plan = folder / "plan.txt"
    text = plan.read_text().replace(
        "file=stage_1.tflite", f"file=stage_1.tflite parts=../elsewhere:6:1000,stage_1.part:0:{len(content) - 1000}"
    )
    plan.write_text(text)
    folder.joinpath("stage_1.tflite").rename(tmp_path / "stage_1.tflite")
    before = set(Path(tempfile.gettempdir()).glob("stage_*.tflite"))
    given = bytes(64 * 64 * 12)
    joined = in_cpp(runner_in_cpp, folder, given)
    for part in ("../elsewhere:6:2000", "gone:0:9", "x"):
        plan.write_text(text.replace("../elsewhere:6:1000", part))
        says(in_cpp(runner_in_cpp, folder, given)[1])
    assert set(Path(tempfile.gettempdir()).glob("stage_*.tflite")) == before
    plan.write_text(text)
    shutil.copy(tmp_path / "stage_1.tflite", folder)
    with RunPlan(folder) as runner:
        outputs = runner.run(np.zeros((1, 64, 64, 3), np.float32))
    assert joined == (b"".join(value.tobytes() for value in outputs.values()), "")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        *(f"{kind} float32" for kind in ("LSTM", "SVDF", "WHERE", "SHAPE", "EMBEDDING_LOOKUP_SPARSE", "UNIQUE")),
        "UNIDIRECTIONAL_SEQUENCE_LSTM int8 activations, int16 cells",
    ],
)
def test_the_runner_in_cpp_runs_what_compiled_models_leave_undone(
    runner_in_cpp: Path, name: str, tmp_path: Path
) -> None:
    case = next(case for case in corpus(("float32",)) if case.name == name)
    words = [str(case.net().write(tmp_path / "m.tflite")), "--processors", "cpu0", "--max-stages", "1", "--budget", "1"]
    assert main([*words, "-q", "--out", str(tmp_path / "run")]) in SEARCHED
    folder = tmp_path / "run" / "export"
    assert main(["export", str(tmp_path / "run")]) == 0
    assert " engine=interpreter" in (folder / "plan.txt").read_text()
    agrees_in_cpp(runner_in_cpp, folder)
    (folder / "stage_0.tflite").write_bytes((folder / "stage_0.tflite").read_bytes()[:60])
    assert in_cpp(runner_in_cpp, folder, (folder / "inputs").read_bytes())[1].startswith("run_plan: ")
    (folder / "plan.txt").write_text("tensor 0 4\n")
    assert in_cpp(runner_in_cpp, folder, bytes(12))[1].startswith("run_plan: ")


@pytest.mark.timeout(900)
def test_the_runner_in_cpp_queues_several_models(runner_in_cpp: Path, tmp_path: Path) -> None:
    workload = tmp_path / "workload.yaml"
    workload.write_text(
        "name: two\nmodels:\n"
        f"  - {{model: {MODEL}, name: one, count: 2, arrival: {{kind: periodic, period_ms: 2, requests: 5}}}}\n"
        "  - {model: googlenet@0.25/64, name: other, arrival: {kind: closed, requests: 3}}\n"
    )
    run = tmp_path / "run"
    words = ["--workload", str(workload), "--processors", "cpu0,cpu1", "--allow", "cuts,branches,splits"]
    words += ["--budget", "4", "-q", "--out", str(run)]
    assert main(words) in SEARCHED
    assert main(["export", str(run)]) == 0
    rng = np.random.default_rng(0)
    with WorkloadRunner(run / "best") as runner:
        given = b""
        for name, model in zip(runner.names, runner.files.models, strict=True):
            arrays = [rng.standard_normal(model.graph.tensors[t].shape).astype("f4") for t in model.graph.inputs]
            runner.set_inputs(name, arrays)
            given += b"".join(array.tobytes() for array in arrays)
        runner.run()
        wanted = b"".join(value.tobytes() for name in runner.names for value in runner.outputs(name))
    assert in_cpp(runner_in_cpp, run / "export", given) == (wanted, "")


def test_other_objectives_expect_no_times_where_they_have_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "mobilenet_v1@0.25/128", "--processors", "cpu0,cpu1", "--objective", "occupancy", "-q"]
    assert main([*words, "--max-stages", "2", "--budget", "4", "--out", str(run)]) in SEARCHED
    assert main(["export", str(run)]) == 0
    expected = json.loads((run / "export" / "plan.json").read_text())["expected"]
    assert set(expected) == {"objective", "occupancy_ms"}
    with RunPlan(run / "export") as plan:
        plan.run({name: np.zeros(shape, dtype) for name, (shape, dtype) in plan.inputs.items()})
        assert "expected" not in plan.advice()
