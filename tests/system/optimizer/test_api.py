"""A plan that was searched here runs from Python."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from evaluators.litert.runner import PlanRunner
from optimizer import optimize
from tests.optimizer.test_api import SMALL_MODEL


def test_a_plan_is_run_from_python(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = optimize(SMALL_MODEL, budget=1, processors=["cpu0"], minutes=1.0, out=tmp_path / "run")
    with result.runner() as runner:
        assert isinstance(runner, PlanRunner)
        found = runner.run(np.zeros((1, 64, 64, 3), np.float32))
    assert len(found) == len(result.graph.outputs)
