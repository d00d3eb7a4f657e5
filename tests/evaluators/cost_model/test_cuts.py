"""What a cut costs on a processor, and what an operator waits for only where operators are timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluators.cost_model.calibrate_profile import cut_costs
from evaluators.cost_model.calibrate_time import Timed
from evaluators.cost_model.features import operator_features
from evaluators.cost_model.fit import TimedModel, awake, fit_processor, waited_s
from evaluators.cost_model.kernels import KernelModel
from evaluators.cost_model.profile import CostProfile, ProcessorProfile, forgotten
from evaluators.cost_model.session import CostModelSession
from evaluators.cost_model.transfers import prices
from evaluators.workload.lowered import Lowerings
from optimizer.tools.calibrate import calibrate
from search_spaces.core.errors import ProfileError
from search_spaces.core.joined_graph import merge
from search_spaces.core.platform import Platform
from search_spaces.core.workload import workload_of
from search_spaces.models import load
from search_spaces.models.zoo.builder import Builder
from search_spaces.rewrites.lower import lowering
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part
from tests.support.cost_model import networks
from tests.support.narrowing import there
from tests.support.sentences import fails
from tests.support.strategies import chain_graph, one_core
from tests.system.evaluators.cost_model.test_calibrate import make_small

WAIT_S, CALL_S = 2e-5, 3e-6


def timed(count: int = 14) -> list[TimedModel]:
    """Networks by a law: 50 GMAC/s and 10 GB/s; the first operator of each waits where operators are timed."""
    found = []
    for index, draft in enumerate(networks([f"n{i}" for i in range(count)], 5)):
        features = operator_features(draft.graph())
        seconds = np.array([np.nan if f.free else 2e-6 + f.macs / 5e10 + f.read_bytes / 1e10 for f in features])
        whole_s = float(np.nansum(seconds)) + CALL_S
        seconds[next(i for i, f in enumerate(features) if not f.free)] += WAIT_S
        found.append(TimedModel(f"n{index}", str(index), features, whole_s, seconds))
    return found


def test_a_wait_is_told_from_work() -> None:
    models = timed()
    assert waited_s(models, CALL_S) == pytest.approx(WAIT_S, rel=0.05)
    assert waited_s(models) == pytest.approx(WAIT_S - CALL_S, rel=0.05)
    assert waited_s(models[:4]) == 0.0
    unknown = [replace(m, whole_s=float("nan")) for m in models]
    assert waited_s(unknown) == 0.0


def test_only_the_first_operator_waited_and_keeps_a_part() -> None:
    model = timed(1)[0]
    less = model.operator_s - awake(model, WAIT_S).operator_s
    first = next(i for i, f in enumerate(model.features) if not f.free)
    assert less[first] == pytest.approx(WAIT_S)
    assert np.nansum(less) == pytest.approx(WAIT_S)
    nearly_all = awake(model, 0.9 * model.operator_s[first])
    assert nearly_all.operator_s[first] == pytest.approx(model.operator_s[first] / 4)
    assert awake(model, 1.0) is model  # none took as long
    assert awake(model, 0.0) is model


def test_a_network_that_is_not_watched_is_predicted_without_the_wait() -> None:
    models = timed()
    profile = CostProfile("fitted", {"core": fit_processor(models, tune=False, invocation_s=CALL_S)})
    off = [profile.predict_whole(m.features, "core") / m.whole_s - 1.0 for m in models]
    assert profile["core"].invocation_s >= CALL_S
    assert float(np.median(np.abs(off))) < 0.02
    assert abs(float(np.mean(off))) < 0.02


def test_a_damaged_time_is_reported_before_anything_is_fitted() -> None:
    (model,) = timed(1)
    for change in ({"whole_s": 0.0}, {"operator_s": np.full_like(model.operator_s, np.inf)}):
        with fails(ProfileError):
            fit_processor([*timed(), replace(model, **change)], tune=False)
    for nothing in ([], [replace(model, operator_s=np.full_like(model.operator_s, np.nan))]):
        with fails(ProfileError):
            fit_processor(nothing)


def cut_up(call_s: float, far_s: float, byte_s: float, reference_s: float = 1e-3) -> list[Timed]:
    """Networks, each slower than the one before, whose operators take longer as stages by a law."""
    found = []
    for number, model in enumerate(timed()):
        nbytes = np.array([f.read_bytes + f.written_bytes for f in model.features])
        slower = reference_s / 1e-3
        whole_s = 1e-3 * (1.0 + number)
        more_s = call_s + far_s * forgotten(whole_s) + byte_s * nbytes
        own_s, apart_s = model.operator_s * slower, (model.operator_s + more_s) * slower
        found.append(
            Timed(model.name, "core", model.features, own_s, whole_s * slower, reference_s, 1, stage_s=apart_s)
        )
    return found


@pytest.mark.parametrize(
    "law", [(4e-6, 0.0, 0.0), (4e-6, 6e-6, 2e-11), (0.0, 3e-6, 1e-10), (3e-5, 0.0, 3e-10), (0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("reference_s", [1e-3, 2e-3])
def test_what_a_stage_costs_is_told_from_what_its_operators_take(
    law: tuple[float, float, float], reference_s: float
) -> None:
    cut = cut_up(*law, reference_s)
    cut[-1] = replace(cut[-1], stage_s=10.0 * there(cut[-1].stage_s))  # disturbed
    call_s, far_s, byte_s = cut_costs(cut, 1e-3)
    assert (call_s, far_s) == pytest.approx(law[:2], rel=0.05, abs=3e-8)
    assert byte_s == pytest.approx(law[2], rel=0.1, abs=1e-13)


def test_networks_that_were_not_cut_tell_nothing_of_stages() -> None:
    assert cut_costs([replace(t, stage_s=None) for t in cut_up(4e-6, 0.0, 0.0)], 1e-3) == (0.0, 0.0, 0.0)


def test_what_a_cut_costs_is_in_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    monkeypatch.setattr("evaluators.cost_model.calibrate_profile.cut_costs", lambda *_: (4e-6, 2e-6, 1e-12))
    found = calibrate(tmp_path / "x.json", ["cpu0"], 5.0, evaluator="synthetic").profile["core"]
    assert found.invocation_s >= 4e-6
    assert (found.far_call_s, found.io_s_per_byte) == (2e-6, 1e-12)
    assert found.call_s(1.0) == pytest.approx(found.invocation_s + 2e-6, rel=1e-4)


def test_a_stage_costs_more_where_inferences_are_long() -> None:
    graph, core = chain_graph(3), Platform("one", (one_core(0),))
    for seconds in (1e-4, 3e-3, 1.0):  # of each operator: all launches take as long
        kernels = {"elementwise": KernelModel({"launch": seconds}), "other": KernelModel({"launch": seconds})}
        profile = CostProfile(
            "x", {core.processors[0].like: ProcessorProfile(kernels, invocation_s=2e-6, far_call_s=4e-6)}
        )
        found = prices(profile, graph, core)
        assert found.invocation_s == pytest.approx(2e-6 + 4e-6 * forgotten(float(found.operator_s.sum())), rel=1e-9)


def test_operators_that_are_left_out_take_no_part_of_an_inference(tmp_path: Path) -> None:
    layers = Builder("shared")
    shared = layers.conv(layers.input((1, 16, 16, 4)), 8, 1, "shared")
    layers.finish(layers.conv(shared, 8, 1, "whole")).write(tmp_path / "shared.tflite")
    graph, cores = load(str(tmp_path / "shared.tflite")), Platform("two", (one_core(0), one_core(1)))
    plan = SegmentSpace(graph, cores).plan((Part(0, 1, ("cpu0", "cpu1"), "height", 8), Part(1, 2, ("cpu0",))))
    kernels = {kind: KernelModel({"launch": 3e-3}) for kind in ("pointwise", "copy", "concat")}
    core = ProcessorProfile(kernels, invocation_s=2e-6, far_call_s=4e-6)
    session = CostModelSession(CostProfile("x", {cores.processors[0].like: core}), cores)
    sides = lowering(graph).lower(plan)
    assert len(sides.graph.operators) == 6  # two slices, two sides, their join, and the whole one
    found = session.prices(sides.in_place(cores))
    np.testing.assert_allclose(found.invocation_s, core.call_s(3e-3 + 3e-3), rtol=1e-9)
    each_s = 3e-3 + core.call_s(3e-3 + 3e-3)
    np.testing.assert_allclose(session.load(graph, plan).one.stage_s, each_s, rtol=1e-9)
    joined = merge("one of several", [("m", graph)])
    of_several = replace(plan, graph_digest=joined.graph.digest)
    model = Lowerings(workload_of("squeezenet1_1"), joined, cores).lower(of_several, 0, range(len(plan.stages)))
    jobs_s = [session.simulator_of(model.lowered).stage(0, operators)[0] for operators in model.operators]
    np.testing.assert_allclose(jobs_s, [each_s] * 3, rtol=1e-9)
