"""Inputs, signatures and kernels of custom operators of each of several models, in all commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evaluators.litert import WorkloadRunner
from optimizer.cli import main
from optimizer.export.run_plan import CUSTOM_OPS
from optimizer.export.run_plan import INPUTS as PLAIN
from optimizer.tools.execute import execute
from search_spaces.core import allowed_code
from search_spaces.core.errors import PlanError
from tests.search_spaces.models.test_inputs import two_signatures
from tests.support.commands import SEARCHED
from tests.support.models.custom_operator import kernels
from tests.support.models.tflite_models import SHAPE, Net
from tests.support.sentences import fails, says

pytestmark = [
    pytest.mark.litert,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]

WORKLOAD = """\
models:
  - {model: m.tflite, name: minus, signature: minus, input: x.npy, count: 2}
  - {model: m.tflite, name: twice, input: y.npy}
  - {model: own.tflite, name: own, custom_ops: libops.so}
"""
SEARCH = ["--workload", "w.yaml", "--processors", "cpu0,cpu1", "--budget", "2", "--max-stages", "1", "-q"]
X = np.array([[1.0, -2.0, 3.0]], np.float32)
Y = np.linspace(-1, 1, 32, dtype=np.float32).reshape(SHAPE)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, what they are given, and a study of them in ``run``."""
    folder = tmp_path_factory.mktemp("given")
    kernels(folder)
    two_signatures(folder)
    net = Net()
    net.outputs(net.op("RELU", [net.op("Twice", [net.op("RELU", [net.input()])])])).write(folder / "own.tflite")
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    (folder / "w.yaml").write_text(WORKLOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*SEARCH, "--out", "run", "--custom-ops", "own=libops.so"]) in SEARCHED
    return folder


@pytest.fixture
def here(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to the folder of the study; nobody has named any code yet."""
    monkeypatch.chdir(study)
    monkeypatch.setattr(allowed_code, "_allowed", set())


@pytest.mark.usefixtures("here")
def test_files_of_a_study_compute_what_was_asked(study: Path) -> None:
    with WorkloadRunner("run/best", custom_ops={"own": study / "libops.so"}) as runner:
        runner.run()
        assert not runner.failures
        for name in ("minus 1", "minus 2"):
            assert np.array_equal(runner.outputs(name)[0], -X)
        assert np.array_equal(runner.outputs("twice")[0], 2 * Y)
        runner.read("minus", study / "x.npy")
        with fails(PlanError):
            WorkloadRunner("run/best/model_0")
    assert json.loads(Path("run/result.json").read_text())["deployed"]["identical"]
    assert [main(words) for words in (["explain", "run", "--json"], ["report", "run"])] == [0, 0]
    assert "another model" not in Path("run/report.html").read_text()


@pytest.mark.usefixtures("here")
def test_a_study_goes_on_with_what_its_models_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    again = [*SEARCH, "--budget", "3", "--out", "run"]
    assert main(again) == 2  # which loads no code that only a file names
    says(capsys.readouterr().err)
    shutil.copy("x.npy", "other.npy")
    assert main([*again, "--custom-ops", "libops.so", "--input", "minus=other.npy"]) == 2  # which is another study
    says(capsys.readouterr().err.splitlines()[-1])
    np.save("x.npy", 2 * X)
    assert main([*again, "--custom-ops", "own=libops.so"]) == 2
    says(capsys.readouterr().err.splitlines()[-1])
    np.save("x.npy", X)
    assert main([*again, "--custom-ops", "own=libops.so"]) in SEARCHED


@pytest.mark.usefixtures("here")
def test_plans_are_run_and_compared_with_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    allowed_code.allow_libraries(["own=libops.so"])
    for given in ([], ["twice=y.npy"]):
        assert "own: " in execute("run", inputs=given, custom_ops=["own=libops.so"]).text
    found = execute("run").document
    says(found["failures"]["own"])  # the others go on
    assert set(found["failures"]) == {"own"}
    shutil.copytree("run", "other")
    plan = Path("other/best/plan.json")
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "dispatch": "priority"}))
    assert main(["compare", "run", "other", "-q"]) == 4
    says(capsys.readouterr().err)
    assert main(["compare", "run", "other", "-q", "--custom-ops", "libops.so"]) == 0
    says(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_an_export_holds_the_inputs_of_each_model_and_names_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["missing"]
    clients = json.loads(Path("run/export/plan.json").read_text())["clients"]
    of = {client["client"]: f"model_{client['model']}" for client in clients}
    assert missing == [f"{of['own']}/{CUSTOM_OPS}"]
    for name, array in (("minus", X), ("twice", Y)):
        assert (Path("run/export") / of[name] / PLAIN).read_bytes() == array.tobytes()
    assert f"as `{missing[0]}`" in Path("run/export/README.md").read_text()
    shutil.copy("libops.so", f"run/export/{missing[0]}")
    subprocess.run([sys.executable, "run/export/run_plan.py"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.usefixtures("here")
def test_kernels_of_two_libraries_stay_apart(study: Path) -> None:
    (study / "other").mkdir(exist_ok=True)
    source = (study / "ops.c").read_text().replace("= 2 *", "= 3 *")
    other = kernels(study / "other", source)
    Path("two.yaml").write_text("models: [{model: own.tflite, name: a}, {model: own.tflite, name: b}]")
    search = ["--workload", "two.yaml", *SEARCH[2:], "--out", "two", "--input", "y.npy"]
    assert main([*search, "--custom-ops", "libops.so", "--custom-ops", f"b={other}"]) in SEARCHED
    with WorkloadRunner("two/best", custom_ops={"a": study / "libops.so", "b": other}) as runner:
        runner.run()
        for name, factor in (("a", 2), ("b", 3)):
            assert np.array_equal(runner.outputs(name)[0], factor * np.maximum(Y, 0))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--signature", "minus=none"], 2),
        (["--input", "minos=x.npy"], 2),
        (["--input", "twice=none.npy"], 2),
        (["--input", "twice=x.npy"], 2),
        (["--input", "x.npy", "--input", "y.npy"], 2),
        (["--custom-ops", "own=none.so"], 2),
        (["--evaluator", "cost-model", "--platform", "pixel4"], 2),
        (["--custom-ops", "own=ops.c"], 4),
    ],
)
def test_what_models_cannot_be_given_is_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    if "--custom-ops" not in words:
        words = [*words, "--custom-ops", "libops.so"]
    search = SEARCH[:2] + SEARCH[4:] if "--evaluator" in words else SEARCH
    assert main([*search, *words, "--out", "none"]) == code
    says(capfd.readouterr().err.splitlines()[-1])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [["--input", "minos=x.npy"], ["--input", "twice=x.npy"], ["--custom-ops", "own=no"]])
def test_what_a_plan_cannot_be_given_is_one_line(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["execute", "run", *words]) == 2
    says(capfd.readouterr().err.splitlines()[-1])
