"""No file of a plan, however strange, does more than raise one line of an error of ours."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators.litert import PlanRunner
from evaluators.litert.deployment import read_deployment
from evaluators.litert.processors import local_platform
from search_spaces.core.errors import OptimizeError, PlanError, UnavailableError, UsageError
from search_spaces.core.graph import Graph
from tests.support.models.litert_loading import three_stages
from tests.support.sentences import fails

pytestmark = pytest.mark.litert


@pytest.fixture(scope="module")
def folder(squeezenet: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_stages(tmp_path_factory.mktemp("plan"), squeezenet, local_platform())


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "plan.json").read_text())
    edit(document)
    (folder / "plan.json").write_text(json.dumps(document))


def reseal(folder: Path) -> None:
    """Give the plan the digests of whatever files are there, as someone with bad intent would."""
    document = json.loads((folder / "plan.json").read_text())
    for entry in document["files"]:
        entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    (folder / "plan.json").write_text(json.dumps(document))


def refuse(path: Path, kind: type[OptimizeError] = PlanError) -> None:
    with fails(kind) as caught:
        PlanRunner(path)
    assert "\n" not in str(caught.value)


def runs_or_refuses(path: Path) -> None:
    problem = ""
    try:
        with PlanRunner(path) as runner:
            runner.run_seeded()
    except (UsageError, UnavailableError) as error:
        problem = str(error)
    assert "\n" not in problem


def test_a_folder_or_its_plan_name_the_same(folder: Path) -> None:
    one, other = read_deployment(folder), read_deployment(folder / "plan.json")
    assert (one.plan, one.graph, one.platform) == (other.plan, other.graph, other.platform)


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing" / "plan.json")
    refuse(tmp_path)
    refuse(tmp_path / "a\0b")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuse(tmp_path / "loop")


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    refuse(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"17", b'"plan"', b"{}", b"[" * 200_000, b'{"a":' * 100_000, b"NaN"],
)
def test_what_is_no_plan(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    refuse(tmp_path)


def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.write(b"[")
        file.truncate(100 << 20)
    tracemalloc.start()
    try:
        refuse(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        "../copy/stage_0.tflite",
        "/etc/passwd",
        "stage_0.tflite/../stage_0.tflite",
        "stage_0.tflite\n",
        "",
        "stage_٣.tflite",
    ],
)
def test_names_that_lead_elsewhere(broken: Path, name: str) -> None:
    change(broken, lambda d: d["files"][0].update(file=name))
    refuse(broken)


@pytest.mark.parametrize("runs", [[[[5, 11]]], [[[0, 4]]], [[[0, 12]]], [[[0, 5], [6, 11]]]])
def test_stages_hold_each_operator_once(broken: Path, runs: list[list[list[int]]]) -> None:
    change(broken, lambda d: [stage.update(operators=r) for stage, r in zip(d["stages"], runs, strict=False)])
    refuse(broken)


def test_a_wrong_digest(broken: Path) -> None:
    change(broken, lambda d: d["files"][1].update(sha256="0" * 64))
    refuse(broken)


def test_a_stage_file_that_is_missing(broken: Path) -> None:
    (broken / "stage_1.tflite").unlink()
    refuse(broken)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_truncated_stage_file(broken: Path, sealed: bool) -> None:
    file = broken / "stage_1.tflite"
    content = file.read_bytes()
    for nbytes in (0, 7, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:nbytes])
        if sealed:
            reseal(broken)
        refuse(broken)


@pytest.mark.parametrize("sealed", [False, True])
def test_swapped_stage_files(broken: Path, sealed: bool) -> None:
    (broken / "stage_0.tflite").rename(broken / "x")
    (broken / "stage_1.tflite").rename(broken / "stage_0.tflite")
    (broken / "x").rename(broken / "stage_1.tflite")
    if sealed:
        reseal(broken)
    refuse(broken)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_in_a_sealed_stage_file_crash_a_worker_at_worst(data: st.DataObject, broken: Path) -> None:
    file = broken / "stage_2.tflite"
    original = file.read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(4000, len(content) - 1)))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        reseal(broken)
        runs_or_refuses(broken)
    finally:
        file.write_bytes(original)


def set_option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        document["platform"]["processors"][0]["options"][name] = value

    return edit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cores", []),
        ("cores", [-1]),
        ("cores", [10**30]),
        ("cores", ["a"]),
        ("cores", None),
        ("threads", 0),
        ("threads", -3),
        ("threads", 100_000),
        ("threads", 10**30),
        ("threads", "many"),
        ("kernels", 'x"\nweight_cache_file_path = "/tmp/x'),
        ("kernels", {}),
    ],
)
def test_processors_that_cannot_be(broken: Path, name: str, value: Any) -> None:
    change(broken, set_option(name, value))
    refuse(broken, OptimizeError)


def test_cores_that_this_machine_lacks(broken: Path) -> None:
    change(broken, set_option("cores", [4321]))
    refuse(broken, UnavailableError)


def test_a_newer_version(broken: Path) -> None:
    change(broken, lambda d: d.update(schema_version=99))
    refuse(broken)


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30]),
    st.sampled_from([float("nan"), float("inf"), -0.5, 1e308]),
    st.sampled_from(["", "cpu", "cpu0", "float64", "object", "string", "stage_0.tflite", "a\nb", "\0", "gpu", "../x"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.sampled_from(["name", "cores", "file"]), st.integers(-1, 3), max_size=2),
)


@st.composite
def edits(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A plan with some of its values replaced, removed or doubled."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        node: Any = changed
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 5)):
                node = node[key]
                continue
            how = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
            if how == "replace":
                node[key] = draw(ODD)
            elif how == "remove":
                del node[key]
            elif isinstance(node, list):
                node.insert(key, copy.deepcopy(node[key]))
            break
    return changed


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_plan_runs_or_raises_one_line(data: st.DataObject, broken: Path, folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    (broken / "plan.json").write_text(json.dumps(data.draw(edits(document))))
    runs_or_refuses(broken)


def test_a_stage_file_that_is_a_pipe_does_not_hang(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "stage_0.tflite").unlink()
    os.mkfifo(copy / "stage_0.tflite")
    with fails(PlanError):
        read_deployment(copy)
