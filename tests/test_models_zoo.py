"""The zoo's models have the published shapes and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from search_spaces.errors import ModelError
from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.models.zoo import ZOO, draft
from search_spaces.models.zoo.builder import Builder

# Parameters as published, batch normalisation folded: torchvision's model pages (VGG, SqueezeNet); MobileNet v1 is
# the 4.2 million of its paper's table 8, here with the 1001 classes of the hosted file.
PARAMETERS = {
    "mobilenet_v1": 4_200_000,
    "squeezenet1_1": 1_235_496,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
OPERATORS = {"mobilenet_v1": 31, "squeezenet1_1": 39, "vgg11": 17, "vgg16": 22, "vgg19": 25}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_parameters_are_those_published(name: str) -> None:
    assert draft(name).parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    assert len(draft(name).schema.subgraphs[0].operators) == OPERATORS[name]


@pytest.mark.litert
@pytest.mark.parametrize("model", ["squeezenet", "mobilenet"])
def test_a_model_runs_and_its_output_depends_on_its_input(model: str, request: pytest.FixtureRequest) -> None:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    graph: Graph = request.getfixturevalue(model)
    assert graph.source is not None
    interpreter = Interpreter(
        str(graph.source.path),
        experimental_preserve_all_tensors=True,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    (given,) = interpreter.get_input_details()
    (result,) = interpreter.get_output_details()
    outputs = []
    for seed in (1, 2):
        interpreter.set_tensor(given["index"], np.random.default_rng(seed).random(given["shape"], np.float32))
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(result["index"]))
        assert outputs[-1].sum() == pytest.approx(1, abs=1e-5)
    assert not np.array_equal(*outputs)
    # Shapes as the runtime computes them, and values that neither die out nor blow up.
    for index in graph.activation_tensors:
        values = interpreter.get_tensor(index)
        assert values.shape == graph.tensors[index].shape
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 1e3
        assert values.std() > 0


@pytest.mark.litert
def test_a_matrix_product_takes_four_dimensions(tmp_path: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter

    net = Builder("fc")
    drafted = net.finish(net.fully_connected(net.input((1, 2, 3, 4)), 5, "fc"))
    drafted.write(tmp_path / "fc.tflite")
    interpreter = Interpreter(str(tmp_path / "fc.tflite"))
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.ones((1, 2, 3, 4), np.float32))
    interpreter.invoke()
    assert interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).shape == (1, 5)


def test_the_same_bytes_each_time(squeezenet: Graph, tmp_path: Path) -> None:
    draft("squeezenet1_1").write(tmp_path / "again.tflite")
    assert squeezenet.source is not None
    assert (tmp_path / "again.tflite").read_bytes() == squeezenet.source.path.read_bytes()


def test_a_weight_depends_on_its_name_alone(tmp_path: Path) -> None:
    def kernels(order: str) -> dict[str, bytes]:
        net = Builder("order")
        x = net.input((1, 8))
        outputs = [net.fully_connected(x, 4, name) for name in order]
        net.finish(*outputs).write(tmp_path / "order.tflite")
        graph = load(str(tmp_path / "order.tflite"))
        assert graph.source is not None
        content = graph.source.path.read_bytes()
        extents = graph.source.extents
        return {t.name: content[extents[t.buffer].offset :][: t.nbytes] for t in graph.tensors if t.constant}

    assert kernels("abc") == kernels("cab")
    assert len(set(kernels("abc").values())) == 6


def test_weights_are_he_normal(mobilenet: Graph) -> None:
    assert mobilenet.source is not None
    tensor = next(t for t in mobilenet.tensors if t.name == "conv13_pointwise/kernel")
    extent = mobilenet.source.extents[tensor.buffer]
    weights = np.fromfile(mobilenet.source.path, np.float32, extent.nbytes // 4, offset=extent.offset)
    assert weights.std() == pytest.approx((2 / 1024) ** 0.5, rel=0.01)
    assert weights.mean() == pytest.approx(0, abs=1e-4)


# Names


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("vgg61", "did you mean vgg"),
        ("VGG16", "did you mean vgg16"),
        ("mobilenet", "did you mean mobilenet_v1"),
        ("squeeznet", "did you mean squeezenet1_1"),
        ("xyz", "one of: mobilenet_v1, squeezenet1_1"),
        ("", "give a .tflite file"),
    ],
)
def test_an_unknown_name_gets_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        load(wrong)


@pytest.mark.parametrize("source", ["missing.tflite", "./vgg16", "no/such/folder/m.tflite", "a\0b.tflite"])
def test_a_path_to_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no such file|cannot be read"):
        load(source)


def test_a_path_is_read(squeezenet: Graph) -> None:
    assert squeezenet.source is not None
    graph = load(str(squeezenet.source.path))
    assert graph.digest == squeezenet.digest
    assert graph.name == "squeezenet1_1.v1"
    assert squeezenet.name == "squeezenet1_1"
