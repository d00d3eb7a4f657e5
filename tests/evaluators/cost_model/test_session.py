from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluators.base import Evaluator
from evaluators.contract import EvaluatorContract, example_graph
from evaluators.cost_model.features import KERNELS, operator_features
from evaluators.cost_model.kernels import KernelModel, Tile
from evaluators.cost_model.profile import (
    ContentionProfile,
    CostProfile,
    LinkProfile,
    ProcessorProfile,
    find_profile,
    from_json,
    profile_digest,
    read_profile,
    to_json,
)
from evaluators.cost_model.session import CostModelEvaluator, CostModelSession
from evaluators.registry import make_evaluator
from optimizer.cli import main
from optimizer.model.segments import shared_by
from search_spaces.core.errors import ProfileError, UnavailableError, UsageError
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.core.platform import Platform, Processor
from search_spaces.models.litert import read_model
from search_spaces.models.zoo.builder import Builder
from search_spaces.rewrites.lower import lowering
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from tests.search_spaces.spaces.test_segment_space import TWO, small
from tests.support.narrowing import there
from tests.support.sentences import fails


def toy_platform() -> Platform:
    """Two cores, together and alone, and a slower accelerator with a memory of its own."""
    processors = [Processor("cpu", "cpu", {"core0": 1.0, "core1": 1.0}, "cores")]
    processors += [Processor(f"cpu{i}", "cpu", {f"core{i}": 1.0}, "core") for i in (0, 1)]
    return Platform("toy", (*processors, Processor("gpu", "gpu", {"gpu": 1.0}, "gpu")))


def toy_profile() -> CostProfile:
    """Prices for every kernel, in round numbers."""

    def processor(macs_per_s: float, bytes_per_s: float) -> ProcessorProfile:
        prices = {"macs": 1 / macs_per_s, **dict.fromkeys(("read", "weight", "written"), 1 / bytes_per_s)}
        return ProcessorProfile(
            {name: KernelModel(prices, sigma=0.05, ranges={"macs": (1.0, 1e12)}) for name in KERNELS},
            dispatch_s=1e-6,
            invocation_s=3e-6,
            power_w=3.0,
        )

    return CostProfile(
        "toy",
        {"core": processor(5e10, 1e10), "cores": processor(9e10, 1.5e10), "gpu": processor(2e11, 5e9)},
        (*(LinkProfile(a, "gpu", 5e-5, 2e-10) for a in ("core", "cores")), LinkProfile("core", "core", 2e-6)),
        (ContentionProfile("core", "core", 1.05, 1.4),),
        {"made_by": "hand"},
    )


def toy_evaluator() -> CostModelEvaluator:
    return CostModelEvaluator(toy_profile(), toy_platform())


class TestCostModelKeepsTheContract(EvaluatorContract):
    def evaluator(self) -> Evaluator:
        return toy_evaluator()


def written(tmp_path: Path, profile: CostProfile | None = None) -> Path:
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(to_json(profile or toy_profile(), toy_platform())))
    return path


def test_predictions_are_the_same_again_and_say_how_sure_they_are() -> None:
    graph, platform = example_graph(), toy_platform()
    plan = chain_plan(graph, (3,), ["cpu0", "gpu"])
    batches = []
    for _ in range(2):
        with toy_evaluator().prepare(platform) as session:
            batches.append(session.load(graph, plan, fresh=True).run(3))
    assert np.array_equal(batches[0].latency_s, batches[1].latency_s)
    assert len(set(batches[0].latency_s)) == 1
    assert 0.01 < there(batches[0].relative_sigma) < 0.1


def test_a_plan_costs_what_the_profile_says() -> None:
    graph, profile = example_graph(), toy_profile()
    features = operator_features(graph)
    with toy_evaluator().prepare(toy_platform()) as session:
        plan = chain_plan(graph, (3,), ["cpu0", "gpu"])
        first, second = session.load(graph, plan).run(1).stage_s[0]
        assert first == pytest.approx(profile.predict_whole(features[:3], "core"))
        crossing = graph.tensors[1].nbytes + graph.tensors[2].nbytes  # the branch and the chain
        copied = sum(graph.tensors[t].nbytes for t in graph.boundary(range(3, 8)).inputs) * 2e-10
        assert second == pytest.approx(profile.predict_whole(features[3:], "gpu") + copied)
        assert crossing > 0
        whole = session.load(graph, plan).run(1).latency_s[0]
        assert whole == pytest.approx(first + second + 5e-5)


def test_a_file_holds_all_of_a_profile(tmp_path: Path) -> None:
    path = written(tmp_path)
    profile, platform = read_profile(path)
    assert profile == toy_profile()
    assert platform == toy_platform()
    assert profile_digest(profile) == profile_digest(toy_profile())
    assert profile_digest(profile) != profile_digest(replace(profile, links=()))
    assert profile_digest(replace(profile, provenance={})) == profile_digest(profile)


def test_an_evaluator_takes_its_platform_from_a_profile(tmp_path: Path) -> None:
    evaluator = make_evaluator("cost-model")
    assert isinstance(evaluator, CostModelEvaluator)
    assert evaluator.described("platform.yaml") is None
    assert evaluator.described(written(tmp_path)) == toy_platform()
    with evaluator.prepare(toy_platform()) as session:
        assert session.unsupported_operators(example_graph(), "cpu") == []
        assert session.fingerprint()["profile"] == "toy"


def test_without_a_profile_it_says_how_to_get_one() -> None:
    with fails(UsageError):
        CostModelEvaluator().platform()
    with fails(UnavailableError), CostModelEvaluator().prepare(toy_platform()):
        pass


def test_a_profile_for_another_platform_is_refused() -> None:
    other = Platform("other", (Processor("dsp", "npu", {"dsp": 1.0}, "dsp v68"),))
    with fails(ProfileError), toy_evaluator().prepare(other):
        pass


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(kind="plan"),
        lambda d: d.update(schema_version=99),
        lambda d: d["platform"].update(processors=[]),
        lambda d: d["profile"].pop("processors"),
        lambda d: d["profile"]["processors"]["gpu"].update(invocation_s=-1.0),
        lambda d: d["profile"]["links"][0].update(latency_s="soon"),
        lambda d: d["profile"]["processors"]["gpu"].update(invocation_s=1e300),
        lambda d: next(iter(d["profile"]["processors"]["gpu"]["kernels"].values())).update(history=1e4),
    ],
)
def test_damaged_profiles_are_reported(tmp_path: Path, change: Any) -> None:
    document = to_json(toy_profile(), toy_platform())
    change(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with fails(UsageError):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": "cost profile", "schema_version": NaN}', "\x00"])
def test_what_is_no_profile_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with fails(ProfileError):
        read_profile(path)


def test_a_profile_that_is_not_there() -> None:
    with fails(UsageError):
        find_profile("nowhere.json")
    assert find_profile("nowhere") is None
    assert find_profile("../../etc/passwd") is None
    with fails(ProfileError):
        from_json([])


def test_a_profile_may_be_called_yaml_and_a_platform_is_no_profile(tmp_path: Path) -> None:
    profile = written(tmp_path).rename(tmp_path / "here.yaml")
    assert find_profile(profile) == read_profile(profile)
    (tmp_path / "board.yaml").write_text("name: board\n")
    assert find_profile(tmp_path / "board.yaml") is None
    assert find_profile(tmp_path / "nowhere.yaml") is None


def test_a_study_needs_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "squeezenet1_1@0.25/64", "--evaluator", "cost-model", "--platform", str(written(tmp_path))]
    code = main([*arguments, "--budget", "30", "--out", str(tmp_path / "run"), "--json", "-q"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["platform"]["name"] == "toy"
    assert result["unique_plans"] >= 30
    assert math.isfinite(result["best"]["latency_ms"]["median"])
    assert result["gap"] is None or result["gap"] < 0.2


def one_kernel(kernel: KernelModel, **more: Any) -> CostProfile:
    """Prices of two cores that run every kernel alike."""
    like = TWO.processors[0].like
    return CostProfile("it", {like: ProcessorProfile(dict.fromkeys(KERNELS, kernel))}, **more)


def test_sides_of_a_split_return_to_their_weights_sooner(tmp_path: Path) -> None:
    graph = read_model(small().net.write(tmp_path / "model.tflite"))
    profile = one_kernel(KernelModel({"macs": 1e-9, "far_weight": 1e-8}, Tile(near_s=1e-3)))
    space = SegmentSpace(graph, TWO)
    names = TWO.processors[0].name, TWO.processors[1].name
    session, features = CostModelSession(profile, TWO), operator_features(graph)
    whole_s = profile.predict(features, TWO.processors[0].like).seconds.sum()
    each = []
    for part in (1.0, 15.0):
        lowered = lowering(graph).lower(space.plan(shared_by(space, names, (1.0, part))))
        features = operator_features(lowered.graph)
        alone_s = profile.predict(features, TWO.processors[0].like).seconds
        beside_s = session.simulator_of(lowered).prices.operator_s[0]
        assert np.all(beside_s <= alone_s)
        each.append(beside_s.sum() / alone_s.sum())
    assert each[0] < each[1] < 1.0  # sides of about the same length halve the time from one inference to the next
    assert alone_s.sum() > whole_s


def test_the_bytes_that_cross_are_counted_once(tmp_path: Path) -> None:
    """By hand: of 64 KB, a side reads half; a sum there the other half, and half of what the sides wrote."""
    net = Builder("residual")
    first = net.conv(net.input((1, 32, 32, 16)), 16, 3, "first")
    both = net.add(first, net.conv(first, 16, 1, "split"), "sum")
    net.finish(net.conv(both, 16, 1, "last")).write(tmp_path / "model.tflite")
    graph = read_model(tmp_path / "model.tflite")
    here, there = (p.name for p in TWO.processors)
    like = TWO.processors[0].like
    profile = one_kernel(KernelModel({"macs": 1e-15}), links=(LinkProfile(like, like, 1.0, 1e-3),))
    sides = (Stage((1,), name, Share("height", *rows)) for name, rows in ((here, (0, 16)), (there, (16, 32))))
    plan = Plan(graph.digest, (Stage((0,), here), *sides, Stage((2, 3), there)))
    with closing(CostModelSession(profile, TWO)) as session:
        found = session.load(graph, plan).run(1)
    half = graph.tensors[graph.operators[1].outputs[0]].nbytes / 2 * 1e-3
    assert found.stage_s[0] == pytest.approx([0.0, 0.0, half, 2 * half], abs=1e-6)
    assert found.latency_s[0] == pytest.approx(1.0 + half + 2 * half, abs=1e-6)
