"""``optimize --tucker`` from end to end: on the cost model, measured here, with other samplers, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.litert import PlanRunner
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.model.ranks import CHAIN, UNIFORM
from optimizer.report.console import render
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.log import read_log
from search_spaces.models import load
from tests.support.sentences import says
from tests.support.short_studies import Quiet

MODEL = "vgg11@0.25/32+spectrum"
PIXEL: dict[str, Any] = {
    "evaluator": "cost-model",
    "platform": Path("pixel4"),
    "processors": ("gpu", "3med"),
    "allow": "cuts,ranks",
    "max_stages": 2,
}


def study(out: Path, **options: Any) -> Any:
    values: dict[str, Any] = {"model": MODEL, "budget": 20, "out": out} | options
    return run_study(StudyConfig(**values), Quiet(), ["optimize"])


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "nsga2"])
def test_ranks_are_chosen_on_the_cost_model_within_the_allowed_error(tmp_path: Path, sampler: str) -> None:
    found = study(tmp_path / "run", sampler=sampler, budget=24, **PIXEL)
    assert found.best is not None
    assert found.best.ranks
    samples = found.samples(found.best)
    assert samples is not None
    assert found.bounds is not None
    assert found.bounds.space_s <= samples.median * (1 + 1e-9)
    assert {UNIFORM} <= set(found.baselines)
    # What the search is for: faster than the best without ranks.
    others = [
        t.measurement.latency_s.median for t in found.history.known.values() if t.measurement and not t.plan.ranks
    ]
    assert samples.median < min(others)


def test_a_smaller_error_costs_time_and_none_leaves_the_model_alone(tmp_path: Path) -> None:
    took = []
    for error in (0.3, 0.1, 0.0):
        found = study(tmp_path / f"{error}", max_error=error, **PIXEL)
        samples = found.samples(found.best)
        assert samples is not None
        took.append(samples.median)
        assert bool(found.best.ranks) == (error > 0.0)
    assert took == sorted(took)


def test_random_weights_have_no_ranks_to_spare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = study(tmp_path / "run", **(PIXEL | {"model": "vgg11@0.25/32", "max_stages": 1}))
    assert found.best is not None
    assert not found.best.ranks
    says(caplog.text)


def test_a_study_is_gone_on_with(tmp_path: Path) -> None:
    first = study(tmp_path / "run", budget=20, **PIXEL)
    again = study(tmp_path / "run", budget=24, **PIXEL)
    other = study(tmp_path / "other", budget=24, **PIXEL)
    digests = [[t.plan.digest for t in found.history.trials] for found in (first, again, other)]
    assert digests[1][: len(digests[0])] == digests[0]
    assert digests[1] == digests[2]
    kinds = {r.kind for r in read_log(tmp_path / "run" / "trials.jsonl").records}
    assert {"profile", "trial"} <= kinds


@pytest.mark.litert
def test_ranks_are_measured_and_the_files_compute_what_the_plan_does(tmp_path: Path) -> None:
    found = study(tmp_path / "run", processors=("cpu0",), max_error=0.3, budget=3, max_stages=1, allow="cuts,ranks")
    assert found.best is not None
    ranked = [t for t in found.history.known.values() if t.plan.ranks and t.measurement and t.measurement.agreement]
    assert ranked
    for trial in ranked:
        assert trial.measurement is not None
        assert trial.measurement.agreement is not None
        assert trial.measurement.agreement.max_rel_error > 0.0
    assert CHAIN in found.baselines or "whole on cpu0" in found.baselines
    graph = load(MODEL)
    best = min(ranked, key=lambda t: t.median_s).plan
    with LitertEvaluator().prepare(found.platform) as session:
        folder = tmp_path / "best"
        folder.mkdir()
        agreement = session.deploy(folder, graph, best)
        assert agreement.accepted
        with PlanRunner(folder / "plan.json") as runner:
            values = list(runner.run([np.zeros(graph.tensors[t].shape, np.float32) for t in graph.inputs]).values())
    assert all(np.isfinite(v).all() for v in values)


def test_the_command_tells_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        MODEL,
        "--allow",
        "ranks",
        "--evaluator",
        "cost-model",
        "--platform",
        "pixel4",
        "--max-stages",
        "1",
    ]
    assert main([*words, "--budget", "16", "-q", "--json", "--out", str(tmp_path / "run")]) == 0
    best = json.loads(capsys.readouterr().out)["best"]["plan"]
    assert best["ranks"]
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    capsys.readouterr()
    assert main([*words, "--budget", "16", "-q", "--out", str(tmp_path / "run")]) == 0
    says(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "squeezenet1_1@0.5/64:int8"],
        ["--model", "mobilebert/8"],
        ["--model", MODEL, "--max-error", "-1"],
    ],
)
def test_what_cannot_be_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    common = ["--allow", "ranks", "--evaluator", "cost-model", "--platform", "pixel4", "--budget", "2", "-q"]
    assert main([*words, *common, "--out", str(tmp_path / "run")]) == 2
    says(capsys.readouterr().err)


def test_the_rendered_result_has_one_line_of_ranks(tmp_path: Path) -> None:
    found = study(tmp_path / "run", **(PIXEL | {"max_stages": 1}))
    texts = [str(part) for part in render(found).renderables]
    assert sum("Tucker-2 triples" in text for text in texts) == 1
