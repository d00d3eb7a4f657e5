"""Inputs that fit a model, drawn or from a file; constant outputs, open sizes, signatures, custom operators."""

from __future__ import annotations

import io
import json
import logging
import shutil
import zipfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert import PlanRunner
from evaluators.litert.processors import make_processor
from evaluators.litert.session import LitertEvaluator
from optimizer.cli import main
from optimizer.export.run_plan import CUSTOM_OPS, StartError
from optimizer.export.run_plan import Plan as RunPlan
from search_spaces.core.allowed_code import allow
from search_spaces.core.errors import UnavailableError, UsageError
from search_spaces.core.graph import Graph, Tensor
from search_spaces.core.plan import Plan, Share, Stage
from search_spaces.core.platform import Platform
from search_spaces.models import load
from search_spaces.models.inputs import drawn_inputs, read_inputs
from search_spaces.rewrites.lower import Lowering
from search_spaces.spaces.chain import chain_plan
from search_spaces.spaces.cuts import every_layer
from tests.benchmarks.operators import interpreted
from tests.support.commands import SEARCHED, tells
from tests.support.models.custom_operator import kernels
from tests.support.models.litert_loading import loaded
from tests.support.models.tflite_models import SHAPE, TYPES, Array, Net, quantized
from tests.support.narrowing import there
from tests.support.sentences import fails, says

PORTS = (Tensor("image", (2, 3), "float32", 24), Tensor("n", (), "int32", 4))
ARRAYS: dict[str, Any] = {"image": np.ones((2, 3), np.float32), "n": np.array(7, np.int32)}


def same(first: list[Array], second: list[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def run_alone(graph: Graph) -> list[Array]:
    """Return what a model computes cut at every place, after it has been compared with the whole one."""
    platform = Platform("one", (make_processor("cpu0"),))
    plan = chain_plan(graph, every_layer(graph), ["cpu0"] * (len(every_layer(graph)) + 1))
    with LitertEvaluator().prepare(platform) as session, closing(loaded(session, graph, plan)) as candidate:
        candidate.run(1)
        assert there(candidate.verify()).identical
        return [np.array(a) for a in candidate.outputs()]


# Files


def test_inputs_are_read_by_name_or_by_position(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    np.savez_compressed(tmp_path / "b.npz", *ARRAYS.values())
    np.save(tmp_path / "c.npy", ARRAYS["image"])
    for name in ("a.npz", "b.npz"):
        assert same(read_inputs(tmp_path / name, PORTS), list(ARRAYS.values()))
    assert same(read_inputs(tmp_path / "c.npy", PORTS[:1]), [ARRAYS["image"]])


def test_inputs_that_do_not_fit_are_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for arrays in (
        {"image": ARRAYS["image"]},
        {**ARRAYS, "image": np.ones((3, 2), np.float32)},
        {**ARRAYS, "n": np.array(7, np.int64)},
        {**ARRAYS, "more": ARRAYS["n"]},
        {**ARRAYS, "n": np.array([None])},  # which only pickle could read
        {"image": np.zeros((1 << 12, 1 << 12), np.float32), "n": ARRAYS["n"]},
    ):
        np.savez_compressed(path, **arrays)
        with fails(UsageError) as caught:
            read_inputs(path, PORTS)
        assert str(caught.value).startswith(f"--input {path}: ")
        assert "\n" not in str(caught.value)
    with fails(UsageError):
        read_inputs(tmp_path / "none.npy", PORTS)
    with fails(UsageError):
        read_inputs(tmp_path, PORTS)


@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_a_damaged_file_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, npz: bool
) -> None:
    held = io.BytesIO()
    if npz:
        np.savez(held, **ARRAYS)
    else:
        np.save(held, ARRAYS["image"])
    content = held.getvalue()
    path = tmp_path_factory.mktemp("x") / "x.npz"
    path.write_bytes(content[:at] + noise + content[at + len(noise) :])
    found: list[Array] = []
    with suppress(UsageError):
        found = read_inputs(path, PORTS if npz else PORTS[:1])
    assert [a.shape for a in found] == [(2, 3), ()][: len(found)]


def test_a_zip_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("image.npy", b"\0" * (64 << 20))
    with fails(UsageError):
        read_inputs(tmp_path / "x.npz", PORTS)


# Drawn inputs


def test_quantised_inputs_take_their_whole_range(tmp_path: Path) -> None:
    net = Net()
    whole = net.input(dtype=TYPES.INT8, quantization=quantized(0.05))
    plain = net.input()
    small = net.op(
        "QUANTIZE", [plain], net.tensor(dtype=TYPES.INT8, quantization=quantized(0.5)), schema.QuantizeOptionsT()
    )
    made = net.tensor(dtype=TYPES.INT8, quantization=quantized(0.5))
    net.op("ADD", [whole, small], made, schema.AddOptionsT())
    graph = load(str(net.outputs(made).write(tmp_path / "m.tflite")))
    first, second = drawn_inputs(graph, 0)
    assert first.min() < -64
    assert first.max() > 63
    assert 20 < np.abs(second).max() <= 66


@pytest.mark.litert
def test_what_reshapes_an_index_hands_its_range_on(tmp_path: Path) -> None:
    net = Net()
    indices = net.input((2, 2), TYPES.INT32)
    flat = net.constant(np.array([4], np.int32))
    row = net.op("RESHAPE", [indices, flat], net.tensor([4], TYPES.INT32), schema.ReshapeOptionsT(newShape=[4]))
    table = net.constant(np.arange(6, dtype=np.float32).reshape(3, 2))
    net.outputs(net.op("GATHER", [table, row], net.tensor((4, 2)), schema.GatherOptionsT(axis=0)))
    graph = load(str(net.write(tmp_path / "m.tflite")))
    assert set(drawn_inputs(graph, 0)[0].ravel()) <= {0, 1, 2}
    run_alone(graph)


# What the interpreter runs


@pytest.mark.litert
def test_a_constant_output_that_operators_read_too(tmp_path: Path) -> None:
    net = Net()
    held = net.constant(np.arange(32, dtype=np.float32).reshape(SHAPE))
    x = net.op("RELU", [net.add(net.input(), held)])
    path = net.outputs(held, x).write(tmp_path / "m.tflite")
    graph = load(str(path))
    expected = interpreted(path, drawn_inputs(graph, 0))
    assert not isinstance(expected, str)
    assert same(run_alone(graph), expected)


@pytest.mark.litert
def test_an_operator_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    net = Net()
    x = net.op("RELU", [net.input()])
    net.outputs(net.op("RELU", [net.op("Mine", [x])]))
    graph = load(str(net.write(tmp_path / "m.tflite")))
    with fails(UnavailableError) as caught:
        run_alone(graph)
    assert "--custom-ops" in str(caught.value)
    net = Net()
    x = net.input((2, 6), TYPES.INT64)
    net.outputs(net.op("LOG", [net.op("ABS", [x], net.tensor((2, 6), TYPES.INT64))], net.tensor((2, 6), TYPES.INT64)))
    with fails(UnavailableError):
        run_alone(load(str(net.write(tmp_path / "n.tflite"))))


def test_open_sizes_are_those_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.outputs(net.op("RELU", [net.input((1, 6), shapeSignature=[-1, 6])], net.tensor((1, 6), shapeSignature=[-1, 6])))
    with caplog.at_level(logging.INFO, "partition_optimizer"):
        graph = load(str(net.write(tmp_path / "m.tflite")))
    assert [graph.tensors[t].shape for t in (*graph.inputs, *graph.outputs)] == [(1, 6), (1, 6)]
    says(caplog.messages[0])
    assert load(str(tmp_path / "m.tflite"), ("t0=4,6",)).tensors[graph.outputs[0]].shape == (4, 6)


# Options


def two_signatures(folder: Path) -> Path:
    """Return a model of which one signature doubles its input, and the other negates it."""
    net = Net()
    main_graph = net.graph
    x = net.input()
    net.outputs(net.add(x, x))
    net.body("second")
    net.outputs(net.op("NEG", [net.input((1, 3))], net.tensor((1, 3))))
    other, net.graph = net.graph, main_graph
    net.model.signatureDefs = []
    for number, (key, graph) in enumerate((("twice", main_graph), ("minus", other))):
        signature = schema.SignatureDefT(signatureKey=key, subgraphIndex=number)
        signature.inputs = [schema.TensorMapT(name="x", tensorIndex=int(graph.inputs[0]))]
        signature.outputs = [schema.TensorMapT(name="y", tensorIndex=int(graph.outputs[0]))]
        net.model.signatureDefs.append(signature)
    return net.write(folder / "m.tflite")


@pytest.mark.litert
def test_a_signature_is_chosen_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = two_signatures(tmp_path), tmp_path / "run"
    values = np.array([[1.0, -2.0, 3.0]], np.float32)
    np.save(tmp_path / "x.npy", values)
    command = ["--model", str(path), "--processors", "cpu0", "--budget", "2", "-q", "--out", str(out)]
    assert main([*command, "--signature", "minus", "--input", str(tmp_path / "x.npy")]) == 0
    with PlanRunner(out / "best") as runner:
        assert same(list(runner.run_seeded().values()), [-values])  # of the inputs that the study was given
        assert same(list(runner.run(runner.read(tmp_path / "x.npy")).values()), [-values])
    assert main(["inspect", str(path), "--signature", "minus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.rpartition("\n{")[2].join(["{", ""]))["totals"]["operators"] == 1
    tells(capsys, "inspect", str(path), "--signature", "none", code=2)
    np.save(tmp_path / "y.npy", np.zeros((2, 3), np.float32))
    tells(capsys, "execute", str(out), "--input", str(tmp_path / "y.npy"), code=2)


@pytest.mark.litert
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_kernels_of_custom_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = kernels(tmp_path)
    net = Net()
    x = net.input()
    path = net.outputs(net.op("RELU", [net.op("Twice", [net.op("RELU", [x])])])).write(tmp_path / "m.tflite")
    with fails(UsageError):
        load(str(path), custom_ops=library)
    out = tmp_path / "run"
    command = ["--model", str(path), "--processors", "cpu0,cpu1:builtin", "--budget", "3", "-q", "--out", str(out)]
    assert main([*command, "--custom-ops", str(library)]) in SEARCHED
    values = np.linspace(-1, 1, 32, dtype=np.float32).reshape(SHAPE)
    wanted = 2 * np.maximum(values, 0)
    with PlanRunner(out / "best", custom_ops=library) as runner:
        assert same(list(runner.run(values).values()), [wanted])
    assert main(["execute", str(out), "--custom-ops", str(library)]) == 0
    assert main(["compare", str(out), str(out), "--custom-ops", str(library), "-q"]) == 0
    capsys.readouterr()
    tells(capsys, "export", str(out))
    says((out / "export" / "README.md").read_text())
    assert " custom=Twice:1" in (out / "export" / "plan.txt").read_text()
    assert str(library) not in Path("/proc/self/maps").read_text()  # processes of their own have loaded it
    with fails(StartError):
        RunPlan(out / "export")
    shutil.copy(library, out / "export" / CUSTOM_OPS)
    with RunPlan(out / "export") as plan:
        assert same(list(plan.run(values).values()), [wanted])
    capsys.readouterr()
    tells(capsys, "execute", str(out), code=4)
    allow(str(tmp_path / "ops.c"))
    with fails(UnavailableError):
        run_alone(load(str(path), custom_ops=tmp_path / "ops.c"))
    assert main(["execute", str(out), "--custom-ops", str(tmp_path / "ops.c")]) == 4
    says(capsys.readouterr().err.splitlines()[-1])


@pytest.mark.litert
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_an_operator_whose_kernel_a_library_lacks_is_named(tmp_path: Path) -> None:
    library = kernels(tmp_path)
    net = Net()
    x = net.op("Twice", [net.op("RELU", [net.input()])])
    path = net.outputs(net.op("Twice", [net.op("Other-Op", [net.op("RELU", [x])])])).write(tmp_path / "m.tflite")
    allow(str(library))
    with fails(UnavailableError) as caught:
        run_alone(load(str(path), custom_ops=library))
    assert "--custom-ops" in caught.value.hint


def test_rewritten_models_keep_inputs_and_kernels(tmp_path: Path) -> None:
    graph = load("squeezenet1_1@0.25/64")
    given, library = (np.ones(graph.tensors[graph.inputs[0]].shape, np.float32),), tmp_path / "libops.so"
    graph = replace(graph, source=replace(there(graph.source), given=given, custom_ops=library))
    sides = (Share("height", 0, 15), Share("height", 15, 31))
    stages = [Stage((0,), processor, share) for processor, share in zip(("cpu0", "cpu1"), sides, strict=True)]
    plan = Plan(graph.digest, (*stages, Stage(tuple(range(1, len(graph.operators))), "cpu0")))
    lowered = there(Lowering(graph).lower(plan).graph.source)
    assert lowered.rewritten
    assert (lowered.given, lowered.custom_ops) == (given, library)


@pytest.mark.litert
def test_several_inputs_are_given_by_name_with_or_without_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net()
    path = net.outputs(net.add(net.input(name="camera:0"), net.input(name="lidar:0"))).write(tmp_path / "m.tflite")
    camera, lidar = np.full(SHAPE, 1, np.float32), np.full(SHAPE, 2, np.float32)
    np.savez(tmp_path / "x.npz", camera=camera, lidar=lidar)
    out = tmp_path / "run"
    command = [str(path), "--processors", "cpu0", "--budget", "2", "-q", "--input", str(tmp_path / "x.npz")]
    assert main([*command, "--out", str(out)]) in SEARCHED
    says(capsys.readouterr().out.rpartition("runner = ")[2])
    with PlanRunner(out / "best") as runner:
        for given in ({"camera": camera, "lidar:0": lidar}, {"camera:0": camera, "lidar": lidar}, [camera, lidar]):
            assert same(list(runner.run(given).values()), [camera + lidar])
        with fails(UsageError):
            runner.run({"camera": camera, "camera:0": camera, "lidar": lidar})
        with fails(UsageError):
            runner.run({"radar": camera, "lidar": lidar})


@pytest.mark.litert
def test_given_inputs_that_do_not_fit_name_the_operator(tmp_path: Path) -> None:
    net = Net()
    x, k = net.input((1, 20)), net.input((), TYPES.INT32)
    values, indices = net.tensor((1, 3)), net.tensor((1, 3), TYPES.INT32)
    net.op("TOPK_V2", [net.op("NEG", [x], net.tensor((1, 20))), k], [values, indices], schema.TopKV2OptionsT())
    path = net.outputs(values, indices).write(tmp_path / "m.tflite")
    np.savez(tmp_path / "x.npz", t0=np.zeros((1, 20), np.float32), t1=np.array(1 << 30, np.int32))
    with fails(UnavailableError):
        run_alone(load(str(path), inputs=tmp_path / "x.npz"))


@pytest.mark.litert
def test_operators_of_tensorflow_are_told_as_such(tmp_path: Path) -> None:
    net = Net()
    net.outputs(net.op("RELU", [net.op("FlexErf", [net.input()])]))
    with fails(UnavailableError):
        run_alone(load(str(net.write(tmp_path / "m.tflite"))))


@pytest.mark.litert
def test_a_signature_of_another_rank_is_not_looked_at(tmp_path: Path) -> None:
    net = Net()
    net.outputs(net.op("NEG", [net.input((1, 8), shapeSignature=[-1, -1, -1])], net.tensor((1, 8))))
    path = net.write(tmp_path / "m.tflite")
    graph = load(str(path))
    expected = interpreted(path, drawn_inputs(graph, 0))
    assert not isinstance(expected, str)
    assert same(run_alone(graph), expected)
