"""What the shipped profiles of the seeds' devices say of the figures that the seeds publish."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from evaluators.cost_model.features import operator_features
from evaluators.cost_model.figures import Figure, read_figures
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import CostProfile, find_profile
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.cost_model.transfers import prices
from optimizer.model.baselines import SEED_003, baselines
from optimizer.model.bounds import price_of
from optimizer.model.profile import known_profile
from optimizer.model.segments import segment_baselines, segment_estimate
from optimizer.tools.figures import fit_figures, prepared
from search_spaces.core.bounded import plain
from search_spaces.core.platform import Platform
from search_spaces.models.zoo import draft
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.narrowing import there

FIGURES = Path(__file__).parents[3] / "experiments" / "figures"
QUICK = ("xavier", "zcu102", "odroid-xu4", "snapdragon855", "snapdragon865", "snapdragon888", "kirin990")


@cache
def figures(name: str) -> tuple[Figure, ...]:
    return read_figures(FIGURES / f"{name}.yaml").content.figures


def shipped(name: str) -> tuple[CostProfile, Platform]:
    return there(find_profile(name))


def numbers(value: object) -> list[float]:
    """Return all numbers of plain values, in their order; None is -1."""
    match value:
        case Mapping():
            return [number for each in value.values() for number in numbers(each)]
        case list() | tuple():
            return [number for each in value for number in numbers(each)]
        case None:
            return [-1.0]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", QUICK)
def test_shipped_profiles_are_what_their_figures_give(name: str, tmp_path: Path) -> None:
    fitted = fit_figures(FIGURES / f"{name}.yaml", tmp_path / "out.json").profile
    profile, _ = shipped(name)
    assert numbers(plain(CostProfile, fitted)) == pytest.approx(numbers(plain(CostProfile, profile)), rel=2e-4)
    assert profile.provenance["fitted_by"] == f"optimize calibrate --figures experiments/figures/{name}.yaml"


def test_the_profile_of_seed_000_is_what_its_figures_give() -> None:
    read, fit, _ = prepared(FIGURES / "exynos2200.yaml")
    found, (profile, _) = fit.fit(), shipped("exynos2200")
    known = {name: row["value"] for name, row in profile.errors["parameters"].items()}
    assert found.values == pytest.approx(known, rel=1e-4)
    gpu = read.content.profile(known, {}).processors["gpu"]
    assert {k: m.prices for k, m in gpu.kernels.items()} == {k: m.prices for k, m in profile["gpu"].kernels.items()}
    assert gpu.invocation_s == profile["gpu"].invocation_s


def test_seed_000_the_way_to_cut_decides() -> None:
    profile, platform = shipped("exynos2200")
    graph = draft("vgg16").graph()
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    predicted = {b.name: simulator.latency_s(b.plan) * 1e3 for b in baselines(graph, platform, "gpu")}
    measured = {f.plan: there(f.ms) for f in figures("exynos2200")}
    assert predicted.keys() == measured.keys()
    error = np.array([predicted[n] / measured[n] - 1 for n in measured])
    assert np.sum(np.abs(error) <= 0.1) >= 8
    assert min(predicted, key=predicted.__getitem__) == min(measured, key=measured.__getitem__) == "layer type K=2"
    assert predicted["parameter count K=2"] > predicted["whole on gpu"]


def test_seed_003_one_after_another() -> None:
    features = operator_features(draft("squeezenet1_0").graph())
    took = shipped("zcu102")[0].predict_whole(features, "npu")
    assert took * 1e3 == pytest.approx(there(figures("zcu102")[0].ms), rel=1e-3)


def test_seed_003_branches_by_the_seeds_procedure() -> None:
    (profile, platform), graph = shipped("zcu102"), draft("squeezenet1_0").graph()
    with CostModelEvaluator(profile, platform).prepare(platform) as session:
        space, known = SegmentSpace(graph, platform, splits=False), known_profile(session.part_costs(graph), platform)
        costs = segment_estimate(graph, known.costs(platform), space).costs
        rows = segment_baselines(graph, platform, space, costs, known.fastest(platform))
        plan = next(row.plan for row in rows if row.name == SEED_003)
        assert price_of(graph, session)(plan) * 1e3 == pytest.approx(there(figures("zcu102")[1].ms), rel=1e-3)
    assert sum(part.axis == "branches" for part in space.parts(plan)) == 4


def test_another_model_of_seed_003s_board_is_far_off(tmp_path: Path) -> None:
    found = fit_figures(FIGURES / "zcu102_by_bytes.yaml", tmp_path / "out.json").profile.errors["figures"]
    sequential, parallel, *_ = found
    assert sequential["fitted_ms"] == pytest.approx(202.72, rel=1e-3)
    assert parallel["use"] == "checked"
    assert parallel["range_ms"] == pytest.approx([191.6, 195.4], abs=0.1)


@pytest.mark.parametrize("name", ["snapdragon855", "snapdragon865", "snapdragon888", "kirin990"])
def test_seed_002_models_on_each_processor(name: str) -> None:
    profile, _ = shipped(name)
    for processor in ("cpu", "gpu"):
        of = [f for f in figures(name) if f.fitted and f.plan == f"whole on {processor}"]
        predicted = [profile.predict_whole(operator_features(draft(there(f.model)).graph()), processor) for f in of]
        error = np.abs(np.array(predicted) * 1e3 / np.array([there(f.ms) for f in of]) - 1)
        assert np.median(error) <= 0.25
