"""Stages run by OpenVINO keep LiteRT's contract; what it lacks is named, and where it is missing, one line says so."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from evaluators.base import Evaluator
from evaluators.contract import check_timeline
from evaluators.cost_model.calibrate_kernels import profile_kernels
from evaluators.cost_model.calibrate_time import openvino_seconds, reference_network
from evaluators.cost_model.features import fused, operator_features
from evaluators.litert import processors, settings, stages
from evaluators.litert.deployment import write_deployment
from evaluators.litert.processor_names import processor_options
from evaluators.litert.processors import make_processor, usable_cores
from evaluators.litert.runner import PlanRunner
from evaluators.litert.session import LitertEvaluator, LitertSession
from evaluators.litert.settings import TOLERANCE_BF16, TOLERANCE_F32, TOLERANCE_INT8, compile_settings
from evaluators.litert.stages import compile_strictly
from evaluators.litert.worker import openvino
from evaluators.litert.worker.openvino import (
    Device,
    computes_natively,
    find_devices,
    in_model_order,
    other_versions,
    with_blocked_kernels,
)
from evaluators.litert.worker.runtimes import OPENVINO, check_installed
from evaluators.litert.workers import WorkerError
from evaluators.testing import EvaluatorContract
from evaluators.workload.apart import on_cores
from evaluators.workload.host import came_of
from optimizer.cli import main
from optimizer.devices import choose_platform, unused_precisions
from optimizer.exact.chain_costs import chain_cost
from optimizer.model.errors import ErrorProfile, error_of, error_profile, tolerance_line
from optimizer.model.profile import Profiler, profile
from optimizer.study.config import parse_config
from optimizer.workload.baselines import workload_baselines
from search_spaces.core.errors import OptimizeError, RunFolderError, UnavailableError
from search_spaces.core.graph import Graph
from search_spaces.core.joined_graph import merge
from search_spaces.core.plan import Plan, Stage
from search_spaces.core.platform import Platform
from search_spaces.core.pools import with_pools
from search_spaces.core.workload import Arrival, Client, Workload
from search_spaces.models import load
from search_spaces.models.cache import cache_dir, private_folder, prune
from search_spaces.models.litert import read_model
from search_spaces.models.source import Extent
from search_spaces.models.stages import StageModel, weights_as_inputs
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.segment_space import SegmentSpace
from search_spaces.spaces.shared_parts import Part
from search_spaces.spaces.workload_space import WorkloadSpace
from tests.support.models.litert_loading import agrees, survives
from tests.support.models.tflite_models import Net
from tests.support.narrowing import there
from tests.support.sentences import fails, says

if TYPE_CHECKING:
    from evaluators.litert.candidate import LitertCandidate


def why_not() -> str:
    try:
        check_installed(OPENVINO)
    except UnavailableError as error:
        return str(error)
    return ""


PROBLEM = why_not()
FIRST, LAST = f"cpu{usable_cores()[0]}", f"cpu{usable_cores()[-1]}"
MIXED = list(dict.fromkeys([FIRST, f"{LAST}:openvino"]))
REDUCED = "" if PROBLEM else "bf16" if computes_natively("bf16") else ""
BLOCKED = f"{LAST}:openvino:blocked"


def runs(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs OpenVINO."""
    marked: Callable[..., None] = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)(test)
    return pytest.mark.openvino(marked)  # type: ignore[no-any-return]


def platform_of(*names: str) -> Platform:
    return Platform("test", tuple(map(make_processor, names)))


@pytest.fixture(scope="module")
def session(cache_folder: Path) -> Iterator[LitertSession]:
    with LitertEvaluator().prepare(platform_of(*MIXED, f"{FIRST}:openvino")) as opened:
        yield opened


@pytest.mark.openvino
@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
class TestOpenVino(EvaluatorContract):
    measures = True

    def evaluator(self) -> Evaluator:
        class Mixed(LitertEvaluator):
            def platform(self) -> Platform:
                return platform_of(*MIXED)

        return Mixed()

    def graph(self) -> Graph:
        return load("squeezenet1_1")


@runs
def test_plans_compute_what_the_whole_model_computes(session: LitertSession, small: Graph) -> None:
    assert session.fingerprint()["versions"]["openvino"] == importlib.metadata.version("openvino")
    platform = platform_of(*MIXED, f"{FIRST}:openvino")
    for graph in (small, load("mobilenet_v1@0.25/64")):
        assert session.unsupported_operators(graph, MIXED[1]) == []
        count = len(graph.operators)
        for cuts in ((), (count // 3, count // 2), tuple(range(1, count))):
            for names in ([MIXED[1]], MIXED, [f"{FIRST}:openvino", MIXED[1]]):
                plan = chain_plan(graph, cuts, [names[i % len(names)] for i in range(len(cuts) + 1)])
                with closing(session.load(graph, plan)) as candidate:
                    batch = candidate.run(2)
                    check_timeline(there(batch.timeline), graph, plan, platform)
                    agreement = there(candidate.verify())
                    assert agreement.accepted
                    assert agreement.tolerance == (
                        0.0 if {s.processor for s in plan.stages} == {FIRST} else TOLERANCE_F32
                    )
                    for output in agreement.outputs:
                        assert 0.0 < output.mean < output.largest == agreement.max_rel_error
                        assert output.name == graph.tensors[graph.outputs[0]].name
                    assert agreement.identical == (not agreement.outputs)


@runs
@pytest.mark.parametrize("precision", dict.fromkeys(("", REDUCED)))
def test_weights_that_stay_in_the_models_file_give_the_same_bits(
    precision: str, small: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    image = net.input()
    kernel, bias = (net.constant(np.ones(shape, np.float32)) for shape in ((2, 1, 1, 2), (2,)))
    named = read_model(net.outputs(net.conv(net.add(image, image), kernel, bias)).write(tmp_path / "net.tflite"))
    main = there(named.source).schema.subgraphs[0]
    main.tensors[main.inputs[0]].name = b"weights_as_input_0"  # as ours are called: these filters stay
    int8, dense = load("squeezenet1_1@0.5/64:int8"), load("alexnet@0.125")
    name = f"{LAST}:openvino" + (f"-{precision}" if precision else "")
    lean: list[int] = []

    def counted(stage: StageModel) -> tuple[StageModel, dict[str, Extent]]:
        found = weights_as_inputs(stage)
        lean.append(len(found[1]))
        return found

    monkeypatch.setattr(stages, "weights_as_inputs", counted)
    for graph in (small, dense, int8, named):
        found = []
        for large in (1 << 60, 0):
            monkeypatch.setattr(stages, "_LARGE_NBYTES", large)
            half = len(graph.operators) // 2
            with LitertEvaluator().prepare(platform_of(name)) as opened:
                for cuts in ((),) if graph is named else ((), (half,)):
                    loaded = opened.load(graph, chain_plan(graph, cuts, [name] * (len(cuts) + 1)))
                    with closing(cast("LitertCandidate", loaded)) as candidate:
                        candidate.run(1)
                        assert np.isfinite(candidate.outputs()[0]).all()
                        found.append([output.tobytes() for output in candidate.outputs()])
        assert found[: len(found) // 2] == found[len(found) // 2 :]
        assert any(lean) == (graph not in (int8, named))
        lean.clear()


@runs
def test_branches_and_streams_run_on_both_runtimes(session: LitertSession, squeezenet: Graph) -> None:
    # The two expanding convolutions of the first fire module run beside each other.
    groups = [tuple(range(4)), (4,), (5,), tuple(range(6, len(squeezenet.operators)))]
    names = [MIXED[0], MIXED[1], MIXED[0], MIXED[1]]
    plan = Plan(squeezenet.digest, tuple(Stage(g, processor) for g, processor in zip(groups, names, strict=True)))
    with closing(session.load(squeezenet, plan)) as candidate:
        candidate.run(3)
        batch = candidate.stream(3)
        assert (batch.latency_s > 0.0).all()
        assert there(candidate.verify()).accepted


@runs
@pytest.mark.skipif(not REDUCED, reason="this CPU computes in no reduced precision")
def test_reduced_precision_has_errors_of_its_own(
    cache_folder: Path, tmp_path: Path, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluators.litert.session._TOP1_S", 250.0)  # a slow machine compares all 100 inputs, too
    reduced = f"{FIRST}:openvino-{REDUCED}"
    with LitertEvaluator().prepare(platform_of(FIRST, f"{FIRST}:openvino", reduced)) as session:
        errors = {}
        for processor in (reduced, f"{FIRST}:openvino"):  # the first leaves compiled stages on disk for the second
            with closing(session.load(squeezenet, chain_plan(squeezenet, [], [processor]))) as candidate:
                agreement = there(candidate.verify())
                assert agreement.accepted
                errors[processor] = agreement
        deployed = session.deploy(tmp_path, squeezenet, chain_plan(squeezenet, [], [reduced]))
        assert deployed.outputs == errors[reduced].outputs
        assert deployed.top1 is not None
        assert 0 <= deployed.top1[0] <= deployed.top1[1] == 100
        says(str(deployed))
    assert errors[reduced].tolerance == TOLERANCE_BF16
    assert errors[reduced].max_rel_error > 1e-3 > TOLERANCE_F32 > errors[f"{FIRST}:openvino"].max_rel_error
    text = str(errors[reduced])
    assert "softmax" in text
    says(text)


@runs
def test_networks_of_8_bits_may_be_off_by_a_step(session: LitertSession) -> None:
    graph = load("mobilenet_v1@0.25/128:int8")
    plan = chain_plan(graph, [5, 20], [MIXED[1], FIRST, MIXED[1]])
    with closing(session.load(graph, plan)) as candidate:
        agreement = there(candidate.verify())
    assert agreement.accepted
    assert agreement.tolerance == TOLERANCE_INT8
    with closing(session.load(graph, chain_plan(graph, [], [FIRST]))) as candidate:
        agreement = there(candidate.verify())
    assert (agreement.identical, agreement.tolerance) == (True, 0.0)


@runs
def test_operators_that_it_lacks_are_named(session: LitertSession, tmp_path: Path) -> None:
    net = Net()
    first = net.input()
    pool = schema.Pool2DOptionsT(strideH=1, strideW=1, filterHeight=2, filterWidth=2)
    pooled = net.op("L2_POOL_2D", [net.add(first, first)], options=pool)
    graph = read_model(net.outputs(net.add(pooled, first)).write(tmp_path / "net.tflite"))
    processor = MIXED[1]
    assert session.unsupported_operators(graph, processor) == [1]
    with fails(UnavailableError):
        session.load(graph, chain_plan(graph, [], [processor]))
    plan = Plan(graph.digest, (Stage((0,), processor), Stage((1,), FIRST), Stage((2,), processor)))
    with closing(session.load(graph, plan)) as candidate:
        assert there(candidate.verify()).accepted


@runs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: signal.Signals(n).name)
def test_a_process_that_dies_ends_its_trial_alone(session: LitertSession, squeezenet: Graph, number: int) -> None:
    survives(session, squeezenet, chain_plan(squeezenet, [10], MIXED), MIXED[1], number, exactly=False)


@runs
def test_a_front_end_that_crashes_refuses_the_operator(
    monkeypatch: pytest.MonkeyPatch, squeezenet: Graph, cache_folder: Path
) -> None:
    asked = compile_strictly
    marked = squeezenet.operators[5].outputs

    def crash(*arguments: Any, **named: Any) -> Any:
        if any(stage.outputs == marked for stage in arguments[3]):
            raise WorkerError(MIXED[1], "died of SIGSEGV", fatal=True)
        return asked(*arguments, **named)

    monkeypatch.setattr(stages, "compile_strictly", crash)
    with LitertEvaluator().prepare(platform_of(*MIXED)) as session:
        assert session.unsupported_operators(squeezenet, MIXED[1]) == [5]


@runs
def test_compiled_stages_are_kept(squeezenet: Graph, cache_folder: Path) -> None:
    with LitertEvaluator().prepare(platform_of(*MIXED)) as session:
        session.load(squeezenet, chain_plan(squeezenet, [7], [MIXED[1], FIRST])).close()
    folder = Path(settings.cache_settings(make_processor(MIXED[1]))["cache"])
    assert folder.parent == cache_dir() / "openvino"
    before = set(folder.iterdir())
    assert before
    assert folder.stat().st_mode & 0o77 == 0
    with LitertEvaluator().prepare(platform_of(*MIXED)) as session:
        session.load(squeezenet, chain_plan(squeezenet, [7], [MIXED[1], FIRST])).close()
    assert set(folder.iterdir()) == before
    for blob in before:  # what a process left that was killed while it wrote
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[: blob.stat().st_size // 2])
    with (
        LitertEvaluator().prepare(platform_of(*MIXED)) as session,
        closing(session.load(squeezenet, chain_plan(squeezenet, [7], [MIXED[1], FIRST]))) as candidate,
    ):
        assert there(candidate.verify()).accepted


def test_folders_that_others_may_write_to_are_not_used(tmp_path: Path) -> None:
    folder = there(private_folder(tmp_path / "mine"))
    for number, nbytes in enumerate((10, 20, 30)):
        (folder / f"{number}.blob").write_bytes(b"x" * nbytes)
        os.utime(folder / f"{number}.blob", (number, number))
    prune(folder, "*.blob", 50)
    assert sorted(p.name for p in folder.iterdir()) == ["1.blob", "2.blob"]
    folder.chmod(0o777)
    assert private_folder(folder) is None
    (tmp_path / "file").touch()
    assert private_folder(tmp_path / "file" / "inside") is None


@runs
@pytest.mark.skipif(not computes_natively("blocked"), reason="this CPU has no AVX-512")
def test_blocked_kernels_round_otherwise(
    cache_folder: Path, squeezenet: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, bits = (f"{LAST}:openvino", BLOCKED), []
    platform = platform_of(FIRST, *names)
    for large in (1 << 60, 0):  # with weights inside the stage's file, and in the model's
        monkeypatch.setattr(stages, "_LARGE_NBYTES", large)
        with LitertEvaluator().prepare(platform) as session:
            for name in names:
                loaded = session.load(squeezenet, chain_plan(squeezenet, (), [name]))
                with closing(cast("LitertCandidate", loaded)) as candidate:
                    agreement = there(candidate.verify())
                    assert agreement.accepted
                    candidate.run(1)
                    bits.append(candidate.outputs()[0].tobytes())
    assert bits[0] == bits[2] != bits[1] == bits[3]
    assert settings.tolerance([platform[BLOCKED]], platform[names[0]]) == TOLERANCE_F32


@pytest.mark.parametrize(
    ("kind", "dilation", "weights", "blocked"),
    [
        ("Convolution", 1, (64, 32, 3, 3), True),
        ("Convolution", 1, (64, 3, 7, 7), True),
        ("Convolution", 1, (64, 149, 7, 7), False),
        ("Convolution", 2, (64, 32, 3, 3), False),
        ("GroupConvolution", 1, (64, 1, 1, 3, 3), True),
        ("GroupConvolution", 1, (2, 32, 32, 3, 3), False),
        ("MatMul", 1, (64, 32), False),
    ],
)
def test_which_convolutions_have_blocked_kernels(
    kind: str, dilation: int, weights: Sequence[int], blocked: bool
) -> None:
    from optimizer.export import run_plan

    dims = "".join(f"<dim>{size}</dim>" for size in weights)
    text = (
        f'<layer id="1" name="a&lt;b" type="{kind}" version="opset1">\n<data dilations="{dilation}, {dilation}" />'
        f'<input><port id="0"><dim>1</dim></port><port id="1">{dims}</port></input></layer>'
    )
    for function in (with_blocked_kernels, run_plan.with_blocked_kernels):
        found = function(f"{text}{text}")
        assert found.count("primitives_priority") == 2 * blocked
        assert re.sub("<rt_info>.*?</rt_info>", "", found) == f"{text}{text}"
        assert function(f'{text}<layer id="2" type="FakeQuantize" />').count("primitives_priority") == 0
        for damaged in ("", text[:60], text.replace("<dim>", "<dim>-")):
            assert function(damaged) == damaged
        more = text.replace("<input>", "<rt_info><attribute /></rt_info><input>")
        assert function(more).count("<rt_info>") == 1
        assert function(more).count("primitives_priority") == blocked


@runs
@pytest.mark.parametrize("second", [MIXED[1], BLOCKED] if computes_natively("blocked") else [MIXED[1]])
def test_an_exported_plan_runs_with_the_two_runtimes_alone(second: str, squeezenet: Graph, tmp_path: Path) -> None:
    from optimizer.export import run_plan

    plan = chain_plan(squeezenet, [9, 20], [FIRST, second, FIRST])
    platform = platform_of(FIRST, second)
    write_deployment(tmp_path, squeezenet, plan, platform, there(squeezenet.source).content_digest())
    image = np.random.default_rng(0).uniform(-1, 1, (1, 224, 224, 3)).astype(np.float32)
    with PlanRunner(tmp_path) as runner:
        wanted = runner.run(image)
    (tmp_path / "run_plan.py").write_text(Path(run_plan.__file__).read_text(encoding="utf-8"))
    np.save(tmp_path / "image.npy", image)
    program = (
        "import sys, numpy as np; sys.path.insert(0, '.'); from run_plan import Plan\n"
        "with Plan('.') as plan:\n"
        "    image = np.load('image.npy'); found = plan.run(image); again = list(plan.stream([image] * 3))\n"
        "    assert all(np.array_equal(a, f) for o in again for a, f in zip(o.values(), found.values()))\n"
        "np.save('found.npy', next(iter(found.values())))\n"
        "assert not {'optimizer', 'evaluators', 'search_spaces'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, timeout=120)
    (output,) = wanted.values()
    assert np.array_equal(np.load(tmp_path / "found.npy"), output)


GPUS = (
    Device("CPU", "A CPU", True, ("FP32", "BF16", "FP16")),
    Device("GPU.0", "Intel(R) Iris(R) Xe Graphics (iGPU)", True, ("FP32", "FP16")),
    Device("GPU.1", "Intel(R) Arc(TM) A770 Graphics (dGPU)", False, ("FP32", "FP16")),
    Device("NPU", "Intel(R) AI Boost", True, ("FP16", "INT8")),
)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Intel's GPUs and NPU; which processor gets which is all that can be tested without them."""
    monkeypatch.setattr(processors, "find_devices", lambda: GPUS)
    monkeypatch.setattr(processors, "check_installed", lambda _: None)
    monkeypatch.setattr(settings, "version", lambda _: "2026.4.1")


@pytest.mark.parametrize(
    ("name", "device", "precision"),
    [
        ("igpu:openvino", "GPU.0", "f32"),
        ("igpu:openvino-f16", "GPU.0", "f16"),
        ("gpu:openvino", "GPU.1", "f32"),
        ("npu:openvino", "NPU", "f16"),
    ],
)
def test_devices_of_openvino(devices: None, name: str, device: str, precision: str) -> None:
    found = make_processor(name)
    assert found.kind == ("npu" if device == "NPU" else "gpu")
    assert (found.options["device"], found.options["precision"]) == (device, precision)
    assert not found.excludes(make_processor("cpu"))
    written = json.loads(json.dumps(dict(found.options)))
    assert processor_options(found.kind, written)["device"] == device
    with fails(ValueError):
        processor_options(found.kind, written | {"device": "GPU;rm"})
    made = compile_settings(found, None)
    assert made["device"] == device
    assert made["properties"].get("INFERENCE_PRECISION_HINT") == (None if device == "NPU" else precision)
    both = name.replace(":", "+cpu:", 1)
    assert compile_settings(make_processor(both), None)["device"] == f"HETERO:{device},CPU"
    assert compile_settings(make_processor(both), None, strict=True)["device"] == device


def test_devices_that_are_not_there(devices: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processors, "find_devices", lambda: GPUS[:1])
    for name in ("igpu:openvino", "gpu:openvino", "npu:openvino"):
        with fails(UnavailableError):
            make_processor(name)
    monkeypatch.setattr(processors, "computes_natively", lambda precision: precision == "f32")
    make_processor("cpu:openvino")
    for name in ("cpu:openvino-bf16", "cpu:openvino:blocked"):
        with fails(UnavailableError):
            make_processor(name)


def test_what_a_cpu_computes_natively(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for flags, bf16, f16 in (
        ("flags : avx512f avx512_bf16 avx512_fp16", True, True),
        ("flags : avx512f", False, False),
        ("Features : fp asimd fphp", False, True),
        ("", False, False),
    ):
        info.write_text(f"processor : 0\n{flags}\n")
        assert [computes_natively(p, info) for p in ("f32", "bf16", "f16")] == [True, bf16, f16]
    assert not computes_natively("bf16", tmp_path / "none")


def test_without_it_one_line_tells_what_to_install(
    squeezenet: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name == "openvino":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    find_devices.cache_clear()
    for name in ("cpu:openvino", "igpu:openvino", "npu:openvino"):
        with fails(UnavailableError):
            make_processor(name)
    assert main(["--model", "squeezenet1_1", "--processors", "cpu,cpu:openvino", "--dry-run"]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1
    # A plan that was made where it is installed.
    plan, digest = chain_plan(squeezenet, [], [FIRST]), there(squeezenet.source).content_digest()
    processor = make_processor(FIRST)
    options = {**processor.options, "runtime": OPENVINO, "precision": "f32"}
    write_deployment(tmp_path, squeezenet, plan, Platform("p", (replace(processor, options=options),)), digest)
    with fails(UnavailableError):
        PlanRunner(tmp_path).close()
    document = json.loads((tmp_path / "plan.json").read_text())
    document["platform"]["processors"][0]["options"]["precision"] = "f8"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with fails(OptimizeError):
        PlanRunner(tmp_path).close()


@runs
def test_other_versions_of_its_library_are_found(tmp_path: Path) -> None:
    (tmp_path / "libOld.so").write_bytes(b"\0libopenvino.so.1\0libc.so.6\0")
    (tmp_path / "libNone.so").write_bytes(b"\0libc.so.6\0")
    (found,) = other_versions([tmp_path / "libOld.so", tmp_path / "libNone.so"])
    says(found)


def test_a_library_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "check_installed", lambda _: None)
    program = "import sys; sys.stderr.write('first\\nlibtbb.so.12: cannot open'); sys.exit(1)"
    monkeypatch.setattr(openvino, "own_process", lambda _: [sys.executable, "-c", program])
    find_devices.cache_clear()
    with fails(UnavailableError):
        find_devices()
    find_devices.cache_clear()


@runs
@pytest.mark.usefixtures("every_runtime")
def test_float32_is_the_default_and_an_error_allows_less(cache_folder: Path) -> None:
    evaluator = LitertEvaluator()
    found = evaluator.platform()
    whole = found["cpu:openvino"] if len(usable_cores()) > 1 else found[f"{FIRST}:openvino"]
    assert whole.options["precision"] == "f32"
    assert whole.excludes(make_processor(FIRST))
    assert {p.options.get("precision", "f32") for p in found.processors if p.kind == "cpu"} == {"f32"}
    names = [p.name for p in evaluator.reduced()]
    assert [n.partition("-")[2] for n in names if n.startswith("cpu")] == [
        p for p in ("bf16", "f16") if computes_natively(p)
    ]
    more = choose_platform(evaluator, reduced=True)
    assert [p.name for p in more.processors] == [*(p.name for p in found.processors), *names]
    assert choose_platform(evaluator, [FIRST], reduced=True).processors == (make_processor(FIRST),)
    less = unused_precisions(evaluator, parse_config({"model": "squeezenet1_1", "budget": 9}))
    assert [p.name for p in less] == names
    assert not unused_precisions(evaluator, parse_config({"model": "squeezenet1_1", "budget": 9, "max_error": 0.01}))
    line = tolerance_line(evaluator, load("squeezenet1_1@0.25/64"), less) if less else ""
    assert line.count("\n") == 0
    assert all(name in line for name in names)
    if names:
        says(line)


@runs
@pytest.mark.skipif(not REDUCED, reason="this CPU computes in no reduced precision")
def test_errors_of_stages_tell_which_plans_keep_a_limit(cache_folder: Path) -> None:
    graph, reduced = load("googlenet@0.25/64"), f"{FIRST}:openvino-{REDUCED}"
    platform = platform_of(FIRST, reduced)
    likes = [p.like for p in platform.processors]
    count = len(graph.operators)
    with LitertEvaluator().prepare(platform) as session:
        of = Profiler(session, graph, platform)
        whole = there(error_of(of, [reduced] * count))
        most = whole / 2
        profiled = profile(of)
        found = error_profile(of, profiled, most)
        assert sum(found.squares[likes[0]]) == 0.0
        assert found.expected(platform, chain_plan(graph, (), [reduced])) == pytest.approx(whole, rel=1.0)
        assert ErrorProfile.from_json(json.loads(json.dumps(asdict(found)))) == found
        # Kernels of one tenth of the time and free transfers, so that a mixed plan pays whatever this machine does.
        costs = profiled.costs(platform)
        costs = replace(
            costs,
            operator_s=costs.operator_s[[0, 0]] * [[1.0], [0.1]],
            overhead_s=np.zeros(2),
            transfer_s=np.zeros((count, 2, 2)),
        )
        plans = found.optima(graph, costs, most, 4)
        assert plans
        assert all(found.expected(platform, plan) <= most for plan in plans)
        assert chain_cost(costs, plans[0]) < chain_cost(costs, chain_plan(graph, (), [FIRST]))
        names = [s.processor for s in plans[0].stages for _ in s.operators]
        measured = there(error_of(of, names))
        assert measured <= 2.0 * most
    with fails(RunFolderError):
        ErrorProfile.from_json({"squares": 3})


@runs
@pytest.mark.skipif(bool(PROBLEM) or not computes_natively("f16"), reason="this CPU does not compute in float16")
def test_compiled_stages_of_another_precision_are_not_taken(cache_folder: Path, squeezenet: Graph) -> None:
    names = [f"{FIRST}:openvino{word}" for word in ("-f16", "", "-f16")]
    errors = []
    for processor in names:  # each in processes of its own, which find on disk what the ones before have compiled
        platform = platform_of(FIRST, processor)
        with LitertEvaluator().prepare(platform) as session:
            of = Profiler(session, squeezenet, platform)
            errors.append(error_of(of, [processor] * len(squeezenet.operators)) or 0.0)
    assert errors[0] == errors[2] > TOLERANCE_F32 > errors[1]


def test_kernels_are_in_the_models_order() -> None:
    names = [b"input", b"Convolution_30", b"Relu_4", b"GroupConvolution_9", b"Convolution_12", b"Concat_31", b"x_1"]
    assert in_model_order(names) == [0, 3, 2, 4, 1, 5, 6]
    assert in_model_order([]) == []


@runs
def test_kernels_are_timed_where_they_stand(tmp_path: Path) -> None:
    graph = load("squeezenet1_1@0.25/64")
    reference_network().write(tmp_path / "reference.tflite")
    processor = make_processor(f"{FIRST}:openvino")
    found = profile_kernels(there(graph.source).path, tmp_path / "reference.tflite", processor, seconds=0.02)
    assert min(found.kernel_s) >= 0.0
    assert max(found.kernel_s) > 3e-6
    features = fused(operator_features(graph))
    seconds = openvino_seconds(features, found.names, found.kernel_s)
    assert np.isfinite(seconds).all()
    assert sum(seconds) <= sum(found.kernel_s)
    fewer = openvino_seconds(features, found.names[:10], found.kernel_s[:10])
    assert np.isnan(fewer[[f.kind == "CONV_2D" for f in features]]).all()
    (tmp_path / "broken.tflite").write_bytes(b"no model")
    with fails(UnavailableError):
        profile_kernels(tmp_path / "broken.tflite", tmp_path / "reference.tflite", processor)


@runs
def test_several_models_are_run_from_one_queue(squeezenet: Graph, mobilenet: Graph) -> None:
    models = (("a", "squeezenet1_1"), ("b", "mobilenet_v1"))
    workload = Workload("test", tuple(Client(name, model, 1, Arrival("closed", 3)) for name, model in models))
    joined = merge("test", [(i.name, g) for i, g in zip(workload.instances, (squeezenet, mobilenet), strict=True)])
    space = WorkloadSpace(workload, joined, with_pools(platform_of(*MIXED)), 3)
    baselines, processors = workload_baselines(
        space, on_cores(space.platform, len(space.joined.components), threads=True)
    )
    assert any(MIXED[1] in {s.processor for s in b.plan.stages} for b in baselines)
    with LitertEvaluator().host(workload, joined, processors, "mean") as session:
        for plan in (b.plan for b in baselines):
            with closing(session.load(joined.graph, plan)) as candidate:
                assert came_of(candidate.run(2)).answered == 6
                assert there(candidate.verify()).accepted


@runs
@pytest.mark.skipif(FIRST == LAST, reason="one core")
def test_an_operator_is_split_between_the_two(session: LitertSession, squeezenet: Graph) -> None:
    space = SegmentSpace(squeezenet, platform_of(*MIXED))
    rest = Part(1, len(squeezenet.operators), (MIXED[1],))
    for on in (MIXED, MIXED[::-1]):
        plan = space.plan([Part(0, 1, tuple(on), "height", 40), rest])
        assert any(stage.share is not None for stage in plan.stages)
        agrees(session, squeezenet, plan, exactly=False)
