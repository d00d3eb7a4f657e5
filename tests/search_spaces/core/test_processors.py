"""Names of processors, platform files, and which processors a study gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.litert.processor_names import MAX_CORE, ProcessorName, parse_cores, parse_processor
from evaluators.litert.processors import make_processor, usable_cores
from evaluators.litert.session import LitertEvaluator
from evaluators.litert.settings import tolerance
from evaluators.testing import SyntheticEvaluator
from optimizer.devices import choose_platform
from search_spaces.core import platform_file
from search_spaces.core.errors import OptimizeError, UnavailableError, UsageError
from search_spaces.core.platform import Limits, Link, Platform, Processor, tell_apart
from search_spaces.core.platform_file import MAX_NBYTES, find_platform_file, read_platform
from tests.support.sentences import fails, says

CORES = usable_cores()


@given(st.text(max_size=30))
def test_any_text_is_a_processor_or_one_line(text: str) -> None:
    problem = ""
    try:
        parse_processor(text)
    except UsageError as error:
        problem = str(error)
    assert "\n" not in problem


@given(st.sets(st.integers(0, 40), min_size=1, max_size=12))
def test_cores_are_read_however_they_are_grouped(cores: set[int]) -> None:
    assert parse_cores("+".join(map(str, cores))) == tuple(sorted(cores))
    low, high = min(cores), max(cores)
    assert parse_cores(f"{low}-{high}") == tuple(range(low, high + 1))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cpu", ProcessorName("cpu")),
        ("cpu2", ProcessorName("cpu", cores=(2,))),
        ("cpu0-2+5:threads=2", ProcessorName("cpu", cores=(0, 1, 2, 5), threads=2)),
        ("cpu1:builtin", ProcessorName("cpu", cores=(1,), kernels="builtin")),
        ("cpu:threads=3:reference", ProcessorName("cpu", threads=3, kernels="reference")),
        (
            "cpu0-1:threads=2:openvino",
            ProcessorName("cpu", cores=(0, 1), threads=2, runtime="openvino", precision="f32"),
        ),
        ("cpu:openvino-bf16", ProcessorName("cpu", runtime="openvino", precision="bf16")),
        ("cpu:openvino:blocked", ProcessorName("cpu", kernels="blocked", runtime="openvino", precision="f32")),
        ("cpu0:memory=400MB:builtin", ProcessorName("cpu", (0,), kernels="builtin", memory_nbytes=400_000_000)),
        ("igpu:openvino", ProcessorName("gpu", runtime="openvino", precision="f32", integrated=True)),
        ("gpu:openvino-f16", ProcessorName("gpu", runtime="openvino", precision="f16")),
        ("npu:openvino", ProcessorName("npu", runtime="openvino", precision="f16")),
        ("gpu", ProcessorName("gpu", precision="f16")),
        ("gpu:f32:swiftshader", ProcessorName("gpu", precision="f32", adapter="swiftshader")),
        ("gpu4-6:swiftshader", ProcessorName("gpu", cores=(4, 5, 6), precision="f16", adapter="swiftshader")),
        (
            "gpu4+6+cpu:swiftshader",
            ProcessorName("gpu", cores=(4, 6), precision="f16", adapter="swiftshader", fallback=True),
        ),
        ("gpu+cpu:NVIDIA H200", ProcessorName("gpu", precision="f16", adapter="NVIDIA H200", fallback=True)),
        ("npu", ProcessorName("npu")),
        ("npu+cpu:/opt/sdk", ProcessorName("npu", folder="/opt/sdk", fallback=True)),
    ],
)
def test_names_of_processors(text: str, wanted: ProcessorName) -> None:
    assert parse_processor(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tpu",
        "cpu-1",
        "cpu3-1",
        "cpu0+0",
        f"cpu{MAX_CORE}",
        "cpu0:threads=2",
        "cpu0:threads=0",
        "cpu0:fast",
        "cpu0:builtin:builtin",
        "gpu0",
        "gpu0:f32",
        "gpu0:openvino",
        "gpu0+cpu:f32",
        "cpu0+cpu",
        "npu0:x",
        "gpu:f16:f32",
        "gpu:",
        "npu:a:b",
        "cpu0:openvino:builtin",
        "cpu0:openvino:openvino-bf16",
        "cpu0:openvino-f8",
        "igpu",
        "igpu:openvino-bf16",
        "npu:openvino-f16",
        "cpu0:blocked",
        "cpu0:tflite-runtime:blocked",
        "cpu0:openvino-bf16:blocked",
        "cpu0:memory=400",
        "cpu0:memory=0MB",
        "cpu0:memory=1GB:memory=1GB",
        "gpu:memory=400MB",
    ],
)
def test_names_that_are_wrong(text: str) -> None:
    with fails(UsageError):
        parse_processor(text)


def test_a_processor_of_cores() -> None:
    processor = make_processor(f"cpu{CORES[0]}:builtin")
    assert processor.resources == {f"core{CORES[0]}": 1.0}
    assert processor.options == {"cores": (CORES[0],), "threads": 1, "kernels": "builtin"}
    everything = make_processor("cpu")
    assert everything.options["cores"] == tuple(CORES)
    assert everything.excludes(processor)
    assert processor.like != make_processor(f"cpu{CORES[0]}").like


def test_cores_that_are_not_there_or_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with fails(UsageError) as absent:
        make_processor("cpu4321")
    assert absent.value.exit_code == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {77})
    with fails(UnavailableError) as other:
        make_processor("cpu0")
    assert other.value.exit_code == 4


def processor(name: str, like: str, *resources: str) -> Processor:
    return Processor(name, "cpu", dict.fromkeys(resources, 1.0), like)


def likes(*processors: Processor) -> list[str]:
    return [p.like for p in tell_apart(processors)]


def test_processors_are_alike_only_if_they_exclude_the_same_processors() -> None:
    a, b, c = processor("a", "x", "0"), processor("b", "x", "1"), processor("c", "x", "2")
    assert len(set(likes(a, b, c))) == 1
    assert len(set(likes(a, b, c, processor("all", "y", "0", "1", "2")))) == 2
    found = likes(a, b, c, processor("pair", "y", "0", "1"))
    assert found[0] == found[1] != found[2]
    chain = likes(processor("a", "x", "0", "1"), processor("b", "x", "1", "2"), processor("c", "x", "2", "3"))
    assert len(set(chain)) == 3


@given(
    st.permutations(
        [processor("a", "x", "0"), processor("b", "x", "1"), processor("p", "y", "0", "9"), processor("q", "y", "8")]
    )
)
def test_telling_apart_changes_nothing_else(processors: list[Processor]) -> None:
    found = tell_apart(processors)
    assert [(p.name, p.resources) for p in found] == [(p.name, p.resources) for p in processors]
    assert tell_apart(found) == found


def test_unlike_processors_may_differ_a_little() -> None:
    plain, other = make_processor("cpu"), make_processor("cpu:builtin")
    half = Processor("gpu", "gpu", {"g": 1.0}, "g", {"precision": "f16"})
    whole = Processor("gpu:f32", "gpu", {"g": 1.0}, "g32", {"precision": "f32"})
    assert tolerance([plain], plain) == 0.0
    assert tolerance([plain, other], plain) == tolerance([whole], plain) == 1e-4
    assert tolerance([plain, half], plain) == 5e-2


def test_the_study_gets_what_is_named() -> None:
    names = [f"cpu{CORES[-1]}:builtin", f"cpu{CORES[0]}"]
    found = choose_platform(LitertEvaluator(), names)
    assert [p.name for p in found.processors] == names
    assert choose_platform(LitertEvaluator()).processors
    with fails(UsageError):
        choose_platform(LitertEvaluator(), ["tpu"])
    with fails(UsageError):
        choose_platform(SyntheticEvaluator(), allow_fallback=True)
    with fails(UsageError):
        choose_platform(SyntheticEvaluator(), ["cpu0-3"])


# Platforms by name


def test_a_file_counts_before_a_name_and_a_path_stands_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for name in ("pixel-9", "jetson-orin"):
        (shipped / f"{name}.yaml").write_text(f"name: {name}\nprocessors:\n  - {{name: big, kind: cpu}}\n")
    monkeypatch.setattr(platform_file, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    assert platform_file.platform_names() == ["jetson-orin", "pixel-9"]
    assert find_platform_file(Path("pixel-9")) == shipped / "pixel-9.yaml"
    assert choose_platform(SyntheticEvaluator(), file=Path("pixel-9")).name == "pixel-9"
    for path in ("pixel-9.yaml", "a/pixel-9", "../pixel-9", "missing.yml"):
        assert find_platform_file(Path(path)) == Path(path)
    with fails(UsageError):
        find_platform_file(Path("pixel-8"))
    (shipped / "mine.yaml").touch()
    with fails(UsageError):
        find_platform_file(Path("qqqqq"))
    (tmp_path / "pixel-9").write_text("name: mine\nprocessors:\n  - {name: big, kind: cpu}\n")
    assert choose_platform(SyntheticEvaluator(), file=Path("pixel-9")).name == "mine"


@given(st.text(min_size=1, max_size=300) | st.sampled_from([*platform_file.platform_names(), "x" * 5000, "tests"]))
def test_any_text_is_a_platform_or_one_line(text: str) -> None:
    """Drawn text may name a platform that ships with the product, as ``s10`` does, or a file that is there."""
    found, problem = None, ""
    try:
        found = choose_platform(SyntheticEvaluator(), file=Path(text))
    except UsageError as error:
        problem = str(error)
    if found is None:
        assert len(problem.splitlines()) == 1
        assert text not in platform_file.platform_names()
    else:
        assert found.processors
        assert Path(text).is_file() or str(Path(text)) in platform_file.platform_names()


# Platform files

WHOLE = """
name: my laptop
processors:
  - name: big
    processor: cpu{core}
    resources: {{memory: 0.6}}
  - {{name: cpu, resources: {{memory: 0.5}}}}
  - name: dsp
    kind: npu
    like: dsp v68
    options: {{clock_hz: 1.2e+9, units: 4, wide: true, cores: [1, 2]}}
links:
  - {{between: [big, dsp], bandwidth_bytes_per_s: 4.0e+9, latency_s: 2.0e-5}}
limits: {{load_s: 60, run_s: 5}}
"""


def test_a_platform_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(WHOLE.format(core=CORES[0]))
    found = read_platform(path, make_processor)
    assert found.name == "my laptop"
    big, _, dsp = found.processors
    assert big.options == {"cores": (CORES[0],), "threads": 1}
    assert big.resources == {f"core{CORES[0]}": 1.0, "memory": 0.6}
    assert dsp.options == {"clock_hz": 1.2e9, "units": 4, "wide": True, "cores": [1, 2]}
    assert dsp.resources == {"dsp": 1.0}
    assert found.links == (Link(("big", "dsp"), 4e9, 2e-5),)
    assert found.limits == Limits(60.0, 5.0)
    assert found.to_json()["links"][0]["between"] == ["big", "dsp"]
    assert not found.restrict(["big"]).links
    chosen = choose_platform(LitertEvaluator(), ["big"], path)
    assert [p.name for p in chosen.processors] == ["big"]


def test_resources_in_common_exclude(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "processors:\n- {name: a, kind: cpu, resources: {m: 0.6}}\n- {name: b, kind: gpu, resources: {m: 0.5}}\n"
    )
    a, b = read_platform(path, None).processors
    assert a.excludes(b)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "- a",
        "name: x",
        "name: x\nprocesors: []",
        "processors: []",
        "processors:\n- nmae: a",
        "processors:\n- processor: cpu",
        "processors:\n- name: cpu0\n  processor: cpu4321",
        "processors:\n- name: x",
        "processors:\n- name: x\n  kind: tpu",
        "processors:\n- name: x\n  kind: cpu\n  processor: cpu",
        "processors:\n- name: cpu\n  like: y",
        "processors:\n- {name: a, kind: cpu}\n- {name: a, kind: cpu}",
        "processors:\n- {name: cpu, name: cpu}",
        "processors:\n- name: cpu\n  resources: {m: 2}",
        "processors:\n- name: cpu\n  resources: {m: .nan}",
        "processors:\n- {name: x, kind: npu, options: {a: {b: c}}}",
        "processors:\n- name: cpu\nlimits: {run_s: soon}",
        "processors:\n- name: cpu\nlinks:\n- between: [cpu]",
        "processors: &a\n- *a",
        "processors: [[",
        "a: \0",
        "[" * 100_000,
        "!!python/object/apply:os.system ['true']",
        "processors:\n- {name: !!int '', kind: cpu}",
        "#" * (MAX_NBYTES + 1),
    ],
)
def test_wrong_platform_files_are_one_line_with_the_place(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_platform(path, make_processor)
    assert str(caught.value).startswith(str(path))
    says(str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.yaml", ".", "\0"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        read_platform(tmp_path / name, None)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_platform_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    problem = ""
    try:
        assert isinstance(read_platform(path, None), Platform)
    except OptimizeError as error:
        problem = str(error)
    assert "\n" not in problem
