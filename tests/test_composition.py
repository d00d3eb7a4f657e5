"""Freedoms, objectives and states together, in studies and in campaigns."""

from __future__ import annotations

import csv
import json
from itertools import combinations
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
from search_spaces.registry import FREEDOMS
from tests.commands import SEARCHED, answered

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "--budget", "6"]
POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]
MODEL = "squeezenet1_1@0.25/64+spectrum"
SUBSETS = [",".join(("cuts", *more)) for n in range(4) for more in combinations(FREEDOMS[1:], n)]
EVERY = SUBSETS[-1]
NAMES = list(OBJECTIVES)
CELLS = dict.fromkeys(
    [(subset, NAMES[i % len(NAMES)]) for i, subset in enumerate(SUBSETS)] + [(EVERY, name) for name in NAMES]
)

pytestmark = pytest.mark.usefixtures("elsewhere")


def study(capsys: pytest.CaptureFixture[str], allow: str, *words: str) -> dict[str, Any]:
    error = ("--max-error", "0.5") if "ranks" in allow else ()
    powers = POWERS if "energy" in words else []
    return answered(capsys, ["--model", MODEL, "--allow", allow, *STUDY, *powers, *error, *words, "-q"])


@pytest.mark.parametrize(("allow", "name"), list(CELLS))
def test_freedoms_and_objectives_go_together(capsys: pytest.CaptureFixture[str], allow: str, name: str) -> None:
    objective = OBJECTIVES[name]
    found = study(capsys, allow, "--objective", name)
    best = found["best"][objective.key]["median"]
    others = [each[objective.key]["median"] for each in found["baselines"].values() if each and each[objective.key]]
    assert others
    assert best <= min(others) * (1 + 1e-9)
    assert found[f"model_bound_{objective.shown.lower()}"] <= best * (1 + 1e-6)
    assert found["unique_plans"] == 6


@pytest.mark.parametrize("allow", ["cuts,branches", EVERY])
def test_several_give_a_front(capsys: pytest.CaptureFixture[str], allow: str) -> None:
    found = study(capsys, allow, "--objective", "latency", "--objective", "energy", "--budget", "12")
    table = [list(each["values"].values()) for each in found["front"]["plans"]]
    assert len(undominated(np.array(table))) == len(table) >= 1


def test_states_go_with_all_freedoms_and_with_the_latency_alone(capsys: pytest.CaptureFixture[str]) -> None:
    states = ("--state", "cool:", "--state", "hot:gpu=3")
    for allow in ("cuts,ranks", EVERY):
        found = study(capsys, allow, *states, "--out", allow)
        assert found["best"]["latency_ms"]["median"] > 0
    assert main(["--model", MODEL, *STUDY, *states, "--objective", "energy"]) == 2
    assert "--state tells how much longer lanes take" in capsys.readouterr().err


@pytest.mark.parametrize("allow", ["cuts,branches", EVERY])
def test_energy_is_limited_where_plans_are_no_chains(capsys: pytest.CaptureFixture[str], allow: str) -> None:
    free = study(capsys, allow, "--max-energy", "1000", "--out", "free")["best"]["figures"]["energy"]
    words = ["--model", MODEL, "--allow", allow, *STUDY, *POWERS, "--max-energy", "1e-6", "-q"]
    assert main(words) == 3
    assert "energy of an inference" in capsys.readouterr().err
    assert free > 0


def test_more_freedom_is_never_worse_in_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for allow in SUBSETS:
        found[allow] = study(capsys, allow, "--out", allow)["best"]["latency_ms"]["median"]
    for allow, best in found.items():
        for other, less in found.items():
            if set(other.split(",")) < set(allow.split(",")):
                assert best <= less * (1 + 1e-9), (allow, other)


def test_a_freedom_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, *STUDY, "--allow", "cuts,magic"]) == 2
    assert "there is no freedom 'magic'; give some of cuts, branches, splits, ranks" in capsys.readouterr().err


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
  allow: [cuts, "cuts,branches,splits"]
  objective: [latency, throughput, energy]
  max_stages: 2
  budget: 4
exclude: [{allow: "cuts,branches,splits", objective: latency}, {allow: "cuts,branches,splits", objective: energy}]
settings: {power: [1large=2, 1small=0.5, gpu=12]}
"""
    (tmp_path / "aims.yaml").write_text(text)
    assert main(["run", "aims.yaml", "--dry-run", "--json"]) == 0
    assert not any(each["problem"] for each in json.loads(capsys.readouterr().out)["studies"])
    assert main(["run", "aims.yaml", "--out", "out", "-q"]) == 0
    assert "4 of 4 studies are done" in capsys.readouterr().out
    with Path("out/summary.csv").open() as file:
        rows = {(row["allow"], row["objective"]): row for row in csv.DictReader(file)}
    assert {objective: rows["cuts", objective]["unit"] for objective in ("latency", "throughput", "energy")} == {
        "latency": "ms",
        "throughput": "ms",
        "energy": "mJ",
    }
    assert float(rows["cuts", "energy"]["best"]) > 0.0
    assert rows["cuts", "energy"]["best_ms"] == ""
    assert rows["cuts", "latency"]["best_ms"] == rows["cuts", "latency"]["best"]
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
@pytest.mark.parametrize(
    ("allow", "name"),
    [("cuts,branches", "latency-p99"), (EVERY, "latency"), (EVERY, "memory")],
)
def test_they_are_measured(capsys: pytest.CaptureFixture[str], allow: str, name: str) -> None:
    words = ["--model", MODEL, "--allow", allow, "--processors", "cpu0,cpu1", "--budget", "4"]
    words += ["--max-error", "0.5"] if "ranks" in allow else []
    assert main([*words, "--objective", name, "-q", "--json"]) in SEARCHED
    found = json.loads(capsys.readouterr().out)
    assert found["best"][OBJECTIVES[name].key]["median"] > 0.0
    if "ranks" not in allow:
        assert found["best"]["identical"] is not False or "splits" in allow
