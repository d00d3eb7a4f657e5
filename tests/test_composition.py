"""What freedoms and objectives refuse, and the least work that any plan does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.cli import main
from optimizer.exact.chain_costs import ChainCosts, chain_cost
from optimizer.objective_spaces import least_work
from search_spaces.plan import Plan, Stage
from search_spaces.platform import Platform, Processor

STUDY = ["--evaluator", "cost-model", "--platform", "pixel4", "--processors", "1large,1small,gpu", "--budget", "6"]
MODEL = "squeezenet1_1@0.25/64+spectrum"

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_freedom_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, *STUDY, "--allow", "cuts,magic"]) == 2
    assert "there is no freedom 'magic'; give some of cuts, branches, splits, ranks" in capsys.readouterr().err


def test_several_models_are_asked_what_they_know(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "squeezenet1_1@0.25/64", "--model", "mobilenet_v1@0.25/128", *STUDY]
    for option in (["--storage", "sqlite:///x.db", "--study", "x"], ["--warm-start", "x"]):
        assert main([*words, *option]) == 2
        assert f"{option[0]}: is not supported with several models" in capsys.readouterr().err


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
