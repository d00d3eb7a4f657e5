"""Models that a campaign makes: once for each seed, again if their recipe changes, and told apart in its tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.campaign.file import Campaign
from optimizer.campaign.models import Record, model_file, read_record, trained_rows
from optimizer.campaign.studies import run_words
from optimizer.cli import main
from tests.support.campaign_files import written
from tests.support.sentences import says

TEXT = """
name: x
models:
  half: {model: squeezenet1_1@0.25/64+spectrum, tucker: "ratio:0.5"}
  quarter: {model: squeezenet1_1@0.25/64+spectrum, tucker: "ratio:0.25"}
matrix: {model: [half, quarter], processors: cpu0, allow: cuts, budget: 1, seed: [0, 1]}
"""


def run(path: Path, out: Path) -> int:
    return main(["run", str(path), "--out", str(out), "--quiet"])


def test_a_campaign_makes_its_models_once_and_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path, TEXT), tmp_path / "out"
    assert run(path, out) == 0
    assert "made" in capsys.readouterr().out
    for study in json.loads((out / "campaign.json").read_text())["studies"]:
        name, seed, digest = study["axes"]["model"], study["axes"]["seed"], study["made"]
        record = read_record(out, name, seed, digest)
        assert record is not None
        assert record.after is None
        result = json.loads((out / study["folder"] / "result.json").read_text())
        assert result["model"]["name"] == f"{name}-s{seed}-{digest[:8]}"
    rows = list(csv.DictReader((out / "trained.csv").read_text().splitlines()))
    assert [(row["model"], row["seeds"], row["family"]) for row in rows] == [
        ("half", "2", "squeezenet1_1"),
        ("quarter", "2", "squeezenet1_1"),
    ]
    assert int(rows[0]["macs"]) > int(rows[1]["macs"])
    made: list[str] = []

    def counting(words: Sequence[str], **more: Any) -> tuple[int, str]:
        made.append(words[-1])
        return run_words(words, **more)

    monkeypatch.setattr("optimizer.campaign.models.run_words", counting)
    assert run(path, out) == 0
    assert made == []
    next(out.glob("models/half-s0-*.tflite")).unlink()
    assert run(path, out) == 0
    assert made == []  # its study is finished
    assert len(list(csv.DictReader((out / "trained.csv").read_text().splitlines()))) == 2
    assert run(written(tmp_path, TEXT.replace('0.25"', '0.3"')), out) == 0
    assert sorted(Path(name).name[:10] for name in made) == ["quarter-s0", "quarter-s1"]
    made.clear()
    assert run(written(tmp_path, TEXT), out) == 0
    assert made == []  # that of the first recipe is there still


def test_a_model_that_cannot_be_made_ends_its_studies_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT.replace("ratio:0.5", "given")
    assert run(written(tmp_path, text), tmp_path / "out") == 2
    state = json.loads((tmp_path / "out" / "campaign.json").read_text())
    assert [study["status"] for study in state["studies"]] == ["failed", "failed", "done", "done"]
    _, err = capsys.readouterr()
    assert err.count("half") == 2  # in one line: the study, and its model
    says(next(line for line in err.splitlines() if "half" in line))


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    path = model_file(tmp_path, "a", 0, "x")
    path.parent.mkdir()
    good = '{"recipe": "x", "macs": 1, "parameters": 1, "after": 1}'
    wrong = [("1,", "0,"), ('"macs": 1', f'"macs": 1{"0" * 400}'), ("1}", "2}"), ("1}", "1e308}"), ('"x"', '"y"')]
    for content in ("", "{}", "[" * 10_000, *(good.replace(*each) for each in wrong)):
        path.with_suffix(".json").write_text(content)
        assert read_record(tmp_path, "a", 0, "x") is None
    path.with_suffix(".json").write_text(good)
    assert read_record(tmp_path, "a", 0, "x") is not None


def test_accuracies_are_compared_seed_by_seed(tmp_path: Path) -> None:
    accuracies = {"a": (0.9, 0.8, 0.85), "b": (0.95, 0.85, 0.9)}
    for name, each in accuracies.items():
        for seed, after in enumerate(each):
            path = model_file(tmp_path, name, seed, "x")
            path.parent.mkdir(exist_ok=True)
            ends = after - 0.001, after + 0.001
            record = Record(recipe="x", macs=10, parameters=1, before=0.1, after=after, ci95=ends, kept_apart=9)
            path.with_suffix(".json").write_text(record.model_dump_json())
    part: dict[str, Any] = {"model": "vgg16", "data": "mnist_5k"}
    named = {"a": part | {"beside": "b"}, "b": part}
    campaign = Campaign.model_validate({"name": "x", "matrix": {"model": ["a", "b"]}, "models": named})
    results = [
        {"plan": "best", "model": name, "seed": seed, "latency_ms": 1.0 + seed} for name in "ab" for seed in range(3)
    ]
    studies = [{"status": "done", "made": "x", "axes": {"model": row["model"], "seed": row["seed"]}} for row in results]
    first, second = trained_rows(tmp_path, campaign, studies, results)
    assert first["accuracy"] == pytest.approx(0.85)
    assert first["difference"] == pytest.approx(-0.05)
    assert first["difference_high"] == pytest.approx(-0.05 + 0.001 * 2**0.5 / 3**0.5)  # equal for all seeds
    assert first["latency_ms"] == 2.0
    assert first["accuracy_low"] == pytest.approx(0.85 - 4.3027 * 0.05 / 3**0.5, abs=1e-4)
    assert second["difference"] is None
    assert second["family"] == "vgg16"
