"""``--deadline``: plans that clearly miss it are not run; if all do, the error names demand, bound and gap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import main
from optimizer.study.limits import TRUST
from optimizer.study.log import read_log
from tests.support.sentences import says

STUDY = ["--model", "squeezenet1_1", "--evaluator", "cost-model", "--platform", "snapdragon855", "--max-stages", "3"]
STUDY += ["--budget", "40", "--sampler", "random", "-q", "--out", "run"]

pytestmark = pytest.mark.usefixtures("elsewhere")


def trials() -> list[Mapping[str, Any]]:
    return [record.data for record in read_log(Path("run/trials.jsonl")).records if record.kind == "trial"]


def best_ms(capsys: pytest.CaptureFixture[str]) -> float:
    assert main([*STUDY[:-1], "first", "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["best"]["latency_ms"]["median"])


def test_what_the_model_expects_to_miss_it_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    deadline_ms = 1.1 * best_ms(capsys)
    assert main([*STUDY, "--deadline", f"{deadline_ms}"]) == 0
    proposed = [t for t in trials() if t["origin"] == "random" and t["repeat_of"] is None]
    late = [t for t in proposed if t["failure"].startswith("infeasible: misses --deadline ")]
    assert len(late) > 5
    for trial in (t for t in proposed if t["measurement"]):
        assert max(trial["measurement"]["latency_s"]["values_s"]) * 1e3 < TRUST * deadline_ms * 1.01
    assert all(t["measurement"] is None for t in late)


def test_what_others_are_compared_with_is_run_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STUDY, "--deadline", f"{1.1 * best_ms(capsys)}"]) == 0
    named = [t for t in trials() if t["origin"] not in {"random", "random draw", "model optimum"}]
    assert len(named) > 1
    assert all(t["measurement"] for t in named)


@pytest.mark.parametrize(("share", "runs"), [(0.5, False), (0.95, True)])
def test_where_nothing_keeps_it_that_is_said(capsys: pytest.CaptureFixture[str], share: float, *, runs: bool) -> None:
    best = best_ms(capsys)
    assert main([*STUDY, "--deadline", f"{share * best:.3f}"]) == 3
    err = capsys.readouterr().err
    says(err)
    assert err.count("\n") == 1
    assert Path("run/result.json").exists() == runs


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_deadline_is_a_time(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main([*STUDY, "--deadline", value]) == 2
    assert "--deadline" in capsys.readouterr().err
