"""``optimize export``: a folder that runs with the runtime and numpy alone, and knows when it has become slow."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert import PlanRunner
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.export.run_plan import SURE_RUNS, Plan
from search_spaces.chain import chain_plan
from search_spaces.models import load

pytestmark = pytest.mark.litert
ROOT = Path(__file__).parents[1]


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
    assert document["expected"]["fallback"]["file"] == "whole.tflite"
    assert json.loads((exported / "delegates.json").read_text())["processors"]
    text = (exported / "plan.txt").read_text()
    assert text.count("\nstage file=") == len(document["stages"])


def test_it_computes_what_the_product_computes(exported: Path) -> None:
    with PlanRunner(exported) as runner:
        ((name, (shape, dtype)),) = runner.inputs.items()
        rng = np.random.default_rng(3)
        images = [rng.standard_normal(shape).astype(dtype) for _ in range(5)]
        wanted = [runner.run(image) for image in images]
    with Plan(exported) as plan:
        assert plan.inputs == {name: (shape, dtype)}
        for image, outputs in zip(images, wanted, strict=True):
            found = plan.run({name: image})
            assert all(found[key].tobytes() == value.tobytes() for key, value in outputs.items())
        streamed = list(plan.stream(images))
        assert len(streamed) == len(images)
        for found, outputs in zip(streamed, wanted, strict=True):
            assert all(found[key].tobytes() == value.tobytes() for key, value in outputs.items())
        with pytest.raises(ValueError, match="has shape"):
            plan.run(np.zeros((1, 2), np.float32))


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
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ms an inference, expected were" in told


def test_drift_is_told_and_leads_back_to_one_processor(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Path(shutil.copytree(exported, tmp_path / "slow"))
    document = json.loads((slow / "plan.json").read_text())
    document["expected"]["stage_ms"] = [ms / 10 for ms in document["expected"]["stage_ms"]]
    document["expected"]["fallback"]["latency_ms"] /= 10
    (slow / "plan.json").write_text(json.dumps(document))
    with Plan(slow) as plan:
        inputs = {name: np.ones(shape, dtype) for name, (shape, dtype) in plan.inputs.items()}
        first = plan.run(inputs)
        for _ in range(SURE_RUNS):
            plan.run(inputs)
        assert plan.fallen_back
        assert min(plan.drift()) > 1.2
        assert "times as long as expected" in plan.advice()
        again = plan.run(inputs)
        assert all(np.allclose(again[key], value, atol=1e-5) for key, value in first.items())
    assert "should take" in capsys.readouterr().err


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


@pytest.mark.timeout(900)
def test_the_runner_in_cpp_computes_what_the_one_in_python_computes(runner_in_cpp: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "squeezenet1_1@0.5/64", "--processors", "cpu0,cpu1", "--max-stages", "1", "--budget", "2"]
    assert main([*words, "-q", "--out", str(run)]) == 0
    evaluator, graph = LitertEvaluator(), load("squeezenet1_1@0.5/64")
    with evaluator.prepare(evaluator.platform().restrict(("cpu0", "cpu1"))) as session:  # a plan of two lanes instead
        session.deploy(run / "best", graph, chain_plan(graph, (20,), ("cpu0", "cpu1")))
    result = json.loads((run / "result.json").read_text())
    result["best"]["stage_ms"] = None
    (run / "result.json").write_text(json.dumps(result))
    assert main(["export", str(run)]) == 0
    folder = run / "export"
    assert [stage["processor"] for stage in json.loads((folder / "plan.json").read_text())["stages"]] == [
        "cpu0",
        "cpu1",
    ]
    rng = np.random.default_rng(5)
    with PlanRunner(folder) as runner:
        arrays = {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in runner.inputs.items()}
        wanted = b"".join(value.tobytes() for value in runner.run(arrays).values())
    (tmp_path / "inputs").write_bytes(b"".join(array.tobytes() for array in arrays.values()))
    command = list(map(str, (runner_in_cpp, folder, 5, tmp_path / "inputs", tmp_path / "outputs")))
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "ms an inference" in told.stdout
    assert (tmp_path / "outputs").read_bytes() == wanted
    (tmp_path / "inputs").write_bytes(b"too few")
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "does not hold as many bytes as the inputs" in told.stderr


def test_other_objectives_expect_no_times_where_they_have_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "mobilenet_v1@0.25/128", "--processors", "cpu0,cpu1", "--objective", "occupancy", "-q"]
    assert main([*words, "--max-stages", "2", "--budget", "4", "--out", str(run)]) == 0
    assert main(["export", str(run)]) == 0
    expected = json.loads((run / "export" / "plan.json").read_text())["expected"]
    assert set(expected) == {"objective", "occupancy_ms"}
    with Plan(run / "export") as plan:
        plan.run({name: np.zeros(shape, dtype) for name, (shape, dtype) in plan.inputs.items()})
        assert "expected" not in plan.advice()


def test_a_prediction_has_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--budget", "3", "-q"]
    assert main([*words, "--max-stages", "2", "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "only predicts" in capsys.readouterr().err
