"""Campaigns that run: nothing finished is run again, whatever ends them they go on, and tables tell what came out."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer.campaign.file import AXES, Expectation
from optimizer.campaign.table import (
    COLUMNS,
    _expected,
    _over,
    _rates,
    against_baseline,
    gain_text,
    gather,
    makespan_text,
    mean_excess,
    mean_gains,
    rate_text,
    read_state,
    to_csv,
)
from optimizer.cli import main
from optimizer.provenance import provenance
from tests.support.campaign_files import MODEL, rows_of, written
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("few_steps")

BASIC = f"""
schema_version: 1
name: basic
matrix:
  model: {MODEL}
  evaluator: synthetic
  sampler: [random, tpe]
  allow: cuts
  budget: 12
  seed: [0, 1]
expect:
  - {{name: cut everywhere, metric: ratio, plan: every layer, over: whole on cpu, paper: 1, tolerance: 9, source: x}}
  - {{name: another machine, plan: best, paper: 1.0e+9, source: nobody, where: {{sampler: tpe}}}}
"""


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the campaign and what running it left in ``out``."""
    folder = tmp_path_factory.mktemp("campaign")
    assert main(["run", str(written(folder, BASIC)), "--out", str(folder / "out"), "-q"]) == 0
    return folder


@pytest.fixture
def finished(run_once: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of a campaign's file and of the folder that running it left."""
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    shutil.copytree(run_once / "out", out)
    return path, out


def test_a_campaign_ends_with_tables_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    shown = capsys.readouterr().out
    says(shown)
    assert "the final" not in shown, "figures that are published rest on pairs"
    results = rows_of(out / "results.csv")
    assert {r["source"] for r in results if r["plan"] in {"every layer", "whole on cpu"}} == {"final"}
    told = {name for names in COLUMNS.values() for name in re.findall("`(.*?)`", names)}
    told |= {*AXES, "campaign", "study", "repetition", *(name for names in COLUMNS for name in names.split(", "))}
    assert set(results[0]) <= told
    assert {r["study"] for r in results} == {
        f"squeezenet1_1_0.25_64-{s}-s{n}" for s in ("random", "tpe") for n in (0, 1)
    }
    for row in results:
        assert float(row["ci_low_ms"]) <= float(row["latency_ms"]) <= float(row["ci_high_ms"])
        if row["plan"] == "best":
            assert float(row["over_best"]) == 1.0
    assert [r["studies"] for r in rows_of(out / "summary.csv")] == ["2", "2"]
    curves = rows_of(out / "curves.csv")
    assert len(curves) >= 4 * 12
    page = (out / "report.html").read_text()
    assert "<script" not in page
    says(page)
    assert main(["report", str(out), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.md").is_file()
    pyarrow = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra 'parquet'")
    assert pyarrow.read_table(out / "results.parquet").num_rows == len(results)


def test_a_campaign_runs_in_a_terminal(tmp_path: Path) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: synthetic, allow: cuts, sampler: random, budget: [2, 3]}}\n"
    words = ["run", str(written(tmp_path, text)), "--out", str(tmp_path / "out")]
    terminal, inside = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        code = [sys.executable, "-m", "optimizer.cli", *words]
        with subprocess.Popen(code, stdin=inside, stdout=inside, stderr=inside) as process:
            os.close(inside)
            text = ""
            with contextlib.suppress(OSError):  # of a terminal that nothing has open any more
                while chunk := shown.read(1 << 16):
                    text += chunk.decode(errors="replace")
        assert process.returncode == 0, text
    says(text)
    assert "trials" in text  # the bar


def test_what_is_finished_is_not_run_again(finished: tuple[Path, Path]) -> None:
    path, out = finished
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/trials.jsonl")}
    path.write_text(BASIC.replace("seed: [0, 1]", "seed: [0, 2]"))
    stale = out / "results.parquet"
    stale.write_bytes(b"of the run before")
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    assert not stale.exists() or stale.read_bytes()[:4] == b"PAR1"
    after = {p: p.stat().st_mtime_ns for p in out.glob("*/trials.jsonl")}
    assert len(after) == len(before) + 2
    assert all(after[p] == before[p] for p in before)


def test_one_failing_study_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.tflite").write_bytes(b"no model" * 100)
    text = f"name: x\nmatrix: {{model: [wrong.tflite, {MODEL}], evaluator: synthetic, budget: 5}}\n"
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 2
    shown = capsys.readouterr()
    says(shown.out)
    says(shown.err)
    state = json.loads((out / "campaign.json").read_text())
    assert [s["status"] for s in state["studies"]] == ["failed", "done"]
    says((out / "report.html").read_text())


def test_measuring_studies_never_run_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f"name: x\nmatrix: {{model: {MODEL}, budget: [5, 6]}}\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "-q", "--jobs", "2"]) == 2
    says(capsys.readouterr().err)


def test_a_dry_run_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, BASIC), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert len(document["studies"]) == 4
    assert all(s["plans"] > 12 and s["expected_s"] > 0 for s in document["studies"])
    assert main(["run", str(path), "--out", str(out), "--dry-run"]) == 0
    says(capsys.readouterr().out)


def test_a_dry_run_names_baselines_that_no_study_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "  - {name: a typing error, metric: ratio, plan: every layer, over: whole on cqu, paper: 1, source: x}"
    path = written(tmp_path, f"{BASIC}{wrong}\nbaselines: [whole on cpu, whole on npu]\n")
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    says(" ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize("state", ['{"schema_version":99,"name":"basic"}', '{"schema_version":1,"name":"other"}'])
def test_folders_of_others_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "campaign.json").write_text(state)
    assert main(["run", str(written(tmp_path, BASIC)), "--out", str(out)]) == 2
    says(capsys.readouterr().err)
    assert (out / "campaign.json").read_text() == state
    for other in ("letters.txt", "manifest.json"):
        shutil.rmtree(out)
        out.mkdir()
        (out / other).touch()
        for dry in ([], ["--dry-run"]):
            assert main(["run", str(written(tmp_path, BASIC)), "--out", str(out), *dry]) == 2
            says(capsys.readouterr().err)


def test_the_highest_rate_with_deadlines_kept_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrival = "arrival: {kind: periodic, period_ms: 20, requests: 8}, deadline_ms: 5"
    models = f"models: [{{model: {MODEL}, {arrival}}}, {{model: mobilenet_v1@0.25/64, {arrival}}}]"
    (tmp_path / "pair.yaml").write_text(models)
    text = """
name: x
matrix:
  model: pair.yaml
  evaluator: cost-model
  platform: pixel4
  processors: "1large,1small"
  allow: cuts
  objective: misses
  rate: [1, 20]
  budget: 4
"""
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    says(" ".join(capsys.readouterr().out.split()))
    (row,) = rows_of(out / "rates.csv")
    assert (float(row["lowest"]), float(row["highest"]), float(row["best"])) == (1, 20, 1)
    assert float(row["gain"]) == 1.0
    assert {r["misses"] == "0" for r in rows_of(out / "results.csv") if r["rate"] == "1.0" and r["plan"] == "best"} == {
        True
    }
    page = (out / "report.md").read_text()
    says(page)
    heads, _, best, *_ = page.partition("## All plans")[2].strip().splitlines()
    says(heads)  # ratios of such values say nothing
    assert best.endswith("| ms | 0 |")


def test_rates_are_told_of_workloads_with_deadlines() -> None:
    axes = dict.fromkeys(AXES) | {"model": "pair.yaml", "seed": 0}

    def row(plan: str, rate: float, misses: int | None, value: float = 1.0) -> dict[str, Any]:
        makespan = {"makespan_ms": 10.0, "predicted_makespan_ms": 9.5 if plan != "best" else 1.0}
        known = {"misses": misses, "requests": 20, "predicted": False, "value": value}
        return axes | {"plan": plan, "rate": rate, **known, **makespan}

    assert not _rates([row("best", 1.0, None)])
    ours = [row("best", 1.0, 0), row("best", 2.0, 1), row("best", 3.0, 2), row("best", 4.0, 0)]  # one in 20 may be late
    (found,) = _rates([*ours, row("whole", 1.0, 2), row("whole", 2.0, 0)])
    assert (found["best"], found["baseline"], found["gain"]) == (2.0, None, None)
    says(rate_text(found, ["model", "rate"]))
    (found,) = _rates([*ours[:2], row("whole", 1.0, 1), row("whole", 2.0, 2)])
    assert (found["baseline"], found["baseline_rate"], found["gain"]) == ("whole", 1.0, 2.0)
    says(rate_text(found, ["model"]))
    (found,) = _rates([*ours[:2], row("slow", 1.0, 1, 2.0), row("fast", 1.0, 1)])
    assert found["baseline"] == "fast"
    (found,) = _rates(ours[:2], [axes | {"rate": 5.0}, axes | {"rate": 6.0, "model": "other.yaml"}])
    says(rate_text(found, ["model"]))
    says(makespan_text([*ours, row("whole", 1.0, 0), row("other", 1.0, 0)]))
    assert not makespan_text(ours)
    assert not makespan_text([row("whole", 1.0, 0) | {"predicted": True}])  # by the simulator itself


def test_what_explains_latency_is_reported(tmp_path: Path) -> None:
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
    alone, family = both  # there is no family that could predict the only one
    assert alone["flops_error_median"] == ""
    assert 0.0 <= float(family["flops_error_median"]) <= float(family["flops_error_p90"])
    says((out / "report.md").read_text())
    kept = json.loads((out / "summary.json").read_text())
    assert kept["explained"][0]["models"] == 4
    assert kept["measured_on"] == []  # all is predicted
    for damage in ([1], {"own_cache_bytes": "abc"}):
        for file in out.glob("*/manifest.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": damage}))
        assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    assert kept["command"] == f"optimize run {path}"


def test_half_of_a_run_folder_is_gone_on_with_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = f"{{model: {MODEL}, evaluator: synthetic, allow: cuts, sampler: random, budget: [8, 9, 10, 11]}}"
    text = f"name: x\nmatrix: {matrix}\n"
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
    says("\n".join(sorted(line for line in shown.err.splitlines() if "warning" not in line)))
    assert all(line.startswith("optimize: ") for line in shown.err.splitlines())
    state = json.loads((out / "campaign.json").read_text())
    status = {s["folder"]: s["status"] for s in state["studies"]}
    assert [status[p.name] for p in (no_result, half_a_log)] == ["done"] * 2
    assert [status[p.name] for p in (no_manifest, newer)] == ["failed"] * 2


def test_a_published_figure_says_how_ours_is_known_or_why_there_is_none() -> None:
    def row(plan: str, value: float | None, **more: Any) -> dict[str, Any]:
        axes = dict.fromkeys(AXES) | {"objective": "latency", "model": "a", "study": "a", "predicted": True}
        known: dict[str, Any] = {
            "value": value,
            "value_low": None,
            "value_high": None,
            "source": "predicted",
            "over_others": {},
        }
        known |= dict.fromkeys(("over_best", "over_best_low", "over_best_high", "ratio", "ratio_low", "ratio_high"))
        known["gain"] = None
        return axes | known | {"plan": plan} | more

    def found(**wanted: Any) -> dict[str, Any]:
        rows = [row("best", 2.0), row("whole on cpu", 4.0), row("every layer", None)]
        other = {"study": "b", "model": "b", "objective": "energy", "predicted": False}
        mean = {"study": "d", "model": "a*6", "objective": "mean"}
        about = {"name": "x", "paper": 0.5, "source": "y"} | wanted
        rows += [each | more for more in (other, mean) for each in rows]
        return _expected(Expectation.model_validate(about), rows)

    both = {"metric": "ratio", "over": "whole on cpu"}
    assert (found(**both)["known"], found(**both)["within"]) == ("measured, predicted", True)
    fitted = found(**both, where={"model": "a"}, fitted=True)
    assert (fitted["known"], fitted["within"], fitted["ours"]) == ("fitted", None, 0.5)
    assert found(**both, where={"model": "b"}, fitted=True)["known"] == "measured"
    assert found(plan="whole on cpu", where={"model": "a*6"})["ours"] == 4.0
    asked = found(**both, paper=None, source="")
    assert (asked["ours"], asked["ratio"], asked["within"]) == (0.5, None, None)
    for wanted in (
        {"plan": "whole on cqu"},
        {"metric": "ratio", "over": "every leyer"},
        {"metric": "speedup"},
        {"plan": "every layer", "where": {"model": "a"}},
        {"where": {"model": "b"}},
        {"where": {"model": "c"}},
    ):
        none = found(**wanted)
        assert none["ours"] is None
        says(none["missing"])
    slower = {"metric": "speedup", "name": "x", "paper": 1.3, "source": "y"}
    for gain, of_next in (
        (1.0, 0.65),
        (1.25, 1.25),
    ):  # where a baseline is recommended, the ratio is of the next best plan
        best = row("best", 2.0, gain=gain, ratio=of_next, ratio_low=of_next - 0.05, ratio_high=of_next + 0.05)
        assert _expected(Expectation.model_validate(slower), [best])["ours"] == gain


def test_a_ratio_to_the_recommended_plan_has_the_interval_of_the_final() -> None:
    def row(plan: str, value: float, *over_best: float) -> dict[str, Any]:
        over = dict(zip(("over_best", "over_best_low", "over_best_high"), over_best or (None,) * 3, strict=True))
        return {"plan": plan, "value": value, "over_others": {}} | over

    best, slower, other = row("best", 2.0), row("a", 4.5, 2.0, 1.6, 2.5), row("b", 3.0, 1.5, 1.4, 1.6)
    assert _over(best, slower) == (0.5, 0.4, 0.625)
    assert _over(slower, best) == (2.0, 1.6, 2.5)
    assert _over(row("the best one", 2.0, 1.0, 1.0, 1.0), slower) == _over(best, slower)
    assert _over(slower, other) == (4.5 / 3.0, None, None)  # nothing is known of these two together
    assert _over(slower | {"over_others": {"b": [1.4, 1.2, 1.6]}}, other) == (1.4, 1.2, 1.6)
    assert _over(slower, row("c", 9.0)) == (0.5, None, None)  # the search alone measured one of them


def test_an_interval_within_rounding_is_none() -> None:
    ratio = {"objective": "latency", "ratio": 1.0825, "ratio_low": 1.0825, "ratio_high": 1.0825}
    assert against_baseline(ratio | {"ratio_high": 1.0825 + 1e-13}) == against_baseline(ratio)
    assert against_baseline(ratio | {"ratio_high": 1.09}) != against_baseline(ratio)


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


def test_a_campaign_that_is_resumed_elsewhere_says_where_it_was_begun(
    finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = finished
    first = json.loads((out / "summary.json").read_text())
    assert "resumed_on" not in first
    elsewhere = provenance() | {"machine": {"cpu": "another", "cores": 64}}
    monkeypatch.setattr("optimizer.campaign.run.provenance", lambda: elsewhere)
    for remove, resumed in (("", []), ("result.json", ["another"]), ("", ["another"])):
        for lost in list(out.glob(f"*/{remove}"))[:1] if remove else ():
            lost.unlink()
        assert main(["run", str(path), "--out", str(out), "-q"]) == 0
        again = json.loads((out / "summary.json").read_text())
        assert again["machine"] == first["machine"]
        assert [each["machine"]["cpu"] for each in again.get("resumed_on", [])] == resumed
    damages: list[dict[str, object]] = [
        {"machine": {"cpu": 3}, "resumed_on": 5},
        {"packages": [{}]},
        {"resumed_on": [1, None, "x"]},
    ]
    for damage in damages:
        damaged = json.loads((out / "campaign.json").read_text()) | damage
        (out / "campaign.json").write_text(json.dumps(damaged))
        for _ in range(2):
            assert main(["run", str(path), "--out", str(out), "-q"]) == 0


def test_a_dry_run_of_what_cannot_run_fails_as_the_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"name: x\nmatrix: {{model: {MODEL}, evaluator: cost-model, platform: [pixel4, null], budget: 3}}\n"
    path = written(tmp_path, text)
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    says(" ".join(capsys.readouterr().out.split()))
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "-q"]) == 2


def test_a_campaign_is_no_study(finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = finished
    capsys.readouterr()
    assert main(["explain", str(out)]) == 2
    says(capsys.readouterr().err)


def test_the_mean_gain_over_models_counts_baselines_as_one() -> None:
    def row(model: str, ratio: float, gain: float, sampler: str = "tpe") -> dict[str, Any]:
        axes = dict.fromkeys(AXES) | {"model": model, "sampler": sampler, "objective": "latency", "seed": 0}
        return axes | {
            "ratio": ratio,
            "ratio_low": ratio - 0.01,
            "ratio_high": ratio + 0.01,
            "gain": gain,
            "proposed_plans": 0 if model == "b" else 3,
        }

    rows = [row("a", 2.0, 2.0), row("b", 0.5, 1.0), row("c", 4.0, 4.0), row("a", 3.0, 3.0, "random")]
    (found,) = mean_gains([*rows, row("d", 1.0, 1.0) | {"gain": None}])
    assert found["sampler"] == "tpe"
    assert found["gain"] == pytest.approx(2.0)
    assert found["gain_low"] < 1.0 < found["gain_high"]  # three models alone
    says(gain_text(found))
    (none,) = mean_gains([row("b", 0.5, 1.0), row("b", 0.7, 1.0) | {"model": "e"}])
    says(gain_text(none))


def test_a_front_is_told_in_all_its_objectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""
name: fronts
matrix:
  model: {MODEL}
  evaluator: cost-model
  platform: kirin990
  objective: "latency,memory"
  budget: 12
"""
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    rows = rows_of(out / "fronts.csv")
    assert [r["of"] for r in rows[:2]] == ["latency", "memory"]
    assert {r["unit"] for r in rows} == {"ms", "MB"}
    assert sum(r["knee"] == "True" for r in rows) == 2
    said = " ".join(capsys.readouterr().out.split())
    knee = [r for r in rows if r["knee"] == "True"]
    assert ", ".join(f"{r['of']} {float(r['value']):.4g} {r['unit']}" for r in knee) in said
    assert knee[1]["unit"] in (out / "report.html").read_text()


def test_the_front_of_several_models_has_each_objective_of_its_own(tmp_path: Path) -> None:
    text = f"""
name: fronts
matrix:
  model: "{MODEL},mobilenet_v1@0.25/128"
  evaluator: cost-model
  platform: kirin990
  objective: "mean,makespan"
  allow: cuts
  budget: 4
"""
    path, out = written(tmp_path, text), tmp_path / "out"
    assert main(["run", str(path), "--out", str(out), "-q"]) == 0
    rows = rows_of(out / "fronts.csv")
    mean, makespan = (float(next(r["value"] for r in rows if r["of"] == of)) for of in ("mean", "makespan"))
    assert mean < makespan


@pytest.mark.parametrize("front", [{"a": 1}, {"objectives": ["latency"], "plans": []}, 7])
def test_a_damaged_front_is_one_line_about_its_study(finished: tuple[Path, Path], front: object) -> None:
    _, out = finished
    result = next(out.glob("*/result.json"))
    result.write_text(json.dumps(json.loads(result.read_text()) | {"front": front}))
    tables = gather(out, read_state(out))
    assert len(tables.unreadable) == 1
    assert len({row["study"] for row in tables.results}) == 3
