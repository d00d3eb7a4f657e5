"""Training: what comes out is in the file that is written, tells classes apart, and is the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evaluators.cuda.training import Training, check_trainable, train
from optimizer.cli import main
from search_spaces.core.errors import ModelError, UnavailableError
from search_spaces.models import load
from search_spaces.models.labelled import Labelled
from search_spaces.models.stages import with_values
from tests.support.sentences import fails, says

NETWORKS = ("squeezenet1_1@0.25/64", "resnet18@0.125/32", "mobilenet_v1@0.25/32")


def stripes(count: int, seed: int = 0) -> Labelled:
    """Return images of upright and of lying stripes, with noise."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    upright = np.tile(np.array([0.0, 1.0], np.float32), (28, 14))
    inputs = np.stack([upright if label else upright.T for label in labels])
    return Labelled("x", (inputs + rng.normal(0, 0.2, inputs.shape)).astype(np.float32), labels.astype(np.int64))


@pytest.mark.parametrize("name", ["resnet50:int8", "resnet18:f16", "mobilebert/32", "fast_style_transfer@0.25/64"])
def test_models_that_cannot_be_trained_are_one_line(name: str) -> None:
    with fails(ModelError):
        check_trainable(load(name))


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "0"],
        ["--epochs", "-1"],
        ["--rate", "-1"],
        ["--rate", "much"],
        ["--share", "1.5"],
        ["--share", "1"],
        ["--data", "none.npz"],
        ["--out", "."],
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    data = tmp_path / "x.npz"
    few = stripes(10)
    np.savez(data, inputs=few.inputs, labels=few.labels)
    given = ["train", "resnet18@0.125/32", "--data", str(data), "--out", str(tmp_path / "x.tflite"), *words]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    says(err)


def test_no_epochs_measure_a_model_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = stripes(20)
    np.savez(tmp_path / "x.npz", inputs=few.inputs, labels=few.labels)
    given = ["train", "resnet18@0.125/32", "--data", str(tmp_path / "x.npz"), "--share", "0.5"]
    assert main([*given, "--epochs", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] is None
    assert found["data"]["kept_apart"] == 10
    assert found["accuracy"]["before"] == found["accuracy"]["after"]
    assert main(given) == 2
    says(capsys.readouterr().err)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_learns_and_the_file_computes_what_was_learnt(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="needs PyTorch (the extra train)")
    from optimizer.tools.train import accuracy

    graph = load(name)
    data, other = (stripes(n, seed).shaped(graph.tensors[graph.inputs[0]].shape) for n, seed in ((256, 0), (64, 1)))
    said: list[str] = []
    values, by = train(graph, data, Training(6, 1e-3, 0, anew=True), said.append)
    assert len(said) == 6
    assert by.startswith("PyTorch")
    with_values(graph, values).write(tmp_path / "x.tflite")
    assert accuracy(load(str(tmp_path / "x.tflite")), other) > 0.9
    again, _ = train(graph, data, Training(1, 1e-3, 0, anew=True))
    same, _ = train(graph, data, Training(1, 1e-3, 0, anew=True))
    another, _ = train(graph, data, Training(1, 1e-3, 1, anew=True))
    assert all(np.allclose(again[t], same[t], rtol=1e-2, atol=1e-3) for t in again)
    assert not all(np.allclose(again[t], another[t], rtol=1e-2, atol=1e-3) for t in again)


def test_a_rate_beyond_all_bounds_is_one_line() -> None:
    pytest.importorskip("torch", reason="needs PyTorch (the extra train)")
    graph = load("resnet18@0.125/32")
    data = stripes(64).shaped(graph.tensors[graph.inputs[0]].shape)
    with fails(UnavailableError):
        train(graph, data, Training(5, 1e9, 0, anew=True))
