"""What freedoms and objectives refuse, studies of several models with storage, warm start and limits; least work."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.cli import main
from optimizer.exact.bound import relax
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.study.history import WARM
from optimizer.study.log import read_log
from search_spaces.core.graph import Graph, Operator, Tensor
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from tests.support.sentences import says

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "--budget", "6"]
MODEL = "squeezenet1_1@0.25/64+spectrum"

pytestmark = pytest.mark.usefixtures("elsewhere", "few_steps")


def test_a_freedom_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, *STUDY, "--allow", "cuts,magic"]) == 2
    says(capsys.readouterr().err)


def several(*more: str) -> tuple[int, dict[str, Any]]:
    """Run a study of the cuts of two models; return its exit code and document."""
    models = ["--model", "squeezenet1_1@0.25/64", "--model", "mobilenet_v1@0.25/128"]
    words = [*models, *STUDY, "--allow", "cuts", "--json"]
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([*words, *more])
    return code, json.loads(out.getvalue() or "{}")


def test_workers_share_a_study_of_several_models() -> None:
    shared = ["--storage", "sqlite:///x.db", "--study", "x"]
    code, first = several(*shared, "--out", "a")
    assert code == 0
    code, second = several(*shared, "--out", "b")
    assert code == 0
    assert second["unique_plans"] == first["unique_plans"] == 6  # the budget is that of all workers together
    assert {r.kind for r in read_log(Path("b", "trials.jsonl")).records} >= {"prices", "trial", "baseline", "verdict"}


def test_a_study_of_several_models_takes_over_an_earlier_one() -> None:
    code, first = several("--out", "a")
    assert code == 0
    code, second = several("--out", "b", "--warm-start", "a")
    assert code == 0
    taken = {r.data["origin"] for r in read_log(Path("b", "trials.jsonl")).records if r.kind == "baseline"}
    assert taken == {WARM}
    assert second["best"]["latency_ms"]["median"] <= first["best"]["latency_ms"]["median"]
    code, other = several("--out", "c", "--warm-start", "a", "--objective", "makespan")
    assert code == 0
    assert other["objective"] == "makespan"
    code, _ = several("--out", "d", "--warm-start", "c", "--objective", "makespan")
    assert code == 0


def test_energy_of_several_models_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    power = ["--power", "1large=2", "--power", "1small=0.4", "--power", "gpu=1"]
    code, free = several("--out", "a", "--objective", "latency", "--objective", "energy", *power)
    assert code == 0
    least = min(plan["values"]["energy_mj"] for plan in free["front"]["plans"])
    code, limited = several(*power, "--out", "b", "--max-energy", f"{least * 1.0001:.9f}")
    assert code == 0
    assert limited["best"]["figures"]["energy"] * 1e3 <= least * 1.0002
    # Baselines alone: where no plan keeps a limit, the search for one takes minutes of a slow machine.
    code, _ = several(*power, "--out", "c", "--max-energy", "0.000001", "--budget", "3")
    assert code == 3
    says(capsys.readouterr().err.splitlines()[-1])


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3))
def test_no_period_is_below_the_least_work(seed: int, operators: int, many: int) -> None:
    rng = np.random.default_rng(seed)
    shared = rng.random() < 0.5
    processors = tuple(
        Processor(f"p{i}", "cpu", {"core" if shared and i < 2 else f"core{i}": 1.0}, like=f"p{i}") for i in range(many)
    )
    times = rng.random((many, operators))
    if many > 1:
        times[1, rng.integers(operators)] = np.inf
    costs = ChainCosts(Platform("p", processors), times, rng.random(many), np.zeros((operators, many, many)))
    stages = tuple(Stage((o,), f"p{rng.integers(many)}") for o in range(operators))
    plan = Plan("digest", stages)
    names = tuple(Tensor(f"t{i}", (1,), "float32", 4) for i in range(operators + 1))
    steps = tuple(Operator("X", (i,), (i + 1,)) for i in range(operators))
    work_s = relax(Graph("g", names, steps, (0,), (operators,)), costs).work_s
    assert work_s <= chain_cost(costs, plan, "period") * (1 + 1e-9)
