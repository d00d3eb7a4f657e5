"""The reader, and what follows it, on 20,000 damaged models and on files that are no models at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.core.errors import ModelError
from search_spaces.models import load
from search_spaces.models.flatbuffer import IDENTIFIER
from tests.faults.fuzz_reader import CASE_S, Tally, corpus, examine


def test_what_is_damaged_is_whole_to_begin_with(tmp_path: Path) -> None:
    tally = Tally()
    for content in corpus(tmp_path):
        (tmp_path / "m.tflite").write_bytes(content)
        for memory in (False, True):  # the first one imports what it needs
            examine(tmp_path / "m.tflite", tally, memory=memory)
    assert (tally.read, tally.refused) == (12, 0)


def test_every_length_of_a_file(tmp_path: Path) -> None:
    content, tally, path = corpus(tmp_path)[0], Tally(), tmp_path / "m.tflite"
    for length in range(0, len(content), 16):
        path.write_bytes(content[:length])
        examine(path, tally)
    assert tally.read == 0


def _sparse(path: Path) -> None:
    """4 GB of nothing behind the identifier."""
    with path.open("wb") as file:
        file.write(b"\x10\0\0\0" + IDENTIFIER)
        file.truncate(4 << 30)


def _sparse_behind_a_model(path: Path) -> None:
    path.write_bytes(corpus(path.parent)[0][:-16])
    os.truncate(path, 4 << 30)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x10\0\0\0TFL2" + bytes(100)),
        lambda path: path.write_bytes(IDENTIFIER),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        Path.exists,
        _sparse,
    ],
    ids=["folder", "fifo", "empty", "identifier", "short", "loop", "device", "missing", "sparse"],
)
def test_what_is_no_model_is_one_line(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "m.tflite"
    make(path)
    begin = time.process_time()
    with pytest.raises(ModelError) as caught:
        load(str(path))
    assert time.process_time() - begin < CASE_S
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [_sparse, _sparse_behind_a_model], ids=["noise", "model"])
def test_four_gigabytes_of_nothing_take_no_memory(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "m.tflite")
    program = """
import pathlib, resource, sys, time
from search_spaces.core.errors import ModelError
from search_spaces.models.litert import read_model
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    read_model(pathlib.Path(sys.argv[1]))
except ModelError:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, time.process_time() - begin)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.tflite")], capture_output=True, text=True, check=True
    )
    nbytes, took_s = map(float, done.stdout.split())
    assert nbytes < 64e6
    assert took_s < CASE_S
