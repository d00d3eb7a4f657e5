"""Names of models: what they ask for, what is refused and how, and how they differ from paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.core.errors import ModelError
from search_spaces.core.graph import Graph
from search_spaces.models import load
from search_spaces.models.zoo.names import LARGEST, VARIANTS, ZOO, Spec, is_name, parse_name
from tests.support.narrowing import there
from tests.support.sentences import fails


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    name = draw(st.sampled_from(sorted(ZOO)))
    entry = ZOO[name]
    side = st.integers(-(-entry.smallest // entry.step), LARGEST // entry.step).map(lambda n: n * entry.step)
    return Spec(
        name,
        draw(st.integers(125, 4000)) / 1000,
        tuple(draw(side) for _ in entry.size),
        draw(st.booleans()),
        draw(st.sampled_from(["", *(v for v in VARIANTS if v != "int8" or not entry.int8)])),
    )


# Laws


@given(specs())
def test_a_canonical_name_asks_for_the_same(spec: Spec) -> None:
    assert parse_name(spec.canonical) == spec
    assert parse_name(spec.canonical).canonical == spec.canonical
    assert is_name(spec.canonical)


@given(specs(), specs())
def test_names_are_equal_where_models_are(a: Spec, b: Spec) -> None:
    assert (a.canonical == b.canonical) == (a == b)
    # The cache's files are named so.
    assert (a.canonical.replace("/", "-") == b.canonical.replace("/", "-")) == (a == b)


@given(st.text(max_size=20) | st.builds("".join, st.lists(st.sampled_from([*"@/+:.x0123456789-", "vgg16", "int8"]))))
def test_any_text_is_a_name_or_refused_in_one_line(text: str) -> None:
    refused = None
    try:
        spec = parse_name(text)
    except ModelError as error:
        refused = error
    if refused is None:
        assert parse_name(spec.canonical) == spec
    else:
        assert "\n" not in str(refused)
        assert refused.hint


# Examples


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("vgg16@1.0/224", "vgg16"),
        ("vgg16@1.000", "vgg16"),
        ("resnet50@1.50", "resnet50@1.5"),
        ("mobilenet_v1@0.5/192", "mobilenet_v1@0.5/192"),
        ("mobilenet_v1@0.5/192x192:int8", "mobilenet_v1@0.5/192:int8"),
        ("fast_style_transfer/480x640", "fast_style_transfer"),
        ("fast_style_transfer/256", "fast_style_transfer/256"),
        ("resnet152+spectrum:f16", "resnet152+spectrum:f16"),
        ("mobilebert/384", "mobilebert/384"),
        ("squeezenet1_1/00192", "squeezenet1_1/192"),
    ],
)
def test_equal_models_have_one_name(text: str, canonical: str) -> None:
    assert parse_name(text).canonical == canonical


def test_variants_share_the_float_models_weights() -> None:
    assert {parse_name(f"vgg16@0.5{v}").weights_name for v in ("", ":int8", ":f16")} == {"vgg16@0.5"}
    assert parse_name("vgg16+spectrum").weights_name != "vgg16"


@pytest.mark.parametrize(
    "wrong",
    [
        "vgg16@",
        "vgg16@0",
        "vgg16@0.1",
        "vgg16@4.001",
        "vgg16@0.12345",
        "vgg16@nan",
        "vgg16@1e0",
        "vgg16@٠.٥",
        "vgg16@0.5@0.5",
        "vgg16/0",
        "vgg16/99999",
        "vgg16/224x",
        "vgg16/224x224x3",
        "vgg16/224x2",
        "yolov2/417",
        "retinaface/608",
        "mobilebert/128x128",
        "vgg16+spectra",
        "vgg16:int4",
        "vgg16:",
        "vgg16:int8@0.5",
        "vit_b16:int8",
        "vgg61",
        "vgg61@0.5",
        "xyz",
    ],
)
def test_what_cannot_be_is_refused_with_what_can(wrong: str) -> None:
    with fails(ModelError):
        parse_name(wrong)


# Names and paths


@pytest.mark.parametrize(
    "wrong",
    [
        "vgg61",
        "VGG16",
        "mobilenet",
        "squeeznet",
        "xyz",
        "",
        "vgg16@9",
    ],
)
def test_an_unknown_name_gets_the_nearest(wrong: str) -> None:
    with fails(ModelError):
        load(wrong)


@pytest.mark.parametrize("source", ["missing.tflite", "./vgg16", "no/such/folder/m.tflite", "a\0b.tflite"])
def test_a_path_to_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fails(ModelError):
        load(source)


def test_a_path_is_read(squeezenet: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert squeezenet.source is not None
    graph = load(str(squeezenet.source.path))
    assert graph.digest == squeezenet.digest
    assert graph.name == squeezenet.source.path.stem
    assert squeezenet.name == "squeezenet1_1"
    # A folder called as a model is a folder.
    monkeypatch.chdir(tmp_path)
    Path("vgg16").mkdir()
    for name in ("vgg16/m.tflite", "vgg16/m"):
        Path(name).symlink_to(squeezenet.source.path)
        assert load(name).digest == squeezenet.digest


def test_one_file_for_all_spellings(cache_folder: Path) -> None:
    graphs = [load(name) for name in ("mobilenet_v1@0.25/64", "mobilenet_v1@0.250/64x64")]
    assert graphs[0].source is not None
    assert graphs[0].source.path == there(graphs[1].source).path
    assert graphs[0].source.path.parent == cache_folder / "models"
    assert graphs[1].name == "mobilenet_v1@0.25/64"
