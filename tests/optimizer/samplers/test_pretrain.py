"""``optimize pretrain``: a policy from cost models, used by a study on a device that it has not seen."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.cli import main
from optimizer.samplers.policy.network import Weights, draw
from optimizer.samplers.policy.pretrain import training_task
from tests.support.sentences import says

TRAIN = ["pretrain", "--model", "squeezenet1_1", "--platform", "snapdragon855", "--max-stages", "3"]

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A policy of 60 batches, and what the command told of it."""
    policy, output = tmp_path_factory.mktemp("trained") / "policy.npz", io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([*TRAIN, "--out", str(policy), "--batches", "60", "--json"]) == 0
    return policy, json.loads(output.getvalue())


def test_a_policy_is_trained_kept_and_used(
    trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy, document = trained
    assert document["tasks"] == ["squeezenet1_1 on snapdragon855"]
    assert 1.0 - 1e-9 <= document["slower_than_best_last"] < 0.8 * document["slower_than_best_first"]
    study = ["--model", "squeezenet1_0", "--evaluator", "cost-model", "--platform", "kirin990", "--budget", "12", "-q"]
    assert main([*study, "--max-stages", "3", "--sampler", f"reinforce@{policy}", "--json", "--out", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] >= 12
    assert (tmp_path / "run").is_dir()


def test_the_same_seed_gives_the_same_policy(tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate(("0", "0", "1")):
        assert main([*TRAIN, "--out", f"{number}.npz", "--batches", "4", "--seed", seed]) == 0
        weights.append(Weights.load(tmp_path / f"{number}.npz").out)
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_what_was_trained_draws_better_plans_on_an_unseen_model_and_device(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    unseen, drawn = training_task("mobilenet_v1", Path("kirin990"), 3), []
    choices = unseen.choices
    for weights in (Weights.new(0), Weights.load(trained[0])):
        logits = choices.prior + weights.scores(choices.features)
        taken = draw(logits, choices, 200, np.random.default_rng(0))
        drawn.append(np.mean([unseen.judge(choices.plan(which)) for which in taken]))
    assert drawn[1] < drawn[0]


@pytest.mark.parametrize(
    "arguments",
    [
        TRAIN[:3],
        [*TRAIN, "--out", "no/where.npz"],
        [*TRAIN, "--out", "."],
        [*TRAIN, "--out", "x.npz", "--batches", "1"],
        [*TRAIN, "--out", "x.npz", "--max-stages", "0"],
        [*TRAIN, "--out", "x.npz", "--seed", "-1"],
        [*TRAIN[:-2], "--platform", "no-such", "--out", "x.npz"],
        ["--model", "squeezenet1_1", "-q", "--sampler", "reinforce@x.npz"],
    ],
)
def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    says(err)
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
