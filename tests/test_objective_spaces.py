"""Objectives where plans are no chains, and in campaigns: what is clear is searched, the rest is told in one line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.objectives import OBJECTIVES
from optimizer.cli import main
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.exact.front import undominated
from optimizer.objective_spaces import least_work
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor
from tests.commands import answered

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "--budget", "6"]
POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]
MODELS = {"branches": "squeezenet1_1", "coexecution": "squeezenet1_1@0.5/64", "tucker": "squeezenet1_1@0.5/64+spectrum"}
REFUSED = {
    *((space, name) for space in ("coexecution", "tucker") for name in ("throughput", "memory")),
}

pytestmark = pytest.mark.usefixtures("elsewhere")


def study(capsys: pytest.CaptureFixture[str], space: str, *words: str) -> dict[str, Any]:
    return answered(capsys, ["--model", MODELS[space], "--space", space, *STUDY, *POWERS, *words, "-q"])


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "latency"])
@pytest.mark.parametrize("space", list(MODELS))
def test_what_is_clear_is_searched(capsys: pytest.CaptureFixture[str], space: str, name: str) -> None:
    objective = OBJECTIVES[name]
    if (space, name) in REFUSED:
        words = ["--model", MODELS[space], "--space", space, *STUDY, "--objective", name, "-q"]
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"--objective {name}: plans with" in told
        assert len(told.splitlines()) == 1
        return
    found = study(capsys, space, "--objective", name)
    best = found["best"][objective.key]["median"]
    others = [each[objective.key]["median"] for each in found["baselines"].values() if each[objective.key]]
    assert others
    assert best <= min(others) * (1 + 1e-9)
    assert found[f"model_bound_{objective.shown.lower()}"] <= best * (1 + 1e-6)
    assert found["unique_plans"] == 6
    if name in ("energy", "occupancy") and space == "coexecution":  # no split saves work
        assert all(stage.get("share") is None for stage in found["best"]["plan"]["stages"])


@pytest.mark.parametrize("space", ["branches", "coexecution"])
def test_several_give_a_front(capsys: pytest.CaptureFixture[str], space: str) -> None:
    found = study(capsys, space, "--objective", "latency", "--objective", "energy", "--budget", "12")
    table = [list(each["values"].values()) for each in found["front"]["plans"]]
    assert len(undominated(np.array(table))) == len(table) >= 1


def test_states_go_with_branches_and_with_the_latency_alone(capsys: pytest.CaptureFixture[str]) -> None:
    states = ("--state", "cool:", "--state", "hot:gpu=3")
    found = study(capsys, "branches", *states)
    assert found["best"]["latency_ms"]["median"] > 0
    for words, told in (
        (["--space", "coexecution"], "plans of this space are not priced in states"),
        (["--space", "tucker"], "plans of this space are not priced in states"),
        (["--objective", "energy"], "--state tells how much longer lanes take"),
    ):
        assert main(["--model", MODELS["coexecution"], *STUDY, *states, *words]) == 2
        assert told in capsys.readouterr().err


def test_energy_is_limited_where_plans_are_no_chains(capsys: pytest.CaptureFixture[str]) -> None:
    for space, model in list(MODELS.items())[::2]:
        free = study(capsys, space, "--max-energy", "1000", "--out", f"{space}-free")["best"]["figures"]["energy"]
        assert main(["--model", model, "--space", space, *STUDY, *POWERS, "--max-energy", "1e-6", "-q"]) == 3
        assert "energy of an inference" in capsys.readouterr().err
        assert free > 0


def test_several_models_are_asked_what_they_know(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--model", "mobilenet_v1@0.25/128", *STUDY]
    for option in (["--storage", "sqlite:///x.db", "--study", "x"], ["--state", "hot:gpu=2"], ["--warm-start", "x"]):
        assert main([*words, *option]) == 2
        assert f"{option[0]}: is not supported with several models" in capsys.readouterr().err


def test_campaigns_have_objectives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = """
name: aims
matrix:
  model: squeezenet1_1@0.5/64
  evaluator: cost-model
  platform: pixel4
  processors: 1large,1small,gpu
  space: [chain, coexecution]
  objective: [latency, throughput, energy]
  max_stages: 2
  budget: 4
exclude: [{space: coexecution, objective: latency}, {space: coexecution, objective: energy}]
settings: {power: [1large=2, 1small=0.5, gpu=12]}
"""
    (tmp_path / "aims.yaml").write_text(text)
    assert main(["run", "aims.yaml", "--dry-run", "--json"]) == 0
    problems = [each["problem"] for each in json.loads(capsys.readouterr().out)["studies"] if each["problem"]]
    assert len(problems) == 1
    assert "--objective throughput: plans with split operators run no streams" in problems[0]
    assert main(["run", "aims.yaml", "--out", "out", "-q"]) == 2
    told = capsys.readouterr()
    assert "plans with split operators run no streams" in told.err
    assert "3 of 4 studies are done, 1 failed" in told.out
    with Path("out/summary.csv").open() as file:
        rows = {(row["space"], row["objective"]): row for row in csv.DictReader(file)}
    assert {objective: rows["chain", objective]["unit"] for objective in ("latency", "throughput", "energy")} == {
        "latency": "ms",
        "throughput": "ms",
        "energy": "mJ",
    }
    assert float(rows["chain", "energy"]["best"]) > 0.0
    assert rows["chain", "energy"]["best_ms"] == ""
    assert rows["chain", "latency"]["best_ms"] == rows["chain", "latency"]["best"]
    assert main(["report", "out"]) == 0
    assert "mJ" in Path("out/report.html").read_text()
    (tmp_path / "wrong.yaml").write_text("name: x\nmatrix: {model: vgg16, objective: speed}\n")
    assert main(["run", "wrong.yaml"]) == 2
    assert "wrong.yaml:2: matrix.objective" in capsys.readouterr().err


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3))
def test_no_plan_does_less_than_the_least(seed: int, operators: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    shared = rng.random() < 0.5
    processors = tuple(
        Processor(f"p{i}", "cpu", {"core" if shared and i < 2 else f"core{i}": 1.0}, like=f"p{i}") for i in range(lanes)
    )
    times = rng.random((lanes, operators))
    if lanes > 1:
        times[1, rng.integers(operators)] = np.inf
    costs = ChainCosts(Platform("p", processors), times, rng.random(lanes), np.zeros((operators, lanes, lanes)))
    stages = tuple(Stage((o,), f"p{rng.integers(lanes)}") for o in range(operators))
    plan = Plan("digest", stages)
    assert least_work(costs) <= chain_cost(costs, plan) * (1 + 1e-9)
    assert least_work(costs, "period") <= chain_cost(costs, plan, "period") * (1 + 1e-9)


@pytest.mark.litert
@pytest.mark.parametrize(("space", "name"), [("branches", "latency-p99"), ("coexecution", "occupancy")])
def test_they_are_measured(capsys: pytest.CaptureFixture[str], space: str, name: str) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--space", space, "--processors", "cpu0,cpu1", "--budget", "4"]
    assert main([*words, "--objective", name, "-q", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"][OBJECTIVES[name].key]["median"] > 0.0
    assert found["best"]["identical"] is not False
