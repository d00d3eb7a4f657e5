"""Freedoms, objectives and states together, in studies and in campaigns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.objectives import OBJECTIVES
from optimizer.cli import main
from optimizer.exact.front import undominated
from tests.composition import SUBSETS
from tests.laws.test_composition import MODEL, STUDY
from tests.support.commands import SEARCHED, answered
from tests.support.sentences import says

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")

POWERS = ["--power", "1large=2", "--power", "1small=0.5", "--power", "gpu=12"]
EVERY = SUBSETS[-1]


def study(capsys: pytest.CaptureFixture[str], allow: str, *words: str) -> dict[str, Any]:
    error = ("--max-error", "0.5") if "ranks" in allow else ()
    powers = POWERS if {"energy", "--max-energy"} & set(words) else ()
    return answered(capsys, ["--model", MODEL, "--allow", allow, *STUDY, *powers, *error, *words, "-q"])


@pytest.mark.parametrize("allow", ["cuts,branches", EVERY])
def test_several_give_a_front(capsys: pytest.CaptureFixture[str], allow: str) -> None:
    found = study(capsys, allow, "--objective", "latency", "--objective", "energy", "--budget", "12")
    table = [list(each["values"].values()) for each in found["front"]["plans"]]
    assert len(undominated(np.array(table))) == len(table) >= 1


@pytest.mark.parametrize("allow", ["cuts,branches", EVERY])
def test_energy_is_limited_where_plans_are_no_chains(capsys: pytest.CaptureFixture[str], allow: str) -> None:
    free = study(capsys, allow, "--max-energy", "1000", "--out", "free")["best"]["figures"]["energy"]
    words = ["--model", MODEL, "--allow", allow, *STUDY, *POWERS, "--max-energy", "1e-6", "-q"]
    assert main(words) == 3
    says(capsys.readouterr().err)
    assert free > 0


def test_more_freedom_is_never_worse_in_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for allow in SUBSETS:
        found[allow] = study(capsys, allow, "--out", allow)["best"]["latency_ms"]["median"]
    for allow, best in found.items():
        for other, less in found.items():
            if set(other.split(",")) < set(allow.split(",")):
                assert best <= less * (1 + 1e-9), (allow, other)


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
    says(capsys.readouterr().out)
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
    says(capsys.readouterr().err.splitlines()[-1])


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
