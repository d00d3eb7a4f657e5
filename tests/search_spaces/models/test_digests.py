"""Digests of files: never that of what the file held before."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_spaces.models import files as digests
from search_spaces.models.files import file_digest


def _age(path: Path, seconds: float) -> None:
    """Make a file look as if it had been written so long ago; its change time stays."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(max_size=64), min_size=1, max_size=6))
def test_a_digest_is_that_of_the_content_however_often_the_file_changes(contents: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in contents:
        path.write_bytes(content)
        assert file_digest(path) == file_digest(path) == hashlib.sha256(content).hexdigest()


def test_a_file_that_stays_as_it_is_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    time.sleep(0.15)
    first = file_digest(path)
    with path.open("rb") as file:
        stamp = digests._stamp(file.fileno())
    assert digests._known[os.path.realpath(path)] == (stamp, first)
    digests._known[os.path.realpath(path)] = (stamp, "known")
    assert file_digest(path) == "known"


def test_a_change_that_keeps_size_and_modification_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    _age(path, 10)
    time.sleep(0.15)
    file_digest(path)
    stamp = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file_digest(path) == hashlib.sha256(b"WEIGHTS").hexdigest()


def test_a_file_that_was_just_written_is_not_taken_as_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    took_ns = digests._SETTLED_NS
    while took_ns >= digests._SETTLED_NS:  # a busy machine may have us wait until the file has settled
        digests._known.pop(os.path.realpath(path), None)
        path.write_bytes(b"weights")
        stamp = path.stat()
        file_digest(path)
        took_ns = time.time_ns() - stamp.st_ctime_ns
    assert os.path.realpath(path) not in digests._known
