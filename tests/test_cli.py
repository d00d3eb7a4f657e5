"""What a person meets at the command line: one line for whatever is wrong, its exit code, and data on stdout only."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main
from optimizer.storage import read_log
from search_spaces.graph import Graph
from search_spaces.models.cache import ENVIRONMENT
from tests.disks import small_disk

ROOT = Path(__file__).parents[1]
SYNTHETIC = ["--model", "squeezenet1_1", "--evaluator", "synthetic", "--max-stages", "2", "--sampler", "random", "-q"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    """Return the one line on stderr, after checking that there is nothing else, with ``--json`` and without."""
    lines = []
    for extra in ([], ["--json"]):
        assert main([*arguments, *extra]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("optimize: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        lines.append(err.strip())
    assert lines[0] == lines[1]
    return lines[0]


def command(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "optimizer.cli", *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=env,
        timeout=120,
        **options,
    )


def one_line(run: subprocess.CompletedProcess[str], code: int) -> str:
    assert run.returncode == code, run.stderr
    assert not run.stdout
    assert run.stderr.startswith("optimize: ")
    assert run.stderr.count("\n") == 1
    return run.stderr.strip()


# Wrong words


@pytest.mark.parametrize(
    ("arguments", "statement"),
    [
        ([], "--model is missing"),
        (["--model"], "expected one argument"),
        (["--modle", "vgg16"], "unrecognized arguments: --modle"),
        (["squeezenet1_1"], "there is no command 'squeezenet1_1'; a model is given as --model"),
        (["--model", "vgg17"], "did you mean vgg"),
        (["--model", "MobileNet_v1.tflit"], "did you mean mobilenet_v1"),
        (["--model", "zzz"], "'zzz'; give a .tflite file, or one of: "),
        (["--model", ""], "--model ''"),
        (["--model", "a\0b"], "NUL"),
        (["--model", "./nothing.tflite"], "nothing.tflite: there is no such file"),
        (["--model", "."], "is a folder"),
        (["--model", "text.tflite"], "text.tflite: is not a .tflite model"),
        (["--model", "empty.tflite"], "empty.tflite: the file is empty"),
        (["--model", "two\nlines.tflite"], "two lines.tflite: there is no such file"),
        (["--model", "squeezenet1_1", "--budget", "0"], "--budget 0: must be at least 1"),
        (["--model", "squeezenet1_1", "--budget", "-1"], "--budget -1: must be at least 1"),
        (["--model", "squeezenet1_1", "--budget", "abc"], "--budget abc: must be a whole number"),
        (["--model", "squeezenet1_1", "--budget", "1.5"], "--budget 1.5: must be a whole number"),
        (["--model", "squeezenet1_1", "--budget", ""], "--budget '': must be a whole number"),
        (["--model", "squeezenet1_1", "--budget", "9" * 5000], "--budget 999"),
        (["--model", "squeezenet1_1", "--max-stages", "0"], "--max-stages 0: must be at least 1"),
        (["--model", "squeezenet1_1", "--max-stages", "40"], "has only 39 operators; give at most 39"),
        (["--model", "squeezenet1_1", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["--model", "squeezenet1_1", "--precision", "nan"], "--precision nan: must be a number"),
        (["--model", "squeezenet1_1", "--precision", "2"], "--precision 2: must be less than 1"),
        (["--model", "squeezenet1_1", "--study", "../x"], "--study ../x: must start with a letter"),
        (["--model", "squeezenet1_1", "--sampler", "tpee"], "did you mean tpe"),
        (["--model", "squeezenet1_1", "--sampler", "no.such:Thing"], "no.such:Thing"),
        (["--model", "squeezenet1_1", "--evaluator", "litertt"], "did you mean litert"),
        (["--model", "squeezenet1_1", "--processors", "cpu99"], "this machine has no core 99; this process may use: 0"),
        (["--model", "squeezenet1_1", "--processors", "cpu0,cpu0"], "must be different names"),
        (["--model", "squeezenet1_1", "--processors", ""], "must be different names"),
        (["--model", "squeezenet1_1", "--out", ""], "--out '': must not be empty"),
        (["inspec"], "there is no command 'inspec'; did you mean optimize inspect?"),
        (["vgg16"], "there is no command 'vgg16'; a model is given as --model NAME|FILE; commands are: "),
        (["execute"], "PLAN"),
        (["execute", "nothing.json"], "nothing.json: no such file"),
        (["execute", "text.tflite"], "text.tflite"),
        (["execute", "."], "plan.json: no such file"),
    ],
)
def test_wrong_words_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], statement: str
) -> None:
    (tmp_path / "text.tflite").write_text("not a model\n" * 10)
    (tmp_path / "empty.tflite").touch()
    before = sorted(tmp_path.iterdir())
    quiet = ["-q"] if arguments and arguments[0].startswith("-") else []
    assert statement in refused(capsys, [*quiet, *arguments])
    assert sorted(tmp_path.iterdir()) == before  # not even a run folder


def test_a_model_truncated_anywhere_is_one_line(
    capsys: pytest.CaptureFixture[str], squeezenet: Graph, tmp_path: Path
) -> None:
    assert squeezenet.source is not None
    content = squeezenet.source.path.read_bytes()
    file = tmp_path / "cut.tflite"
    for nbytes in (1, 7, 8, 9, 60, 1000, 10_000, 20_000, len(content) // 3, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:nbytes])
        assert "cut.tflite: " in refused(capsys, ["--model", str(file), "--evaluator", "synthetic", "-q"])
    assert not (tmp_path / "runs").exists()


def test_words_are_checked_before_the_model_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    for wrong in (["--budget", "0"], ["--sampler", "tpee"], ["--evaluator", "x"], ["--processors", "cpu99"]):
        refused(capsys, ["--model", "mobilenet_v1", "-q", *wrong])
        assert not (tmp_path / "cache").exists()


# Folders


def foreign(folder: Path) -> Path:
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.png").touch()
    return folder / "photos"


def another_study(folder: Path) -> Path:
    assert main([*SYNTHETIC, "--budget", "3", "--seed", "5", "--out", str(folder / "other")]) == 0
    return folder / "other"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def below_a_file(folder: Path) -> Path:
    return a_file(folder) / "run"


def no_folder_can_be_made(_: Path) -> Path:
    return Path("/proc/run")


def a_broken_manifest(folder: Path) -> Path:
    path = another_study(folder)
    (path / "manifest.json").write_text("{")
    return path


@pytest.mark.parametrize(
    ("make", "statement"),
    [
        (foreign, "not a run folder"),
        (another_study, "it was begun with --seed 5, not 0"),
        (a_file, "not a folder"),
        (below_a_file, "not a folder"),
        (no_folder_can_be_made, "/proc/run: "),
        (a_broken_manifest, "it was begun with --seed 5, not 0"),
    ],
)
def test_folders_that_cannot_be_used_are_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable[[Path], Path], statement: str
) -> None:
    out = make(tmp_path)
    capsys.readouterr()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert statement in refused(capsys, [*SYNTHETIC, "--budget", "3", "--out", str(out)])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_full_disk_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    arguments = [*SYNTHETIC, "--budget", "60", "--out", "disk/run"]
    with small_disk(tmp_path / "disk", "100k") as disk:
        statement = one_line(command([*arguments, "--json"]), 2)
        assert "no space left" in statement
        assert "records before are safe" in statement
        kept = read_log(disk / "run" / "trials.jsonl")
        assert not kept.damage
        assert len(kept.records) > 5
        assert not [p for p in (disk / "run").iterdir() if p.name.endswith(".tmp")]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert command(arguments).returncode == 0
        assert read_log(disk / "run" / "trials.jsonl").records[: len(kept.records)] == kept.records


def test_a_limit_on_file_size_is_a_full_disk_too(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    arguments = [*SYNTHETIC, "--budget", "60", "--out", "run"]
    assert "trials.jsonl" in one_line(command(arguments, preexec_fn=limit), 2)
    kept = read_log(tmp_path / "run" / "trials.jsonl")
    assert not kept.damage
    assert len(kept.records) > 5


def test_a_full_cache_folder_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        statement = one_line(command([*SYNTHETIC, "--budget", "2"], env={ENVIRONMENT: str(disk)}), 2)
        assert "No space left" in statement
        assert ENVIRONMENT in statement


# Damage


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_corrupt_model_in_the_cache_is_built_again_with_a_warning(tmp_path: Path) -> None:
    env = {ENVIRONMENT: str(tmp_path / "cache")}
    arguments = [*SYNTHETIC, "--budget", "2"]
    assert command([*arguments, "--out", "first"], env=env).stderr == ""
    (model,) = (tmp_path / "cache").glob("models/*.tflite")
    content = model.read_bytes()
    flip(model)
    run = command([*arguments, "--out", "second"], env=env)
    assert run.returncode == 0
    assert run.stderr.startswith("optimize: ")
    assert run.stderr.count("\n") == 1
    assert "damaged" in run.stderr
    assert model.read_bytes() == content
    assert command([*arguments, "--out", "third"], env=env).stderr == ""


def test_a_corrupt_trial_log_is_reported_and_survived(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [*SYNTHETIC[:-1], "--budget", "16", "--out", "run", "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    for place in (0.3, 0.6, 0.9):
        flip(tmp_path / "run" / "trials.jsonl", place)
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert "trial log: line" in err
        assert json.loads(out)["unique_plans"] == first["unique_plans"] == 16
    (tmp_path / "run" / "trials.jsonl").write_bytes(os.urandom(5000))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["unique_plans"] == 16


# What comes out


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
    assert "best plan" in out
    assert "run folder  run" in out
    assert "optimize execute" not in out  # this evaluator leaves no files that run
    assert "no plan takes less than" in out


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
    assert "#0 whole on cpu: " in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_measures_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool) -> None:
    assert main([*SYNTHETIC, "--dry-run", *(["--json"] if as_json else [])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not list(tmp_path.iterdir())
    if as_json:
        assert json.loads(out)["operators"] == 39
    else:
        assert "whole on cpu" in out


@pytest.mark.litert
def test_a_short_job_and_its_plan(tmp_path: Path) -> None:
    run = command(["--model", "squeezenet1_1", "--budget", "4", "--max-stages", "2", "--json", "-q", "--out", "run"])
    remarks = [line for line in run.stderr.splitlines() if not line.startswith("optimize: the machine takes")]
    assert (run.returncode, remarks) == (0, [])
    document = json.loads(run.stdout)
    assert document["best"]["identical"] is True
    assert all(b["identical"] for b in document["baselines"].values() if b["latency_ms"])
    assert document["gap"] is not None
    executed = command(["execute", "run/best/plan.json", "--json"])
    assert (executed.returncode, executed.stderr) == (0, "")
    latency_ms = json.loads(executed.stdout)["latency_ms"]
    assert 0 < latency_ms["median"] < 1000
    (tmp_path / "run" / "best" / "stage_0.tflite").write_bytes(b"x" * 100)
    assert "digest differs" in one_line(command(["execute", "run/best"]), 2)


def test_help_names_every_option_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["execute", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error() -> None:
    for arguments in ([*SYNTHETIC, "--dry-run"], [*SYNTHETIC, "--dry-run", "--json"]):
        read, write = os.pipe()
        os.close(read)
        run = command(arguments, stdout=write)
        os.close(write)
        assert (run.returncode, run.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        run = command([*SYNTHETIC, "--budget", "2", "--out", "run", "--json"], stdout=full)
    run.stdout = ""
    assert "no space left" in one_line(run, 2)


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    run = command([*SYNTHETIC, "--budget", "12", "--out", "größe/run"], env={"PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stderr) == (0, "")
    assert "whole on cpu" in run.stdout


def test_debug_gives_the_traceback() -> None:
    with pytest.raises(Exception, match="vgg17"):
        main(["--model", "vgg17", "--debug", "-q"])
