"""What the shipped profiles of the seeds' devices say of the figures that the seeds publish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evaluators.cost_model.features import operator_features
from evaluators.cost_model.plans import PlanSimulator
from evaluators.cost_model.profile import CostProfile, find_profile
from evaluators.cost_model.session import CostModelEvaluator
from evaluators.cost_model.transfers import prices
from optimizer.model.baselines import SEED_003, baselines
from optimizer.model.bounds import price_of
from optimizer.model.profile import known_profile
from optimizer.model.segments import segment_baselines, segment_estimate
from search_spaces.core.platform import Platform
from search_spaces.models.zoo import draft
from search_spaces.spaces.segment_space import SegmentSpace
from tests.support.narrowing import there

REFERENCE = Path(os.environ.get("PARTITION_OPTIMIZER_REFERENCE", Path(__file__).parents[4] / "shared" / "reference"))
pytestmark = pytest.mark.skipif(
    not (REFERENCE / "published.yaml").is_file(),
    reason=f"the published figures are not at {REFERENCE} (PARTITION_OPTIMIZER_REFERENCE)",
)


@pytest.fixture(scope="module")
def published() -> Any:
    return yaml.safe_load((REFERENCE / "published.yaml").read_text(encoding="utf-8"))


def shipped(name: str) -> tuple[CostProfile, Platform]:
    return there(find_profile(name))


def test_seed_000_the_way_to_cut_decides(published: Any) -> None:
    figures = published["seed_000_vgg16_exynos2200_gpu"]
    profile, platform = shipped("exynos2200")
    graph = draft("vgg16").graph()
    simulator = PlanSimulator(graph, platform, prices(profile, graph, platform))
    predicted = {b.name: simulator.latency_s(b.plan) * 1e3 for b in baselines(graph, platform, "gpu")}
    measured = {"whole on gpu": figures["unpartitioned"], "every layer": figures["layer_by_layer"]}
    for criterion in ("layer_length", "layer_type", "parameter_count"):
        for parts, took in figures[criterion].items():
            measured[f"{criterion.replace('_', ' ')} {parts[0]}={parts[1]}"] = took
    assert predicted.keys() == measured.keys()
    error = np.array([predicted[n] / measured[n] - 1 for n in measured])
    assert np.sum(np.abs(error) <= 0.1) >= 8
    assert min(predicted, key=predicted.__getitem__) == min(measured, key=measured.__getitem__) == "layer type K=2"
    assert predicted["parameter count K=2"] > predicted["whole on gpu"]


def test_seed_003_one_after_another(published: Any) -> None:
    features = operator_features(draft("squeezenet1_0").graph())
    took = shipped("zcu102")[0].predict_whole(features, "npu")
    assert took * 1e3 == pytest.approx(published["seed_003_squeezenet_zcu102"]["sequential"], rel=1e-3)


def test_seed_003_branches_by_the_seeds_procedure(published: Any) -> None:
    figures = published["seed_003_squeezenet_zcu102"]
    (profile, platform), graph = shipped("zcu102"), draft("squeezenet1_0").graph()
    with CostModelEvaluator(profile, platform).prepare(platform) as session:
        space, known = SegmentSpace(graph, platform, splits=False), known_profile(session.part_costs(graph), platform)
        costs = segment_estimate(graph, known.costs(platform), space).costs
        rows = segment_baselines(graph, platform, space, costs, known.fastest(platform))
        plan = next(row.plan for row in rows if row.name == SEED_003)
        assert price_of(graph, session)(plan) * 1e3 == pytest.approx(figures["branch_parallel"], rel=1e-3)
    assert sum(part.axis == "branches" for part in space.parts(plan)) == figures["groups_run_in_parallel"]


@pytest.mark.parametrize("name", ["snapdragon855", "snapdragon865", "snapdragon888", "kirin990"])
def test_seed_002_models_on_each_processor(published: Any, name: str) -> None:
    profile, _ = shipped(name)
    codl = published["seed_002_codl"]
    for processor in ("cpu", "gpu"):
        predicted = [
            profile.predict_whole(operator_features(draft(m).graph()), processor) * 1e3 for m in codl["models"]
        ]
        error = np.abs(np.array(predicted) / np.array(codl[name][processor]) - 1)
        assert np.median(error) <= 0.25
