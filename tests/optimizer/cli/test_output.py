"""What comes out of the command line: data on stdout only, progress on stderr, whatever reads them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import optimizer
from evaluators.objectives import OBJECTIVES
from evaluators.workload.outcome import OBJECTIVES as OF_WORKLOADS
from optimizer.cli import main
from tests.support.commands import SYNTHETIC, answered
from tests.support.models.tflite_models import Net
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_json_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SYNTHETIC, "--budget", "14", "--out", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert {
        "schema_version",
        "model",
        "platform",
        "evaluator",
        "objective",
        "best",
        "baselines",
        "speedup",
        "model_bound_ms",
        "gap",
        "trials",
        "unique_plans",
        "cache_hits",
        "wall_s",
        "run_dir",
    } <= set(document)
    assert document["unique_plans"] == 14
    named = {json.dumps(entry["plan"]) for entry in document["baselines"].values()}
    assert 0 < document["proposed_plans"] <= 14 < document["proposed_plans"] + len(named)
    assert document["trials"] == 14 + document["cache_hits"]
    for plan in (document["best"], *document["baselines"].values()):
        assert plan["plan"]["stages"]
        if plan["latency_ms"]:
            assert {"median", "ci95", "samples"} <= set(plan["latency_ms"])
            low, high = plan["latency_ms"]["ci95"]
            assert low <= plan["latency_ms"]["median"] <= high
            assert plan["latency_ms"]["samples"] == len(plan["latency_ms"]["values"])
    assert {"ratio", "ci95", "significant"} <= set(document["speedup"])
    assert document == json.loads((tmp_path / "run" / "result.json").read_text())
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {
        "manifest.json",
        "config.yaml",
        "trials.jsonl",
        "result.json",
        "best",
    }


def test_the_table_names_every_baseline_and_the_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SYNTHETIC, "--budget", "14", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("whole on cpu", "whole on cpu0", "layer length K=2", "parameter count K=4", "every layer"):
        assert name in out
    says(out)


def test_a_search_that_ended_since_its_plan_is_proven_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["squeezenet1_1@0.25/64", "--evaluator", "cost-model", "--platform", "snapdragon855", "--budget", "30"]
    assert main([*words, "--stop-when-proven", "-q"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("notes")]
    says("\n".join(notes))


def test_what_is_printed_breaks_no_line_that_a_person_may_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = "run " + 150 * "x"
    assert main([*SYNTHETIC, "--budget", "3", "--out", folder]) == 0
    assert f"run folder  {folder}\n" in capsys.readouterr().out


def test_progress_goes_to_stderr_and_stays_out_of_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SYNTHETIC[:-1], "-v", "--budget", "3", "--out", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["unique_plans"] == 3
    assert err


def test_an_open_batch_size_is_noted_once_and_not_where_a_finished_run_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = Net()
    shape = [-1, 4, 4, 2]
    image = net.input(name="image", shapeSignature=shape)
    net.outputs(net.op("RELU", [image], net.tensor(shapeSignature=shape)))
    model = str(net.write(Path("m.tflite")))
    study = [model, "--evaluator", "synthetic", "--out"]
    assert main([*study, "other", "-q"]) == 0
    assert capsys.readouterr().err == ""
    for words in (["inspect", model], [*study, "run", "--warm-start", "other"]):
        assert main(words) == 0
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
        says(said)
    for words in (["explain", "run"], ["report", "run"], ["compare", "run", "other"]):
        assert main(words) == 0
        assert "note: " not in capsys.readouterr().err


def test_a_plan_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("run", "other"):
        assert main([*SYNTHETIC, "--budget", "3", "--out", folder]) == 0
    for second in ("run", "run/best/plan.json"):
        capsys.readouterr()
        assert main(["compare", "run", second]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        says(out)
    found = answered(capsys, ["compare", "run", "run/best/plan.json"])
    assert found["same_plan"]
    assert (found["speedup"], found["ci95"], found["significant"], found["rounds"]) == (1.0, [1.0, 1.0], False, 0)
    found = answered(capsys, ["compare", "run", "other"])  # devices and profiles of two studies may differ
    assert not found["same_plan"]
    assert found["rounds"] > 0
    assert main([*SYNTHETIC, "--budget", "3", "--max-stages", "1", "--processors", "cpu1", "--out", "third"]) == 0
    capsys.readouterr()
    assert main(["compare", "run", "third"]) == 0
    out, err = capsys.readouterr()
    says(out)
    assert 1 <= err.count("\n") < 5


def test_a_plan_of_fewer_operators_than_stages_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    table = Path(__file__).parents[3] / "experiments" / "tables" / "one_inference.yaml"
    Path("two.yaml").write_text(table.read_text().partition("      - {name: conv3")[0])
    words = ["--evaluator", "table", "--model", "two.yaml", "--budget", "4", "-q", "--out", "run"]
    assert main(words) == 0
    assert answered(capsys, ["execute", "run"])["predicted"]


def test_a_sampler_of_the_current_folder_and_objectives_with_a_comma(capsys: pytest.CaptureFixture[str]) -> None:
    name = "sampler_of_this_folder"
    Path(f"{name}.py").write_text(
        "from optuna.samplers import RandomSampler\n\n\nclass Mine(RandomSampler):\n    pass\n"
    )
    words = ["squeezenet1_1@0.25/64", "--evaluator", "cost-model", "--platform", "pixel4", "--processors", "gpu,1large"]
    powers = ["--objective", "energy,latency", "--power", "gpu=2", "--power", "1large=1"]
    found = answered(capsys, [*words, *powers, "--sampler", f"{name}:Mine", "--budget", "3", "-q", "--out", "run"])
    assert found["front"]["objectives"] == ["latency", "energy"]
    assert str(Path.cwd()) not in sys.path


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_measures_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool) -> None:
    assert main([*SYNTHETIC, "--dry-run", *(["--json"] if as_json else [])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not list(tmp_path.iterdir())
    if as_json:
        found = json.loads(out)
        assert (found["schema_version"], found["operators"]) == (1, 39)
    else:
        assert "whole on cpu" in out


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("--platform pixel4 --evaluator litert", 4),
        ("--warm-start nowhere", 2),
        ("--state hot:cpu=1.5", 2),
        ("--evaluator cost-model --platform pixel4 --objective energy", 2),
        ("--evaluator cost-model --platform pixel4 --max-error 0.1", 2),
        ("--evaluator cost-model --platform pixel4 --model squeezenet1_1@0.5/64 --objective energy", 2),
        ("--evaluator cost-model --platform pixel4 --model squeezenet1_1@0.5/64 --state hot:wrong=2", 2),
        ("--out taken", 2),
        ("--storage sqlite:///nowhere/study.db --study s", 4),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(capsys: pytest.CaptureFixture[str], more: str, code: int) -> None:
    Path("taken").mkdir()
    Path("taken/strange.txt").write_text("")
    words = [*SYNTHETIC, *more.split()]
    said = []
    for extra in (["--dry-run"], ["-q"]):
        assert main([*words, *extra]) == code
        said.append(capsys.readouterr().err.splitlines()[-1])  # what a profile extrapolates is told once a process
    assert said[0] == said[1]
    says(f"{said[0]}\n")


def test_help_names_every_objective_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["execute", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        assert "--json" in printed
    told = printed[printed.rindex("--objective") : printed.rindex("--max-stages")]
    assert [name for name in (*OBJECTIVES, *OF_WORKLOADS) if name not in told] == []
    page = (Path(optimizer.__file__).parent / "README.md").read_text().splitlines()
    row = next(line for line in page if line.startswith("| `--objective "))
    assert [name for name in OBJECTIVES if name not in row] == []


def test_debug_gives_the_traceback_and_the_same_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "vgg17", "--debug", "-q"]) == main(["--model", "vgg17", "-q"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_is_infeasible_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SYNTHETIC, "--budget", "3", "--deadline", "0.000001", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["feasible"]) == (False, False)
    assert found["violations"]
