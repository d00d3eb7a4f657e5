"""Whatever can be searched is exported, and what was exported runs: laws over freedoms and evaluators."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.base import Session
from evaluators.cuda.session import CudaEvaluator
from evaluators.litert import PlanRunner, WorkloadRunner
from evaluators.litert.session import LitertEvaluator
from evaluators.registry import make_evaluator
from evaluators.remote.session import RemoteEvaluator
from optimizer.cli import main
from optimizer.devices import choose_platform
from optimizer.export.run_plan import Plan as RunPlan
from optimizer.report.data import read_study
from search_spaces.core.errors import OptimizeError
from search_spaces.core.graph import Graph
from search_spaces.core.plan import Plan
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.spaces.registry import FREEDOMS, make_space
from tests.composition import install_example
from tests.support.adb_server import phone_in_farm
from tests.support.commands import SEARCHED
from tests.support.remote_agents import agent_here, agent_process
from tests.support.sentences import fails, says

pytestmark = [pytest.mark.litert, pytest.mark.usefixtures("elsewhere")]
MODEL = "squeezenet1_1@0.25/64+spectrum"
INPUT = np.random.default_rng(0).standard_normal((1, 64, 64, 3), dtype=np.float32)  # as the example's board has it
EVERY = ("--allow", "cuts,branches,splits,ranks", "--max-error", "0.9")
Opened = tuple[Session, Platform]
PIXEL4 = ("--evaluator", "cost-model", "--platform", "pixel4", "--processors")


@contextmanager
def litert(*names: str) -> Iterator[Opened]:
    evaluator = LitertEvaluator()
    platform = choose_platform(evaluator, names)
    with evaluator.prepare(platform) as session:
        yield session, platform


@contextmanager
def remote(folder: Path) -> Iterator[Opened]:
    evaluator = RemoteEvaluator()
    with agent_here(LitertEvaluator(), folder) as (_, served):
        evaluator.at(served.address)
        platform = choose_platform(evaluator, ("cpu0", "cpu1"))
        with evaluator.prepare(platform) as session:
            yield session, platform


@contextmanager
def example(folder: Path) -> Iterator[Opened]:
    """Open a session of the plug-in that the guide has as an example."""
    folder.mkdir()
    install_example(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        evaluator = make_evaluator("example")
        platform = evaluator.platform()
        with evaluator.prepare(platform) as session:
            yield session, platform


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = [MODEL, "--processors", "cpu0", "--max-stages", "1", "--budget", "1", "-q", "--out", str(folder)]
    assert main(words) in SEARCHED
    return folder


def bits(outputs: Any) -> list[bytes]:
    return [value.tobytes() for value in outputs]


def uses(plan: Plan, freedom: str, graph: Graph) -> bool:
    """Return whether a plan does what a freedom allows, on more than one processor."""
    borders = [graph.boundary(stage.operators) for stage in plan.stages]
    used = {
        "cuts": len(plan.stages) > 1,
        "branches": any(not {*a.outputs} & {*b.inputs} for a, b in pairwise(borders)),  # these run side by side
        "splits": plan.is_split,
        "ranks": bool(plan.ranks),
    }
    return used[freedom] and len(plan.by_processor()) > 1


def drawn(graph: Graph, platform: Platform, freedom: str) -> Plan:
    """Return a plan that uses a freedom."""
    allow = ",".join(dict.fromkeys(("cuts", freedom)))
    space, rng = make_space(allow, graph, platform, 4), random.Random(0)
    plans = (space.plan_at(rng.randrange(space.cardinality())) for _ in range(1000))
    return next(plan for plan in plans if uses(plan, freedom, graph))


def exported(run: Path, kernels: Mapping[str, str]) -> list[bytes]:
    """Export a run; return what its runner computes, with processors of this machine in the place of others.

    Args:
        kernels: of the others by name, the kernels of this machine that compute what they would.
    """
    assert main(["export", str(run)]) == 0
    document = json.loads((run / "export" / "plan.json").read_text())
    for processor in document["platform"]["processors"]:
        if processor["name"] in kernels:
            processor |= {"kind": "cpu", "options": {"threads": 1, "kernels": kernels[processor["name"]]}}
    (run / "export" / "plan.json").write_text(json.dumps(document))
    with RunPlan(run / "export") as plan:
        return bits(plan.run(INPUT).values())


BOARD = {"cpu": "xnnpack", "dsp": "builtin"}  # the kernels of the example's processors
WITH_FILES: dict[str, tuple[Callable[[Path], AbstractContextManager[Opened]], Mapping[str, str], Sequence[str]]] = {
    "litert": (lambda _: litert("cpu0", "cpu1:builtin"), {}, FREEDOMS),
    "openvino": (lambda _: litert("cpu0", "cpu1:openvino"), {}, FREEDOMS),
    "remote": (remote, {}, FREEDOMS),
    "example": (example, BOARD, ("cuts", "ranks")),  # its processors run one at a time
}


@pytest.mark.parametrize(
    ("name", "freedom"),
    [
        *(("litert", freedom) for freedom in ("branches", "splits", "ranks")),  # chains: test_export
        *(("openvino", "branches"), ("openvino", "splits")),
        *(("remote", "branches"), ("remote", "ranks")),
        *(("example", freedom) for freedom in ("cuts", "splits", "ranks")),
    ],
)
def test_plans_that_evaluators_deploy_compute_what_execute_computes(
    name: str, freedom: str, run: Path, tmp_path: Path
) -> None:
    opened, kernels, freedoms = WITH_FILES[name]
    if name == "openvino":
        pytest.importorskip("openvino")
    graph = load(MODEL)
    with opened(tmp_path / "device") as (session, platform):
        if freedom not in freedoms:
            with fails(OptimizeError):
                drawn(graph, platform, freedom)
            return
        plan = drawn(graph, platform, freedom)
        shutil.rmtree(run / "best")
        (run / "best").mkdir()
        session.deploy(run / "best", graph, plan)
        if kernels:  # LiteRT here has no such processors, so that the board itself is asked
            board = [sys.executable, "-m", "example_evaluator.board", str(run / "best")]
            answer = subprocess.run(board, input="1 inf\noutputs\n", capture_output=True, text=True, check=True).stdout
            wanted = bits(np.array(each, np.float32) for each in json.loads(answer.splitlines()[1])["outputs"])
        else:
            with PlanRunner(run / "best") as runner:
                wanted = bits(runner.run(INPUT).values())
    assert exported(run, kernels) == wanted
    for file in (run / "best").glob("stage_*.tflite"):
        assert file.samefile(run / "export" / file.name)  # weights are there once


# The processors of each device, as the names under which this machine has ones with the same kernels.
WITHOUT_FILES: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "cost-model": (
        ("--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu"),
        {"1large": "cpu0", "1small": "cpu1", "gpu": "cpu1:builtin"},
    ),
    "synthetic": (("--evaluator", "synthetic"), {"cpu": "cpu1", "cpu0": "cpu0", "cpu1": "cpu1:builtin"}),
    "adb": (("--evaluator", "adb", "--device", "pixel"), {"big": "cpu0", "gpu": "cpu1:builtin"}),
    "cuda": (
        ("--evaluator", "cuda", "--processors", "stream0,stream1"),
        {"stream0": "cpu0", "stream1": "cpu1:builtin"},
    ),
}


@pytest.fixture(scope="module")
def elsewhere_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A study of each device that is not here."""
    if request.param == "cuda":
        pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("there")
    words = [MODEL, *WITHOUT_FILES[request.param][0], "--allow", "cuts", "--max-stages", "1", "--budget", "1", "-q"]
    with pytest.MonkeyPatch.context() as patch, phone_in_farm(folder, patch):
        patch.setattr(CudaEvaluator.__init__, "__defaults__", ("cpu",))
        assert main([*words, "--out", str(folder / "run")]) == 0
        assert main(["execute", str(folder / "run")]) == 0
    return request.param, folder / "run"


@pytest.mark.parametrize(
    ("elsewhere_run", "freedom"),
    [
        *(("cost-model", freedom) for freedom in ("branches", "splits", "ranks")),
        *(("synthetic", "cuts"), ("synthetic", "splits")),
        ("adb", "ranks"),
        *(("cuda", "splits"), ("cuda", "ranks")),
    ],
    indirect=["elsewhere_run"],
)
def test_files_for_another_device_compute_what_files_for_this_one_do(
    elsewhere_run: tuple[str, Path], freedom: str, tmp_path: Path
) -> None:
    name, there = elsewhere_run
    names = WITHOUT_FILES[name][1]
    study = read_study(there)
    assert study.graph is not None
    plan = drawn(study.graph, study.platform, freedom)
    result = json.loads((there / "result.json").read_text())
    result["best"] |= {"plan": plan.to_json(), "stage_ms": None}
    (there / "result.json").write_text(json.dumps(result))
    kernels = {n: "builtin" if here.endswith(":builtin") else "xnnpack" for n, here in names.items()}
    mapped = replace(plan, stages=tuple(replace(s, processor=names[s.processor]) for s in plan.stages))
    with litert(*names.values()) as (session, _):
        session.deploy(tmp_path, study.graph, mapped)
    with PlanRunner(tmp_path) as runner:
        assert exported(there, kernels) == bits(runner.run(INPUT).values())


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
        found = {name: b"".join(bits(mine.outputs(name).values())) for name in given}
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
    assert output.count("expected") == 2
    says(output)


def test_several_models_of_a_device_that_is_gone_are_exported_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load(MODEL).source
    assert source is not None
    shutil.copy(source.path, "net.tflite")
    several = ["net.tflite*2", "--processors", "cpu0,cpu1", "--budget", "2", "-q", "--out", "several"]
    with agent_process(tmp_path / "device", "litert") as (_, address):
        assert main([*several, "--evaluator", "remote", "--device", address]) in SEARCHED
    monkeypatch.chdir(tmp_path.parent)
    there = Path(tmp_path.name)
    assert main(["export", str(there / "several"), "--out", str(there / "out")]) == 0
    with models_of(there / "out")(there / "out") as mine:
        assert all(mine.run().values())
        assert not mine.failures


def _alone(folder: Path) -> Path:
    """Return the folder of one of several models, which is a plan of its own."""
    assert json.loads((folder / "plan.json").read_text())["files"]
    return folder


def test_what_has_no_model_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(Path(__file__).parents[3] / "experiments" / "tables" / "one_inference.yaml")
    assert main([table, "--evaluator", "table", "--budget", "3", "-q", "--out", "table"]) == 0
    assert main(["execute", "table"]) == 0
    says(capsys.readouterr().out)
    assert main(["export", "table"]) == 2
    says(capsys.readouterr().err)


def test_a_phone_runs_litert_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    document = json.loads((other / "best" / "plan.json").read_text())
    document["platform"]["processors"][0]["options"] |= {"runtime": "openvino", "precision": "f32"}
    (other / "best" / "plan.json").write_text(json.dumps(document))
    assert main(["export", str(other)]) == 0
    assert " runtime=openvino " in (other / "export" / "plan.txt").read_text()
    assert main(["export", str(other), "--target", "android"]) == 2
    says(capsys.readouterr().err)
