"""Building and reading VGG16 (553 MB): at most 20 s; at most 0.3 s and 100 MB above the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from search_spaces.graph import Graph
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.zoo import draft

_MEMORY = """
import pathlib, resource, sys
from search_spaces.models.litert import read_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
graph = read_model(pathlib.Path(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_build_vgg16(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    path = tmp_path / "vgg16.tflite"
    _timed(benchmark).pedantic(draft("vgg16").write, args=(path,), rounds=1)
    nbytes = path.stat().st_size
    path.unlink()  # pytest keeps the folder
    assert 553.4e6 <= nbytes < 553.5e6
    assert _timed(benchmark).stats.stats.max < 20


def test_read_vgg16(benchmark: BenchmarkFixture) -> None:
    path = _path(load("vgg16"))
    graph = benchmark(read_model, path)
    assert len(graph.operators) == 22
    assert _timed(benchmark).stats.stats.median < 0.3
    memory = subprocess.run([sys.executable, "-c", _MEMORY, str(path)], capture_output=True, text=True, check=True)
    assert int(memory.stdout) < 100e6
    benchmark.extra_info["nbytes_above_interpreter"] = int(memory.stdout)


def test_load_vgg16_from_the_cache(benchmark: BenchmarkFixture) -> None:
    """What a study pays at its start: the digest of the cached file, then reading."""
    load("vgg16")
    _timed(benchmark).pedantic(load, args=("vgg16",), rounds=3)
    assert _timed(benchmark).stats.stats.median < 1


def _timed(benchmark: Any) -> Any:
    """Return the fixture itself; its ``pedantic`` and ``stats`` have no types."""
    return benchmark


def _path(graph: Graph) -> Path:
    assert graph.source is not None
    return graph.source.path
