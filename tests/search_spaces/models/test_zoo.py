"""The zoo's models have the published parameters and work, are valid, run, and can be cut into stages."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.cli import main
from optimizer.tools.models import summarise
from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs, parameter_total, unknown_kinds
from search_spaces.core.platform import Platform, Processor
from search_spaces.models import load
from search_spaces.models.zoo import VERSION, ZOO, draft
from search_spaces.models.zoo.builder import eights, whole
from search_spaces.models.zoo.names import parse_name
from search_spaces.spaces.chain import ChainSpace
from tests.support.commands import answered
from tests.support.models.stage_models import same
from tests.support.models.tflite_models import plain_interpreter, run_pieces, some_inputs, whole_model
from tests.support.sentences import fails, says

# Parameters and multiply-accumulates (10⁹) as published, the operators of our model, and where they are published.
# torchvision: num_params and GFLOPS of the models' pages, which count multiply-accumulates; its parameters hold two
# numbers a channel for batch normalisation, which are folded into biases here (at most 0.5 % less).
PUBLISHED = {
    "alexnet": (61_100_840, 0.714, 13, "torchvision"),
    "densenet121": (7_978_856, 2.834, 311, "torchvision"),
    # 4,652,008: Keras Hub, with batch normalisation. The authors' 407 million operations are not multiply-accumulates
    # alone, so the count is that of the paper's table 1, below.
    "efficientnet_lite0": (4_652_008, 0.3852, 62, "Keras Hub; arXiv:1905.11946, table 1"),
    "fast_style_transfer": (1_677_638, 38.751, 184, "CoDL's list of operators (csu-eis/CoDL); counted below"),
    "googlenet": (6_624_904, 1.498, 83, "torchvision, without auxiliary classifiers"),
    "inception_v3": (27_161_264 - 3_326_696, 5.713, 125, "torchvision, less the auxiliary classifier"),
    # Of 512 positions, 128 remain. The paper gives 25.3 million and 5.7 billion operations (2.85 multiply-accumulates)
    # without saying what they hold; the configuration has 3 % and 5 % less.
    "mobilebert": (24_581_888 - 384 * 512, 2.693, 1217, "the checkpoint's configuration; counted below"),
    "mobilenet_v1": (4_240_000, 0.569, 31, "arXiv:1704.04861, table 4; parameters of slim's table of checkpoints"),
    "mobilenet_v2": (3_504_872, 0.300, 66, "torchvision; arXiv:1801.04381, table 4"),
    "mobilenet_v3_large": (5_483_032, 0.217, 134, "torchvision"),
    "posenet": (17_518_847, 30.162, 36, "CoDL's list of operators; counted below"),
    "regnet_y_32gf": (145_046_770, 32.280, 193, "torchvision"),
    "resnet18": (11_689_512, 1.814, 37, "torchvision"),
    "resnet50": (25_557_032, 4.089, 78, "torchvision"),
    "resnet101": (44_549_160, 7.801, 146, "torchvision"),
    "resnet152": (60_192_808, 11.514, 214, "torchvision"),
    "retinaface": (36_866_266, 92.857, 140, "CoDL's list of operators; counted below"),
    "squeezenet1_0": (1_248_424, 0.819, 39, "torchvision"),
    "squeezenet1_1": (1_235_496, 0.349, 39, "torchvision"),
    "vgg11": (132_863_336, 7.609, 17, "torchvision"),
    "vgg16": (138_357_544, 15.470, 22, "torchvision"),
    "vgg19": (143_667_240, 19.632, 25, "torchvision"),
    "vit_b16": (86_567_656, 17.564, 510, "torchvision"),
    # yolov2.weights is 203,934,260 bytes: 20 of header, float32, three more numbers a channel for batch normalisation.
    # 62.94 billion operations, two a multiply-accumulate, are published for images of 608 by 608.
    "yolov2": (203_934_240 // 4, 31.47 * (416 / 608) ** 2, 52, "darknet"),
}
# Small enough to build and run in a blink.
SMALL = {
    "alexnet": "@0.125/67",
    "fast_style_transfer": "@0.25/32x64",
    "inception_v3": "@0.125/80",
    "mobilebert": "@0.25/16",
    "regnet_y_32gf": "@0.125/64",
    "retinaface": "@0.125/64x128",
    "vit_b16": "@0.125/32x48",
    "vgg16": "@0.125/64",
}
PLATFORM = Platform("one", (Processor("cpu", "cpu", {}, "cpu"),))


def small(name: str) -> str:
    return name + SMALL.get(name, "@0.25/64")


@pytest.fixture(scope="module")
def graphs(cache_folder: Path) -> dict[str, Graph]:
    """Every model, small."""
    return {name: load(small(name)) for name in ZOO}


# What is published


@pytest.mark.parametrize("name", ZOO)
def test_parameters_and_work_are_those_published(name: str) -> None:
    parameters, giga_macs, operators, _ = PUBLISHED[name]
    graph = draft(name).graph()
    assert parameter_total(graph) == pytest.approx(parameters, rel=0.01)
    assert sum(cost.macs for cost in operator_costs(graph)) == pytest.approx(giga_macs * 1e9, rel=0.01)
    assert len(graph.operators) == operators
    assert unknown_kinds(graph) == {}


def convolutions(rows: list[tuple[int, int, int, int]]) -> tuple[int, float]:
    """Return parameters and 10⁹ MACs of convolutions: pixels they give, channels in and out, size of the filter."""
    parameters = sum(k * k * i * o + o for _, i, o, k in rows)
    return parameters, sum(pixels * k * k * i * o for pixels, i, o, k in rows) / 1e9


def test_posenet_is_what_codl_lists() -> None:
    """Class PosenetBuilder of its repository: sizes there include the padding."""
    sides = {256: [3, 64, 64], 128: [64, 128, 128], 64: [128, 256, 256, 256, 256]}
    rows = [(s * s, i, o, 3) for s, chain in sides.items() for i, o in pairwise(chain)]
    chain = [256, 512, 512, 256, 256, 256, 256, 128]
    rows += [(32 * 32, i, o, 3) for i, o in pairwise(chain)]
    rows += [(32 * 32, 128, 512, 1), (32 * 32, 512, 21, 1)]
    for _ in range(2):
        rows += [(32 * 32, i, 128, 7) for i in (149, 128, 128, 128, 128)]
        rows += [(32 * 32, 128, 128, 1), (32 * 32, 128, 21, 1)]
    assert convolutions(rows) == pytest.approx(PUBLISHED["posenet"][:2], rel=0.001)


def test_retinaface_is_what_codl_lists() -> None:
    """Class RetinaFaceBuilder there, with the shortcuts' projections and the coarsest level, which it leaves out."""
    rows = [(320 * 320, 3, 64, 7)]
    side, into = 160, 64
    for filters, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        rows.append((side * side, into, 4 * filters, 1))
        for block in range(1, blocks + 1):
            rows.append((side * side, into, filters, 1))
            side, into = side // 2 if block == blocks and filters < 512 else side, 4 * filters
            rows += [(side * side, filters, filters, 3), (side * side, filters, into, 1)]
    rows += [(20 * 20, 2048, 256, 1), (10 * 10, 2048, 256, 3)]
    rows += [(side * side, into, 256, 1) for side, into in ((40, 512), (80, 256), (160, 256))]
    rows += [(side * side, 256, 256, 3) for side in (40, 80, 160)]
    rows += [(side * side, 256, o, 3) for side in (160, 80, 40, 20, 10) for o in (128, 64, 64, 256, 12, 6)]
    assert convolutions(rows) == pytest.approx(PUBLISHED["retinaface"][:2], rel=0.001)


def test_style_transfer_is_what_codl_lists() -> None:
    """Class FastStyleTransferBuilder of its repository, and the two transposed convolutions that it leaves out."""
    full, half, quarter = 480 * 640, 240 * 320, 120 * 160
    rows = [(full, 3, 32, 9), (half, 32, 64, 3), (quarter, 64, 128, 3), *[(quarter, 128, 128, 3)] * 10]
    rows += [(quarter, 128, 64, 3), (half, 64, 32, 3), (full, 32, 3, 9)]  # transposed: by the pixels they read
    parameters, macs = convolutions(rows)
    # Scale and shift of each channel in the place of a bias.
    parameters += sum(o for _, _, o, _ in rows)
    assert (parameters, macs) == pytest.approx(PUBLISHED["fast_style_transfer"][:2], rel=0.001)


def test_efficientnet_is_the_papers_table_without_squeeze_and_excite() -> None:
    macs = 112 * 112 * 27 * 32 + 49 * 320 * 1280 + 1280 * 1000
    side, into = 112, 32
    table = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
    )
    for expansion, out, count, first, kernel in (*table, (6, 320, 1, 1, 3)):
        for number in range(count):
            inner = into * expansion
            macs += side * side * into * inner * (expansion > 1)
            side = side if number else side // first
            macs += side * side * (kernel * kernel * inner + inner * out)
            into = out
    assert macs == pytest.approx(PUBLISHED["efficientnet_lite0"][1] * 1e9, rel=0.001)


def test_mobilebert_is_its_published_configuration() -> None:
    """24 layers; hidden 512, bottleneck 128, 4 heads, 4 feed-forward networks; trigrams of embeddings of 128."""
    tokens = 128
    matrices = 3 * 512 * 128 + 2 * 128 * 128 + 128 * 128 + 8 * 128 * 512 + 128 * 512
    scores = 2 * tokens * tokens * 128
    macs = 24 * (tokens * matrices + scores) + tokens * 384 * 512
    # A bias follows each matrix; scale and shift follow the bottlenecks, attention, the networks and the way back.
    vectors = 4 * 3 * 128 + 4 * (512 + 3 * 128) + 3 * 512
    parameters = 24 * (matrices + vectors) + 30522 * 128 + 384 * 512 + (tokens + 2) * 512 + 3 * 512
    assert (parameters, macs / 1e9) == pytest.approx(PUBLISHED["mobilebert"][:2], rel=0.0001)


@pytest.mark.parametrize(
    ("name", "macs_share"),
    [("mobilenet_v1@0.5", 149 / 569), ("mobilenet_v1@0.25", 41 / 569), ("mobilenet_v1/128", 186 / 569)],
)
def test_narrow_and_small_mobilenets_do_the_papers_work(name: str, macs_share: float) -> None:
    """Tables 6 and 7 of arXiv:1704.04861."""
    assert summarise(name).macs / summarise("mobilenet_v1").macs == pytest.approx(macs_share, rel=0.01)


def test_seed_004_widths_exist_and_grow() -> None:
    steps = {"vgg16": (0.125, 1.0), "resnet50": (0.125, 1.5), "mobilenet_v1": (0.25, 3.0), "googlenet": (0.25, 1.0)}
    for name, (step, last) in steps.items():
        widths = np.arange(step, last + step / 2, step)
        macs = [summarise(f"{name}@{width:g}").macs for width in widths]
        assert macs == sorted(set(macs))
        # Convolutions between hidden layers grow with the square, the first and the last with the width itself.
        assert macs[-1] / macs[0] < (last / step) ** 2


@given(st.floats(0.5, 5000))
def test_channels_are_rounded_as_stated(channels: float) -> None:
    assert abs(whole(channels) - channels) <= 0.5
    assert eights(channels) % 8 == 0
    assert eights(channels) >= max(8, 0.9 * channels)
    assert eights(channels) < max(8.1, channels + 12)


# Valid files


@pytest.mark.parametrize("name", ZOO)
def test_a_draft_is_what_reading_its_file_gives(name: str, graphs: dict[str, Graph]) -> None:
    drafted = draft(small(name))
    graph = graphs[name]
    assert graph.source is not None
    assert drafted.graph() == graph
    assert drafted.graph().digest == graph.digest
    assert drafted.nbytes == graph.source.nbytes == graph.source.path.stat().st_size
    assert sum(prod(w.shape) for w in drafted.weights.values()) <= parameter_total(graph)


@pytest.mark.litert
@pytest.mark.parametrize("name", ZOO)
def test_a_model_runs_and_its_output_depends_on_its_input(name: str, graphs: dict[str, Graph]) -> None:
    graph = graphs[name]
    interpreter = plain_interpreter(graph)
    results = []
    for seed in (1, 2):
        for index, values in some_inputs(graph, seed).items():
            interpreter.set_tensor(index, values)
        interpreter.invoke()
        results.append(interpreter.get_tensor(graph.outputs[0]))
    assert not np.array_equal(*results)
    # Shapes as the runtime computes them, and values that neither die out nor blow up.
    for index in graph.activation_tensors:
        values = interpreter.get_tensor(index)
        assert values.shape == graph.tensors[index].shape
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 1e3 or name == "mobilebert"  # its mask is −10,000
        assert values.size == 1 or values.std() > 0 or values.dtype == np.int32 or "mask" in graph.tensors[index].name


@pytest.mark.litert
@pytest.mark.parametrize("name", ZOO)
def test_random_stages_compute_what_the_whole_computes(name: str, graphs: dict[str, Graph], tmp_path: Path) -> None:
    graph = graphs[name]
    space = ChainSpace(graph, PLATFORM, 4)
    random = np.random.default_rng(len(graph.operators))
    for _ in range(2):
        plan = space.plan_at(int(random.integers(space.cardinality())))
        same(graph, [s.operators for s in plan.stages], tmp_path)


@pytest.mark.parametrize("name", ZOO)
def test_the_least_size_and_width_leave_something_of_each_tensor(name: str) -> None:
    entry = ZOO[name]
    size = "x".join(str(entry.smallest) for _ in entry.size)
    graph = draft(f"{name}@0.125/{size}").graph()
    assert all(min(t.shape, default=1) > 0 for t in graph.tensors)


def test_a_model_of_more_than_two_gigabytes_is_refused_before_its_weights_are_made() -> None:
    with fails(ModelError):
        load("vgg16@4")


def test_other_sizes_are_valid_too(cache_folder: Path) -> None:
    for name in ("squeezenet1_1/97x64", "resnet18@0.25/75", "mobilenet_v2@0.25/33x65", "vgg11@0.125/100"):
        graph = load(name)
        (found,) = run_pieces(whole_model(graph), some_inputs(graph))
        assert found[graph.outputs[0]].sum() == pytest.approx(1, abs=1e-5)


# The command


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = answered(capsys, ["models"])
    assert [m["name"] for m in listed["models"]] == list(ZOO)
    vgg = next(m for m in listed["models"] if m["name"] == "vgg16")
    assert vgg["nbytes"] == pytest.approx(553_434_912, rel=1e-5)  # of the file that seed 000 measured: 553.4 MB
    assert (vgg["parameters"], vgg["operators"], vgg["variants"]) == (138_357_544, 22, ["int8", "f16"])
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ZOO)
    assert max(map(len, text.splitlines())) <= 110
    assert main(["models", "resnet50@1.5/192", "vgg11"]) == 0
    assert "resnet50@1.5/192" in capsys.readouterr().out


def test_a_wrong_name_to_list_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("resnet5", "vgg16:int8", "vgg16@9"):
        assert main(["models", wrong]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        says(captured.err)
        assert captured.err.count("\n") == 1


def test_a_changed_model_has_a_new_version() -> None:
    """Files in caches are used until the version is raised."""
    digest = sha256()
    for name in ZOO:
        drafted = draft(name)
        weights = [(w.name, w.shape, f"{w.std:.6g}", w.mean) for w in drafted.weights.values()]
        operators = [(o.kind, o.inputs, o.outputs, sorted(o.options.items())) for o in drafted.graph().operators]
        digest.update(repr((name, weights, operators)).encode())
    assert (VERSION, digest.hexdigest()[:16]) == (3, "daf8d47548f52feb")


def test_every_name_has_a_module_and_a_published_figure() -> None:
    assert PUBLISHED.keys() == ZOO.keys()
    assert all(parse_name(name).canonical == name for name in ZOO)
