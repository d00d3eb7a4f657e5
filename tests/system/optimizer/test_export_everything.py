"""Whatever can be searched is exported, and what was exported runs: laws over freedoms and evaluators."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evaluators.litert import PlanRunner, WorkloadRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from optimizer.cli import main
from optimizer.devices import choose_platform
from optimizer.export.run_plan import Plan as RunPlan
from optimizer.report.data import read_study
from search_spaces.models import load
from search_spaces.spaces.registry import make_space
from search_spaces.spaces.space import EnumerableSpace
from tests.support.commands import SEARCHED

pytestmark = [pytest.mark.litert, pytest.mark.usefixtures("elsewhere")]
MODEL = "squeezenet1_1@0.25/64"
EVERY = ("--allow", "cuts,branches,splits,ranks", "--max-error", "0.9")
HERE = ("cpu0", "cpu1", "cpu1:builtin")
PIXEL4 = ("--evaluator", "cost-model", "--platform", "pixel4", "--processors")


@pytest.fixture(scope="module")
def here() -> Iterator[LitertSession]:
    evaluator = LitertEvaluator()
    with evaluator.prepare(choose_platform(evaluator, HERE)) as session:
        yield session


@pytest.fixture(scope="module")
def space() -> EnumerableSpace:
    return make_space("cuts,branches,splits,ranks", load(MODEL), choose_platform(LitertEvaluator(), HERE), 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = [MODEL, "--processors", "cpu0", "--max-stages", "1", "--budget", "1", "-q", "--out", str(folder)]
    assert main(words) in SEARCHED
    return folder


def bits(outputs: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in outputs.items()}


@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_plans_of_every_freedom_compute_what_execute_computes(
    data: st.DataObject, here: LitertSession, space: EnumerableSpace, run: Path
) -> None:
    plan = space.plan_at(data.draw(st.integers(0, space.cardinality() - 1)))
    shutil.rmtree(run / "best")
    (run / "best").mkdir()
    here.deploy(run / "best", load(MODEL), plan)
    assert main(["export", str(run)]) == 0
    with PlanRunner(run / "best") as runner:
        inputs = _seeded(runner)
        wanted = runner.run(inputs)
    with RunPlan(run / "export") as mine:
        assert bits(mine.run(inputs)) == bits(wanted)
    for file in (run / "best").glob("stage_*.tflite"):
        assert file.samefile(run / "export" / file.name)  # weights are there once


def _seeded(runner: PlanRunner) -> dict[str, np.ndarray[Any, Any]]:
    from evaluators.litert.tensors import model_inputs

    return dict(zip(runner.inputs, model_inputs(runner.deployment.graph, 0), strict=True))


CASES = {
    "cost-model": [*PIXEL4, "1large,1small", *EVERY],
    "synthetic": ["--evaluator", "synthetic"],
}


@pytest.mark.parametrize("name", list(CASES))
def test_files_for_another_device_compute_what_files_for_this_one_do(
    name: str, tmp_path: Path, here: LitertSession
) -> None:
    assert main([f"{MODEL}+spectrum", *CASES[name], "--budget", "4", "-q", "--out", "there"]) == 0
    assert main(["export", "there"]) == 0
    assert main(["execute", "there"]) == 0
    study = read_study(Path("there"))
    assert study.graph is not None
    processors = dict(zip(dict.fromkeys(s.processor for s in study.best.stages), HERE, strict=False))
    mapped = replace(study.best, stages=tuple(replace(s, processor=processors[s.processor]) for s in study.best.stages))
    assert len(processors) <= 2
    here.deploy(tmp_path, study.graph, mapped)
    with PlanRunner(tmp_path) as runner, RunPlan("there/export") as mine:
        inputs = _seeded(runner)
        assert bits(mine.run(inputs)) == bits(runner.run(inputs))


def models_of(folder: Path) -> Any:
    """Return the class of an exported runner, which finds the law of its queue beside itself."""
    spec = importlib.util.spec_from_file_location("exported_run_plan", folder / "run_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Models


@pytest.mark.parametrize(
    "words", [["--processors", "cpu0,cpu1"], [*PIXEL4, "1large,1small", *EVERY]], ids=["litert", "cost-model"]
)
def test_several_models_compute_what_execute_computes(words: list[str]) -> None:
    several = [f"{MODEL}*2", *words, "--budget", "3", "-q", "--out", "several"]
    assert main(several) in SEARCHED
    for command in (["export", "several"], ["execute", "several"], ["explain", "several"]):
        assert main(command) == 0
    if words[0] == "--evaluator":
        assert main(["compare", "several", "several", "-q"]) == 0
    assert "search_spaces" not in Path("several/export/scheduler.py").read_text()  # numpy and the runtime alone
    rng = np.random.default_rng(0)
    with models_of(Path("several/export"))("several/export") as mine:
        given = {
            name: {port: rng.standard_normal(shape).astype(dtype) for port, (shape, dtype) in ports.items()}
            for name, ports in mine.inputs.items()
        }
        for name, arrays in given.items():
            mine.set_inputs(name, arrays)
        for _ in range(3):
            took = mine.run()
        assert not mine.failures
        assert all(seconds is not None and seconds > 0 for each in took.values() for seconds in each)
        found = {name: b"".join(bits(mine.outputs(name)).values()) for name in given}
    assert found[f"{MODEL} 1"] != found[f"{MODEL} 2"]
    for name, arrays in given.items():
        if Path("several/best/model_0").exists():
            with WorkloadRunner("several/best") as runner:
                runner.set_inputs(name, list(arrays.values()))
                runner.run()
                wanted = b"".join(value.tobytes() for value in runner.outputs(name))
        else:
            model = next(client["model"] for client in mine.document["clients"] if client["name"] == name)
            with RunPlan(_alone(Path("several/export") / f"model_{model}")) as one:
                wanted = b"".join(value.tobytes() for value in one.run(arrays).values())
        assert found[name] == wanted
    program = [sys.executable, "-I", "several/export/run_plan.py", "--runs", "2"]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert output.count(" ms, expected were ") == 2


def _alone(folder: Path) -> Path:
    """Return the folder of one of several models, which is a plan of its own."""
    assert json.loads((folder / "plan.json").read_text())["files"]
    return folder


def test_what_has_no_model_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(Path(__file__).parents[3] / "experiments" / "tables" / "one_inference.yaml")
    assert main([table, "--evaluator", "table", "--budget", "3", "-q", "--out", "table"]) == 0
    assert main(["execute", "table"]) == 0
    assert "predicted: nothing was run" in capsys.readouterr().out
    assert main(["export", "table"]) == 2
    assert "has no file; stage files are cut from the study's model" in capsys.readouterr().err


def test_a_phone_runs_litert_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    document = json.loads((other / "best" / "plan.json").read_text())
    document["platform"]["processors"][0]["options"] |= {"runtime": "openvino", "precision": "f32"}
    (other / "best" / "plan.json").write_text(json.dumps(document))
    assert main(["export", str(other)]) == 0
    assert " runtime=openvino " in (other / "export" / "plan.txt").read_text()  # which the runner in C++ refuses
    assert main(["export", str(other), "--target", "android"]) == 2
    assert "openvino; a phone runs LiteRT alone" in capsys.readouterr().err
