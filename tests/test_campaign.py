"""Campaigns: what a file asks for, nothing finished is run again, and one clear line for what is wrong in a file."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.campaign import plan_studies
from optimizer.campaign_file import json_schema, read_campaign
from optimizer.campaign_table import to_csv
from optimizer.cli import main
from optimizer.report.campaign import mean_excess
from optimizer.storage import read_log
from search_spaces.errors import UsageError

ROOT = Path(__file__).parents[1]
MODEL = "squeezenet1_1@0.25/64"
BASIC = f"""
schema_version: 1
name: basic
matrix:
  model: {MODEL}
  evaluator: synthetic
  sampler: [random, tpe]
  budget: 12
  seed: [0, 1]
expect:
  - {{name: cut everywhere, metric: ratio, plan: every layer, over: whole on cpu, paper: 1, tolerance: 9, source: x}}
  - {{name: another machine, plan: best, paper: 1.0e+9, source: nobody, where: {{sampler: tpe}}}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "campaign.yaml"
    path.write_text(text)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def records(folder: Path) -> dict[str, int]:
    return {p.parent.name: len(read_log(p).records) for p in folder.glob("*/trials.jsonl")}


@given(
    models=st.lists(st.sampled_from(["vgg16", "resnet18", "alexnet", "mobilenet_v1@0.5"]), min_size=1, unique=True),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    budgets=st.lists(st.integers(1, 500), min_size=1, max_size=3, unique=True),
    repetitions=st.integers(1, 3),
)
def test_a_matrix_is_every_combination_once(
    tmp_path_factory: pytest.TempPathFactory, models: list[str], seeds: list[int], budgets: list[int], repetitions: int
) -> None:
    matrix = {"model": models, "seed": seeds, "budget": budgets, "evaluator": "synthetic"}
    document = {"name": "x", "matrix": matrix, "repetitions": repetitions}
    path = written(tmp_path_factory.getbasetemp(), json.dumps(document))
    found = plan_studies(read_campaign(path))
    assert len(found) == len(models) * len(seeds) * len(budgets) * repetitions
    assert (
        len({p.digest for p in found}) == len({p.folder for p in found}) == len({p.name for p in found}) == len(found)
    )
    again = plan_studies(read_campaign(path))
    assert [p.digest for p in again] == [p.digest for p in found]


def test_include_and_exclude(tmp_path: Path) -> None:
    text = """
name: x
matrix: {model: [vgg16, alexnet], sampler: [random, tpe], evaluator: synthetic}
exclude: [{model: vgg16, sampler: tpe}]
include: [{model: resnet18, budget: 7}]
"""
    found = plan_studies(read_campaign(written(tmp_path, text)))
    cells = [(p.config.model, p.config.sampler, p.config.budget) for p in found]
    assert cells == [
        ("vgg16", "random", 200),
        ("alexnet", "random", 200),
        ("alexnet", "tpe", 200),
        ("resnet18", "random", 7),
    ]


def test_the_digest_is_that_of_what_is_asked(tmp_path: Path) -> None:
    def digests(text: str) -> list[str]:
        return [p.digest for p in plan_studies(read_campaign(written(tmp_path, text)))]

    plain = digests("name: x\nmatrix: {model: vgg16}\n")
    assert digests("# another name, and a comment\nname: y\nmatrix: {model: [vgg16], seed: 0}\n") == plain
    assert digests("name: x\nmatrix: {model: vgg16, seed: 1}\n") != plain
    device = tmp_path / "device.yaml"
    device.write_text("name: one\nprocessors: [{name: a, kind: cpu}]\n")
    first = digests("name: x\nmatrix: {model: vgg16, platform: device.yaml}\n")
    device.write_text("name: two\nprocessors: [{name: a, kind: cpu}]\n")
    assert digests("name: x\nmatrix: {model: vgg16, platform: device.yaml}\n") != first


def test_a_campaign_ends_with_tables_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 studies are done" in shown
    assert "within 900%" in shown
    assert "not within 10%" in shown
    results = rows_of(out / "results.csv")
    assert {r["study"] for r in results} == {
        f"squeezenet1_1_0.25_64-{s}-s{n}" for s in ("random", "tpe") for n in (0, 1)
    }
    for row in results:
        assert float(row["ci_low_ms"]) <= float(row["latency_ms"]) <= float(row["ci_high_ms"])
    assert [r["studies"] for r in rows_of(out / "summary.csv")] == ["2", "2"]
    curves = rows_of(out / "curves.csv")
    assert len(curves) >= 4 * 12
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert "cut everywhere" in page
    assert main(["report", str(out), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.md").is_file()
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra 'parquet'")
    assert pyarrow.read_table(out / "results.parquet").num_rows == len(results)


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/trials.jsonl")}
    path.write_text(BASIC.replace("seed: [0, 1]", "seed: [0, 2]"))
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    after = {p: p.stat().st_mtime_ns for p in out.glob("*/trials.jsonl")}
    assert len(after) == len(before) + 2
    assert all(after[p] == before[p] for p in before)


def test_a_killed_campaign_goes_on(tmp_path: Path) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: random, budget: 150, seed: [0, 1]}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    command = [sys.executable, "-m", "optimizer.cli", "run", str(path), "--out", str(out), "-q"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit_s = time.monotonic() + 60
    while not any(n > 40 for n in records(out).values()):
        assert time.monotonic() < limit_s
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (before,) = (n for n in records(out).values() if n > 40)
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    assert len(records(out)) == 2
    state = json.loads((out / "campaign.json").read_text())
    assert [s["status"] for s in state["studies"]] == ["done", "done"]
    assert max(records(out).values()) > before
    for log in out.glob("*/trials.jsonl"):
        numbers = [r.data["number"] for r in read_log(log).records if r.kind == "trial"]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_it_and_tells_how_to_go_on(tmp_path: Path, jobs: int) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: random, budget: 150, seed: [0, 1]}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    command = [sys.executable, "-m", "optimizer.cli", "run", str(path), "--out", str(out), "-q", "--jobs", str(jobs)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit_s = time.monotonic() + 60
    while not any(n > 40 for n in records(out).values()):
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; go on with: optimize run" in errors
    state = json.loads((out / "campaign.json").read_text())
    assert "failed" not in {s["status"] for s in state["studies"]}


def test_one_failing_study_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.tflite").write_bytes(b"no model" * 100)
    text = f"name: x\nmatrix: {{model: [wrong.tflite, {MODEL}], evaluator: synthetic, budget: 5}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 2
    shown = capsys.readouterr()
    assert "1 of 2 studies are done, 1 failed" in shown.out
    assert "is not a .tflite model" in shown.err
    state = json.loads((out / "campaign.json").read_text())
    assert [s["status"] for s in state["studies"]] == ["failed", "done"]
    assert "is not a .tflite model" in (out / "report.html").read_text()


def test_studies_run_beside_each_other_where_nothing_is_measured(tmp_path: Path) -> None:
    path, one, two = written(tmp_path, BASIC), tmp_path / "one", tmp_path / "two"
    assert main(["run", str(path), "--out", str(one), "-q"]) == 0
    assert main(["run", str(path), "--out", str(two), "-q", "--jobs", "2"]) == 0
    names = ("study", "plan", "latency_ms")
    first, second = ([[r[n] for n in names] for r in rows_of(out / "results.csv")] for out in (one, two))
    assert first == second


def test_measuring_studies_never_run_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f"name: x\nmatrix: {{model: {MODEL}, budget: [5, 6]}}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "-q", "--jobs", "2"]) == 2
    assert "evaluator 'litert' measures this machine" in capsys.readouterr().err


def test_a_dry_run_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert len(document["studies"]) == 4
    assert all(s["plans"] > 12 and s["expected_s"] > 0 for s in document["studies"])
    assert main(["run", str(path), "--out", str(out), "--dry-run"]) == 0
    assert "4 studies, about" in capsys.readouterr().out


BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("", ":1: the file is empty"),
        ("name: [", "is no YAML"),
        ("- a\n", "a campaign: must be a mapping"),
        (BOMB, ":2: aliases (*a) are not read"),
        ("[" * 100, "nested more than"),
        ("name: x\n", ":1: matrix is missing"),
        ("name: x\nmatrix: {}\n", ":2: matrix.model is missing"),
        ("name: x\nmatrix:\n  modle: vgg16\n", ":3: matrix has no 'modle'; did you mean 'model'?"),
        ("name: x\nmatrix: {model: vgg16}\nexpct: []\n", ":3: a campaign has no 'expct'; did you mean 'expect'?"),
        ("name: x\nmatrix: {model: []}\n", ":2: matrix.model: must have at least one value"),
        ("name: x\nmatrix:\n  model:\n  - vgg16\n  - vgg17\n", ":5: there is no model and no file called 'vgg17'"),
        ("name: x\nmatrix:\n  model: vgg16\n  budget: [1, twenty]\n", ":4: matrix.budget.1 'twenty': must be a whole"),
        ("name: x\nmatrix:\n  model: vgg16\n  budget: 0\n", ":4: --budget 0: must be at least 1"),
        ("name: x\nmatrix:\n  model: vgg16\n  sampler: tpee\n", ":4: unknown sampler 'tpee'; did you mean tpe"),
        ("name: x\nmatrix:\n  model: vgg16\n  evaluator: litertt\n", ":4: there is no evaluator 'litertt'; did you"),
        ("name: x\nmatrix:\n  model: vgg16\n  space: chian\n", ":4: there is no space 'chian'; did you mean chain"),
        ("name: x\nmatrix:\n  model: [vgg16, vgg16]\n", ":3: matrix.model has a value twice"),
        ("name: x\nname: y\n", ":2: 'name' is there twice"),
        ("name: ../x\nmatrix: {model: vgg16}\n", ":1: name '../x': must start with a letter"),
        ("name: x\nmatrix: {model: vgg16}\ninclude:\n- {model: vgg16}\n", ":4: this study is there already"),
        ("name: x\nmatrix: {model: vgg16}\nexclude:\n- {model: vgg16}\n", ":3: no study is left"),
        ("name: x\nmatrix: {model: vgg16}\nexclude:\n- {model: vgg19}\n", ":4: this excludes no study"),
        ("name: x\nmatrix: {model: vgg16}\nbaselines:\n- evry layer\n", ":4: there is no baseline 'evry layer'; did"),
        ("name: x\nmatrix: {model: vgg16}\nrepetitions: 0\n", ":3: repetitions 0: must be at least 1"),
        ("name: x\nmatrix: {model: vgg16}\nschema_version: 2\n", ":3: schema_version 2: must be 1"),
        ("name: x\nmatrix:\n  model: vgg16\n  seed: [" + ",".join(map(str, range(10_001))) + "]\n", "more than 10,000"),
        ("name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: -1, source: b}\n", ":4: expect.0.paper -1: "),
        ("name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, papr: 1}\n", ":4: expect has no 'papr'; did"),
        ("name: x\nmatrix: {model: vgg16}\nexpect:\n- {name: a, paper: 1, source: b, metric: ratio}\n", ":4: a ratio"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, statement: str
) -> None:
    path = written(tmp_path, text)
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"optimize: {path}")
    assert statement in err
    assert not (tmp_path / "out").exists()


def test_a_huge_file_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(100_000_000)
    for path, statement in ((huge, "at most"), (tmp_path, "no regular file"), (tmp_path / "none.yaml", "no such file")):
        with pytest.raises(UsageError, match=statement):
            read_campaign(path)


@pytest.mark.parametrize(
    ("state", "statement"),
    [
        ('{"schema_version": 99, "name": "basic"}', "schema_version is 99"),
        ('{"schema_version": 1, "name": "other"}', "holds another campaign, 'other'"),
    ],
)
def test_folders_of_others_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, statement: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "campaign.json").write_text(state)
    assert main(["run", str(written(tmp_path, BASIC)), "--out", str(out)]) == 2
    assert statement in capsys.readouterr().err
    assert (out / "campaign.json").read_text() == state
    (out / "campaign.json").rename(out / "letters.txt")
    (out / ".lock").unlink()
    assert main(["run", str(written(tmp_path, BASIC)), "--out", str(out)]) == 2
    assert "is not empty and no campaign" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_campaigns_name_their_schema_and_can_be_planned(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=campaign.schema.json\n")
    file = read_campaign(path)
    assert file.campaign.name == path.stem
    assert plan_studies(file)


def test_the_committed_schema_is_that_of_the_program() -> None:
    committed: dict[str, Any] = json.loads((ROOT / "experiments" / "campaign.schema.json").read_text())
    assert committed == json_schema()


def test_the_reference_is_that_of_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--markdown"]) == 0
    made = capsys.readouterr().out.rstrip("\n")
    assert made in (ROOT / "experiments" / "README.md").read_text()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_two_studies_with_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a b.tflite", "a+b.tflite"):
        (tmp_path / name).write_bytes(b"a model")
    path = written(tmp_path, "name: x\nmatrix:\n  model: [a b.tflite, a+b.tflite]\n")
    assert main(["run", str(path)]) == 2
    assert ":2: two studies have one name, 'a_b.tflite'" in capsys.readouterr().err


def test_null_is_a_value_of_a_filter(tmp_path: Path) -> None:
    text = """
name: x
matrix: {model: vgg16, platform: [null, exynos2200], evaluator: [litert, cost-model]}
exclude: [{evaluator: litert, platform: exynos2200}, {evaluator: cost-model, platform: null}]
"""
    found = plan_studies(read_campaign(written(tmp_path, text)))
    assert [(p.config.evaluator, p.axes["platform"]) for p in found] == [("litert", None), ("cost-model", "exynos2200")]


def test_what_explains_latency_is_told(tmp_path: Path) -> None:
    models = ", ".join(f"mobilenet_v1@{width}/64" for width in (0.25, 0.5, 0.75, 1.0))
    text = f"""
name: x
matrix: {{model: [{models}], evaluator: cost-model, platform: odroid-xu4, max_stages: 1, budget: 1}}
baselines: [whole on gpu]
indicators: true
"""
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    rows = rows_of(out / "indicators.csv")
    assert [r["family"] for r in rows] == ["mobilenet_v1"] * 4
    assert {r["cache_bytes"] for r in rows} == {str(192 << 10)}  # of the board's graphics processor
    both = rows_of(out / "explained.csv")
    assert [r["family"] for r in both] == ["all", "mobilenet_v1"]
    for row in both:
        assert 0.9 < float(row["flops"]) <= float(row["flops_and_memory"]) <= 1.0
    assert "What explains latency" in (out / "report.md").read_text()
    kept = json.loads((out / "summary.json").read_text())
    assert kept["explained"][0]["models"] == 4
    assert kept["command"] == f"optimize run {path}"


def test_half_of_a_run_folder_is_gone_on_with_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, sampler: random, budget: [8, 9, 10, 11]}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    no_result, no_manifest, half_a_log, newer = sorted(p.parent for p in out.glob("*/manifest.json"))
    (no_result / "result.json").unlink()
    (no_manifest / "manifest.json").unlink()
    log = (half_a_log / "trials.jsonl").read_bytes()
    (half_a_log / "trials.jsonl").write_bytes(log[: len(log) // 2])
    (half_a_log / "result.json").write_text("{")
    (newer / "manifest.json").write_text('{"schema_version": 99}')
    (newer / "result.json").unlink()
    capsys.readouterr()
    assert main(["run", str(path), "--out", str(out), "-q"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("schema_version is 99") == shown.err.count("no manifest.json: not a run folder") == 1
    assert all(line.startswith("optimize: ") for line in shown.err.splitlines())
    state = json.loads((out / "campaign.json").read_text())
    status = {s["folder"]: s["status"] for s in state["studies"]}
    assert [status[p.name] for p in (no_result, half_a_log)] == ["done"] * 2
    assert [status[p.name] for p in (no_manifest, newer)] == ["failed"] * 2


def test_curves_start_above_and_fall() -> None:
    head = {"model": "m", "platform": None, "evaluator": "e", "processors": None, "repetition": 1}
    head["objective"] = "latency"
    rows = [
        {**head, "sampler": s, "study": s, "plans": n, "best": ms}
        for s, values in (("a", (4.0, 2.0)), ("b", (3.0, 3.0, 2.5)))
        for n, ms in enumerate(values, 1)
    ]
    assert mean_excess(rows) == {"a": [1.0, 0.0], "b": [0.5, 0.5, 0.25]}
    assert to_csv([{"a": None, "b": [1]}]) == "a,b\n,[1]\n"
