"""A run folder is made, resumed, refused and recovered."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer import files
from optimizer.files import write_atomic, write_json
from optimizer.study.config import StudyConfig
from optimizer.study.folder import Identity, RunFolder, kept_budget, read_manifest
from optimizer.study.log import header
from search_spaces.core.errors import OptimizeError, RunFolderError
from tests.support.sentences import fails, says

DIGEST = "ab" * 32
FINGERPRINT = {"runtime": "2.3.0", "cores": [0, 1]}
CONFIG = StudyConfig(model="vgg16", budget=200, study="first")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def opened(config: StudyConfig = CONFIG, digest: str = DIGEST, **fingerprint: Any) -> RunFolder:
    return RunFolder.create_or_resume(
        config, Identity(digest), fingerprint=FINGERPRINT | fingerprint, command=["optimize", "--model", "vgg16"]
    )


def opened_on(processors: tuple[str, ...], config: StudyConfig = CONFIG, digest: str = DIGEST) -> RunFolder:
    RunFolder.check(config, Identity(digest, "", processors))  # refuses what opening refuses
    of = Identity(digest, "", processors)
    return RunFolder.create_or_resume(config, of, fingerprint=FINGERPRINT, command=["optimize"])


def changed(**values: Any) -> StudyConfig:
    return CONFIG.model_copy(update=values)


def test_a_new_folder_tells_who_what_and_how() -> None:
    with opened() as run:
        assert run.path == Path("runs/first")
        assert (run.study, run.resumed, run.changes) == ("first", False, ())
        says(run.resume_command)
    manifest = read_manifest(run.path)
    assert manifest is not None
    assert manifest["schema_version"] == 1
    assert (manifest["study"], manifest["seed"], manifest["budget"]) == ("first", 0, 200)
    assert manifest["command"] == ["optimize", "--model", "vgg16"]
    assert manifest["fixed"]["model_digest"] == DIGEST
    assert manifest["fingerprint"] == FINGERPRINT
    assert manifest["created_utc"].endswith("+00:00")
    assert manifest["packages"]["numpy"]
    assert manifest["machine"]["memory_bytes"] > 0
    assert set(manifest["machine"]) >= {"cpu", "cores", "kernel", "memory_bytes"}
    settings = yaml.safe_load((run.path / "config.yaml").read_text())
    assert settings.pop("schema_version") == 1
    assert StudyConfig.model_validate(settings) == run.config


def test_it_goes_on_where_it_was() -> None:
    with opened() as run:
        run.log.append("trial", {"latency_s": 0.1})
    with opened(changed(budget=300, precision=0.02), runtime="2.3.1") as again:
        assert again.resumed
        assert [r.data for r in again.contents.records] == [{"latency_s": 0.1}]
        says("\n".join(again.changes))
        assert again.log.append("trial", {}).n == 2
        says(again.resume_command)
    manifest = read_manifest(run.path)
    assert manifest is not None
    assert manifest["budget"] == 200
    assert [session["budget"] for session in manifest["resumed"]] == [300]
    assert yaml.safe_load((run.path / "config.yaml").read_text())["budget"] == 300


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 7), ("sampler", "random"), ("max_stages", 3), ("evaluator", "synthetic")],
)
def test_another_study_is_refused_with_both_values(name: str, value: object) -> None:
    opened().close()
    before = {p: p.read_bytes() for p in Path("runs/first").iterdir()}
    with fails(RunFolderError):
        opened(changed(**{name: value}))
    assert {p: p.read_bytes() for p in Path("runs/first").iterdir()} == before
    opened().close()  # the lock is free


def test_another_model_or_name_is_refused() -> None:
    opened().close()
    with fails(RunFolderError):
        opened(digest="cd" * 32)
    with fails(RunFolderError):
        opened(changed(study="second", out=Path("runs/first")))


def test_a_folder_of_ones_own() -> None:
    with opened(changed(study=None, out=Path("my run"))) as run:
        assert run.path == Path("my run")
        assert run.study.startswith("vgg16-")
    words = shlex.split(run.resume_command)
    assert words[-2:] == ["--out", "my run"]
    assert "--study" not in words
    shared = run.config.model_copy(update={"storage": "sqlite:///x.db"})  # others know the study by its name
    words = shlex.split(replace(run, config=shared).resume_command)
    assert words[words.index("--study") + 1] == run.study
    with opened(changed(study=None, out=Path("my run"))) as again:
        assert again.study == run.study


@pytest.mark.parametrize(("kinds", "kept"), [(["device"], False), (["device", "cut"], True), (["trial"], True)])
def test_a_failed_start_frees_the_name_unless_something_was_measured(kinds: list[str], kept: bool) -> None:
    run = opened()
    for kind in kinds:
        run.log.append(kind, {})
    run.__exit__(RunFolderError, None, None)
    assert run.path.exists() == kept


def test_studies_without_a_name_never_share_one() -> None:
    runs = [opened(changed(study=None, model="dir/my model.v2.tflite")) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path == Path("runs", run.study)
        assert run.study.startswith("my-model.v2-20")
        run.close()


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ("mobilenet_v1@0.5/192", "mobilenet_v1-0.5-192-2"),
        ("resnet50@0.25+spectrum:int8", "resnet50-0.25-spectrum-int8-2"),
        ("some/folder/my.net.tflite", "my.net-2"),
        ("vgg16/my.net.tflite", "my.net-2"),
        ("./vgg16", "vgg16-2"),
    ],
)
def test_a_study_without_a_name_is_called_as_its_model(model: str, start: str) -> None:
    with opened(changed(study=None, model=model)) as run:
        assert run.path.name.startswith(start)


def test_two_processes_do_not_share_a_folder() -> None:
    with opened(), fails(RunFolderError):
        opened()


def test_a_folder_killed_at_birth_is_usable() -> None:
    path = Path("runs/first")
    for leftovers in (
        {},
        {"trials.jsonl": b""},
        {"trials.jsonl": header()[:20]},
        {"trials.jsonl": header(), ".config.yaml.0123abcd.tmp": b"sch"},
        {"trials.jsonl": header(), "config.yaml": b"schema_version: 1", ".manifest.json.0123abcd.tmp": b"{"},
    ):
        path.mkdir(parents=True)
        for name, content in leftovers.items():
            (path / name).write_bytes(content)
        opened().close()
        assert {p.name for p in path.iterdir()} - {"trials.jsonl.damaged-1"} == {
            "config.yaml",
            "manifest.json",
            "trials.jsonl",
        }
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thesis.docx", b"text"),
        ("trials.jsonl", b'{"my": "data"}\n'),
        ("trials.jsonl", header() + b"more"),
        ("manifest.json", b'{"name": "a web page", "icons": []}'),
        ("manifest.json", b"[]"),
    ],
)
def test_a_folder_that_is_not_ours_is_left_alone(name: str, content: bytes) -> None:
    Path("theirs").mkdir()
    Path("theirs", name).write_bytes(content)
    with fails(RunFolderError) as caught:
        opened(changed(out=Path("theirs")))
    assert "\n" not in str(caught.value)
    assert [(p.name, p.read_bytes()) for p in Path("theirs").iterdir()] == [(name, content)]


def test_a_newer_version_is_refused_and_left_alone() -> None:
    opened().close()
    manifest = Path("runs/first/manifest.json")
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2', 1))
    Path("runs/first/trials.jsonl").write_text("another format\n")
    with fails(RunFolderError):
        opened()
    assert Path("runs/first/trials.jsonl").read_text() == "another format\n"


def test_a_damaged_manifest_is_one_line() -> None:
    opened().close()
    manifest = Path("runs/first/manifest.json")
    whole = manifest.read_bytes()
    for content in (
        b"",
        whole[:50],
        b"\xff" + whole,
        b"[" * 100_000,
        b'{"schema_version": 1}',
        b'{"schema_version": "1"}',
        b'{"schema_version": true}',
    ):
        manifest.write_bytes(content)
        with fails(RunFolderError) as caught:
            opened()
        assert "\n" not in str(caught.value)


def test_another_model_or_other_processors_are_reported_in_words() -> None:
    first = ("cpu (cores:1)", "cpu0 (core:1)")
    opened_on(first).close()
    for digest, processors in (
        ("cd" * 32, first),
        (DIGEST, ("cpu0 (core:1)",)),
        (DIGEST, ("cpu (cores:2)", "cpu0 (core:1)")),
        (DIGEST, (*first, "cpu:openvino (cores:1:openvino)")),  # a runtime that was installed meanwhile
    ):
        with fails(RunFolderError):
            opened_on(processors, digest=digest)
    for damaged in (False, True):  # a manifest that is made anew knows no processors: a subset is refused as before
        if damaged:
            with opened_on(first) as run:
                run.log.append("trial", {"plan": {"graph_digest": DIGEST}})
            Path("runs/first/manifest.json").write_text("{")
        with fails(RunFolderError):
            opened_on(("cpu0 (core:1)",), changed(processors=("cpu0",)))
    assert Path("runs/first/manifest.json").read_text() == "{"
    opened_on(first).close()
    opened_on(first, changed(processors=("cpu", "cpu0"))).close()


def test_a_place_is_checked_without_writing(tmp_path: Path) -> None:
    of = Identity(DIGEST)
    RunFolder.check(CONFIG, of)
    RunFolder.check(CONFIG.model_copy(update={"study": None}), of)
    assert not list(tmp_path.iterdir())
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/strange.txt").write_text("")
    Path("mine").mkdir(mode=0o500)
    for out in ("file", "file/deep", "full"):
        with fails(RunFolderError):
            RunFolder.check(changed(out=Path(out)), of)
    if os.geteuid():  # nothing is closed to root
        with fails(RunFolderError):
            RunFolder.check(changed(out=Path("mine/deep")), of)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b'{"schema_version": 1}'])
def test_a_damaged_manifest_does_not_cost_a_whole_log(content: bytes) -> None:
    with opened() as run:
        run.log.append("trial", {"plan": {"graph_digest": DIGEST}})
    manifest = Path("runs/first/manifest.json")
    manifest.write_bytes(content)
    before = {p: p.read_bytes() for p in Path("runs/first").iterdir()}
    with fails(RunFolderError):
        opened(digest="cd" * 32)
    with fails(RunFolderError):
        opened(changed(seed=7))
    assert {p: p.read_bytes() for p in Path("runs/first").iterdir()} == before
    with opened() as again:
        assert len(again.contents.records) == 1
        assert again.study == "first"
        says("\n".join(again.changes))
    assert Path("runs/first/manifest.json.damaged-1").read_bytes() == content
    with opened() as third:
        assert not third.changes


@pytest.mark.parametrize("out", ["file", "file/run", "dangling", "/proc/run", "a\0b", "x" * 300])
def test_a_place_that_cannot_be_is_one_line(out: str) -> None:
    Path("file").touch()
    Path("dangling").symlink_to("/proc/nowhere/x")
    with pytest.raises(RunFolderError) as caught:
        opened(changed(out=Path(out)))
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2


def test_a_file_named_runs_is_one_line() -> None:
    Path("runs").touch()
    for config in (CONFIG, changed(study=None)):
        with fails(RunFolderError):
            opened(config)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line() -> None:
    Path("locked").mkdir(mode=0o500)
    with fails(RunFolderError):
        opened(changed(out=Path("locked/run")))


def test_a_start_that_fails_lets_the_lock_go() -> None:
    Path("runs/first/config.yaml").mkdir(parents=True)
    with fails(RunFolderError):
        opened()
    Path("runs/first/config.yaml").rmdir()
    opened().close()


def test_a_full_disk_at_the_start_is_one_line() -> None:
    program = """
import resource
from optimizer.study.config import StudyConfig
from optimizer.study.folder import Identity, RunFolder
from search_spaces.core.errors import RunFolderError
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    config = StudyConfig(model="m", budget=1, study="first")
    RunFolder.create_or_resume(config, Identity(""), fingerprint={}, command=[])
except RunFolderError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("runs/first/")
    says(done.stdout)
    assert len(done.stdout.splitlines()) == 1
    opened().close()  # and the folder is usable once there is room


def test_files_are_replaced_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("best/plan.json")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    with fails(OptimizeError):
        write_json(path, {"a": float("nan")})

    def stop(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [("plan.json", b'{\n  "a": 1\n}\n')]
    assert files.is_temporary(".plan.json.0123abcd.tmp")
    assert not files.is_temporary("plan.json")


def test_a_study_that_resumes_keeps_its_budget_where_none_is_given(elsewhere: Path) -> None:
    assert kept_budget(None, None) is kept_budget("run", None) is kept_budget(None, "mine") is None
    for text, kept in (
        ("budget: 30", 30),
        ("budget: -1", None),
        ("budget: true", None),
        ("[", None),
        ("{}", None),
        ("budget: 0x" + 4500 * "f", None),
    ):
        Path("run").mkdir(exist_ok=True)
        Path("run/manifest.json").touch()
        Path("run/config.yaml").write_text(text)
        assert kept_budget("run", "mine") == kept
