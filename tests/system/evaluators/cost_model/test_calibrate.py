from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.cost_model.calibrate_nets import GENERATOR, TURNS, network
from evaluators.cost_model.calibrate_profile import Fits, build_profile, next_network
from evaluators.cost_model.calibrate_time import MAPS, Bench, Timed, transferring
from evaluators.cost_model.features import (
    OperatorFeatures,
    fused,
    multiplies_matrices,
    operator_features,
    with_matrix_shares,
)
from evaluators.cost_model.fit import TimedModel, fit_processor
from evaluators.cost_model.indicators import explained, indicators, left_out_errors
from evaluators.cost_model.kernels import Tile
from evaluators.cost_model.profile import CostProfile, ProcessorProfile, from_json, read_profile, to_json
from evaluators.cost_model.session import CostModelSession
from evaluators.samples import Measurement, Samples
from evaluators.testing import SyntheticEvaluator
from optimizer.cli import main
from optimizer.study.config import StudyConfig
from optimizer.study.course import run_study
from optimizer.study.log import Record, read_log
from optimizer.tools.calibrate import REFERENCE, SHARED, Measured, calibrate, refine, render, write_profile
from search_spaces.core.errors import OptimizeError, ProfileError, RunFolderError, UsageError
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import zoo
from search_spaces.models.zoo.builder import Builder
from tests.support.commands import tells
from tests.support.cost_model import networks
from tests.support.sentences import fails, says
from tests.support.short_studies import Quiet, go

SMALL = "squeezenet1_1@0.25/64"


def true_s(feature: OperatorFeatures) -> float:
    """A machine: tiles of 16 channels, 50 GMAC/s, 10 GB/s, slower where little is left of a tile."""
    if feature.free:
        return float("nan")
    channels = -(-feature.output[2] // 16) * 16 / max(1, feature.output[2])
    rate = 5e10 if feature.kernel != "depthwise" else 1.5e10
    return 1e-6 + feature.macs * channels / rate + feature.moved_bytes / 1e10


@cache
def timed_networks(count: int, seed: int = 1) -> tuple[TimedModel, ...]:
    found = []
    for index, draft in enumerate(networks([f"n{i}" for i in range(count)], seed)):
        features = operator_features(draft.graph())
        seconds = np.array([true_s(f) for f in features])
        found.append(TimedModel(draft.name, str(index), features, float(np.nansum(seconds)) * 1.02 + 5e-6, seconds))
    return tuple(found)


@cache
def fitted_to_six() -> ProcessorProfile:
    return fit_processor(timed_networks(6), tune=False)


def test_kernels_that_one_implementation_runs_are_learnt_together() -> None:
    kernels = fitted_to_six().kernels
    assert kernels["winograd"] == kernels["conv"]
    assert kernels["grouped"] == kernels["conv"]
    assert kernels["pointwise/strided"] == kernels["conv"]
    assert kernels["fully_connected/rows"] == kernels["pointwise"]
    assert kernels["fully_connected/vector"] != kernels["pointwise"]


def test_products_of_few_shapes_are_priced_as_those_of_many() -> None:
    models = timed_networks(6)
    few = [m for m in models if all(f.kernel != "matmul" for f in m.features)]
    product = OperatorFeatures("matmul", "BATCH_MATMUL", 150_000, 20_000, 0, 4_000, output=(4, 31, 31))
    small = [replace(product, macs=150_000 + n % 3) for n in range(12)]
    seen = TimedModel("small", "small", tuple(small), 12 * 7e-6, np.full(12, 7e-6))
    fitted = fit_processor([*few, seen], tune=False)
    kernels = fitted.kernels
    assert kernels["matmul"].prices == kernels["pointwise"].prices
    assert kernels["matmul"].samples == 12
    assert not CostProfile("it", {"core": fitted}).concerns(small, "core")
    many = [replace(product, macs=100_000 * n) for n in range(1, 13)]
    known = TimedModel("large", "large", tuple(many), 1e-3, np.array([true_s(f) for f in many]))
    kernels = fit_processor([*few, known], tune=False).kernels
    assert kernels["matmul"].prices != kernels["pointwise"].prices


def test_a_kind_of_few_shapes_is_known_to_its_coarser_kernel_only() -> None:
    large = OperatorFeatures("elementwise", "SQUARED_DIFFERENCE", 0, 2_000_000, 0, 1_000_000, output=(64, 64, 61))
    few = [replace(large, read_bytes=2_000_000 + n % 5) for n in range(20)]
    seen = TimedModel("few", "few", tuple(few), 20 * 6e-5, np.full(20, 6e-5))
    kernels = fit_processor([*timed_networks(6), seen], tune=False).kernels
    assert "elementwise/SQUARED_DIFFERENCE" not in kernels
    many = [replace(large, read_bytes=2_000_000 + n) for n in range(20)]
    seen = TimedModel("many", "many", tuple(many), 20 * 6e-5, np.full(20, 6e-5))
    assert "elementwise/SQUARED_DIFFERENCE" in fit_processor([*timed_networks(6), seen], tune=False).kernels


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e-2))
def test_a_duty_is_a_share(seed: int, second_s: float) -> None:
    features = operator_features(network("net", seed % 8).graph())
    seconds = np.random.default_rng(seed).uniform(0.0, second_s, len(features))
    shares = [f.matrix_share for f in with_matrix_shares(features, seconds)]
    assert all(-1e-9 <= matrix_share <= 1.0 + 1e-9 for matrix_share in shares)
    if not any(multiplies_matrices(f) and not f.free for f in features):
        assert max(shares) == 0.0


def test_a_duty_rises_with_products_and_fades_behind_them() -> None:
    plane = (28, 28, 64)
    product, other = (
        OperatorFeatures(kernel, "CONV_2D", 10**7, 10**5, 10**4, 10**5, plane, plane)
        for kernel in ("pointwise", "conv")
    )
    fading = [f.matrix_share for f in with_matrix_shares([product, *[other] * 5], np.full(6, 1e-3))]
    assert fading[1:] == sorted(fading[1:], reverse=True)
    assert fading[1] == max(fading)
    assert [f.matrix_share for f in with_matrix_shares([product] * 3, np.full(3, 1e-3))] == pytest.approx([1.0] * 3)
    assert [f.matrix_share for f in with_matrix_shares([other] * 3, np.array([1e-3, np.nan, 1e-3]))] == [0.0] * 3


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    fitted = CostProfile("fitted", {"it": fit_processor(timed_networks(14))})
    for model in timed_networks(6, seed=99):
        assert fitted.predict_whole(model.features, "it") == pytest.approx(model.whole_s, rel=0.5)
    _, sigma = fitted.predict(timed_networks(1, seed=98)[0].features, "it")
    assert np.all(sigma >= 0)


def test_a_runtime_that_fuses_is_predicted_so() -> None:
    def timed(seed: int) -> Timed:
        features = fused(operator_features(network(f"net{seed}", seed).graph()))
        seconds = np.array([true_s(f) for f in features])
        return Timed(f"net{seed}", "core", features, seconds, float(np.nansum(seconds)), 1.0, seed, fuses=True)

    known = [Timed.from_json(json.loads(json.dumps(timed(seed).to_json()))) for seed in range(4)]
    profile = build_profile(Platform("one", (Processor("core", "cpu", {}, "core"),)), known)
    assert profile["core"].fuses
    features = operator_features(network("net0", 0).graph())
    into = [f.fusable for f in features]
    assert any(into)
    assert not profile.predict(features, "core").seconds[into].any()


def test_a_fitted_profile_survives_its_file() -> None:
    profile = CostProfile("fitted", {"core": fitted_to_six()})
    platform = SyntheticEvaluator().platform()
    again, _ = from_json(json.loads(json.dumps(to_json(profile, platform))))
    features = timed_networks(1, seed=7)[0].features
    before, after = (p.predict(features, "core") for p in (profile, again))
    assert np.allclose(before.seconds, after.seconds)
    assert np.allclose(before.relative_sigma, after.relative_sigma)


def test_the_next_network_is_another_one() -> None:
    graph = networks(["n"], 0)[0].graph()
    features = operator_features(graph)
    seconds = np.array([true_s(f) for f in features])
    one = Timed("n", "core", features, seconds, 1.0, 1.0, 0)
    assert next_network([]) != next_network([one])
    assert next_network([one]) == next_network([one])


@pytest.mark.parametrize(("step", "again"), [(TURNS, False), (1, True)])
def test_networks_of_which_no_fit_becomes_certain_do_not_take_all_the_time(
    monkeypatch: pytest.MonkeyPatch, step: int, again: bool
) -> None:
    """As those of transformers, of whose operators OpenVINO's times depend on what the features do not tell."""
    monkeypatch.setattr("evaluators.cost_model.calibrate_profile.SPACE_FILLING", 4)
    features = operator_features(networks(["n"], 0)[0].graph())
    seconds = np.array([true_s(f) for f in features])
    timed = [Timed("n", "core", features, seconds, 1.0, 1.0, TURNS - 1 + step * i) for i in range(6)]
    candidates = [float(seed % TURNS == TURNS - 1) for seed in range(12 * len(timed), 12 * len(timed) + 12)]
    monkeypatch.setattr("evaluators.cost_model.calibrate_profile._doubt", lambda *_: candidates)
    assert (next_network(timed) % TURNS == TURNS - 1) == again


def test_a_fit_is_made_anew_only_when_enough_was_timed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    monkeypatch.setattr("evaluators.cost_model.calibrate_profile.SPACE_FILLING", 4)
    monkeypatch.setattr("evaluators.cost_model.calibrate_profile._REFIT_EVERY", 2)
    fitted: list[int] = []

    def fit(models: Sequence[TimedModel], **options: Any) -> Any:
        fitted.append(len(models))
        return fit_processor(models, **options)

    monkeypatch.setattr("evaluators.cost_model.calibrate_profile.fit_processor", fit)
    timed = [
        Timed(m.name, "core", m.features, m.operator_s, m.whole_s, 1.0, i) for i, m in enumerate(timed_networks(6))
    ]
    fits: Fits = {}
    chosen = [next_network(timed[:count], fits=fits) for count in (4, 5, 6)]
    assert fitted == [4, 6]
    assert next_network(timed[:5]) == chosen[1]
    assert fitted == [4, 6, 4]


def test_networks_of_one_name_are_not_mixed_up() -> None:
    evaluator = SyntheticEvaluator()
    platform = evaluator.platform()
    drafts = [transferring(side, channels) for side, channels in MAPS]
    for channels in (8, 16):
        net = Builder("same")
        drafts.append(net.finish(net.conv(net.input((1, 8, 8, 3)), channels, 3, "conv")))
    with evaluator.prepare(platform) as session, Bench(evaluator, session, platform) as bench:
        bench._files = True
        for _ in range(2):
            assert [bench.loaded(draft).digest for draft in drafts] == [draft.graph().digest for draft in drafts]
    assert len({draft.name for draft in drafts[: len(MAPS)]}) == len(MAPS)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Let calibrations time few networks and small models, and look less hard for tiles."""
    patch.setattr("evaluators.cost_model.fit._TILES", (Tile(), Tile(1, 16)))
    patch.setattr("evaluators.cost_model.fit._NEAR_S", (3e-3,))
    patch.setattr("evaluators.cost_model.fit._CACHE_BYTES", (0.0,))
    patch.setattr("optimizer.tools.calibrate.MOST_NETS", 4)
    patch.setattr("optimizer.tools.calibrate.KEPT_OUT", ("squeezenet1_1@0.25/64", "mobilenet_v1@0.25/64"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration of the synthetic machine and its log; tests work on copies."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        out = folder / "here.json"
        command = ["optimize", "calibrate"]
        found = calibrate(out, ["cpu", "cpu0"], 5.0, evaluator="synthetic", command=command)
    assert not found.interrupted
    return folder


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calibrates the synthetic machine with few networks, or goes on with what ``tmp_path`` holds."""
    make_small(monkeypatch)

    def make(**options: Any) -> Any:
        return calibrate(tmp_path / "here.json", ["cpu", "cpu0"], 5.0, evaluator="synthetic", **options)

    return make


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The file of a finished calibration, its log beside it."""
    for file in finished.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path / "here.json"


def test_a_calibration_from_end_to_end(copied: Path, calibrated: Callable[..., Any]) -> None:
    profile, platform = read_profile(copied)
    assert [p.name for p in platform.processors] == ["cpu", "cpu0"]
    assert profile.errors["cpu"]["models"]["cases"] == 2
    assert profile.errors["cpu"]["models"]["median"] < 0.5
    assert profile.provenance["command"] == ["optimize", "calibrate"]
    messages: list[str] = []
    again = calibrated(progress=messages.append)
    says("\n".join(messages))
    features = operator_features(network("net", 1).graph())
    one, two = (p.predict(features, "cpu").seconds for p in (again.profile, profile))
    assert one == pytest.approx(two, rel=1e-3)  # the log rounds


def test_an_interrupted_calibration_goes_on(calibrated: Callable[..., Any], tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if "network 4 on cpu0" in text:
            raise KeyboardInterrupt

    early = calibrated(progress=interrupt)
    assert early.interrupted
    assert early.profile.errors.keys() == {REFERENCE}
    messages: list[str] = []
    late = calibrated(progress=messages.append)
    says("\n".join(messages[:2]))
    assert not late.interrupted


def test_what_a_kill_has_left_of_a_pair_is_timed(tmp_path: Path) -> None:
    def started(*words: str) -> str:
        """Return the messages of a calibration of two cores that ends at a given one."""
        messages: list[str] = []

        def progress(text: str) -> None:
            messages.append(text)
            if text.startswith(words):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(tmp_path / "cores.json", ["cpu0", "cpu1"], 5.0, evaluator="synthetic", progress=progress)
        return "\n".join(messages)

    for words in ("timing cpu0 beside", "timing network", "timing network"):
        says(started(words))


def test_a_log_of_another_generator_of_networks_is_refused(
    copied: Path, calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.tools.calibrate.GENERATOR", GENERATOR + 1)
    with fails(RunFolderError):
        calibrated()


def test_wrong_input(tmp_path: Path, copied: Path) -> None:
    with fails(UsageError):
        calibrate(tmp_path / "x.json", minutes=0.0)
    with fails(UsageError):
        calibrate(tmp_path / "x.txt")
    with fails(UsageError):
        calibrate(tmp_path / "nowhere" / "x.json")
    with fails(UsageError):
        calibrate(Path())
    (tmp_path / "folder.json").mkdir()
    with fails(UsageError):
        calibrate(tmp_path / "folder.json")
    with fails(ProfileError):
        Measured().add(Record(1, "timed", {"name": "net1"}), SyntheticEvaluator().platform())
    timed = Timed("net3", "core", operator_features(network("net3", 3).graph()), np.zeros(0), 1.0, 1.0, 3)
    data = timed.to_json() | {"operator_s": [-1.0] * len(timed.features)}
    with fails(ProfileError):
        Measured().add(Record(1, "timed", data), SyntheticEvaluator().platform())
    with fails(RunFolderError):
        calibrate(copied, ["cpu1"], 1.0, evaluator="synthetic")


def test_operators_that_two_cores_share_are_timed_once_and_their_errors_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    out = tmp_path / "cores.json"
    found = calibrate(out, ["cpu0", "cpu1"], 5.0, evaluator="synthetic")
    ((on, errors),) = found.profile.errors[SHARED].items()
    assert errors["cases"] > 2
    assert on in render(found)
    ((like, reference_ms),) = found.profile.errors[REFERENCE].items()
    assert reference_ms["timings"] == 4 + 2 + 2  # generated networks, models kept out, and these shared
    for slow_ms, timings, told in ((4.1, 40, False), (4.8, 40, True), (4.8, 8, False)):
        changed = {**found.profile.errors, REFERENCE: {like: {"p10": 4.0, "p90": slow_ms, "timings": timings}}}
        text = render(replace(found, profile=replace(found.profile, errors=changed)))
        assert (f"4 to {slow_ms} ms" in text) == told
    records = read_log(out.with_suffix(".log")).records
    assert [r.data["name"] for r in records if r.kind == "shared"] == ["squeezenet1_1@0.25/64", "mobilenet_v1@0.25/64"]
    calibrate(out, ["cpu0", "cpu1"], 5.0, evaluator="synthetic")
    assert len(read_log(out.with_suffix(".log")).records) == len(records)
    shared = next(r.data for r in records if r.kind == "shared")
    changes: tuple[dict[str, Any], ...] = (
        {"name": "/etc/passwd"},
        {"on": ["cpu0", "cpu7"]},
        {"on": ["cpu0", "cpu0"]},
        {"like": "gpu"},
        {"plan": {}},
        {"plan": shared["plan"] | {"graph_digest": "0" * 64}},
        {"stage_s": shared["stage_s"][1:]},
        {"stage_s": ["fast"]},
        {"stage_s": [float("nan"), *shared["stage_s"][1:]]},
        {"reference_s": 1e-320},
    )
    for change in changes:
        with pytest.raises(ProfileError):
            Measured().add(Record(1, "shared", {**shared, **change}), found.platform)


def test_too_little_time_is_reported_and_kept(calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.tools.calibrate.MOST_NETS", 2)
    with fails(ProfileError):
        calibrated()


def test_a_study_refines_a_profile(copied: Path, tmp_path: Path) -> None:
    config = StudyConfig(
        model=SMALL,
        budget=12,
        evaluator="synthetic",
        processors=("cpu", "cpu0"),
        out=tmp_path / "run",
    )
    run_study(config, Quiet(), ["optimize"])
    refined = refine(copied, tmp_path / "run")
    step = refined.profile.provenance["refined"][0]
    assert step["after"]["median"] <= step["before"]["median"]
    assert read_profile(copied)[0].errors["study"] == step["after"]
    says(render(refined))
    says(render(replace(refined, step=step | {"after": step["after"] | {"kendall": step["before"]["kendall"] - 0.1}})))
    with fails(RunFolderError):
        refine(copied, tmp_path / "nowhere")


def test_a_study_that_measures_what_is_predicted_changes_no_price(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(copied, read_profile(copied)[0], SyntheticEvaluator().platform())
    study = go(tmp_path / "run", model=SMALL, processors=("cpu0", "cpu1"), allow="splits", budget=6)
    plans = [*study.baselines.values()]
    assert sum(plan.is_split for plan in plans) > 1
    profile, platform = read_profile(copied)
    predicted = [CostModelSession(profile, platform).load(study.graph, plan).one for plan in plans]
    measured = [Measurement(Samples(tuple(one.latency_s)), tuple(one.stage_s[0]), (), "limit") for one in predicted]
    runs = [*zip(plans, measured, strict=True)]
    monkeypatch.setattr("optimizer.tools.calibrate._run", lambda *_: (study.graph, runs))
    refined = refine(copied, tmp_path / "run").profile
    assert refined.provenance["refined"][0]["after"]["p90"] == pytest.approx(0.0, abs=1e-3)
    parts = refined.provenance["refined"][0]["parts"]["before"]
    assert len(parts) == 2
    assert all(errors["p90"] == pytest.approx(0.0, abs=1e-3) for errors in parts.values())
    assert refined["core"].invocation_s == pytest.approx(profile["core"].invocation_s, rel=0.01)


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        (UsageError, {"evaluator": "cost-model", "platform": "here.json"}),
        (UsageError, {"evaluator": "cost-model", "platform": "here.json", "model": "two.yaml"}),
        (UsageError, {"objective": "occupancy"}),
        (ProfileError, {"processors": "cpu0,cpu1"}),
    ],
)
def test_a_study_that_cannot_refine_a_profile(
    copied: Path, monkeypatch: pytest.MonkeyPatch, error: type[OptimizeError], changed: dict[str, Any]
) -> None:
    monkeypatch.chdir(copied.parent)
    Path("two.yaml").write_text(f"models: [{{model: {SMALL}, count: 2}}]")
    before = copied.read_bytes()
    settings: dict[str, Any] = {"model": SMALL, "budget": 2, "processors": "cpu,cpu0"} | changed
    go(Path("run"), **settings)
    with fails(error):
        refine(Path("here.json"), Path("run"))
    assert copied.read_bytes() == before


@pytest.mark.usefixtures("copied", "calibrated")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", "--evaluator", "synthetic", "--processors", "cpu,cpu0", "--minutes", "5", "-q"]
    tells(capsys, *arguments, "--out", str(tmp_path / "here.json"))
    assert main([*arguments, "--out", str(tmp_path / "here.txt")]) == 2
    assert capsys.readouterr().err.startswith("optimize: --out")


def test_indicators_of_a_sweep_explain_what_they_make_up() -> None:
    names = [f"mobilenet_v1@{width}" for width in (0.25, 0.5, 0.75, 1)]
    found = [indicators(zoo.draft(name).graph(), 2 << 20) for name in names]
    assert [i.flops for i in found] == sorted(i.flops for i in found)
    latency = [i.flops * 2e-11 + i.memory_accesses_estimate * 1e-9 for i in found]
    messages = explained(found, latency)
    assert messages["flops_and_memory"] == pytest.approx(1.0)
    assert messages["flops"] <= 1.0
    with fails(ProfileError):
        explained(found, [float("nan")] * len(found))
    with fails(ProfileError):
        explained(found[:2], latency[:2])


def test_a_law_predicts_the_families_that_it_was_not_fitted_to() -> None:
    families = ["mobilenet_v1", "resnet50", "squeezenet1_1"]
    names = [f"{family}@{width}/64" for family in families for width in (0.5, 1)]
    found = [indicators(zoo.draft(name).graph(), 0) for name in names]
    latency = [i.flops * 2e-11 + i.memory_accesses_estimate * 1e-9 + 1e-5 for i in found]
    groups = [name.partition("@")[0] for name in names]
    errors = left_out_errors(found, latency, groups)
    assert errors["flops_and_memory"]["p90"] == pytest.approx(0.0, abs=1e-3)
    assert errors["flops"]["median"] > 0.05
    for each in errors.values():
        assert each["median_low"] <= each["median"] <= each["median_high"]
        assert each["median"] <= each["p90"] <= each["p90_high"]
    assert left_out_errors(found, latency, ["one"] * len(found)) == {}


def test_a_profile_of_another_version_is_reported() -> None:
    profile = CostProfile("fitted", {"core": fit_processor(timed_networks(4), tune=False)})
    document = json.loads(json.dumps(to_json(profile, SyntheticEvaluator().platform())))
    document["profile"]["processors"]["core"]["kernels"]["conv"]["correction"]["scales"].append(1.0)
    with fails(ProfileError):
        from_json(document)
