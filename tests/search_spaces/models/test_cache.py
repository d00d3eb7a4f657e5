"""A cached file is built once, checked each time, and never served damaged."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.core.errors import UsageError
from search_spaces.models import load
from search_spaces.models.cache import ENVIRONMENT, cache_dir, cached
from search_spaces.models.zoo import VERSION
from tests.support.narrowing import there
from tests.support.sentences import fails

CONTENT = b"weights" * 1000


class Build:
    """Writes the content and counts how often."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.count = 0
        self._content = content

    def __call__(self, path: Path) -> None:
        self.count += 1
        path.write_bytes(self._content)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_built_once(folder: Path) -> None:
    build = Build()
    path = cached("m", 1, build)
    assert path == cached("m", 1, build) == folder / "models" / "m.v1.tflite"
    assert path.read_bytes() == CONTENT
    assert build.count == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.v1.lock", "m.v1.tflite", "m.v1.tflite.sha256.json"]


def test_names_and_versions_are_kept_apart(folder: Path) -> None:
    build = Build()
    assert len({cached(name, version, build) for name in "ab" for version in (1, 2)}) == 4
    assert build.count == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "side gone", "side cut", "side other", "side strange"])
def test_damage_is_noticed_reported_and_repaired(folder: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    build = Build()
    path = cached("m", 1, build)
    side = path.with_name(f"{path.name}.sha256.json")
    changes: dict[str, Callable[[], object]] = {
        "flip": lambda: path.write_bytes(b"W" + CONTENT[1:]),
        "cut": lambda: path.write_bytes(CONTENT[:-1]),
        "grow": lambda: path.write_bytes(CONTENT + b"w"),
        "side gone": side.unlink,
        "side cut": lambda: side.write_bytes(side.read_bytes()[:20]),
        "side other": lambda: side.write_text('{"schema_version": 99}'),
        "side strange": lambda: side.write_bytes(b"[\xff"),
    }
    changes[damage]()
    with caplog.at_level(logging.WARNING, "partition_optimizer"):
        assert cached("m", 1, build).read_bytes() == CONTENT
    assert build.count == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "\n" not in caplog.text.strip()
    assert cached("m", 1, build) == path
    assert build.count == 2


def test_an_entry_that_is_gone_is_built_without_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = Build()
    cached("m", 1, build).unlink()
    cached("m", 1, build)
    assert build.count == 2
    assert not caplog.records


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("m", 1, fail)
    assert [p.name for p in (folder / "models").iterdir()] == ["m.v1.lock"]


def slowly(path: Path) -> None:
    path.write_bytes(CONTENT[:100])
    (path.parent.parent / f"started.{os.getpid()}").touch()
    time.sleep(0.3)
    path.write_bytes(CONTENT)


def in_child() -> None:
    assert cached("m", 1, slowly).read_bytes() == CONTENT


def started(folder: Path) -> list[Path]:
    return list((folder / "models").glob("started.*"))


@pytest.mark.timing
def test_processes_at_once_build_once(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=in_child) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [c.exitcode for c in children] == [0, 0, 0]
    assert len(started(folder)) == 1


def for_ever(path: Path) -> None:
    path.write_bytes(CONTENT[:100])
    (path.parent.parent / f"started.{os.getpid()}").touch()
    threading.Event().wait()


def never_built() -> None:
    cached("m", 1, for_ever)


def test_a_killed_build_is_started_anew_and_cleared_away(folder: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=never_built)
    child.start()
    while not started(folder):
        time.sleep(0.01)
    os.kill(there(child.pid), signal.SIGKILL)
    child.join()
    assert (folder / "models" / "m.v1.building").exists()
    assert cached("m", 1, Build()).read_bytes() == CONTENT
    assert not (folder / "models" / "m.v1.building").exists()


def test_a_folder_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file" / "cache"))
    with fails(UsageError):
        cached("m", 1, Build())


def test_a_full_disk_names_the_variable(folder: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with fails(UsageError):
        cached("m", 1, full)


def test_a_model_that_the_disk_does_not_take_names_the_variable(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with fails(UsageError):
            load("squeezenet1_1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (folder / "models").iterdir()] == [f"squeezenet1_1.v{VERSION}.lock"]


def test_a_folder_that_may_only_be_read_serves_what_it_has(folder: Path) -> None:
    path = cached("m", 1, Build())
    lock = path.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, not even by root
    assert cached("m", 1, Build()) == path


def test_the_folder_without_the_variable_is_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "partition-optimizer"
    assert not cache_dir().exists()
