"""``optimize rewrite --split``: the file computes what the model computes; wrong splits are errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from optimizer.cli import main
from tests.support.models.split_models import Layers
from tests.support.models.tflite_models import run_pieces
from tests.support.sentences import says


def model(tmp_path: Path) -> tuple[Layers, Path]:
    drawn = Layers((1, 12, 10, 4))
    drawn.conv(16)
    drawn.conv(32)
    return drawn, drawn.done().write(tmp_path / "model.tflite")


def test_a_model_is_not_overwritten_by_its_own_rewrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = model(tmp_path)
    before = path.read_bytes()
    for words in (["rewrite", str(path), "--split", "0:height:0.6"], ["inspect", str(path)]):
        assert main([*words, "--out", str(path)]) == 2
        says(capsys.readouterr().err.replace(str(tmp_path), "FOLDER"))
    assert path.read_bytes() == before


def test_the_new_file_computes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn, path = model(tmp_path)
    out = tmp_path / "split.tflite"
    words = [
        "rewrite",
        "--model",
        str(path),
        "--split",
        "0:height:0.6",
        "--split",
        "1-1:channels:.4",
        "--out",
        str(out),
    ]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [s["cuts"] for s in document["splits"]] == [[7], [16]]
    assert document["operators"]["before"] == 2
    value = {0: drawn.value()}
    (before,) = run_pieces([(str(path), b"", (0,), (1,))], value)
    (after,) = run_pieces([(str(out), b"", (0,), (1,))], value)
    np.testing.assert_allclose(after[1], before[1], rtol=1e-5, atol=1e-6)
    assert main(words) == 0
    says(capsys.readouterr().out)


@pytest.mark.parametrize(
    "split",
    [
        "0:width:0.5",
        "0:height:0",
        "0:height:1",
        "7:height:0.5",
        "0-1:channels:0.5",
    ],
)
def test_what_is_no_split_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str) -> None:
    _, path = model(tmp_path)
    assert main(["rewrite", str(path), "--split", split, "--out", str(tmp_path / "x.tflite")]) == 2
    says(capsys.readouterr().err)
