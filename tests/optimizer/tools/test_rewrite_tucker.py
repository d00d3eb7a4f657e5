"""``optimize rewrite --tucker``: the file, its summary, and wrong options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main
from search_spaces.core.intensity import operator_costs
from search_spaces.models.litert import read_model
from tests.support.sentences import says

MODEL = "squeezenet1_1@0.5/64+spectrum"


def rewrite(out: Path, *words: str) -> int:
    return main(["rewrite", *words, "-o", str(out)])


def document(out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert rewrite(out, *words, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_file_is_what_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.tflite"
    found = document(out, capsys, "--tucker", "ratio:0.5", MODEL, "--rank", "fire2/expand3x3=5x6")
    written = read_model(out)
    assert sum(c.macs for c in operator_costs(written)) == found["macs"]["after"] < found["macs"]["before"]
    assert found["nbytes"] == out.stat().st_size
    assert 0 < found["output_relative_error"]["value"] < 0.5
    made = {x["name"]: x for x in found["layers"] if x["ranks"] is not None}
    assert made["fire2/expand3x3"]["ranks"] == [5, 6]
    assert len(written.operators) == 39 + 2 * len(made)
    assert all(0 < x["filter_relative_error"] < 1 for x in made.values())
    assert found["predicted"] is None


def test_a_person_is_reported_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rewrite(tmp_path / "out.tflite", "--tucker", "energy:0.9", MODEL, "--platform", "pixel4") == 0
    text = capsys.readouterr().out
    assert "fewer" in text
    says(text)


def test_only_faster_triples_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tucker", "ratio:0.6", "vgg11@0.25/64", "--platform", "pixel4")
    everything = document(tmp_path / "a.tflite", capsys, *words, "--even-slower")
    some = document(tmp_path / "b.tflite", capsys, *words)
    slower = {
        x["name"]
        for x in everything["layers"]
        if x["ranks"] is not None and x["predicted_ms"]["triple"] >= x["predicted_ms"]["layer"]
    }
    kept = {x["name"] for x in some["layers"] if x["ranks"] is not None}
    assert kept == {x["name"] for x in everything["layers"] if x["ranks"] is not None} - slower
    assert slower
    assert some["predicted"]["after_ms"] < some["predicted"]["before_ms"]
    assert some["predicted"]["after_ms"] <= everything["predicted"]["after_ms"]


def test_int8_is_made_of_the_decomposed_float_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.tflite"
    found = document(out, capsys, "--tucker", "ratio:0.5", f"{MODEL}:int8")
    assert found["int8"]
    written = read_model(out)
    assert written.tensors[written.inputs[0]].dtype == "int8"
    assert sum(c.macs for c in operator_costs(written)) == found["macs"]["after"]
    assert {written.tensors[o.inputs[1]].dtype for o in written.operators if o.kind == "CONV_2D"} == {"int8"}
    assert rewrite(tmp_path / "again.tflite", "--tucker", "ratio:0.5", str(out)) == 2
    says(capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["--tucker", "best", MODEL],
        ["--tucker", "given", MODEL],
        ["--tucker", "given", MODEL, "--rank", "fire2/expand3x3=0x4"],
        ["--tucker", "given", MODEL, "--rank", "fire2/expand3x3=4x99"],
        ["--tucker", "given", MODEL, "--rank", "fire2/expand=4x4"],
        ["--tucker", "given", MODEL, "--rank", "fire2"],
        ["--tucker", "given", MODEL, "--rank", "0=1x1", "--rank", "0=1x2"],
        ["--tucker", "energy:0.99", "squeezenet1_1@0.5/64"],
        ["--tucker", "ratio:0.5", MODEL, "--multiple-of", "0"],
        ["--tucker", "ratio:0.5", "squeezenet1_1@0.5/64", "--platform", "xavier"],
        ["--tucker", "ratio:0.5", MODEL, "--even-slower"],
        ["--tucker", "ratio:0.5", MODEL, "--split", "0:height:0.5"],
        ["--tucker", "ratio:0.5"],
        ["--split", "0:height:0.5", MODEL, "--rank", "0=1x1"],
        [MODEL],
    ],
)
def test_what_cannot_be_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert rewrite(tmp_path / "out.tflite", *words) == 2
    text = capsys.readouterr().err
    says(text)
    assert text.count("\n") == 1
    assert not (tmp_path / "out.tflite").exists()


def test_a_model_does_not_overwrite_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.tflite"
    assert rewrite(out, "--tucker", "ratio:0.5", MODEL) == 0
    assert rewrite(out, "--tucker", "ratio:0.5", str(out)) == 2
    says(capsys.readouterr().err)
    assert rewrite(tmp_path / "no" / "out.tflite", "--tucker", "ratio:0.5", MODEL) == 2
    says(capsys.readouterr().err)
