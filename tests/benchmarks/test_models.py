"""Building, reading and cutting large models: VGG16 read in 0.3 s and 100 MB, ResNet152 listed in 1 s."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from search_spaces.core.graph import Graph
from search_spaces.core.intensity import operator_costs
from search_spaces.models import load
from search_spaces.models.litert import read_model
from search_spaces.models.stages import cut_stage
from search_spaces.models.zoo import draft
from search_spaces.spaces.cuts import cut_points

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


@pytest.mark.parametrize("name", ["resnet152", "densenet121"])
def test_read_and_list(benchmark: BenchmarkFixture, name: str) -> None:
    """Hundreds of operators read, costed, and their cut points listed: at most 1 s."""
    path = _path(load(name))

    def listed() -> int:
        graph = read_model(path)
        return len(operator_costs(graph)) + len(cut_points(graph))

    assert benchmark(listed) > 300
    assert _timed(benchmark).stats.stats.median < 1


def test_cut_every_operator(benchmark: BenchmarkFixture) -> None:
    """What loading the plan "every layer" pays before anything is compiled: 214 stages, without their weights."""
    graph = load("resnet152")

    def views() -> int:
        return sum(len(cut_stage(graph, [i]).view()) for i in range(len(graph.operators)))

    assert benchmark(views) > 0
    assert _timed(benchmark).stats.stats.median < 1


def test_write_a_stage(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The 494 MB of VGG16's last layers: at most three times what writing and digesting their bytes takes."""
    graph = load("vgg16")
    stage = cut_stage(graph, range(18, 22))
    assert stage.weight_nbytes > 490e6
    path = tmp_path / "stage.tflite"
    _timed(benchmark).pedantic(stage.write, args=(path,), rounds=3)
    content = path.read_bytes()
    begin = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hashlib.sha256(content).hexdigest()
    plain_s = time.perf_counter() - begin
    path.unlink()  # pytest keeps the folder
    assert _timed(benchmark).stats.stats.min < 3 * plain_s


def _timed(benchmark: Any) -> Any:
    """Return the fixture itself; its ``pedantic`` and ``stats`` have no types."""
    return benchmark


def _path(graph: Graph) -> Path:
    assert graph.source is not None
    return graph.source.path
