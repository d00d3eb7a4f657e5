"""Entries of ``OBJECTIVES``: which fields go together, how each aggregation measures, and what their defects print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evaluators.base import Batch
from evaluators.energy import Counter
from evaluators.objectives import Objective, PlacedModel, PricedCandidate, Pricing
from evaluators.simulated import Prediction
from search_spaces.core.errors import OptimizeError, UnavailableError
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform, Processor
from tests.support.sentences import fails
from tests.support.strategies import chain_graph

PLATFORM = Platform(
    "small", (Processor("cpu", "cpu", {"core": 1.0}, "cpu"), Processor("gpu", "gpu", {"gpu": 1.0}, "gpu"))
)
GRAPH = chain_graph(3)
PLAN = Plan(GRAPH.digest, (Stage((0,), "cpu"), Stage((1, 2), "gpu")))
ERRORS = np.array([0.1, 0.2])


def entry(aggregation: Any, **fields: Any) -> Objective:
    return Objective("new", "a new one", "J", "mJ", aggregation, "new_mj", **fields)


def run(objective: Objective, powers: Mapping[str, float] | None = None) -> Batch:
    """Return two runs of 3 s, with stages of 1 and 2 s."""
    inner = Prediction(Batch(np.array([3.0]), np.array([[1.0, 2.0]]), None, ERRORS))
    how = Pricing(objective, PLATFORM, powers or {})
    return PricedCandidate(inner, PLAN, (how,), lambda: [PlacedModel(GRAPH, PLAN)]).run(2)


def of_plan(models: Any) -> float:
    return float(len(models[0].plan.stages))


def longest(_: float, stage_s: NDArray[np.float64], __: NDArray[np.float64]) -> float:
    return float(stage_s.max())


def product(run_s: float, stage_s: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return run_s * float(stage_s @ weights)


def watts(_: Platform, powers: Mapping[str, float]) -> Mapping[str, float]:
    return powers


@pytest.mark.parametrize(
    ("aggregation", "fields"),
    [
        ("path", {"of_plan": of_plan}),
        ("plan", {}),
        ("run", {}),
        ("path", {"of_run": longest}),
        ("sum", {"least": lambda _: 1.0}),
        ("busiest", {"per_second": watts}),
        ("sum", {"quantile": 0.9}),
        ("path", {"quantile": 99.0}),
        ("slowest", {}),
    ],
)
def test_fields_that_do_not_go_together_are_reported(aggregation: str, fields: dict[str, Any]) -> None:
    with fails(OptimizeError):
        entry(aggregation, **fields)


@pytest.mark.parametrize(
    ("objective", "value"),
    [
        (entry("path"), 3.0),
        (entry("path", quantile=0.9), 3.0),
        (entry("sum", per_second=watts, of_powers=True), 1.0 * 5.0 + 2.0 * 7.0),
        (entry("plan", of_plan=of_plan), 2.0),
        (entry("run", of_run=longest), 2.0),
        (entry("run", of_run=product, per_second=watts, of_powers=True), 3.0 * 19.0),
    ],
)
def test_each_aggregation_measures(objective: Objective, value: float) -> None:
    found = run(objective, {"cpu": 5.0, "gpu": 7.0})
    assert found.latency_s == pytest.approx([value, value])
    assert (found.errors is None) == (objective.aggregation == "plan")  # predictions keep the errors of the profile


def fail(*_: object) -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    "objective",
    [
        entry("plan", of_plan=fail),
        entry("run", of_run=fail),
        entry("sum", per_second=fail),
        entry("plan", of_plan=lambda _: 0.0),
        entry("run", of_run=lambda *_: float("nan")),
        entry("sum", per_second=lambda *_: {"cpu": 1.0}),
        entry("sum", per_second=lambda *_: {"cpu": 1.0, "gpu": -1.0}),
        entry("sum", per_second=lambda *_: {"cpu": 0.0, "gpu": 0.0}),
    ],
)
def test_a_defect_names_the_objective(objective: Objective) -> None:
    with fails(OptimizeError) as caught:
        run(objective)
    assert not isinstance(caught.value, UnavailableError)  # which would only drop the plan


def test_a_processor_without_a_weight_is_reported() -> None:
    how = Pricing(entry("sum"), Platform("less", PLATFORM.processors[:1]), {})
    with fails(UnavailableError):
        PricedCandidate(Prediction(Batch(np.array([3.0]), np.array([[1.0, 2.0]]))), PLAN, (how,)).run(1)


def test_a_meter_that_does_not_count_is_reported() -> None:
    meter = Counter("RAPL", [(lambda: 7.0, None)])
    how = Pricing(entry("sum", per_second=watts, of_powers=True), PLATFORM, {}, meter)
    inner = Prediction(Batch(np.array([3.0]), np.array([[1.0, 2.0]])))
    with fails(UnavailableError):
        PricedCandidate(inner, PLAN, (how,)).run(1)
