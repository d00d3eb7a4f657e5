"""What a person meets at the command line where something is wrong: one line, its exit code, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evaluators.registry import make_evaluator
from evaluators.remote.devices import ENVIRONMENT as DEVICES
from optimizer.cli import COMMANDS, main
from search_spaces.core.graph import Graph
from search_spaces.models.cache import ENVIRONMENT
from tests.support.commands import ROOT, SYNTHETIC, answered
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


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


# Wrong words


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["zzz", "-q"],
        ["vgg17", "--budget", "3", "-q"],
        ["text.tflite", "-q"],
        ["squeezenet1_1*0", "-q"],
        ["squeezenet1_1", "--minutes", "0"],
        ["squeezenet1_1", "--power", "cpu=2"],
        ["squeezenet1_1", "--robust", "worst"],
        ["squeezenet1_1", "--heartbeat", "5"],
        ["squeezenet1_1*2", "--objective", "misses", "-q"],
        ["help", "nothing"],
        ["--model"],
        ["--modle", "vgg16"],
        ["--model", "vgg17"],
        ["--model", "MobileNet_v1.tflit"],
        ["--model", "zzz"],
        ["--model", ""],
        ["--model", "a\0b"],
        ["--model", "./nothing.tflite"],
        ["--model", "."],
        ["--model", "text.tflite"],
        ["--model", "empty.tflite"],
        ["--model", "two\nlines.tflite"],
        ["--model", "squeezenet1_1", "--budget", "0"],
        ["--model", "squeezenet1_1", "--budget", "-1"],
        ["--model", "squeezenet1_1", "--budget", "abc"],
        ["--model", "squeezenet1_1", "--budget", "1.5"],
        ["--model", "squeezenet1_1", "--budget", ""],
        ["--model", "squeezenet1_1", "--budget", "9" * 5000],
        ["--model", "squeezenet1_1", "--max-stages", "0"],
        ["--model", "squeezenet1_1", "--max-stages", "40"],
        ["--model", "squeezenet1_1", "--seed", "-1"],
        ["--model", "squeezenet1_1", "--precision", "nan"],
        ["--model", "squeezenet1_1", "--precision", "2"],
        ["--model", "squeezenet1_1", "--study", "../x"],
        ["--model", "squeezenet1_1", "--sampler", "tpee"],
        ["--model", "squeezenet1_1", "--sampler", "no.such:Thing"],
        ["--model", "squeezenet1_1", "--evaluator", "litertt"],
        ["--model", "squeezenet1_1", "--processors", "cpu99"],
        ["--model", "squeezenet1_1", "--processors", "cpu0,cpu0"],
        ["--model", "squeezenet1_1", "--processors", ""],
        ["--model", "squeezenet1_1", "--allow", "cuts,cuts"],
        ["--model", "squeezenet1_1", "--out", ""],
        ["inspec"],
        ["execute"],
        ["execute", "nothing.json"],
        ["execute", "text.tflite"],
        ["execute", "."],
        ["--model", "squeezenet1_1", "--study", "my int8"],
        ["--model", "squeezenet1_1", "-v"],
        ["--model", "squeezenet1_1", "--objective", "latency,sped"],
        ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "pixel4", "--precision", "0.02"],
    ],
)
def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "text.tflite").write_text("not a model\n" * 10)
    (tmp_path / "empty.tflite").touch()
    before = sorted(tmp_path.iterdir())
    quiet = ["-q"] if arguments and arguments[0].startswith("-") else []
    says(refused(capsys, [*quiet, *arguments]))
    assert sorted(tmp_path.iterdir()) == before  # not even a run folder


def test_a_model_truncated_anywhere_is_one_line(
    capsys: pytest.CaptureFixture[str], squeezenet: Graph, tmp_path: Path
) -> None:
    assert squeezenet.source is not None
    content = squeezenet.source.path.read_bytes()
    file = tmp_path / "cut.tflite"
    for nbytes in (1, 7, 8, 9, 60, 1000, 10_000, 20_000, len(content) // 3, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:nbytes])
        says(refused(capsys, ["--model", str(file), "--evaluator", "synthetic", "-q"]))
    assert not (tmp_path / "runs").exists()


def test_words_are_checked_before_the_model_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    for wrong in (["--budget", "0"], ["--sampler", "tpee"], ["--evaluator", "x"], ["--processors", "cpu99"]):
        refused(capsys, ["--model", "mobilenet_v1", "-q", *wrong])
        assert not (tmp_path / "cache").exists()


def test_a_model_needs_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["squeezenet1_1@0.25/64", "--evaluator", "synthetic", "--budget", "2", "-q", "--out", str(tmp_path / "run")]
    assert answered(capsys, words)["model"]["name"] == "squeezenet1_1@0.25/64"
    where = ["--evaluator", "cost-model", "--platform", "pixel4", "--allow", "cuts"]
    several = [*where, "squeezenet1_1@0.25/64*2", "posenet/64x96"]
    found = answered(capsys, [*several, "--budget", "2", "-q", "--out", str(tmp_path / "several")])
    assert found["workload"]["instances"] == ["squeezenet1_1@0.25/64 1", "squeezenet1_1@0.25/64 2", "posenet/64x96"]


def test_help_tells_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, (summary, _) in COMMANDS.items():
        assert any(line.split()[:1] == [name] and summary in line for line in text.splitlines())
        with pytest.raises(SystemExit) as ended:
            main(["help", name])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: optimize {name}")
    for words in (["--version"], ["squeezenet1_1", "--version"]):  # no study is run
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("optimize ")


def test_devices_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "devices.yaml"
    listed.write_text("devices:\n  board: {agent: 127.0.0.1:7450}\n")
    monkeypatch.setenv(DEVICES, str(listed))
    assert main(["devices"]) == 0
    text = capsys.readouterr().out
    says(text)
    assert re.search(r"^  cpu0 +core 0;", text, re.MULTILINE)
    assert re.search(r"^  pixel4 +[a-z]", text, re.MULTILINE)
    assert re.search(r"^  board  .*127.0.0.1:7450", text, re.MULTILINE)
    named = re.findall(r"--evaluator ([\w-]+)", text)
    assert len(named) == 3
    assert all(make_evaluator(name).name == name for name in named)
    found = answered(capsys, ["devices"])
    assert found["agents"]["board"]["address"] == "127.0.0.1:7450"
    assert "pixel4" in found["platforms"]
    listed.write_text("devices: [\n")
    assert "devices.yaml:" in refused(capsys, ["devices"])


@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("optimize ins", {"inspect"}, {"run"}),
        ("optimize report --o", {"--out"}, {"--budget"}),
        ("optimize vgg16 --bud", {"--budget"}, {"--out"}),
        ("optimize in", {"inspect", "inception_v3"}, {"run", "vgg16"}),
        ("optimize inspect mob", {"mobilenet_v2"}, {"models"}),
        ("optimize vgg16 --platform pix", {"pixel4"}, {"zcu102"}),
        ("optimize vgg16 --platform ", {"pixel4", "device.yaml", "here/"}, {"notes.txt"}),
        ("optimize vgg16 --robust ", {"worst", "expected"}, {"here/"}),
        ("optimize vgg16 --sampler t", {"tpe"}, {"auto"}),
        ("optimize vgg16 --objective ", {"latency", "makespan"}, {"device.yaml", "here/"}),
        ("optimize vgg16 --objective latency,e", {"latency,energy"}, {"latency", "energy"}),
        ("optimize vgg16 --allow cuts,", {"cuts,branches"}, {"cuts,cuts", "here/"}),
        ("optimize help ", {"inspect", "report"}, {"--budget", "here/"}),
        ("optimize compare here/ ", {"here/", "plan.json"}, {"notes.txt", "vgg16"}),
        ("optimize run ", {"here/", "device.yaml"}, {"notes.txt"}),
        ("optimize vgg16 --evaluator c", {"cost-model", "cuda"}, {"litert"}),
    ],
)
def test_a_shell_completes(line: str, wanted: set[str], unwanted: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    completions, folder = tmp_path / "completions", tmp_path / "folder"
    (folder / "here").mkdir(parents=True)
    for name in ("device.yaml", "plan.json", "notes.txt"):
        (folder / name).touch()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " "} | {
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(completions),
    }  # fmt: skip
    command = 'exec 8>"$1" 9>/dev/null; shift; exec "$@"'
    words = ["bash", "-c", command, "bash", str(completions), sys.executable, "-m", "optimizer.cli"]
    subprocess.run(words, env=environment, check=True, timeout=60, cwd=folder)
    found = {word.strip() for word in completions.read_text().split()}
    assert wanted <= found
    assert not unwanted & found


@pytest.mark.parametrize("words", ["agent --hosts board.local", "run x.yaml --jobs 2 --scheduler tcp://127.0.0.1:1"])
def test_options_without_an_effect_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    says(capsys.readouterr().err)


def test_a_start_that_fails_does_not_take_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--evaluator", "cost-model", "--platform", "pixel4", "--study", "mine", "--budget", "2", "-q"]
    assert main(["squeezenet1_1@0.25/64", *words, "--objective", "energy"]) == 2
    assert "--power" in capsys.readouterr().err
    assert not Path("runs/mine").exists()
    assert main(["squeezenet1_1@0.25/64", *words, "--seed", "3"]) == 0


# Folders


def test_a_folder_that_cannot_be_used_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    says(refused(capsys, [*SYNTHETIC, "--budget", "3", "--out", str(tmp_path / "photos")]))
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "cat.png"]


# Damage


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_corrupt_trial_log_is_reported_and_survived(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [*SYNTHETIC[:-1], "--budget", "16", "--out", "run", "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    for place in (0.3, 0.6, 0.9):
        flip(tmp_path / "run" / "trials.jsonl", place)
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err
        assert json.loads(out)["unique_plans"] == first["unique_plans"] == 16
    (tmp_path / "run" / "trials.jsonl").write_bytes(os.urandom(5000))
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["unique_plans"] == 16
